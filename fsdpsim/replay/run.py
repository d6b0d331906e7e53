"""One pass over a recorded program with an allocator."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fsdpsim.allocator import AllocatorSettings, Block, CachingAllocator, DeviceMemory
from fsdpsim.allocator.blocks import FREE, LIVE, UNMAPPED
from fsdpsim.allocator.expandable import range_size
from fsdpsim.allocator.restore import Piece, SegmentState
from fsdpsim.replay.ranges import RangeBases
from fsdpsim.replay.undo import Extent, InitialState


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a pass came to; sizes in bytes."""

    settings: AllocatorSettings
    requested_peak: int
    allocated_peak: int
    active_peak: int
    reserved_peak: int
    active_at_peak: int
    """Active when reserved first reached its peak, after the request that raised it."""
    inactive_split_at_peak: int
    final_reserved: int
    num_alloc_retries: int
    num_ooms: int
    num_device_alloc: int
    """Segments opened, or mappings made."""
    num_device_free: int
    """Segments freed, or mappings undone."""
    first_oom: int | None
    """Event of the trace at which the first request failed."""

    @property
    def fragmentation(self) -> float:
        """Share of the peak reserved memory that was not active then: 1 - active / reserved."""
        return 1 - self.active_at_peak / self.reserved_peak if self.reserved_peak else 0.0


class Completions:
    """The allocator's device: an event completes when the trace shows that it was noticed.

    Every deferred free records its event on a stream of its own, the address of the block, so
    blocks become free one by one in the order of the trace.
    """

    def __init__(self) -> None:
        self._outstanding: set[Hashable] = set()

    def record_event(self, stream: Hashable) -> object:
        """Return an event that is outstanding until :meth:`complete`."""
        self._outstanding.add(stream)
        return stream

    def query(self, event: object) -> bool:
        """Return whether the trace has shown the event complete."""
        return event not in self._outstanding

    def complete(self, stream: Hashable) -> None:
        """Let the event of ``stream`` be complete."""
        self._outstanding.discard(stream)


class Pass:
    """An allocator with the blocks it handed out, by their addresses in the recording."""

    def __init__(self, allocator: CachingAllocator, completions: Completions) -> None:
        self.allocator = allocator
        self.completions = completions
        self.blocks: dict[int, Block] = {}
        self.first_oom: int | None = None
        self._most_reserved = self._active_then = self._split_then = 0
        self.note_peak()

    def note_peak(self) -> None:
        """Remember how memory is used if reserved is at a new peak; call after each request."""
        stats = self.allocator.stats
        reserved = stats.reserved_bytes.current
        if reserved > self._most_reserved:
            self._most_reserved = reserved
            self._active_then = stats.active_bytes.current
            self._split_then = stats.inactive_split_bytes.current

    def free(self, address: int, *, deferred: bool) -> None:
        """Free the block that the recording has at ``address``, if it was ever allocated here."""
        block = self.blocks.pop(address, None)
        if block is None:
            return
        if deferred:
            self.allocator.record_stream(block, ("use of", address))
        self.allocator.free(block)

    def free_pending(self, initial: InitialState) -> None:
        """Defer the frees that were outstanding before the first event."""
        for extent in initial.extents:
            for block in extent.blocks:
                if block.pending:
                    self.free(block.address, deferred=True)

    def complete(self, address: int) -> None:
        """The recording shows the deferred free at ``address`` completed."""
        self.completions.complete(("use of", address))

    def outcome(self) -> Outcome:
        """Sum up."""
        allocator, stats = self.allocator, self.allocator.stats
        return Outcome(
            settings=allocator.settings,
            requested_peak=stats.requested_bytes.peak,
            allocated_peak=stats.allocated_bytes.peak,
            active_peak=stats.active_bytes.peak,
            reserved_peak=stats.reserved_bytes.peak,
            active_at_peak=self._active_then,
            inactive_split_at_peak=self._split_then,
            final_reserved=stats.reserved_bytes.current,
            num_alloc_retries=allocator.num_alloc_retries,
            num_ooms=allocator.num_ooms,
            num_device_alloc=allocator.reserved.num_device_alloc,
            num_device_free=allocator.reserved.num_device_free,
            first_oom=self.first_oom,
        )


def segment_states(
    initial: InitialState, bases: RangeBases, settings: AllocatorSettings, total_memory: int
) -> list[SegmentState]:
    """Return the initial state as segments and virtual ranges for ``restore``."""
    states: list[SegmentState] = []
    ranges: dict[tuple[int, bool], list[Extent]] = {}
    for extent in initial.extents:
        if extent.expandable:
            ranges.setdefault((extent.stream, extent.is_small), []).append(extent)
        else:
            states.append(_state(extent, extent.address, _pieces(extent)))
    for key, runs in ranges.items():
        page = 2 << 20 if key[1] else settings.large_segment_size
        size = range_size(total_memory, page)
        states.append(
            _state(runs[0], bases.initial[key], _range_pieces(runs, bases.initial[key], size))
        )
    return states


def _state(extent: Extent, address: int, pieces: list[Piece]) -> SegmentState:
    return SegmentState(
        address=address,
        stream=extent.stream,
        is_small=extent.is_small,
        expandable=extent.expandable,
        pieces=tuple(pieces),
    )


def _pieces(extent: Extent) -> list[Piece]:
    pieces, position = [], extent.address
    for block in extent.blocks:
        if block.address > position:
            pieces.append(Piece(block.address - position, FREE))
        size = block.size or 0
        pieces.append(Piece(size, LIVE, block.requested_size))
        position = block.address + size
    if position < extent.end:
        pieces.append(Piece(extent.end - position, FREE))
    return pieces


def _range_pieces(runs: list[Extent], base: int, size: int) -> list[Piece]:
    pieces, position = [], base
    for run in runs:
        if run.address > position:
            pieces.append(Piece(run.address - position, UNMAPPED))
        pieces += _pieces(run)
        position = run.end
    if position < base + size:
        pieces.append(Piece(base + size - position, UNMAPPED))
    return pieces


class Addresses(DeviceMemory):
    """Device memory whose new segments lie above everything in a recording."""

    def __init__(self, capacity: int, above: int) -> None:
        super().__init__(capacity)
        self._next_address = max(self._next_address, above)
