"""Device memory on the timeline: buffers of the schedule, allocated and freed at host time.

The caching allocator (:mod:`fsdpsim.allocator`) decides where a buffer lies; this module lets the
host pay for what the allocator asks of the driver, and keeps the log behind curves and peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fsdpsim.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    CudaFree,
    CudaMalloc,
    DriverCall,
    Map,
    OutOfMemory,
    OutOfMemoryError,
    SynchronizeEvents,
    Unmap,
)
from fsdpsim.engine import CPU, Host, Op, Process, Streams

#: Every buffer belongs to one of these; the same words are used in JSON and on charts.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "all_gather",
    "reduce_scatter",
    "temporaries",
)


class Buffer:
    """One tensor's storage, and the host step that allocates it on the stream that was current.

    The host fills in the times (seconds) and the allocator's block.
    """

    __slots__ = (
        "allocated_at",
        "block",
        "category",
        "freed_at",
        "iteration",
        "name",
        "nbytes",
        "pending",
        "phase",
        "stream",
        "unit",
        "unsharded",
    )

    def __init__(
        self,
        name: str,
        nbytes: int,
        category: str,
        stream: str,
        unit: str,
        iteration: int,
        phase: str,
        unsharded: int | None = None,
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.category = category
        self.stream = stream
        self.unit = unit
        self.iteration = iteration
        self.phase = phase
        self.unsharded = unsharded
        """Which gathering of a unit's parameters it holds; None for anything else."""
        self.block: Block | None = None
        self.allocated_at: float | None = None
        self.freed_at: float | None = None
        self.pending: tuple[Op, ...] = ()
        """Ops that must have ended, after the free, before the block can be reused."""

    def __repr__(self) -> str:
        return f"Buffer({self.unit}/{self.name}, {self.nbytes} B on {self.stream})"

    @property
    def buffer(self) -> Buffer:
        """Itself: what the step allocates, as :attr:`Free.buffer` is what it frees."""
        return self

    def act(self, host: Host) -> Process | None:
        """Allocate; returns what the host must wait for when the cache has no fitting block."""
        self.allocated_at = host.now
        return None if host.memory is None else host.memory.malloc(host, self)


#: The step that allocates a buffer is the buffer: one object, as there are thousands of them.
Malloc = Buffer


class Free:
    """Host step: drop a buffer, with ``record_stream`` for the named streams."""

    __slots__ = ("buffer", "record_streams")

    def __init__(self, buffer: Buffer, record_streams: tuple[str, ...]) -> None:
        self.buffer = buffer
        self.record_streams = record_streams

    def act(self, host: Host) -> None:
        """Free now; the block stays unusable until the recorded streams have passed this moment."""
        buffer = self.buffer
        buffer.freed_at = host.now
        if self.record_streams:
            others = (s for s in self.record_streams if s != buffer.stream)
            used = [host.streams[s].last for s in others if s in host.streams]
            buffer.pending = tuple(op for op in used if op is not None)
        if host.memory is not None:
            host.memory.free(host, buffer, self.record_streams)


class Sample(NamedTuple):
    """The allocator after one malloc or free: host time in seconds, the rest in bytes."""

    time: float
    buffer: Buffer
    is_malloc: bool
    requested: int
    allocated: int
    active: int
    reserved: int


