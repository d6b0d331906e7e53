"""What a simulation produced: ops with their times, host stalls, memory samples; its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from operator import attrgetter

from fsdpsim.collectives import bytes_sent_per_rank
from fsdpsim.costs import Costs
from fsdpsim.engine import HostWait, HostWork, Op
from fsdpsim.intervals import Interval, clip, subtract, total, union
from fsdpsim.memory import Buffer, GpuMemory, Sample, Stall
from fsdpsim.program import TRANSFERS, IterationStart, Mark, Program, is_kernel
from fsdpsim.scenario import Scenario
from fsdpsim.workload import Workload

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSummary:
    """The copies of one direction, ``h2d`` or ``d2h``, in the last iteration; times in seconds."""

    count: int
    bytes_copied: int
    time_s: float
    exposed_s: float
    """Time in which one ran and no compute kernel did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSummary:
    """One kind of collective in the last iteration; times in seconds."""

    count: int
    bytes_sent_per_rank: float
    bytes_sent_between_nodes_per_rank: float
    """Of these, what belongs to groups that span nodes: the traffic that can load the network."""
    time_s: float
    exposed_s: float
    """Time in which it ran and no compute kernel did."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One simulated scenario. Times are seconds from the start, sizes bytes.

    Figures of "the step" are those of the last iteration: one optimizer step in steady state, from
    the end of all work before it to the end of its own.
    """

    scenario: Scenario
    workload: Workload
    costs: Costs
    program: Program
    """What rank 0 ran, or the rank that ran out of memory."""
    memory: GpuMemory
    ranks: tuple[Program, ...] = ()
    """What every simulated rank ran; with more than one, ranks differ by [noise]."""
    memories: tuple[GpuMemory, ...] = ()
    """The memory of every simulated rank."""

    def of_rank(self, number: int) -> Result:
        """The same simulation as rank ``number`` saw it."""
        return replace(self, program=self.ranks[number], memory=self.memories[number])

    @cached_property
    def ops(self) -> list[Op]:
        """All ops that have run, in issue order (all of them, unless memory ran out)."""
        return [s for s in self.program.steps if type(s) is Op and s.finished]

    @cached_property
    def step_ops(self) -> list[Op]:
        """Those of the last iteration; all others have ended when the step begins."""
        last = self.scenario.iterations - 1
        return [op for op in self.ops if op.iteration == last]

    @cached_property
    def marks(self) -> list[Mark]:
        """Hooks and compute marks in host order."""
        return [s for s in self.program.steps if type(s) is Mark]

    @cached_property
    def host_waits(self) -> list[HostWait]:
        """Where the host waited for the GPU, in host order."""
        return [s for s in self.program.steps if type(s) is HostWait and s.end is not None]

    @cached_property
    def host_work(self) -> list[HostWork]:
        """Where the host was busy without launching."""
        return [s for s in self.program.steps if type(s) is HostWork and s.end is not None]

    @cached_property
    def iteration_ends(self) -> list[float]:
        """When all work of each iteration, and of those before it, has ended."""
        ends = [0.0] * self.scenario.iterations
        for op in self.ops:
            assert op.end is not None
            if op.end > ends[op.iteration]:
                ends[op.iteration] = op.end
        for i, (before, end) in enumerate(pairwise(ends), start=1):
            ends[i] = max(before, end)
        return ends

    @cached_property
    def iteration_times(self) -> list[float]:
        """Seconds of each iteration."""
        return [end - start for start, end in pairwise([0.0, *self.iteration_ends])]

    @cached_property
    def window(self) -> Interval:
        """The last iteration's start and end."""
        return ([0.0, *self.iteration_ends][-2], self.iteration_ends[-1])

    @property
    def step_time(self) -> float:
        """Seconds of the last iteration."""
        return self.iteration_times[-1]

    def busy(self, ops: Iterable[Op], window: Interval | None = None) -> list[Interval]:
        """The times of ``window`` (default: the step) in which any of ``ops`` ran."""
        spans = ((op.start, op.end) for op in ops)
        return union(clip(spans, window or self.window))  # type: ignore[arg-type]

    @cached_property
    def compute_busy(self) -> list[Interval]:
        """The times of the step in which a kernel ran that is not a collective."""
        return self.busy(op for op in self.step_ops if is_kernel(op))

    @cached_property
    def communication_busy(self) -> list[Interval]:
        """The times of the step in which a collective ran."""
        return self.busy(op for op in self.step_ops if op.collective is not None)

    @property
    def compute_time(self) -> float:
        """Seconds of the step in which the GPU computed."""
        return total(self.compute_busy)

    @cached_property
    def exposed_communication(self) -> float:
        """Seconds of the step in which a collective ran and nothing was computed."""
        return total(subtract(self.communication_busy, self.compute_busy))

    @cached_property
    def collectives(self) -> dict[str, CollectiveSummary]:
        """Summary per kind of collective that the step has."""
        found: dict[str, CollectiveSummary] = {}
        for kind in COLLECTIVES:
            ops = [op for op in self.step_ops if op.kind == kind]
            if ops:
                found[kind] = CollectiveSummary(
                    count=len(ops),
                    bytes_sent_per_rank=sum(self.bytes_sent(op) for op in ops),
                    bytes_sent_between_nodes_per_rank=sum(
                        self.bytes_sent(op)
                        for op in ops
                        if self.costs.groups[op.collective.group].nodes > 1
                    ),
                    time_s=_taken(ops),
                    exposed_s=total(subtract(self.busy(ops), self.compute_busy)),
                )
        return found

    @cached_property
    def transfers(self) -> dict[str, TransferSummary]:
        """Summary per direction of the copies between host and device that the step has."""
        found: dict[str, TransferSummary] = {}
        for kind in TRANSFERS:
            ops = [op for op in self.step_ops if op.kind == kind]
            if ops:
                found[kind] = TransferSummary(
                    count=len(ops),
                    bytes_copied=sum(op.nbytes for op in ops),
                    time_s=_taken(ops),
                    exposed_s=total(subtract(self.busy(ops), self.compute_busy)),
                )
        return found

    def bytes_sent(self, op: Op) -> float:
        """Bytes that this rank sends in a ring for one collective."""
        info = op.collective
        return bytes_sent_per_rank(info.kind, info.nbytes, self.costs.groups[info.group])

    def stalls(self) -> Iterator[Stall]:
        """Where the host was stopped: waits for the GPU, and the allocator."""
        for wait in self.host_waits:
            if wait.end > wait.start:  # type: ignore[operator]
                yield Stall(
                    start=wait.start,  # type: ignore[arg-type]
                    end=wait.end,  # type: ignore[arg-type]
                    cause=wait.cause,
                    unit=wait.unit,
                    iteration=wait.iteration,
                )
        yield from self.memory.stalls

    @cached_property
    def host_blocked(self) -> dict[str, float]:
        """Seconds per cause for which the host was stopped in the last iteration."""
        last, blocked = self.scenario.iterations - 1, dict[str, float]()
        for stall in self.stalls():
            if stall.iteration == last:
                blocked[stall.cause] = blocked.get(stall.cause, 0.0) + stall.end - stall.start
        return dict(sorted(blocked.items()))

    # ---- memory

    @cached_property
    def step_samples(self) -> list[Sample]:
        """Memory samples of the last iteration, and the one before it: the level it starts from."""
        starts = [s for s in self.program.steps if type(s) is IterationStart]
        first = max((s.samples for s in starts if s.time is not None), default=0)
        if self.scenario.iterations == 1:
            first = 0  # from the allocation of the parameters on
        return self.memory.samples[max(first - 1, 0) :]

    def peak(self, level: str) -> int:
        """The step's highest ``requested``, ``allocated``, ``active`` or ``reserved`` bytes."""
        return max(map(attrgetter(level), self.step_samples), default=0)

    @property
    def outside_allocator(self) -> int:
        """Estimated bytes of the CUDA context and NCCL's buffers, which only nvidia-smi shows."""
        communicators = len(self.program.communicators)
        return self.costs.hardware.memory_outside_allocator(communicators)

    @cached_property
    def max_unsharded_units(self) -> int:
        """Most gathered units that held memory at once, over all iterations.

        A unit gathered again while its last gathering is not yet reusable counts twice.
        """
        alive: dict[int, int] = {}
        pending: list[tuple[float, int]] = []  # a heap of (reusable from, gathering)
        most = 0
        for sample in self.memory.samples:
            time, buffer = sample.time, sample.buffer
            gathering = buffer.unsharded
            if gathering is None:
                continue
            if not sample.is_malloc:
                heappush(pending, (_reusable_from(buffer, time), gathering))
                continue
            while pending and pending[0][0] <= time:
                ended = heappop(pending)[1]
                alive[ended] -= 1
                if not alive[ended]:
                    del alive[ended]
            alive[gathering] = alive.get(gathering, 0) + 1
            if len(alive) > most:
                most = len(alive)
        return most

    @property
    def host_memory(self) -> int:
        """Bytes of host memory that offloading keeps for this rank: what the GPU does not hold."""
        return sum(self.program.host_memory.values())

    # ---- throughput

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second and GPU; None when the scenario does not say how many tokens."""
        tokens = self.workload.tokens * self.scenario.training.gradient_accumulation_steps
        tokens *= self.scenario.training.forwards_per_backward
        return tokens / self.step_time if tokens and self.step_time else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's FLOPs against the GPU's dense peak."""
        rate = self.tokens_per_second
        if rate is None or not self.workload.flops_per_token:
            return None
        return rate * self.workload.flops_per_token / self.costs.hardware.peak_flops


def _taken(ops: Iterable[Op]) -> float:
    """Seconds of each of ``ops`` from start to end, added up."""
    return sum(op.end - op.start for op in ops if op.start is not None and op.end is not None)


def _reusable_from(buffer: Buffer, freed_at: float) -> float:
    """When all work has ended that the free of ``buffer`` waits for (seconds)."""
    if not buffer.pending:
        return freed_at
    return max(op.end or float("inf") for op in buffer.pending)
