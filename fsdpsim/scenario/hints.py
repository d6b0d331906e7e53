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
}

#: option -> the FSDP1 way.
FSDP1_WAY = {
    "reshard_after_forward": "write sharding_strategy: FULL_SHARD frees after forward, "
    "SHARD_GRAD_OP does not",
    "requires_gradient_sync": "write no_sync = true",
    "overrides": "FSDP1 has no per-unit setters for this",
    "reduce_scatter_max_input_buffers": "FSDP1 never waits for a reduce-scatter before the end of "
    "backward",
    "reshard_last_unit": "FSDP1 always frees the last unit after forward",
    "overlap": "FSDP1 always overlaps; only the textbook runtime can turn it off",
}

#: option -> the plain DDP way.
DDP_WAY = {
    "sharding_factor": "DDP shards nothing; use fsdp1 or fsdp2 with sharding_factor = 1 or more",
    "unit": "DDP has buckets instead of units: bucket_cap_mb",
}

_WAYS = {"fsdp2": FSDP2_WAY, "fsdp1": FSDP1_WAY, "ddp": DDP_WAY}


def other_runtime(key: str, runtime: str) -> str | None:
    """The hint for ``key`` under ``runtime``, if it belongs to another one."""
    way = _WAYS.get(runtime, {}).get(key)
    return f"is not an option of {runtime}: {way}" if way else None
