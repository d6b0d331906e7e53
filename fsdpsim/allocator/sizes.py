"""Sizes the caching allocator works with, and how a request is rounded.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.cpp`` of pytorch 2.13.
All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1 << 20

#: Granularity of every block.
MIN_BLOCK_SIZE = 512
#: Rounded requests up to this size are served by the small pool.
SMALL_SIZE = MIB
#: Segment of the small pool, and page of its expandable ranges.
SMALL_BUFFER = 2 * MIB
#: Segment that large-pool requests below :data:`MIN_LARGE_ALLOC` share.
DEFAULT_LARGE_SEGMENT_SIZE = 20 * MIB
#: Requests of at least this size get a segment of their own ...
MIN_LARGE_ALLOC = 10 * MIB
#: ... rounded up to this, which is also the granularity of physical memory.
ROUND_LARGE = 2 * MIB
#: How torch writes "no limit" for a size (``SIZE_MAX``).
UNLIMITED = 2**64 - 1
#: Torch refuses a request of this size before it reaches the allocator.
MAX_REQUEST = 1 << 60


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``nbytes``."""
    return -(-nbytes // step) * step


def round_size(nbytes: int, divisions: Sequence[int]) -> int:
    """Return the block size that a request of ``nbytes`` (> 0) asks for.

    ``divisions`` holds one entry per power of two from 1 MiB to 32 GiB; 0 and 1 mean a multiple
    of 512 bytes, d > 1 a multiple of 1/d of the power of two below (``round_size``).
    """
    exponent = nbytes.bit_length() - 1
    slot = min(max(exponent - 20, 0), len(divisions) - 1)
    count = divisions[slot]
    if count > 1 and nbytes > MIN_BLOCK_SIZE * count:
        return round_up(nbytes, (1 << exponent) // count)
    return round_up(nbytes, MIN_BLOCK_SIZE)


def segment_size(rounded: int, large_segment_size: int) -> int:
    """Return the bytes of cudaMalloc that a rounded request needs (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_BUFFER
    if rounded < MIN_LARGE_ALLOC:
        return large_segment_size
    return round_up(rounded, ROUND_LARGE)
