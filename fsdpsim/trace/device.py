"""The GPU's side of a trace: kernels, waits between streams, annotations and memory counters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from fsdpsim.engine import Op
from fsdpsim.memory import Sample
from fsdpsim.program import COMPUTE, TRANSFERS
from fsdpsim.result import Result
from fsdpsim.trace.collectives import ProcessGroup, collective_args, kernel_name
from fsdpsim.trace.lanes import CONTEXT, NO_STREAM, Event, Lanes, nanoseconds

#: Names by which HolisticTraceAnalysis tells copies, synchronisation and collectives from compute.
#: A kernel of the model is none of these, whatever its name (``hta/utils/utils.py`` of 0.5.0).
_NOT_COMPUTE = re.compile(r"Sync|Memcpy|Memset|dma|^hip|^hccl|^nccl")


def compute_name(name: str) -> str:
    """``name`` such that it cannot be taken for a copy, a synchronisation or a collective."""
    return _NOT_COMPUTE.sub(lambda found: "_".join(found[0]), name)


def kernel(
    op: Op, lanes: Lanes, groups: Mapping[str, ProcessGroup], correlation: int, external: int
) -> Event:
    """The kernel of a finished op, or the copy of a copy engine."""
    stream = lanes.streams[op.stream]
    args: dict[str, Any] = {
        "External id": external,
        "queued": 0,
        "device": lanes.device,
        "context": CONTEXT,
        "stream": stream,
        "correlation": correlation,
        "kind": op.kind,
        "unit": op.unit,
        "phase": op.phase,
        "iteration": op.iteration,
    }
    if op.collective is None:
        name = compute_name(op.name)
    else:
        name = kernel_name(op)
        args |= collective_args(op, groups[op.communicator or ""])
        args |= {"trigger": op.collective.trigger} if op.collective.trigger else {}
    assert op.start is not None and op.end is not None
    start, end = nanoseconds(op.start), nanoseconds(op.end)
    if op.kind in TRANSFERS:
        rate = op.nbytes / (end - start) if end > start else 0.0
        args |= {"bytes": op.nbytes, "memory bandwidth (GB/s)": rate}
        return lanes.on_stream("gpu_memcpy", op.name, stream, start, end, args)
    return lanes.on_stream("kernel", name, stream, start, end, args)


def wait_event(op: Op, on: Op, lanes: Lanes, correlation: int, record: int, event_id: int) -> Event:
    """The end of ``op``'s wait for an event behind ``on``.

    It has no duration and lies where ``op`` starts: anywhere else HolisticTraceAnalysis counts it
    into kernel time, which starts with the first event on a stream.
    """
    assert op.start is not None
    at, stream = nanoseconds(op.start), lanes.streams[op.stream]
    args = sync_args("Stream Wait Event", stream, correlation, lanes)
    args |= waited_for(on, lanes, record, event_id)
    return lanes.on_stream("cuda_sync", "Stream Wait Event", stream, at, at, args)


def host_sync(
    kind: str, lanes: Lanes, start: int, end: int, correlation: int, **waited: int
) -> Event:
    """The GPU's record of a wait of the CPU: ``Event Sync`` or ``Context Sync``."""
    args = sync_args(kind, NO_STREAM, correlation, lanes) | waited
    return lanes.on_stream("cuda_sync", kind, NO_STREAM, start, end, args)


def sync_args(kind: str, stream: int, correlation: int, lanes: Lanes) -> dict[str, Any]:
    """Arguments of every event of category ``cuda_sync``."""
    return {
        "cuda_sync_kind": kind,
        "stream": stream,
        "correlation": correlation,
        "device": lanes.device,
        "context": CONTEXT,
    }


def waited_for(on: Op, lanes: Lanes, record: int, event_id: int) -> dict[str, int]:
    """Which event was waited for: the one recorded behind ``on``."""
    return {
        "wait_on_stream": lanes.streams[on.stream],
        "wait_on_cuda_event_record_corr_id": record,
        "wait_on_cuda_event_id": event_id,
    }


def unit_annotations(result: Result, lanes: Lanes) -> Iterator[Event]:
    """One annotation over consecutive kernels of one unit and phase on the compute stream.

    They carry no ``stream`` argument, as Kineto's do not: tools would take them for kernels.
    """
    ops = (op for op in result.ops if op.stream == COMPUTE)
    for (_, phase, unit), found in groupby(ops, key=lambda op: (op.iteration, op.phase, op.unit)):
        run = list(found)
        first, last = run[0].start, run[-1].end
        assert first is not None and last is not None
        if unit and last > first:
            yield lanes.on_stream(
                "gpu_user_annotation",
                f"{phase} ({unit})",
                lanes.streams[COMPUTE],
                nanoseconds(first),
                nanoseconds(last),
                {},
            )


def counters(result: Result, lanes: Lanes) -> Iterator[Event]:
    """Allocated and reserved bytes at host time, where they change."""
    shown = {"allocated": -1, "reserved": -1}
    for sample in result.memory.samples:
        for name, before in shown.items():
            value = getattr(sample, name)
            if value != before:
                shown[name] = value
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": lanes.device,
                    "ts": nanoseconds(sample.time) / 1000,
                    "args": {"bytes": value},
                }


def memory_instant(sample: Sample, nbytes: int, lanes: Lanes, index: int) -> Event:
    """What torch's profiler notes with ``profile_memory=True``; freed bytes are negative."""
    buffer = sample.buffer
    assert buffer.block is not None
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": lanes.host,
        "tid": lanes.host,
        "ts": nanoseconds(sample.time) / 1000,
        "args": {
            "Total Reserved": sample.reserved,
            "Total Allocated": sample.allocated,
            "Bytes": nbytes,
            "Addr": buffer.block.address,
            "Device Id": lanes.device,
            "Device Type": 1,
            "Ev Idx": index,
            "buffer": buffer.name,
            "unit": buffer.unit,
            "category": buffer.category,
        },
    }
