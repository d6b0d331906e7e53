"""The Gantt chart as data: rows of bars, from a result and a view. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdpsim.engine import HostWait, HostWork, Op
from fsdpsim.plots.style import HOST, KINDS, OUT_OF_FOCUS, STREAMS, Look, faded, shaded
from fsdpsim.plots.style import look_of_wait as _look_of_wait
from fsdpsim.plots.view import View

HOST_ROW = "CPU thread"


class Bar(NamedTuple):
    """One bar: seconds from the start of the simulation, how it looks, what is written on it."""

    start: float
    end: float
    look: Look
    colour: str
    unit: str
    name: str
    """The kernel's own name."""
    in_focus: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the chart: the CPU thread or a stream, its bars in order of start."""

    name: str
    bars: tuple[Bar, ...]
    ticks: tuple[float, ...] = ()
    """Launches that take no CPU time (seconds)."""


class Binding(NamedTuple):
    """A wait that binds: what ends on one row at ``time`` (seconds) starts something on another."""

    time: float
    source: str
    target: str


def rows(view: View) -> list[Row]:
    """The CPU thread and every stream of the result, top to bottom."""
    streams: dict[str, list[Op]] = {}
    for op in view.result.ops:
        streams.setdefault(op.stream, []).append(op)
    known = [name for name in STREAMS if name in streams]
    others = [name for name in streams if name not in STREAMS]
    return [host_row(view)] + [
        Row(name=name, bars=tuple(_op_bars(view, streams[name]))) for name in (*known, *others)
    ]


def _op_bars(view: View, ops: Iterable[Op]) -> Iterator[Bar]:
    for op in ops:
        assert op.start is not None and op.end is not None
        if view.shows(op.start, op.end):
            look = KINDS[op.kind]
            focus = view.in_focus(op.unit, op.iteration)
            colour = _colour(view, look.colour, op.unit, op.iteration)
            yield Bar(op.start, op.end, look, colour, op.unit, op.name, focus)


def _colour(view: View, colour: str, unit: str, iteration: int) -> str:
    colour = shaded(colour, view.unit_index.get(unit, 0))
    if view.units is not None and unit not in view.units:
        return OUT_OF_FOCUS
    return colour if view.of_iteration(iteration) else faded(colour)


# ---- the CPU thread


def host_row(view: View) -> Row:
    """Launches, hooks, and waits by cause."""
    launches = [op for op in view.result.ops if view.shows(*_launch(op))]
    found = [
        *(_host_bar(view, *_launch(op), HOST["launch"], op) for op in launches),
        *_host_work(view),
        *_host_waits(view),
    ]
    return Row(
        name=HOST_ROW,
        bars=tuple(sorted((bar for bar in found if bar.end > bar.start), key=lambda b: b.start)),
        ticks=tuple(dict.fromkeys(_launch(op)[1] for op in launches if not op.launch_seconds)),
    )


def _launch(op: Op) -> tuple[float, float]:
    assert op.issued is not None
    return op.issued - op.launch_seconds, op.issued


def _host_work(view: View) -> Iterator[Bar]:
    for work in view.result.host_work:
        assert work.start is not None and work.end is not None
        if view.shows(work.start, work.end):
            yield _host_bar(view, work.start, work.end, HOST["hook"], work)


def _host_waits(view: View) -> Iterator[Bar]:
    for stall in view.result.stalls():
        if view.shows(stall.start, stall.end):
            look = _look_of_wait(stall.cause)
            colour = look.colour if view.of_iteration(stall.iteration) else faded(look.colour)
            name = look.label.removeprefix("wait: ")
            yield Bar(stall.start, stall.end, look, colour, stall.unit, name)


def _host_bar(view: View, start: float, end: float, look: Look, step: Op | HostWork) -> Bar:
    focus = view.of_iteration(step.iteration)
    colour = look.colour if focus else faded(look.colour)
    name = step.name if isinstance(step, Op) else step.cause
    return Bar(start, end, look, colour, step.unit, name, focus)


# ---- waits that bind


def bindings(view: View) -> list[Binding]:
    """Ops that start, and host waits that end, at the very end of an op on another row."""
    found = [b for op in view.result.ops for b in _op_bindings(op)]
    found += [b for wait in view.result.host_waits for b in _host_bindings(wait)]
    return [b for b in dict.fromkeys(found) if view.shows(b.time, b.time)]


def _op_bindings(op: Op) -> Iterator[Binding]:
    assert op.start is not None
    for dep in op.deps:
        if dep.stream != op.stream and dep.end == op.start:
            yield Binding(op.start, dep.stream, op.stream)


def _host_bindings(wait: HostWait) -> Iterator[Binding]:
    if wait.end == wait.start or wait.end is None:
        return
    for op in wait.ops:
        if op.end == wait.end:
            yield Binding(wait.end, op.stream, HOST_ROW)
