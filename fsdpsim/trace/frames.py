"""The annotations of the CPU thread: iterations, phases, modules, FSDP's hooks and their stages.

A program has marks where a hook begins and none where it ends: a hook's frame ends at the next mark
that is not one of its own, or at the next kernel of the model. Frames are a stack, so they nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpsim.engine import HostWait, Op, Step
from fsdpsim.memory import Free, Malloc
from fsdpsim.program import IterationStart, Mark
from fsdpsim.result import Result
from fsdpsim.trace.labels import LABELS, OPTIMIZERS
from fsdpsim.trace.lanes import Event, Lanes

#: Marks inside a hook.
IN_HOOK = ("wait_unshard", "reshard", "reshard_noop", "limiter_wait")
#: Kernels of the model: they are not launched by a hook.
MODEL_KINDS = ("forward", "backward", "recompute", "optimizer")
#: Autograd's own copy between the last kernel of a backward and FSDP1's hook.
AUTOGRAD_COPIES = ("concatenate_gradients",)
#: Buffers and copies of an unshard, up to and with the all-gather.
UNSHARD_BUFFERS = ("cast_shard", "all_gather_output", "mp_shard", "full_param")
UNSHARD_COPIES = ("cast_shard", "all_gather_copy_in")


@dataclass(slots=True)
class Frame:
    """An open annotation: its event gets a duration when it closes."""

    kind: str
    event: Event
    start: int


class Frames:
    """Opens and closes annotations around the steps of a program. Times are nanoseconds."""

    def __init__(self, result: Result, lanes: Lanes, emit: Callable[[Event], object]) -> None:
        scenario = result.scenario
        self.labels = LABELS[scenario.fsdp.runtime]
        self._lanes = lanes
        self._emit = emit
        self._stack: list[Frame] = []
        self._phase = ""
        self._hook, self._hook_unit, self._reduced = "", "", False
        self._gathers = unshards(result.program.steps)
        self._root = next(unit.name for unit in result.workload.units if unit.is_root)
        self._with_params = {unit.name for unit in result.workload.units if unit.params}
        optimizer = OPTIMIZERS.get(scenario.training.optimizer)
        self._phases = {"forward": self.labels.forward}
        if optimizer is not None:
            self._phases["optimizer"] = f"Optimizer.step#{optimizer}.step"

    # ---- the stack

    def _open(self, kind: str, name: str, now: int, **args: Any) -> None:
        event = self._lanes.on_host("user_annotation", name, now, now, args)
        self._emit(event)
        self._stack.append(Frame(kind, event, now))

    def _pop(self, now: int) -> Frame:
        frame = self._stack.pop()
        frame.event["dur"] = (now - frame.start) / 1000
        return frame

    def _close(self, kind: str, now: int) -> None:
        """Close the innermost frame of ``kind`` and what is still open inside it."""
        if any(frame.kind == kind for frame in self._stack):
            while self._pop(now).kind != kind:
                pass

    def close_all(self, now: int) -> None:
        """Close every frame."""
        while self._stack:
            self._pop(now)

    # ---- steps

    def before(self, index: int, step: Step, now: int) -> None:
        """Open and close what ``step``, the program's ``index``-th, begins or ends."""
        if isinstance(step, IterationStart):
            self.close_all(now)
            self._phase = self._hook = ""
            self._open("iteration", f"ProfilerStep#{step.iteration}", now)
            return
        self._enter_phase(step, now)
        if index in self._gathers:
            self._open_unshard(self._gathers[index], now)
        if isinstance(step, Malloc):
            self._malloc(step, now)
        elif isinstance(step, Free):
            self._free(step, now)
        elif isinstance(step, Op):
            self._op(step, now)
        elif isinstance(step, Mark):
            self._mark(step, now)

    def after(self, step: Step, now: int) -> None:
        """Close what ``step`` was the last of."""
        if isinstance(step, Op):
            if step.kind == "all_gather":
                self._close("unshard", now)
            elif step.name == "all_gather_copy_out":
                self._close("copy_out", now)

    def _enter_phase(self, step: Step, now: int) -> None:
        if isinstance(step, (Op, Mark)):
            phase = step.phase
        elif isinstance(step, Malloc):
            phase = step.buffer.phase
        else:
            return
        if phase != self._phase:
            self._close_hook(now)
            self._close("phase", now)
            self._phase = phase
            self._open("phase", self._phases.get(phase, phase), now)

    # ---- marks

    def _mark(self, mark: Mark, now: int) -> None:
        event = mark.event
        if event in IN_HOOK:
            if event.startswith("reshard"):
                self._stage("reshard", now)
            return
        self._close_hook(now)
        if event in ("forward_begin", "backward_begin"):
            name = "recompute" if mark.fields.get("recompute") else event.removesuffix("_begin")
            part = mark.fields.get("part", mark.unit)
            self._open("module", f"{name} ({part})", now, unit=mark.unit)
        elif event in ("forward_end", "backward_end"):
            self._close("module", now)
        elif event == "backward_final_begin" and self.labels.final_callback:
            self._open("final", self.labels.final_callback, now)
        elif event == "backward_final_end":
            self._close("final", now)
        elif event in self.labels.hooks:
            self._open_hook(mark, now)

    def _open_hook(self, mark: Mark, now: int) -> None:
        labels, unit = self.labels, mark.unit
        if unit == self._root and mark.event == "pre_forward" and labels.root_pre_forward:
            self._open("root", labels.root_pre_forward, now)
            self._close("root", now)
        if labels.units_only and unit not in self._with_params:
            return
        self._hook, self._hook_unit, self._reduced = mark.event, unit, False
        self._open("hook", self._label(labels.hooks[mark.event], unit), now, unit=unit)

    def _close_hook(self, now: int) -> None:
        if self._hook:
            self._hook = ""
            self._close("hook", now)

    def _label(self, label: str, unit: str) -> str:
        return self.labels.of_unit(label, "" if unit == self._root else unit)

    # ---- stages of a hook

    def _stage(self, stage: str, now: int) -> None:
        """``post_backward`` goes on under another label."""
        label = self.labels.stages.get(stage)
        if label is not None and self._hook == "post_backward":
            self._close("hook", now)
            unit = self._hook_unit
            self._open("hook", self._label(label, unit), now, unit=unit)

    def _open_unshard(self, gather: Op, now: int) -> None:
        labels, unit = self.labels, gather.unit
        prefetch = labels.prefetch.get(self._hook)
        if gather.collective.trigger == "prefetch" and prefetch is not None:
            self._open("unshard", self._label(prefetch, unit), now, unit=unit)
            if labels.all_gather is not None:
                self._open("gather", self._label(labels.all_gather, unit), now, unit=unit)
        elif labels.all_gather is not None:
            self._open("unshard", self._label(labels.all_gather, unit), now, unit=unit)

    def _op(self, op: Op, now: int) -> None:
        if op.kind in MODEL_KINDS or op.name in AUTOGRAD_COPIES:
            self._close_hook(now)

    def _malloc(self, step: Malloc, now: int) -> None:
        buffer = step.buffer
        if buffer.name == "reduce_scatter_input":
            self._stage("reduce", now)
            self._reduced = True
        elif (
            self.labels.copy_out is not None
            and buffer.unsharded is not None
            and buffer.name != "all_gather_output"
            and self._stack[-1].kind != "copy_out"
        ):
            label = self._label(self.labels.copy_out, buffer.unit)
            self._open("copy_out", label, now, unit=buffer.unit)

    def _free(self, step: Free, now: int) -> None:
        # After this unit's own reduction, it is the final callback that drops the last input.
        if step.buffer.name == "reduce_scatter_input" and not self._reduced:
            self._stage("rs_wait", now)


def unshards(steps: Sequence[Step]) -> dict[int, Op]:
    """Where each unshard that gathers begins: index of its first step -> its all-gather."""
    found: dict[int, Op] = {}
    for index, op in enumerate(steps):
        if type(op) is Op and op.kind == "all_gather":
            first = index
            while first > 0 and _prepares(steps[first - 1], op.unit):
                first -= 1
            found[first] = op
    return found


def _prepares(step: Step, unit: str) -> bool:
    """Whether ``step`` is part of an unshard of ``unit``, before its all-gather."""
    if isinstance(step, Malloc):
        return step.buffer.unit == unit and step.buffer.name in UNSHARD_BUFFERS
    if isinstance(step, Free):
        return step.buffer.unit == unit and step.buffer.name == "cast_shard"
    if isinstance(step, Op):
        return step.unit == unit and step.name in UNSHARD_COPIES
    if isinstance(step, Mark):
        return step.unit == unit and step.event == "limiter_wait"
    return isinstance(step, HostWait) and step.unit == unit and step.cause == "rate_limiter"
