"""``DistributedDataParallel`` as torch 2.13 runs it: bucketed all-reduce beside backward.

Reads beside ``torch/csrc/distributed/c10d/reducer.cpp``. Parameters and optimizer state are whole
on every rank; gradients are copied into buckets, filled in reverse order of the parameters, and a
full bucket is reduced on the process group's own stream.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

from fsdpsim.memory import Buffer
from fsdpsim.program import COMPUTE, Event
from fsdpsim.scenario.runtimes import Ddp
from fsdpsim.schedules.buckets import Bucket, BucketedRuntime, Key, cut
from fsdpsim.workload import Param, Unit, nbytes

#: ``kDefaultFirstBucketBytes``: a small first bucket starts the communication early.
FIRST_BUCKET_BYTES = 2**20
STREAM = "all_reduce"


class DdpRuntime(BucketedRuntime):
    """The reducer's hooks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.scenario.fsdp, Ddp)
        self.settings = self.scenario.fsdp
        caps = chain([FIRST_BUCKET_BYTES], repeat(self.settings.bucket_cap_mb * 2**20))
        self.buckets = cut(self.workload.units, caps, self.scenario.param_dtype)
        self.bucket_of = {key: bucket for bucket in self.buckets for key in bucket.keys}
        self.views: set[Key] = set()
        """Parameters whose ``.grad`` is a view of a bucket."""
        self.next_bucket = 0
        self.sync_gradients = True
        self.reduced: list[Event] = []

    def grad_dtype(self, param: Param) -> str:
        """Mixed precision's, or the parameter's own."""
        return self.scenario.param_dtype or param.dtype

    def initialize(self) -> None:
        """Whole parameters, with mixed precision a low-precision copy too, and the buckets."""
        program = self.program
        for unit in self.workload.units:
            with program.for_unit(unit.name):
                for param in unit.params:
                    size = nbytes(param.numel, param.dtype)
                    program.malloc(param.name, size, "parameters")
                    if self.grad_dtype(param) != param.dtype:
                        low = nbytes(param.numel, self.grad_dtype(param))
                        program.malloc(
                            f"{param.name} ({self.grad_dtype(param)})", low, "parameters"
                        )
        for i, bucket in enumerate(self.buckets):
            size = nbytes(bucket.numel, self.grad_dtype(bucket.params[0][1]))
            with program.for_unit(bucket.params[0][0]):
                bucket.buffer = program.malloc(f"bucket {i}", size, "reduce_scatter")

    def local_numels(self, unit: Unit) -> tuple[int, ...]:
        """Each parameter is a tensor of its own."""
        return tuple(p.numel for p in unit.params if p.requires_grad)

    def begin_microbatch(self, *, last: bool) -> None:
        """Enter ``no_sync()`` for all micro-batches but the last, if the scenario says so."""
        self.sync_gradients = last or not self.settings.no_sync
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.ready.clear()

    def accumulate_grad(self, key: Key, new: Buffer) -> None:
        """``AccumulateGrad`` and the reducer's hook: copy into the bucket, and reduce full ones.

        With ``gradient_as_bucket_view`` ``.grad`` is part of the bucket from then on, until it is
        dropped (``mark_variable_ready_dense``).
        """
        if key in self.views:
            self.copy("accumulate_gradient", 3 * new.nbytes)
            self.program.free(new)
        else:
            super().accumulate_grad(key, new)
        if self.sync_gradients:
            self._mark_ready(key, new.nbytes)

    def _mark_ready(self, key: Key, size: int) -> None:
        if key in self.views:
            self.copy("divide_gradient", 2 * size)
        else:
            self.copy("copy_to_bucket", 2 * size)
            if self.settings.gradient_as_bucket_view:
                self.program.free(self.grads.pop(key))
                self.views.add(key)
        self.bucket_of[key].ready.add(key)
        self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        """Buckets are reduced in order: a full one waits for those before it."""
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if not bucket.is_full:
                return
            self._all_reduce(bucket)
            self.next_bucket += 1

    def _all_reduce(self, bucket: Bucket) -> None:
        program = self.program
        param = bucket.params[-1][1]
        program.wait_stream(STREAM, COMPUTE)
        with program.for_unit(bucket.unit), program.on_stream(STREAM):
            self.collective(
                "all_reduce",
                bucket.numel,
                self.grad_dtype(param),
                group="replicate",
                communicator="replicate",
                group_size=self.replicas,
            )
            self.reduced.append(program.record_event())

    def final_callback(self) -> None:
        """``finalize_backward``: wait for the reductions and copy the averages back.

        Buckets with parameters that no call has used are reduced here (``find_unused_parameters``).
        """
        if self.sync_gradients:
            for bucket in self.buckets[self.next_bucket :]:
                self._all_reduce(bucket)
            self.next_bucket = len(self.buckets)
        for event, bucket in zip(self.reduced, self.buckets, strict=False):
            self.program.wait_event(COMPUTE, event)
            if not self.settings.gradient_as_bucket_view:
                size = nbytes(bucket.numel, self.grad_dtype(bucket.params[0][1]))
                with self.program.for_unit(bucket.params[0][0]):
                    self.copy("copy_from_bucket", 2 * size)
        self.reduced.clear()

    def zero_grad(self) -> None:
        """``set_to_none=True``: gradients are dropped; buckets stay."""
        for grad in self.grads.values():
            self.program.free(grad)
        self.grads.clear()
        self.views.clear()
