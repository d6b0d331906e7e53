"""Rules that a Kineto-shaped trace must keep for Perfetto and HolisticTraceAnalysis to read it.

Independent of the writer: it sees only the parsed JSON, as those tools do. ``violations`` returns
one line per broken rule.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]

#: What each phase of event must have.
FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "s", "pid", "tid", "ts"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
#: What runs on a stream, and the call that launches it.
LAUNCHED_BY = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync")
CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
NOT_COMPUTE = re.compile(r".*(Sync|Memcpy|Memset|dma)|hip|hccl")


def violations(trace: dict[str, Any], text: str) -> list[str]:
    """Every broken rule of ``trace``, which was parsed from ``text``."""
    events = trace["traceEvents"]
    found = [*_fields(events)]
    if found:
        return found  # the other rules read those fields
    return [
        *_top_level(trace, text),
        *_nesting(events),
        *_lanes(events),
        *_correlations(events),
        *_flows(events),
        *_synchronization(events),
        *_kernel_names(events),
        *_named_lanes(events),
        *_counters(events),
    ]


def ns(event: Event, key: str = "ts") -> int:
    """A time in integer nanoseconds."""
    return round(event[key] * 1000)


def end(event: Event) -> int:
    """The end of a slice, as a reader computes it."""
    return ns(event) + ns(event, "dur")


def slices(events: Iterable[Event], *categories: str) -> list[Event]:
    """The slices of some categories, or all."""
    return [e for e in events if e["ph"] == "X" and (not categories or e["cat"] in categories)]


def _fields(events: list[Event]) -> Iterator[str]:
    for event in events:
        missing = FIELDS.get(event["ph"], {"a known phase"}) - event.keys()
        if missing:
            yield f"{event} lacks {sorted(missing)}"
        if _has_none(event):
            yield f"{event} has a null"
        for key in ("ts", "dur"):
            value = event.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{event}: {key} is not a number"
            elif not math.isfinite(value) or value < 0:
                yield f"{event}: {key} is negative or not finite"
            elif abs(value * 1000 - round(value * 1000)) > 1e-3:
                yield f"{event}: {key} is not a whole nanosecond"


def _has_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_none(v) for v in value.values())
    if isinstance(value, list):
        return any(_has_none(v) for v in value)
    return value is None


def _top_level(trace: dict[str, Any], text: str) -> Iterator[str]:
    info = trace.get("distributedInfo", {})
    if next(iter(trace)) != "distributedInfo":
        yield "distributedInfo does not come first"
    if not re.search(rf'"rank":\s+{info.get("rank")}\b', text):
        yield "the rank is not written with a space"
    if trace.get("schemaVersion") != 1:
        yield "schemaVersion is not 1"
    if info.get("pg_count") != len(info.get("pg_config", ())):
        yield "pg_count does not count pg_config"
    for group in info.get("pg_config", ()):
        if group["pg_size"] != len(group["ranks"]) or info["rank"] not in group["ranks"]:
            yield f"{group} does not fit rank {info['rank']}"


def _nesting(events: list[Event]) -> Iterator[str]:
    """Slices of a lane are disjoint or one holds the other, and a parent comes first."""
    lanes = defaultdict(list)
    for event in slices(events):
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        stack: list[Event] = []
        for event in sorted(lane, key=ns):  # stable: ties stay in file order
            while stack and end(stack[-1]) <= ns(event):
                stack.pop()
            if stack and end(event) > end(stack[-1]):
                yield f"{event} crosses {stack[-1]}"
            stack.append(event)


def _lanes(events: list[Event]) -> Iterator[str]:
    """A stream runs one kernel at a time, and the stream argument says which."""
    lanes = defaultdict(list)
    for event in slices(events, *LAUNCHED_BY):
        lanes[event["pid"], event["tid"]].append(event)
        if event["args"].get("stream") != event["tid"] or event["tid"] <= 0:
            yield f"{event}: the stream is not its lane"
    for lane in lanes.values():
        last: Event | None = None
        for event in sorted(lane, key=lambda e: (ns(e), end(e))):
            if last is not None and ns(event) < end(last):
                yield f"{event} overlaps {last}"
            last = event


def _correlations(events: list[Event]) -> Iterator[str]:
    calls: dict[int, Event] = {}
    for event in slices(events, *CALL_CATEGORIES):
        correlation = event["args"].get("correlation")
        if correlation in calls or not isinstance(correlation, int) or correlation <= 0:
            yield f"{event}: the correlation is not its own"
        calls[correlation] = event
    seen = set()
    for event in slices(events, *GPU_CATEGORIES):
        correlation = event["args"]["correlation"]
        if correlation in seen:
            yield f"{event}: another event has its correlation"
        seen.add(correlation)
        call = calls.get(correlation)
        if call is None:
            yield f"{event} was launched by nothing"
        elif ns(event) < ns(call):
            yield f"{event} starts before {call}"
        elif LAUNCHED_BY.get(event["cat"], "") not in call["name"]:
            yield f"{event} was not launched by {call}"


def _flows(events: list[Event]) -> Iterator[str]:
    """Each kernel has one arrow from the call that launched it."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    calls = {e["args"]["correlation"]: e for e in slices(events, *CALL_CATEGORIES)}
    kernels = {e["args"]["correlation"]: e for e in slices(events, *LAUNCHED_BY)}
    if len(starts) + len(ends) != sum(e["ph"] in "sf" for e in events):
        yield "flow ids are not unique"
    if not starts.keys() == ends.keys() == kernels.keys() <= calls.keys():
        yield "flows do not match the kernels one to one"
        return
    for correlation, kernel in kernels.items():
        start, finish, call = starts[correlation], ends[correlation], calls[correlation]
        if not ns(call) <= ns(start) <= end(call) or not _same_lane(start, call):
            yield f"{start} is not in {call}"
        if ns(finish) != ns(kernel) or not _same_lane(finish, kernel):
            yield f"{finish} is not at the start of {kernel}"
        if finish["bp"] != "e" or ns(start) > ns(finish):
            yield f"{finish} cannot bind"


