"""FSDP1 (``FullyShardedDataParallel``) as torch 2.13 runs it.

Reads beside ``torch/distributed/fsdp/_runtime_utils.py``: methods carry the names of its functions.
Streams: ``compute`` (torch's default stream), ``pre_unshard``, ``unshard``, ``post_backward`` and,
for the hybrid strategies, ``all_reduce``. One communicator, ``shard``, carries the all-gathers and
reduce-scatters of all units; ``replicate`` the all-reduces of the hybrid strategies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdpsim.faults import Fault, FaultsError
from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import Fsdp1
from fsdpsim.scenario.schema import HYBRID_STRATEGIES, strategy_of
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.flat_param import FlatGradients, FlatParamHandle
from fsdpsim.schedules.flat_unshard import FlatUnshard
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.schedules.storages import Storage
from fsdpsim.sharding import first_shard, flat_parameter
from fsdpsim.workload import Param, Unit

#: Strategies that free the unsharded flat parameter after forward and in every backward.
RESHARD_AFTER_FORWARD = ("FULL_SHARD", "HYBRID_SHARD")

#: ``_FreeEventQueue``: an unshard takes one free event from a queue of at least this length.
MAX_INFLIGHT_ALL_GATHERS = 2


@dataclass(frozen=True, slots=True)
class FreeEvent:
    """An entry of the rate limiter's queue: whose free it follows."""

    event: Event
    unit: str
    phase: str


