"""Time against memory of all points of a sweep, and which of them no other beats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from fsdpsim.plots.legend import Key
from fsdpsim.plots.sheet import Sheet, legend_room, place_legend
from fsdpsim.plots.style import KINDS, SMALL_SIZE, house_style
from fsdpsim.plots.view import TIME_UNITS
from fsdpsim.sweeps.grid import Grid
from fsdpsim.sweeps.pareto import MEMORY, ParetoFront, cost, objective
from fsdpsim.sweeps.row import Row, value_text

GIB = 2**30

Place = tuple[float, float]

#: So many points can each have its name beside it, of the values of so many keys.
MAX_NAMED = 12
MAX_KEYS = 3

#: Between the values in a name; a value may hold a comma.
SEPARATOR = " | "

#: Where a name may be, as seen from its point: (points to the right, points up), the best first.
SIDES = ((4, 4), (4, -4), (-4, 4), (-4, -4))


def pareto_figure(grid: Grid, rows: Sequence[Row]) -> Figure | None:
    """All points that fit, in time and peak memory; None where memory is not simulated."""
    figure = objective(grid.scenario, grid.keys)
    placed = [row for row in rows if cost(row, figure) is not None and row.figures[MEMORY]]
    if len(placed) < 2:
        return None
    front = ParetoFront(figure)
    for row in placed:
        front.add(row)
    with house_style():
        return _draw_pareto(grid, placed, list(front), len(rows) - len(placed))


def _draw_pareto(grid: Grid, rows: Sequence[Row], front: list[Row], lost: int) -> Figure:
    keys = [
        Key("no other point is as fast with less memory", KINDS["reduce_scatter"].colour),
        Key("the others", KINDS["copy"].colour),
    ]
    sheet = Sheet()
    sheet.title(f"{grid.scenario.title or grid.scenario.name}: time against memory")
    lost_words = f"; {lost} not shown: out of memory" if lost else ""
    sheet.note(f"{subtitle(grid)}  ·  {len(rows):,} points that fit{lost_words}")
    named = _named(rows, front)
    differing = _differing(grid, named)
    if differing:
        sheet.note(f"beside a point: {SEPARATOR.join(differing)}")
    legend_at = sheet.skip(legend_room(keys))
    sheet.skip(0.1)
    panel = sheet.panel(4.2)
    sheet.skip(0.42)
    figure = sheet.figure()
    place_legend(figure, keys, legend_at)
    assert panel.axes is not None
    places = _scatter(panel.axes, grid, rows, front)
    names = [
        (
            SEPARATOR.join(_short(value_text(row.settings[key])) for key in differing),
            places[row.point],
        )
        for row in named
    ]
    _name(panel.axes, names, [places[row.point] for row in front])
    return figure


def _named(rows: Sequence[Row], front: list[Row]) -> list[Row]:
    """The points that have a name, the more important first."""
    if len(rows) > MAX_NAMED:
        return front[:MAX_NAMED]
    best = {row.point for row in front}
    return [*front, *(row for row in rows if row.point not in best)]


def _short(text: str) -> str:
    return text if len(text) <= 18 else text[:17] + "…"


def _differing(grid: Grid, rows: Sequence[Row]) -> list[str]:
    """The first keys that set ``rows`` apart."""
    texts = {key: {json.dumps(r.settings[key], default=str) for r in rows} for key in grid.keys}
    return [key for key, own in texts.items() if len(own) > 1][:MAX_KEYS]


def _scatter(axes: Axes, grid: Grid, rows: Sequence[Row], front: list[Row]) -> dict[int, Place]:
    """Draw all points; returns where each is."""
    name = objective(grid.scenario, grid.keys)
    unit, seconds = _axis_of(rows, name)
    shown = {row.point for row in front}
    others = list(_places([row for row in rows if row.point not in shown], name, seconds))
    x, y = [place[0] for place in others], [place[1] for place in others]
    axes.scatter(x, y, s=14, color=KINDS["copy"].colour, lw=0, alpha=0.6)
    best = list(_places(front, name, seconds))
    x, y = [place[0] for place in best], [place[1] for place in best]
    axes.step(x, y, where="post", color=KINDS["reduce_scatter"].colour, lw=0.8)
    axes.scatter(x, y, s=22, color=KINDS["reduce_scatter"].colour, lw=0, zorder=3)
    times = [x for x, _ in (*others, *best)]
    if max(times) > 20 * min(times) > 0:
        axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.set_ylabel("peak reserved memory (GiB)")
    axes.set_ylim(0, 1.08 * max(y for _, y in (*others, *best)))
    _drop_last_tick(axes)
    axes.grid(True)
    return {row.point: at for row, at in zip(rows, _places(rows, name, seconds), strict=True)}


def _drop_last_tick(axes: Axes) -> None:
    """Without the tick in the corner, whose label would leave the page."""
    low, high = axes.get_xlim()
    if axes.get_xscale() == "linear":
        axes.set_xticks([x for x in axes.get_xticks() if low <= x < high - 0.02 * (high - low)])
        axes.set_xlim(low, high)


def _name(axes: Axes, names: Sequence[tuple[str, Place]], front: Sequence[Place]) -> None:
    """Write each name beside its point, inside the axes; none where it would cover anything."""
    taken = [_box(axes, [place], 6) for _, place in names]
    for (x, y), (after, below) in pairwise(front):
        taken += [_box(axes, [(x, y), (after, y)], 1), _box(axes, [(after, y), (after, below)], 1)]
    for text, place in names:
        for side in SIDES:
            name = _beside(axes, text, place, side)
            box = name.get_window_extent()
            if _within(axes, box) and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            name.remove()


def _beside(axes: Axes, text: str, place: Place, side: tuple[int, int]) -> Annotation:
    ha = "left" if side[0] > 0 else "right"
    va = "bottom" if side[1] > 0 else "top"
    return axes.annotate(
        text, place, side, textcoords="offset points", ha=ha, va=va, size=SMALL_SIZE
    )


def _within(axes: Axes, box: Bbox) -> bool:
    return bool(axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1))


def _box(axes: Axes, places: Sequence[Place], room: float) -> Bbox:
    """What dots or a line at ``places`` take of the page, with ``room`` pixels around."""
    return Bbox(axes.transData.transform([places[0], places[-1]])).padded(room)


def _axis_of(rows: Sequence[Row], name: str) -> tuple[str, float]:
    costs = [c for row in rows if (c := cost(row, name)) is not None]
    what = "time per token and GPU" if name == "tokens_per_s_per_gpu" else "step time"
    unit, seconds = next((u for u in TIME_UNITS if max(costs) >= u[1]), TIME_UNITS[-1])
    return f"{what} ({unit})", seconds


def _places(rows: Iterable[Row], name: str, seconds: float) -> Iterator[Place]:
    for row in rows:
        time = cost(row, name)
        assert time is not None
        yield time / seconds, row.figures[MEMORY] / GIB


def subtitle(grid: Grid) -> str:
    """What all points of a sweep share."""
    scenario = grid.scenario
    varies = {"fsdp", "fsdp.runtime"} & set(grid.keys)
    words = [] if varies else [f"runtime {scenario.fsdp.runtime}"]
    if scenario.hardware is not None:
        words.append(f"{scenario.world_size} GPUs ({scenario.hardware.gpu})")
    return "  ·  ".join(words)
