"""Expandable ranges as a trace shows them: which pool an address belongs to, where ranges begin.

A snapshot lists mapped runs, not virtual ranges. One range per stream and pool is assumed, as
long as anything of it is mapped; its base is the lowest address mapped in that time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from fsdpsim.allocator.sizes import SMALL_SIZE, round_size
from fsdpsim.replay.recording import Event, Recording
from fsdpsim.replay.spans import Spans


class PoolOf:
    """Tells the pool of an address in expandable memory, from what is known to lie near it.

    The large pool maps whole large pages only. Beyond that, ranges of different pools are further
    apart than the size of the device, so the nearest address of known pool on the same stream
    is in the same range.
    """

    def __init__(self, recording: Recording) -> None:
        expandable = _expandable_memory(recording)
        divisions = recording.settings.roundup_power2_divisions
        known: dict[int, dict[int, bool]] = {}
        for segment in recording.segments:
            if segment.expandable:
                known.setdefault(segment.stream, {})[segment.address] = segment.is_small
        for event in recording.events:
            if event.action in ("alloc", "free_completed") and expandable.find(event.address):
                small = event.size > 0 and round_size(event.size, divisions) <= SMALL_SIZE
                known.setdefault(event.stream, {})[event.address] = small
        self._large_page = recording.settings.large_segment_size
        self._known = {stream: sorted(pools.items()) for stream, pools in known.items()}

    def is_small(self, stream: int, address: int, size: int) -> bool:
        """Return whether a run of ``size`` bytes at ``address`` belongs to the small pool."""
        known = self._known.get(stream)
        if size % self._large_page or not known:
            return size % self._large_page != 0
        position = bisect_left(known, (address,))
        near = known[max(position - 1, 0) : position + 1]
        return min(near, key=lambda item: abs(item[0] - address))[1]


def _expandable_memory(recording: Recording) -> Spans:
    spans = Spans()
    for segment in recording.segments:
        if segment.expandable:
            spans.add(segment.address, segment.address + segment.size)
    for event in recording.events:
        if event.action in ("segment_map", "segment_unmap"):
            spans.add(event.address, event.address + event.size)
    return spans


class RangeBases:
    """Bases of the virtual ranges: of those mapped at the start, and of those opened later.

    ``initial`` is by stream and pool; ``opened`` lists, by stream and pool, the ranges opened
    later as (index of the first map event, base).
    ``extent`` is the largest number of bytes between a base and the end of a mapping.
    """

    def __init__(
        self, recording: Recording, pool_of: PoolOf, runs: Iterable[tuple[int, bool, int, int]]
    ) -> None:
        self.initial: dict[tuple[int, bool], int] = {}
        self.opened: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self.extent = 0
        self._mapped: dict[tuple[int, bool], int] = {}
        for stream, is_small, address, size in runs:
            key = stream, is_small
            self._mapped[key] = self._mapped.get(key, 0) + size
            self.initial[key] = min(address, self.initial.get(key, address))
            self.extent = max(self.extent, address + size - self.initial[key])
        for index, event in enumerate(recording.events):
            if event.action in ("segment_map", "segment_unmap"):
                small = pool_of.is_small(event.stream, event.address, event.size)
                self._follow((event.stream, small), index, event)

    def _follow(self, key: tuple[int, bool], index: int, event: Event) -> None:
        mapped = self._mapped.get(key, 0)
        if event.action == "segment_unmap":
            self._mapped[key] = mapped - event.size
            return
        self._mapped[key] = mapped + event.size
        opened = self.opened.setdefault(key, [])
        if not mapped:
            opened.append((index, event.address))
        elif opened:
            opened[-1] = opened[-1][0], min(opened[-1][1], event.address)
        else:
            self.initial[key] = min(self.initial[key], event.address)
        base = opened[-1][1] if opened else self.initial[key]
        self.extent = max(self.extent, event.address + event.size - base)

    def next_base(self, stream: int, is_small: bool, index: int) -> int | None:
        """Return the base of the next range opened at or after event ``index``."""
        opened = self.opened.get((stream, is_small), ())
        return next((base for first, base in opened if first >= index), None)
