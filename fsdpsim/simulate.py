"""From a scenario to a result: workload, costs, schedule, engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

from fsdpsim.allocator import OutOfMemoryError, RequestTooLargeError
from fsdpsim.collectives import Group, collective_seconds, replicate_group, shard_group
from fsdpsim.collector import paused_collector
from fsdpsim.contention import SharedGpu
from fsdpsim.costs import Costs
from fsdpsim.engine import Op
from fsdpsim.faults import Fault, FaultsError
from fsdpsim.frozen import freeze
from fsdpsim.given import given_seconds, given_workload
from fsdpsim.hardware import Hardware
from fsdpsim.kernels import build_workload as model_workload
from fsdpsim.kernels import (
    clip_kernels,
    coarsen,
    optimizer_kernels,
    optimizer_state_bytes,
    optimizer_states,
)
from fsdpsim.memory import GpuMemory, MemoryEvent
from fsdpsim.model import ModelConfig, Wrapping, form_units, unit_names
from fsdpsim.noise import disturb
from fsdpsim.program import Collective, Program
from fsdpsim.ranks import ContentionFactory, Rank, run_ranks
from fsdpsim.result import Result
from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.scenario.runtimes import Ddp, Fsdp2, Zero
from fsdpsim.scenario.workload_tables import Training
from fsdpsim.schedules.ddp import DdpRuntime
from fsdpsim.schedules.driver import TrainingStep
from fsdpsim.schedules.fsdp1 import Fsdp1Runtime
from fsdpsim.schedules.fsdp2 import Fsdp2Runtime
from fsdpsim.schedules.runtime import Optimizer, Runtime
from fsdpsim.schedules.textbook import TextbookRuntime
from fsdpsim.schedules.zero import ZeroRuntime
from fsdpsim.schedules.zero_offload import ZeroOffloadRuntime
from fsdpsim.workload import DTYPE_BYTES, Kernel, Workload, nbytes

RUNTIMES: dict[str, type[Runtime]] = {
    "ddp": DdpRuntime,
    "fsdp1": Fsdp1Runtime,
    "fsdp2": Fsdp2Runtime,
    "textbook": TextbookRuntime,
    "zero1": ZeroRuntime,
    "zero2": ZeroRuntime,
    "zero_offload": ZeroOffloadRuntime,
}

#: Bytes of a device that no [hardware] table describes: more than any scenario asks for, and few
#: enough for the addresses of expandable ranges to stay below 2**53, as snapshot viewers need.
UNLIMITED = 1 << 48

MemoryHook = Callable[[MemoryEvent], object]


@paused_collector()
def simulate(
    scenario: Scenario,
    *,
    workload: Workload | None = None,
    on_memory_event: MemoryHook | None = None,
    marks: bool = True,
) -> Result:
    """Simulate ``scenario`` on one rank that stands for all, or with [noise] on all ranks.

    A predicted out-of-memory is a result, not an error. ``workload`` is that of
    :func:`build_workload`, where it is at hand. ``on_memory_event`` is called for each event of a
    torch memory snapshot of rank 0. Without ``marks`` the program lacks hooks and compute marks,
    which no figure needs.
    """
    costs = build_costs(scenario)
    if workload is None:
        workload = build_workload(scenario, costs)
    ranks = []
    for number in range(scenario.world_size if scenario.noise is not None else 1):
        program = record(scenario, workload, costs, marks=marks)
        if scenario.noise is not None:
            disturb(program, scenario.noise, number)
        hook = on_memory_event if number == 0 else None
        ranks.append(Rank(program, build_memory(scenario, program, hook)))
    try:
        run_ranks(ranks, partial(_membership, scenario, costs), _contention(scenario, costs))
    except OutOfMemoryError:
        pass  # memory.oom says where; what had not run by then never will
    except RequestTooLargeError as error:
        raise ScenarioError(scenario.source, [_too_large(scenario, ranks, error)]) from None
    shown = next((rank for rank in ranks if rank.memory.oom is not None), ranks[0])
    return Result(
        scenario=scenario,
        workload=workload,
        costs=costs,
        program=shown.program,
        memory=shown.memory,
        ranks=tuple(rank.program for rank in ranks),
        memories=tuple(rank.memory for rank in ranks),
    )


def _too_large(scenario: Scenario, ranks: Sequence[Rank], error: RequestTooLargeError) -> Problem:
    """What asked for more memory than torch can, and the keys that decide its size."""
    touched = (rank.memory.last_buffer for rank in ranks)
    buffer = max((b for b in touched if b is not None), key=lambda b: b.nbytes)
    what = f"{buffer.name} of {buffer.unit or 'the training loop'} in {buffer.phase}: {error}"
    training = scenario.training
    if scenario.model is None or buffer.category != "activations":
        return Problem("", what)
    tokens = f"{training.micro_batch_size} x {training.seq_len}"
    return Problem("training", f"with micro_batch_size x seq_len = {tokens}, {what}")


def _membership(scenario: Scenario, costs: Costs, op: Op, rank: int) -> tuple[Hashable, int]:
    """Which communicator ``op`` runs on, as seen from ``rank``, and how many ranks it has.

    Neighbours form shard groups; every F-th rank has the same shard and is in one replicate group.
    """
    group = op.collective.group
    size = costs.groups[group].ranks
    index = rank % scenario.shard_factor if group == "replicate" else rank // size
    return (op.communicator, index), size


def _contention(scenario: Scenario, costs: Costs) -> ContentionFactory | None:
    """With ``hardware.contention``, what makes ops that run at the same time slower."""
    hardware = scenario.device
    if not hardware.contention:
        return None
    links = {
        name: "network" if group.nodes > 1 else "nvlink" for name, group in costs.groups.items()
    }

    def taken_by(running: Sequence[str]) -> float:
        between = running.count("network")
        return hardware.taken_by_collectives(len(running) - between, between)

    return partial(
        SharedGpu,
        link_of=links,
        taken_by=taken_by,
        communication_slowdown=_slowdown_beside_kernels(hardware, costs),
    )


def _slowdown_beside_kernels(hardware: Hardware, costs: Costs) -> Callable[[Op], float]:
    """Tells how many times longer a collective takes while a kernel runs."""
    given, alone = hardware.communication_slowdown, hardware.stand_alone()
    if given is not None:
        return lambda op: given

    @cache
    def slowdown(info: Collective) -> float:
        group, element = costs.groups[info.group], DTYPE_BYTES[info.dtype]
        seconds = collective_seconds(info.kind, info.nbytes, group, alone, element)
        beside = collective_seconds(info.kind, info.nbytes, group, hardware, element)
        return beside / seconds if seconds else 1.0

    return lambda op: slowdown(op.collective)


def record(scenario: Scenario, workload: Workload, costs: Costs, *, marks: bool = True) -> Program:
    """The host program of one rank for all iterations; nothing runs yet.

    Raises :class:`ScenarioError` for what only a program shows.
    """
    with _blaming(scenario):
        _check_unit_names(scenario, workload)
        optimizer = build_optimizer(scenario)
        runtime = RUNTIMES[scenario.fsdp.runtime](scenario, workload, costs, optimizer)
        runtime.program.keeps_marks = marks
        if isinstance(runtime, TextbookRuntime):
            runtime.run()
        else:
            TrainingStep(runtime).run()
    program = runtime.program
    vars(runtime).clear()  # its parts point back at it: only the collector would free the program
    return program


def build_workload(scenario: Scenario, costs: Costs | None = None) -> Workload:
    """Units, parts and kernels of ``scenario``. Raises :class:`ScenarioError`."""
    with _blaming(scenario):
        if scenario.workload is not None:
            return given_workload(scenario.workload, scenario.training, scenario.device)
        try:
            workload = _model_workload(scenario)
        except FaultsError:
            raise
        except ValueError as error:
            raise FaultsError(Fault("", str(error))) from None
        _check_unit_names(scenario, workload)
    if scenario.training.granularity == "units":
        seconds = (costs or build_costs(scenario)).kernel
        return coarsen(workload, seconds, _gradient_bytes(scenario, workload))
    return workload


def _gradient_bytes(scenario: Scenario, workload: Workload) -> dict[tuple[str, str], int]:
    """Autograd writes gradients in the compute dtype."""
    return {
        (unit.name, param.name): nbytes(param.numel, scenario.param_dtype or param.dtype)
        for unit in workload.units
        for param in unit.params
    }


def _model_workload(scenario: Scenario) -> Workload:
    config, training = scenario.model, scenario.training
    assert config is not None
    wrapping = _wrapping(scenario, config)
    checkpointing = training.activation_checkpointing
    names = unit_names(config) if training.frozen else {}
    units = freeze(wrapping.units, training.frozen, names)
    return model_workload(
        config,
        replace(wrapping, units=units),
        micro_batch_size=training.micro_batch_size,
        seq_len=training.seq_len,
        dtype=scenario.param_dtype or training.dtype,
        activation_checkpointing=(
            checkpointing if isinstance(checkpointing, str) else checkpointing.model_dump()
        ),
        compile=training.compile,
        compile_loss=training.compile_loss,
        chunked_loss=training.chunked_loss,
        keep_logits=training.keep_logits,
        fused_norm=training.fused_norm,
        repeat_kv=training.repeat_kv,
        attention=training.attention,
        logged_cross_entropies=training.logged_cross_entropies,
    )


def _wrapping(scenario: Scenario, config: ModelConfig) -> Wrapping:
    """The units of a model. Raises ``FaultsError`` for units that it does not have."""
    fsdp, dtype = scenario.fsdp, scenario.training.dtype
    if isinstance(fsdp, (Ddp, Zero)):
        return form_units(config, "model", dtype=dtype)
    embedding, head = fsdp.wrap_embedding, fsdp.wrap_head
    try:
        wrapping = form_units(
            config, fsdp.unit, wrap_embedding=embedding, wrap_head=head, dtype=dtype
        )
    except ValueError as error:
        raise FaultsError(Fault("fsdp.unit", str(error))) from None
    return wrapping


def _check_unit_names(scenario: Scenario, workload: Workload) -> None:
    """Settings name only units that there are; a workload may have been built for others."""
    names = [unit.name for unit in workload.units]
    if isinstance(scenario.fsdp, Fsdp2) and (unknown := [*scenario.fsdp.unknown_units(names)]):
        raise FaultsError(*unknown)


@contextmanager
def _blaming(scenario: Scenario) -> Iterator[None]:
    """Faults become an error that names the scenario's file."""
    try:
        yield
    except FaultsError as error:
        problems = [Problem(fault.key, fault.text) for fault in error.faults]
        raise ScenarioError(scenario.source, problems) from None


