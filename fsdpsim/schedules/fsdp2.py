"""FSDP2 (``fully_shard``) as torch 2.13 runs it.

Reads beside ``torch/distributed/fsdp/_fully_shard``: methods carry the names of ``FSDPState`` and
``FSDPParamGroup``. Streams: ``compute`` (torch's default stream), ``all_gather_copy_in``,
``all_gather``, ``reduce_scatter`` and, for HSDP, ``all_reduce``. Communicator ``shard`` carries
all-gathers and reduce-scatters unless a separate reduce-scatter group is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import Fsdp2, UnitOverride
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.param_group import (
    AllGather,
    AllGatherResult,
    Gradients,
    ParamGroup,
    ReduceScatterState,
)
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.schedules.storages import Storage
from fsdpsim.workload import Param, Unit, nbytes

ALL_GATHER_STREAMS = ("all_gather_copy_in", "all_gather")


class Fsdp2Runtime(Runtime):
    """The hooks of FSDP2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.scenario.fsdp, Fsdp2)
        self.settings = self.scenario.fsdp
        self.overrides = {u.name: self._override(u) for u in self.workload.units}
        self.groups = {u.name: self._group(u) for u in self.workload.units if u.params}
        self.forward_prefetch, self.backward_prefetch = self._prefetch_lists()
        self.all_gather = AllGather(self)
        separate = self.settings.separate_reduce_scatter_group
        self.gradients = Gradients(self, separate_group=separate)
        self.training_states = {u.name: "idle" for u in self.workload.units}
        self.post_forward_order: list[ParamGroup] = []
        self.all_gather_state: AllGatherResult | None = None
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.last_post_reduce_events: dict[str, Event] = {}
        self.iter_forward_root: Unit | None = None
        self.final_callback_queued: Unit | None = None
        self.reduce_grads = self.all_reduce_grads = True
        self.reshard_after_backward = self.is_last_backward = True

    def _override(self, unit: Unit) -> UnitOverride:
        """The setters for ``unit``; of several matching names the last one counts."""
        matching = (
            o for name, o in self.settings.overrides.items() if fnmatchcase(unit.name, name)
        )
        return [UnitOverride(), *matching][-1]

    def _group(self, unit: Unit) -> ParamGroup:
        orig = unit.params[0].dtype
        param_dtype = self.scenario.param_dtype or orig
        quantised = self.settings.all_gather_dtype if self.shard_factor > 1 else None
        return ParamGroup(
            unit,
            self.storages.of(unit, unit.params),
            self.shard_factor,
            orig,
            param_dtype,
            self.scenario.reduce_dtype or param_dtype,
            quantised or param_dtype,
            self._post_forward_factor(unit),
        )

    def _prefetch_lists(self) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
        """Explicit prefetch lists: the loops of the FSDP2 tutorial over all units but the root."""
        names = [u.name for u in self.workload.units if not u.is_root]
        forward: dict[str, tuple[str, ...]] = {}
        backward: dict[str, tuple[str, ...]] = {}
        ahead, behind = self.settings.forward_prefetch, self.settings.backward_prefetch
        for i, name in enumerate(names):
            if ahead and i + ahead < len(names):
                forward[name] = tuple(names[i + 1 : i + 1 + ahead])
            if behind and i >= behind:
                backward[name] = tuple(reversed(names[i - behind : i]))
        for name, override in self.overrides.items():
            if override.forward_prefetch is not None:
                forward[name] = override.forward_prefetch
            if override.backward_prefetch is not None:
                backward[name] = override.backward_prefetch
        return forward, backward

    def _post_forward_factor(self, unit: Unit) -> int | None:
        value = self.overrides[unit.name].reshard_after_forward
        if value is None:
            value = self.settings.reshard_after_forward
        if value is None:
            value = not unit.is_root
        if isinstance(value, bool):
            return self.shard_factor if value else None
        return None if value == 1 else value

    # ---- training loop

    def initialize(self) -> None:
        """The sharded parameters live from here on."""
        for group in self.groups.values():
            with self.program.for_unit(group.unit.name):
                if self.offload is None:
                    for storage in group.storages:
                        numel = sum(map(group.shard_numel, storage.params))
                        size = nbytes(numel, group.orig_dtype)
                        self.program.malloc("sharded_param", size, "parameters")
                else:
                    self.offload.keep("parameters", nbytes(group.size.shard, group.orig_dtype))
                    self.offload.keep("gradients", nbytes(group.trained.shard, group.orig_dtype))

    def local_numel(self, unit: Unit) -> int:
        """The local shards of trained parameters."""
        return self.groups[unit.name].trained.shard

    def local_numels(self, unit: Unit) -> tuple[int, ...]:
        """Each parameter is a tensor of its own."""
        group = self.groups[unit.name]
        return tuple(group.shard_numel(p) for p in unit.params if p.requires_grad)

    def begin_microbatch(self, *, last: bool) -> None:
        """The setters for gradient accumulation apply to all micro-batches but the last."""
        s = self.settings
        self.reduce_grads = last or s.requires_gradient_sync
        self.all_reduce_grads = last or s.requires_all_reduce
        self.reshard_after_backward = last or s.reshard_after_backward
        self.is_last_backward = last or s.is_last_backward

    def zero_grad(self) -> None:
        """``set_to_none=True``: the sharded gradients are dropped."""
        for group in self.groups.values():
            self.program.free(group.sharded_grad)
            group.sharded_grad = None
            group.has_cpu_grad = False

    def begin_forwards(self) -> None:
        """``module.unshard()`` before any forward: there is no FSDP stream to use yet."""
        for name in self.settings.unshard_early:
            group = self.groups[name]
            with self.program.for_unit(name):
                self._unshard(group, by=None, trigger="manual")
                self._wait_for_unshard(group)

    # ---- forward

    def pre_forward(self, unit: Unit, x: Node | None) -> Node | None:
        """``FSDPState._pre_forward``."""
        program, group = self.program, self.groups.get(unit.name)
        with program.for_unit(unit.name):
            program.mark("pre_forward", **self._recompute_field())
            if self.training_states[unit.name] == "pre_backward":
                # [Note: Recompute] the unit is unsharded for its backward, or will be here
                if group is not None and group.state != "unsharded":
                    self._unshard(group, by=unit.name, trigger="demand")
                    self._wait_for_unshard(group)
                return x
            self.training_states[unit.name] = "forward"
            self._root_pre_forward(unit)
            self.hook("pre_forward", unit)
            if group is not None:
                x = self._group_pre_forward(group, x)
            for name in self.forward_prefetch.get(unit.name, ()):
                self._prefetch_unshard(self.groups.get(name), "forward", by=unit.name)
        return x

    def _recompute_field(self) -> dict[str, Any]:
        return {"recompute": True} if self.in_backward else {}

    def _root_pre_forward(self, unit: Unit) -> None:
        if self.iter_forward_root is not None:
            return
        self.iter_forward_root = unit
        # No all-gather of this forward starts before the optimizer has written the shards.
        for stream in ALL_GATHER_STREAMS:
            self.program.wait_stream(stream, COMPUTE)

    def _group_pre_forward(self, group: ParamGroup, x: Node | None) -> Node | None:
        group.training_state = "forward"
        self._unshard(group, by=group.unit.name, trigger="demand")
        self._wait_for_unshard(group)
        if not self.grad_enabled or x is None:
            return x
        return self.autograd.node(partial(self._post_backward, group), (x,))

    def _unshard(self, group: ParamGroup, *, by: str | None, trigger: str) -> None:
        """Cast, copy-in and all-gather; nothing if one is pending or the unit is unsharded."""
        if group.all_gather_result is not None or group.state == "unsharded":
            return
        override = self.overrides[group.unit.name]
        if group.training_state == "pre_backward" and not override.unshard_in_backward:
            return
        program = self.program
        if group.reshard_after_forward_event is not None:
            self._all_gather_streams_wait(group.reshard_after_forward_event)
            group.reshard_after_forward_event = None
        # Elsewhere, as in a manual unshard or after this unit's backward, on the current stream.
        own_streams = group.training_state in ("forward", "pre_backward")
        copy_in, gather = ALL_GATHER_STREAMS if own_streams else (COMPUTE, COMPUTE)
        with program.for_unit(group.unit.name):
            if self.shard_factor == 1:
                group.all_gather_result = AllGatherResult(None, program.record_event())
                return
            with program.on_stream(copy_in):
                buffer = self.all_gather.copy_in(group)
            program.wait_stream(gather, copy_in)
            with program.on_stream(gather):
                self.all_gather.gather(group, by, trigger)
                group.all_gather_result = AllGatherResult(buffer, program.record_event())

    def _wait_for_unshard(self, group: ParamGroup) -> None:
        """The compute stream waits for the all-gather and copies out.

        [Note: Copy-out and the next all-gather] In forward the gathered buffer is kept until the
        next unit's copy-out, so that the next all-gather, issued before this call, overlaps this
        unit's compute. In backward it is dropped at once: the prefetched all-gather waits for the
        copy-out.
        """
        result, program = group.all_gather_result, self.program
        if result is None:
            return
        with program.for_unit(group.unit.name):
            program.mark("wait_unshard")
            forward = group.training_state == "forward"
            if forward and self.all_gather_state is not None:
                self._drop_all_gather_state()
            program.wait_event(COMPUTE, result.event)
            self.all_gather.copy_out(group)
            group.state = "unsharded"
            event = program.record_event()
            if forward and self.shard_factor > 1:
                self.all_gather_state = AllGatherResult(result.buffer, event)
            else:
                self._all_gather_streams_wait(event)
                program.free(result.buffer)
        group.all_gather_result = None

    def _drop_all_gather_state(self) -> None:
        assert self.all_gather_state is not None
        self._all_gather_streams_wait(self.all_gather_state.event)
        self.program.free(self.all_gather_state.buffer)
        self.all_gather_state = None

    def _all_gather_streams_wait(self, event: Event) -> None:
        for stream in ALL_GATHER_STREAMS:
            self.program.wait_event(stream, event)

    def _prefetch_unshard(self, group: ParamGroup | None, state: str, by: str) -> None:
        if group is None:
            return
        outer, group.training_state = group.training_state, state
        self._unshard(group, by=by, trigger="prefetch")
        group.training_state = outer

    def post_forward(self, unit: Unit, output: Node | None) -> None:
        """``FSDPState._post_forward``."""
        program, group = self.program, self.groups.get(unit.name)
        with program.for_unit(unit.name):
            program.mark("post_forward", **self._recompute_field())
            if self.training_states[unit.name] == "pre_backward":
                return
            self.hook("post_forward", unit)
            if group is not None:
                if not self.in_backward:
                    self._reshard(group)
                    group.post_forward_indices.append(len(self.post_forward_order))
                    self.post_forward_order.append(group)
                group.training_state = "idle"
            if self.grad_enabled and output is not None:
                output.hooks.append(partial(self._pre_backward, unit))
            self.training_states[unit.name] = "idle"
            if self.iter_forward_root is unit:
                if self.all_gather_state is not None:
                    self._drop_all_gather_state()
                self.iter_forward_root = None

    # ---- reshard

    def _reshard(self, group: ParamGroup) -> None:
        to = "sharded"
        if group.training_state == "forward":
            if group.post_forward_factor is None:
                self._mark_noop(group)
                return
            if group.post_forward_factor != group.factor:
                to = "sharded_post_forward"
        if group.state == to:
            self._mark_noop(group)
            return
        self._free_unsharded(group, to)

    def _mark_noop(self, group: ParamGroup) -> None:
        self.program.mark("reshard_noop", group.unit.name)

    def _free_unsharded(self, group: ParamGroup, to: str) -> None:
        program = self.program
        with program.for_unit(group.unit.name):
            fields: dict[str, Any] = {"from": group.state, "to": to}
            size = group.unsharded_nbytes if group.state == "unsharded" else 0
            if to == "sharded_post_forward":
                assert group.post_forward_factor is not None
                kept = group.unsharded_nbytes // group.post_forward_factor
                fields["kept_bytes"] = kept
                group.post_forward_shard = program.malloc("post_forward_shard", kept, "parameters")
                self.copy("keep_post_forward_shard", 2 * kept)
            else:
                program.free(group.post_forward_shard)
                group.post_forward_shard = None
            for buffer in group.params:
                program.free(buffer)
            group.params.clear()
            program.mark("reshard", bytes=size, **fields)
            if to == "sharded_post_forward":
                group.reshard_after_forward_event = program.record_event(COMPUTE)
        group.state = to

    # ---- backward

    def _pre_backward(self, unit: Unit) -> None:
        """``FSDPState._pre_backward``."""
        program, group = self.program, self.groups.get(unit.name)
        with program.for_unit(unit.name):
            program.mark("pre_backward")
            self.hook("pre_backward", unit)
            self.training_states[unit.name] = "pre_backward"
            self.final_callback_queued = self.final_callback_queued or unit
            explicit = self.backward_prefetch.get(unit.name, ())
            if group is not None:
                self._group_pre_backward(group, default_prefetch=not explicit)
            for name in explicit:
                self._prefetch_unshard(self.groups.get(name), "pre_backward", by=unit.name)

    def _group_pre_backward(self, group: ParamGroup, *, default_prefetch: bool) -> None:
        if group.training_state == "pre_backward":
            return
        group.training_state = "pre_backward"
        self._unshard(group, by=group.unit.name, trigger="demand")
        self._wait_for_unshard(group)
        if default_prefetch:
            self._backward_prefetch(group)

    def _backward_prefetch(self, group: ParamGroup) -> None:
        """The unit recorded just before this one's latest forward."""
        if not group.post_forward_indices:
            return
        index = group.post_forward_indices.pop()
        if index > 0:
            target = self.post_forward_order[index - 1]
            self._prefetch_unshard(target, "pre_backward", by=group.unit.name)

    def parameter_nodes(self, unit: Unit, params: tuple[Param, ...]) -> tuple[Node, ...]:
        """The unsharded parameters, which live through several forwards."""
        group = self.groups.get(unit.name)
        if group is None or not self.grad_enabled:
            return ()
        if group.accumulate_grad is None:
            run = partial(self._accumulate_grad, group)
            group.accumulate_grad = self.autograd.accumulate_grad(run)
        return (group.accumulate_grad,)

    def allocate_gradients(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """Each parameter's gradient is a tensor of its own."""
        self.gradients.allocate(self.groups[unit.name], storages)

    def _accumulate_grad(self, group: ParamGroup) -> None:
        self.gradients.accumulate(group)
        group.accumulate_grad = None

    def _post_backward(self, group: ParamGroup, *, in_final_callback: bool = False) -> None:
        """``FSDPParamGroup.post_backward``: reshard and reduce the gradients."""
        program = self.program
        with program.for_unit(group.unit.name):
            fields: dict[str, Any] = {"in_final_callback": True} if in_final_callback else {}
            program.mark("post_backward", **fields)
            self.hook("post_backward", group.unit)
            group.training_state = "post_backward"
            self.gradients.accumulate_unsharded(group)
            if self.reshard_after_backward:
                self._reshard(group)
            if not self.reduce_grads:
                self.gradients.keep_unsharded(group)
                return
            self._wait_for_reduce_scatter_input()
            if group.grads or group.accumulated_grads:
                self._reduce(group)

    def _wait_for_reduce_scatter_input(self) -> None:
        """[Note: Retained reduce-scatter inputs] Compute waits until fewer than K inputs are alive.

        With K = 1, the default, nothing after this backward runs on the compute stream until the
        previous unit's reduce-scatter has ended. This keeps memory independent of the CPU's speed.
        """
        states = self.reduce_scatter_states
        while len(states) >= self.settings.reduce_scatter_max_input_buffers:
            oldest = states.pop(0)
            self.program.wait_event(COMPUTE, oldest.event)
            self.program.free(oldest.buffer)

    def _reduce(self, group: ParamGroup) -> None:
        self._wait_for_post_backward(group)
        state, stream = self.gradients.reduce(group, all_reduce=self.all_reduce_grads)
        self.reduce_scatter_states.append(state)
        assert group.post_reduce_event is not None
        self.last_post_reduce_events[stream] = group.post_reduce_event

    def _wait_for_post_backward(self, group: ParamGroup) -> None:
        """With ``is_last_backward`` False, this unit's reduction of the micro-batch before."""
        if group.post_reduce_event is not None:
            self.program.wait_event(COMPUTE, group.post_reduce_event)
            group.post_reduce_event = None
        if group.all_reduce_state is not None:
            buffer, event = group.all_reduce_state
            self.program.wait_event(COMPUTE, event)
            self.program.free(buffer)
            group.all_reduce_state = None

    # ---- end of backward

    def final_callback(self) -> None:
        """``_root_post_backward_final_callback``: root first, then units in module order."""
        queued_by, program = self.final_callback_queued, self.program
        if queued_by is None:
            return
        program.mark("backward_final_begin", queued_by.name)
        self.iter_forward_root = None
        others = [u for u in self.workload.units if not u.is_root]
        for unit in (self.root, *others):
            self._finish_unit(unit)
        if self.is_last_backward:
            self.post_forward_order.clear()
            for state in self.reduce_scatter_states:
                program.wait_event(COMPUTE, state.event)
                program.free(state.buffer)
            self.reduce_scatter_states.clear()
        self.final_callback_queued = None
        program.mark("backward_final_end", queued_by.name)

    def _finish_unit(self, unit: Unit) -> None:
        group = self.groups.get(unit.name)
        if group is not None:
            if group.training_state != "post_backward":
                self._post_backward(group, in_final_callback=True)
            group.training_state = "idle"
        self.training_states[unit.name] = "idle"
        if group is not None and self.is_last_backward:
            self._finalize_backward(group)

    def _finalize_backward(self, group: ParamGroup) -> None:
        program = self.program
        for event in self.last_post_reduce_events.values():
            program.wait_event(COMPUTE, event)
        self.last_post_reduce_events.clear()
        group.post_reduce_event = None
        if group.all_reduce_state is not None:
            program.free(group.all_reduce_state[0])
            group.all_reduce_state = None
        self.gradients.wait_for_offload(group)
        if group.all_gather_result is not None:  # prefetched for nothing
            program.wait_event(COMPUTE, group.all_gather_result.event)
            program.free(group.all_gather_result.buffer)
            group.all_gather_result = None
        group.post_forward_indices.clear()
