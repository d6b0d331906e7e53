"""Memory held from the driver: cudaMalloc segments and mapped pages of expandable ranges."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable

from fsdpsim.allocator import expandable
from fsdpsim.allocator.blocks import GONE, UNMAPPED, Block, FreeList, Segment
from fsdpsim.allocator.driver import CudaFree, CudaMalloc, DeviceMemory, DriverCall, Map, Unmap
from fsdpsim.allocator.sizes import ROUND_LARGE, UNLIMITED, round_up
from fsdpsim.allocator.stats import AllocatorStats, Count

#: ``on_event(action, address, size, stream)`` with the actions of a torch memory snapshot; for
#: "oom", ``address`` is the free memory of the device and ``size`` the rounded request.
EventHook = Callable[[str, int, int, Hashable], None]


class ReservedMemory:
    """Takes memory from the driver and gives it back.

    Methods that talk to the driver are generators of :class:`DriverCall`; nothing changes until
    the caller has resumed them.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        total_memory: int,
        stats: AllocatorStats,
        on_event: EventHook | None,
    ) -> None:
        self.memory = memory
        self.total_memory = total_memory
        self.stats = stats
        self.on_event = on_event
        self.max_split_size = UNLIMITED
        self.segments: dict[Segment, None] = {}
        self.oversize_segments = Count()
        self.num_device_alloc = 0
        self.num_device_free = 0
        self._num_segments = 0

    def cuda_malloc(
        self, free_list: FreeList, size: int
    ) -> Generator[DriverCall, None, Block | None]:
        """Open a segment of ``size`` bytes; return its only block, in no free list, or None."""
        yield CudaMalloc(size=size)
        if not self.memory.take(size):
            return None
        address = self.memory.place(size)
        segment = self._new_segment(free_list, address, size, expandable=False)
        self._count_taken(free_list, size, segments=1)
        if size >= self.max_split_size:
            self.oversize_segments.increase += 1
            self.oversize_segments.settle()
        if self.on_event is not None:
            self.on_event("segment_alloc", segment.address, size, free_list.stream)
        return segment.head

    def cuda_free(self, block: Block) -> Generator[DriverCall, None, None]:
        """Close the segment that the free ``block`` is all of."""
        free_list, size = block.segment.free_list, block.size
        if self.on_event is not None:
            self.on_event("segment_free", block.address, size, free_list.stream)
        yield CudaFree(size=size)
        free_list.remove(block)
        block.state = GONE
        del self.segments[block.segment]
        self.memory.give_back(size)
        self._count_returned(free_list, size, segments=1)
        if size >= self.max_split_size:
            self.oversize_segments.decrease += 1

    def grow_range(
        self, free_list: FreeList, size: int
    ) -> Generator[DriverCall, None, Block | None]:
        """Map pages until a free block of ``size`` bytes exists; return it, in no free list.

        None when memory runs out; what was mapped until then stays mapped.
        """
        block = expandable.find_growable(free_list, size) or self._new_range(free_list)
        if block.state == UNMAPPED:
            mapped = yield from self._map(block, min(size, block.size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            hole = block.next
            if hole is None:
                raise ValueError(f"no room to grow behind {block!r}")
            mapped = yield from self._map(hole, min(size - block.size, hole.size))
            if mapped is None:
                return None
            block = mapped
        free_list.remove(block)
        return block

    def _map(self, hole: Block, nbytes: int) -> Generator[DriverCall, None, Block | None]:
        free_list, address = hole.segment.free_list, hole.address
        size = round_up(nbytes, free_list.pool.page_size)
        yield Map(size=size)
        if not self.memory.take(_physical(free_list, size)):
            return None
        block = expandable.map_front(hole, size)
        self._count_taken(free_list, size, segments=0)
        if self.on_event is not None:
            self.on_event("segment_map", address, size, free_list.stream)
        return block

    def unmap(self, block: Block) -> Generator[DriverCall, None, None]:
        """Give back the pages entirely inside a free block of an expandable range."""
        free_list = block.segment.free_list
        address, size = expandable.whole_pages(block)
        if size == 0:
            return
        yield Unmap(size=size, stream=free_list.stream)
        hole = expandable.unmap_pages(block)
        self.memory.give_back(_physical(free_list, size))
        self._count_returned(free_list, size, segments=0)
        if self.on_event is not None:
            self.on_event("segment_unmap", address, size, free_list.stream)
        if expandable.is_empty(hole.segment):
            free_list.unmapped.remove(hole)
            del self.segments[hole.segment]

    def adopt(
        self, free_list: FreeList, address: int, size: int, *, expandable: bool, mapped: int
    ) -> Segment:
        """Take over a segment that exists already, of which ``mapped`` bytes are reserved.

        Its head, which covers all of it, is in no free list.
        """
        physical = _physical(free_list, mapped) if expandable else mapped
        if not self.memory.take(physical):
            raise ValueError(
                f"{self.memory.used + physical} bytes of segments exceed the capacity of"
                f" {self.memory.capacity} bytes"
            )
        self._count_taken(free_list, mapped, segments=0 if expandable else 1)
        if not expandable and size >= self.max_split_size:
            self.oversize_segments.increase += 1
        return self._new_segment(free_list, address, size, expandable=expandable)

    def _new_range(self, free_list: FreeList) -> Block:
        size = expandable.range_size(self.total_memory, free_list.pool.page_size)
        address = self.memory.place_range(size)
        head = self._new_segment(free_list, address, size, expandable=True).head
        free_list.insert_unmapped(head)
        return head

    def _new_segment(
        self, free_list: FreeList, address: int, size: int, *, expandable: bool
    ) -> Segment:
        index = self._num_segments
        self._num_segments += 1
        segment = Segment(free_list, address, size, index=index, expandable=expandable)
        self.segments[segment] = None
        return segment

    def _count_taken(self, free_list: FreeList, size: int, *, segments: int) -> None:
        free_list.stats.reserved_bytes.increase += size
        free_list.stats.segment.increase += segments
        self.stats.levels.reserved += size
        self.stats.reserved_bytes.settle()
        self.stats.segment.settle()
        self.num_device_alloc += 1

    def _count_returned(self, free_list: FreeList, size: int, *, segments: int) -> None:
        free_list.stats.reserved_bytes.decrease += size
        free_list.stats.segment.decrease += segments
        self.stats.levels.reserved -= size
        self.num_device_free += 1


def _physical(free_list: FreeList, size: int) -> int:
    page = free_list.pool.page_size
    return size // page * round_up(page, ROUND_LARGE)
