"""The native CUDA caching allocator of one device: its default pools, without CUDA graphs.

Source of every rule: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` of
pytorch 2.11-2.13. Sizes and addresses are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Hashable, Iterator
from typing import Any, TypeVar

from fsdpsim.allocator import report
from fsdpsim.allocator.blocks import (
    FREE,
    LIVE,
    NULL,
    PENDING,
    SIZE_SHIFT,
    Block,
    BlockPool,
    FreeList,
    Segment,
)
from fsdpsim.allocator.driver import Device, DeviceMemory, DriverCall, SynchronizeEvents
from fsdpsim.allocator.errors import OutOfMemoryError, RequestTooLargeError
from fsdpsim.allocator.expandable import find_growable
from fsdpsim.allocator.release import collect_garbage, release_available, release_blocks
from fsdpsim.allocator.reserved import EventHook, ReservedMemory
from fsdpsim.allocator.search import SearchRules
from fsdpsim.allocator.settings import AllocatorSettings
from fsdpsim.allocator.sizes import (
    MAX_REQUEST,
    MIN_BLOCK_SIZE,
    SMALL_SIZE,
    UNLIMITED,
    round_size,
    segment_size,
)
from fsdpsim.allocator.stats import AllocatorStats, Count, PooledCount, PoolStats, settle

Result = TypeVar("Result")


class CachingAllocator:
    """Hands out blocks from cached segments, and asks the driver only when none fits.

    ``malloc_cached`` is the fast path, ``grow`` everything behind a cache miss; ``malloc`` joins
    the two for callers to whom waiting costs nothing. A request must call ``malloc_cached``
    first: it polls the events once, and ``grow`` neither polls nor searches again.
    """

    def __init__(
        self,
        *,
        capacity: int,
        total_memory: int,
        device: Device,
        settings: AllocatorSettings | None = None,
        on_event: EventHook | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Start empty.

        ``capacity``: bytes that can be allocated on the device. ``total_memory``: bytes of the
        whole device, the base of the memory fraction and of the size of expandable ranges.
        ``memory`` replaces the device memory made from ``capacity``. ``on_event`` is called as
        ``on_event(action, address, size, stream)`` in the order of a torch memory snapshot.
        """
        if capacity < 0 or total_memory <= 0:
            raise ValueError(f"negative capacity {capacity} or no total_memory {total_memory}")
        self.device = device
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_oom_rejections = 0
        self.stats = AllocatorStats()
        self._levels = self.stats.levels
        self._live_counts, self._split_counts = self.stats.live, self.stats.split
        self._rose = self._split_rose = False
        self.small = BlockPool(self.stats, is_small=True)
        self.large = BlockPool(self.stats, is_small=False)
        self.oversize_allocations = Count()
        self._events: dict[Hashable, deque[tuple[object, Block]]] = {}
        self._on_event = on_event
        self.reserved = ReservedMemory(
            memory or DeviceMemory(capacity), total_memory, self.stats, on_event
        )
        self._null = Segment(FreeList(self.small, None), 0, 0, index=-1, expandable=False).head
        self._null.state = NULL
        self._had_expandable = False
        self.configure(settings or AllocatorSettings())

    def configure(self, settings: AllocatorSettings) -> None:
        """Replace all settings; blocks and segments are kept."""
        self._settings = settings
        self._divisions = settings.roundup_power2_divisions
        self._rounds_to_512 = max(self._divisions) <= 1
        self._rules = SearchRules.of(settings)
        self._expandable = settings.expandable_segments
        self._had_expandable |= self._expandable
        self._max_split_size = self.reserved.max_split_size = settings.max_split_size
        self._limit = settings.memory_limit(self.reserved.total_memory)
        threshold = settings.garbage_collection_threshold
        self._gc_limit = None
        if threshold is not None and self._limit is not None:
            self._gc_limit = int(threshold * self._limit)
        self._any_block_fits = (
            not self._had_expandable
            and self._max_split_size == UNLIMITED
            and self._gc_limit is None
        )
        self.large.page_size = settings.large_segment_size
        fine = self._expandable
        self.small.split_from, self.small.split_below = MIN_BLOCK_SIZE, UNLIMITED
        self.large.split_from = MIN_BLOCK_SIZE if fine else SMALL_SIZE + 1
        self.large.split_below = UNLIMITED if fine else self._max_split_size

    # ---------------------------------------------------------------- malloc

    def malloc_cached(self, nbytes: int, stream: Hashable) -> Block | None:
        """Return a block for ``nbytes`` from the cache; None when memory must be reserved.

        Polls the events first. ``nbytes == 0`` returns a null block without a poll.
        """
        if not 0 < nbytes < MAX_REQUEST:
            return self._null_block(nbytes)
        if self._events:
            self.process_events()
        size = (nbytes + 511) & -512 if self._rounds_to_512 else self.rounded(nbytes)
        pool = self.small if size <= SMALL_SIZE else self.large
        try:
            free_list = pool.free_lists[stream]
        except KeyError:
            free_list = pool.free_list(stream)
        position = bisect_left(free_list.keys, size << SIZE_SHIFT)
        if not self._any_block_fits:
            if self._gc_limit is not None:
                pool.searches += 1
            position = self._rules.candidate(free_list.blocks, position, size)
        try:
            block = free_list.blocks.pop(position)
        except IndexError:
            return None
        del free_list.keys[position]
        return self._carve(block, size, nbytes, free_list)

    def segment_size(self, nbytes: int) -> int:
        """Return the bytes of cudaMalloc that a request of ``nbytes`` (> 0) needs on a miss."""
        return segment_size(self.rounded(nbytes), self._settings.large_segment_size)

    def is_cached(self, nbytes: int, stream: Hashable) -> bool:
        """Whether ``nbytes`` (> 0) would be served now without a driver call; changes nothing.

        With expandable segments a free block that the search refuses as oversize still serves:
        growing starts from it and finds nothing missing.
        """
        size = self.rounded(nbytes)
        free_list = (self.small if size <= SMALL_SIZE else self.large).free_list(stream)
        position = bisect_left(free_list.keys, size << SIZE_SHIFT)
        if self._rules.candidate(free_list.blocks, position, size) < len(free_list.blocks):
            return True
        start = find_growable(free_list, size) if self._expandable else None
        return start is not None and start.state == FREE and start.size >= size

    def _null_block(self, nbytes: int) -> Block:
        if nbytes == 0:
            return self._null
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        raise RequestTooLargeError(f"tried to allocate {nbytes} bytes: more than 1 EB")

    def rounded(self, nbytes: int) -> int:
        """Return the block size that a request of ``nbytes`` (> 0) asks for."""
        return round_size(nbytes, self._divisions)

    def _carve(self, block: Block, size: int, nbytes: int, free_list: FreeList) -> Block:
        """Hand out ``block``, which is in no free list, and put what is left over back."""
        stats, pool, segment = free_list.stats, free_list.pool, block.segment
        whole = block.size == segment.size
        rest_size = block.size - size
        if rest_size >= pool.split_from and size < pool.split_below:
            free_list.insert(block.split(size))
            if not segment.expandable:
                if whole:
                    self._count_split(stats, 1, rest_size)
                else:
                    self._count_split(stats, 0, -size)
        else:
            size = block.size
            if not whole and not segment.expandable:
                self._count_split(stats, -1, -size)
        block.state = LIVE
        block.requested_size = nbytes
        stats.allocation.increase += 1
        stats.allocated_bytes.increase += size
        stats.requested_bytes.increase += nbytes
        levels = self._levels
        levels.allocated += size
        levels.requested += nbytes
        self._rose = True
        if size >= self._max_split_size:
            self.oversize_allocations.increase += 1
            self.oversize_allocations.settle()
        if self._on_event is not None:
            self._on_event("alloc", block.address, nbytes, free_list.stream)
        return block

    def _settle_live(self) -> None:
        self._rose = False
        settle(self._live_counts)
        if self._events:
            self.stats.settle_active()

    def malloc(self, nbytes: int, stream: Hashable) -> Block:
        """Return a block for ``nbytes``; whatever must be waited for completes at once.

        Raises :class:`OutOfMemoryError`.
        """
        block = self.malloc_cached(nbytes, stream)
        return block if block is not None else _run(self.grow(nbytes, stream))

    def grow(self, nbytes: int, stream: Hashable) -> Generator[DriverCall, None, Block]:
        """Reserve memory for a request that ``malloc_cached`` has just missed, and carve it.

        Yields a :class:`DriverCall` before each thing that costs host time or must be waited
        for; resume when it is done. The pool is not searched again after a release, as in torch
        (pytorch#189504). Raises :class:`OutOfMemoryError`.
        """
        size = self.rounded(nbytes)
        free_list = (self.small if size <= SMALL_SIZE else self.large).free_list(stream)
        if self._gc_limit is not None and self.stats.reserved_bytes.current > self._gc_limit:
            target = self.stats.reserved_bytes.current - self._gc_limit
            yield from collect_garbage(self.reserved, self.large, target)
        block = yield from self._alloc_block(free_list, size, nbytes)
        if block is None and (yield from release_available(self.reserved, free_list, size)):
            block = yield from self._alloc_block(free_list, size, nbytes)
        if block is None:
            yield from self._release_cached()
            self.num_alloc_retries += 1
            block = yield from self._alloc_block(free_list, size, nbytes)
        if block is None:
            raise self._out_of_memory(free_list, size, nbytes)
        return self._carve(block, size, nbytes, free_list)

    def _alloc_block(
        self, free_list: FreeList, size: int, nbytes: int
    ) -> Generator[DriverCall, None, Block | None]:
        wanted = segment_size(size, self._settings.large_segment_size)
        if self._limit is not None and self.stats.reserved_bytes.current + wanted > self._limit:
            if self._settings.throw_on_cudamalloc_oom:
                self.num_oom_rejections += 1
                raise OutOfMemoryError(
                    report.out_of_memory(self, free_list, size, nbytes, rejected=True)
                )
            return None
        if self._expandable:
            return (yield from self.reserved.grow_range(free_list, size))
        return (yield from self.reserved.cuda_malloc(free_list, wanted))

    def _release_cached(self) -> Generator[DriverCall, None, None]:
        self.num_sync_all_streams += 1
        if self._events:
            queues = list(self._events.values())
            yield SynchronizeEvents(events=tuple(event for queue in queues for event, _ in queue))
            for queue in queues:
                for _, block in queue:
                    self._event_completed(block)
            self._events.clear()
        yield from release_blocks(self.reserved, self.large)
        yield from release_blocks(self.reserved, self.small)

    def empty_cache_steps(self) -> Generator[DriverCall, None, None]:
        """``torch.cuda.empty_cache``: like ``grow``, yields what costs time."""
        yield from self._release_cached()

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``; whatever must be waited for completes at once."""
        _run(self._release_cached())

    # ------------------------------------------------------------------ free

    def free(self, block: Block) -> None:
        """Give a block back; with recorded streams, once their work so far has finished.

        Never polls events. Raises ``ValueError`` for a block that is not live.
        """
        if block.state != LIVE:
            if block.state == NULL:
                return
            raise ValueError(f"{block!r} is not allocated")
        if self._rose:
            self._settle_live()
        free_list = block.segment.free_list
        stats, size = free_list.stats, block.size
        if self._on_event is not None:
            self._on_event("free_requested", block.address, block.requested_size, free_list.stream)
        stats.allocation.decrease += 1
        stats.allocated_bytes.decrease += size
        self._levels.allocated -= size
        if size >= self._max_split_size:
            self.oversize_allocations.decrease += 1
        if block.stream_uses is None:
            self._free_block(block, free_list)
        else:
            self._defer(block, block.stream_uses)

    def record_stream(self, block: Block, stream: Hashable) -> None:
        """Tell that ``stream`` uses the block: its free will wait for the work enqueued there."""
        if block.state == NULL or stream == block.segment.free_list.stream:
            return
        if block.state != LIVE:
            raise ValueError(f"{block!r} is not allocated")
        if block.stream_uses is None:
            block.stream_uses = [stream]
        elif stream not in block.stream_uses:
            block.stream_uses.append(stream)

    def _defer(self, block: Block, streams: list[Hashable]) -> None:
        block.state = PENDING
        block.stream_uses = None
        block.pending = len(streams)
        stats = block.segment.free_list.stats
        stats.pending.increase += 1
        stats.pending_bytes.increase += block.size
        self._levels.pending += block.size
        for stream in streams:
            event = self.device.record_event(stream)
            self._events.setdefault(stream, deque()).append((event, block))

    def process_events(self) -> None:
        """Free the blocks whose events have completed; every malloc starts with this."""
        query = self.device.query
        for stream, queue in list(self._events.items()):
            while queue and query(queue[0][0]):
                self._event_completed(queue.popleft()[1])
            if not queue:
                del self._events[stream]

    def _event_completed(self, block: Block) -> None:
        block.pending -= 1
        if block.pending:
            return
        if self._rose:
            self._settle_live()
        free_list = block.segment.free_list
        free_list.stats.pending.decrease += 1
        free_list.stats.pending_bytes.decrease += block.size
        self._levels.pending -= block.size
        self._free_block(block, free_list)

    def _free_block(self, block: Block, free_list: FreeList) -> None:
        """Put a block back into its free list, merged with its free neighbours."""
        stats = free_list.stats
        stats.requested_bytes.decrease += block.requested_size
        self._levels.requested -= block.requested_size
        if self._on_event is not None:
            self._on_event("free_completed", block.address, block.requested_size, free_list.stream)
        block.state = FREE
        before, after = block.prev, block.next
        if before is None and after is None:
            free_list.insert(block)
            return
        merged, freed = 0, block.size
        if before is not None and before.state == FREE:
            merged = 1
            free_list.remove(before)
            before.absorb_next()
            block = before
        if after is not None and after.state == FREE:
            merged += 1
            free_list.remove(after)
            block.absorb_next()
        free_list.insert(block)
        segment = block.segment
        if segment.expandable:
            return
        if block.size < segment.size:
            self._count_split(stats, 1 - merged, freed)
        else:
            self._count_split(stats, -merged, freed - block.size)

    def _count_split(self, stats: PoolStats, blocks: int, nbytes: int) -> None:
        """Free blocks of partly used segments changed by ``blocks`` and ``nbytes``, net."""
        if nbytes > 0:
            stats.inactive_split_bytes.increase += nbytes
            self._split_rose = True
            if blocks >= 0:
                stats.inactive_split.increase += blocks
                return
        if self._split_rose:
            self._split_rose = False
            settle(self._split_counts)
        stats.inactive_split.decrease -= blocks
        if nbytes < 0:
            stats.inactive_split_bytes.decrease -= nbytes

    # ------------------------------------------------------------ statistics

    @property
    def settings(self) -> AllocatorSettings:
        """The settings in force."""
        return self._settings

    @property
    def segments(self) -> list[Segment]:
        """Segments and virtual ranges, by address."""
        return sorted(self.reserved.segments, key=lambda segment: segment.address)

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()``: the same keys, the same meaning."""
        return report.memory_stats(self)

    def memory_snapshot(self, device: int = 0) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot()``: segments and blocks by address, without frames."""
        return report.memory_snapshot(self.segments, device)

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to the current value."""
        for count in self._counts():
            count.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Count increases, decreases and events from now on."""
        for count in self._counts():
            count.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_sync_all_streams = self.num_oom_rejections = 0
        self.reserved.num_device_alloc = self.reserved.num_device_free = 0

    def _counts(self) -> Iterator[PooledCount | Count]:
        yield from self.stats.counts().values()
        yield from (self.oversize_allocations, self.reserved.oversize_segments)

    def _out_of_memory(self, free_list: FreeList, size: int, nbytes: int) -> OutOfMemoryError:
        self.num_ooms += 1
        if self._on_event is not None:
            self._on_event("oom", self.reserved.memory.free, size, free_list.stream)
        return OutOfMemoryError(report.out_of_memory(self, free_list, size, nbytes))


def _run(steps: Generator[DriverCall, None, Result]) -> Result:
    """Run steps to their end, as if every driver call returned at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