def build_costs(scenario: Scenario) -> Costs:
    """The cost model: given durations where the scenario has them, else the hardware's."""
    hardware, factor = scenario.device, scenario.shard_factor
    if hardware.contention:  # which then slows collectives down instead of these factors
        hardware = hardware.stand_alone()
    groups = {
        "shard": shard_group(hardware, factor),
        "replicate": replicate_group(hardware, factor),
    }
    if isinstance(scenario.fsdp, Fsdp2):
        for n in _post_forward_factors(scenario.fsdp):
            nodes = max(1, n // hardware.gpus_per_node)
            groups[f"post_forward {n}"] = Group(ranks=n, nodes=nodes)
    if scenario.workload is None:
        return Costs(hardware, groups)
    return Costs(
        hardware,
        groups,
        given=given_seconds(scenario.workload),
        kernel_launch=scenario.workload.kernel_launch,
        free_copies=True,
    )


def _post_forward_factors(fsdp: Fsdp2) -> set[int]:
    values = [fsdp.reshard_after_forward]
    values += [override.reshard_after_forward for override in fsdp.overrides.values()]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool)}


def build_optimizer(scenario: Scenario) -> Optimizer:
    """The optimizer's kernels (given seconds for a [workload]) and its state."""
    training, workload = scenario.training, scenario.workload
    if workload is None:
        kernels = partial(_optimizer_step, training, training.clip_grad_norm)
    elif workload.optimizer is None and scenario.offloads:
        kernels = partial(_optimizer_step, training, False)
    else:
        kernels = partial(_given_optimizer, workload.optimizer or 0.0)
    size, states = _optimizer_state(training)
    return Optimizer(size, kernels, training.optimizer_fused, states)


