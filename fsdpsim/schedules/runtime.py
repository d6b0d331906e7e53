"""What a training step asks of a runtime, and what every runtime needs to record its program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fsdpsim.costs import Costs
from fsdpsim.engine import Op
from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Collective, Program
from fsdpsim.scenario import Scenario
from fsdpsim.schedules.autograd import Autograd, Node
from fsdpsim.schedules.offload import Offload
from fsdpsim.schedules.storages import Storage, Storages
from fsdpsim.workload import Kernel, Param, Unit, Workload, nbytes

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What the optimizer keeps and launches."""

    state_bytes: int
    """Bytes of state per local element."""
    kernels: Callable[[tuple[int, ...]], tuple[Kernel, ...]]
    """Elements of the local tensors -> the kernels of one step."""
    fused: bool
    """Whether one kernel does all."""
    states: int = 1
    """Tensors of state per local tensor, which share these bytes equally."""


def _offload(scenario: Scenario, program: Program, costs: Costs) -> Offload | None:
    pin_memory = getattr(scenario.fsdp, "pin_memory", True)
    return Offload(program, costs, pin_memory=pin_memory) if scenario.offloads else None


class Runtime:
    """Hooks around modules, named as torch names them. This base does nothing but record."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        costs: Costs,
        optimizer: Optimizer,
    ) -> None:
        self.program = Program()
        self.scenario = scenario
        self.training = scenario.training
        self.workload = workload
        self.costs = costs
        self.optimizer = optimizer
        self.shard_factor = scenario.shard_factor
        self.replicas = scenario.replicas
        self.autograd = Autograd()
        self.grad_enabled = True
        self.in_backward = False
        self.has_optimizer_state = False
        self.offload = _offload(scenario, self.program, costs)
        self.root = next(unit for unit in workload.units if unit.is_root)
        self.storages = Storages(workload, lumped=scenario.training.granularity == "units")

    # ---- hooks, overridden by each runtime

    def initialize(self) -> None:
        """Allocate what lives from the start: sharded parameters."""

    def begin_microbatch(self, *, last: bool) -> None:
        """The training loop starts a micro-batch; ``last``: the optimizer follows it."""

    def begin_forwards(self) -> None:
        """Just before the forwards of a micro-batch."""

    def pre_forward(self, unit: Unit, x: Node | None) -> Node | None:
        """Before a unit's forward; returns the input as the module sees it."""
        return x

    def post_forward(self, unit: Unit, output: Node | None) -> None:
        """After a unit's forward."""

    def parameter_nodes(self, unit: Unit, params: tuple[Param, ...]) -> tuple[Node, ...]:
        """Autograd nodes behind the trained ``params`` that a part is about to compute with."""
        return ()

    def allocate_gradients(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """A backward kernel is about to write these gradients."""

    def gradients_written(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """The kernel that writes these gradients is launched."""

    def final_callback(self) -> None:
        """At the end of a backward, after all its nodes."""

    def local_numel(self, unit: Unit) -> int:
        """Trained elements of ``unit`` that this rank's optimizer updates."""
        return sum(p.numel for p in unit.params if p.requires_grad)

    def local_numels(self, unit: Unit) -> tuple[int, ...]:
        """Those elements by tensor of the optimizer; here one flat tensor has them all."""
        return (self.local_numel(unit),)

    def zero_grad(self) -> None:
        """Drop the gradients that the optimizer has used (``set_to_none=True``)."""

    # ---- the optimizer and the end of a step

    def optimizer_step(self) -> None:
        """Update the local parameters, on the CPUs if they live in host memory."""
        self.create_optimizer_state()
        kernels = self.optimizer_kernels
        if self.offload is None:
            self.run_kernels(kernels, "optimizer", self.root, {})
        else:
            seconds = self.costs.on_cpu(kernels, fused=self.optimizer.fused)
            self.offload.run_and_wait("optimizer_step", seconds)

    @cached_property
    def optimizer_kernels(self) -> tuple[Kernel, ...]:
        """The kernels of one step over all that this rank updates."""
        units = [unit for unit in self.workload.units if unit.requires_grad]
        return self.optimizer.kernels(tuple(n for unit in units for n in self.local_numels(unit)))

    def create_optimizer_state(self) -> None:
        """The optimizer's state appears at the first step."""
        if not self.has_optimizer_state:
            self.has_optimizer_state = True
            for unit in self.workload.units:
                if unit.requires_grad:
                    self.allocate_optimizer_state(unit)

    def allocate_optimizer_state(self, unit: Unit) -> None:
        """Two moments of each local tensor for Adam; nothing for plain SGD."""
        state, count = self.optimizer.state_bytes, self.optimizer.states
        if self.offload is not None:
            self.offload.keep("optimizer_state", self.local_numel(unit) * state)
        elif state:
            with self.program.for_unit(unit.name):
                numels = self.local_numels(unit)
                for numel in (sum(numels),) if self.storages.lumped else numels:
                    for _ in range(count):
                        size = numel * state // count
                        self.program.malloc("optimizer_state", size, "optimizer_state")

    def end_step(self) -> None:
        """The end of an optimizer step as the host sees it."""
        if self.training.read_loss:
            self.program.synchronize(self.program.record_event(COMPUTE), cause="read_loss")
        self._sum_logged_metrics()

    def _sum_logged_metrics(self) -> None:
        """Logged metrics are summed over the ranks: the host launches for each rank and state.

        Source: ``_simple_gather_all_tensors`` of torchmetrics, which fills a tensor with zeros for
        every rank and gathers into the list of them, so that ``ProcessGroupNCCL::allgather`` copies
        to each on NCCL's stream; the allocator then records and queries an event for each. A
        cross-entropy has two states, its sum and its count.
        """
        host = self.costs.hardware.host
        each = 2 * self.costs.launch_seconds + host.event_record + host.event_query
        tensors = 2 * self.training.logged_cross_entropies * self.scenario.world_size
        self.program.host_work(tensors * each, "logged_metrics")

    # ---- recording

    def run_kernels(
        self, kernels: Iterable[Kernel], kind: str, unit: Unit, tensors: dict[str, Buffer]
    ) -> None:
        """Launch ``kernels`` on the current stream with their buffers and gradients."""
        program, costs = self.program, self.costs
        for kernel in kernels:
            for tensor in kernel.allocates:
                tensors[tensor.name] = program.malloc(tensor.name, tensor.nbytes, tensor.category)
            if kernel.gradients:
                storages = self.storages.of_gradients(unit, kernel.gradients)
                self.allocate_gradients(unit, storages)
            program.launch(
                kernel.name,
                costs.kernel(kernel),
                kind=kind,
                launch_seconds=costs.launch_seconds * kernel.launches,
            )
            for name in kernel.frees:
                program.free(tensors.pop(name))
            if kernel.gradients:
                self.gradients_written(unit, storages)

    def add_gradient(self, grads: dict[K, Buffer], key: K, new: Buffer) -> None:
        """Keep ``new`` among ``grads``, or add it to the gradient that is there."""
        if key in grads:
            self.copy("accumulate_gradient", new.nbytes + 2 * grads[key].nbytes)
            self.program.free(new)
        else:
            grads[key] = new

    def copy(self, name: str, nbytes: int, *, cast: bool = False) -> Op:
        """Launch a copy, cast, division or sum that reads and writes ``nbytes`` in all."""
        seconds = self.costs.copy(nbytes, cast=cast)
        launch = self.costs.launch_seconds
        return self.program.launch(name, seconds, kind="copy", launch_seconds=launch)

    def collective(
        self,
        kind: str,
        numel: int,
        dtype: str,
        *,
        group: str,
        communicator: str,
        group_size: int,
        trigger: str | None = None,
        by: str | None = None,
    ) -> Op:
        """Launch a collective of ``numel`` elements in all on the current stream."""
        program = self.program
        size = nbytes(numel, dtype)
        info = Collective(
            kind=kind,
            nbytes=size,
            shard_nbytes=None if kind == "all_reduce" else size // group_size,
            dtype=dtype,
            group=group,
            group_size=group_size,
            trigger=trigger,
            by=by,
        )
        return program.launch(
            kind,
            self.costs.collective(kind, size, dtype, group, program.unit),
            kind=kind,
            launch_seconds=self.costs.launch_seconds,
            communicator=communicator,
            collective=info,
        )

    def hook(self, name: str, unit: Unit) -> None:
        """The CPU's own time in one of FSDP's hooks."""
        self.program.host_work(self.costs.hook(len(unit.params)), name)
