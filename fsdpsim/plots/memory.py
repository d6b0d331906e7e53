"""Draws a memory curve: what fills the memory, the allocator's levels, peak and capacity."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fsdpsim.engine import Op
from fsdpsim.plots.curve import LEVELS, PENDING, Curve, settled, thinned
from fsdpsim.plots.legend import Key
from fsdpsim.plots.style import (
    CAPACITY,
    CATEGORIES,
    INK,
    KINDS,
    ROUNDING,
    SMALL_SIZE,
    Look,
)
from fsdpsim.plots.style import LEVELS as LEVEL_LOOKS
from fsdpsim.plots.style import PENDING as PENDING_LOOK
from fsdpsim.plots.text import shortened, text_width
from fsdpsim.plots.view import View
from fsdpsim.program import COMPUTE
from fsdpsim.units import show_bytes, show_seconds

Floats = NDArray[np.float64]

IN_SIGHT = 2.5
"""A line is in the picture when it is at most this many times what lies below it: else it would
flatten the rest."""

NOTEWORTHY = 0.003
"""Share of the axis below which a band is too thin to be explained in the legend."""


class Band(NamedTuple):
    """One layer of the stack, in bytes at each entry of the curve."""

    look: Look
    low: NDArray[np.int64]
    high: NDArray[np.int64]


class Points(NamedTuple):
    """Size of axes on paper, in points."""

    width: float
    height: float


class Mark(NamedTuple):
    """A point of a curve (seconds, axis units) and what to say about it."""

    time: float
    y: float
    lines: list[str]


def draw_memory(axes: Axes, view: View, curve: Curve, points: Points) -> list[Key]:
    """Draw ``curve`` on axes of that size; returns what the legend must explain."""
    curve = thinned(settled(curve), view.start, view.end)
    name, scale = _byte_unit(curve)
    x = _edges(view, curve)
    keys = [_draw_band(axes, x, band, scale) for band in bands(curve)]
    keys += [_draw_level(axes, x, curve, level, scale) for level in reversed(LEVELS)]
    highest = _highest(curve)
    capacity, key = _draw_capacity(axes, view, highest, scale)
    _finish(axes, f"memory ({name})", max(capacity, highest / scale))
    _mark_peak(axes, view, curve, scale, capacity, points)
    _mark_oom(axes, view)
    return keys + key


def _highest(curve: Curve) -> int:
    """Bytes that the axis must reach: ``reserved``, or ``active`` where that is far below."""
    reserved, active = int(curve.levels["reserved"].max()), int(curve.levels["active"].max())
    return reserved if reserved <= IN_SIGHT * active else active


def _edges(view: View, curve: Curve) -> Floats:
    """The times of ``curve`` on the axis, and the end of the view."""
    x = [view.x(time) for time in curve.time]
    return np.array([*x, max(view.x(view.end), x[-1])])


def bands(curve: Curve) -> list[Band]:
    """The stack from the bottom up; its bands of live buffers and rounding end at ``allocated``."""
    found: list[Band] = []
    base = np.zeros(len(curve), dtype=np.int64)
    for name, look in CATEGORIES.items():
        top = base + curve.categories[name]
        found.append(Band(look, base, top))
        base = top
    allocated = np.maximum(base, curve.levels["allocated"])
    found.append(Band(ROUNDING, base, allocated))
    found.append(Band(PENDING_LOOK, allocated, allocated + curve.categories[PENDING]))
    noteworthy = NOTEWORTHY * _highest(curve)
    return [band for band in found if (band.high - band.low).max() > noteworthy]


def _byte_unit(curve: Curve) -> tuple[str, int]:
    top = _highest(curve)
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((u for u in units if top >= u[1]), ("B", 1))


def _draw_band(axes: Axes, x: Floats, band: Band, scale: int) -> Key:
    x, low, high = _steps(x, band.low / scale, band.high / scale)
    axes.fill_between(
        x,
        low,
        high,
        step="post",
        facecolor=band.look.colour,
        edgecolor=KINDS["all_gather"].colour if band.look.hatch else "none",
        linewidth=0,
        hatch=band.look.hatch,
        gid=band.look.label,
        zorder=2,
    )
    return Key(band.look.label, band.look.colour, hatch=band.look.hatch)


def _steps(x: Floats, *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """``x`` and ``columns`` where any of them changes, the last value held to the end of ``x``."""
    change = [np.diff(column, prepend=np.nan) != 0 for column in columns]
    kept = np.append(np.logical_or.reduce(change), True)
    return [x[kept], *(np.append(column, column[-1])[kept] for column in columns)]


def _draw_level(axes: Axes, x: Floats, curve: Curve, level: str, scale: int) -> Key:
    colour, dashes, width = LEVEL_LOOKS[level]
    column = curve.levels[level]
    x, y = _steps(x, column / scale)
    axes.step(
        x,
        y,
        where="post",
        color=colour,
        linestyle=dashes,
        linewidth=width,
        gid=level,
        zorder=3,
        solid_joinstyle="miter",
    )
    above = " (above the chart)" if column.max() > 1.01 * _highest(curve) else ""
    label = f"{level}, peak {show_bytes(int(column.max()))}{above}"
    return Key(label, colour, line=dashes, width=width)


def _draw_capacity(axes: Axes, view: View, highest: int, scale: int) -> tuple[float, list[Key]]:
    """A dashed line at what the allocator may take, where the scenario says what the device has.

    Returns its height on the axis (0 when it is not drawn) and its legend.
    """
    if view.result.scenario.hardware is None:
        return 0.0, []
    capacity = view.result.memory.allocator.reserved.memory.capacity
    colour, dashes, width = CAPACITY
    text = f"capacity {show_bytes(capacity)}"
    if capacity > IN_SIGHT * highest:
        return 0.0, [Key(f"{text} (above the chart)", colour, line=dashes, width=width)]
    y = capacity / scale
    axes.axhline(y, color=colour, linestyle=dashes, linewidth=width, gid="capacity", zorder=3)
    return y, [Key(text, colour, line=dashes, width=width)]


def _finish(axes: Axes, label: str, highest: float) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.08 * highest)
    axes.yaxis.set_major_locator(
        MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=label.startswith("unsharded"))
    )
    axes.grid()


# ---- the peak


def _mark_peak(
    axes: Axes, view: View, curve: Curve, scale: int, capacity: float, points: Points
) -> None:
    level = "active" if _pending_matters(curve) else "allocated"
    at = int(curve.levels[level].argmax())
    lines = [
        f"peak {level} {show_bytes(int(curve.levels[level][at]))}",
        *_explained(view, curve, at, points),
    ]
    lines_at = (_highest(curve) / scale, capacity)
    mark = Mark(float(curve.time[at]), float(curve.levels[level][at] / scale), lines)
    draw_mark(axes, view, mark, lines_at, points)


def _pending_matters(curve: Curve) -> bool:
    """Whether blocks that wait for an event are what the peak is made of."""
    return bool(curve.levels["active"].max() > 1.05 * curve.levels["allocated"].max())


def _explained(view: View, curve: Curve, at: int, points: Points) -> list[str]:
    """What the CPU allocated at the peak, and what the GPU ran then."""
    sample = view.result.memory.samples[curve.sample[at]]
    buffer = sample.buffer
    owner = f" of {buffer.unit}" if buffer.unit else ""
    deed = "allocates" if sample.is_malloc else "frees"
    text = f"CPU {deed} {buffer.name}{owner} ({buffer.phase})"
    op = running(view, float(curve.time[at]))
    gpu = "GPU idle" if op is None else f"GPU in {op.kind} {op.unit}".rstrip()
    return [
        shortened(text, SMALL_SIZE, points.width / 2),
        shortened(gpu, SMALL_SIZE, points.width / 2),
    ]


def running(view: View, time: float) -> Op | None:
    """The kernel on the compute stream at ``time``, or None."""
    ops = [op for op in view.result.ops if op.stream == COMPUTE and op.seconds]
    return next((op for op in ops if op.start <= time < op.end), None)  # type: ignore[operator]


def draw_mark(axes: Axes, view: View, mark: Mark, avoid: tuple[float, ...], points: Points) -> None:
    """Draw ``mark`` with its text above it, clear of the horizontal lines at ``avoid``."""
    low, high = view.limits
    x = min(max(view.x(mark.time), low), high)
    if (oom := view.result.memory.oom) is not None:
        high = min(high, view.x(oom.time) - 3 / points.width * (high - low))
    lines = list(mark.lines)
    if view.x(mark.time) < low:
        lines[0] += f", {show_seconds(view.start - mark.time)} earlier"
    wide = max(text_width(line, SMALL_SIZE) for line in lines)
    half = (wide / 2 + 4) / points.width * (high - low)
    place = min(max(x, low + half), high - half)
    base = _clear_base(axes, mark.y, avoid, 9.4 * len(lines) + 9, points)
    axes.plot([x, x], [mark.y, base], color=INK, linewidth=0.6, zorder=5)
    axes.plot([x], [mark.y], "o", color=INK, markersize=3.5, zorder=5, clip_on=False, gid="peak")
    axes.text(
        place,
        base,
        "\n".join(lines),
        ha="center",
        va="bottom",
        size=SMALL_SIZE,
        linespacing=1.25,
        zorder=6,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
    )


def _clear_base(
    axes: Axes, y: float, avoid: tuple[float, ...], tall: float, points: Points
) -> float:
    """The lowest place above ``y`` for a text ``tall`` points high; the axis grows if it must."""
    top = axes.get_ylim()[1]
    for base in sorted({y, *(line for line in avoid if line >= y)}):
        lift = base + 4 / points.height * top
        end = base + tall / points.height * top
        if end <= top and not any(base < line <= end for line in avoid):
            return lift
    highest = max((y, *avoid))
    top = highest / (1 - (tall + 2) / points.height)
    axes.set_ylim(0, top)
    return highest + 4 / points.height * top


def _mark_oom(axes: Axes, view: View) -> None:
    oom = view.result.memory.oom
    if oom is None or not view.shows(oom.time, oom.time):
        return
    x = view.x(oom.time)
    axes.axvline(x, color=CAPACITY[0], linewidth=1.4, zorder=4, gid="oom")
    right = x > sum(view.limits) / 2
    axes.annotate(
        f"out of memory: {show_bytes(oom.buffer.nbytes)}\nfor {oom.buffer.name} {oom.buffer.unit}",
        xy=(x, 0.06),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-5 if right else 5, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        size=SMALL_SIZE,
        color=CAPACITY[0],
        zorder=6,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "alpha": 0.82, "linewidth": 0},
    )


# ---- without bytes


def draw_unsharded(axes: Axes, view: View, curve: Curve, points: Points) -> list[Key]:
    """How many gatherings of a unit's parameters are alive, where a scenario has no bytes."""
    curve = thinned(settled(curve), view.start, view.end)
    x, y = _steps(_edges(view, curve), curve.unsharded)
    colour = CATEGORIES["all_gather"].colour
    axes.fill_between(x, y, step="post", facecolor=colour, alpha=0.55, linewidth=0, zorder=2)
    axes.step(x, y, where="post", color=INK, linewidth=1.0, gid="unsharded", zorder=3)
    at, most = int(curve.unsharded.argmax()), int(curve.unsharded.max())
    _finish(axes, "unsharded units", max(most, 1))
    mark = Mark(float(curve.time[at]), most, [f"at most {most}"])
    draw_mark(axes, view, mark, (), points)
    return []
