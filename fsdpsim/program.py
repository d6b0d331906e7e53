"""The program of one rank's CPU thread: kernel launches, waits and allocations in host order.

FSDP's control flow does not depend on what has completed, so a schedule can record the whole
program first and the engine can run it afterwards. The vocabulary is CUDA's and torch's: streams,
events, ``wait_event``, ``wait_stream``, ``record_stream``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from fsdpsim.engine import CPU, Host, HostWait, HostWork, Op, Step
from fsdpsim.memory import Buffer, Free

#: A recorded CUDA event: the ops that must have ended. Empty when nothing was enqueued before it.
Event = tuple[Op, ...]

#: The stream that is current when FSDP is entered: forward, backward and the optimizer run on it.
COMPUTE = "compute"

#: Kinds of op that a copy engine runs, over PCIe and beside all kernels.
TRANSFERS = ("h2d", "d2h")


def is_kernel(op: Op) -> bool:
    """Whether ``op`` computes on the GPU: not a collective, a copy engine's, or the CPUs' work."""
    return op.collective is None and op.kind not in TRANSFERS and op.stream != CPU


class Collective(NamedTuple):
    """What one collective moves. ``nbytes`` is the full size: gathered, or before scattering."""

    kind: str
    nbytes: int
    shard_nbytes: int | None
    """This rank's input of an all-gather or output of a reduce-scatter; None for an all-reduce."""
    dtype: str
    group: str
    """``shard``, ``replicate`` or ``post_forward n`` (the smaller group of an int reshard)."""
    group_size: int
    trigger: str | None = None
    """All-gathers: ``demand`` (the unit's own hook), ``prefetch`` or ``manual``."""
    by: str | None = None
    """All-gathers: the unit whose hook issued it."""


class Mark:
    """A point in host order, to compare with a profiler: a hook, a free, a compute mark."""

    __slots__ = ("event", "fields", "iteration", "phase", "time", "unit")

    def __init__(
        self, event: str, unit: str, phase: str, iteration: int, fields: dict[str, Any]
    ) -> None:
        self.event = event
        self.unit = unit
        self.phase = phase
        self.iteration = iteration
        self.fields = fields
        self.time: float | None = None

    def act(self, host: Host) -> None:
        """Note the host time (seconds)."""
        self.time = host.now


class IterationStart:
    """The host begins an iteration: its time (seconds) and how many memory samples lie before."""

    __slots__ = ("iteration", "samples", "time")

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.time: float | None = None
        self.samples = 0

    def act(self, host: Host) -> None:
        """Note where the iteration begins."""
        self.time = host.now
        self.samples = len(getattr(host.memory, "samples", ()))


class _Restoring:
    """Gives an attribute of the program its former value back at the end of a ``with`` block.

    A class because it is entered for every hook: a generator would take three times as long.
    """

    __slots__ = ("attribute", "former", "program")

    def __init__(self, program: Program, attribute: str, former: str) -> None:
        self.program = program
        self.attribute = attribute
        self.former = former

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        setattr(self.program, self.attribute, self.former)


class Program:
    """Records steps in host order; ``unit``, ``phase`` and ``iteration`` label what comes next."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.stream = COMPUTE
        self.unit = ""
        self.phase = ""
        self.iteration = 0
        self.host_memory: dict[str, int] = {}
        """Category of :data:`fsdpsim.memory.CATEGORIES` -> bytes of it that live in host memory."""
        self.communicators: set[str] = set()
        """Names of the communicators that collectives are launched on."""
        self.keeps_marks = True
        """Whether :meth:`mark` does anything; no figure needs marks."""
        self._gathers = 0
        self._last: dict[str, Op] = {}
        self._waits: dict[str, list[Op]] = {}

    def begin_iteration(self, iteration: int) -> None:
        """All that follows belongs to ``iteration``."""
        self.iteration = iteration
        self.steps.append(IterationStart(iteration))

    def on_stream(self, stream: str) -> AbstractContextManager[None]:
        """Make ``stream`` current inside, as ``torch.cuda.stream`` does."""
        former, self.stream = self.stream, stream
        return _Restoring(self, "stream", former)

    def for_unit(self, unit: str) -> AbstractContextManager[None]:
        """Label what is recorded inside with ``unit``."""
        former, self.unit = self.unit, unit
        return _Restoring(self, "unit", former)

    def launch(
        self,
        name: str,
        seconds: float,
        *,
        kind: str,
        launch_seconds: float = 0.0,
        communicator: str | None = None,
        collective: Collective | None = None,
        nbytes: int = 0,
    ) -> Op:
        """Enqueue a kernel, collective or copy of ``seconds`` on the current stream."""
        stream, waits = self.stream, self._waits
        op = Op(
            name,
            stream,
            seconds,
            tuple(waits.pop(stream)) if stream in waits else (),
            communicator,
            launch_seconds,
            kind,
            self.unit,
            self.phase,
            self.iteration,
            collective,
            nbytes,
        )
        if communicator is not None:
            self.communicators.add(communicator)
        self._last[stream] = op
        self.steps.append(op)
        return op

    def record_event(self, stream: str | None = None) -> Event:
        """What is enqueued on ``stream`` (default: the current one) up to now."""
        stream = stream or self.stream
        last = self._last.get(stream)
        # A wait that no op has taken over yet belongs to the event too.
        return (*([last] if last is not None else []), *self._waits.get(stream, ()))

    def wait_event(self, stream: str, event: Event) -> None:
        """What is enqueued on ``stream`` from now on starts after ``event``; the host goes on."""
        waits = self._waits.setdefault(stream, [])
        for op in event:
            if op.stream != stream and op not in waits:
                waits.append(op)

    def wait_stream(self, stream: str, other: str) -> None:
        """``stream`` waits for all that is enqueued on ``other`` up to now."""
        self.wait_event(stream, self.record_event(other))

    def synchronize(self, event: Event, cause: str) -> None:
        """The host blocks until ``event`` has passed; ``cause`` names the reason everywhere."""
        self.steps.append(HostWait(event, cause=cause, unit=self.unit, iteration=self.iteration))

    def host_work(self, seconds: float, cause: str) -> None:
        """The host is busy for ``seconds``; nothing is recorded when that is zero."""
        if seconds:
            self.steps.append(HostWork(seconds, cause, self.unit, self.iteration))

    def new_gather(self) -> int:
        """A number for one gathering of a unit's parameters, for the buffers that hold them."""
        self._gathers += 1
        return self._gathers

    def malloc(
        self, name: str, nbytes: int, category: str, *, unsharded: int | None = None
    ) -> Buffer:
        """Allocate on the current stream; ``unsharded``: which gathering's parameters it holds."""
        buffer = Buffer(
            name, nbytes, category, self.stream, self.unit, self.iteration, self.phase, unsharded
        )
        self.steps.append(buffer)
        return buffer

    def free(self, buffer: Buffer | None, *record_streams: str) -> None:
        """Drop the last reference; with ``record_streams``, reusable once these have passed now."""
        if buffer is not None:
            self.steps.append(Free(buffer, record_streams))

    def mark(self, event: str, unit: str | None = None, **fields: Any) -> None:
        """Record a point in host order."""
        if self.keeps_marks:
            unit = self.unit if unit is None else unit
            self.steps.append(Mark(event, unit, self.phase, self.iteration, fields))
