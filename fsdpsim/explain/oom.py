"""Why memory ran out: when, for what, what was free and why it could not be used."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile

from fsdpsim.allocator import OutOfMemory
from fsdpsim.engine import Op
from fsdpsim.explain.owners import Owner, alive_after, by_category, by_unit
from fsdpsim.memory import Malloc
from fsdpsim.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCause:
    """The request that failed. Times are seconds, sizes bytes."""

    time: float
    iteration: int
    phase: str
    unit: str
    buffer: str
    category: str
    next_op: str
    """The op that the host was about to launch with the buffer; empty if none followed."""
    next_unit: str
    report: OutOfMemory
    outside_allocator: int
    """CUDA context and NCCL's buffers, which ``report.capacity`` has lost already."""
    communicators: int
    """NCCL communicators that have buffers there."""
    missing: int
    """By how much the request exceeded what the driver could still give."""
    categories: tuple[Owner, ...]
    owners: tuple[Owner, ...]

    @property
    def unusable(self) -> dict[str, int]:
        """Reserved and not allocated, by why it was of no use (bytes); largest first."""
        report = self.report
        found = {
            "fragmentation": report.this_stream,
            "other_streams": report.other_streams,
            "other_pool": report.other_pool,
            "pending_events": report.pending,
        }
        return dict(sorted(((k, v) for k, v in found.items() if v), key=lambda kv: -kv[1]))


def oom_cause(result: Result) -> OomCause | None:
    """The out-of-memory of ``result``; None if it had none."""
    oom = result.memory.oom
    if oom is None:
        return None
    buffer, report = oom.buffer, oom.report
    alive = alive_after(result.memory.samples)
    next_op = _op_after(result, buffer)
    ceiling = report.capacity if report.limit is None else min(report.limit, report.capacity)
    return OomCause(
        time=oom.time,
        iteration=buffer.iteration,
        phase=buffer.phase,
        unit=buffer.unit,
        buffer=buffer.name,
        category=buffer.category,
        next_op=next_op.name if next_op is not None else "",
        next_unit=next_op.unit if next_op is not None else "",
        report=report,
        outside_allocator=result.outside_allocator,
        communicators=len(result.program.communicators),
        missing=report.segment_size - (ceiling - report.reserved),
        categories=by_category(alive),
        owners=by_unit(alive),
    )


def _op_after(result: Result, buffer: object) -> Op | None:
    """The first op in host order after the allocation of ``buffer``."""
    steps = dropwhile(
        lambda step: not (isinstance(step, Malloc) and step.buffer is buffer), result.program.steps
    )
    return next((step for step in steps if isinstance(step, Op)), None)
