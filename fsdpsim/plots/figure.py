"""Whole pictures: a result goes in, a matplotlib ``Figure`` comes out. Nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fsdpsim.plots import bars, gantt, memory
from fsdpsim.plots.curve import Clock, Curve, memory_curve
from fsdpsim.plots.legend import Key
from fsdpsim.plots.sheet import Panel, Sheet, legend_room, place_legend
from fsdpsim.plots.style import SMALL_SIZE, house_style
from fsdpsim.plots.view import View, check_ran, make_view
from fsdpsim.result import Result
from fsdpsim.scenario.runtimes import FsdpTable
from fsdpsim.units import show_seconds

MEMORY_INCHES = 2.1
UNSHARDED_INCHES = 1.1


def timeline(
    result: Result,
    *,
    iteration: int | str | None = None,
    time: tuple[float | None, float | None] | None = None,
    units: str | None = None,
    arrows: bool = False,
    clock: Clock | None = None,
) -> Figure:
    """Gantt chart above the memory curve on one time axis.

    ``iteration`` counts from 1 (``all``; default: the last); ``time``: (start, end) seconds on the
    picture's axis; ``units``: ``A:B`` or names; ``arrows``: the waits that bind; ``clock``: see
    :func:`fsdpsim.plots.curve.memory_curve`. Raises ``ValueError`` for what the result has not,
    and its kind ``NothingRanError`` where memory ran out at the very first allocation.
    """
    _check_ran(result)
    view = make_view(result, iteration=iteration, time=time, units=units)
    with house_style():
        return _timeline(view, memory_curve(view, clock), arrows=arrows)


def _check_ran(result: Result) -> None:
    check_ran(result, bool(result.ops or result.memory.samples), "anything ran")


def _timeline(view: View, curve: Curve, *, arrows: bool) -> Figure:
    rows = bars.rows(view)
    kinds = gantt.keys([view], [rows])
    sheet = Sheet()
    sheet.title(title(view))
    for line in subtitles(view):
        sheet.note(line)
    kinds_at = sheet.skip(legend_room(kinds))
    sheet.skip(0.06)
    upper = sheet.panel(gantt.inches(rows))
    sheet.skip(0.12)
    lower = sheet.panel(MEMORY_INCHES if curve.has_bytes else UNSHARDED_INCHES, share=upper)
    sheet.skip(0.42)
    keys_at = sheet.skip(2 * 0.19 if curve.has_bytes else 0.0)
    sheet.note(caption(curve), size=SMALL_SIZE)
    figure = sheet.figure()
    assert upper.axes is not None and lower.axes is not None
    gantt.draw(upper.axes, view, rows, sheet.plot_points)
    if arrows:
        gantt.draw_bindings(upper.axes, view, rows, bars.bindings(view))
    place_legend(figure, kinds, kinds_at)
    size = memory.Points(sheet.plot_points, 72 * lower.inches)
    place_legend(figure, _lower(lower.axes, view, curve, size), keys_at)
    upper.axes.tick_params(axis="x", length=0, labelbottom=False)
    time_axis(lower.axes, view)
    return figure


def _lower(axes: Axes, view: View, curve: Curve, points: memory.Points) -> list[Key]:
    if not len(curve):
        return []
    if curve.has_bytes:
        return memory.draw_memory(axes, view, curve, points)
    return memory.draw_unsharded(axes, view, curve, points)


def time_axis(axes: Axes, view: View) -> None:
    """Ticks and the name of the shared axis."""
    unit, _ = view.time_unit
    since = "" if view.origin == 0 else " since the step's start"
    axes.set_xlabel(f"time{since} ({unit})")
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))


# ---- words


def title(view: View) -> str:
    """What was simulated, and the step time."""
    scenario, result = view.result.scenario, view.result
    name = scenario.title.strip() or scenario.name
    if result.memory.oom is not None:
        return f"{name}: out of memory at {show_seconds(result.memory.oom.time)}"
    index = -1 if view.iteration is None else view.iteration
    return f"{name}: step {show_seconds(result.iteration_times[index])}"


def subtitles(view: View) -> list[str]:
    """Runtime and sharding; and what the step is made of."""
    scenario = view.result.scenario
    runs = f"runtime {scenario.fsdp.runtime}{settings(scenario.fsdp)}"
    if scenario.hardware is not None:
        gpus = f"{scenario.world_size} GPUs ({scenario.hardware.gpu})"
        runs += f"  ·  F = {scenario.shard_factor} of {gpus}"
    return [runs, *_made_of(view)]


def _made_of(view: View) -> list[str]:
    """One line, or none where nothing is known."""
    result, count, words = view.result, view.result.scenario.iterations, list[str]()
    if count > 1:
        one = f"iteration {(view.iteration or 0) + 1} of {count}"
        words.append(f"all {count} iterations" if view.iteration is None else one)
    if view.iteration in (None, count - 1) and result.memory.oom is None and result.step_time:
        share = result.compute_time / result.step_time
        words.append(f"compute {show_seconds(result.compute_time)} ({share:.0%})")
        words.append(f"exposed communication {show_seconds(result.exposed_communication)}")
    return ["  ·  ".join(words)] if words else []


def settings(fsdp: FsdpTable) -> str:
    """The keys that the scenario sets in ``[fsdp]``, as it sets them."""
    written = [name for name in type(fsdp).model_fields if name in fsdp.model_fields_set]
    values = {name: getattr(fsdp, name) for name in written}
    shown = [
        f"{name} = {value if type(value) in (int, str) else str(value).lower()}"
        for name, value in values.items()
        if name not in ("runtime", "sharding_factor") and isinstance(value, (int, str, type(None)))
    ]
    return f" ({', '.join(shown)})" if shown else ""


def caption(curve: Curve) -> str:
    """Whose time the lower panel has."""
    if curve.clock == "gpu":
        what = "Memory" if curve.has_bytes else "Units"
        return (
            f"{what} in GPU time: an allocation or free is drawn where the GPU runs the kernel "
            "that the CPU issued next, unless it waits for the CPU. The order is the allocator's."
        )
    if not curve.has_bytes:
        return "A unit counts from when the CPU thread allocates it until the GPU has used it."
    return "Memory in host time: when the CPU thread allocates and frees, ahead of the GPU."


# ---- several results


def comparison(results: Sequence[Result], *, host: bool = False) -> Figure:
    """Gantt charts of the last steps of ``results`` under each other on one time axis, each from 0.

    ``host``: with a row for the CPU thread. Raises ``NothingRanError`` as :func:`timeline`.
    """
    for result in results:
        _check_ran(result)
    views = [make_view(result) for result in results]
    longest = max(view.end - view.origin for view in views)
    lead = max(view.origin - view.start for view in views) if host else 0.0
    views = [replace(v, start=v.origin - lead, end=v.origin + longest) for v in views]
    with house_style():
        return _comparison(views, host=host)


def _comparison(views: Sequence[View], *, host: bool) -> Figure:
    charts = [bars.rows(view)[0 if host else 1 :] for view in views]
    kinds = gantt.keys(views, charts)
    sheet = Sheet()
    kinds_at = sheet.skip(legend_room(kinds))
    panels: list[Panel] = []
    for view, rows in zip(views, charts, strict=True):
        sheet.skip(0.08)
        sheet.title(title(view))
        share = panels[0] if panels else None
        panels.append(sheet.panel(gantt.inches(rows), share=share))
    sheet.skip(0.42)
    figure = sheet.figure()
    for view, rows, panel in zip(views, charts, panels, strict=True):
        assert panel.axes is not None
        gantt.draw(panel.axes, view, rows, sheet.plot_points)
        panel.axes.tick_params(axis="x", length=0, labelbottom=False)
    assert panels[-1].axes is not None
    time_axis(panels[-1].axes, views[-1])
    panels[-1].axes.tick_params(axis="x", length=3.5, labelbottom=True)
    place_legend(figure, kinds, kinds_at)
    return figure
