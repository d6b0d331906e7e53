"""The training step: walks the modules in call order and calls a runtime's hooks around them.

Any order works: a unit reused, skipped, or run in several forwards before one backward. Backward
follows autograd's rule ([Note: Backward order] in :mod:`fsdpsim.schedules.autograd`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from fsdpsim.memory import Buffer
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.workload import Param, Part, Unit


@dataclass(slots=True, eq=False)
class PartCall:
    """One run of a part in one forward, and the buffers that its backward needs."""

    part: Part
    unit: Unit
    call: int
    tensors: dict[str, Buffer] = field(default_factory=dict)
    region: Region | None = None
    """What its backward must recompute first; None without activation checkpointing."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of one unit's module: consecutive parts between its pre- and post-forward hook."""

    unit: Unit
    parts: list[PartCall]

    @property
    def checkpointed(self) -> bool:
        """Whether any part is recomputed in backward."""
        return any(call.part.recompute for call in self.parts)


@dataclass(slots=True, eq=False)
class Region:
    """Module calls that are recomputed together, by the first backward among them."""

    calls: list[ModuleCall]
    with_hooks: bool
    """Checkpointing wraps the units, so that their forward hooks run again."""


class TrainingStep:
    """Drives one runtime through iterations of forward, backward and optimizer."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.scenario = runtime.scenario
        self.training = runtime.training
        self.units = {unit.name: unit for unit in runtime.workload.units}
        self._parts = {part.name: part for part in runtime.workload.parts}
        self._order = runtime.workload.calls or tuple(self._parts)
        self._calls: dict[str, int] = {}

    def run(self) -> None:
        """Record all iterations."""
        self.program.phase = "initialization"
        self.runtime.initialize()
        for iteration in range(self.scenario.iterations):
            self.program.begin_iteration(iteration)
            self._calls.clear()
            self._iteration()

    def _iteration(self) -> None:
        program, runtime, training = self.program, self.runtime, self.training
        steps = training.gradient_accumulation_steps
        for index in range(steps):
            program.phase = "forward"
            runtime.begin_microbatch(last=index == steps - 1)
            if steps > 1:
                program.mark("microbatch_begin", index=index)
            runtime.begin_forwards()
            outputs = [self._forward() for _ in range(training.forwards_per_backward)]
            self._backward([node for node in outputs if node is not None])
        program.phase = "optimizer"
        program.mark("optimizer_step")
        runtime.optimizer_step()
        program.mark("zero_grad")
        runtime.zero_grad()
        runtime.end_step()

    # ---- forward

    def _forward(self) -> Node | None:
        runtime, root = self.runtime, self.runtime.root
        x = runtime.pre_forward(root, None)
        for calls in self._grouped_calls():
            if self.training.checkpoint_reentrant and any(c.checkpointed for c in calls):
                x = self._checkpointed(calls, x)
            else:
                self._assign_regions(calls)
                for call in calls:
                    x = self._module(call, x)
        runtime.post_forward(root, x)
        return x

    def _grouped_calls(self) -> Iterator[list[ModuleCall]]:
        """The module calls of one forward; those of one named checkpoint region together."""
        for _, group in groupby(enumerate(self._module_calls()), key=_region_key):
            yield [call for _, call in group]

    def _module_calls(self) -> Iterator[ModuleCall]:
        """Consecutive parts of one unit form one call of its module, unless a part comes again."""
        call: ModuleCall | None = None
        for part in (self._parts[name] for name in self._order):
            unit = self.units[part.unit]
            if call is None or call.unit is not unit or part in [c.part for c in call.parts]:
                if call is not None:
                    yield call
                call = ModuleCall(unit, [])
            number = self._calls.get(part.name, 0)
            self._calls[part.name] = number + 1
            call.parts.append(PartCall(part, unit, number))
        if call is not None:
            yield call

    def _assign_regions(self, calls: list[ModuleCall]) -> None:
        outside = self.training.checkpoint_placement == "outside"
        for call in calls:
            for part in call.parts:
                if not part.part.recompute:
                    continue
                if (outside and not call.unit.is_root) or part.part.region:
                    part.region = Region(calls, with_hooks=outside)
                else:
                    part.region = Region([ModuleCall(call.unit, [part])], with_hooks=False)

    def _module(self, call: ModuleCall, x: Node | None) -> Node | None:
        """One module call with its hooks; parts of the root lie between the root's own hooks."""
        if not call.unit.is_root:
            x = self.runtime.pre_forward(call.unit, x)
        for part in call.parts:
            x = self._compute(part, x)
        if not call.unit.is_root:
            self.runtime.post_forward(call.unit, x)
        return x

    def _compute(self, call: PartCall, x: Node | None) -> Node | None:
        runtime = self.runtime
        self._forward_kernels(call, recompute=False)
        if not runtime.grad_enabled or (x is None and not _trained(call)):
            return None
        inputs = (x, *runtime.parameter_nodes(call.unit))
        return runtime.autograd.node(partial(self._compute_backward, call), inputs)

    def _forward_kernels(self, call: PartCall, *, recompute: bool) -> None:
        with self.program.for_unit(call.unit.name):
            fields = _part_field(call) | {"recompute": True} if recompute else _fields(call)
            self.program.mark("forward_begin", **fields)
            kernels = call.part.recompute if recompute else call.part.forward
            kind = "recompute" if recompute else "forward"
            self.runtime.run_kernels(kernels, kind, call.unit, call.tensors)
            self.program.mark("forward_end", **fields)

    # ---- backward

    def _backward(self, outputs: Sequence[Node]) -> None:
        runtime = self.runtime
        self.program.mark("backward_call", "")
        self.program.phase = "backward"
        runtime.in_backward = True
        runtime.autograd.backward(*outputs)
        runtime.final_callback()
        runtime.in_backward = False

    def _compute_backward(self, call: PartCall) -> None:
        with self.program.for_unit(call.unit.name):
            self.program.mark("backward_begin", **_fields(call))
            if call.region is not None:
                self._recompute(call.region)
            self._gradients_of_no_kernel(call)
            self.runtime.run_kernels(call.part.backward, "backward", call.unit, call.tensors)
            self.program.mark("backward_end", **_fields(call))
            self.runtime.after_backward_kernels(call.unit, _trained(call))

    def _gradients_of_no_kernel(self, call: PartCall) -> None:
        named = {name for kernel in call.part.backward for name in kernel.gradients}
        for param in _trained(call):
            if param.name not in named:
                self.runtime.allocate_gradient(call.unit, param)

    # ---- activation checkpointing

    def _recompute(self, region: Region) -> None:
        """[Note: Recompute] Runs the region's forward again, before its first backward.

        With checkpointing outside FSDP the units' own hooks run again too. The recompute stops at
        the last tensor that backward needs, so the last module's post-forward hook does not run.
        Its autograd graph is not the one that backward follows: its hooks never fire.
        """
        for call in region.calls:
            if region.with_hooks:
                self.runtime.pre_forward(call.unit, self._detached())
            for part in call.parts:
                part.region = None
                self._forward_kernels(part, recompute=True)
            if region.with_hooks and call is not region.calls[-1]:
                self.runtime.post_forward(call.unit, self._detached())

    def _checkpointed(self, calls: list[ModuleCall], x: Node | None) -> Node:
        """[Note: Reentrant checkpoint] Forward runs without autograd and does not arm any hooks.

        Backward runs the calls again with autograd, hooks included, and then their own backward.
        """
        runtime = self.runtime
        runtime.grad_enabled = False
        for call in calls:
            self._module(call, None)
        runtime.grad_enabled = True
        return runtime.autograd.node(lambda: self._reentrant_backward(calls), (x,))

    def _reentrant_backward(self, calls: list[ModuleCall]) -> None:
        x: Node = self._detached()
        for call in calls:
            x = self._recomputed_module(call, x)
        self.runtime.autograd.backward(x)

    def _recomputed_module(self, call: ModuleCall, x: Node) -> Node:
        runtime = self.runtime
        x = runtime.pre_forward(call.unit, x) or x
        for part in call.parts:
            self._forward_kernels(part, recompute=True)
            inputs = (x, *runtime.parameter_nodes(call.unit))
            x = runtime.autograd.node(partial(self._compute_backward, part), inputs)
        runtime.post_forward(call.unit, x)
        return x

    def _detached(self) -> Node:
        """A leaf that requires a gradient and belongs to no graph that backward follows."""
        return self.runtime.autograd.accumulate_grad(lambda: None)


def _trained(call: PartCall) -> tuple[Param, ...]:
    """The parameters whose gradients this part's backward produces."""
    names = call.part.params
    return tuple(
        p for p in call.unit.params if p.requires_grad and (names is None or p.name in names)
    )


def _part_field(call: PartCall) -> dict[str, Any]:
    return {"part": call.part.name} if call.part.name != call.unit.name else {}


def _fields(call: PartCall) -> dict[str, Any]:
    return _part_field(call) | ({"call": call.call} if call.call else {})


def _region_key(numbered: tuple[int, ModuleCall]) -> str | int:
    index, call = numbered
    return call.parts[0].part.region or index
