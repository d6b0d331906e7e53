"""Put an empty allocator into a known state: the inverse of a memory snapshot."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fsdpsim.allocator.blocks import FREE, LIVE, UNMAPPED, Block, Segment
from fsdpsim.allocator.native import CachingAllocator


class Piece(NamedTuple):
    """Consecutive bytes of a segment in one state: FREE, LIVE or UNMAPPED."""

    size: int
    state: int
    requested_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentState:
    """A segment or virtual range, tiled by ``pieces``; free neighbours are already merged."""

    address: int
    stream: Hashable
    is_small: bool
    expandable: bool
    pieces: tuple[Piece, ...]


def restore(allocator: CachingAllocator, segments: Iterable[SegmentState]) -> dict[int, Block]:
    """Add segments; return the live blocks by address.

    Current statistics count everything restored; peaks start there, accumulated counts at zero.
    Raises ``ValueError`` if the device's memory is too small for the segments.
    """
    live = {}
    for state in segments:
        segment = _adopt(allocator, state)
        for block in _cut(segment, state.pieces):
            if block.state == LIVE:
                live[block.address] = block
        _count(allocator, segment)
    allocator.reset_peak_memory_stats()
    allocator.reset_accumulated_memory_stats()
    return live


def _adopt(allocator: CachingAllocator, state: SegmentState) -> Segment:
    pool = allocator.small if state.is_small else allocator.large
    size = sum(piece.size for piece in state.pieces)
    mapped = sum(piece.size for piece in state.pieces if piece.state != UNMAPPED)
    return allocator.reserved.adopt(
        pool.free_list(state.stream),
        state.address,
        size,
        expandable=state.expandable,
        mapped=mapped,
    )


def _cut(segment: Segment, pieces: Iterable[Piece]) -> Iterable[Block]:
    block: Block | None = segment.head
    for piece in pieces:
        assert block is not None
        rest = block.split(piece.size) if piece.size < block.size else None
        block.state = piece.state
        if piece.state == FREE:
            segment.free_list.insert(block)
        elif piece.state == UNMAPPED:
            segment.free_list.insert_unmapped(block)
        else:
            block.requested_size = piece.requested_size
        yield block
        block = rest


def _count(allocator: CachingAllocator, segment: Segment) -> None:
    limit = allocator.settings.max_split_size
    stats, levels = segment.free_list.stats, allocator.stats.levels
    for block in segment.blocks():
        if block.state == LIVE:
            stats.allocation.increase += 1
            stats.allocated_bytes.increase += block.size
            stats.requested_bytes.increase += block.requested_size
            levels.allocated += block.size
            levels.requested += block.requested_size
            allocator.oversize_allocations.increase += block.size >= limit
        elif block.state == FREE and block.is_split and not segment.expandable:
            stats.inactive_split.increase += 1
            stats.inactive_split_bytes.increase += block.size
