"""The ``[fsdp]`` table: one model per runtime, with torch's own names and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, field_validator

#: "model" | "block" | "sublayer" | "linear" | {blocks = k} | list of module names or patterns.
UnitSize = str | dict[str, PositiveInt] | list[str]


class Table(BaseModel):
    """A table of the scenario file: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _limit(value: Any) -> Any:
    if value is True:
        raise ValueError("give the number of units that may be unsharded at once, or false")
    return value


class _Sharded(Table):
    unit: UnitSize = "block"
    """Unit size; only for a [model]: "model", "block", "sublayer", "linear", { blocks = k }, or a
    list of module names."""
    wrap_embedding: bool = False
    """Make the embedding a unit of its own (torchtitan does) instead of part of the root."""
    wrap_head: bool = False
    """Make final norm and head a unit of their own instead of part of the root."""
    sharding_factor: PositiveInt | None = None
    """F: ranks that one parameter is sharded over; replicas = world size / F. Default: the world
    size (FSDP1's hybrid strategies: the GPUs of a node)."""


class Textbook(_Sharded):
    """The lectures' simulator: all-gather, compute, reduce-scatter, a limit on unsharded units."""

    runtime: Literal["textbook"]
    overlap: bool = True
    """False: collectives run on the compute stream."""
    backward_prefetch: Literal["BACKWARD_PRE"] | None = "BACKWARD_PRE"
    """Gather unit i-1 before the backward of unit i; "NO_PREFETCH": after its reduce-scatter."""
    forward_prefetch: bool = False
    """Gather unit i+1 before the forward of unit i is launched."""
    limit_all_gathers: Annotated[Literal[False] | PositiveInt, BeforeValidator(_limit)] = 2
    """At most this many unsharded units alive: the host waits for the oldest to be freed; false: no
    limit."""
    reshard_last_unit: bool = False
    """True: the last unit too is freed after forward and gathered again for backward."""

    @field_validator("backward_prefetch", mode="before")
    @classmethod
    def _none_is_spelled(cls, value: Any) -> Any:
        return no_prefetch_is_none(value)


class Ddp(Table):
    """``DistributedDataParallel``: replicated parameters, bucketed all-reduce during backward."""

    runtime: Literal["ddp"]
    bucket_cap_mb: Annotated[float, Field(gt=0)] = 25
    """MiB of gradients per all-reduce (the first bucket takes 1 MiB, as in torch)."""
    gradient_as_bucket_view: bool = False
    """Gradients live in the buckets instead of beside them."""
    no_sync: bool = False
    """All micro-batches but the last run under ``no_sync()``."""


class Fsdp1(_Sharded):
    """``FullyShardedDataParallel``."""

    runtime: Literal["fsdp1"]
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
        | None
    ) = None
    """torch's ``ShardingStrategy``. Default by F: FULL_SHARD for the world size, NO_SHARD for 1,
    HYBRID_SHARD between."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """When unit i-1 is gathered for backward: before or after unit i's; "NO_PREFETCH" for None."""
    forward_prefetch: bool = False
    """Gather unit i+1 before unit i's forward is launched (from the second iteration)."""
    limit_all_gathers: bool = True
    """The rate limiter: the CPU waits for the free of an earlier unit before an all-gather."""
    use_orig_params: bool = False
    """Align each original parameter to 16 bytes in the flat parameter."""
    no_sync: bool = False
    """All micro-batches but the last run under ``no_sync()``."""

    @field_validator("backward_prefetch", mode="before")
    @classmethod
    def _none_is_spelled(cls, value: Any) -> Any:
        return no_prefetch_is_none(value)


class UnitOverride(Table):
    """Setters for one unit (or all whose names match), under ``[fsdp.overrides."NAME"]``."""

    reshard_after_forward: bool | PositiveInt | None = None
    """As the key of ``[fsdp]``, for this unit."""
    forward_prefetch: tuple[str, ...] | None = None
    """``set_modules_to_forward_prefetch``: names of units."""
    backward_prefetch: tuple[str, ...] | None = None
    """``set_modules_to_backward_prefetch``: names of units."""
    unshard_in_backward: bool = True
    """``set_unshard_in_backward(False)``: do not gather a unit that backward does not need."""


class Fsdp2(_Sharded):
    """``fully_shard``. The keys named after setters hold for all micro-batches but the last."""

    runtime: Literal["fsdp2"]
    reshard_after_forward: bool | PositiveInt | None = None
    """true: free after forward; false: keep until backward; n: keep a shard of 1/n. Default: true,
    but false for the root."""
    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    """Units that each unit gathers ahead in forward (explicit lists); 0: only what running ahead
    gives."""
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    """Units that each unit gathers ahead in backward (explicit lists); 0: torch's own one."""
    overrides: dict[str, UnitOverride] = {}
    """Setters per unit; names may hold ``*``."""
    unshard_early: tuple[str, ...] = ()
    """Units whose ``unshard()`` the training loop calls before each forward."""
    reduce_scatter_max_input_buffers: PositiveInt = 1
    """Reduce-scatter inputs that may be alive at once."""
    separate_reduce_scatter_group: bool = False
    """Give reduce-scatters a communicator of their own."""
    requires_gradient_sync: bool = True
    """False: no reduction in micro-batches before the last."""
    requires_all_reduce: bool = True
    """False: HSDP's all-reduce only in the last micro-batch."""
    reshard_after_backward: bool = True
    """False: keep parameters unsharded between micro-batches."""
    is_last_backward: bool = True
    """False: backward of earlier micro-batches does not wait for its reductions."""


def no_prefetch_is_none(value: Any) -> Any:
    """Accept accelerate's word for ``None``, which TOML cannot write."""
    return None if value == "NO_PREFETCH" else value


FsdpTable = Annotated[Textbook | Ddp | Fsdp1 | Fsdp2, Field(discriminator="runtime")]
