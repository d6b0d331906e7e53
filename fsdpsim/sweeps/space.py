"""Where ``fsdpsim tune`` looks unless the scenario says: the choices FSDP leaves to its user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, Textbook
from fsdpsim.scenario.sweep_table import Axis

GRANULARITY = "training.granularity"

#: Sequences per GPU and micro-batch.
MICRO_BATCHES = (1, 2, 4, 8, 16)


def search_axes(scenario: Scenario) -> tuple[Axis, ...]:
    """The axes of the search: those of ``[sweep]``, and the default ones for all other keys.

    What needs another workload varies slowest, so that points one after the other share theirs.
    """
    given = scenario.sweep.axes() if scenario.sweep is not None else ()
    taken = {key for axis in given for key in axis.keys}
    own = [axis for axis in _default_axes(scenario) if not taken & set(axis.keys)]
    return tuple(axis for axis in (*given, *own) if axis.rows)


def _default_axes(scenario: Scenario) -> Iterator[Axis]:
    fsdp = scenario.fsdp
    if scenario.model is not None:
        if "granularity" not in scenario.training.model_fields_set:
            yield _axis(GRANULARITY, ("units",))
        if "unit" in type(fsdp).model_fields:
            yield _axis("fsdp.unit", _unit_sizes(scenario.model.num_hidden_layers))
        yield _axis("training.micro_batch_size", MICRO_BATCHES)
        yield _axis("training.activation_checkpointing", ("none", "selective", "full"))
    elif scenario.workload is not None and scenario.workload.activations is not None:
        yield _axis("training.activation_checkpointing", ("none", "full"))
    if isinstance(fsdp, Fsdp1):
        yield from _fsdp1_axes(scenario)
    elif isinstance(fsdp, Fsdp2):
        yield from _fsdp2_axes(scenario)
    elif isinstance(fsdp, Ddp):
        yield _axis("fsdp.bucket_cap_mb", (25, 100, 400))
        yield _axis("fsdp.gradient_as_bucket_view", (True, False))
    elif isinstance(fsdp, Textbook):
        yield from _textbook_axes()
    else:  # ZeRO's stages
        yield _axis("fsdp.reduce_bucket_size", (50_000_000, 500_000_000))


def _axis(key: str, values: tuple[Any, ...]) -> Axis:
    return Axis(keys=(key,), rows=tuple((value,) for value in values))


def _unit_sizes(layers: int) -> tuple[Any, ...]:
    several = tuple({"blocks": k} for k in (8, 4, 2) if k < layers)
    return ("model", *several, "block", "sublayer", "linear")


def sharding_factors(scenario: Scenario) -> tuple[int, ...]:
    """F in powers of two: within a node, or over whole nodes."""
    world, local = scenario.world_size, scenario.device.gpus_per_node
    powers = (2**k for k in range(world.bit_length()))
    fit = {f for f in (*powers, world) if world % f == 0 and (local % f == 0 or f % local == 0)}
    return tuple(sorted(fit))


def _fsdp1_axes(scenario: Scenario) -> Iterator[Axis]:
    rows = [
        (factor, strategy)
        for factor in sharding_factors(scenario)
        for strategy in _strategies(factor, scenario.world_size)
    ]
    yield Axis(keys=("fsdp.sharding_factor", "fsdp.sharding_strategy"), rows=tuple(rows))
    yield _axis("fsdp.backward_prefetch", ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"))
    yield _axis("fsdp.forward_prefetch", (False, True))
    yield _axis("fsdp.limit_all_gathers", (True, False))


def _strategies(factor: int, world: int) -> tuple[str, ...]:
    if factor == 1:
        return ("NO_SHARD",)
    if factor == world:
        return ("FULL_SHARD", "SHARD_GRAD_OP")
    return ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _fsdp2_axes(scenario: Scenario) -> Iterator[Axis]:
    yield _axis("fsdp.sharding_factor", sharding_factors(scenario))
    # None, torch's default, keeps the root unsharded where True does not.
    yield _axis("fsdp.reshard_after_forward", (None, True, False))
    yield _axis("fsdp.forward_prefetch", (0, 1, 2))
    yield _axis("fsdp.backward_prefetch", (0, 2))


def _textbook_axes() -> Iterator[Axis]:
    # Not F: this runtime has no all-reduce between replicas, so a small F would look free.
    yield _axis("fsdp.backward_prefetch", ("BACKWARD_PRE", "NO_PREFETCH"))
    yield _axis("fsdp.forward_prefetch", (False, True))
    yield _axis("fsdp.limit_all_gathers", (2, 3, False))
    yield _axis("fsdp.reshard_last_unit", (False, True))
