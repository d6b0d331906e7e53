"""The state before the first event of a trace, found by undoing the trace from its final state.

Everything follows from the recording except, sometimes, the size of a block that existed before
the trace and was freed in it: see :class:`_Sizes`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsdpsim.allocator.sizes import SMALL_BUFFER, SMALL_SIZE, round_size
from fsdpsim.replay.ranges import PoolOf
from fsdpsim.replay.recording import Event, Recording, SnapshotError
from fsdpsim.replay.spans import Spans


@dataclass(slots=True)
class LiveBlock:
    """A block that is live or pending; ``size`` (bytes) is None while it is not known."""

    address: int
    requested_size: int
    size: int | None = None
    pending: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A cudaMalloc segment, or a contiguous mapped run of an expandable range (bytes)."""

    address: int
    size: int
    stream: int
    is_small: bool
    expandable: bool
    blocks: tuple[LiveBlock, ...] = ()
    """Blocks in use, by address; the rest is free."""

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.size


@dataclass(frozen=True, slots=True)
class InitialState:
    """Memory before the first event."""

    extents: tuple[Extent, ...]
    guessed: frozenset[int]
    """Addresses of blocks whose size nothing determines; the smallest possible one is taken."""


def undo(recording: Recording, at_least: Mapping[int, int] | None = None) -> InitialState:
    """Return the state before the first event.

    ``at_least`` gives smallest sizes, by address, for blocks whose size would be guessed. Raises
    :class:`SnapshotError` if the trace does not lead to the final segments.
    """
    memory = _Memory(recording)
    for index in range(len(recording.events) - 1, -1, -1):
        event = recording.events[index]
        if not memory.undo(event):
            raise SnapshotError(
                f"device {recording.device}: the trace does not lead to the final segments"
                f" (event {index}, {event.action} at {event.address:#x})"
            )
    return _Sizes(recording, memory.extents(), at_least or {}).resolve()


class _Memory:
    """What is held and in use, while events are undone from the last to the first."""

    def __init__(self, recording: Recording) -> None:
        self.pool_of = PoolOf(recording)
        self.live: dict[int, LiveBlock] = {}
        self.segments: dict[int, Extent] = {}
        self.mapped: dict[int, Spans] = {}
        for segment in recording.segments:
            self._hold(segment.address, segment.size, segment.stream, segment.expandable)
            for block in segment.blocks:
                if block.state != "free":
                    self.live[block.address] = LiveBlock(
                        block.address, block.requested_size, block.size, block.state == "pending"
                    )
        self._undo: dict[str, Callable[[Event], bool]] = {
            "alloc": self._undo_alloc,
            "free_requested": self._undo_free_requested,
            "free_completed": self._undo_free_completed,
            "segment_alloc": self._undo_segment_alloc,
            "segment_free": lambda event: self._hold(*event[1:], False),
            "segment_map": self._undo_segment_map,
            "segment_unmap": lambda event: self._hold(*event[1:], True),
            "oom": lambda event: True,
        }

    def undo(self, event: Event) -> bool:
        """Go back to before ``event``; False if it cannot have happened."""
        return self._undo[event.action](event)

    def _hold(self, address: int, size: int, stream: int, expandable: bool) -> bool:
        if expandable:
            self.mapped.setdefault(stream, Spans()).add(address, address + size)
        elif address in self.segments:
            return False
        else:
            small = size <= SMALL_BUFFER
            self.segments[address] = Extent(
                address=address, size=size, stream=stream, is_small=small, expandable=False
            )
        return True

    def _undo_alloc(self, event: Event) -> bool:
        return self.live.pop(event.address, None) is not None

    def _undo_free_completed(self, event: Event) -> bool:
        if event.address in self.live:
            return False
        self.live[event.address] = LiveBlock(event.address, event.size, pending=True)
        return True

    def _undo_free_requested(self, event: Event) -> bool:
        block = self.live.get(event.address)
        if block is None:
            return False
        block.pending = False
        return True

    def _undo_segment_alloc(self, event: Event) -> bool:
        segment = self.segments.pop(event.address, None)
        return segment is not None and segment.size == event.size

    def _undo_segment_map(self, event: Event) -> bool:
        spans = self.mapped.get(event.stream)
        return spans is not None and spans.remove(event.address, event.address + event.size)

    def extents(self) -> list[Extent]:
        """Return what is held now, by address, with the blocks in use."""
        held = list(self.segments.values())
        for stream, spans in self.mapped.items():
            for start, end in spans:
                small = self.pool_of.is_small(stream, start, end - start)
                held.append(
                    Extent(
                        address=start,
                        size=end - start,
                        stream=stream,
                        is_small=small,
                        expandable=True,
                    )
                )
        held.sort(key=lambda extent: extent.address)
        return _with_blocks(held, sorted(self.live.values(), key=lambda block: block.address))


