"""How short the step could be at best, and which collectives are not hidden behind compute."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

from fsdpsim.engine import CPU, Op
from fsdpsim.explain.timeline import Timeline, span
from fsdpsim.intervals import Interval, subtract
from fsdpsim.program import COMPUTE, TRANSFERS
from fsdpsim.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The step cannot be shorter than ``seconds``, the work of one resource in it."""

    resource: str
    """``compute``, ``communicator NAME``, ``h2d`` or ``d2h`` (copy engines), ``CPUs`` (what they do
    beside the host) or ``host``."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The collectives of one kind and unit in the step. Times are seconds."""

    kind: str
    unit: str
    count: int
    time: float
    exposed: float
    """Of ``time``, when no kernel computed on any stream (as in ``exposed_communication_s``)."""


def lower_bounds(timeline: Timeline) -> list[Bound]:
    """One bound per resource that has work in the step, largest first."""
    work: dict[str, list[float]] = {}
    for op in _step_ops(timeline.result):
        name = _resource(op)
        if name:
            work.setdefault(name, []).append(op.seconds)  # not what contention made of them
    last = timeline.result.scenario.iterations - 1
    work["host"] = [
        tile.end - tile.start
        for tile in timeline.host
        if tile.iteration == last and timeline.awaited(tile) is None
    ]
    bounds = [Bound(resource=name, seconds=fsum(times)) for name, times in work.items()]
    return sorted((b for b in bounds if b.seconds), key=lambda b: -b.seconds)


def _resource(op: Op) -> str:
    """What runs ``op`` one after the other with its like; empty for FSDP's own copies and casts."""
    if op.communicator:
        return f"communicator {op.communicator}"
    if op.kind in TRANSFERS or op.stream == CPU:
        return "CPUs" if op.stream == CPU else op.kind
    return "compute" if op.stream == COMPUTE else ""


def exposures(result: Result) -> list[Exposure]:
    """Collectives of the step by kind and unit; the most exposed first."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for op in _step_ops(result):
        if op.collective is not None:
            exposed = fsum(b - a for a, b in uncovered(span(op), result.compute_busy))
            found.setdefault((op.kind, op.unit), []).append((_length(op), exposed))
    rows = [
        Exposure(
            kind=kind,
            unit=unit,
            count=len(times),
            time=fsum(t for t, _ in times),
            exposed=fsum(e for _, e in times),
        )
        for (kind, unit), times in found.items()
    ]
    # Equal but for rounding: in order of time.
    return sorted(rows, key=lambda row: -float(f"{row.exposed:.9g}"))


def uncovered(interval: Interval, union: list[Interval]) -> list[Interval]:
    """What of ``interval`` the sorted, disjoint intervals of ``union`` do not cover."""
    first = bisect_left(union, interval[0], key=lambda covered: covered[1])
    last = bisect_right(union, interval[1], key=lambda covered: covered[0])
    return subtract([interval], union[first:last])


def _length(op: Op) -> float:
    start, end = span(op)
    return end - start


def _step_ops(result: Result) -> Iterator[Op]:
    last = result.scenario.iterations - 1
    return (op for op in result.ops if op.iteration == last)
