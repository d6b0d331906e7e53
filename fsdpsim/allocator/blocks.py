"""Blocks, the segments they tile, and the ordered sets of free blocks.

A segment is a chain of blocks that covers it without gaps. The block at its start keeps its
identity for as long as the segment lives: a split keeps the front, a merge keeps the left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from operator import attrgetter

from fsdpsim.allocator.sizes import SMALL_BUFFER
from fsdpsim.allocator.stats import AllocatorStats, PoolStats

#: States of a block. FREE blocks are in a free list; UNMAPPED ones are holes of a virtual range.
FREE, LIVE, PENDING, UNMAPPED, GONE, NULL = range(6)

#: A free block's key is ``size << SIZE_SHIFT | address``: smallest first, then lowest address.
SIZE_SHIFT = 64


class Block:
    """Bytes ``[address, address + size)`` of one segment.

    A block that ``malloc`` returned is the caller's until it is given to ``free``; after that
    the object may be merged away or handed out again.
    """

    __slots__ = (
        "address",
        "gc_base",
        "key",
        "next",
        "pending",
        "prev",
        "requested_size",
        "segment",
        "size",
        "state",
        "stream_uses",
    )

    address: int
    size: int
    requested_size: int
    segment: Segment
    prev: Block | None
    next: Block | None
    state: int
    stream_uses: list[Hashable] | None
    pending: int
    key: int
    gc_base: int

    def __init__(self, segment: Segment, address: int, size: int, state: int = FREE) -> None:
        self.segment = segment
        self.address = address
        self.size = size
        self.state = state
        self.prev = self.next = self.stream_uses = None
        self.gc_base = 0

    def __repr__(self) -> str:
        state = ("free", "live", "pending", "unmapped", "gone", "null")[self.state]
        return f"<Block {self.address:#x} {self.size} B {state} stream={self.stream!r}>"

    @property
    def stream(self) -> Hashable:
        """The stream the block was allocated on; it never changes."""
        return self.segment.free_list.stream

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes; return the rest, in the same state, linked behind."""
        rest = Block(self.segment, self.address + size, self.size - size, self.state)
        rest.prev = self
        rest.next = after = self.next
        if after is not None:
            after.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the bytes of the next block, which is gone afterwards."""
        gone = self.next
        if gone is None:
            raise ValueError(f"{self!r} has no next block")
        self.size += gone.size
        self.next = after = gone.next
        if after is not None:
            after.prev = self
        gone.state = GONE


class Segment:
    """One cudaMalloc, or one virtual range of expandable memory (``expandable``)."""

    __slots__ = ("address", "expandable", "free_list", "head", "index", "size")

    def __init__(
        self, free_list: FreeList, address: int, size: int, *, index: int, expandable: bool
    ) -> None:
        self.free_list = free_list
        self.address = address
        self.size = size
        self.index = index
        self.expandable = expandable
        self.head = Block(self, address, size, UNMAPPED if expandable else FREE)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in address order."""
        block: Block | None = self.head
        while block is not None:
            yield block
            block = block.next


class FreeList:
    """Free blocks of one pool on one stream, and the holes of its expandable ranges.

    A search never crosses streams, so each stream has its own ordered set.
    """

    __slots__ = ("blocks", "keys", "pool", "stats", "stream", "unmapped")

    def __init__(self, pool: BlockPool, stream: Hashable) -> None:
        self.pool = pool
        self.stats = pool.stats
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def insert(self, block: Block) -> None:
        """Add a free block; its age counts from now."""
        if self.pool.searches:
            block.gc_base = self.pool.searches
        block.key = key = block.size << SIZE_SHIFT | block.address
        keys = self.keys
        position = bisect_left(keys, key)
        keys.insert(position, key)
        self.blocks.insert(position, block)

    def remove(self, block: Block) -> None:
        """Take out a free block that :meth:`insert` added and whose size has not changed since."""
        keys = self.keys
        position = bisect_left(keys, block.key)
        del keys[position]
        del self.blocks[position]

    def insert_unmapped(self, block: Block) -> None:
        """Add a hole; holes are ordered by address."""
        insort(self.unmapped, block, key=attrgetter("address"))


class BlockPool:
    """The small or the large pool of a device."""

    __slots__ = (
        "free_lists",
        "is_small",
        "page_size",
        "searches",
        "split_below",
        "split_from",
        "stats",
    )

    def __init__(self, stats: AllocatorStats, *, is_small: bool) -> None:
        self.is_small = is_small
        self.stats = PoolStats(stats, is_small=is_small)
        self.free_lists: dict[Hashable, FreeList] = {}
        self.searches = 0
        #: Bytes: a remainder of at least this is split off ...
        self.split_from = 0
        #: ... when the rounded request is below this.
        self.split_below = 0
        self.page_size = SMALL_BUFFER

    def free_list(self, stream: Hashable) -> FreeList:
        """Return the free list of ``stream``, made on first use."""
        free_list = self.free_lists.get(stream)
        if free_list is None:
            free_list = self.free_lists[stream] = FreeList(self, stream)
        return free_list
