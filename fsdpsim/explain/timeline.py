"""Who waited for whom: the binding constraint behind every start, on the GPU and on the host.

An op starts at the latest of four times: it was issued, its stream became free, its communicator
became free, its events had passed. The one that equals the start is binding. Following it back
tells, without gaps, what the step was waiting for. Times are seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpsim.engine import HostWait, HostWork, Op, Step
from fsdpsim.intervals import Interval
from fsdpsim.memory import Free, Malloc, Sample
from fsdpsim.program import IterationStart, Mark
from fsdpsim.result import Result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTile:
    """The host spent ``start`` to ``end`` in one step; tiles follow each other without gaps."""

    start: float
    end: float
    step: Step
    cause: str
    """``launch``, a hook's name, ``cuda_malloc``, or what a wait is for (``rate_limiter``, ...)."""
    index: int

    @property
    def unit(self) -> str:
        """The unit whose work the host was at; empty for the training loop."""
        step = self.step
        if isinstance(step, Malloc):
            return step.buffer.unit
        return getattr(step, "unit", "")

    @property
    def iteration(self) -> int:
        """The iteration that the step belongs to."""
        step = self.step
        found: int = step.buffer.iteration if isinstance(step, Malloc) else step.iteration  # type: ignore[union-attr]
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """``start`` to ``end`` of a path: an op ran, or the host was busy, or neither is known."""

    start: float
    end: float
    op: Op | None = None
    host: HostTile | None = None
    blocked: HostTile | None = None
    """The host wait that ``op`` ended and that lasted throughout this tile."""


class Timeline:
    """Looks up binding constraints in one result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.host = list(_host_tiles(result))
        self._host_ends = [tile.end for tile in self.host]
        self._before: dict[int, Op] = {}
        last: dict[str, Op] = {}
        for op in result.ops:
            if op.stream in last:
                self._before[id(op)] = last[op.stream]
            last[op.stream] = op

    def previous_on_stream(self, op: Op) -> Op | None:
        """The op that its stream ran just before."""
        return self._before.get(id(op))

    def binding(self, op: Op) -> Op | HostTile | None:
        """What ``op`` started at the end of: an op, or the host's step that issued it.

        Of several that ended together, the stream's previous op comes first and the host last.
        None: it was issued at time zero.
        """
        found: Op | None = None
        before = self.previous_on_stream(op)
        for other in (before, *op.deps) if before is not None else op.deps:
            if found is None or span(other)[1] > span(found)[1]:
                found = other
        assert op.issued is not None
        return found if found and span(found)[1] >= op.issued else self.host_until(op.issued)

    def host_until(self, time: float) -> HostTile | None:
        """The step that the host had finished at ``time``; None at the very start."""
        index = bisect_left(self._host_ends, time)
        return (
            self.host[index] if index < len(self.host) and self.host[index].start < time else None
        )

    def awaited(self, tile: HostTile) -> Op | None:
        """The op whose end let a blocked host go on; None if the host was busy instead."""
        if isinstance(tile.step, HostWait):
            ended = list(tile.step.ops)
        elif tile.cause == "alloc_retry":  # cudaFree waits for all that was issued before
            ended = [op for op in self.result.ops if _ended_during(tile, op)]
        else:
            return None
        return max(ended, key=lambda op: span(op)[1], default=None)

    def before(self, node: Op | HostTile) -> Op | HostTile | None:
        """What bound the start of ``node``."""
        if isinstance(node, Op):
            return self.binding(node)
        return self.host[node.index - 1] if node.index else None

    def walk_back(self, node: Op | HostTile | None, time: float, until: float) -> Iterator[Tile]:
        """The tiles from ``time``, where ``node`` ended, back to ``until``: no gaps, latest first.

        Ops of no duration give no tile. Where the host waited for an op, the path goes on through
        that op: the tile says that the host was blocked meanwhile.
        """
        blocked: HostTile | None = None
        while node is not None and time > until:
            reached = end_of(node)
            if reached < time:  # no constraint of this rank: other ranks, or contention
                yield Tile(start=max(reached, until), end=time)
                time = max(reached, until)
                continue
            if isinstance(node, HostTile) and (awaited := self.awaited(node)) is not None:
                drained = max(end_of(awaited), until)
                if drained < time:  # cudaFree itself, after the device had become idle
                    yield Tile(start=drained, end=time, host=node)
                blocked, node, time = node, awaited, drained
                continue
            start = max(_start(node), until)
            yield from _tiles(node, start, time, blocked)
            time, node = start, self.before(node)
        if time > until:
            yield Tile(start=until, end=time)


def span(op: Op) -> Interval:
    """Start and end of an op that has run."""
    assert op.start is not None and op.end is not None, op
    return op.start, op.end


def _ended_during(tile: HostTile, op: Op) -> bool:
    """Whether the host had issued ``op`` before ``tile`` and it ended during it."""
    assert op.issued is not None
    return op.issued <= tile.start < span(op)[1] <= tile.end


def _tiles(
    node: Op | HostTile, start: float, end: float, blocked: HostTile | None
) -> Iterator[Tile]:
    """One tile of ``node``, cut where the host began to wait for it."""
    op, host = (node, None) if isinstance(node, Op) else (None, node)
    if blocked is not None and blocked.start < end:
        cut = max(start, blocked.start)
        if cut < end:
            yield Tile(start=cut, end=end, op=op, host=host, blocked=blocked)
        end = cut
    if start < end:
        yield Tile(start=start, end=end, op=op, host=host)


def _start(node: Op | HostTile) -> float:
    return span(node)[0] if isinstance(node, Op) else node.start


def end_of(node: Op | HostTile) -> float:
    """When an op ended, or the host a step (seconds)."""
    return span(node)[1] if isinstance(node, Op) else node.end


def _host_tiles(result: Result) -> Iterator[HostTile]:
    """The host's time, cut at the ends of its steps; steps that take no time are left out."""
    stalls = {stall.start: stall.cause for stall in result.memory.stalls}
    samples = iter(result.memory.samples)
    clock, index = 0.0, 0
    for step in result.program.steps:
        end = _host_time_after(step, samples)
        if end is None:  # memory ran out here
            return
        if end > clock:
            cause = _cause(step, stalls.get(clock, "cuda_malloc"))
            yield HostTile(start=clock, end=end, step=step, cause=cause, index=index)
            clock, index = end, index + 1


def _host_time_after(step: Step, samples: Iterator[Sample]) -> float | None:
    if isinstance(step, Op):
        return step.issued
    if isinstance(step, (HostWait, HostWork)):
        return step.end
    if isinstance(step, (Malloc, Free)):
        sample = next(samples, None)
        return None if sample is None else sample.time
    assert isinstance(step, (Mark, IterationStart)), step
    return step.time


def _cause(step: Step, stall: str) -> str:
    if isinstance(step, Op):
        return "launch"
    return stall if isinstance(step, Malloc) else step.cause  # type: ignore[union-attr]
