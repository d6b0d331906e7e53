"""What really happened, from the recorded addresses alone: no search, no allocator.

Block sizes are not in a trace. They follow from the recorded address, the free memory that
starts there, and the rule for splitting.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpsim.allocator.settings import AllocatorSettings
from fsdpsim.allocator.sizes import MIN_BLOCK_SIZE, SMALL_SIZE, round_size
from fsdpsim.replay.recording import FLUSHES, GROWTHS, Event, Recording, SnapshotError
from fsdpsim.replay.undo import InitialState


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the trace shows; sizes in bytes."""

    requested_peak: int
    allocated_peak: int
    active_peak: int
    reserved_peak: int
    active_at_peak: int
    """Active when reserved first reached its peak, after the request that raised it."""
    final_reserved: int
    num_device_alloc: int
    num_device_free: int
    num_ooms: int
    oom_capacity: int | None
    """Reserved plus free memory of the device at the last OOM; None without an OOM."""

    @property
    def fragmentation(self) -> float:
        """Share of the peak reserved memory that was not active then: 1 - active / reserved."""
        return 1 - self.active_at_peak / self.reserved_peak if self.reserved_peak else 0.0


class _Heap:
    """Free memory by address, and running totals with their peaks."""

    def __init__(self, initial: InitialState, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.free_end: dict[int, int] = {}
        self.free_start: dict[int, int] = {}
        self.segment_starts: set[int] = set()
        self.blocks: dict[int, tuple[int, int]] = {}
        self.level = dict.fromkeys(("requested", "allocated", "active", "reserved"), 0)
        self.peak = dict(self.level)
        self.active_at_peak = 0
        self.oom_capacity: int | None = None
        self._most_reserved = 0
        for extent in initial.extents:
            position = extent.address
            if not extent.expandable:
                self.segment_starts.add(position)
            for block in extent.blocks:
                self._free(position, block.address)
                size = block.size or 0
                self._use(block.address, size, block.requested_size)
                self.level["allocated"] -= size if block.pending else 0
                position = block.address + size
            self._free(position, extent.end)
            self.level["reserved"] += extent.size
        self.settle()

    def _free(self, start: int, end: int) -> None:
        if start == end:
            return
        if start not in self.segment_starts and start in self.free_start:
            start = self._take(self.free_start[start])[0]
        if end not in self.segment_starts and end in self.free_end:
            end = self._take(end)[1]
        self.free_end[start], self.free_start[end] = end, start

    def _take(self, start: int) -> tuple[int, int]:
        end = self.free_end.pop(start)
        del self.free_start[end]
        return start, end

    def _use(self, address: int, size: int, requested: int) -> None:
        self.blocks[address] = size, requested
        self.level["requested"] += requested
        self.level["allocated"] += size
        self.level["active"] += size

    def settle(self) -> None:
        """Take up peaks; called after each request."""
        if self.level["reserved"] > self._most_reserved:
            self._most_reserved = self.level["reserved"]
            self.active_at_peak = self.level["active"]
        for name, value in self.level.items():
            self.peak[name] = max(self.peak[name], value)

    def alloc(self, event: Event) -> None:
        start, end = self._take(event.address)
        size = self._block_size(event.size, end - start)
        self._use(start, size, event.size)
        self._free(start + size, end)
        self.settle()

    def _block_size(self, requested: int, room: int) -> int:
        rounded = round_size(requested, self.settings.roundup_power2_divisions)
        if rounded > room:
            raise KeyError(requested)
        if rounded <= SMALL_SIZE or self.settings.expandable_segments:
            return rounded if room - rounded >= MIN_BLOCK_SIZE else room
        split = rounded < self.settings.max_split_size and room - rounded > SMALL_SIZE
        return rounded if split else room

    def free_requested(self, event: Event) -> None:
        self.level["allocated"] -= self.blocks[event.address][0]

    def free_completed(self, event: Event) -> None:
        size, requested = self.blocks.pop(event.address)
        self.level["requested"] -= requested
        self.level["active"] -= size
        self._free(event.address, event.address + size)

    def reserve(self, event: Event) -> None:
        if event.action == "segment_alloc":
            self.segment_starts.add(event.address)
        self._free(event.address, event.address + event.size)
        self.level["reserved"] += event.size
        self.peak["reserved"] = max(self.peak["reserved"], self.level["reserved"])

    def release(self, event: Event) -> None:
        address, end = event.address, event.address + event.size
        start = address
        if self.free_end.get(address, 0) < end:
            start = next(a for a, b in self.free_end.items() if a <= address and end <= b)
        start, stop = self._take(start)
        self.segment_starts.discard(address)
        for left, right in ((start, address), (end, stop)):
            if left < right:
                self.free_end[left], self.free_start[right] = right, left
        self.level["reserved"] -= event.size

    def oom(self, event: Event) -> None:
        self.oom_capacity = self.level["reserved"] + event.address


def recorded(recording: Recording, initial: InitialState) -> Recorded:
    """Go through the trace at its recorded addresses.

    Raises :class:`SnapshotError` if it cannot have happened like that.
    """
    heap = _Heap(initial, recording.settings)
    handlers = {
        "alloc": heap.alloc,
        "free_requested": heap.free_requested,
        "free_completed": heap.free_completed,
        "oom": heap.oom,
        **dict.fromkeys(GROWTHS, heap.reserve),
        **dict.fromkeys(FLUSHES, heap.release),
    }
    for index, event in enumerate(recording.events):
        try:
            handlers[event.action](event)
        except (KeyError, StopIteration):
            raise SnapshotError(
                f"device {recording.device}: event {index}, {event.action} of {event.size} bytes"
                f" at {event.address:#x}, contradicts the memory at that time"
            ) from None
    heap.settle()
    actions = [event.action for event in recording.events]
    return Recorded(
        requested_peak=heap.peak["requested"],
        allocated_peak=heap.peak["allocated"],
        active_peak=heap.peak["active"],
        reserved_peak=heap.peak["reserved"],
        active_at_peak=heap.active_at_peak,
        final_reserved=heap.level["reserved"],
        num_device_alloc=sum(action in GROWTHS for action in actions),
        num_device_free=sum(action in FLUSHES for action in actions),
        num_ooms=actions.count("oom"),
        oom_capacity=heap.oom_capacity,
    )
