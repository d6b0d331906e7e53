"""What the allocator asks of the device: work for the host to pay for, and events.

The slow path of the allocator is a generator of :class:`DriverCall` objects. The caller pays for
each (in simulated time, or not at all) and resumes the generator when the call has returned.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from fsdpsim.allocator.sizes import ROUND_LARGE, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverCall:
    """One call that costs host time. ``size`` is in bytes."""

    size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMalloc(DriverCall):
    """``cudaMalloc``; also yielded when it is going to fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFree(DriverCall):
    """``cudaFree``: returns only when all outstanding work of the device has finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Map(DriverCall):
    """``cuMemCreate`` + ``cuMemMap`` of pages for an expandable range; waits for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmap(DriverCall):
    """``cuMemUnmap`` + ``cuMemRelease``: waits for the work of ``stream`` only."""

    stream: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class SynchronizeEvents(DriverCall):
    """``cudaEventSynchronize`` on each of ``events``: returns when all are complete."""

    events: tuple[object, ...]


class Device(Protocol):
    """Events of the device, as the allocator uses them."""

    def record_event(self, stream: Hashable) -> object:
        """Return an event that completes when the work enqueued on ``stream`` so far has."""

    def query(self, event: object) -> bool:
        """Return whether ``event`` is complete now."""


class IdleDevice:
    """A device without outstanding work: every event is complete."""

    def record_event(self, stream: Hashable) -> object:
        """Return an event."""
        return stream

    def query(self, event: object) -> bool:
        """Return True."""
        return True


class DeviceMemory:
    """Physical memory of ``capacity`` bytes, and the addresses that segments get.

    Physical memory comes in 2 MiB pages and has no external fragmentation, because it is
    mapped into a virtual address space. Addresses increase in creation order and are never
    reused; an unused page lies between segments, so that a reader of addresses alone can tell
    them apart. They stay below 2**53, as snapshot viewers need.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._next_address = 1 << 44

    @property
    def free(self) -> int:
        """Bytes the driver can still hand out (the model's ``cudaMemGetInfo``)."""
        return self.capacity - self.used

    def take(self, size: int) -> bool:
        """Take ``size`` bytes in whole pages; False, and nothing taken, if they do not fit."""
        physical = round_up(size, ROUND_LARGE)
        if self.used + physical > self.capacity:
            return False
        self.used += physical
        return True

    def give_back(self, size: int) -> None:
        """Return what one :meth:`take` of ``size`` bytes took."""
        self.used -= round_up(size, ROUND_LARGE)

    def place(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""
        address = self._next_address
        self._next_address += round_up(size, ROUND_LARGE) + ROUND_LARGE
        return address

    def place_range(self, size: int) -> int:
        """Return the base of a new virtual range of ``size`` bytes."""
        return self.place(size)