def _same_lane(one: Event, other: Event) -> bool:
    return (one["pid"], one["tid"]) == (other["pid"], other["tid"])


def _synchronization(events: list[Event]) -> Iterator[str]:
    """Waits name a recorded event, and one between streams lies where its kernel starts."""
    calls = {e["args"]["correlation"]: e for e in slices(events, *CALL_CATEGORIES)}
    starts = {(e["tid"], ns(e)) for e in slices(events, *LAUNCHED_BY)}
    for event in slices(events, "cuda_sync"):
        args, call = event["args"], calls.get(event["args"]["correlation"])
        expected = {
            "Stream Wait Event": "cudaStreamWaitEvent",
            "Event Sync": "cudaEventSynchronize",
            "Context Sync": "cudaDeviceSynchronize",
        }[event["name"]]
        if call is None or call["name"] != expected:
            yield f"{event} belongs to {call}"
        if event["name"] == "Context Sync":
            continue
        record = calls.get(args["wait_on_cuda_event_record_corr_id"])
        if record is None or record["name"] != "cudaEventRecord":
            yield f"{event} waits for {record}"
        elif call is not None and ns(record) > ns(call):
            yield f"{event} waits for what {record} records later"
        if event["name"] == "Stream Wait Event":
            if event["dur"] != 0 or (event["tid"], ns(event)) not in starts:
                yield f"{event} is not at the start of a kernel"
            if args["wait_on_stream"] == args["stream"]:
                yield f"{event} waits for its own stream"


def _kernel_names(events: list[Event]) -> Iterator[str]:
    """The name alone says whether a kernel is a collective, and that it is no copy or wait."""
    for event in slices(events, "kernel"):
        is_collective = "Collective name" in event["args"]
        if event["name"].startswith("nccl") is not is_collective:
            yield f"{event}: the name says what it is not"
        if not is_collective and NOT_COMPUTE.match(event["name"]):
            yield f"{event}: the name is that of a copy or a wait"
    for event in slices(events, "gpu_memcpy"):
        if not event["name"].startswith("Memcpy ") or not event["args"]["bytes"] > 0:
            yield f"{event} is no copy"


def _named_lanes(events: list[Event]) -> Iterator[str]:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in slices(events):
        if event["cat"] == "Trace":
            continue
        if (event["pid"], event["tid"]) not in named or event["pid"] not in processes:
            yield f"{event} is on a lane without a name"


def _counters(events: list[Event]) -> Iterator[str]:
    """A counter goes on in time and is written only where it changes."""
    last: dict[tuple[Any, str, str], tuple[int, float]] = {}
    for event in events:
        if event["ph"] != "C":
            continue
        for series, value in event["args"].items():
            key = (event["pid"], event["name"], series)
            if key in last and (last[key][0] > ns(event) or last[key][1] == value):
                yield f"{event} does not go on from {last[key]}"
            last[key] = (ns(event), value)
