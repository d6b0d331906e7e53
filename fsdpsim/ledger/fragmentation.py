"""Long-lived checkpoints between short-lived activations, on the CUDA caching allocator itself.

ZeRO, arXiv 1910.02054, section 6.3 (M_D): checkpoints are allocated between activations that are
dropped at once, so the free memory falls into pieces; copied into one buffer made beforehand, they
leave it whole. Here the allocator is torch's (:mod:`fsdpsim.allocator`): a checkpoint is cut from
the cached segment of an earlier activation, and a segment of which anything is in use cannot be
returned to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpsim.allocator import (
    AllocatorSettings,
    CachingAllocator,
    IdleDevice,
    OutOfMemoryError,
)

MIB = 2**20
STREAM = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Blocks that allocate an activation and keep a checkpoint, then one large request. Bytes."""

    capacity: int
    checkpoint: int
    activations: tuple[int, ...]
    """What each block allocates and drops; it differs from block to block."""
    request: int
    """What backward asks for when all blocks have run."""


#: An example in the proportions of a lecture's: nine blocks, and a request for half the memory.
EXAMPLE = Story(
    capacity=8192 * MIB,
    checkpoint=128 * MIB,
    activations=tuple(m * MIB for m in (600, 900, 700, 1200, 800, 1500, 1000, 1800, 1100)),
    request=4096 * MIB,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The allocator after the request. Bytes."""

    contiguous: bool
    served: bool
    free: int
    """What was not in use when the request came, of the whole device."""
    reserved: int
    """Segments held from the driver after the request, or its failure."""
    in_pieces: int
    """Free in these segments when the request failed; 0 if it was served."""


def run_story(story: Story, settings: AllocatorSettings, *, contiguous: bool) -> Outcome:
    """Allocate and free in order; ``contiguous``: checkpoints go into one buffer made first."""
    allocator = CachingAllocator(
        capacity=story.capacity,
        total_memory=story.capacity,
        device=IdleDevice(),
        settings=settings,
    )
    if contiguous:
        allocator.malloc(story.checkpoint * len(story.activations), STREAM)
    for nbytes in story.activations:
        activation = allocator.malloc(nbytes, STREAM)
        if not contiguous:
            allocator.malloc(story.checkpoint, STREAM)
        allocator.free(activation)
    free = story.capacity - allocator.stats.allocated_bytes.current
    in_pieces = _request(allocator, story.request)
    return Outcome(
        contiguous=contiguous,
        served=in_pieces is None,
        free=free,
        reserved=allocator.stats.reserved_bytes.current,
        in_pieces=in_pieces or 0,
    )


def _request(allocator: CachingAllocator, nbytes: int) -> int | None:
    """None when ``nbytes`` are served; else the bytes that are free in pieces."""
    try:
        allocator.malloc(nbytes, STREAM)
    except OutOfMemoryError as error:
        return error.report.this_stream
    return None
