"""Where a trace puts things: processes, threads, streams, and integer nanoseconds.

Kineto writes microseconds with three decimals. Each start and each end is rounded to nanoseconds
first and durations are differences of those, so ops that touch never overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpsim.engine import CPU, Op, Step

#: One event of a Chrome trace.
Event = dict[str, Any]

#: Kineto shows CUDA's stream numbers: the default stream is 7, streams of torch's pool follow in
#: steps of four. A stream has the same number in every trace, whatever else runs.
STREAM_IDS = {
    "compute": 7,
    "communication": 20,
    "h2d": 20,
    "pre_unshard": 20,
    "all_gather_copy_in": 20,
    "unshard": 24,
    "all_gather": 24,
    "post_backward": 28,
    "reduce_scatter": 28,
    "all_reduce": 32,
    "d2h": 32,
}
#: Kineto's lane of what is on no stream: device and event synchronisation.
NO_STREAM = -1
#: The CPU process of rank 0. GPU processes have the device's number, so this must be larger.
HOST_PID = 1000
#: How far the number of the CPUs' worker threads lies above that of the CPU thread.
WORKERS = 100_000
#: Kineto's sort index of a GPU process is this plus the device's number.
GPU_SORT_INDEX = 5_000_000
CONTEXT = 1


def nanoseconds(seconds: float) -> int:
    """Integer nanoseconds of a simulated time."""
    return round(seconds * 1e9)


def stream_ids(steps: Iterable[Step]) -> dict[str, int]:
    """The number of every stream that has ops, in order of the numbers."""
    found = dict.fromkeys(step.stream for step in steps if type(step) is Op)
    names = [name for name in found if name != CPU]
    unknown = [name for name in names if name not in STREAM_IDS]
    after = max(STREAM_IDS.values()) + 4
    ids = STREAM_IDS | {name: after + 4 * i for i, name in enumerate(unknown)}
    return dict(sorted(((name, ids[name]) for name in names), key=lambda item: item[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The lanes of one rank: a CPU thread and a GPU with its streams (name -> number)."""

    rank: int
    device: int
    streams: Mapping[str, int]

    @property
    def host(self) -> int:
        """Process and thread number of the CPU thread: that of a process's main thread."""
        return HOST_PID + self.rank

    @property
    def workers(self) -> int:
        """Thread number of what the CPUs do beside the CPU thread."""
        return self.host + WORKERS

    def on_workers(
        self, category: str, name: str, start: int, end: int, args: dict[str, Any]
    ) -> Event:
        """A slice of the CPUs' work beside the CPU thread; times in nanoseconds."""
        return _slice(category, name, self.host, self.workers, start, end, args)

    def on_host(
        self, category: str, name: str, start: int, end: int, args: dict[str, Any]
    ) -> Event:
        """A slice of the CPU thread; ``start`` and ``end`` in nanoseconds."""
        return _slice(category, name, self.host, self.host, start, end, args)

    def on_stream(
        self, category: str, name: str, stream: int, start: int, end: int, args: dict[str, Any]
    ) -> Event:
        """A slice of a GPU stream; ``start`` and ``end`` in nanoseconds."""
        return _slice(category, name, self.device, stream, start, end, args)

    def flow(self, correlation: int, launched: int, stream: int, start: int) -> tuple[Event, Event]:
        """The arrow from a launch to its kernel."""
        common = {"cat": "ac2g", "name": "ac2g", "id": correlation}
        return (
            {"ph": "s", **common, "pid": self.host, "tid": self.host, "ts": launched / 1000},
            {
                "ph": "f",
                **common,
                "pid": self.device,
                "tid": stream,
                "ts": start / 1000,
                "bp": "e",
            },
        )


def _slice(
    category: str, name: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": args,
    }
