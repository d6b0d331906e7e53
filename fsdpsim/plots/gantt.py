"""Draws rows of bars: two collections per row, so that ten thousand kernels take no seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from numpy.typing import NDArray

from fsdpsim.intervals import Interval, clip, union
from fsdpsim.plots.bars import HOST_ROW, Bar, Binding, Row
from fsdpsim.plots.columns import WIDTH, Floats, Spans, columns
from fsdpsim.plots.legend import Key, key_of
from fsdpsim.plots.style import HOST, INK, KINDS, QUIET, SMALL_SIZE, ink_on
from fsdpsim.plots.text import text_width
from fsdpsim.plots.view import View, last_begun
from fsdpsim.program import COMPUTE
from fsdpsim.units import show_seconds

BAR_HEIGHT = 0.62
"""Of the distance between rows."""

ROW_INCHES = 0.38
HEADROOM = 0.16
"""Share of a row above compute where it is the first one, for the numbers of units."""

TEXT_HALF = 0.17
"""Of the distance between rows: from the middle of a bar to the end of its text."""

EDGE = 3.0
"""Points (4 px at 96 per inch) from which a bar is set apart from the one before it."""

ALONE = 1.5
"""Points of free space beside a narrow bar that allow it an edge of its own colour."""

PADDING = 1.5
"""Points left free on either side of a text in a bar."""

NUMBERS_APART = 26.0
"""Points between unit numbers above bars that are too narrow for text."""


ITERATION_END = Key("end of an iteration", QUIET, line=(0, (2, 2)), width=0.7)

NUMBERED = (KINDS["forward"], KINDS["backward"])
GROUPED = (*NUMBERED, KINDS["recompute"], KINDS["optimizer"])


class Label(NamedTuple):
    """A text at (x, y) in the units of the axes."""

    x: float
    y: float
    text: str
    size: float
    colour: str


def draw(axes: Axes, view: View, rows: Sequence[Row], points: float) -> None:
    """Draw ``rows`` top to bottom on ``axes``, which are ``points`` wide on paper."""
    low, high = view.limits
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.5, -0.5 - _headroom(rows))
    axes.set_yticks(range(len(rows)), [_row_label(row.name) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    for y, row in enumerate(rows):
        _draw_row(axes, view, row, y, points / (high - low))
    _draw_iterations(axes, view)


def inches(rows: Sequence[Row]) -> float:
    """Height of the axes of ``rows``."""
    return ROW_INCHES * (len(rows) + _headroom(rows))


def _headroom(rows: Sequence[Row]) -> float:
    return HEADROOM if rows and rows[0].name == COMPUTE else 0.0


def keys(views: Sequence[View], charts: Sequence[Sequence[Row]]) -> list[Key]:
    """What the legend must explain, in the palette's order: the GPU's work, then the CPU's."""
    used = dict.fromkeys(bar.look for rows in charts for row in rows for bar in row.bars)
    known = [*KINDS.values(), *HOST.values()]
    found = [look for look in known if look in used] + [look for look in used if look not in known]
    ends = [ITERATION_END] if any(_ends(view) for view in views) else []
    return [*map(key_of, found), *ends]


def _row_label(name: str) -> str:
    return name if name == HOST_ROW or len(name) < 15 else name.replace("_copy", "\n_copy")


def _draw_row(axes: Axes, view: View, row: Row, y: int, per_unit: float) -> None:
    axes.axhline(y, color="#ededf0", linewidth=0.6, zorder=0.5)
    if row.bars:
        for collection in collections(view, row, y, per_unit):
            axes.add_collection(collection, autolim=False)
    elif not row.ticks:
        axes.text(*_absence(view, row, y), size=SMALL_SIZE, color=QUIET, va="center_baseline")
    _draw_ticks(axes, view, row, y)
    texts = labels(view, row, y, per_unit)
    axes.add_collection(_separators(view, row, y, per_unit, texts), autolim=False)
    for label in texts:
        axes.text(
            label.x,
            label.y,
            label.text,
            size=label.size,
            color=label.colour,
            ha="center",
            va="center_baseline",
            clip_on=True,
            zorder=4,
        )


def _absence(view: View, row: Row, y: int) -> tuple[float, float, str]:
    """Why a row is empty: the CPU may have issued all of it long before."""
    issued = [op.issued for op in view.result.ops if view.of_iteration(op.iteration)]
    last = max((time for time in issued if time is not None), default=view.end)
    text = f"issued all this {show_seconds(view.start - last)} earlier" if last < view.start else ""
    return view.x(view.start), y, f" {text}" if row.name == HOST_ROW else ""


