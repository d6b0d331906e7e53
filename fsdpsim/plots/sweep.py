"""Pictures of a sweep: what one choice costs, and which points no other beats.

``choice_figure`` has step time, peak memory and number of collectives over one axis; that of
:mod:`fsdpsim.plots.pareto` has time against memory, over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fsdpsim.files import write_with
from fsdpsim.plots.legend import Key
from fsdpsim.plots.pareto import pareto_figure, subtitle
from fsdpsim.plots.sheet import Sheet, legend_room, place_legend
from fsdpsim.plots.style import (
    CAPACITY,
    CATEGORIES,
    INK,
    KINDS,
    OUT_OF_FOCUS,
    QUIET,
    SMALL_SIZE,
    TEXT_SIZE,
    house_style,
    write_figure,
)
from fsdpsim.plots.text import shortened
from fsdpsim.plots.view import TIME_UNITS
from fsdpsim.scenario import Scenario
from fsdpsim.sweeps.api import run_points
from fsdpsim.sweeps.execute import workers
from fsdpsim.sweeps.grid import Grid
from fsdpsim.sweeps.pareto import MEMORY
from fsdpsim.sweeps.point import Simulator
from fsdpsim.sweeps.row import Row, value_text
from fsdpsim.units import show_bytes, show_seconds

GIB = 2**30

#: More values than this along one axis are too narrow to label.
MAX_VALUES = 40

TIME = (
    Key("computing", KINDS["forward"].colour),
    Key("exposed communication", KINDS["all_gather"].colour),
    Key("neither", KINDS["copy"].colour),
)
ALLOCATED = Key("allocated at the peak", CATEGORIES["parameters"].colour)
RESERVED = Key("reserved beyond it", OUT_OF_FOCUS)
TOO_LARGE = Key("runs out of memory", "#f6c9cd", hatch="////")
DEVICE = Key("the device's memory", CAPACITY[0], line=CAPACITY[1], width=CAPACITY[2])
FLOOR = Key("model state / F + largest unit + kept activations", INK, line="-", width=1.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One point of a sweep along one axis. Seconds and bytes."""

    label: str
    fits: bool
    parts: tuple[float, float, float]
    """Step time: computing, exposed communication, neither. Zeros where it does not fit."""
    allocated: int
    reserved: int
    floor: float | None
    """Bytes that no schedule can go below."""
    collectives: int
    between_nodes: float
    """Bytes sent per rank and step by groups that span nodes."""


def sweep_figures(scenario: Scenario) -> dict[str, Figure]:
    """The pictures of the ``[sweep]`` of ``scenario`` by name: ``sweep`` and ``pareto``."""
    grid = Grid(scenario)
    with workers(None, 1) as staff:
        return _figures(grid, list(run_points(grid, grid.points(), staff)))


def _figures(grid: Grid, rows: Iterable[Row]) -> dict[str, Figure]:
    kept = [_slim(row) for row in rows if row.status in ("ok", "oom")]
    made = {"sweep": choice_figure(grid, kept), "pareto": pareto_figure(grid, kept)}
    return {name: figure for name, figure in made.items() if figure is not None}


def write_sweep_figures(grid: Grid, rows: Iterable[Row], directory: Path) -> list[Path]:
    """Write ``sweep.png`` (if one axis varies) and ``pareto.png``; returns what was written."""
    written = []
    for name, figure in _figures(grid, rows).items():
        path = directory / f"{name}.png"
        write_with(path, partial(write_figure, figure))
        written.append(path)
    return written


def _slim(row: Row) -> Row:
    """``row`` without the figures that no picture shows: there may be very many rows."""
    names = (
        "step_time_s",
        "compute_time_s",
        "exposed_communication_s",
        "tokens_per_s_per_gpu",
        "peak_allocated_bytes",
        MEMORY,
        "collectives",
    )
    figures = {name: row.figures[name] for name in names}
    return Row(point=row.point, settings=row.settings, status=row.status, figures=figures)


# ---- one axis


def choice_figure(grid: Grid, rows: Sequence[Row]) -> Figure | None:
    """Step time, peak memory and collectives of each value; None unless exactly one axis varies."""
    if len(grid.axes) != 1 or not 2 <= len(rows) <= MAX_VALUES:
        return None
    with house_style():
        return _draw_choices(grid, [bar_of(grid, row) for row in rows])


def bar_of(grid: Grid, row: Row) -> Bar:
    """What the picture shows of ``row``."""
    figures, fits = row.figures, row.status == "ok"
    compute, exposed = figures["compute_time_s"], figures["exposed_communication_s"]
    rest = max(figures["step_time_s"] - compute - exposed, 0.0) if fits else 0.0
    collectives = figures["collectives"].values()
    bounds = Simulator(grid.scenario).bounds(grid.variations.at(row.settings))
    return Bar(
        label=value_text(row.settings[grid.keys[0]]),
        fits=fits,
        parts=(compute, exposed, rest) if fits else (0.0, 0.0, 0.0),
        allocated=figures["peak_allocated_bytes"],
        reserved=figures[MEMORY],
        floor=bounds.peak_bytes or None,
        collectives=sum(c["count"] for c in collectives),
        between_nodes=sum(c["bytes_sent_between_nodes_per_rank"] for c in collectives),
    )


