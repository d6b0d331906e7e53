"""The ``[fsdp]`` table: one model per runtime, with torch's own names and defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from fsdpsim.faults import Fault, did_you_mean
from fsdpsim.scenario.keys import join_key
from fsdpsim.units import Count, CountOrZero

#: "model" | "block" | "sublayer" | "linear" | {blocks = k} | list of module names or patterns.
UnitSize = str | dict[str, Count] | list[str]


class Table(BaseModel):
    """A table of the scenario file: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def _limit(value: Any) -> Any:
    if value is True or (value is not False and value == 0):
        word = "true" if value else "0"
        raise ValueError(f"{word} is not a limit: give the number of unsharded units, or false")
    return value


class _Sharded(Table):
    unit: UnitSize = "block"
    """Unit size; only for a [model]: "model", "block", "sublayer", "linear", { blocks = k }, or a
    list of module names."""
    wrap_embedding: StrictBool = False
    """Make the embedding a unit of its own (torchtitan does) instead of part of the root."""
    wrap_head: StrictBool = False
    """Make final norm and head a unit of their own instead of part of the root."""
    sharding_factor: Count | None = None
    """F: ranks that one parameter is sharded over; replicas = world size / F. Default: the world
    size (FSDP1's hybrid strategies: the GPUs of a node)."""


class Textbook(_Sharded):
    """The lectures' simulator: all-gather, compute, reduce-scatter, a limit on unsharded units."""

    runtime: Literal["textbook"]
    overlap: StrictBool = True
    """False: collectives run on the compute stream."""
    backward_prefetch: Literal["BACKWARD_PRE", "NO_PREFETCH"] = "BACKWARD_PRE"
    """Gather unit i-1 before the backward of unit i; "NO_PREFETCH": after its reduce-scatter."""
    forward_prefetch: StrictBool = False
    """Gather unit i+1 before the forward of unit i is launched."""
    limit_all_gathers: Annotated[Literal[False] | Count, BeforeValidator(_limit)] = 2
    """At most this many unsharded units alive: the host waits for the oldest to be freed; false: no
    limit."""
    reshard_last_unit: StrictBool = False
    """True: the last unit too is freed after forward and gathered again for backward."""


class Ddp(Table):
    """``DistributedDataParallel``: replicated parameters, bucketed all-reduce during backward."""

    runtime: Literal["ddp"]
    bucket_cap_mb: Annotated[float, Field(gt=0, strict=True)] = 25
    """MiB of gradients per all-reduce (the first bucket takes 1 MiB, as in torch)."""
    gradient_as_bucket_view: StrictBool = False
    """Gradients live in the buckets instead of beside them."""
    no_sync: StrictBool = False
    """All micro-batches but the last run under ``no_sync()``."""


class Zero(Table):
    """What the stages of ZeRO have in common: whole parameters, sharded optimizer state."""

    reduce_bucket_size: Count = 500_000_000
    """Elements of gradients per reduction, as DeepSpeed's key of that name."""


class Zero1(Zero):
    """ZeRO stage 1: whole parameters and gradients, sharded optimizer state."""

    runtime: Literal["zero1"]
    all_reduce: StrictBool = False
    """The lecture's wasteful way: all-reduce the gradients, of which each rank needs its part."""


class Zero2(Zero):
    """ZeRO stage 2: whole parameters, sharded gradients and optimizer state."""

    runtime: Literal["zero2"]


class ZeroOffload(Zero):
    """ZeRO-Offload: 16-bit parameters on the GPU, all other states and the update on the CPUs."""

    runtime: Literal["zero_offload"]
    delayed_parameter_update: StrictBool = False
    """The CPUs update with the gradients of step i during forward and backward of step i + 1."""
    pin_memory: StrictBool = True
    """False: host memory can be paged, so that each copy is slower and blocks the CPU thread."""


class _Fsdp(_Sharded):
    all_gather_dtype: Literal["int8"] | None = None
    """ZeRO++'s quantised weights: all-gathers of shards send this dtype, between a kernel that
    quantises the shard and one that restores the compute dtype. Default: ``param_dtype``."""


class Fsdp1(_Fsdp):
    """``FullyShardedDataParallel``."""

    runtime: Literal["fsdp1"]
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
        | None
    ) = None
    """torch's ``ShardingStrategy``. Default by F: FULL_SHARD for the world size, NO_SHARD for 1,
    HYBRID_SHARD between."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"
    """When unit i-1 is gathered for backward: before or after unit i's. torch's None is
    "NO_PREFETCH", accelerate's word for it."""
    forward_prefetch: StrictBool = False
    """Gather unit i+1 before unit i's forward is launched (from the second iteration)."""
    limit_all_gathers: StrictBool = True
    """The rate limiter: the CPU waits for the free of an earlier unit before an all-gather."""
    use_orig_params: StrictBool = False
    """Align each original parameter to 16 bytes in the flat parameter."""
    no_sync: StrictBool = False
    """All micro-batches but the last run under ``no_sync()``."""
    cpu_offload: StrictBool = False
    """``CPUOffload(offload_params=True)``: shards of parameters and gradients and the optimizer's
    state live in pinned host memory, and the optimizer runs on the CPUs."""


