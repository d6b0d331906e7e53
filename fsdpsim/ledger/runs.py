"""The simulated runtimes beside the formulas: what each holds at the update, and what it sends.

FSDP's control flow does not depend on what has completed, so the program that a schedule records
says all of this; nothing needs to run, and a model that does not fit can be counted too.

A strategy that gets a runtime of its own gets its row here, in :func:`variants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from fsdpsim.collectives import PASSES
from fsdpsim.engine import Op
from fsdpsim.ledger.communication import hybrid_factors
from fsdpsim.ledger.model_states import (
    Strategy,
    ddp,
    hybrid_shard,
    zero,
    zero_1_by_all_reduce,
)
from fsdpsim.memory import Buffer, Free, Malloc
from fsdpsim.program import TRANSFERS, Mark, Program
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import (
    Ddp,
    Fsdp1,
    Fsdp2,
    FsdpTable,
    Zero1,
    Zero2,
    ZeroOffload,
)
from fsdpsim.simulate import build_costs, build_workload, record
from fsdpsim.workload import Workload

T = TypeVar("T", Fsdp1, Fsdp2, Zero1)

#: From the second on, an iteration finds the optimizer's state and FSDP1's forward order.
ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One strategy under one runtime. Bytes on, and sent by, one GPU."""

    strategy: Strategy
    scenario: Scenario
    """The scenario with its [fsdp] table replaced."""
    workload: Workload
    held: dict[str, int]
    """Category of :data:`fsdpsim.memory.CATEGORIES` -> bytes when the optimizer steps."""
    sent: dict[str, Fraction]
    """Kind of collective -> bytes sent in the last iteration."""
    seconds: float
    """Of these collectives by the scenario's cost model, one after the other."""

    @property
    def runtime(self) -> str:
        """ddp, zero1, zero2, fsdp1 or fsdp2."""
        return self.scenario.fsdp.runtime

    @property
    def held_total(self) -> int:
        """Bytes of all categories."""
        return sum(self.held.values())

    @property
    def sent_total(self) -> Fraction:
        """Bytes of all kinds."""
        return sum(self.sent.values(), Fraction(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRun:
    """ZeRO-Offload as it is simulated. Bytes of one GPU."""

    scenario: Scenario
    workload: Workload
    copied: int
    """Over PCIe in the last step, both ways."""
    held: int
    """On the GPU between two steps."""


def offload_run(scenario: Scenario) -> OffloadRun:
    """``scenario`` under the ``zero_offload`` runtime, recorded; its own options if it has them."""
    own = scenario.fsdp
    table = own if isinstance(own, ZeroOffload) else ZeroOffload(runtime="zero_offload")
    training = scenario.training.model_copy(update={"iterations": ITERATIONS})
    scenario = scenario.model_copy(update={"fsdp": table, "training": training})
    costs = build_costs(scenario)
    workload = build_workload(scenario, costs)
    program = record(scenario, workload, costs)
    ops = (s for s in program.steps if type(s) is Op and s.iteration == ITERATIONS - 1)
    return OffloadRun(
        scenario=scenario,
        workload=workload,
        copied=sum(op.nbytes for op in ops if op.kind in TRANSFERS),
        held=sum(held_at(program, "zero_grad").values()),
    )


def runs(scenario: Scenario) -> Iterator[Run]:
    """Each strategy that a simulated runtime has, under each such runtime."""
    for strategy, table in variants(scenario):
        training = scenario.training.model_copy(update={"iterations": ITERATIONS})
        yield run(strategy, scenario.model_copy(update={"fsdp": table, "training": training}))


def run(strategy: Strategy, scenario: Scenario) -> Run:
    """Record ``scenario`` and count its last iteration."""
    costs = build_costs(scenario)
    workload = build_workload(scenario, costs)
    program = record(scenario, workload, costs)
    return Run(
        strategy=strategy,
        scenario=scenario,
        workload=workload,
        held=held_at(program, "optimizer_step"),
        sent=sent_in(program, scenario.iterations - 1),
        seconds=sum(op.seconds for op in _collectives(program, scenario.iterations - 1)),
    )


def variants(scenario: Scenario) -> Iterator[tuple[Strategy, FsdpTable]]:
    """The strategies and the [fsdp] tables that run them; other keys are the scenario's."""
    world, factor = scenario.world_size, hybrid_factor(scenario)
    one, two = _base_fsdp1(scenario), _base_fsdp2(scenario)
    own = scenario.fsdp
    yield ddp(), own if isinstance(own, Ddp) else Ddp(runtime="ddp", no_sync=True)
    if world == 1:
        return  # nothing to shard
    first = own if isinstance(own, Zero1) else Zero1(runtime="zero1")
    yield zero(1, world), _with(first, all_reduce=False)
    yield zero_1_by_all_reduce(world), _with(first, all_reduce=True)
    yield zero(2, world), own if isinstance(own, Zero2) else Zero2(runtime="zero2")
    yield zero(2, world), _with(one, sharding_strategy="SHARD_GRAD_OP", sharding_factor=world)
    kept = {"reshard_after_forward": False, "overrides": {}, "sharding_factor": world}
    yield zero(2, world), _with(two, **kept)
    yield zero(3, world), _with(one, sharding_strategy="FULL_SHARD", sharding_factor=world)
    yield zero(3, world), _with(two, sharding_factor=world)
    if factor is not None:
        hybrid = hybrid_shard(factor)
        yield hybrid, _with(one, sharding_strategy="HYBRID_SHARD", sharding_factor=factor)
        yield hybrid, _with(_without_uneven_reshard(two, factor), sharding_factor=factor)


def hybrid_factor(scenario: Scenario) -> int | None:
    """The scenario's own F if it is hybrid, else a node's GPUs; None where neither is between."""
    factors = hybrid_factors(scenario.device)
    wanted = (scenario.shard_factor, scenario.device.gpus_per_node)
    return next((f for f in wanted if f in factors), None)


def _base_fsdp1(scenario: Scenario) -> Fsdp1:
    if isinstance(scenario.fsdp, Fsdp1):
        return scenario.fsdp
    return Fsdp1(runtime="fsdp1", **_wrapping(scenario.fsdp))


def _base_fsdp2(scenario: Scenario) -> Fsdp2:
    if not isinstance(scenario.fsdp, Fsdp2):
        return Fsdp2(runtime="fsdp2", **_wrapping(scenario.fsdp))
    own = scenario.fsdp
    return own if own.reshard_after_forward is not False else _with(own, reshard_after_forward=None)


def _without_uneven_reshard(table: Fsdp2, factor: int) -> Fsdp2:
    """Torch's defaults instead of a smaller group that does not divide ``factor``."""
    overrides = (o.reshard_after_forward for o in table.overrides.values())
    wanted = [v for v in (table.reshard_after_forward, *overrides) if v and v is not True]
    if all(factor % ranks == 0 for ranks in wanted):
        return table
    return _with(table, reshard_after_forward=None, overrides={})


def _wrapping(table: FsdpTable) -> dict[str, Any]:
    """How the scenario forms units, whatever its runtime."""
    keys = ("unit", "wrap_embedding", "wrap_head")
    return {key: getattr(table, key) for key in keys if hasattr(table, key)}


def _with(table: T, **changes: object) -> T:
    return table.model_copy(update=changes)


def held_at(program: Program, event: str) -> dict[str, int]:
    """Category -> bytes alive at the last mark of ``event``, in host order."""
    held: dict[str, int] = {}
    for buffer in _alive_at(program, event):
        held[buffer.category] = held.get(buffer.category, 0) + buffer.nbytes
    return held


def _alive_at(program: Program, event: str) -> list[Buffer]:
    alive: dict[int, Buffer] = {}
    found: list[Buffer] = []
    for step in program.steps:
        if type(step) is Malloc:
            alive[id(step.buffer)] = step.buffer
        elif type(step) is Free:
            del alive[id(step.buffer)]
        elif type(step) is Mark and step.event == event:
            found = list(alive.values())
    return found


def _collectives(program: Program, iteration: int) -> Iterator[Op]:
    for step in program.steps:
        if type(step) is Op and step.iteration == iteration and step.collective is not None:
            yield step


def sent_in(program: Program, iteration: int) -> dict[str, Fraction]:
    """Kind of collective -> bytes that this rank sends in rings in ``iteration``, exactly."""
    sent: dict[str, Fraction] = {}
    for op in _collectives(program, iteration):
        info = op.collective
        share = Fraction(PASSES[info.kind] * (info.group_size - 1), info.group_size)
        sent[info.kind] = sent.get(info.kind, Fraction(0)) + share * info.nbytes
    return sent