def _ticks(bars: Sequence[Bar], points: float) -> list[str]:
    """Labels below the bars of a panel of ``points``: a line per word, each short enough."""
    room = 0.94 * points / max(len(bars), 1)
    lines = ([shortened(x, TEXT_SIZE, room) for x in bar.label.split(", ")] for bar in bars)
    return ["\n".join(bar[:3]) for bar in lines]


def _draw_choices(grid: Grid, bars: Sequence[Bar]) -> Figure:
    keys = _keys(bars, _limit(grid, bars))
    sheet = Sheet()
    sheet.title(grid.scenario.title or grid.scenario.name)
    sheet.note(subtitle(grid))
    legend_at = sheet.skip(legend_room(keys))
    sheet.skip(0.1)
    time = sheet.panel(1.9)
    sheet.skip(0.22)
    memory = sheet.panel(1.9, share=time) if any(bar.reserved for bar in bars) else None
    sheet.skip(0.22)
    calls = sheet.panel(1.0, share=time)
    ticks = _ticks(bars, sheet.plot_points)
    sheet.skip(0.31 + 0.14 * max(tick.count("\n") + 1 for tick in ticks))
    figure = sheet.figure()
    place_legend(figure, keys, legend_at)
    assert time.axes is not None and calls.axes is not None
    _draw_time(time.axes, bars)
    if memory is not None and memory.axes is not None:
        _draw_memory(memory.axes, bars, grid)
        memory.axes.tick_params(axis="x", length=0, labelbottom=False)
    _draw_calls(calls.axes, bars)
    time.axes.tick_params(axis="x", length=0, labelbottom=False)
    calls.axes.set_xticks(range(len(bars)), ticks)
    calls.axes.set_xlim(-0.6, len(bars) - 0.4)
    calls.axes.set_xlabel(" and ".join(grid.keys[:1]))
    return figure


def _limit(grid: Grid, bars: Sequence[Bar]) -> float | None:
    """The device's memory in GiB, where it is near enough to the bars to be drawn."""
    hardware, highest = grid.scenario.hardware, max(bar.reserved for bar in bars) / GIB
    if hardware is None or hardware.memory / GIB >= 1.5 * highest:
        return None
    return hardware.memory / GIB


def _keys(bars: Sequence[Bar], limit: float | None) -> list[Key]:
    keys = [key for i, key in enumerate(TIME) if any(bar.parts[i] > 0 for bar in bars)]
    if any(bar.reserved for bar in bars):
        keys += [ALLOCATED, RESERVED]
    if any(bar.floor for bar in bars):
        keys.append(FLOOR)
    if limit is not None:
        keys.append(DEVICE)
    if not all(bar.fits for bar in bars):
        keys.append(TOO_LARGE)
    return keys


def _draw_time(axes: Axes, bars: Sequence[Bar]) -> None:
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    unit, seconds = next((u for u in TIME_UNITS if longest >= u[1]), TIME_UNITS[-1])
    for x, bar in enumerate(bars):
        bottom = 0.0
        for part, key in zip(bar.parts, TIME, strict=True):
            axes.bar(x, part / seconds, 0.72, bottom=bottom / seconds, color=key.colour)
            bottom += part
        text = show_seconds(bottom) if bar.fits else "does not fit"
        _label(axes, x, bottom / seconds, text, len(bars))
    axes.set_ylabel(f"step time ({unit})")
    axes.set_ylim(0, 1.14 * longest / seconds or 1)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _draw_memory(axes: Axes, bars: Sequence[Bar], grid: Grid) -> None:
    highest = max(bar.reserved for bar in bars) / GIB
    for x, bar in enumerate(bars):
        allocated, reserved = bar.allocated / GIB, bar.reserved / GIB
        if bar.fits:
            axes.bar(x, reserved, 0.72, color=RESERVED.colour)
            axes.bar(x, allocated, 0.72, color=ALLOCATED.colour)
            _label(axes, x, reserved, show_bytes(bar.reserved), len(bars))
        else:
            look = TOO_LARGE
            edge = CAPACITY[0]
            axes.bar(x, reserved, 0.72, color=look.colour, hatch=look.hatch, edgecolor=edge, lw=0)
        if bar.floor and bar.floor > 1.1 * GIB * highest:
            _label(axes, x, reserved / 2, f"needs {show_bytes(bar.floor)}\nat least", len(bars))
        elif bar.floor:
            axes.plot((x - 0.36, x + 0.36), (bar.floor / GIB,) * 2, color=INK, lw=FLOOR.width)
    limit = _limit(grid, bars)
    if limit is not None:
        axes.axhline(limit, color=CAPACITY[0], ls=CAPACITY[1], lw=CAPACITY[2])
        highest = max(highest, limit)
    axes.set_ylabel("peak memory (GiB)")
    axes.set_ylim(0, 1.14 * highest)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _draw_calls(axes: Axes, bars: Sequence[Bar]) -> None:
    for x, bar in enumerate(bars):
        if not bar.fits:
            continue
        axes.bar(x, bar.collectives, 0.72, color=QUIET)
        between = f", {bar.between_nodes / 1e9:.3g} GB" if bar.between_nodes else ""
        _label(axes, x, bar.collectives, f"{bar.collectives:,}{between}", len(bars))
    axes.set_ylabel("collectives,\nsent over nodes")
    axes.set_ylim(0, 1.25 * max(bar.collectives for bar in bars) or 1)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))


def _label(axes: Axes, x: float, y: float, text: str, bars: int) -> None:
    if bars <= 12:
        axes.annotate(
            text,
            (x, y),
            (0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=SMALL_SIZE,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
        )
