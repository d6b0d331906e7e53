"""What the allocator tells about itself, in torch's terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fsdpsim.allocator.blocks import (
    FREE,
    LIVE,
    PENDING,
    UNMAPPED,
    Block,
    BlockPool,
    FreeList,
    Segment,
)
from fsdpsim.allocator.errors import OutOfMemory
from fsdpsim.allocator.sizes import UNLIMITED, segment_size

if TYPE_CHECKING:
    from fsdpsim.allocator.native import CachingAllocator

#: How a snapshot spells the states of a block.
STATE_NAMES = {LIVE: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}


def memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    """Return the flat, sorted dictionary of ``torch.cuda.memory_stats``."""
    limit = allocator.settings.max_split_size
    stats = {
        "num_alloc_retries": allocator.num_alloc_retries,
        "num_ooms": allocator.num_ooms,
        "num_oom_rejections": allocator.num_oom_rejections,
        "num_sync_all_streams": allocator.num_sync_all_streams,
        "num_device_alloc": allocator.reserved.num_device_alloc,
        "num_device_free": allocator.reserved.num_device_free,
        "max_split_size": -1 if limit == UNLIMITED else limit,
    }
    for name, count in allocator.stats.reported().items():
        for pool, metrics in count.report().items():
            stats |= {f"{name}.{pool}.{metric}": value for metric, value in metrics.items()}
    oversize = {
        "oversize_allocations": allocator.oversize_allocations,
        "oversize_segments": allocator.reserved.oversize_segments,
    }
    for name, stat in oversize.items():
        stats |= {f"{name}.{metric}": value for metric, value in stat.report().items()}
    return dict(sorted(stats.items()))


def memory_snapshot(segments: Iterable[Segment], device: int) -> list[dict[str, Any]]:
    """Return the ``segments`` list of a torch memory snapshot; frames are left empty.

    An expandable range is listed as one segment per contiguous mapped run.
    """
    return [
        _segment_record(segment, run, device)
        for segment in segments
        for run in _mapped_runs(segment)
    ]


def _mapped_runs(segment: Segment) -> Iterator[list[Block]]:
    for unmapped, run in groupby(segment.blocks(), key=lambda block: block.state == UNMAPPED):
        if not unmapped:
            yield list(run)


def _segment_record(segment: Segment, run: list[Block], device: int) -> dict[str, Any]:
    active = [block for block in run if block.state != FREE]
    return {
        "device": device,
        "address": run[0].address,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in active if block.state == LIVE),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_size for block in active),
        "stream": segment.free_list.stream,
        "segment_type": "small" if segment.free_list.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [_block_record(block) for block in run],
    }


def _block_record(block: Block) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": 0 if block.state == FREE else block.requested_size,
        "state": STATE_NAMES[block.state],
        "frames": [],
    }


def out_of_memory(
    allocator: CachingAllocator,
    free_list: FreeList,
    size: int,
    nbytes: int,
    *,
    rejected: bool = False,
) -> OutOfMemory:
    """Describe a failed request of ``nbytes``, rounded to ``size``, on ``free_list``."""
    stats = allocator.stats
    this_stream = _free_bytes(free_list)
    this_pool = _pool_free_bytes(free_list.pool)
    other = allocator.large if free_list.pool is allocator.small else allocator.small
    other_pool = _free_bytes(other.free_list(free_list.stream))
    return OutOfMemory(
        stream=free_list.stream,
        requested=nbytes,
        rounded=size,
        segment_size=segment_size(size, allocator.settings.large_segment_size),
        capacity=allocator.reserved.memory.capacity,
        limit=allocator.settings.memory_limit(allocator.reserved.total_memory),
        reserved=stats.reserved_bytes.current,
        allocated=stats.allocated_bytes.current,
        pending=stats.pending_bytes.current,
        this_stream=this_stream,
        other_streams=this_pool - this_stream + _pool_free_bytes(other) - other_pool,
        other_pool=other_pool,
        inactive_split=stats.inactive_split_bytes.current,
        rejected=rejected,
    )


def _free_bytes(free_list: FreeList) -> int:
    return sum(block.size for block in free_list.blocks)


def _pool_free_bytes(pool: BlockPool) -> int:
    return sum(_free_bytes(free_list) for free_list in pool.free_lists.values())
