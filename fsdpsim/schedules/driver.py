"""The training step: walks the modules in call order and calls a runtime's hooks around them.

Any order works: a unit reused, skipped, or run in several forwards before one backward. Backward
follows autograd's rule ([Note: Backward order] in :mod:`fsdpsim.schedules.autograd`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.modules import (
    CallTree,
    Item,
    ModuleCall,
    PartCall,
    Region,
    assign_regions,
    grouped,
    is_checkpointed,
    parts_of,
)
from fsdpsim.schedules.runtime import Runtime


class TrainingStep:
    """Drives one runtime through iterations of forward, backward and optimizer."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.scenario = runtime.scenario
        self.training = runtime.training
        self.calls = CallTree(runtime.workload)
        self.outside = self.training.checkpoint_placement == "outside"
        self.reentrant = self.training.checkpoint_reentrant

    def run(self) -> None:
        """Record all iterations."""
        self.program.phase = "initialization"
        self.runtime.initialize()
        for iteration in range(self.scenario.iterations):
            self.program.begin_iteration(iteration)
            self.calls.begin_iteration()
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
        root, after = self.calls.forward()
        if self.calls.recomputes and not self.reentrant:
            assign_regions([root], outside=self.outside)
        x = self._module(root, None)
        for call in after:
            x = self._compute(call, x)
        return x

    def _module(self, call: ModuleCall, x: Node | None) -> Node | None:
        """One module call with its hooks."""
        x = self.runtime.pre_forward(call.unit, x)
        for items in self._grouped(call):
            if self._is_reentrant(items):
                x = self._checkpointed(items, x)
            else:
                for item in items:
                    x = self._run(item, x)
        self.runtime.post_forward(call.unit, x)
        return x

    def _grouped(self, call: ModuleCall) -> Iterable[Sequence[Item]]:
        """What is called inside ``call``: each checkpointed region in one piece."""
        return grouped(call.children) if self.calls.recomputes else (call.children,)

    def _run(self, item: Item, x: Node | None) -> Node | None:
        return self._compute(item, x) if isinstance(item, PartCall) else self._module(item, x)

    def _compute(self, call: PartCall, x: Node | None) -> Node | None:
        runtime = self.runtime
        self._forward_kernels(call, recompute=False)
        if not runtime.grad_enabled or (x is None and not call.trained):
            return None
        inputs = (x, *runtime.parameter_nodes(call.unit, call.trained))
        return runtime.autograd.node(partial(self._compute_backward, call), inputs)

    def _forward_kernels(self, call: PartCall, *, recompute: bool) -> None:
        with self.program.for_unit(call.label):
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
        with self.program.for_unit(call.label):
            self.program.mark("backward_begin", **_fields(call))
            if call.region is not None:
                self._recompute(call.region)
            unnamed = self.runtime.storages.of_gradients(call.unit, call.unnamed)
            if unnamed:
                self.runtime.allocate_gradients(call.unit, unnamed)
            self.runtime.run_kernels(call.part.backward, "backward", call.unit, call.tensors)
            if unnamed:
                self.runtime.gradients_written(call.unit, unnamed)
            self.program.mark("backward_end", **_fields(call))

    # ---- activation checkpointing

    def _recompute(self, region: Region) -> None:
        """[Note: Recompute] Runs the region's forward again, before its first backward.

        With checkpointing outside FSDP the units' own hooks run again too. The recompute stops at
        the last tensor that backward needs, so the last module's post-forward hook does not run.
        Its autograd graph is not the one that backward follows: its hooks never fire.
        """
        for call in parts_of(region.items):
            call.region = None
        for item in region.items:
            self._run_again(item, region.with_hooks, stops_in_it=item is region.items[-1])

    def _run_again(self, item: Item, with_hooks: bool, *, stops_in_it: bool) -> None:
        if isinstance(item, PartCall):
            if item.part.recompute:
                self._forward_kernels(item, recompute=True)
            return
        if with_hooks:
            self.runtime.pre_forward(item.unit, self._detached())
        for child in item.children:
            stops = stops_in_it and child is item.children[-1]
            self._run_again(child, with_hooks, stops_in_it=stops)
        if with_hooks and not stops_in_it:
            self.runtime.post_forward(item.unit, self._detached())

    def _is_reentrant(self, items: Sequence[Item]) -> bool:
        """Reentrant checkpoints cover parts, and outside FSDP whole module calls."""
        if not self.reentrant or not self.runtime.grad_enabled or self.runtime.in_backward:
            return False
        covers = self.outside or all(isinstance(item, PartCall) for item in items)
        return covers and is_checkpointed(items)

    def _checkpointed(self, items: Sequence[Item], x: Node | None) -> Node:
        """[Note: Reentrant checkpoint] Forward runs without autograd and does not arm any hooks.

        Backward runs it again with autograd, hooks included, and then its own backward.
        """
        runtime = self.runtime
        runtime.grad_enabled = False
        for item in items:
            self._run(item, None)
        runtime.grad_enabled = True
        return runtime.autograd.node(partial(self._reentrant_backward, items), (x,))

    def _reentrant_backward(self, items: Sequence[Item]) -> None:
        x = self._detached()
        for item in items:
            x = self._run_with_autograd(item, x)
        self.runtime.autograd.backward(x)

    def _run_with_autograd(self, item: Item, x: Node) -> Node:
        runtime = self.runtime
        if isinstance(item, PartCall):
            if item.part.recompute:
                self._forward_kernels(item, recompute=True)
            inputs = (x, *runtime.parameter_nodes(item.unit, item.trained))
            return runtime.autograd.node(partial(self._compute_backward, item), inputs)
        x = runtime.pre_forward(item.unit, x) or x
        for child in item.children:
            x = self._run_with_autograd(child, x)
        runtime.post_forward(item.unit, x)
        return x

    def _detached(self) -> Node:
        """A leaf that requires a gradient and belongs to no graph that backward follows."""
        return self.runtime.autograd.accumulate_grad(lambda: None)


def _part_field(call: PartCall) -> dict[str, Any]:
    return {"part": call.part.name} if call.part.name != call.unit.name else {}


def _fields(call: PartCall) -> dict[str, Any]:
    return _part_field(call) | ({"call": call.number} if call.number else {})
