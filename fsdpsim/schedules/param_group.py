"""FSDP2's parameters of one unit: state, all-gather, copy-out and gradient reduction.

Reads beside ``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` of
``torch/distributed/fsdp/_fully_shard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdpsim.engine import Op
from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Event
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.offload import Offload
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.schedules.storages import Storage
from fsdpsim.sharding import ShardedSize, padded_numel, per_parameter
from fsdpsim.workload import DTYPE_BYTES, Param, Unit, nbytes

#: Names of the parameters whose gradients share a buffer -> the buffer.
Grads = dict[tuple[str, ...], Buffer]


@dataclass(slots=True)
class AllGatherResult:
    """A pending or stashed all-gather: its output, and the event after it or its copy-out."""

    buffer: Buffer | None
    event: Event


@dataclass(slots=True)
class ReduceScatterState:
    """A retained reduce-scatter input and the event after the collective."""

    buffer: Buffer
    event: Event


@dataclass(slots=True, eq=False)
class ParamGroup:
    """State of one unit's parameters; the flags are ``FSDPParamGroup``'s own."""

    unit: Unit
    storages: tuple[Storage, ...]
    factor: int
    """Ranks that the parameters are sharded over."""
    orig_dtype: str
    param_dtype: str
    reduce_dtype: str
    gather_dtype: str
    """What all-gathers of shards send: the compute dtype, unless quantised."""
    post_forward_factor: int | None
    """Ranks that keep a shard after forward: None keeps the parameters unsharded."""
    size: ShardedSize = field(init=False)
    trained: ShardedSize = field(init=False)
    """Only the parameters that are trained."""
    padded: dict[str, int] = field(init=False)
    """Elements of each parameter by name, padding included."""
    unsharded: tuple[tuple[str, int], ...] = field(init=False)
    """Names and bytes of the buffers of the unsharded parameters."""
    state: str = "sharded"
    training_state: str = "idle"
    reduced_params: tuple[Param, ...] = field(init=False)
    """The parameters of the latest reduction; before it, all that are trained."""
    reduced: ShardedSize = field(init=False)
    """Only these."""
    gather: int | None = None
    """The number of the latest gathering, for its buffers."""
    all_gather_result: AllGatherResult | None = None
    reshard_after_forward_event: Event | None = None
    params: list[Buffer] = field(default_factory=list)
    post_forward_shard: Buffer | None = None
    post_forward_indices: list[int] = field(default_factory=list)
    accumulate_grad: Node | None = None
    incomplete_grads: Grads = field(default_factory=dict)
    """Gradients in autograd's hands: some use of the parameter is not differentiated yet."""
    grads: Grads = field(default_factory=dict)
    """The parameters' ``.grad``."""
    accumulated_grads: Grads = field(default_factory=dict)
    """Gradients kept without synchronisation, in the reduce dtype."""
    sharded_grad: Buffer | None = None
    has_cpu_grad: bool = False
    """With offloading: the sharded parameters' ``.grad`` is there, in host memory."""
    grad_offload_events: list[Op] = field(default_factory=list)
    """Copies of gradients to the host that the CPU thread has not waited for."""
    post_reduce_event: Event | None = None
    all_reduce_state: tuple[Buffer | None, Event] | None = None
    partial_reduce_output: Buffer | None = None

    def __post_init__(self) -> None:
        self.padded = {p.name: padded_numel(p, self.factor) for p in self.unit.params}
        self.size = per_parameter(self.unit.params, self.factor)
        trained = tuple(p for p in self.unit.params if p.requires_grad)
        self.trained = per_parameter(trained, self.factor)
        self.unsharded = tuple(
            (storage.name, nbytes(sum(self.padded[n] for n in storage.names), self.param_dtype))
            for storage in self.storages
        )
        self.reduced_params, self.reduced = trained, self.trained

    @property
    def all_gather_factor(self) -> int:
        """Ranks of the next all-gather: fewer after an int reshard."""
        if self.state == "sharded_post_forward" and self.post_forward_factor is not None:
            return self.post_forward_factor
        return self.factor

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return nbytes(self.size.padded, self.param_dtype)

    @property
    def all_gather_dtype(self) -> str:
        """What the next all-gather sends: shards kept after forward are not quantised."""
        return self.param_dtype if self.state == "sharded_post_forward" else self.gather_dtype

    def shard_numel(self, param: Param) -> int:
        """Elements of this rank's shard of ``param``, padding included."""
        return self.padded[param.name] // self.factor


