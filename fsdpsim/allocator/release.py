"""How cached memory goes back to the driver: gc, release_available, release_cached.

Source: ``garbage_collect_cached_blocks``, ``release_available_cached_blocks`` and
``release_blocks`` in ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator

from fsdpsim.allocator.blocks import SIZE_SHIFT, Block, BlockPool, FreeList
from fsdpsim.allocator.driver import DriverCall
from fsdpsim.allocator.errors import UnsupportedSettingsError
from fsdpsim.allocator.reserved import ReservedMemory
from fsdpsim.allocator.sizes import UNLIMITED


def _free_blocks(pool: BlockPool) -> Iterator[Block]:
    """Yield the free blocks in torch's order: by stream, then size, then address."""
    for free_list in sorted(pool.free_lists.values(), key=_stream_order):
        yield from free_list.blocks


def _stream_order(free_list: FreeList) -> tuple[int, str]:
    """Order streams by handle, as torch does; streams with names come after those with handles."""
    stream = free_list.stream
    return (stream, "") if isinstance(stream, int) else (1 << 64, str(stream))


def collect_garbage(
    reserved: ReservedMemory, large: BlockPool, target: int
) -> Generator[DriverCall, None, None]:
    """Free whole large segments that were unused for longest, until ``target`` bytes are back.

    A block's age is the number of searches of its pool since it was freed. All blocks at or
    above the average age go, even past the target.
    """
    candidates = [block for block in _free_blocks(large) if not block.is_split]
    reclaimed, progress = 0, True
    while reclaimed < target and progress and candidates:
        average = sum(large.searches - block.gc_base for block in candidates) / len(candidates)
        old = [
            block
            for block in candidates
            if not block.segment.expandable and large.searches - block.gc_base >= average
        ]
        for block in old:
            reclaimed += block.size
            yield from reserved.cuda_free(block)
        progress = bool(old)
        gone = set(old)
        candidates = [block for block in candidates if block not in gone]


def release_available(
    reserved: ReservedMemory, free_list: FreeList, size: int
) -> Generator[DriverCall, None, bool]:
    """Free oversize segments of the request's stream, only as many as it needs.

    Returns whether that made room for ``size`` bytes; what was freed stays freed.
    """
    limit = reserved.max_split_size
    if limit == UNLIMITED:
        return False
    wanted = max(size, limit)
    position = bisect_left(free_list.keys, wanted << SIZE_SHIFT)
    above, below = free_list.blocks[position : position + 1], free_list.blocks[:position]
    if above and not above[0].segment.expandable:
        yield from _cuda_free_whole(reserved, above[0])
        return True
    released = 0
    while below and released < wanted and below[-1].size >= limit:
        block = below.pop()
        if not block.segment.expandable:
            released += block.size
            yield from _cuda_free_whole(reserved, block)
    return released >= wanted


def _cuda_free_whole(reserved: ReservedMemory, block: Block) -> Generator[DriverCall, None, None]:
    if block.is_split:
        raise UnsupportedSettingsError(
            "max_split_size_mb was lowered while a larger block was split: torch would cudaFree"
            f" a segment that is partly used ({block!r})"
        )
    yield from reserved.cuda_free(block)


def release_blocks(reserved: ReservedMemory, pool: BlockPool) -> Generator[DriverCall, None, None]:
    """Free every whole free segment of a pool, then unmap every free page, on all streams."""
    blocks = list(_free_blocks(pool))
    for block in blocks:
        if not block.segment.expandable and not block.is_split:
            yield from reserved.cuda_free(block)
    for block in blocks:
        if block.segment.expandable:
            yield from reserved.unmap(block)
