"""A simulated run as a torch memory snapshot, for pytorch.org/memory_viz and ``_memory_viz.py``.

Layout: ``torch.cuda.memory._snapshot`` of torch 2.13. What its viewers need beyond the documented
layout is kept here: pickle protocol 4, plain types only, pending blocks spelled
``active_pending_free``, addresses below 2**53, and a trace that can be undone from the final state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.files import write_bytes
from fsdpsim.memory import Buffer, MemoryEvent
from fsdpsim.program import COMPUTE, IterationStart
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario
from fsdpsim.simulate import simulate
from fsdpsim.trace.lanes import nanoseconds, stream_ids

Frames = list[dict[str, Any]]

#: The viewer's unpickler knows protocols 2 to 4.
PROTOCOL = 4
#: Torch's handle of the default stream.
DEFAULT_STREAM = 0
#: Torch's numbers for what it has no knob for here.
FIXED_SETTINGS = {
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "graph_capture_record_stream_reuse": False,
}


def snapshot(scenario: Scenario) -> dict[str, Any]:
    """Simulate ``scenario`` and return the snapshot as plain data.

    Times are microseconds of host time from the start, sizes and addresses bytes.
    """
    events: list[MemoryEvent] = []
    result = simulate(scenario, on_memory_event=events.append)
    streams = stream_ids(result.program.steps) | {COMPUTE: DEFAULT_STREAM}
    history = History(lambda stream: streams.get(str(stream), DEFAULT_STREAM))
    trace = [history.record(event) for event in events]
    return {
        "segments": [history.named(segment) for segment in _segments(result)],
        "device_traces": [trace],
        "allocator_settings": recorded_settings(scenario.allocator),
        "external_annotations": list(_annotations(result)),
    }


def write_snapshot(scenario: Scenario, path: Path) -> None:
    """Write the snapshot of ``scenario`` to ``path``; the same scenario gives the same bytes.

    Raises :class:`fsdpsim.files.OutputError`.
    """
    write_bytes(path, encode(snapshot(scenario)))


def encode(data: dict[str, Any]) -> bytes:
    """The snapshot as a pickle."""
    return pickle.dumps(data, protocol=PROTOCOL)


class History:
    """Turns allocator events into torch's, and remembers which buffer each live block holds.

    Equal strings become one object: the bytes of a pickle depend on which objects are shared.
    """

    def __init__(self, stream_number: Callable[[object], int]) -> None:
        self._stream_number = stream_number
        self._frames: dict[Buffer, Frames] = {}
        self._live: dict[int, Buffer] = {}
        self._strings: dict[str, str] = {}

    def record(self, event: MemoryEvent) -> dict[str, Any]:
        """The event as ``device_traces`` lists it."""
        action = self._shared(event.action)
        where = "device_free" if action == "oom" else "addr"
        return {
            "action": action,
            where: event.address,
            "size": event.size,
            "stream": self._stream_number(event.stream),
            "time_us": nanoseconds(event.time) // 1000,
            "compile_context": self._shared("N/A"),
            "user_metadata": self._shared(""),
            "pool_id": (0, 0),
            "frames": self._frames_of(self._subject(event)),
        }

    def _subject(self, event: MemoryEvent) -> Buffer:
        """What the event is about: a free that completes now may be of any earlier buffer."""
        if event.action == "alloc":
            self._live[event.address] = event.buffer
        elif event.action == "free_completed":
            return self._live.pop(event.address)
        return event.buffer

    def named(self, segment: dict[str, Any]) -> dict[str, Any]:
        """A segment with stream number, and with frames for each block in use."""
        blocks = []
        for block in segment["blocks"]:
            buffer = self._live.get(block["address"]) if block["state"] != "inactive" else None
            blocks.append(block | {"frames": self._frames_of(buffer) if buffer else []})
        return segment | {"stream": self._stream_number(segment["stream"]), "blocks": blocks}

    def _frames_of(self, buffer: Buffer) -> Frames:
        """A call stack, innermost first: the buffer and its category, then where it was made."""
        if buffer not in self._frames:
            unit = buffer.unit or "training loop"
            where = f"iteration {buffer.iteration}"
            calls = (
                (f"fsdpsim/{buffer.category}", f"{buffer.name} of {unit} ({buffer.category})"),
                (f"fsdpsim/{buffer.phase}", f"{buffer.phase} of {unit}"),
                ("fsdpsim/training", where if buffer.phase != "initialization" else buffer.phase),
            )
            self._frames[buffer] = [
                {"filename": self._shared(file), "line": 0, "name": self._shared(name)}
                for file, name in calls
            ]
        return self._frames[buffer]

    def _shared(self, text: str) -> str:
        return self._strings.setdefault(text, text)


def recorded_settings(settings: AllocatorSettings) -> dict[str, Any]:
    """``allocator_settings``: :meth:`AllocatorSettings.from_snapshot` reads them back."""
    limit = settings.max_split_size_mb
    divisions = settings.roundup_power2_divisions
    return {
        "PYTORCH_CUDA_ALLOC_CONF": configuration(settings),
        "max_split_size": -1 if limit is None else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold or 0.0,
        "expandable_segments": settings.expandable_segments,
        **FIXED_SETTINGS,
        "roundup_power2_divisions": {str(1 << i): n for i, n in enumerate(divisions)},
    }


def configuration(settings: AllocatorSettings) -> str:
    """``PYTORCH_CUDA_ALLOC_CONF`` with what differs from torch's defaults."""
    changed = settings.model_dump(exclude_defaults=True)
    if "roundup_power2_divisions" in changed:
        pairs = enumerate(settings.roundup_power2_divisions)
        changed["roundup_power2_divisions"] = f"[{','.join(f'{1 << i}:{n}' for i, n in pairs)}]"
    return ",".join(f"{key}:{value}" for key, value in changed.items())


def _segments(result: Result) -> list[dict[str, Any]]:
    segments = result.memory.allocator.memory_snapshot()
    return sorted(segments, key=lambda segment: int(segment["address"]))


def _annotations(result: Result) -> Iterator[dict[str, Any]]:
    """The iterations, as torch's profiler announces its steps."""
    starts = [s for s in result.program.steps if type(s) is IterationStart and s.time is not None]
    last = max((sample.time for sample in result.memory.samples), default=0.0)
    times = [s.time for s in starts if s.time is not None]
    for start, begin, end in zip(starts, times, [*times[1:], last], strict=False):
        name = f"ProfilerStep#{start.iteration}"
        for stage, time in (("START", begin), ("END", max(begin, end))):
            at = nanoseconds(time) // 1000
            yield {"name": name, "stage": stage, "device": 0, "time_us": at}
