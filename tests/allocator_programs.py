"""Random allocator programs, a device to run them on, and a recorder of their snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from fsdpsim.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    CudaFree,
    DriverCall,
    OutOfMemoryError,
    SynchronizeEvents,
    Unmap,
    UnsupportedSettingsError,
)

MIB = 1 << 20


class ManualDevice:
    """Work counts per stream: an event is complete once the work enqueued before it is done."""

    def __init__(self) -> None:
        self.enqueued: Counter[Hashable] = Counter()
        self.done: Counter[Hashable] = Counter()

    def record_event(self, stream: Hashable) -> tuple[Hashable, int]:
        return stream, self.enqueued[stream]

    def query(self, event: object) -> bool:
        assert isinstance(event, tuple)
        stream, count = event
        return self.done[stream] >= count

    def wait_for(self, call: DriverCall) -> None:
        match call:
            case CudaFree():
                self.done.update(self.enqueued - self.done)
            case Unmap(stream=stream):
                self.finish(stream, self.enqueued[stream])
            case SynchronizeEvents(events=events):
                for stream, count in events:
                    self.finish(stream, count)

    def finish(self, stream: Hashable, count: int) -> None:
        self.done[stream] = max(self.done[stream], count)

    def run(self, steps: Generator[DriverCall, None, Block | None]) -> Block | None:
        try:
            while True:
                self.wait_for(next(steps))
        except StopIteration as stop:
            return stop.value


class Op(NamedTuple):
    """``number`` is a size, a choice among live blocks, or unused; ``stream`` 0 to 2."""

    name: str
    number: int
    stream: int


@dataclass(frozen=True)
class Program:
    settings: AllocatorSettings
    capacity: int
    ops: tuple[Op, ...]


def _near(*sizes: int) -> st.SearchStrategy[int]:
    return st.builds(
        lambda size, change: max(size + change, 1),
        st.sampled_from(sizes),
        st.sampled_from([-513, -512, -1, 0, 1, 511, 512]),
    )


SIZES = (
    _near(512, 4096, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB)
    | st.integers(1, 3 * MIB)
    | st.integers(1, 60).map(lambda mib: mib * MIB)
    | st.integers(MIB, 24 * MIB)
)
STREAMS = st.sampled_from([0, 0, 0, 1, 2])
OPS = st.one_of(
    *[st.builds(Op, st.just("malloc"), SIZES, STREAMS)] * 5,
    *[st.builds(Op, st.just("free"), st.integers(0, 99), st.just(0))] * 4,
    st.builds(Op, st.just("record_stream"), st.integers(0, 99), STREAMS),
    st.builds(Op, st.sampled_from(["work", "finish"]), st.just(0), STREAMS),
    st.builds(Op, st.just("empty_cache"), st.just(0), st.just(0)),
)
SETTINGS = st.builds(
    lambda **values: AllocatorSettings(**values),
    expandable_segments=st.booleans(),
    max_split_size_mb=st.sampled_from([None, None, 20, 30]),
    roundup_power2_divisions=st.sampled_from([0, 0, 4, "[16:8,>:2]"]),
)
CAPACITIES = st.sampled_from([64 * MIB, 100 * MIB, 200 * MIB, 1 << 40])
PROGRAMS = st.builds(
    Program, SETTINGS, CAPACITIES, st.lists(OPS, min_size=1, max_size=40).map(tuple)
)


@dataclass
class Runner:
    """Runs a program; ``events`` is its trace as torch would record it."""

    program: Program
    total_memory: int = 1 << 40
    events: list[dict[str, Any]] = field(default_factory=list)
    live: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = ManualDevice()
        self.allocator = CachingAllocator(
            capacity=self.program.capacity,
            total_memory=self.total_memory,
            settings=self.program.settings,
            device=self.device,
            on_event=self.record,
        )

    def record(self, action: str, address: int, size: int, stream: Hashable) -> None:
        where = "device_free" if action == "oom" else "addr"
        self.events.append(
            {
                "action": action,
                where: address,
                "size": size,
                "stream": stream,
                "time_us": len(self.events),
            }
        )

    def apply(self, op: Op) -> None:
        getattr(self, op.name)(op)

    def malloc(self, op: Op) -> None:
        try:
            block = self.allocator.malloc_cached(op.number, op.stream)
            if block is None:
                block = self.device.run(self.allocator.grow(op.number, op.stream))
        except (OutOfMemoryError, UnsupportedSettingsError):
            return
        assert block is not None
        self.live.append(block)

    def free(self, op: Op) -> None:
        if self.live:
            self.allocator.free(self.live.pop(op.number % len(self.live)))

    def record_stream(self, op: Op) -> None:
        if self.live:
            self.allocator.record_stream(self.live[op.number % len(self.live)], op.stream)

    def work(self, op: Op) -> None:
        self.device.enqueued[op.stream] += 1

    def finish(self, op: Op) -> None:
        self.device.finish(op.stream, self.device.enqueued[op.stream])

    def empty_cache(self, op: Op) -> None:
        self.device.run(self.allocator.empty_cache_steps())

    def snapshot(self, *, skip: int = 0) -> dict[str, Any]:
        """The snapshot at this moment; the first ``skip`` events have been forgotten."""
        settings = self.allocator.settings
        limit = settings.max_split_size_mb
        slots = settings.roundup_power2_divisions
        return {
            "segments": self.allocator.memory_snapshot(),
            "device_traces": [self.events[skip:]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1 if limit is None else limit * MIB,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": settings.expandable_segments,
                "roundup_power2_divisions": {str(1 << i): slots[i] for i in range(16)},
            },
        }


def run_program(program: Program) -> Runner:
    runner = Runner(program)
    for op in program.ops:
        runner.apply(op)
    return runner