#: Makes a sample of a tuple without a Python call.
_sample = partial(tuple.__new__, Sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The host was stopped by the allocator from ``start`` to ``end`` (seconds)."""

    start: float
    end: float
    cause: str
    unit: str
    iteration: int


class MemoryEvent(NamedTuple):
    """One event of a torch memory snapshot (see :mod:`fsdpsim.snapshot`).

    ``time`` is host seconds; ``address``, ``size`` and ``stream`` are the allocator's; ``buffer``
    is what the host was allocating or freeing, which need not be the one at ``address``.
    """

    time: float
    action: str
    address: int
    size: int
    stream: object
    buffer: Buffer


class PaidCall(NamedTuple):
    """A driver call that a cache miss of ``buffer`` made, from ``start`` to ``end`` in host s."""

    call: DriverCall
    buffer: Buffer
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """The request that could not be served."""

    time: float
    buffer: Buffer
    report: OutOfMemory


class GpuEvents:
    """What the allocator asks of the device: which work of its streams is done."""

    def __init__(self) -> None:
        self.streams: Streams | None = None

    def record_event(self, stream: object) -> Op | None:
        """The last op enqueued on ``stream`` now."""
        assert self.streams is not None
        found = self.streams.get(str(stream))
        return found.last if found is not None else None

    def query(self, event: object) -> bool:
        """Whether the GPU has passed ``event`` by now."""
        assert self.streams is not None
        if event is None:
            return True
        end = event.end  # type: ignore[attr-defined]
        return end is not None and end <= self.streams.env.now


class GpuMemory:
    """One GPU's memory: the caching allocator, driven at host time.

    ``capacity`` bytes can be allocated on a device of ``total`` bytes; ``cuda_malloc`` and
    ``cuda_free`` are host seconds per call. After an out-of-memory ``oom`` holds the report.
    ``on_event`` is called for each event of a torch memory snapshot.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        capacity: int,
        total: int,
        cuda_malloc: float,
        cuda_free: float,
        on_event: Callable[[MemoryEvent], object] | None = None,
    ) -> None:
        # A device of its own, so that no cycle keeps the samples until the collector comes.
        self.events = GpuEvents()
        self.allocator = CachingAllocator(
            capacity=capacity,
            total_memory=total,
            device=self.events,
            settings=settings,
            on_event=self._tell if on_event is not None else None,
        )
        self.samples: list[Sample] = []
        self.stalls: list[Stall] = []
        self.paid_calls: list[PaidCall] = []
        self.oom: Oom | None = None
        self._seconds = {
            CudaMalloc: cuda_malloc,
            Map: cuda_malloc,
            CudaFree: cuda_free,
            Unmap: cuda_free,
        }
        self._levels = self.allocator.stats.levels
        self.last_buffer: Buffer | None = None
        """The buffer that the host allocated or freed last."""
        self._on_event = on_event

    def _tell(self, action: str, address: int, size: int, stream: object) -> None:
        streams = self.events.streams
        assert self._on_event is not None and streams is not None and self.last_buffer is not None
        self._on_event(
            MemoryEvent(streams.env.now, action, address, size, stream, self.last_buffer)
        )

    # ---- what the host and the program's memory steps call

    def attach(self, streams: Streams) -> None:
        """Learn of the GPU's streams."""
        self.events.streams = streams

    def malloc(self, host: Host, buffer: Buffer) -> Process | None:
        """Allocate ``buffer``; a cache miss returns the process that the host waits for."""
        self.last_buffer = buffer
        buffer.block = block = self.allocator.malloc_cached(buffer.nbytes, buffer.stream)
        if block is None:
            return self._grow(host, buffer)
        self._record(host.now, buffer, True)
        return None

    def free(self, host: Host, buffer: Buffer, record_streams: Sequence[str]) -> None:
        """Free ``buffer`` after ``record_stream`` for the given streams."""
        self.last_buffer, block = buffer, buffer.block
        assert block is not None
        for stream in record_streams:
            self.allocator.record_stream(block, stream)
        self.allocator.free(block)
        self._record(host.now, buffer, False)

    def _grow(self, host: Host, buffer: Buffer) -> Process:
        calls = self.allocator.grow(buffer.nbytes, buffer.stream)
        start, cause = host.env.now, "cuda_malloc"
        while True:
            try:
                call = next(calls)
            except StopIteration as done:
                buffer.block = done.value
                break
            except OutOfMemoryError as error:
                self.oom = Oom(time=host.env.now, buffer=buffer, report=error.report)
                raise
            if not isinstance(call, (CudaMalloc, Map)):
                cause = "alloc_retry"
            called = host.env.now
            yield from self._pay(host, call)
            self.paid_calls.append(PaidCall(call, buffer, called, host.env.now))
        if host.env.now > start:
            self.stalls.append(
                Stall(
                    start=start,
                    end=host.env.now,
                    cause=cause,
                    unit=buffer.unit,
                    iteration=buffer.iteration,
                )
            )
        self._record(host.env.now, buffer, True)

    def _pay(self, host: Host, call: DriverCall) -> Process:
        if isinstance(call, SynchronizeEvents):
            yield from host.wait([op for op in call.events if isinstance(op, Op)])
        elif isinstance(call, CudaFree):  # waits for all outstanding work of the device
            streams = (s for name, s in host.streams.items() if name != CPU)
            yield from host.wait([s.last for s in streams if s.last is not None])
        elif isinstance(call, Unmap):
            last = self.events.record_event(call.stream)
            yield from host.wait([last] if last is not None else [])
        seconds = self._seconds.get(type(call), 0.0)
        if seconds:
            host.arm(seconds)
            yield

    def _record(self, time: float, buffer: Buffer, is_malloc: bool) -> None:
        levels = self._levels
        requested, allocated = levels.requested, levels.allocated
        active, reserved = allocated + levels.pending, levels.reserved
        fields = (time, buffer, is_malloc, requested, allocated, active, reserved)
        self.samples.append(_sample(fields))