class Fsdp1Runtime(Runtime):
    """The hooks of FSDP1."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.scenario.fsdp, Fsdp1)
        self.settings = self.scenario.fsdp
        strategy = strategy_of(self.settings, self.shard_factor, self.scenario.world_size)
        # torch turns every strategy into NO_SHARD where a parameter has one rank only.
        self.sharded = strategy != "NO_SHARD" and self.shard_factor > 1
        self.hybrid = self.sharded and strategy in HYBRID_STRATEGIES
        self.reshard_after_forward = strategy in RESHARD_AFTER_FORWARD
        self.flat_params = FlatUnshard(self, sharded=self.sharded)
        self.gradients = FlatGradients(self, sharded=self.sharded, hybrid=self.hybrid)
        self.handles = {u.name: self._handle(u) for u in self.workload.units if u.params}
        self.free_events: deque[FreeEvent] = deque()  # survives iterations, as torch's does
        self.pre_forward_order: list[FlatParamHandle] = []
        self.post_forward_order: list[FlatParamHandle] = []
        self.is_first_iteration = True
        self.sync_gradients = True

    def _handle(self, unit: Unit) -> FlatParamHandle:
        orig = unit.params[0].dtype
        param_dtype = self.scenario.param_dtype or orig
        reduce_dtype = self.scenario.reduce_dtype or param_dtype
        size = flat_parameter(
            unit.params,
            self.shard_factor if self.sharded else 1,
            compute_dtype=param_dtype,
            use_orig_params=self.settings.use_orig_params,
            group=self.shard_factor if self.sharded else self.scenario.world_size,
        )
        quantised = self.settings.all_gather_dtype if self.sharded else None
        gather_dtype = quantised or param_dtype
        return FlatParamHandle(unit, size, orig, param_dtype, reduce_dtype, gather_dtype)

    # ---- training loop

    def initialize(self) -> None:
        """The sharded flat parameters live from here on."""
        for handle in self.handles.values():
            with self.program.for_unit(handle.unit.name):
                self.flat_params.initialize(handle)

    def local_numel(self, unit: Unit) -> int:
        """The local shard, padding included."""
        return self.handles[unit.name].size.shard

    def local_numels(self, unit: Unit) -> tuple[int, ...]:
        """The flat parameter's shard, or what it has of each original parameter."""
        handle = self.handles[unit.name]
        if not self.settings.use_orig_params:
            return (handle.size.shard,)
        return first_shard(unit.params, handle.size, handle.param_dtype)

    def begin_microbatch(self, *, last: bool) -> None:
        """Enter ``no_sync()`` for all micro-batches but the last, if the scenario says so."""
        self.sync_gradients = last or not self.settings.no_sync

    def zero_grad(self) -> None:
        """``set_to_none=True``: the sharded gradients are dropped."""
        for handle in self.handles.values():
            self.program.free(handle.saved_grad_shard, *handle.saved_grad_streams)
            handle.saved_grad_shard = None
            if not self.sharded:
                self.program.free(handle.grad)
                handle.grad = None

    # ---- forward

    def pre_forward(self, unit: Unit, x: Node | None) -> Node | None:
        """``_root_pre_forward`` and ``_pre_forward``."""
        program, handle = self.program, self.handles.get(unit.name)
        if unit.is_root:
            self._root_pre_forward()
        with program.for_unit(unit.name):
            self._mark_forward("pre_forward")
            if handle is None or handle.training_state == "backward_pre":
                return x  # [Note: Recompute] the unit is unsharded for its backward already
            self.hook("pre_forward", unit)
            self._record_pre_forward(handle)
            handle.training_state = "forward"
            if not handle.prefetched:
                self._unshard(handle, by=unit.name, trigger="demand")
            handle.needs_pre_forward_unshard = False
            self._wait_unshard()
            self._prefetch(handle)
            self._register_post_backward(handle, x)
        return x

    def _root_pre_forward(self) -> None:
        if self.settings.forward_prefetch:
            for handle in self.handles.values():
                handle.needs_pre_forward_unshard = True
                handle.prefetched = False
        # No all-gather of this forward starts before the optimizer has written the shards.
        self.program.wait_stream("unshard", COMPUTE)
        self.program.wait_stream("pre_unshard", COMPUTE)

    def _mark_forward(self, event: str) -> None:
        fields: dict[str, Any] = {"recompute": True} if self.in_backward else {}
        self.program.mark(event, **fields)

    def _record_pre_forward(self, handle: FlatParamHandle) -> None:
        if self.is_first_iteration and handle.pre_forward_order_index is None:
            handle.pre_forward_order_index = len(self.pre_forward_order)
            self.pre_forward_order.append(handle)

    def _unshard(self, handle: FlatParamHandle, *, by: str, trigger: str) -> None:
        """The only routine that issues all-gathers; also runs when there is nothing to gather."""
        program = self.program
        with program.for_unit(handle.unit.name):
            if self.flat_params.pre_unshard(handle):
                program.wait_stream("unshard", "pre_unshard")
            if self.settings.limit_all_gathers:
                self._rate_limiter()
            with program.on_stream("unshard"):
                self.flat_params.unshard(handle, by, trigger)
        handle.points_to_unsharded = True
        if handle.training_state == "forward":
            self._use_unsharded_views(handle)

    def _rate_limiter(self) -> None:
        """[Note: Rate limiter] The CPU waits for the oldest free, if two or more are queued.

        The free's event was recorded on the compute stream, so its block is reusable for the
        allocation that follows. The queue is never cleared; that is why 2 means 3 in steady state.
        """
        if len(self.free_events) < MAX_INFLIGHT_ALL_GATHERS:
            return
        free = self.free_events.popleft()
        self.program.mark("limiter_wait", waits_for_free_of=free.unit, freed_in=free.phase)
        self.program.synchronize(free.event, cause="rate_limiter")

    def _use_unsharded_views(self, handle: FlatParamHandle) -> None:
        """The module's parameters become views of the flat parameter: an autograd node of now.

        Also where the module that runs has autograd turned off (``@torch.enable_grad()``).
        """
        if not handle.unit.requires_grad:
            return
        if handle.accumulate_grad is None:
            run = partial(self._post_backward, handle)
            handle.accumulate_grad = self.autograd.accumulate_grad(run)
        run = partial(self.gradients.concatenate, handle)
        handle.views = self.autograd.node(run, (handle.accumulate_grad,))

    def parameter_nodes(self, unit: Unit, params: tuple[Param, ...]) -> tuple[Node, ...]:
        """The views through which the module computes with the flat parameter."""
        handle = self.handles.get(unit.name)
        if handle is None or handle.views is None:
            return ()
        freed = self.sharded and not handle.is_unsharded
        if freed and self.in_backward and handle.training_state == "backward_post":
            text = (
                f"{unit.name} holds several checkpoints, and FSDP1 frees it after the backward of "
                "the first; torch fails there too"
            )
            raise FaultsError(Fault("training.checkpoint_reentrant", text))
        return (handle.views,)

    def _wait_unshard(self) -> None:
        self.program.mark("wait_unshard")
        self.program.wait_stream(COMPUTE, "unshard")

    def _register_post_backward(self, handle: FlatParamHandle, x: Node | None) -> None:
        """Frozen units reshard when the gradient of their input is there."""
        if not self.grad_enabled or handle.unit.requires_grad or handle.reshard_only_registered:
            return
        handle.reshard_only_registered = True
        if x is not None:
            x.hooks.append(partial(self._post_backward_reshard_only, handle))

    def post_forward(self, unit: Unit, output: Node | None) -> None:
        """``_post_forward``: reshard and arm the pre-backward hook."""
        program, handle = self.program, self.handles.get(unit.name)
        with program.for_unit(unit.name):
            self._mark_forward("post_forward")
            if handle is not None and handle.training_state == "backward_pre":
                return
            self.hook("post_forward", unit)
            if handle is not None:
                self._record_post_forward(handle)
                self._reshard(handle, free=not unit.is_root and self.reshard_after_forward)
            self._register_pre_backward_hook(unit, handle, output)
            if handle is not None:
                handle.training_state = "idle"

    def _record_post_forward(self, handle: FlatParamHandle) -> None:
        # torch tests the index for truth, so the unit at index 0 moves when it is used again.
        if not handle.post_forward_index:
            handle.post_forward_index = len(self.post_forward_order)
        self.post_forward_order.append(handle)

    def _register_pre_backward_hook(
        self, unit: Unit, handle: FlatParamHandle | None, output: Node | None
    ) -> None:
        if not self.grad_enabled:
            return
        if handle is not None:
            handle.needs_pre_backward_unshard = output is not None
            handle.ran_pre_backward_hook = False
        if output is not None:
            output.hooks.append(partial(self._pre_backward, unit, handle))

    def _reshard(self, handle: FlatParamHandle, *, free: bool) -> None:
        """Free the unsharded flat parameter; the limiter learns of it by an event on compute."""
        program = self.program
        freed = free and handle.is_unsharded and self.sharded
        copied = not self.sharded and handle.full_param is not None
        if freed or copied:
            self.flat_params.free(handle)
        if freed:
            program.mark("reshard", bytes=handle.unsharded_nbytes)
        else:
            program.mark("reshard_noop")
        if self.settings.limit_all_gathers and free:
            event = program.record_event(COMPUTE)
            phase = "backward" if self.in_backward else "forward"
            self.free_events.append(FreeEvent(event, handle.unit.name, phase))
        handle.points_to_unsharded = self._skip_sharded_views(handle)
        handle.prefetched = False

    def _skip_sharded_views(self, handle: FlatParamHandle) -> bool:
        """With original parameters, those that stay unsharded after forward keep their views."""
        keeps = self.sharded and not self.reshard_after_forward
        in_forward = handle.training_state == "forward"
        return self.settings.use_orig_params and keeps and in_forward and self.grad_enabled

    # ---- prefetch

    def _prefetch(self, current: FlatParamHandle) -> None:
        """``_prefetch_handle``: unshard the next unit early, without waiting for it."""
        target = self._handle_to_prefetch(current)
        if target is None:
            return
        outer = target.training_state
        forward = current.training_state == "forward"
        target.training_state = "forward" if forward else "backward_pre"
        self._unshard(target, by=current.unit.name, trigger="prefetch")
        target.training_state = outer
        target.prefetched = True

    def _handle_to_prefetch(self, current: FlatParamHandle) -> FlatParamHandle | None:
        state, settings = current.training_state, self.settings
        if state == "forward":
            if not settings.forward_prefetch:
                return None
            target = self._after(current)
            wanted = target is not None and target.needs_pre_forward_unshard
        else:
            if settings.backward_prefetch != state.upper():
                return None
            target = self._before(current)
            wanted = target is not None and target.needs_pre_backward_unshard
        return target if wanted and target is not None and not target.prefetched else None

    def _after(self, handle: FlatParamHandle) -> FlatParamHandle | None:
        """The next unit in the first iteration's order, once that is known."""
        index = handle.pre_forward_order_index
        if index is None or index + 1 >= len(self.pre_forward_order):
            return None
        return self.pre_forward_order[index + 1]

    def _before(self, handle: FlatParamHandle) -> FlatParamHandle | None:
        """The previous unit in this iteration's post-forward order."""
        index = handle.post_forward_index
        return self.post_forward_order[index - 1] if index else None

    # ---- backward

    def _pre_backward(self, unit: Unit, handle: FlatParamHandle | None) -> None:
        """``_pre_backward_hook``: once per unit and backward."""
        program = self.program
        with program.for_unit(unit.name):
            if handle is None:
                program.mark("pre_backward")
                return
            if handle.ran_pre_backward_hook:
                return
            program.mark("pre_backward")
            self.hook("pre_backward", unit)
            handle.training_state = "backward_pre"
            if handle.needs_pre_backward_unshard:
                if not handle.prefetched:
                    self._unshard(handle, by=unit.name, trigger="demand")
                self._wait_unshard()
            handle.needs_pre_backward_unshard = False
            self._prefetch(handle)
            handle.ran_pre_backward_hook = True

    def allocate_gradients(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """Autograd writes each parameter's gradient into a tensor of its own."""
        self.gradients.allocate(self.handles[unit.name], storages)

    def _post_backward(self, handle: FlatParamHandle) -> None:
        """``_post_backward_hook``, when the flat gradient is complete."""
        program = self.program
        with program.for_unit(handle.unit.name):
            program.mark("post_backward")
            self.hook("post_backward", handle.unit)
            handle.training_state = "backward_post"
            self._post_backward_reshard(handle)
            if not self.sync_gradients:
                return  # the unsharded gradient stays; the next backward adds to it
            program.wait_stream("post_backward", COMPUTE)
            with program.on_stream("post_backward"):
                if self.sharded:
                    self.gradients.reduce(handle)
                else:
                    self.gradients.reduce_no_shard(handle)

    def _post_backward_reshard_only(self, handle: FlatParamHandle) -> None:
        with self.program.for_unit(handle.unit.name):
            self.program.mark("post_backward_reshard_only")
            handle.training_state = "backward_post"
            self._post_backward_reshard(handle)

    def _post_backward_reshard(self, handle: FlatParamHandle) -> None:
        self._reshard(handle, free=self._should_free_in_backward)
        self._prefetch(handle)

    @property
    def _should_free_in_backward(self) -> bool:
        return self.sharded and (self.sync_gradients or self.reshard_after_forward)

    def final_callback(self) -> None:
        """``_post_backward_final_callback``: the compute stream waits for all reductions."""
        program = self.program
        with program.for_unit(self.root.name):
            program.mark("backward_final_begin")
            if self.sync_gradients:
                program.wait_stream(COMPUTE, "post_backward")
                if self.hybrid:
                    program.wait_stream(COMPUTE, "all_reduce")
                if self.offload is not None:
                    program.synchronize(program.record_event(COMPUTE), cause="offload")
        self.is_first_iteration = False
        self.post_forward_order.clear()
        for handle in self.handles.values():
            self._finalize(handle)
        program.mark("backward_final_end", self.root.name)

    def _finalize(self, handle: FlatParamHandle) -> None:
        if handle.points_to_unsharded:
            with self.program.for_unit(handle.unit.name):
                self._reshard(handle, free=self._should_free_in_backward)
        self.flat_params.free_saved(handle)
        if self.sync_gradients:
            self.gradients.prepare_gradient_for_optim(handle)
        handle.ran_pre_backward_hook = False
        handle.needs_pre_backward_unshard = False
        handle.post_forward_index = None
        handle.training_state = "idle"
        handle.prefetched = False
        handle.reshard_only_registered = False
        handle.accumulate_grad = handle.views = None
