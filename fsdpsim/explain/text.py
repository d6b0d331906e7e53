"""Words for causes, units and settings, shared by tables and sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpsim.explain.parts import Cause, Part

#: What the compute stream did.
BUSY = {
    "copy": "copies and casts of FSDP",
    "all_gather": "all_gather on the compute stream",
    "reduce_scatter": "reduce_scatter on the compute stream",
    "all_reduce": "all_reduce on the compute stream",
}

#: Why the compute stream was idle, where the sentence begins with what it waited for.
IDLE = {
    "side_copy": "a copy-in, cast or division runs first",
    "launch": "not launched: the host is launching",
    "hook": "not launched: the host is in FSDP's hooks",
    "rate_limiter": "not issued: the rate limiter blocks the host",
    "cuda_malloc": "not issued: the host is in cudaMalloc",
    "alloc_retry": "not issued: the allocator retries (cudaFree)",
    "read_loss": "not issued: the host reads the loss",
    "other_ranks": "other ranks are late",
    "h2d": "a shard is copied from the host first",
    "d2h": "a gradient is copied to the host first",
    "gradient_buckets": "not issued: both gradient buckets are under way",
    "offload": "not issued: the host waits for the offloaded gradients",
    "blocking_copy": "not issued: a copy blocks the host",
    "cpu_optimizer": "the CPUs run the optimizer",
}

#: Why what was waited for had not come earlier.
HELD_BY = {
    "step_start": "it is the first of the step: nothing was there to compute meanwhile",
    "compute": "it needed what the compute stream had just produced or freed",
    "queue": "its stream or communicator was busy with another collective",
    "host": "the host was busy until it issued it",
    "rate_limiter": "the rate limiter had kept the host from issuing it",
    "read_loss": "the host had read the loss",
    "alloc_retry": "the host had been in a cudaMalloc retry",
    "other_ranks": "other ranks were late",
    "gradient_buckets": "both gradient buckets were under way",
    "offload": "the host had waited for the offloaded gradients",
    "blocking_copy": "a copy had blocked the host",
    "cpu_optimizer": "the CPUs had run the optimizer",
}


def describe_cause(found: Cause) -> str:
    """One cause in words."""
    if found.busy:
        return BUSY.get(found.cause, found.cause)
    awaited = found.waits_for or "the host"
    if found.cause == "side_copy" and found.waits_for == "copy":
        return "waits for a copy or cast after a collective"
    if found.behind:
        return f"waits for {awaited}: queued behind {found.behind}"
    if found.cause == found.waits_for:
        return f"waits for {awaited}: it runs"
    return f"waits for {awaited}: {IDLE.get(found.cause, found.cause)}"


#: Steps of the critical path that are not kinds of op.
STEPS = {
    "side_copy": "copy on FSDP's streams",
    "other_ranks": "other ranks",
    "cpu_optimizer": "optimizer on the CPUs",
}


def describe_step(step: str, phase: str) -> str:
    """One step of the critical path in words."""
    if step == phase and step != "optimizer":
        return f"{step} compute"
    return STEPS.get(step, step)


def longest_waits(parts: Sequence[Part]) -> list[tuple[str, float]]:
    """What the idle compute stream waited for, and seconds; longest first."""
    waits: dict[str, float] = {}
    for part in parts:
        if not part.busy:
            waits[part.waits_for] = waits.get(part.waits_for, 0.0) + part.seconds
    return sorted(waits.items(), key=lambda item: -item[1])


def unit_range(units: Sequence[str]) -> str:
    """``layers.3 to layers.0 (4 units)``; empty names are the training loop."""
    named = [unit for unit in units if unit]
    if len(named) < 3:
        return ", ".join(named)
    return f"{named[0]} to {named[-1]} ({len(named)} units)"


def as_setting(key: str, value: Any) -> str:
    """``fsdp.unit={ blocks = 2 }``: a change as ``--set`` takes it."""
    return f"{key}={as_value(value)}"


def as_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {as_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, str):
        return value
    return json.dumps(value)
