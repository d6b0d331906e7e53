"""The lectures' FSDP: all-gather, compute, reduce-scatter, and a limit on unsharded units.

Not PyTorch's runtime (see :mod:`fsdpsim.schedules.fsdp1`): no hooks, no copies, and a limiter that
means what it says. One process group: all-gathers and reduce-scatters queue on one stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import Textbook
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.sharding import ShardedSize, flat_parameter
from fsdpsim.workload import Part, Unit, nbytes


@dataclass(slots=True, eq=False)
class State:
    """One unit: its sizes and the buffers that are alive."""

    unit: Unit
    parts: list[Part]
    size: ShardedSize
    dtype: str
    reduce_dtype: str
    gathered: Event | None = None
    """The pending or finished all-gather of the unsharded parameters; None when sharded."""
    full_param: Buffer | None = None
    gradient: Buffer | None = None
    sharded_gradient: Buffer | None = None
    tensors: list[dict[str, Buffer]] = field(default_factory=list)


class TextbookRuntime(Runtime):
    """Records whole iterations itself: forward in order, backward in reverse."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.scenario.fsdp, Textbook)
        self.settings = self.scenario.fsdp
        self.communication = "communication" if self.settings.overlap else COMPUTE
        parts = self.workload.parts
        named = [(u, [p for p in parts if p.unit == u.name]) for u in self.workload.units]
        self.states = [self._state(unit, own) for unit, own in named if own]
        self.alive = 0
        self.freed: deque[tuple[str, Event]] = deque()
        """Units whose free is issued: each stays alive until its event has passed."""

    def _state(self, unit: Unit, parts: list[Part]) -> State:
        orig = unit.params[0].dtype if unit.params else "float32"
        dtype = self.scenario.param_dtype or orig
        size = flat_parameter(
            unit.params, self.shard_factor, compute_dtype=dtype, use_orig_params=False
        )
        return State(unit, parts, size, dtype, self.scenario.reduce_dtype or dtype)

    def run(self) -> None:
        """Record all iterations."""
        self.program.phase = "initialization"
        self.initialize()
        for iteration in range(self.scenario.iterations):
            self.program.begin_iteration(iteration)
            self._forward()
            self._backward()
            self.program.phase = "optimizer"
            self.optimizer_step()
            self._zero_grad()
            self.end_step()

    def initialize(self) -> None:
        """The parameter shards in the compute dtype, and K bytes of optimizer state for each."""
        self.has_optimizer_state = True
        for state in self.states:
            with self.program.for_unit(state.unit.name):
                shard = nbytes(state.size.shard, state.dtype)
                self.program.malloc("sharded_param", shard, "parameters")
            self.allocate_optimizer_state(state.unit)

    def local_numel(self, unit: Unit) -> int:
        """The local shard, padding included."""
        return next(s.size.shard for s in self.states if s.unit is unit)

    # ---- one iteration

    def _forward(self) -> None:
        self.program.phase = "forward"
        last = self.states[-1]
        for i, state in enumerate(self.states):
            self._unshard(state)
            if self.settings.forward_prefetch and state is not last:
                self._prefetch(self.states[i + 1])
            self._compute(state)
            if state is not last or self.settings.reshard_last_unit:
                self._reshard(state)

    def _backward(self) -> None:
        self.program.phase = "backward"
        for i, state in reversed([*enumerate(self.states)]):
            self._unshard(state)
            if self.settings.backward_prefetch == "BACKWARD_PRE" and i > 0:
                self._prefetch(self.states[i - 1])
            self._compute_backward(state)
            self._reshard(state)
            self._reduce_scatter(state)
        self.program.wait_stream(COMPUTE, self.communication)

    def _compute(self, state: State) -> None:
        with self.program.for_unit(state.unit.name):
            self._wait_unshard(state)
            for part in state.parts:
                tensors: dict[str, Buffer] = {}
                state.tensors.append(tensors)
                self.program.mark("forward_begin", **_fields(state, part))
                self.run_kernels(part.forward, "forward", state.unit, tensors)
                self.program.mark("forward_end", **_fields(state, part))

    def _compute_backward(self, state: State) -> None:
        program = self.program
        with program.for_unit(state.unit.name):
            self._wait_unshard(state)
            size = nbytes(state.size.numel, state.reduce_dtype)
            state.gradient = program.malloc("gradient", size, "gradients")
            for part in reversed(state.parts):
                tensors = state.tensors.pop()
                program.mark("backward_begin", **_fields(state, part))
                self.run_kernels(part.recompute, "recompute", state.unit, tensors)
                self.run_kernels(part.backward, "backward", state.unit, tensors)
                program.mark("backward_end", **_fields(state, part))

    # ---- collectives and buffers

    def _prefetch(self, state: State) -> None:
        """Gather early, unless the limit could never let it through before this unit's free."""
        limit = self.settings.limit_all_gathers
        if not limit or self.alive - len(self.freed) < limit:
            self._unshard(state)

    def _unshard(self, state: State) -> None:
        if state.gathered is not None:
            return
        program = self.program
        with program.for_unit(state.unit.name):
            self._limit_all_gathers()
            with program.on_stream(self.communication):
                size = nbytes(state.size.padded, state.dtype)
                state.full_param = program.malloc(
                    "full_param", size, "all_gather", unsharded=program.new_gather()
                )
                self.collective(
                    "all_gather",
                    state.size.padded,
                    state.dtype,
                    group="shard",
                    communicator="shard",
                    group_size=state.size.factor,
                )
                state.gathered = program.record_event()

    def _limit_all_gathers(self) -> None:
        """[Note: Textbook limiter] The host waits until fewer than N unsharded units are alive."""
        limit = self.settings.limit_all_gathers
        while limit and self.alive >= limit and self.freed:
            unit, event = self.freed.popleft()
            self.program.mark("limiter_wait", waits_for_free_of=unit)
            self.program.synchronize(event, cause="rate_limiter")
            self.alive -= 1
        self.alive += 1

    def _wait_unshard(self, state: State) -> None:
        assert state.gathered is not None
        self.program.wait_event(COMPUTE, state.gathered)

    def _reshard(self, state: State) -> None:
        """Free the unsharded parameters once the compute enqueued so far has run."""
        with self.program.for_unit(state.unit.name):
            self.program.free(state.full_param, COMPUTE)
            self.program.mark("reshard")
            self.freed.append((state.unit.name, self.program.record_event(COMPUTE)))
        state.full_param = state.gathered = None

    def _reduce_scatter(self, state: State) -> None:
        program, size = self.program, state.size
        with program.for_unit(state.unit.name):
            program.wait_stream(self.communication, COMPUTE)
            with program.on_stream(self.communication):
                shard = nbytes(size.shard, state.reduce_dtype)
                state.sharded_gradient = program.malloc("sharded_gradient", shard, "gradients")
                self.collective(
                    "reduce_scatter",
                    size.padded,
                    state.reduce_dtype,
                    group="shard",
                    communicator="shard",
                    group_size=size.factor,
                )
            program.free(state.gradient, self.communication)
            state.gradient = None

    def _zero_grad(self) -> None:
        for state in self.states:
            self.program.free(state.sharded_gradient)
            state.sharded_gradient = None


def _fields(state: State, part: Part) -> dict[str, str]:
    return {} if part.name == state.unit.name else {"part": part.name}