def _optimizer_state(training: Training) -> tuple[int, int]:
    """Bytes of state per element, and how many tensors they are."""
    given = training.optimizer_state_bytes
    if training.optimizer == "none":
        return given or 0, 1
    size = optimizer_state_bytes(training.optimizer) if given is None else given
    states = max(1, optimizer_states(training.optimizer))
    return size, states if size % states == 0 else 1


def _given_optimizer(seconds: float, numels: tuple[int, ...]) -> tuple[Kernel, ...]:
    return (Kernel(name="optimizer", kind="unit", seconds=seconds),) if seconds else ()


def _optimizer_step(
    training: Training, clip_grad_norm: bool, numels: tuple[int, ...]
) -> tuple[Kernel, ...]:
    if training.optimizer == "none" or not sum(numels):
        return ()
    dtype = training.dtype
    clip = clip_kernels(numels, grad_dtype=dtype)
    step = optimizer_kernels(
        numels,
        training.optimizer,
        fused=training.optimizer_fused,
        param_dtype=dtype,
        grad_dtype=dtype,
    )
    return (*clip, *step) if clip_grad_norm else step


def build_memory(
    scenario: Scenario, program: Program, on_event: MemoryHook | None = None
) -> GpuMemory:
    """The device's memory as the allocator may use it: total less context and NCCL's buffers."""
    hardware = scenario.device
    total = hardware.memory if scenario.hardware is not None else UNLIMITED
    outside = hardware.memory_outside_allocator(len(program.communicators))
    return GpuMemory(
        scenario.allocator,
        capacity=max(total - outside, 0),
        total=total,
        cuda_malloc=0.0 if scenario.workload is not None else hardware.host.cuda_malloc,
        cuda_free=0.0 if scenario.workload is not None else hardware.host.cuda_free,
        on_event=on_event,
    )
