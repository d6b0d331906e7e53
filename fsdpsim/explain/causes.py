"""Every moment of the step has one cause: the compute stream ran something, or it waited.

A gap of the compute stream is cut along the path of binding constraints that leads back from the op
after it. The parts cover the step without gaps or overlaps, so their lengths sum to the step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fsdpsim.engine import CPU, Op
from fsdpsim.explain.timeline import HostTile, Tile, Timeline, end_of, span
from fsdpsim.program import COMPUTE, TRANSFERS
from fsdpsim.result import Result

#: Host time in FSDP's own Python, by the names of its hooks.
HOOKS = frozenset({"pre_forward", "post_forward", "pre_backward", "post_backward"})

#: Cause of a collective that cannot start because another one runs before it.
QUEUE = "queue"
#: Cause of copies, casts and divisions on FSDP's own streams.
SIDE_COPY = "side_copy"
#: Cause of a start that no constraint of this rank explains.
OTHER_RANKS = "other_ranks"


#: Cause of work of the CPUs that no wait of the host stands for.
ON_CPU = "cpu_optimizer"


def side_work(op: Op) -> str:
    """The cause that stands for an op which is neither a collective nor on the compute stream."""
    if op.stream == CPU:
        return ON_CPU
    return op.kind if op.kind in TRANSFERS else SIDE_COPY


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A stretch of the step with one cause. Times are seconds.

    ``busy``: the compute stream ran ``op``. Else it was idle: it waited for ``waits_for`` while
    ``op`` ran on another stream, or while the host did ``host``.
    """

    start: float
    end: float
    busy: bool
    cause: str
    op: Op | None = None
    host: HostTile | None = None
    waits_for: Op | None = None

    @property
    def exact(self) -> Fraction:
        """The length without rounding."""
        return Fraction(self.end) - Fraction(self.start)

    @property
    def behind(self) -> Op | None:
        """The collective in front, when the cause is a queue."""
        return self.op if self.cause == QUEUE else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """The compute stream was idle from ``start`` to ``end``, before ``next_op`` (None: the end)."""

    start: float
    end: float
    next_op: Op | None
    segments: tuple[Segment, ...]
    held_by: str
    """Why the path that ends in ``next_op`` had not come further by ``start``; see ``_held_by``."""


def partition(timeline: Timeline) -> tuple[list[Segment], list[Gap]]:
    """The step as segments in order, and its gaps (which hold the idle ones among the segments)."""
    low, high = timeline.result.window
    segments: list[Segment] = []
    gaps: list[Gap] = []
    time = low
    for op in timeline.result.ops:
        start, end = max(span(op)[0], low), min(span(op)[1], high)
        if op.stream != COMPUTE or end <= start:
            continue
        if start > time:
            gaps.append(_gap(timeline, time, start, op))
            segments += gaps[-1].segments
        segments.append(Segment(start=start, end=end, busy=True, cause=op.kind, op=op))
        time = end
    if time < high:
        gaps.append(_gap(timeline, time, high, None))
        segments += gaps[-1].segments
    return segments, gaps


def last_op(result: Result) -> Op | None:
    """The op at whose end the step ends; of several the one issued last."""
    return max(result.ops, key=lambda op: (op.end, op.issued), default=None)


def _gap(timeline: Timeline, start: float, end: float, next_op: Op | None) -> Gap:
    node = last_op(timeline.result) if next_op is None else timeline.binding(next_op)
    tiles = list(timeline.walk_back(node, end, start))
    segments = [*_labelled(tiles, next_op)]
    return Gap(
        start=start,
        end=end,
        next_op=next_op,
        segments=tuple(reversed(segments)),
        held_by=_held_by(timeline, tiles, start),
    )


def _labelled(tiles: Sequence[Tile], next_op: Op | None) -> Iterator[Segment]:
    """Segments of one gap, latest first.

    The compute stream waits for the first collective on the way back, and for those that feed it. A
    collective found behind that one on its communicator or stream is what it queues behind. While
    the host was blocked, what is waited for was not issued; before that, the wait is for whatever
    the host was blocked by.
    """
    awaited: Op | None = None
    was_blocked = False
    for tile in tiles:
        op = tile.op
        if was_blocked and tile.blocked is None:
            awaited = None
        if op is not None and op.collective is not None and tile.blocked is None:
            awaited = awaited if _queues(awaited, op) else op
        yield Segment(
            start=tile.start,
            end=tile.end,
            busy=False,
            cause=_cause(tile, awaited),
            op=op,
            host=tile.blocked or tile.host,
            waits_for=awaited or (op if tile.blocked is None else None) or next_op,
        )
        was_blocked = tile.blocked is not None


def _queues(awaited: Op | None, op: Op) -> bool:
    """Whether ``awaited`` had to let ``op`` pass first, without needing its result."""
    return awaited is not None and (
        awaited.stream == op.stream
        or (awaited.communicator is not None and awaited.communicator == op.communicator)
    )


def _cause(tile: Tile, awaited: Op | None) -> str:
    if tile.blocked is not None:
        return tile.blocked.cause
    if tile.host is not None:
        return "hook" if tile.host.cause in HOOKS else tile.host.cause
    if tile.op is None:
        return OTHER_RANKS
    if tile.op.collective is None:
        return side_work(tile.op)
    return tile.op.kind if tile.op is awaited else QUEUE


def _held_by(timeline: Timeline, tiles: Sequence[Tile], start: float) -> str:
    """Why the path that ends a gap had not come further when the gap began.

    ``step_start``: the step began there. What blocked the host in the gap, if anything did. Else
    the binding constraint of the path's earliest activity: ``compute``, it needed what the compute
    stream had just produced, or freed; ``queue``, the communicator or stream was busy; ``host``,
    the host was busy until it issued it; or what the host had waited for, as ``rate_limiter``.
    """
    if start == timeline.result.window[0]:
        return "step_start"
    blocked = next((tile.blocked.cause for tile in tiles if tile.blocked is not None), None)
    if blocked is not None:
        return blocked
    node: Op | HostTile | None = tiles[-1].op or tiles[-1].host
    if node is None:
        return OTHER_RANKS
    while isinstance(node, Op):
        begun, node = span(node)[0], timeline.binding(node)
        if node is not None and end_of(node) < begun:
            return OTHER_RANKS
        if isinstance(node, Op) and node.start != node.end:
            return "compute" if node.stream == COMPUTE else QUEUE
    return "host" if node is None or timeline.awaited(node) is None else node.cause


def apportion(parts: Sequence[Fraction], total: float) -> list[float]:
    """``parts`` as floats that sum to ``total``, exactly and in any order.

    Each is a multiple of the last binary digit of ``total`` (so no sum of some of them is ever
    rounded) and off by less than that digit: largest-remainder rounding.
    """
    if not total:
        return [0.0 for _ in parts]
    digit = Fraction(math.ulp(total))
    floors = [math.floor(part / digit) for part in parts]
    missing = int(Fraction(total) / digit) - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] - parts[i] / digit)
    for i in by_remainder[:missing]:
        floors[i] += 1
    return [float(floor * digit) for floor in floors]