class AllGather:
    """``foreach_all_gather`` and its copy-out."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.offload = runtime.offload

    def copy_in(self, group: ParamGroup) -> Buffer:
        """Cast the shard and copy it into its slot of the all-gather's output."""
        program = self.program
        shard = nbytes(group.size.padded // group.all_gather_factor, group.all_gather_dtype)
        inputs = self._inputs(group) if group.state == "sharded" else []
        group.gather = program.new_gather()
        output = program.malloc(
            "all_gather_output",
            nbytes(group.size.padded, group.all_gather_dtype),
            "all_gather",
            unsharded=group.gather,
        )
        self.runtime.copy("all_gather_copy_in", 2 * shard)
        for buffer in inputs:
            program.free(buffer)
        return output

    def _inputs(self, group: ParamGroup) -> list[Buffer]:
        """``_get_param_all_gather_inputs``: one fused cast, or from the host one by one."""
        if self.offload is not None:
            return [self._from_host(group, param, self.offload) for param in group.unit.params]
        if group.gather_dtype == group.orig_dtype:
            return []
        return [self._cast(group, group.size.shard)]

    def _from_host(self, group: ParamGroup, param: Param, offload: Offload) -> Buffer:
        numel = group.shard_numel(param)
        size = nbytes(numel, group.orig_dtype)
        device = self.program.malloc("device_shard", size, "all_gather")
        offload.h2d(size)
        if group.gather_dtype == group.orig_dtype:
            return device
        cast = self._cast(group, numel)
        self.program.free(device)
        return cast

    def _cast(self, group: ParamGroup, numel: int) -> Buffer:
        """``numel`` elements of the shard in the dtype that is gathered."""
        size = nbytes(numel, group.gather_dtype)
        name = "cast_shard" if group.gather_dtype == group.param_dtype else "quantize_shard"
        buffer = self.program.malloc(name, size, "all_gather")
        self.runtime.copy(name, nbytes(numel, group.orig_dtype) + size, cast=True)
        return buffer

    def gather(self, group: ParamGroup, by: str | None, trigger: str) -> None:
        """The collective; an int reshard has a mesh, hence a communicator, per unit."""
        private = group.all_gather_factor != group.factor
        self.runtime.collective(
            "all_gather",
            group.size.padded,
            group.all_gather_dtype,
            group=f"post_forward {group.all_gather_factor}" if private else "shard",
            communicator=f"post_forward {group.unit.name}" if private else "shard",
            group_size=group.all_gather_factor,
            trigger=trigger,
            by=by,
        )

    def copy_out(self, group: ParamGroup) -> None:
        """One buffer per unsharded parameter, filled by one fused copy, or restored.

        A single rank gathers nothing: its offloaded parameters come from the host here.
        """
        if self.offload is not None and group.factor == 1:
            for param in group.unit.params:
                source = self._from_host(group, param, self.offload)
                size = nbytes(group.padded[param.name], group.param_dtype)
                self._unsharded(group, param.name, size)
                self.runtime.copy("all_gather_copy_out", 2 * size)
                self.program.free(source)
            return
        for name, size in group.unsharded:
            self._unsharded(group, name, size)
        gathered = nbytes(group.size.padded, group.all_gather_dtype)
        restores = group.all_gather_dtype != group.param_dtype
        name = "dequantize_copy_out" if restores else "all_gather_copy_out"
        self.runtime.copy(name, gathered + group.unsharded_nbytes, cast=restores)

    def _unsharded(self, group: ParamGroup, name: str, size: int) -> None:
        buffer = self.program.malloc(name, size, "all_gather", unsharded=group.gather)
        group.params.append(buffer)


class Gradients:
    """Gradients from autograd to the sharded gradient: ``foreach_reduce`` and accumulation."""

    def __init__(self, runtime: Runtime, *, separate_group: bool) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.copy = runtime.copy
        self.offload = runtime.offload
        self.reduce_scatter_communicator = "reduce_scatter" if separate_group else "shard"
        self.hsdp = runtime.replicas > 1

    def allocate(self, group: ParamGroup, storages: Sequence[Storage]) -> None:
        """The parameters' gradients; those of a second use are added to the first."""
        for storage in storages:
            size = nbytes(storage.numel, group.param_dtype)
            new = self.program.malloc(f"grad {storage.name}", size, "gradients")
            self.runtime.add_gradient(group.incomplete_grads, storage.names, new)

    def accumulate(self, group: ParamGroup) -> None:
        """All uses are differentiated: the gradients are in ``.grad``."""
        with self.program.for_unit(group.unit.name):
            for names, grad in group.incomplete_grads.items():
                self.runtime.add_gradient(group.grads, names, grad)
        group.incomplete_grads.clear()

    def accumulate_unsharded(self, group: ParamGroup) -> None:
        """``accumulate_unsharded_grad_if_needed``: add to what earlier micro-batches kept."""
        if not group.accumulated_grads:
            return
        for names, grad in group.grads.items():
            self.runtime.add_gradient(group.accumulated_grads, names, grad)
        group.grads.clear()

    def keep_unsharded(self, group: ParamGroup) -> None:
        """``to_accumulated_grad_if_needed``: without synchronisation gradients are kept."""
        if group.reduce_dtype == group.param_dtype:
            return  # they stay in .grad, and the next backward adds to them in place
        for names, grad in group.grads.items():
            size = nbytes(grad.nbytes // DTYPE_BYTES[group.param_dtype], group.reduce_dtype)
            kept = self.program.malloc(f"accumulated {grad.name}", size, "gradients")
            self.copy("cast_gradient", grad.nbytes + size, cast=True)
            self.program.free(grad)
            group.accumulated_grads[names] = kept
        group.grads.clear()

    def reduce(self, group: ParamGroup, *, all_reduce: bool) -> tuple[ReduceScatterState, str]:
        """``foreach_reduce``; returns the input to retain, and the stream that it ends on."""
        program = self.program
        # Only parameters that were used have a gradient.
        used = {name for names in (*group.grads, *group.accumulated_grads) for name in names}
        if used != {param.name for param in group.reduced_params}:
            group.reduced_params = tuple(p for p in group.unit.params if p.name in used)
            group.reduced = per_parameter(group.reduced_params, group.factor)
        reduce_input = self._copy_in(group)
        program.wait_stream("reduce_scatter", COMPUTE)
        with program.on_stream("reduce_scatter"):
            size = nbytes(group.reduced.shard, group.reduce_dtype)
            output = program.malloc("reduce_scatter_output", size, "reduce_scatter")
            self._divide(group, group.reduced.padded)
            self._reduce_scatter(group)
            state = ReduceScatterState(reduce_input, program.record_event())
            stream = "reduce_scatter"
            if self.hsdp:
                self._add_partial(group, output)
                stream = "all_reduce"
                if not all_reduce:
                    group.partial_reduce_output = output
                    group.post_reduce_event = program.record_event()
                    return state, "reduce_scatter"
                self._all_reduce(group, output)
        with program.on_stream(stream):
            self._post_reduce(group, output)
            group.post_reduce_event = program.record_event()
        return state, stream

    def _copy_in(self, group: ParamGroup) -> Buffer:
        program = self.program
        size = nbytes(group.reduced.padded, group.reduce_dtype)
        buffer = program.malloc("reduce_scatter_input", size, "reduce_scatter")
        grads = [*group.grads.values(), *group.accumulated_grads.values()]
        read = sum(g.nbytes for g in grads)
        cast = group.reduce_dtype != group.param_dtype and bool(group.grads)
        self.copy("reduce_scatter_copy_in", read + size, cast=cast)
        for grad in grads:
            program.free(grad)
        group.grads.clear()
        group.accumulated_grads.clear()
        return buffer

    def _divide(self, group: ParamGroup, numel: int) -> None:
        # bf16 and fp32 use NCCL's AVG; fp16 is divided in kernels to keep it in range.
        if group.reduce_dtype == "float16":
            self.copy("divide_gradient", 2 * nbytes(numel, group.reduce_dtype))

    def _reduce_scatter(self, group: ParamGroup) -> None:
        if group.factor == 1:
            self.copy("copy_gradient", 2 * nbytes(group.reduced.padded, group.reduce_dtype))
            return
        self.runtime.collective(
            "reduce_scatter",
            group.reduced.padded,
            group.reduce_dtype,
            group="shard",
            communicator=self.reduce_scatter_communicator,
            group_size=group.factor,
        )

    def _add_partial(self, group: ParamGroup, output: Buffer) -> None:
        """HSDP: add what micro-batches without all-reduce have kept on this rank."""
        if group.partial_reduce_output is not None:
            self.copy("accumulate_partial_reduce_output", 3 * output.nbytes)
            self.program.free(group.partial_reduce_output)
            group.partial_reduce_output = None

    def _all_reduce(self, group: ParamGroup, output: Buffer) -> None:
        program = self.program
        program.wait_stream("all_reduce", "reduce_scatter")
        with program.on_stream("all_reduce"):
            self.runtime.collective(
                "all_reduce",
                group.reduced.shard,
                group.reduce_dtype,
                group="replicate",
                communicator="replicate",
                group_size=self.runtime.replicas,
            )
            # Held until the end of backward; without a cast it is the gradient itself.
            becomes_grad = group.reduce_dtype == group.orig_dtype and group.sharded_grad is None
            held = None if becomes_grad and self.offload is None else output
            group.all_reduce_state = (held, program.record_event())

    def _post_reduce(self, group: ParamGroup, output: Buffer) -> None:
        """Divide, cast to the original dtype, and add to the gradient of earlier micro-batches."""
        program = self.program
        self._divide(group, group.reduced.shard)
        held = group.all_reduce_state[0] if group.all_reduce_state is not None else None
        orig = nbytes(group.reduced.shard, group.orig_dtype)
        shard = output
        if group.reduce_dtype != group.orig_dtype:
            shard = program.malloc("sharded_grad", orig, "gradients")
            self.copy("cast_sharded_gradient", output.nbytes + orig, cast=True)
            if held is not output:
                program.free(output)
        if self.offload is not None:
            self._offload_grads(group, self.offload)
        elif group.sharded_grad is None:
            shard.category = "gradients"
            group.sharded_grad = shard
            return
        else:
            self.copy("accumulate_sharded_gradient", 3 * orig)
        if held is not shard:
            program.free(shard)

    def _offload_grads(self, group: ParamGroup, offload: Offload) -> None:
        """Copy each parameter's gradient to the host; the CPUs add it to one that is there.

        Such an addition needs the copy's result, so that the CPU thread waits for the copy.
        """
        for param in group.reduced_params:
            size = nbytes(group.shard_numel(param), group.orig_dtype)
            copy = offload.d2h(size, non_blocking=not group.has_cpu_grad)
            if group.has_cpu_grad:
                offload.run_and_wait("accumulate_gradient", self.runtime.costs.adding_on_cpu(size))
            elif offload.pin_memory:
                group.grad_offload_events.append(copy)
        group.has_cpu_grad = True

    def wait_for_offload(self, group: ParamGroup) -> None:
        """The CPU thread waits until the gradients are in host memory, one after the other."""
        for copy in group.grad_offload_events:
            self.program.synchronize((copy,), cause="offload")
        group.grad_offload_events.clear()
