"""Statistics of the allocator, under torch's names and per pool.

A statistic is two counters that only grow, ``increase`` and ``decrease``; its current value is
their difference. The hot path changes the counters directly. ``settle`` takes up the peaks: it
is called after an increase, or, where increases are frequent, before the next decrease, because
a peak cannot lie anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable


class Count:
    """One statistic of one pool."""

    __slots__ = ("decrease", "history", "increase", "settled_peak")

    def __init__(self) -> None:
        self.increase = 0
        self.decrease = 0
        self.settled_peak = 0
        self.history = (0, 0)

    @property
    def current(self) -> int:
        """Increases minus decreases."""
        return self.increase - self.decrease

    @property
    def peak(self) -> int:
        """Highest value since the peaks were reset."""
        self.settle()
        return self.settled_peak

    def settle(self) -> None:
        """Take up the peak."""
        current = self.increase - self.decrease
        if current > self.settled_peak:
            self.settled_peak = current

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.settled_peak = self.current

    def reset_accumulated(self) -> None:
        """Count increases and decreases from now on."""
        self.history = (self.increase, self.decrease)

    def report(self) -> dict[str, int]:
        """Return ``{current, peak, allocated, freed}`` as torch defines them."""
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.increase - self.history[0],
            "freed": self.decrease - self.history[1],
        }


class PooledCount:
    """One statistic of the small pool, the large pool and both (torch's ``all``)."""

    __slots__ = ("large", "settled_peak", "small")

    def __init__(self) -> None:
        self.small = Count()
        self.large = Count()
        self.settled_peak = 0

    @property
    def current(self) -> int:
        """The sum over both pools."""
        small, large = self.small, self.large
        return small.increase - small.decrease + large.increase - large.decrease

    @property
    def peak(self) -> int:
        """Highest sum since the peaks were reset."""
        self.settle()
        return self.settled_peak

    def settle(self) -> None:
        """Take up the three peaks."""
        settle((self,))

    def reset_peak(self) -> None:
        """Set the three peaks to the current values."""
        self.small.reset_peak()
        self.large.reset_peak()
        self.settled_peak = self.current

    def reset_accumulated(self) -> None:
        """Count increases and decreases from now on."""
        self.small.reset_accumulated()
        self.large.reset_accumulated()

    def report(self) -> dict[str, dict[str, int]]:
        """Return ``{pool: {current, peak, allocated, freed}}``."""
        self.settle()
        small, large = self.small.report(), self.large.report()
        both = {metric: small[metric] + large[metric] for metric in small}
        return {"all": both | {"peak": self.peak}, "large_pool": large, "small_pool": small}


def settle(counts: Iterable[PooledCount]) -> None:
    """Take up the peaks of several statistics."""
    for count in counts:
        small, large = count.small, count.large
        low = small.increase - small.decrease
        high = large.increase - large.decrease
        if low > small.settled_peak:
            small.settled_peak = low
        if high > large.settled_peak:
            large.settled_peak = high
        if low + high > count.settled_peak:
            count.settled_peak = low + high


class ActiveCount(PooledCount):
    """Live blocks plus those whose free waits for an event, derived from the two counts.

    Without pending blocks it equals the live count, so only moments with pending blocks need
    settling, and the peak of the live count is the other candidate for the peak.
    """

    __slots__ = ("live", "pending")

    def __init__(self, live: PooledCount, pending: PooledCount) -> None:
        super().__init__()
        self.live = live
        self.pending = pending

    @property
    def current(self) -> int:
        """The sum over both pools."""
        return self.live.current + self.pending.current

    @property
    def peak(self) -> int:
        """Highest sum since the peaks were reset."""
        self._derive()
        return self.settled_peak

    def settle(self) -> None:
        """Take up the three peaks."""
        small = _settle_active(self.small, self.live.small, self.pending.small)
        large = _settle_active(self.large, self.live.large, self.pending.large)
        if small + large > self.settled_peak:
            self.settled_peak = small + large

    def _derive(self) -> None:
        """Bring counters and peaks up to date, for a reader."""
        live = self.live
        live.settle()
        self.settle()
        self.settled_peak = max(self.settled_peak, live.settled_peak)
        _follow(self.small, live.small, self.pending.small)
        _follow(self.large, live.large, self.pending.large)

    def report(self) -> dict[str, dict[str, int]]:
        """Return ``{pool: {current, peak, allocated, freed}}``."""
        self._derive()
        return super().report()

    def reset_peak(self) -> None:
        """Set the three peaks to the current values."""
        self.live.reset_peak()
        self._derive()
        super().reset_peak()

    def reset_accumulated(self) -> None:
        """Count increases and decreases from now on."""
        self._derive()
        super().reset_accumulated()


def _settle_active(active: Count, live: Count, pending: Count) -> int:
    current = live.increase - live.decrease + pending.increase - pending.decrease
    if current > active.settled_peak:
        active.settled_peak = current
    return current


def _follow(active: Count, live: Count, pending: Count) -> None:
    active.increase = live.increase
    active.decrease = live.decrease - pending.current
    active.settled_peak = max(active.settled_peak, live.settled_peak)


class Levels:
    """What a memory curve shows: running sums over both pools, in bytes."""

    __slots__ = ("allocated", "pending", "requested", "reserved")

    def __init__(self) -> None:
        self.requested = self.allocated = self.pending = self.reserved = 0


class AllocatorStats:
    """Every statistic that torch keeps per pool, plus the pending blocks."""

    def __init__(self) -> None:
        self.allocation = PooledCount()
        self.allocated_bytes = PooledCount()
        self.requested_bytes = PooledCount()
        self.inactive_split = PooledCount()
        self.inactive_split_bytes = PooledCount()
        self.segment = PooledCount()
        self.reserved_bytes = PooledCount()
        self.pending = PooledCount()
        self.pending_bytes = PooledCount()
        self.active = ActiveCount(self.allocation, self.pending)
        self.active_bytes = ActiveCount(self.allocated_bytes, self.pending_bytes)
        self.levels = Levels()

    @property
    def live(self) -> tuple[PooledCount, ...]:
        """What a malloc increases."""
        return self.allocation, self.allocated_bytes, self.requested_bytes

    @property
    def split(self) -> tuple[PooledCount, ...]:
        """What the free blocks of partly used segments add up to."""
        return self.inactive_split, self.inactive_split_bytes

    def settle_active(self) -> None:
        """Take up the peaks of active; needed only while blocks are pending."""
        self.active.settle()
        self.active_bytes.settle()

    def counts(self) -> dict[str, PooledCount]:
        """Every statistic by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, PooledCount)}

    def reported(self) -> dict[str, PooledCount]:
        """Return the statistics that ``memory_stats`` shows, by name."""
        return {n: count for n, count in self.counts().items() if not n.startswith("pending")}


class PoolStats:
    """The counts of one pool, side by side for the hot path."""

    __slots__ = (
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "pending",
        "pending_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    )

    allocation: Count
    allocated_bytes: Count
    requested_bytes: Count
    inactive_split: Count
    inactive_split_bytes: Count
    pending: Count
    pending_bytes: Count
    segment: Count
    reserved_bytes: Count

    def __init__(self, stats: AllocatorStats, *, is_small: bool) -> None:
        for name in self.__slots__:
            statistic = getattr(stats, name)
            setattr(self, name, statistic.small if is_small else statistic.large)
