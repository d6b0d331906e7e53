"""From a scenario to a result: workload, costs, schedule, engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdpsim import engine
from fsdpsim.allocator import OutOfMemoryError
from fsdpsim.collectives import Group, replicate_group, shard_group
from fsdpsim.costs import Costs
from fsdpsim.engine import Op
from fsdpsim.given import given_seconds, given_workload
from fsdpsim.memory import GpuMemory
from fsdpsim.program import Program
from fsdpsim.result import Result
from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.scenario.runtimes import Fsdp2
from fsdpsim.schedules.ddp import DdpRuntime
from fsdpsim.schedules.driver import TrainingStep
from fsdpsim.schedules.fsdp1 import Fsdp1Runtime
from fsdpsim.schedules.fsdp2 import Fsdp2Runtime
from fsdpsim.schedules.runtime import OptimizerKernels, Runtime
from fsdpsim.schedules.textbook import TextbookRuntime
from fsdpsim.workload import Kernel, Workload

RUNTIMES: dict[str, type[Runtime]] = {
    "ddp": DdpRuntime,
    "fsdp1": Fsdp1Runtime,
    "fsdp2": Fsdp2Runtime,
    "textbook": TextbookRuntime,
}

#: Bytes of a device that no [hardware] table describes: more than any scenario asks for.
UNLIMITED = 1 << 62

MemoryEvent = Callable[[str, int, int, object], None]


def simulate(scenario: Scenario, *, on_memory_event: MemoryEvent | None = None) -> Result:
    """Simulate ``scenario`` on one rank that stands for all.

    A predicted out-of-memory is a result, not an error. ``on_memory_event`` is called as
    (action, address, size, stream) for each event of a torch memory snapshot.
    """
    workload = build_workload(scenario)
    costs = build_costs(scenario, workload)
    program = record(scenario, workload, costs)
    memory = build_memory(scenario, program, on_memory_event)
    try:
        engine.run(program.steps, memory)
    except OutOfMemoryError:
        pass  # memory.oom says where; what had not run by then never will
    return Result(scenario=scenario, workload=workload, costs=costs, program=program, memory=memory)


def record(scenario: Scenario, workload: Workload, costs: Costs) -> Program:
    """The host program of one rank for all iterations; nothing runs yet."""
    runtime = RUNTIMES[scenario.fsdp.runtime](
        scenario, workload, costs, _optimizer_kernels(scenario)
    )
    if isinstance(runtime, TextbookRuntime):
        runtime.run()
    else:
        TrainingStep(runtime).run()
    return runtime.program


def build_workload(scenario: Scenario) -> Workload:
    """Units, parts and kernels of ``scenario``. Raises :class:`ScenarioError`."""
    try:
        return _build_workload(scenario)
    except ValueError as error:
        raise ScenarioError(scenario.source, [Problem("", str(error))]) from None


def _build_workload(scenario: Scenario) -> Workload:
    if scenario.workload is not None:
        return given_workload(scenario.workload, scenario.training, scenario.device)
    raise NotImplementedError


def build_costs(scenario: Scenario, workload: Workload) -> Costs:
    """The cost model: given durations where the scenario has them, else the hardware's."""
    hardware, factor = scenario.device, scenario.shard_factor
    groups = {
        "shard": shard_group(hardware, factor),
        "replicate": replicate_group(hardware, factor),
    }
    if isinstance(scenario.fsdp, Fsdp2):
        for n in _post_forward_factors(scenario.fsdp):
            groups[f"post_forward {n}"] = Group(ranks=n, nodes=max(1, n // hardware.gpus_per_node))
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


def _optimizer_kernels(scenario: Scenario) -> OptimizerKernels:
    if scenario.workload is not None:
        return partial(_given_optimizer, scenario.workload.optimizer)
    raise NotImplementedError


def _given_optimizer(seconds: float, numel: int, tensors: int) -> tuple[Kernel, ...]:
    return (Kernel(name="optimizer", kind="unit", seconds=seconds),) if seconds else ()


def build_memory(
    scenario: Scenario, program: Program, on_event: MemoryEvent | None = None
) -> GpuMemory:
    """The device's memory as the allocator may use it: total less context and NCCL's buffers."""
    hardware = scenario.device
    communicators = {s.communicator for s in program.steps if type(s) is Op and s.communicator}
    total = hardware.memory if scenario.hardware is not None else UNLIMITED
    outside = hardware.memory_outside_allocator(len(communicators))
    return GpuMemory(
        scenario.allocator,
        capacity=max(total - outside, 0),
        total=total,
        cuda_malloc=0.0 if scenario.workload is not None else hardware.host.cuda_malloc,
        cuda_free=0.0 if scenario.workload is not None else hardware.host.cuda_free,
        on_event=on_event,
    )
