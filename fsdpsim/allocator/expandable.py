"""Expandable ranges: where to grow, and what mapping and unmapping do to the chain of blocks.

Source: ``find_expandable_block``, ``map_block`` and ``unmap_block`` of
``c10/cuda/CUDACachingAllocator.cpp``. Driver calls, capacity and statistics are the allocator's.
"""

from __future__ import annotations

from fsdpsim.allocator.blocks import FREE, UNMAPPED, Block, FreeList, Segment
from fsdpsim.allocator.sizes import round_up


def range_size(total_memory: int, page_size: int) -> int:
    """Return the bytes of a virtual range: 9/8 of the device, in whole pages."""
    return round_up(total_memory + total_memory // 8, page_size)


def find_growable(free_list: FreeList, size: int) -> Block | None:
    """Return the first run of free and unmapped blocks that can hold ``size`` bytes.

    The block returned is the first of the run; None when no range has room.
    """
    for hole in free_list.unmapped:
        before = hole.prev
        start = before if before is not None and before.state == FREE else hole
        if _room(start, size) >= size:
            return start
    return None


def _room(block: Block | None, enough: int) -> int:
    room = 0
    while block is not None and room < enough and block.state in (FREE, UNMAPPED):
        room += block.size
        block = block.next
    return room


def expanded_size(block: Block) -> int:
    """Return the bytes a free block can grow to without moving: itself and the hole behind it."""
    after = block.next
    if after is not None and after.state == UNMAPPED:
        return block.size + after.size
    return block.size


def map_front(hole: Block, size: int) -> Block:
    """Map the first ``size`` bytes of a hole; return the free block that they end up in."""
    free_list = hole.segment.free_list
    free_list.unmapped.remove(hole)
    if size < hole.size:
        free_list.insert_unmapped(hole.split(size))
    hole.state = FREE
    return _merge_free(free_list, hole)


def _merge_free(free_list: FreeList, block: Block) -> Block:
    before, after = block.prev, block.next
    if before is not None and before.state == FREE:
        free_list.remove(before)
        before.absorb_next()
        block = before
    if after is not None and after.state == FREE:
        free_list.remove(after)
        block.absorb_next()
    free_list.insert(block)
    return block


def whole_pages(block: Block) -> tuple[int, int]:
    """Return address and bytes of the pages that lie entirely inside ``block``."""
    page, base = block.segment.free_list.pool.page_size, block.segment.address
    first = round_up(block.address - base, page)
    last = (block.address + block.size - base) // page * page
    return base + first, max(last - first, 0)


def unmap_pages(block: Block) -> Block:
    """Turn the whole pages inside a free block into a hole; return the hole, merged.

    What lies outside whole pages stays free. The block must hold at least one whole page.
    """
    free_list = block.segment.free_list
    address, size = whole_pages(block)
    free_list.remove(block)
    hole = block
    if address > block.address:
        hole = block.split(address - block.address)
        free_list.insert(block)
    if size < hole.size:
        free_list.insert(hole.split(size))
    hole.state = UNMAPPED
    return _merge_holes(free_list, hole)


def _merge_holes(free_list: FreeList, hole: Block) -> Block:
    before, after = hole.prev, hole.next
    if after is not None and after.state == UNMAPPED:
        free_list.unmapped.remove(after)
        hole.absorb_next()
    if before is not None and before.state == UNMAPPED:
        before.absorb_next()
        return before
    free_list.insert_unmapped(hole)
    return hole


def is_empty(segment: Segment) -> bool:
    """Return whether nothing of a virtual range is mapped."""
    return segment.head.state == UNMAPPED and segment.head.next is None
