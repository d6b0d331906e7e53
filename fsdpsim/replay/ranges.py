"""Expandable ranges as a trace shows them: which pool an address belongs to, where ranges begin.

A snapshot lists mapped runs, not virtual ranges. One range per stream and pool is assumed, as
long as anything of it is mapped; its base is the lowest address mapped in that time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from fsdpsim.allocator.sizes import SMALL_SIZE, round_size
from fsdpsim.replay.recording import Recording
from fsdpsim.replay.spans import Spans


class PoolOf:
    """Tells the pool of an address in expandable memory, from what is known to lie near it.

    Ranges of different pools are further apart than the size of the device, so the nearest
    address of known pool on the same stream is in the same range.
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
        self._known = {stream: sorted(pools.items()) for stream, pools in known.items()}

    def is_small(self, stream: int, address: int) -> bool:
        """Return whether ``address`` on ``stream`` belongs to the small pool."""
        known = self._known.get(stream)
        if not known:
            return False
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

    ``initial`` is by stream and pool, ``opened`` by the index of the range's first map event.
    ``extent`` is the largest number of bytes between a base and the end of a mapping.
    """

    def __init__(
        self, recording: Recording, pool_of: PoolOf, runs: Iterable[tuple[int, bool, int, int]]
    ) -> None:
        self.initial: dict[tuple[int, bool], int] = {}
        self.opened: dict[int, int] = {}
        self.extent = 0
        self._mapped: dict[tuple[int, bool], int] = {}
        self._first_map: dict[tuple[int, bool], int | None] = {}
        self._ends: dict[tuple[int, bool], int] = {}
        for stream, is_small, address, size in runs:
            self._map((stream, is_small), address, size, None)
        for index, event in enumerate(recording.events):
            if event.action not in ("segment_map", "segment_unmap"):
                continue
            key = (event.stream, pool_of.is_small(event.stream, event.address))
            if event.action == "segment_map":
                self._map(key, event.address, event.size, index)
            else:
                self._mapped[key] = self._mapped.get(key, 0) - event.size

    def _map(self, key: tuple[int, bool], address: int, size: int, index: int | None) -> None:
        if self._mapped.get(key, 0) <= 0:
            self._mapped[key] = 0
            self._first_map[key] = index
            self._ends[key] = 0
        self._mapped[key] += size
        self._ends[key] = max(self._ends[key], address + size)
        first = self._first_map[key]
        base = min(
            address,
            self.initial.get(key, address) if first is None else self.opened.get(first, address),
        )
        if first is None:
            self.initial[key] = base
        else:
            self.opened[first] = base
        self.extent = max(self.extent, self._ends[key] - base)