class UnitOverride(Table):
    """Setters for one unit (or all whose names match), under ``[fsdp.overrides."NAME"]``."""

    reshard_after_forward: StrictBool | Count | None = None
    """As the key of ``[fsdp]``, for this unit."""
    forward_prefetch: tuple[str, ...] | None = None
    """``set_modules_to_forward_prefetch``: names of units."""
    backward_prefetch: tuple[str, ...] | None = None
    """``set_modules_to_backward_prefetch``: names of units."""
    unshard_in_backward: StrictBool = True
    """``set_unshard_in_backward(False)``: do not gather a unit that backward does not need."""


class Fsdp2(_Fsdp):
    """``fully_shard``. The keys named after setters hold for all micro-batches but the last."""

    runtime: Literal["fsdp2"]
    reshard_after_forward: StrictBool | Count | None = None
    """true: free after forward; false: keep until backward; n: keep a shard of 1/n. Default: true,
    but false for the root."""
    forward_prefetch: CountOrZero = 0
    """Units that each unit gathers ahead in forward (explicit lists); 0: only what running ahead
    gives."""
    backward_prefetch: CountOrZero = 0
    """Units that each unit gathers ahead in backward (explicit lists); 0: torch's own one."""
    overrides: dict[str, UnitOverride] = {}
    """Setters per unit; names may hold ``*``."""
    unshard_early: tuple[str, ...] = ()
    """Units whose ``unshard()`` the training loop calls before each forward."""
    reduce_scatter_max_input_buffers: Count = 1
    """Reduce-scatter inputs that may be alive at once."""
    separate_reduce_scatter_group: StrictBool = False
    """Give reduce-scatters a communicator of their own."""
    requires_gradient_sync: StrictBool = True
    """False: no reduction in micro-batches before the last."""
    requires_all_reduce: StrictBool = True
    """False: HSDP's all-reduce only in the last micro-batch."""
    reshard_after_backward: StrictBool = True
    """False: keep parameters unsharded between micro-batches."""
    is_last_backward: StrictBool = True
    """False: backward of earlier micro-batches does not wait for its reductions."""
    offload_policy: Literal["cpu"] | None = None
    """"cpu" is ``CPUOffloadPolicy``: shards of parameters and gradients and the optimizer's state
    live in host memory, and the optimizer runs on the CPUs."""
    pin_memory: StrictBool = True
    """Of ``CPUOffloadPolicy``. False: host memory can be paged, so that each copy is slower and
    blocks the CPU thread."""

    def unknown_units(self, names: Sequence[str]) -> Iterator[Fault]:
        """Faults of the keys that name units, where ``names`` are all the units there are."""
        for pattern, override in self.overrides.items():
            if not any(fnmatchcase(name, pattern) for name in names):
                yield _unknown_unit(join_key(("fsdp", "overrides", pattern)), pattern, names)
            for key in ("forward_prefetch", "backward_prefetch"):
                for name in getattr(override, key) or ():
                    if name not in names:
                        at = join_key(("fsdp", "overrides", pattern, key))
                        yield _unknown_unit(at, name, names)
        for name in self.unshard_early:
            if name not in names:
                yield _unknown_unit("fsdp.unshard_early", name, names)


def _unknown_unit(key: str, name: str, names: Sequence[str]) -> Fault:
    hint = did_you_mean(name, names, f"units are {_some(names)}")
    reads = ("workload.units", "fsdp.unit", "fsdp.wrap_embedding", "fsdp.wrap_head")
    return Fault(key, f'"{name}" is not a unit; {hint}', reads)


def _some(names: Sequence[str]) -> str:
    shown = names if len(names) <= 6 else (*names[:4], "...", names[-1])
    return ", ".join(shown)


FsdpTable = Annotated[
    Textbook | Ddp | Zero1 | Zero2 | ZeroOffload | Fsdp1 | Fsdp2, Field(discriminator="runtime")
]

#: ``fsdp.runtime`` -> its table.
RUNTIMES: dict[str, type[Table]] = {
    "textbook": Textbook,
    "ddp": Ddp,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero_offload": ZeroOffload,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
}
