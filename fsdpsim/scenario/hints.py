"""What to write instead, when an option of one runtime stands under another."""

from __future__ import annotations

#: option -> the FSDP2 way. Source: torch's FSDP1-to-FSDP2 migration guide and ``fully_shard``.
FSDP2_WAY = {
    "sharding_strategy": "FULL_SHARD is reshard_after_forward = true, SHARD_GRAD_OP is false, "
    "and the HYBRID strategies are these with sharding_factor below the world size",
    "limit_all_gathers": "FSDP2 has no rate limiter: it bounds memory by stream waits and never "
    "blocks the CPU",
    "use_orig_params": "FSDP2 always keeps the original parameters (DTensors)",
    "no_sync": "write requires_gradient_sync = false (set_requires_gradient_sync)",
    "overlap": "FSDP2 always overlaps; only the textbook runtime can turn it off",
    "reshard_last_unit": 'write reshard_after_forward = false under [fsdp.overrides."UNIT"]',
    "bucket_cap_mb": "FSDP2 has units instead of buckets: unit",
    "gradient_as_bucket_view": "FSDP2 reduces each unit's gradients from a buffer of its own",
    "cpu_offload": 'write offload_policy = "cpu" (CPUOffloadPolicy)',
    "delayed_parameter_update": "only zero_offload overlaps the update with the next step",
}

#: option -> the FSDP1 way.
FSDP1_WAY = {
    "reshard_after_forward": "write sharding_strategy: FULL_SHARD frees after forward, "
    "SHARD_GRAD_OP does not",
    "requires_gradient_sync": "write no_sync = true",
    "requires_all_reduce": "FSDP1 reduces over all replicas in each micro-batch, or in none but "
    "the last: no_sync",
    "reshard_after_backward": "FSDP1 always frees after backward, but under no_sync",
    "is_last_backward": "write no_sync = true",
    "overrides": "FSDP1 has no per-unit setters for this",
    "unshard_early": "FSDP1 has no unshard(); forward_prefetch comes nearest",
    "reduce_scatter_max_input_buffers": "FSDP1 never waits for a reduce-scatter before the end of "
    "backward",
    "separate_reduce_scatter_group": "FSDP1 has one communicator for all-gather and reduce-scatter",
    "reshard_last_unit": "FSDP1 always frees the last unit after forward",
    "overlap": "FSDP1 always overlaps; only the textbook runtime can turn it off",
    "bucket_cap_mb": "FSDP1 has units instead of buckets: unit",
    "gradient_as_bucket_view": "FSDP1's gradients are views of its flat parameter's",
    "offload_policy": "write cpu_offload = true (CPUOffload(offload_params=True))",
    "pin_memory": "FSDP1 always pins what it offloads",
    "delayed_parameter_update": "only zero_offload overlaps the update with the next step",
}

#: option -> the plain DDP way.
DDP_WAY = {
    "sharding_factor": "DDP shards nothing; use fsdp1 or fsdp2 with sharding_factor = 1 or more",
    "sharding_strategy": "DDP shards nothing; NO_SHARD of fsdp1 comes nearest",
    "unit": "DDP has buckets instead of units: bucket_cap_mb",
    "requires_gradient_sync": "write no_sync = true",
}
_NOT_IN_DDP = ("reshard_after_forward", "forward_prefetch", "backward_prefetch", "overrides")
DDP_WAY |= dict.fromkeys(
    (*_NOT_IN_DDP, "limit_all_gathers", "unshard_early"),
    "DDP keeps all parameters: there is nothing to gather or to free",
)


_OFFLOADING = ("cpu_offload", "offload_policy", "pin_memory", "delayed_parameter_update")
_ON_THE_GPU = (
    "all of its states live on the GPU; zero_offload, fsdp1 (cpu_offload) and fsdp2 "
    "(offload_policy) keep some in host memory"
)
_WHOLE = "parameters are whole on every rank: there is nothing to gather before use"
DDP_WAY |= dict.fromkeys(_OFFLOADING, _ON_THE_GPU) | {"all_gather_dtype": _WHOLE}

#: option -> the way of ZeRO's stages 1 and 2, and of ZeRO-Offload.
ZERO_WAY = dict.fromkeys(_OFFLOADING, _ON_THE_GPU) | {"all_gather_dtype": _WHOLE}
OFFLOAD_WAY = {
    "cpu_offload": "zero_offload always offloads gradients, optimizer state and update",
    "offload_policy": "zero_offload always offloads gradients, optimizer state and update",
    "all_gather_dtype": _WHOLE,
}

#: option -> the textbook's way.
TEXTBOOK_WAY = {
    "sharding_strategy": "the textbook runtime always frees after forward and backward",
    "reshard_after_forward": "the textbook runtime always does; for the last unit see "
    "reshard_last_unit",
    "no_sync": "the textbook runtime has one forward and backward per step",
    "requires_gradient_sync": "the textbook runtime has one forward and backward per step",
    "overrides": "the textbook runtime treats all units alike; use fsdp2",
    "unshard_early": "the textbook runtime has forward_prefetch",
    "all_gather_dtype": "the textbook runtime gathers what it computes with; use fsdp1 or fsdp2",
} | dict.fromkeys(_OFFLOADING, _ON_THE_GPU)

_WAYS = {
    "fsdp2": FSDP2_WAY,
    "fsdp1": FSDP1_WAY,
    "ddp": DDP_WAY,
    "textbook": TEXTBOOK_WAY,
    "zero1": ZERO_WAY,
    "zero2": ZERO_WAY,
    "zero_offload": OFFLOAD_WAY,
}

#: (runtime, option) -> what its value may be, where another runtime means something else by it.
_VALUES = {
    ("textbook", "backward_prefetch"): '"BACKWARD_PRE" or "NO_PREFETCH"',
    (
        "textbook",
        "limit_all_gathers",
    ): "the number of units that may be unsharded at once, or false",
    ("fsdp1", "backward_prefetch"): '"BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH"',
    ("fsdp1", "forward_prefetch"): "true or false: FSDP1 gathers one unit ahead or none",
    ("fsdp1", "limit_all_gathers"): "true or false: the limit itself is FSDP1's own",
    ("fsdp2", "backward_prefetch"): "the number of units that each unit gathers ahead "
    "(set_modules_to_backward_prefetch); 0 is FSDP2's own prefetch of one unit",
    ("fsdp2", "forward_prefetch"): "the number of units that each unit gathers ahead "
    "(set_modules_to_forward_prefetch)",
}


def other_runtime(key: str, runtime: str) -> str | None:
    """The hint for ``key`` under ``runtime``, if it belongs to another one."""
    way = _WAYS.get(runtime, {}).get(key)
    return f"is not an option of {runtime}: {way}" if way else None


def expected_value(key: str, runtime: str) -> str | None:
    """What the value of ``key`` may be under ``runtime``, if another runtime has the same key."""
    return _VALUES.get((runtime, key))
