"""The remedies that are tried: one line per idea, with what it changes in the scenario file.

An idea lists alternatives; those that the scenario has already, or that it cannot have (a sharding
factor that does not divide, a setting of another runtime), are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpsim.explain.text import as_setting
from fsdpsim.scenario import Scenario, ScenarioError
from fsdpsim.scenario.keys import set_key, split_key
from fsdpsim.scenario.loading import validate
from fsdpsim.scenario.runtimes import Fsdp1
from fsdpsim.scenario.schema import strategy_of

#: Dotted keys of the scenario file and their new values.
Changes = Mapping[str, Any]

Alternatives = Callable[[Scenario], Iterable[Changes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """Alternatives to some settings, for some runtimes."""

    what: str
    runtimes: tuple[str, ...]
    alternatives: Alternatives
    needs: str = ""
    """A table that the scenario must have: ``model`` or ``hardware``."""
    only_for_oom: bool = False
    """Changes what is trained or how, so it is offered only where nothing runs at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One changed scenario."""

    what: str
    changes: Changes
    scenario: Scenario

    @property
    def text(self) -> str:
        """The changes as ``--set`` takes them."""
        return ", ".join(as_setting(key, value) for key, value in self.changes.items())


def each(key: str, *values: Any) -> Alternatives:
    """One alternative per value of ``key``."""
    return lambda _: ({key: value} for value in values)


def together(**values: Any) -> Alternatives:
    """One alternative that sets several keys of ``[fsdp]``."""
    return lambda _: [{f"fsdp.{key}": value for key, value in values.items()}]


def one_more_unit(scenario: Scenario) -> Iterator[Changes]:
    """Textbook: one unsharded unit more, and no limit."""
    limit = getattr(scenario.fsdp, "limit_all_gathers", False)
    if limit:
        yield {"fsdp.limit_all_gathers": limit + 1}
    yield {"fsdp.limit_all_gathers": False}


def sharding_factors(scenario: Scenario) -> Iterator[Changes]:
    """Whole nodes and parts of one, by powers of two; FSDP1's strategy follows the factor."""
    per_node, world = scenario.device.gpus_per_node, scenario.world_size
    factor = 1
    while factor <= world:
        if world % factor == 0 and (per_node % factor == 0 or factor % per_node == 0):
            changes: dict[str, Any] = {"fsdp.sharding_factor": factor}
            if isinstance(scenario.fsdp, Fsdp1) and scenario.fsdp.sharding_strategy is not None:
                changes["fsdp.sharding_strategy"] = _strategy(scenario.fsdp, factor, world)
            yield changes
        factor *= 2


def _strategy(fsdp: Fsdp1, factor: int, world: int) -> str:
    if factor == 1:
        return "NO_SHARD"
    keeps = fsdp.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    if factor == world:
        return "SHARD_GRAD_OP" if keeps else "FULL_SHARD"
    return "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"


def half_micro_batch(scenario: Scenario) -> Iterator[Changes]:
    """Half as many sequences at a time, twice as often: the same tokens per step."""
    size = scenario.training.micro_batch_size
    if size % 2 == 0:
        yield {
            "training.micro_batch_size": size // 2,
            "training.gradient_accumulation_steps": (
                2 * scenario.training.gradient_accumulation_steps
            ),
        }


def checkpointing(scenario: Scenario) -> Iterator[Changes]:
    """Keep less from forward to backward; given durations know no ``selective``."""
    if scenario.workload is None:
        yield {"training.activation_checkpointing": "selective"}
    yield {"training.activation_checkpointing": "full"}


def post_forward_sizes(scenario: Scenario) -> Iterator[Changes]:
    """FSDP2: free after forward, keep, or keep a shard of one node's size."""
    yield from ({"fsdp.reshard_after_forward": value} for value in (True, False))
    if scenario.shard_factor > scenario.device.gpus_per_node:
        yield {"fsdp.reshard_after_forward": scenario.device.gpus_per_node}


