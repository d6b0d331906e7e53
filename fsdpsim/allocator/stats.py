"""Statistics of one pool, under torch's names.

Each statistic is kept as two counters that only grow, ``*_in`` and ``*_out``; the current value
is their difference. That costs the hot path one addition per statistic and call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Statistics kept as two growing counters and a peak.
COUNTED = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "segment",
    "reserved_bytes",
)


@dataclass(slots=True)
class PoolStats:
    """Counters of the small pool, the large pool, or both together.

    ``active`` is not counted by itself: it is ``allocation`` plus the blocks whose free still
    waits for an event (``pending``).
    """

    allocation_in: int = 0
    allocation_out: int = 0
    allocation_peak: int = 0
    allocated_bytes_in: int = 0
    allocated_bytes_out: int = 0
    allocated_bytes_peak: int = 0
    requested_bytes_in: int = 0
    requested_bytes_out: int = 0
    requested_bytes_peak: int = 0
    pending: int = 0
    pending_bytes: int = 0
    active_peak_with_pending: int = 0
    active_bytes_peak_with_pending: int = 0
    inactive_split_in: int = 0
    inactive_split_out: int = 0
    inactive_split_peak: int = 0
    inactive_split_bytes_in: int = 0
    inactive_split_bytes_out: int = 0
    inactive_split_bytes_peak: int = 0
    segment_in: int = 0
    segment_out: int = 0
    segment_peak: int = 0
    reserved_bytes_in: int = 0
    reserved_bytes_out: int = 0
    reserved_bytes_peak: int = 0
    history: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count_malloc(self, size: int, nbytes: int) -> None:
        """A block of ``size`` bytes was handed out for a request of ``nbytes``."""
        self.allocation_in += 1
        self.allocated_bytes_in += size
        self.requested_bytes_in += nbytes
        count = self.allocation_in - self.allocation_out
        if count > self.allocation_peak:
            self.allocation_peak = count
        total = self.allocated_bytes_in - self.allocated_bytes_out
        if total > self.allocated_bytes_peak:
            self.allocated_bytes_peak = total
        requested = self.requested_bytes_in - self.requested_bytes_out
        if requested > self.requested_bytes_peak:
            self.requested_bytes_peak = requested
        if self.pending:
            self._raise_active_peak(count, total)

    def _raise_active_peak(self, count: int, total: int) -> None:
        self.active_peak_with_pending = max(self.active_peak_with_pending, count + self.pending)
        self.active_bytes_peak_with_pending = max(
            self.active_bytes_peak_with_pending, total + self.pending_bytes
        )

    def count_inactive_split(self, blocks: int, nbytes: int) -> None:
        """Free blocks of partly used segments changed by ``blocks`` and ``nbytes``, net."""
        if blocks > 0:
            self.inactive_split_in += blocks
            count = self.inactive_split_in - self.inactive_split_out
            self.inactive_split_peak = max(self.inactive_split_peak, count)
        else:
            self.inactive_split_out -= blocks
        if nbytes > 0:
            self.inactive_split_bytes_in += nbytes
            total = self.inactive_split_bytes_in - self.inactive_split_bytes_out
            self.inactive_split_bytes_peak = max(self.inactive_split_bytes_peak, total)
        else:
            self.inactive_split_bytes_out -= nbytes

    def count_reserved(self, nbytes: int, *, segments: int) -> None:
        """``nbytes`` came from the driver, as ``segments`` new segments."""
        self.reserved_bytes_in += nbytes
        self.segment_in += segments
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        self.segment_peak = max(self.segment_peak, self.segment_in - self.segment_out)

    def count_returned(self, nbytes: int, *, segments: int) -> None:
        """``nbytes`` went back to the driver, with ``segments`` segments."""
        self.reserved_bytes_out += nbytes
        self.segment_out += segments

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that live tensors hold."""
        return self.allocated_bytes_in - self.allocated_bytes_out

    @property
    def active_bytes(self) -> int:
        """Bytes of live blocks and of blocks whose free waits for an event."""
        return self.allocated_bytes_in - self.allocated_bytes_out + self.pending_bytes

    @property
    def requested_bytes(self) -> int:
        """Bytes asked for, over active blocks."""
        return self.requested_bytes_in - self.requested_bytes_out

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self.reserved_bytes_in - self.reserved_bytes_out

    @property
    def inactive_split_bytes(self) -> int:
        """Bytes of free blocks whose cudaMalloc segment is partly used."""
        return self.inactive_split_bytes_in - self.inactive_split_bytes_out

    @property
    def active_bytes_peak(self) -> int:
        """Highest ``active_bytes`` so far; without pending blocks it equals the allocated peak."""
        return max(self.allocated_bytes_peak, self.active_bytes_peak_with_pending)

    @property
    def active_peak(self) -> int:
        """Highest number of active blocks so far."""
        return max(self.allocation_peak, self.active_peak_with_pending)

    def reset_peaks(self) -> None:
        """Set every peak to the current value (``reset_peak_memory_stats``)."""
        for name in COUNTED:
            current = getattr(self, f"{name}_in") - getattr(self, f"{name}_out")
            setattr(self, f"{name}_peak", current)
        self.active_peak_with_pending = self.allocation_peak + self.pending
        self.active_bytes_peak_with_pending = self.active_bytes

    def reset_accumulated(self) -> None:
        """Count increases and decreases from now on (``reset_accumulated_memory_stats``)."""
        self.history = self._accumulated()

    def report(self) -> dict[str, dict[str, int]]:
        """Return ``{statistic: {current, peak, allocated, freed}}`` as torch defines them."""
        return {
            name: {
                "current": increase - decrease,
                "peak": getattr(self, f"{name}_peak"),
                "allocated": increase - self.history.get(name, (0, 0))[0],
                "freed": decrease - self.history.get(name, (0, 0))[1],
            }
            for name, (increase, decrease) in self._accumulated().items()
        }

    def _accumulated(self) -> dict[str, tuple[int, int]]:
        counted = {
            name: (getattr(self, f"{name}_in"), getattr(self, f"{name}_out")) for name in COUNTED
        }
        count, nbytes = counted["allocation"], counted["allocated_bytes"]
        counted["active"] = (count[0], count[1] - self.pending)
        counted["active_bytes"] = (nbytes[0], nbytes[1] - self.pending_bytes)
        return counted


@dataclass(slots=True)
class OversizeStat:
    """A count with a peak, not kept per pool (``oversize_allocations``, ``oversize_segments``)."""

    increase: int = 0
    decrease: int = 0
    peak: int = 0
    history: tuple[int, int] = (0, 0)

    def add(self) -> None:
        """One more."""
        self.increase += 1
        self.peak = max(self.peak, self.increase - self.decrease)

    def remove(self) -> None:
        """One less."""
        self.decrease += 1

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.increase - self.decrease

    def reset_accumulated(self) -> None:
        """Count increases and decreases from now on."""
        self.history = (self.increase, self.decrease)

    def report(self) -> dict[str, int]:
        """Return ``{current, peak, allocated, freed}``."""
        return {
            "current": self.increase - self.decrease,
            "peak": self.peak,
            "allocated": self.increase - self.history[0],
            "freed": self.decrease - self.history[1],
        }
