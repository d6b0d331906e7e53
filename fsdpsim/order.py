"""The host order of one iteration, as people compare it with their profiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpsim.engine import Op, Step
from fsdpsim.program import Mark, Program

Event = dict[str, Any]


def host_order(program: Program, iteration: int) -> list[Event]:
    """Hooks, collectives, compute marks, frees and limiter waits of ``iteration``, in host order.

    Each event has ``event`` and, where it belongs to one, ``unit``; collectives have ``bytes``
    (full size), ``shard_bytes``, ``dtype``, ``group`` (number of ranks) and ``stream``.
    """
    return list(_events(program.steps, iteration))


def _events(steps: list[Step], iteration: int) -> Iterator[Event]:
    for step in steps:
        if type(step) is Mark and step.iteration == iteration:
            unit = {"unit": step.unit} if step.unit else {}
            yield {"event": step.event, **unit, **step.fields}
        elif type(step) is Op and step.iteration == iteration and step.collective is not None:
            yield _collective(step)


def _collective(op: Op) -> Event:
    info = op.collective
    optional = {"shard_bytes": info.shard_nbytes, "trigger": info.trigger, "by": info.by}
    return {
        "event": info.kind,
        "unit": op.unit,
        "bytes": info.nbytes,
        "dtype": info.dtype,
        "group": info.group_size,
        "stream": op.stream,
        **{key: value for key, value in optional.items() if value is not None},
    }


def describe(event: Event) -> str:
    """One line: ``all_gather  layers.3  436.2 MB bfloat16 on unshard, prefetch by layers.4``."""
    name, unit = event["event"], event.get("unit", "")
    rest = {key: value for key, value in event.items() if key not in ("event", "unit")}
    return f"{name:<26} {unit:<16} {_details(rest)}".rstrip()


def _details(fields: Event) -> str:
    words = []
    if "bytes" in fields:
        words.append(f"{fields['bytes']:,} B")
    if "dtype" in fields:
        words.append(f"{fields['dtype']} over {fields['group']} on {fields['stream']}")
    if fields.get("trigger"):
        words.append(fields["trigger"] + (f" by {fields['by']}" if "by" in fields else ""))
    if "waits_for_free_of" in fields:
        which = f"the {fields['freed_in']} free" if "freed_in" in fields else "the free"
        words.append(f"until {which} of {fields['waits_for_free_of']}")
    shown = ("bytes", "shard_bytes", "dtype", "group", "stream", "trigger", "by", "freed_in")
    rest = (f"{k}={v}" for k, v in fields.items() if k not in (*shown, "waits_for_free_of"))
    return ", ".join([*words, *rest])