def _with_blocks(held: list[Extent], live: list[LiveBlock]) -> list[Extent]:
    addresses = [block.address for block in live]
    placed, extents = 0, []
    for extent in held:
        first = bisect_left(addresses, extent.address)
        last = bisect_left(addresses, extent.end)
        placed += last - first
        extents.append(replace(extent, blocks=tuple(live[first:last])))
    if placed != len(live):
        raise SnapshotError("the trace uses memory of segments that it does not hold")
    return extents


class _Sizes:
    """Finds the sizes of blocks that existed before the trace and were freed in it.

    The trace shows what was requested, not whether a remainder too small to be split off was
    handed out with it. Three things decide:

    * in the small pool and with expandable segments every remainder is split off;
    * free blocks of the large pool are larger than 1 MiB, so a smaller gap is part of the block;
    * a later allocation starts where free memory starts, so if it lies in the gap above a block
      that is still in use, that block ends there.

    What is left undecided gets the rounded size: a larger gap then starts right behind it.
    """

    def __init__(
        self, recording: Recording, extents: list[Extent], at_least: Mapping[int, int]
    ) -> None:
        self.at_least = at_least
        self.recording = recording
        self.extents = extents
        self.unknown = {
            block.address: extent.end
            for extent in extents
            for block in extent.blocks
            if block.size is None
        }
        self.ends: dict[int, int] = {}

    def resolve(self) -> InitialState:
        """Fill in the sizes; return the state."""
        if self.unknown:
            self._observe()
        guessed = set()
        for extent in self.extents:
            starts = [block.address for block in extent.blocks]
            bounds = [*starts, extent.end][1:]
            for block, bound in zip(extent.blocks, bounds, strict=False):
                if block.size is None and self._decide(extent, block, bound):
                    guessed.add(block.address)
                if block.address + (block.size or 0) > bound:
                    raise SnapshotError(f"blocks overlap at {block.address:#x}")
        return InitialState(tuple(self.extents), frozenset(guessed))

    def _observe(self) -> None:
        """Note where allocations of the trace meet the end of a block of unknown size."""
        live = sorted(block.address for extent in self.extents for block in extent.blocks)
        for event in self.recording.events:
            if event.action == "alloc":
                position = bisect_left(live, event.address)
                below = live[position - 1] if position else None
                if below in self.unknown and event.address < self.unknown[below]:
                    self.ends.setdefault(below, event.address)
                insort(live, event.address)
            elif event.action == "free_completed":
                position = bisect_left(live, event.address)
                del live[position]
                self.unknown.pop(event.address, None)

    def _decide(self, extent: Extent, block: LiveBlock, bound: int) -> bool:
        """Set the size of a block; return whether it is a guess."""
        settings = self.recording.settings
        rounded = round_size(block.requested_size, settings.roundup_power2_divisions)
        gap = bound - block.address - rounded
        block.size = rounded
        if extent.is_small or extent.expandable or settings.expandable_segments or gap == 0:
            return False
        if block.address in self.ends:
            block.size = self.ends[block.address] - block.address
            return False
        if gap <= SMALL_SIZE or rounded >= settings.max_split_size:
            block.size += gap
            return False
        block.size = max(rounded, self.at_least.get(block.address, 0))
        return True
