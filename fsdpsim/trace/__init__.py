"""A simulated run as a Kineto trace, for Perfetto and HolisticTraceAnalysis.

Format: kineto's ``output_json.cpp``; names and lanes as torch's profiler shows them. Times are
microseconds from the start of the simulation, exact to the nanosecond.

HolisticTraceAnalysis 0.5.0 leaves calls without duration out of its critical path, so that analysis
needs a launch cost (``workload.kernel_launch``); it also loses waits of kernels without duration.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdpsim.engine import CPU
from fsdpsim.files import write_bytes
from fsdpsim.result import Result
from fsdpsim.trace.collectives import ProcessGroup, process_groups
from fsdpsim.trace.device import counters, unit_annotations
from fsdpsim.trace.host import HostThread
from fsdpsim.trace.lanes import (
    GPU_SORT_INDEX,
    NO_STREAM,
    Event,
    Lanes,
    nanoseconds,
    stream_ids,
)

#: zlib's own default: half the time of the highest level, for a few percent of the size.
COMPRESSION = 6
#: Kineto's sort index of the profiler's own lane.
SPANS_SORT_INDEX = 536_870_912


def trace(result: Result, rank: int = 0) -> dict[str, Any]:
    """The trace of one ``rank``, as plain data for JSON.

    Where one simulated rank stands for all, ``rank`` decides names and numbers only.
    """
    if len(result.ranks) > 1:
        result = result.of_rank(rank)
    scenario = result.scenario
    steps = result.program.steps
    lanes = Lanes(
        rank=rank,
        device=rank % scenario.device.gpus_per_node,
        streams=stream_ids(steps),
    )
    groups = process_groups(scenario, steps, rank)
    thread = HostThread(result, lanes, groups)
    events = thread.run()
    end = _end(result, thread.now)
    return {
        # First, because HolisticTraceAnalysis searches the text for the rank.
        "distributedInfo": _distributed_info(scenario.world_size, rank, groups),
        "schemaVersion": 1,
        "deviceProperties": [_device_properties(result, lanes)],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": [
            *_names(lanes, has_workers=any(op.stream == CPU for op in result.ops)),
            *unit_annotations(result, lanes),
            *events,
            *counters(result, lanes),
            *_span(end),
        ],
        "traceName": f"{scenario.name}.pt.trace.json",
    }


def encode(data: dict[str, Any]) -> bytes:
    """The trace as JSON: ASCII only, and with the white space that HolisticTraceAnalysis needs."""
    return json.dumps(data, allow_nan=False).encode("ascii")


def write_traces(result: Result, path: Path) -> list[Path]:
    """Write one file per simulated rank; returns their paths.

    Raises :class:`fsdpsim.files.OutputError`.
    """
    paths = rank_paths(path, len(result.ranks))
    for rank, own in enumerate(paths):
        write_trace(result, own, rank)
    return paths


def rank_paths(path: Path, ranks: int) -> list[Path]:
    """Where the traces of ``ranks`` simulated ranks go.

    One goes to ``path``; of several, rank 3 goes to ``trace.rank3.json.gz`` beside
    ``trace.json.gz``.
    """
    if ranks <= 1:
        return [path]
    stem, dot, endings = path.name.partition(".")
    return [path.with_name(f"{stem}.rank{n}{dot}{endings}") for n in range(ranks)]


def write_trace(result: Result, path: Path, rank: int = 0) -> None:
    """Write the trace of one ``rank`` to ``path``, compressed if it ends in ``.gz``.

    The same result gives the same bytes. Raises :class:`fsdpsim.files.OutputError`.
    """
    data = encode(trace(result, rank))
    write_bytes(path, gzip.compress(data, COMPRESSION, mtime=0) if path.suffix == ".gz" else data)


def _end(result: Result, host: int) -> int:
    return max([host, *(nanoseconds(op.end) for op in result.ops if op.end is not None)])


def _distributed_info(world: int, rank: int, groups: dict[str, ProcessGroup]) -> dict[str, Any]:
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": world,
        "pg_count": len(groups),
        "pg_config": [
            {
                "pg_name": group.name,
                "pg_desc": group.description,
                "backend_config": "cuda:nccl",
                "pg_size": len(group.ranks),
                "ranks": list(group.ranks),
            }
            for group in groups.values()
        ],
    }


def _device_properties(result: Result, lanes: Lanes) -> dict[str, Any]:
    hardware = result.scenario.device
    return {"id": lanes.device, "name": hardware.gpu, "totalGlobalMem": hardware.memory}


def _names(lanes: Lanes, *, has_workers: bool) -> Iterator[Event]:
    host, gpu = lanes.host, lanes.device
    yield from _process(host, "python", "CPU", host)
    yield from _thread(host, host, f"thread {host} (host)", host)
    if has_workers:
        yield from _thread(host, lanes.workers, "CPUs beside it", lanes.workers)
    yield from _process(gpu, "python", f"GPU {gpu}", GPU_SORT_INDEX + gpu)
    for name, stream in lanes.streams.items():
        yield from _thread(gpu, stream, f"stream {stream} {name}", stream)
    yield from _thread(gpu, NO_STREAM, "synchronization", NO_STREAM)


def _process(pid: int, name: str, label: str, sort_index: int) -> Iterator[Event]:
    yield _metadata("process_name", pid, 0, name=name)
    yield _metadata("process_labels", pid, 0, labels=label)
    yield _metadata("process_sort_index", pid, 0, sort_index=sort_index)


def _thread(pid: int, tid: int, name: str, sort_index: int) -> Iterator[Event]:
    yield _metadata("thread_name", pid, tid, name=name)
    yield _metadata("thread_sort_index", pid, tid, sort_index=sort_index)


def _metadata(kind: str, pid: int | str, tid: int | str, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0.0, "args": args}


def _span(end: int) -> Iterator[Event]:
    """The frame that Kineto puts around a recording, to ``end`` nanoseconds."""
    name = "PyTorch Profiler"
    where = {"pid": "Spans", "tid": name}
    yield _metadata("process_sort_index", "Spans", 0, sort_index=SPANS_SORT_INDEX)
    yield {
        "ph": "X",
        "cat": "Trace",
        "name": f"{name} (0)",
        **where,
        "ts": 0.0,
        "dur": end / 1000,
        "args": {"Op count": 0},
    }
    traces = {"ph": "i", "s": "g", "pid": "Traces", "tid": f"Trace {name}"}
    yield {**traces, "name": f"Iteration Start: {name}", "ts": 0.0}
    yield {**traces, "name": "Record Window End", "ts": end / 1000}
