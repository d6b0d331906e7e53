"""FSDP1's flat parameter of one unit: its state, and how its gradient is reduced.

Reads beside ``torch/distributed/fsdp/_flat_param.py`` and the ``_reduce_grad`` functions of
``_runtime_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdpsim.memory import Buffer
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.schedules.storages import Storage
from fsdpsim.sharding import ShardedSize
from fsdpsim.workload import Unit, nbytes


@dataclass(slots=True, eq=False)
class FlatParamHandle:
    """State of one unit's flat parameter; the flags are ``FlatParamHandle``'s own."""

    unit: Unit
    size: ShardedSize
    orig_dtype: str
    param_dtype: str
    reduce_dtype: str
    gather_dtype: str
    """What all-gathers send: the compute dtype, unless quantised."""
    prefetched: bool = False
    needs_pre_forward_unshard: bool = False
    needs_pre_backward_unshard: bool = False
    ran_pre_backward_hook: bool = False
    pre_forward_order_index: int | None = None
    post_forward_index: int | None = None
    training_state: str = "idle"
    is_unsharded: bool = False
    points_to_unsharded: bool = False
    """The flat parameter's data is the unsharded one: no reshard since the last unshard."""
    reshard_only_registered: bool = False
    full_param: Buffer | None = None
    mp_shard: Buffer | None = None
    """The all-gather's input, where it is not the shard itself."""
    saved_params: list[Buffer | None] = field(default_factory=list)
    """Copies of the whole parameter that autograd holds from forward to backward."""
    views: Node | None = None
    accumulate_grad: Node | None = None
    param_grads: dict[object, Buffer] = field(default_factory=dict)
    """Gradients that autograd has for the views, by parameter if several parts use it."""
    grad: Buffer | None = None
    """The unsharded flat gradient, ``flat_param.grad``."""
    saved_grad_shard: Buffer | None = None
    saved_grad_streams: tuple[str, ...] = ()
    """Streams that have been recorded on it."""

    @property
    def low_precision(self) -> bool:
        """Whether the compute dtype is another than the original one."""
        return self.param_dtype != self.orig_dtype

    @property
    def casts_shard(self) -> bool:
        """Whether a cast precedes each all-gather."""
        return self.gather_dtype != self.orig_dtype

    @property
    def quantised(self) -> bool:
        """Whether what is gathered must be restored for compute."""
        return self.gather_dtype != self.param_dtype

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the gathered flat parameter, padding included."""
        return nbytes(self.size.padded, self.param_dtype)


class FlatGradients:
    """What happens to flat gradients, on whatever stream is current in ``runtime``."""

    def __init__(self, runtime: Runtime, *, sharded: bool, hybrid: bool) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.copy = runtime.copy
        self.offload = runtime.offload
        self.sharded = sharded
        self.hybrid = hybrid
        self.predivide, self.postdivide = divide_factors(runtime.shard_factor * runtime.replicas)

    def allocate(self, handle: FlatParamHandle, storages: Sequence[Storage]) -> None:
        """The parameters' gradients, before they become the flat one."""
        for storage in storages:
            size = nbytes(storage.numel, handle.param_dtype)
            grad = self.program.malloc(f"grad {storage.name}", size, "gradients")
            key = storage.names if storage.is_shared else len(handle.param_grads)
            self.runtime.add_gradient(handle.param_grads, key, grad)

    def concatenate(self, handle: FlatParamHandle) -> None:
        """The views' backward: the parameters' gradients become one flat gradient."""
        program, size = self.program, nbytes(handle.size.numel, handle.param_dtype)
        with program.for_unit(handle.unit.name):
            flat = program.malloc("flat_grad", size, "gradients")
            self.copy("concatenate_gradients", 2 * size)
            for grad in handle.param_grads.values():
                program.free(grad)
            handle.param_grads.clear()
            if handle.grad is None:
                handle.grad = flat
            else:
                self.copy("accumulate_gradient", 3 * size)
                program.free(flat)

    def reduce(self, handle: FlatParamHandle) -> None:
        """``_reduce_grad``: reduce-scatter here, the hybrid all-reduce on a stream of its own."""
        program, size = self.program, handle.size
        cast = self._cast_to_reduce_dtype(handle)
        padded = self._pad(handle)
        shard_nbytes = nbytes(size.shard, handle.reduce_dtype)
        shard = program.malloc("sharded_grad", shard_nbytes, "reduce_scatter")
        self._divide(handle, size.padded, self.predivide)
        self.runtime.collective(
            "reduce_scatter",
            size.padded,
            handle.reduce_dtype,
            group="shard",
            communicator="shard",
            group_size=size.factor,
        )
        if self.hybrid:
            program.wait_stream("all_reduce", "post_backward")
            with program.on_stream("all_reduce"):
                self._all_reduce(handle, size.shard)
                self._accumulate_sharded(handle, shard, "all_reduce")
        else:
            self._accumulate_sharded(handle, shard)
        program.free(cast)
        program.free(padded)
        # Autograd's tensor is unusable until all that is on post_backward now has run.
        program.free(handle.grad, "post_backward")
        handle.grad = None

    def reduce_no_shard(self, handle: FlatParamHandle) -> None:
        """``_reduce_grad_no_shard``: all-reduce the whole gradient, which then stays."""
        program, numel, flat = self.program, handle.size.numel, handle.grad
        reduced = self._cast_to_reduce_dtype(handle) or flat
        self._divide(handle, numel, self.predivide)
        self._all_reduce(handle, numel)
        self._divide(handle, numel, self.postdivide)
        if handle.reduce_dtype != handle.orig_dtype:
            size = nbytes(numel, handle.orig_dtype)
            final = program.malloc("grad", size, "gradients")
            self.copy("cast_gradient", nbytes(numel, handle.reduce_dtype) + size, cast=True)
            if reduced is not flat:
                program.free(reduced)
            reduced = final
        if reduced is not flat:
            program.free(flat, "post_backward")
        handle.grad = reduced
        if self.offload is not None:
            self.offload.d2h(nbytes(numel, handle.orig_dtype), non_blocking=False)

    def _cast_to_reduce_dtype(self, handle: FlatParamHandle) -> Buffer | None:
        """The cast gradient, or None when the flat gradient has the reduce dtype already."""
        if handle.reduce_dtype == handle.param_dtype:
            return None
        numel = handle.size.numel
        size = nbytes(numel, handle.reduce_dtype)
        buffer = self.program.malloc("reduce_dtype_grad", size, "reduce_scatter")
        self.copy("cast_gradient", nbytes(numel, handle.param_dtype) + size, cast=True)
        return buffer

    def _pad(self, handle: FlatParamHandle) -> Buffer | None:
        size = handle.size
        if size.padded == size.numel:
            return None
        padded = nbytes(size.padded, handle.reduce_dtype)
        buffer = self.program.malloc("padded_grad", padded, "reduce_scatter")
        self.copy("pad_gradient", nbytes(size.numel, handle.reduce_dtype) + padded)
        return buffer

    def _divide(self, handle: FlatParamHandle, numel: int, factor: int) -> None:
        if factor > 1:
            self.copy("divide_gradient", 2 * nbytes(numel, handle.reduce_dtype))

    def _all_reduce(self, handle: FlatParamHandle, numel: int) -> None:
        self.runtime.collective(
            "all_reduce",
            numel,
            handle.reduce_dtype,
            group="replicate",
            # NO_SHARD reduces over the default process group, the hybrid strategies over their own.
            communicator="replicate" if self.sharded else "shard",
            group_size=self.runtime.replicas,
        )

    def _accumulate_sharded(
        self, handle: FlatParamHandle, shard: Buffer, *record_streams: str
    ) -> None:
        """Divide, cast to the original dtype, and add to the gradient of earlier micro-batches."""
        program, numel = self.program, handle.size.shard
        self._divide(handle, numel, self.postdivide)
        orig = nbytes(numel, handle.orig_dtype)
        if handle.reduce_dtype != handle.orig_dtype:
            cast = program.malloc("sharded_grad", orig, "gradients")
            self.copy("cast_sharded_gradient", shard.nbytes + orig, cast=True)
            program.free(shard, *record_streams)
            shard, record_streams = cast, ()
        shard.category = "gradients"
        if handle.saved_grad_shard is None:
            handle.saved_grad_shard, handle.saved_grad_streams = shard, record_streams
        else:
            self.copy("accumulate_sharded_gradient", 3 * orig)
            program.free(shard, *record_streams)
        if self.offload is not None:
            self.offload.d2h(orig)

    def prepare_gradient_for_optim(self, handle: FlatParamHandle) -> None:
        """With offloading ``.grad`` is the copy in host memory: the one on the GPU is dropped."""
        if self.offload is None:
            return
        streams = ("post_backward", "all_reduce") if self.hybrid else ("post_backward",)
        self.program.free(handle.saved_grad_shard, *streams)
        handle.saved_grad_shard = None
        if not self.sharded:
            self.program.free(handle.grad, *streams)
            handle.grad = None


def divide_factors(world: int) -> tuple[int, int]:
    """(pre, post) division around the reduction: torch's split, which keeps fp16 in range."""
    pre = 1
    while world % pre == 0 and world / pre > pre:
        pre *= 2
    return pre, world // pre