def collections(view: View, row: Row, y: int, per_unit: float) -> list[PolyCollection]:
    """The bars of ``row`` as rectangles around ``y``, with ``per_unit`` points per axis unit.

    Last the columns of those too thin for a rectangle of their own: no row holds more rectangles
    than a few per pixel, whatever the number of its bars. What takes no time is drawn where it is
    alone.
    """
    palette = list(dict.fromkeys(bar.colour for bar in row.bars))
    colours = np.array([to_rgba(colour) for colour in palette])
    bars = Spans(
        np.array([view.x(bar.start) for bar in row.bars]),
        np.array([view.x(bar.end) for bar in row.bars]),
        np.array([palette.index(bar.colour) for bar in row.bars]),
    )
    alone = _alone(bars.left, bars.right, per_unit)
    wide = alone | ((bars.right - bars.left) * per_unit >= WIDTH)
    thin = (bars.right > bars.left) & ~wide
    own = bars.take(wide)
    found = [_rectangles(own.left, own.right, y, colours[own.colour], row.name, alone[wide])]
    if thin.any():
        drawn = columns(bars, thin, colours[:, :3], view.limits[0], WIDTH / per_unit)
        name = f"{row.name} columns"
        found.append(_rectangles(drawn.left, drawn.right, y, drawn.rgba, name))
    return found


def _rectangles(
    left: Floats,
    right: Floats,
    y: int,
    colours: Floats,
    name: str,
    edged: NDArray[np.bool_] | None = None,
) -> PolyCollection:
    """Filled rectangles around ``y``; those ``edged`` have an edge of their own colour."""
    corners = np.empty((len(left), 4, 2))
    corners[:, :2, 0], corners[:, 2:, 0] = left[:, None], right[:, None]
    corners[:, (0, 3), 1], corners[:, (1, 2), 1] = y - BAR_HEIGHT / 2, y + BAR_HEIGHT / 2
    edged = np.zeros(len(left), dtype=np.bool_) if edged is None else edged
    return PolyCollection(
        corners,  # type: ignore[arg-type]  # the fast path of matplotlib, which its types omit
        facecolors=colours,
        edgecolors=colours * edged[:, None],
        linewidths=np.where(edged, 0.35, 0.0),
        # Bars meet pixel by pixel: antialiased, the seams of many kernels would look like idleness.
        antialiaseds=edged,
        zorder=2,
        gid=name,
    )


def _separators(
    view: View, row: Row, y: int, per_unit: float, texts: Sequence[Label]
) -> LineCollection:
    """White lines where wide bars begin; before each of a dense row they would bleach it.

    They leave the middle of a bar to what is written there.
    """
    xs = [view.x(b.start) for b in row.bars if view.x(b.end) - view.x(b.start) >= EDGE / per_unit]
    spans = [(t.x, text_width(t.text, t.size) / 2 / per_unit) for t in texts if t.y == y]
    top, bottom = y - BAR_HEIGHT / 2, y + BAR_HEIGHT / 2
    lines = []
    for x in xs:
        written = any(abs(x - middle) <= half + 1 / per_unit for middle, half in spans)
        ends = [(top, y - TEXT_HALF), (y + TEXT_HALF, bottom)] if written else [(top, bottom)]
        lines += [((x, low), (x, high)) for low, high in ends]
    return LineCollection(lines, colors="white", linewidths=0.6, zorder=2.5, capstyle="butt")


def _alone(left: Floats, right: Floats, per_unit: float) -> NDArray[np.bool_]:
    """Narrow bars with free space beside them: an edge of their own colour keeps them visible."""
    free = (left[1:] - np.maximum.accumulate(right)[:-1]) * per_unit >= ALONE
    beside: NDArray[np.bool_] = np.append(True, free) | np.append(free, True)
    narrow: NDArray[np.bool_] = (right - left) * per_unit < EDGE
    return beside & narrow


def _draw_ticks(axes: Axes, view: View, row: Row, y: int) -> None:
    if row.ticks:
        xs = [view.x(time) for time in row.ticks]
        lines = [((x, y - 0.38), (x, y + 0.38)) for x in xs]
        ticks = LineCollection(lines, colors=INK, linewidths=0.8, zorder=3, gid=f"{row.name} ticks")
        axes.add_collection(ticks, autolim=False)


def _draw_iterations(axes: Axes, view: View) -> None:
    for end in _ends(view):
        key = ITERATION_END
        axes.axvline(view.x(end), color=key.colour, lw=key.width, ls=key.line, zorder=1)


def _ends(view: View) -> list[float]:
    """The end of each iteration that is not the end of the picture; none where memory ran out."""
    ends, last = view.result.iteration_ends, last_begun(view.result)
    whole = ends if view.result.memory.oom is None else ends[: last or 0]
    return [end for end in whole if view.start < end < view.end]


def draw_bindings(axes: Axes, view: View, rows: Sequence[Row], found: Sequence[Binding]) -> None:
    """An arrow for each wait that binds, from the row of what ended to that of what could begin."""
    at = {row.name: y for y, row in enumerate(rows)}
    lines, heads = [], {1: list[tuple[float, float]](), -1: list[tuple[float, float]]()}
    for binding in found:
        source, target, x = at[binding.source], at[binding.target], view.x(binding.time)
        way = 1 if target > source else -1
        tip = target - way * BAR_HEIGHT / 2
        lines.append(((x, source + way * BAR_HEIGHT / 2), (x, tip)))
        heads[way].append((x, tip))
    axes.add_collection(
        LineCollection(lines, colors=INK, linewidths=0.7, zorder=3, gid="bindings"), autolim=False
    )
    for way, tips in heads.items():
        if tips:
            xs, ys = zip(*tips, strict=True)
            axes.plot(xs, ys, "v" if way > 0 else "^", color=INK, markersize=3.2, zorder=3.5)


