"""ZeRO stages 1 and 2 (Rajbhandari et al., SC 2020, section 5) in DeepSpeed's manner.

Parameters are whole on every rank, the optimizer's state is cut over all of them. Gradients are
reduce-scattered in buckets: stage 2 does so during backward and drops what other ranks own, stage 1
keeps the whole gradient until backward ends. After the optimizer each rank gathers what the others
have updated.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import repeat
from typing import Any

from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import Zero, Zero1
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.buckets import Bucket, BucketedRuntime, Key, cut
from fsdpsim.workload import DTYPE_BYTES, Param, Unit, nbytes

REDUCE, GATHER = "reduce_scatter", "all_gather"

#: Buckets that may be under way: DeepSpeed has two buffers (``ipg_buffer``), and the CPU thread
#: waits before it fills one again (``stage_1_and_2.py``).
BUFFERS = 2


class ZeroRuntime(BucketedRuntime):
    """The hooks of ZeRO-1 and ZeRO-2."""

    buffer_wait = "gradient_buckets"
    """Why the CPU thread waits before it fills a bucket."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.scenario.fsdp, Zero)
        self.settings: Zero = self.scenario.fsdp
        self.keeps_gradients = isinstance(self.settings, Zero1)
        self.all_reduces = isinstance(self.settings, Zero1) and self.settings.all_reduce
        self.dtype = self.scenario.param_dtype or self._any_dtype()
        self.reduce_dtype = self.scenario.reduce_dtype or self.dtype
        cap = self.settings.reduce_bucket_size * DTYPE_BYTES[self.dtype]
        self.buckets = cut(self.workload.units, repeat(cap), self.dtype)
        self.bucket_of = {key: bucket for bucket in self.buckets for key in bucket.keys}
        self.shards: dict[Bucket, Buffer] = {}
        self.under_way: deque[Event] = deque()
        """Ends of the buckets' latest ways, oldest first."""
        self.is_last = True

    def _any_dtype(self) -> str:
        return next((p.dtype for u in self.workload.units for p in u.params), "float32")

    def _padded(self, numel: int) -> int:
        return math.ceil(numel / self.shard_factor) * self.shard_factor

    # ---- training loop

    def initialize(self) -> None:
        """Whole parameters in the compute dtype; beside low-precision ones a shard to update."""
        for unit in self.workload.units:
            with self.program.for_unit(unit.name):
                for param in unit.params:
                    size = nbytes(param.numel, self.dtype)
                    self.program.malloc(param.name, size, "parameters")
                if unit.params:
                    self._create_master(unit)

    def _create_master(self, unit: Unit) -> None:
        if unit.params[0].dtype != self.dtype:
            size = nbytes(self.local_numel(unit), unit.params[0].dtype)
            self.program.malloc("master_shard", size, "parameters")

    def local_numel(self, unit: Unit) -> int:
        """This rank's 1/N of the unit, padding included."""
        numel = sum(p.numel for p in unit.params if p.requires_grad)
        return self._padded(numel) // self.shard_factor

    def begin_microbatch(self, *, last: bool) -> None:
        """Stage 1 reduces in the last micro-batch only, stage 2 in each."""
        self.is_last = last
        for bucket in self.buckets:
            bucket.ready.clear()

    def pre_forward(self, unit: Unit, x: Node | None) -> Node | None:
        """The parameters that other ranks have updated must be here."""
        if unit.is_root:
            self.program.wait_stream(COMPUTE, GATHER)
        return x

    # ---- backward

    def grad_dtype(self, param: Param) -> str:
        """The compute dtype."""
        return self.dtype

    def accumulate_grad(self, key: Key, new: Buffer) -> None:
        """A later micro-batch of stage 1 adds to the first's; stage 2 reduces full buckets."""
        super().accumulate_grad(key, new)
        bucket = self.bucket_of[key]
        bucket.ready.add(key)
        if bucket.is_full and not self.keeps_gradients:
            self._reduce(bucket)

    def final_callback(self) -> None:
        """Reduce what is left, and let the optimizer wait for all reductions."""
        for bucket in self.buckets:
            unreduced = any(key in self.grads for key in bucket.keys)
            if unreduced and (self.is_last or not self.keeps_gradients):
                self._reduce(bucket)
        self.program.wait_stream(COMPUTE, REDUCE)

    def _reduce(self, bucket: Bucket) -> None:
        """Copy the gradients into a bucket and reduce it; keep this rank's part."""
        program, padded = self.program, self._padded(bucket.numel)
        if len(self.under_way) == BUFFERS:
            program.synchronize(self.under_way.popleft(), cause=self.buffer_wait)
        with program.for_unit(bucket.unit):
            size = nbytes(padded, self.reduce_dtype)
            buffer = program.malloc("reduce_bucket", size, "reduce_scatter")
            read = nbytes(bucket.numel, self.dtype)
            self.copy("copy_to_bucket", read + size, cast=self.dtype != self.reduce_dtype)
            program.wait_stream(REDUCE, COMPUTE)
            with program.on_stream(REDUCE):
                shard = self._shard(padded)
                self._reduce_scatter(buffer, padded)
                self._accumulate(bucket, shard)
            program.free(buffer, REDUCE)
            self._drop_gradients(bucket)
            self.under_way.append(self._bucket_done())

    def _bucket_done(self) -> Event:
        return self.program.record_event(REDUCE)

    def _reduce_scatter(self, buffer: Buffer, padded: int) -> None:
        if self.shard_factor == 1:
            self.copy("copy_gradient", 2 * buffer.nbytes)
            return
        self.collective(
            "all_reduce" if self.all_reduces else "reduce_scatter",
            padded,
            self.reduce_dtype,
            group="shard",
            communicator="shard",
            group_size=self.shard_factor,
        )

    def _shard(self, padded: int) -> Buffer:
        size = nbytes(padded // self.shard_factor, self.reduce_dtype)
        return self.program.malloc("sharded_grad", size, "gradients")

    def _accumulate(self, bucket: Bucket, shard: Buffer) -> None:
        if bucket in self.shards:
            self.copy("accumulate_sharded_gradient", 3 * shard.nbytes)
            self.program.free(shard)
        else:
            self.shards[bucket] = shard

    def _drop_gradients(self, bucket: Bucket) -> None:
        for key in bucket.keys:
            self.program.free(self.grads.pop(key, None))

    # ---- optimizer

    def optimizer_step(self) -> None:
        """Update this rank's part, then gather everyone's, bucket by bucket."""
        super().optimizer_step()
        for bucket in reversed(self.buckets):
            self._all_gather(bucket, COMPUTE)

    def _all_gather(self, bucket: Bucket, updated_on: str) -> None:
        """Gather the bucket's parameters, once stream ``updated_on`` has this rank's part."""
        if self.shard_factor == 1:
            return
        with self.program.for_unit(bucket.unit):
            self.program.wait_stream(GATHER, updated_on)
            with self.program.on_stream(GATHER):
                self.collective(
                    "all_gather",
                    self._padded(bucket.numel),
                    self.dtype,
                    group="shard",
                    communicator="shard",
                    group_size=self.shard_factor,
                    trigger="demand",
                    by=bucket.unit,
                )

    def zero_grad(self) -> None:
        """The sharded gradients are dropped."""
        for shard in self.shards.values():
            self.program.free(shard)
        self.shards.clear()
