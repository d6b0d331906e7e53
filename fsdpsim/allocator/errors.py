"""The allocator's failures."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Where the memory was when a request failed, after the flush. All sizes in bytes.

    ``allocated + pending + this_stream + other_streams + other_pool == reserved``: memory that is
    reserved and not allocated is waiting for an event, or free but of no use to the request.
    """

    stream: Hashable
    requested: int
    rounded: int
    segment_size: int
    capacity: int
    limit: int | None
    """What the memory fraction allows to be reserved; None without a fraction."""
    reserved: int
    allocated: int
    pending: int
    """Freed, but an event of another stream that used it is outstanding."""
    this_stream: int
    """Free on this stream and pool, in pieces that do not fit and cannot be released."""
    other_streams: int
    """Free, but memory never moves between streams without cudaFree."""
    other_pool: int
    """Free on this stream in the other pool (small or large)."""
    inactive_split: int
    """Free in partly used cudaMalloc segments, over all streams and both pools."""
    rejected: bool
    """True: refused by ``throw_on_cudamalloc_oom`` without a retry."""


class OutOfMemoryError(RuntimeError):
    """The device cannot serve a request, even after the cache was flushed.

    ``report`` holds the numbers. A subclass of ``RuntimeError``, as torch's is.
    """

    def __init__(self, report: OutOfMemory) -> None:
        # SimPy and pickle make an exception anew from its args.
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        """The numbers in torch's order."""
        report = self.report
        ceiling = report.capacity if report.limit is None else min(report.limit, report.capacity)
        return (
            f"tried to allocate {_mib(report.segment_size)}"
            f" ({report.requested} bytes asked for on stream {report.stream!r})"
            f" with {_mib(ceiling)} allowed: {_mib(report.allocated)} allocated,"
            f" {_mib(report.reserved - report.allocated)} reserved but unallocated"
            f" ({_mib(report.this_stream)} free in unfit pieces,"
            f" {_mib(report.other_streams)} on other streams,"
            f" {_mib(report.other_pool)} in the other pool,"
            f" {_mib(report.pending)} waiting for events)"
        )


class RequestTooLargeError(ValueError):
    """A request of 1 EB or more: torch refuses it before it reaches the allocator."""


class UnsupportedSettingsError(ValueError):
    """Settings changed at run time into a combination whose outcome in torch is an error."""


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