# ---- what is written on bars


def labels(view: View, row: Row, y: int, per_unit: float) -> list[Label]:
    """Texts that fit: kernels' names where most do, else units, else some units above the row."""
    groups = [list(run) for _, run in groupby(row.bars, key=_group_key)]
    groups = [group for group in groups if group[0].in_focus]
    names = [_names(view, group, y, per_unit) for group in groups]
    units = [
        None if named else _on_bar(view, group, _texts(view, group[0]), y, per_unit)
        for group, named in zip(groups, names, strict=True)
    ]
    found = [label for label in units if label is not None]
    if len(found) < len(groups):
        # A bare number here and there would look like a mistake, not like a label.
        found = [label for label in found if not label.text[0].isdigit()]
    if row.name == COMPUTE and _few(groups, units):
        found += _units_above(view, groups, y, per_unit)
    return found + [label for named in names for label in named]


class _GroupKey(NamedTuple):
    """Kernels of one unit and pass share a text; anything else has its own."""

    look: str
    unit: str
    in_focus: bool
    start: float | None


def _group_key(bar: Bar) -> _GroupKey:
    start = None if bar.look in GROUPED else bar.start
    return _GroupKey(bar.look.label, bar.unit, bar.in_focus, start)


def _few(groups: Sequence[Sequence[Bar]], texts: Sequence[Label | None]) -> bool:
    """Whether less than half of the forwards and backwards are labelled."""
    own = [t is not None for g, t in zip(groups, texts, strict=True) if g[0].look in NUMBERED]
    return 2 * sum(own) < len(own)


def _names(view: View, group: Sequence[Bar], y: int, per_unit: float) -> list[Label]:
    """The names of consecutive kernels of one unit, if those that fit cover half of their time."""
    if len(group) == 1:
        return []
    found = [(bar, _on_bar(view, (bar,), _kernel_names(bar), y, per_unit)) for bar in group]
    covered = sum(bar.end - bar.start for bar, label in found if label is not None)
    if 2 * covered < sum(bar.end - bar.start for bar in group):
        return []
    return [label for _, label in found if label is not None]


def _kernel_names(bar: Bar) -> list[str]:
    """The whole name, or what of it follows the module's."""
    return [bar.name, bar.name.partition(".")[2]]


def _on_bar(
    view: View, group: Sequence[Bar], texts: Sequence[str], y: int, per_unit: float
) -> Label | None:
    """The longest of ``texts`` that fits in what is visible of ``group`` without a gap."""
    start, end = _stretch(view, group, slack=view.time_unit[1] / per_unit)
    left, right = view.x(start), view.x(end)
    room = (right - left) * per_unit - 2 * PADDING
    for text in texts if room > 0 else ():
        if text and text_width(text, SMALL_SIZE) <= room:
            colour = ink_on(group[0].colour)
            return Label((left + right) / 2, y, text, SMALL_SIZE, colour)
    return None


def _stretch(view: View, group: Sequence[Bar], slack: float) -> Interval:
    """The longest time in view that ``group`` fills but for gaps of at most ``slack`` seconds."""
    filled = [(a, b - slack) for a, b in union((bar.start, bar.end + slack) for bar in group)]
    shown = clip(filled, (view.start, view.end))
    return max(shown, key=lambda span: span[1] - span[0], default=(view.start, view.start))


def _texts(view: View, bar: Bar) -> list[str]:
    """From the fullest to the shortest."""
    unit = view.short_names.get(bar.unit, bar.unit)
    if not bar.look.letter:
        return [bar.name.replace("_", " ")]
    if not unit:
        return [bar.look.label, bar.look.letter]
    if unit[0].isdigit():
        return [f"{bar.look.letter}{unit}", unit]
    return [f"{bar.look.letter} {unit}", unit, bar.look.letter]


def _units_above(
    view: View, groups: Sequence[Sequence[Bar]], y: int, per_unit: float
) -> Iterator[Label]:
    """Unit names above the row, as many as have room."""
    free_from = view.limits[0] + 2 / per_unit
    for group in groups:
        texts = _texts(view, group[0])
        x = view.x((group[0].start + group[-1].end) / 2)
        half = text_width(texts[0], 6.5) / 2 / per_unit
        if group[0].look not in NUMBERED or not group[0].unit or x - half < free_from:
            continue
        free_from = x + half + NUMBERS_APART / per_unit
        if x + half <= view.limits[1]:
            yield Label(x, y - BAR_HEIGHT / 2 - 0.13, texts[0], 6.5, QUIET)
