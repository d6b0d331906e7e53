"""ZeRO-Offload (Ren et al., ATC 2021, arXiv 2101.06840, section 4), on one GPU or many.

The GPU keeps the parameters in the compute dtype. Gradients are reduced as in ZeRO-2 and go to the
host bucket by bucket during backward; the CPUs update the fp32 parameters; the new parameters come
back, each bucket while the CPUs update the next. With several GPUs each updates its own part and
all gather the whole.

[Note: Delayed parameter update] The CPUs work on the gradients of step i during forward and
backward of step i + 1, so step i + 2 is the first to use the result. A bucket comes back as soon as
it is updated and backward has used the old parameters for the last time. This asks for gradients of
two steps in host memory.
"""

from __future__ import annotations

from typing import Any

from fsdpsim.engine import CPU, Op
from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import ZeroOffload
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.buckets import Bucket
from fsdpsim.schedules.offload import Offload
from fsdpsim.schedules.zero import REDUCE, ZeroRuntime
from fsdpsim.workload import Unit, nbytes

#: Streams of the two directions: each keeps one of the GPU's copy engines busy.
D2H, H2D = "d2h", "h2d"


class ZeroOffloadRuntime(ZeroRuntime):
    """The hooks of ZeRO-Offload."""

    offload: Offload
    buffer_wait = "offload"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.settings, ZeroOffload)
        self.delayed = self.settings.delayed_parameter_update
        self.numel = sum(bucket.numel for bucket in self.buckets)
        self.on_cpu: set[Bucket] = set()
        """Buckets of which earlier micro-batches have left gradients in host memory."""
        self.has_delayed_gradients = False
        self.updates: dict[Bucket, Op] = {}
        """The CPUs' updates whose result is not on the GPU yet."""

    def _create_master(self, unit: Unit) -> None:
        """In host memory: parameters of both dtypes and gradients of this rank's part."""
        numel = self.local_numel(unit)
        both = nbytes(numel, unit.params[0].dtype) + nbytes(numel, self.dtype)
        self.offload.keep("parameters", both)
        steps = 2 if self.delayed else 1
        self.offload.keep("gradients", steps * nbytes(numel, self.reduce_dtype))

    def begin_microbatch(self, *, last: bool) -> None:
        """Delayed: the CPUs begin with the gradients of the step before."""
        super().begin_microbatch(last=last)
        if self.has_delayed_gradients:
            self._begin_delayed_updates()

    def _begin_delayed_updates(self) -> None:
        """In the order in which backward will be through with the old parameters."""
        self.has_delayed_gradients = False
        self.program.wait_stream(CPU, D2H)
        self.program.wait_stream(CPU, H2D)
        for bucket in self.buckets:
            with self.program.for_unit(bucket.unit):
                update = self.offload.run("optimizer_step", self._update_seconds(bucket))
                self.updates[bucket] = update

    def _update_seconds(self, bucket: Bucket) -> float:
        """The bucket's share of the whole step."""
        step = self.costs.on_cpu(self.optimizer_kernels, fused=self.optimizer.fused)
        return step * bucket.numel / self.numel if self.numel else 0.0

    def pre_forward(self, unit: Unit, x: Node | None) -> Node | None:
        """All new parameters must be here."""
        if unit.is_root:
            self.program.wait_stream(COMPUTE, H2D)
        return super().pre_forward(unit, x)

    # ---- gradients go down

    def _reduce(self, bucket: Bucket) -> None:
        """The gradients' way down; delayed: new parameters come up where the old ones were."""
        super()._reduce(bucket)
        if self.is_last and bucket in self.updates:
            self.program.wait_event(H2D, (self.updates.pop(bucket),))
            self._upload(bucket)

    def _accumulate(self, bucket: Bucket, shard: Buffer) -> None:
        """Copy to the host, added on the GPU to what earlier micro-batches have left there.

        DeepSpeed does so too (``async_accumulate_grad_in_cpu_via_gpu`` of ``stage_1_and_2.py``).
        """
        program = self.program
        if bucket in self.on_cpu:
            self._add_from_host(shard)
        self.on_cpu.add(bucket)
        program.wait_stream(D2H, REDUCE)
        with program.on_stream(D2H):
            self.offload.d2h(shard.nbytes)
        program.free(shard, D2H)

    def _bucket_done(self) -> Event:
        return self.program.record_event(D2H)

    def _add_from_host(self, shard: Buffer) -> None:
        program = self.program
        program.wait_stream(H2D, D2H)
        with program.on_stream(H2D):
            earlier = program.malloc("accumulated_grad", shard.nbytes, "gradients")
            self.offload.h2d(shard.nbytes)
        program.wait_stream(REDUCE, H2D)
        self.copy("accumulate_sharded_gradient", 3 * shard.nbytes)
        program.free(earlier, REDUCE)

    # ---- parameters come up

    def optimizer_step(self) -> None:
        """The CPUs update bucket by bucket; delayed: they will do so in the next step."""
        self.create_optimizer_state()
        self.on_cpu.clear()
        if self.delayed:
            self.has_delayed_gradients = True
            return
        # The gradients' norm, or a single infinity among them, decides about all parameters.
        self.program.synchronize(self.program.record_event(D2H), cause="offload")
        for bucket in reversed(self.buckets):
            with self.program.for_unit(bucket.unit):
                self.offload.run_and_wait("optimizer_step", self._update_seconds(bucket))
            self._upload(bucket)

    def _upload(self, bucket: Bucket) -> None:
        """Overwrite the parameters on the GPU, which must have no more use for the old ones."""
        program = self.program
        with program.for_unit(bucket.unit):
            program.wait_stream(H2D, COMPUTE)
            with program.on_stream(H2D):
                self.offload.h2d(
                    nbytes(self._padded(bucket.numel) // self.shard_factor, self.dtype)
                )
        self._all_gather(bucket, H2D)
