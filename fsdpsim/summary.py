"""The figures of one simulated step, as ``run --json`` prints them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdpsim.memory import Oom
from fsdpsim.result import Result


def summary(result: Result) -> dict[str, Any]:
    """The summary of ``result``: seconds end in ``_s``, bytes in ``_bytes``."""
    allocator = result.memory.allocator
    oom = result.memory.oom
    return {
        "scenario": result.scenario.name,
        "title": result.scenario.title,
        "step_time_s": None if oom else result.step_time,
        "iteration_times_s": [] if oom else result.iteration_times,
        "compute_time_s": result.compute_time,
        "exposed_communication_s": result.exposed_communication,
        "tokens_per_s_per_gpu": None if oom else result.tokens_per_second,
        "mfu": None if oom else result.mfu,
        "peak_requested_bytes": result.peak("requested"),
        "peak_allocated_bytes": result.peak("allocated"),
        "peak_active_bytes": result.peak("active"),
        "peak_reserved_bytes": result.peak("reserved"),
        "outside_allocator_bytes": result.outside_allocator,
        "host_memory_bytes": result.host_memory,
        "num_alloc_retries": allocator.num_alloc_retries,
        "num_ooms": allocator.num_ooms,
        "oom": describe_oom(oom) if oom else None,
        "max_unsharded_units": result.max_unsharded_units,
        "collectives": {kind: asdict(s) for kind, s in result.collectives.items()},
        "transfers": {kind: asdict(s) for kind, s in result.transfers.items()},
        "host_blocked_s": result.host_blocked,
    }


def describe_oom(oom: Oom) -> dict[str, Any]:
    """What was asked for, when, by which unit, and what stood in the way (bytes)."""
    report = asdict(oom.report)
    return {
        "what": oom.buffer.name,
        "when_s": oom.time,
        "unit": oom.buffer.unit,
        "phase": oom.buffer.phase,
        "iteration": oom.buffer.iteration,
        "stream": oom.buffer.stream,
        **{
            f"{key}_bytes": value
            for key, value in report.items()
            if key not in ("stream", "rejected")
        },
        "rejected": oom.report.rejected,
    }
