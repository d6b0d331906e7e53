"""How FSDP1's flat parameter comes to the GPU whole: from the host, cast, quantised, gathered.

Reads beside ``FlatParamHandle`` of ``torch/distributed/fsdp/_flat_param.py``: methods carry the
names of its methods. ZeRO++'s quantised all-gather (``all_gather_dtype``) is not torch's.
"""

from __future__ import annotations

from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE
from fsdpsim.schedules.flat_param import FlatParamHandle
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.workload import nbytes


class FlatUnshard:
    """What happens to flat parameters on the streams ``pre_unshard`` and ``unshard``."""

    def __init__(self, runtime: Runtime, *, sharded: bool) -> None:
        self.runtime = runtime
        self.program = runtime.program
        self.offload = runtime.offload
        self.sharded = sharded

    def initialize(self, handle: FlatParamHandle) -> None:
        """The sharded flat parameter; in host memory it has a gradient beside it for good."""
        size = nbytes(handle.size.shard, handle.orig_dtype)
        if self.offload is None:
            self.program.malloc("flat_param", size, "parameters")
        else:
            self.offload.keep("parameters", size)
            self.offload.keep("gradients", size)

    def pre_unshard(self, handle: FlatParamHandle) -> bool:
        """Make the all-gather's input (NO_SHARD: the whole parameter, for use), if need be.

        An offloaded shard is copied from the host also where there is nothing to gather.
        """
        if handle.is_unsharded and not (self.offload is not None and self.sharded):
            return False
        if self.offload is None and not handle.casts_shard:
            return False
        with self.program.on_stream("pre_unshard"):
            buffer = self._on_device(handle)
        if self.sharded:
            handle.mp_shard = buffer
        else:
            handle.full_param = buffer
            handle.is_unsharded = True
        return True

    def _on_device(self, handle: FlatParamHandle) -> Buffer | None:
        """``_use_low_precision_shard``, or ``flat_param_to``: the shard as it is gathered."""
        program, shard = self.program, handle.size.shard
        orig = nbytes(shard, handle.orig_dtype)
        cast = device = None
        if handle.casts_shard:
            cast = program.malloc("mp_shard", nbytes(shard, handle.gather_dtype), "all_gather")
        if self.offload is not None:
            device = program.malloc("device_shard", orig, "all_gather")
            self.offload.h2d(orig)
        if cast is None:
            return device
        name = "quantize_shard" if handle.quantised else "cast_shard"
        self.runtime.copy(name, orig + cast.nbytes, cast=True)
        program.free(device)
        return cast

    def unshard(self, handle: FlatParamHandle, by: str, trigger: str) -> None:
        """Gather, unless the unit is unsharded already."""
        gathers = self.sharded and not handle.is_unsharded
        handle.is_unsharded = True
        if gathers:
            self._all_gather(handle, by, trigger)
        # The shard was the all-gather's input; a copy without a cast is dropped by assignment.
        recorded = ("unshard",) if gathers or handle.casts_shard else ()
        self.program.free(handle.mp_shard, *recorded)
        handle.mp_shard = None

    def _all_gather(self, handle: FlatParamHandle, by: str, trigger: str) -> None:
        program, size = self.program, handle.size
        quantised = None
        if handle.quantised:
            whole = nbytes(size.padded, handle.gather_dtype)
            quantised = program.malloc("quantized_param", whole, "all_gather")
        handle.full_param = program.malloc(
            "full_param",
            handle.unsharded_nbytes,
            "all_gather",
            unsharded=program.new_gather(),
        )
        self.runtime.collective(
            "all_gather",
            size.padded,
            handle.gather_dtype,
            group="shard",
            communicator="shard",
            group_size=size.factor,
            trigger=trigger,
            by=by,
        )
        if quantised is not None:
            moved = quantised.nbytes + handle.unsharded_nbytes
            self.runtime.copy("dequantize_param", moved, cast=True)
            program.free(quantised)

    def free(self, handle: FlatParamHandle) -> None:
        """``_free_unsharded_flat_param``, or NO_SHARD's copy of the whole parameter.

        Autograd saves views of a copy without a cast, whose storage therefore lives on to backward;
        of all others the storage itself is freed.
        """
        if self.sharded or handle.low_precision:
            self.program.free(handle.full_param, COMPUTE)
        elif handle.training_state == "forward" and self.runtime.grad_enabled:
            handle.saved_params.append(handle.full_param)
        else:
            self.program.free(handle.full_param)
            self.free_saved(handle)
        handle.full_param, handle.is_unsharded = None, False

    def free_saved(self, handle: FlatParamHandle) -> None:
        """Backward is through: autograd drops what it has saved."""
        for buffer in handle.saved_params:
            self.program.free(buffer)
        handle.saved_params.clear()
