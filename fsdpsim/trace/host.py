"""The CPU thread of a trace: launches, waits, driver calls and allocations in host order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from fsdpsim.allocator import CudaFree, CudaMalloc, Map, SynchronizeEvents, Unmap
from fsdpsim.engine import CPU, HostWait, HostWork, Op, Step
from fsdpsim.memory import Free, Malloc, PaidCall
from fsdpsim.program import TRANSFERS, IterationStart, Mark
from fsdpsim.result import Result
from fsdpsim.trace import device
from fsdpsim.trace.collectives import NAMES, ProcessGroup
from fsdpsim.trace.frames import Frames
from fsdpsim.trace.lanes import Event, Lanes, nanoseconds

#: Callback numbers of CUDA's runtime functions (``cupti_runtime_cbid.h``).
CALLBACK_IDS = {
    "cudaMalloc": 20,
    "cudaFree": 22,
    "cudaMemcpyAsync": 41,
    "cudaEventRecord": 135,
    "cudaEventSynchronize": 137,
    "cudaStreamWaitEvent": 147,
    "cudaDeviceSynchronize": 165,
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
}
#: What the allocator's driver calls are named; pages are mapped through the driver's API.
DRIVER_CALLS: dict[type, tuple[str, str]] = {
    CudaMalloc: ("cuda_runtime", "cudaMalloc"),
    CudaFree: ("cuda_runtime", "cudaFree"),
    SynchronizeEvents: ("cuda_runtime", "cudaEventSynchronize"),
    Map: ("cuda_driver", "cuMemMap"),
    Unmap: ("cuda_driver", "cuMemUnmap"),
}


class HostThread:
    """Walks the program in host order and writes both sides of everything that it launches.

    ``now`` is the host time up to which the thread is written, in nanoseconds.
    """

    def __init__(self, result: Result, lanes: Lanes, groups: dict[str, ProcessGroup]) -> None:
        self.result = result
        self.lanes = lanes
        self.groups = groups
        self.events: list[Event] = []
        self.now = 0
        self._frames = Frames(result, lanes, self.events.append)
        self._correlations, self._externals, self._event_ids = count(1), count(1), count(1)
        self._records: dict[Op, tuple[int, int]] = {}
        """Op -> (correlation, event) of the event recorded behind it."""
        self._waited_for = waited_for(result.program.steps)
        self._samples = 0
        self._paid = 0

    def run(self) -> list[Event]:
        """All events of the thread, and of the GPU what the thread launched."""
        for index, step in enumerate(self.result.program.steps):
            if not self._reached(step):
                break  # memory ran out before
            if isinstance(step, (Mark, IterationStart)):
                self.now = nanoseconds(step.time or 0.0)
            self._frames.before(index, step, self.now)
            if isinstance(step, Op) and step.stream == CPU:
                self._work_beside(step)
            elif isinstance(step, Op):
                self._launch(step)
            elif isinstance(step, Malloc):
                self._allocate(step)
            elif isinstance(step, Free):
                self._memory_instant()
            elif isinstance(step, HostWait):
                self._wait(step)
            elif isinstance(step, HostWork):
                self._work(step)
            self._frames.after(step, self.now)
        else:
            self._synchronize()
        self._frames.close_all(self.now)
        return self.events

    def _reached(self, step: Step) -> bool:
        """Whether the CPU got to ``step``; an allocation that failed counts."""
        if isinstance(step, Op):
            return step.issued is not None
        if isinstance(step, (Mark, IterationStart)):
            return step.time is not None
        if isinstance(step, (HostWait, HostWork)):
            return step.end is not None
        if isinstance(step, Malloc):
            return step.buffer.allocated_at is not None
        return not isinstance(step, Free) or step.buffer.freed_at is not None

    # ---- launches

    def _launch(self, op: Op) -> None:
        """The op on the CPU, the calls inside it, and the kernel.

        The launch cost is the CPU's time for all of it, so the calls share it in equal parts, the
        first being torch's own. An event that something waits for is recorded behind the launch.
        """
        assert op.issued is not None
        start, end = self.now, nanoseconds(op.issued)
        external = next(self._externals)
        self._op_slices(op, start, end, external)
        record = op in self._waited_for
        deps = [dep for dep in op.deps if dep.stream != CPU]  # no event: the CPUs launch it then
        bounds = _shares(start, end, len(deps) + 1 + record)
        waits = {}
        for i, dep in enumerate(deps):
            waits[dep] = self._call("cudaStreamWaitEvent", bounds[i], bounds[i + 1])
        at = bounds[len(deps)]
        launch = self._call(_launch_call(op), at, bounds[len(deps) + 1], external=external)
        if op.finished:
            self._kernel(op, waits, launch, at, external)
        if record:
            correlation = self._call("cudaEventRecord", bounds[-2], bounds[-1])
            self._records[op] = (correlation, next(self._event_ids))
        self.now = end

    def _op_slices(self, op: Op, start: int, end: int, external: int) -> None:
        args = self._op_args(external, op.unit) | {"phase": op.phase}
        if op.collective is None:
            name = "aten::copy_" if op.kind in TRANSFERS else op.name
            self.events.append(self.lanes.on_host("cpu_op", name, start, end, args))
            return
        names = NAMES[op.collective.kind]
        self.events.append(self.lanes.on_host("cpu_op", names.op, start, end, args))
        self.events.append(
            self.lanes.on_host("user_annotation", names.annotation, start, end, {"unit": op.unit})
        )

    @staticmethod
    def _op_args(external: int, unit: str) -> dict[str, Any]:
        return {"External id": external, "Ev Idx": external - 1, "unit": unit}

    def _kernel(
        self, op: Op, waits: dict[Op, int], launch: int, launched: int, external: int
    ) -> None:
        """The kernel, and the wait that released it.

        Of several waits only the last to end is shown on the stream: HolisticTraceAnalysis follows
        one per kernel.
        """
        if waits:
            last = max(waits, key=lambda dep: dep.end or 0.0)
            record, event_id = self._records[last]
            self.events.append(
                device.wait_event(op, last, self.lanes, waits[last], record, event_id)
            )
        shown = device.kernel(op, self.lanes, self.groups, launch, external)
        assert op.start is not None
        begins = nanoseconds(op.start)
        sent, received = self.lanes.flow(launch, launched, shown["tid"], begins)
        self.events += (sent, shown, received)

    def _call(
        self,
        name: str,
        start: int,
        end: int,
        *,
        category: str = "cuda_runtime",
        external: int | None = None,
    ) -> int:
        """A call to CUDA; returns its correlation."""
        correlation = next(self._correlations)
        args: dict[str, Any] = {} if external is None else {"External id": external}
        if name in CALLBACK_IDS:
            args["cbid"] = CALLBACK_IDS[name]
        args["correlation"] = correlation
        self.events.append(self.lanes.on_host(category, name, start, end, args))
        return correlation

    # ---- waits and work of the CPU

    def _wait(self, wait: HostWait) -> None:
        """``cudaEventSynchronize``, bound to the op that ended last."""
        assert wait.end is not None
        start, self.now = self.now, nanoseconds(wait.end)
        if not wait.ops or wait.ops[-1].stream == CPU:
            return  # the CPU thread does that work itself
        label = self._frames.labels.rate_limiter
        if label is not None and wait.cause == "rate_limiter":
            args = {"unit": wait.unit}
            self.events.append(self.lanes.on_host("user_annotation", label, start, self.now, args))
        correlation = self._call("cudaEventSynchronize", start, self.now)
        last = max(wait.ops, key=lambda op: op.end or 0.0)
        waited = device.waited_for(last, self.lanes, *self._records[last])
        self.events.append(
            device.host_sync("Event Sync", self.lanes, start, self.now, correlation, **waited)
        )

    def _work(self, work: HostWork) -> None:
        assert work.end is not None
        start, self.now = self.now, nanoseconds(work.end)
        args = self._op_args(next(self._externals), work.unit)
        name = f"{work.cause} (CPU)"
        self.events.append(self.lanes.on_host("cpu_op", name, start, self.now, args))

    def _work_beside(self, op: Op) -> None:
        if op.start is not None and op.end is not None:
            args = self._op_args(next(self._externals), op.unit) | {"phase": op.phase}
            start, end = nanoseconds(op.start), nanoseconds(op.end)
            name = f"{op.name} (CPU)"
            self.events.append(self.lanes.on_workers("cpu_op", name, start, end, args))

    def _synchronize(self) -> None:
        """The profiler stops when the device is idle."""
        ends = [op.end for op in self.result.ops if op.end is not None]
        if not ends:
            return
        start, self.now = self.now, max(self.now, nanoseconds(max(ends)))
        correlation = self._call("cudaDeviceSynchronize", start, self.now)
        self.events.append(
            device.host_sync("Context Sync", self.lanes, start, self.now, correlation)
        )

    # ---- memory

    def _allocate(self, step: Malloc) -> None:
        """The driver calls that the CPU paid for, and the allocation, unless it failed."""
        paid = self.result.memory.paid_calls
        while self._paid < len(paid) and paid[self._paid].buffer is step.buffer:
            self._driver_call(paid[self._paid])
            self._paid += 1
        if step.buffer.block is not None:
            self._memory_instant()

    def _driver_call(self, paid: PaidCall) -> None:
        end = nanoseconds(paid.end)
        if end > self.now:
            category, name = DRIVER_CALLS[type(paid.call)]
            self._call(name, self.now, end, category=category)
            self.now = end

    def _memory_instant(self) -> None:
        samples, index = self.result.memory.samples, self._samples
        before = samples[index - 1].allocated if index else 0
        nbytes = samples[index].allocated - before
        if nbytes:  # a tensor without elements has no memory
            self.events.append(device.memory_instant(samples[index], nbytes, self.lanes, index))
        self._samples += 1


def _launch_call(op: Op) -> str:
    if op.kind in TRANSFERS:
        return "cudaMemcpyAsync"
    return "cudaLaunchKernel" if op.collective is None else "cudaLaunchKernelExC"


def _shares(start: int, end: int, calls: int) -> list[int]:
    """Where each of ``calls`` begins, and the end: whole microseconds long where there is room."""
    share = (end - start) // (calls + 1)
    if share >= 1000:
        share -= share % 1000
    return [*(end - share * left for left in range(calls, 0, -1)), end]


def waited_for(steps: Iterable[Step]) -> set[Op]:
    """The ops behind which an event is recorded: another stream or the CPU waits for it."""
    found: set[Op] = set()
    for step in steps:
        if isinstance(step, Op):
            found.update(step.deps)
        elif isinstance(step, HostWait):
            found.update(step.ops)
    return found
