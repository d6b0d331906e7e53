"""Which unit's communication the step waits for."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fsdpsim.engine import Op
from fsdpsim.intervals import Interval, subtract, total
from fsdpsim.plots.legend import Key, key_of
from fsdpsim.plots.sheet import Sheet, legend_room, place_legend
from fsdpsim.plots.style import KINDS, SMALL_SIZE, house_style
from fsdpsim.plots.text import text_width
from fsdpsim.plots.view import TIME_UNITS, check_ran, last_begun, short_names, step_window
from fsdpsim.program import is_kernel
from fsdpsim.result import COLLECTIVES, Result
from fsdpsim.units import show_seconds

INCHES = 2.4
"""Height of the bars' panel."""


def exposed_by_unit(result: Result) -> dict[str, dict[str, float]]:
    """Seconds of the last step, by kind and unit, in which a collective ran and no kernel did.

    Where memory ran out, of the step that it interrupts. Collectives that run side by side each
    count, so the sum can exceed ``Result.exposed_communication``.
    """
    window, computing = _window(result), _computing(result)
    ops: dict[tuple[str, str], list[Op]] = {}
    for op in result.ops:
        if op.collective is not None:
            ops.setdefault((op.kind, op.unit), []).append(op)
    return {
        kind: {
            unit.name: total(subtract(result.busy(ops[kind, unit.name], window), computing))
            for unit in result.workload.units
            if (kind, unit.name) in ops
        }
        for kind in COLLECTIVES
        if any(key[0] == kind for key in ops)
    }


def exposed(result: Result) -> Figure:
    """Bars of exposed communication by unit, stacked by kind of collective, for the last step.

    Raises ``NothingRanError`` where memory ran out before a collective ran.
    """
    seconds = exposed_by_unit(result)
    check_ran(result, bool(seconds), "any communication")
    with house_style():
        return _draw(result, seconds)


def _window(result: Result) -> Interval:
    return step_window(result, last_begun(result))


def _computing(result: Result) -> list[Interval]:
    return result.busy(filter(is_kernel, result.ops), _window(result))


def _draw(result: Result, seconds: dict[str, dict[str, float]]) -> Figure:
    names = [u.name for u in result.workload.units if any(u.name in s for s in seconds.values())]
    sheet, keys = Sheet(), _keys(seconds)
    sheet.title(_title(result))
    sheet.note("time in which a collective ran and no kernel did, by the unit it belongs to")
    keys_at = sheet.skip(legend_room(keys))
    sheet.skip(0.1)
    panel = sheet.panel(INCHES)
    sheet.skip(0.42)
    figure = sheet.figure()
    axes = panel.axes
    assert axes is not None
    highest = max((sum(s.get(n, 0.0) for s in seconds.values()) for n in names), default=0.0)
    unit, scale = next((u for u in TIME_UNITS if highest >= u[1]), TIME_UNITS[-1])
    base, width = np.zeros(len(names)), min(0.8, 0.1 * len(names))
    for kind, by_unit in seconds.items():
        heights = np.array([by_unit.get(name, 0.0) / scale for name in names])
        axes.bar(range(len(names)), heights, width, base, color=KINDS[kind].colour, gid=kind)
        base += heights
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.05 * highest / scale or 1)
    axes.set_ylabel(f"exposed ({unit})")
    axes.grid(axis="y")
    ticks = _ticks(names, sheet.plot_points)
    axes.set_xticks(ticks, [short_names(names)[names[i]] for i in ticks])
    axes.set_xlabel("unit")
    place_legend(figure, keys, keys_at)
    return figure


def _title(result: Result) -> str:
    name, oom = result.scenario.title.strip() or result.scenario.name, result.memory.oom
    start, end = window = _window(result)
    communicating = result.busy((op for op in result.ops if op.collective is not None), window)
    waits = show_seconds(total(subtract(communicating, _computing(result))))
    step = show_seconds(end - start)
    if oom is None:
        return f"{name}: {waits} of the {step} step is exposed communication"
    when = show_seconds(oom.time)
    return f"{name}: out of memory at {when}; {waits} of {step} until then is exposed communication"


def _keys(seconds: dict[str, dict[str, float]]) -> list[Key]:
    """The kinds with their sums."""
    keys = [(key_of(KINDS[kind]), sum(units.values())) for kind, units in seconds.items()]
    return [key._replace(label=f"{key.label}, {show_seconds(time)}") for key, time in keys]


def _ticks(names: list[str], points: float) -> list[int]:
    """Indices of the units whose names have room: every one, or every second, fifth, tenth, ..."""
    widest = max((text_width(n, SMALL_SIZE + 1) for n in short_names(names).values()), default=1.0)
    fits = points / max(len(names), 1)
    steps = (step * 10**power for power in range(4) for step in (1, 2, 5))
    every = next((step for step in steps if step * fits > widest + 4), 1000)
    return list(range(0, len(names), every))