def bucket_sizes(scenario: Scenario) -> Iterator[Changes]:
    """ZeRO: buckets of a quarter, and of four times the size."""
    size: int = scenario.fsdp.reduce_bucket_size  # type: ignore[union-attr]
    for changed in (size // 4, 4 * size):
        if changed:
            yield {"fsdp.reduce_bucket_size": changed}


ZERO = ("zero1", "zero2", "zero_offload")
ALL = ("textbook", "ddp", *ZERO, "fsdp1", "fsdp2")
SHARDED = ("textbook", "fsdp1", "fsdp2")
UNIT_SIZES = ("model", {"blocks": 4}, {"blocks": 2}, "block", "sublayer")

IDEAS = (
    Idea(what="overlap", runtimes=("textbook",), alternatives=each("fsdp.overlap", True)),
    Idea(
        what="backward prefetch",
        runtimes=("textbook",),
        alternatives=each("fsdp.backward_prefetch", "BACKWARD_PRE", "NO_PREFETCH"),
    ),
    Idea(
        what="backward prefetch",
        runtimes=("fsdp1",),
        alternatives=each("fsdp.backward_prefetch", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    ),
    Idea(
        what="backward prefetch",
        runtimes=("fsdp2",),
        alternatives=each("fsdp.backward_prefetch", 0, 2),
    ),
    Idea(
        what="forward prefetch",
        runtimes=("textbook", "fsdp1"),
        alternatives=each("fsdp.forward_prefetch", True, False),
    ),
    Idea(
        what="forward prefetch",
        runtimes=("fsdp2",),
        alternatives=each("fsdp.forward_prefetch", 0, 1, 2),
    ),
    Idea(what="rate limiter", runtimes=("textbook",), alternatives=one_more_unit),
    Idea(
        what="rate limiter",
        runtimes=("fsdp1",),
        alternatives=each("fsdp.limit_all_gathers", True, False),
    ),
    Idea(
        what="unit size",
        runtimes=SHARDED,
        alternatives=each("fsdp.unit", *UNIT_SIZES),
        needs="model",
    ),
    Idea(
        what="reshard after forward",
        runtimes=("textbook",),
        alternatives=each("fsdp.reshard_last_unit", True, False),
    ),
    Idea(
        what="reshard after forward",
        runtimes=("fsdp1",),
        alternatives=each("fsdp.sharding_strategy", "FULL_SHARD", "SHARD_GRAD_OP"),
    ),
    Idea(
        what="reshard after forward",
        runtimes=("fsdp2",),
        alternatives=post_forward_sizes,
    ),
    Idea(
        what="reduce-scatter group",
        runtimes=("fsdp2",),
        alternatives=together(
            reduce_scatter_max_input_buffers=2, separate_reduce_scatter_group=True
        ),
    ),
    Idea(
        what="sharding factor",
        runtimes=SHARDED,
        alternatives=sharding_factors,
        needs="hardware",
    ),
    Idea(
        what="allocator",
        runtimes=ALL,
        alternatives=each("allocator.expandable_segments", True),
        needs="hardware",
    ),
    Idea(what="loss", runtimes=ALL, alternatives=each("training.read_loss", False)),
    Idea(
        what="allocator",
        runtimes=ALL,
        alternatives=each("allocator.max_split_size_mb", 128),
        needs="hardware",
        only_for_oom=True,
    ),
    Idea(
        what="activation checkpointing",
        runtimes=ALL,
        alternatives=checkpointing,
        only_for_oom=True,
    ),
    Idea(
        what="micro-batch",
        runtimes=tuple(name for name in ALL if name != "textbook"),
        alternatives=half_micro_batch,
        needs="model",
        only_for_oom=True,
    ),
    Idea(
        what="CPU offload",
        runtimes=("fsdp1",),
        alternatives=each("fsdp.cpu_offload", True),
        needs="hardware",
        only_for_oom=True,
    ),
    Idea(
        what="CPU offload",
        runtimes=("fsdp2",),
        alternatives=each("fsdp.offload_policy", "cpu"),
        needs="hardware",
        only_for_oom=True,
    ),
    Idea(
        what="pinned memory",
        runtimes=("fsdp2", "zero_offload"),
        alternatives=each("fsdp.pin_memory", True),
    ),
    Idea(what="bucket size", runtimes=ZERO, alternatives=bucket_sizes),
    Idea(what="reduce-scatter", runtimes=("zero1",), alternatives=each("fsdp.all_reduce", False)),
    Idea(
        what="gradients in the buckets",
        runtimes=("ddp",),
        alternatives=each("fsdp.gradient_as_bucket_view", True),
    ),
)


def remedies(scenario: Scenario, *, for_oom: bool = False) -> Iterator[Remedy]:
    """The changed scenarios that are valid and differ from ``scenario`` and from each other."""
    seen = [_meaning(scenario)]
    for idea in IDEAS:
        if scenario.fsdp.runtime not in idea.runtimes or (idea.only_for_oom and not for_oom):
            continue
        if idea.needs and getattr(scenario, idea.needs) is None:
            continue
        for changes in idea.alternatives(scenario):
            try:
                varied = vary(scenario, changes)
            except ScenarioError:
                continue
            if (meaning := _meaning(varied)) not in seen:
                seen.append(meaning)
                yield Remedy(what=idea.what, changes=changes, scenario=varied)


def vary(scenario: Scenario, changes: Changes) -> Scenario:
    """``scenario`` with some keys changed. Raises :class:`ScenarioError` if that is not allowed."""
    tables = dict(scenario.tables)
    for key, value in changes.items():
        tables = set_key(tables, split_key(key), value)
    return validate(tables, scenario.source, scenario.base)


def _meaning(scenario: Scenario) -> tuple[Any, ...]:
    """Equal for two scenarios of which one only writes out the other's defaults."""
    fsdp, factor = scenario.fsdp, scenario.shard_factor
    update: dict[str, Any] = {}
    if "sharding_factor" in type(fsdp).model_fields:
        update["sharding_factor"] = factor
    if isinstance(fsdp, Fsdp1):
        update["sharding_strategy"] = strategy_of(fsdp, factor, scenario.world_size)
    return scenario.training, fsdp.model_copy(update=update), scenario.allocator
