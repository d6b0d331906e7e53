"""The discrete-event engine: one host thread, streams and communicators on SimPy.

A host runs a list of steps in order. An :class:`Op` step pays its launch cost and is enqueued on
its stream; a :class:`HostWait` step blocks the host; any other step is an action taken at that
moment of host time (memory, marks). Without contention an op starts at

    start = max(issued, stream free, communicator free, dependencies done)

This module knows nothing of FSDP. Times are seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import simpy

#: Stream of what the host's CPUs run beside its issue thread: no wait for the device waits for it.
CPU = "cpu"

#: What a SimPy process yields.
Process = Generator[simpy.Event, Any, None]


class Op:
    """One kernel or collective on one stream. Plain slots: there are thousands of them.

    ``stream`` and ``communicator`` are names; ``deps`` are the ops it waits for (CUDA events). The
    engine fills ``issued``, ``start`` and ``end`` (seconds); they are None until known.
    """

    __slots__ = (
        "collective",
        "communicator",
        "deps",
        "end",
        "finished",
        "issued",
        "iteration",
        "kind",
        "launch_seconds",
        "name",
        "nbytes",
        "phase",
        "rendezvous",
        "seconds",
        "start",
        "stream",
        "unit",
        "waiters",
    )

    def __init__(
        self,
        name: str,
        stream: str,
        seconds: float,
        *,
        deps: tuple[Op, ...] = (),
        communicator: str | None = None,
        launch_seconds: float = 0.0,
        kind: str = "compute",
        unit: str = "",
        phase: str = "",
        iteration: int = 0,
        collective: Any = None,
        nbytes: int = 0,
    ) -> None:
        self.name = name
        self.stream = stream
        self.seconds = seconds
        self.deps = deps
        self.communicator = communicator
        self.launch_seconds = launch_seconds
        self.kind = kind
        self.unit = unit
        self.phase = phase
        self.iteration = iteration
        self.collective = collective
        self.nbytes = nbytes
        """Bytes that a copy between host and device moves; 0 for anything else."""
        self.issued: float | None = None
        self.start: float | None = None
        self.end: float | None = None
        self.finished = False
        self.rendezvous: Rendezvous | None = None
        """Several ranks: where this collective meets those of the other members of its group."""
        self.waiters: list[Callable[[], object]] | None = None

    def __repr__(self) -> str:
        return f"Op({self.name!r} on {self.stream}, {self.start} to {self.end})"

    def when_finished(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` at this op's end, which lies ahead."""
        if self.waiters is None:
            self.waiters = [callback]
        else:
            self.waiters.append(callback)


class HostWait:
    """The host blocks until all ``ops`` have ended, as in ``cudaEventSynchronize``.

    The engine fills ``start`` and ``end`` (seconds).
    """

    __slots__ = ("cause", "end", "iteration", "ops", "start", "unit")

    def __init__(
        self, ops: tuple[Op, ...], *, cause: str, unit: str = "", iteration: int = 0
    ) -> None:
        self.ops = ops
        self.cause = cause
        self.unit = unit
        self.iteration = iteration
        self.start: float | None = None
        self.end: float | None = None


class Action(Protocol):
    """A step that acts at host time; a returned process is waited for by the host."""

    def act(self, host: Host) -> Process | None:
        """Act now; return what the host must wait for, or None."""


class Memory(Protocol):
    """What the memory steps of a program call; None in its place simulates no memory."""

    def malloc(self, host: Host, buffer: Any) -> Process | None:
        """Allocate ``buffer`` at this host time; return what the host must wait for, or None."""

    def free(self, host: Host, buffer: Any, record_streams: Sequence[str]) -> None:
        """Free ``buffer`` at this host time."""


class Rendezvous(Protocol):
    """Where one collective's ops on several ranks wait for each other."""

    def arrive(self, begin: Callable[[], object]) -> bool:
        """Whether all members are here now; if not, ``begin`` is called when the last one comes."""


class Contention(Protocol):
    """What makes ops that run at the same time slower; None in its place: nothing does."""

    def begin(self, op: Op, finish: Callable[[], object]) -> None:
        """Run ``op``; call ``finish`` at its end, whenever that will be."""


Step = Op | HostWait | Action


class Timer(simpy.Event):
    """A triggered event that is scheduled again and again: half the cost of a Timeout per op."""

    def __init__(self, env: simpy.Environment, *callbacks: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._armed = callbacks

    def arm(self, delay: float) -> Timer:
        """Trigger ``delay`` seconds from now."""
        self.callbacks = [*self._armed]
        self.env.schedule(self, delay=delay)
        return self


class Stream:
    """A FIFO of ops that run one at a time.

    Callbacks on one timer rather than a generator: exactly one SimPy event per op,
    the least there is.
    """

    def __init__(
        self, env: simpy.Environment, name: str, contention: Contention | None = None
    ) -> None:
        self.env = env
        self.name = name
        self.contention = contention
        self.queue: deque[Op] = deque()
        self.running: Op | None = None
        self.last: Op | None = None
        self._blocked = False
        self._timer = Timer(env, lambda _: self._finish())

    def enqueue(self, op: Op) -> None:
        """Append ``op``; it starts at once if nothing is before it."""
        self.last = op
        self.queue.append(op)
        if self.running is None and not self._blocked:
            self._start_next()

    def _start_next(self) -> None:
        if not self.queue:
            return
        op = self.queue[0]
        for dep in op.deps:
            if not dep.finished:
                self._blocked = True
                dep.when_finished(self._unblock)
                return
        if op.rendezvous is not None and not op.rendezvous.arrive(self._met):
            self._blocked = True
            return
        self._begin()

    def _begin(self) -> None:
        self.running = op = self.queue.popleft()
        op.start = now = self.env.now
        if self.contention is not None:
            self.contention.begin(op, self._finish)
        else:
            op.end = now + op.seconds
            self._timer.arm(op.seconds)

    def _unblock(self) -> None:
        self._blocked = False
        self._start_next()

    def _met(self) -> None:
        self._blocked = False
        self._begin()

    def _finish(self) -> None:
        op, self.running = self.running, None
        assert op is not None
        op.finished = True
        op.end = self.env.now
        if op.waiters is not None:
            for callback in op.waiters:
                callback()
        self._start_next()


class Communicator:
    """Collectives of one communicator run one at a time in issue order, whatever their stream.

    NCCL makes each launch wait for the communicator's previous operation, so a turn is one more
    dependency on that operation.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Op | None = None

    def enqueue(self, op: Op) -> None:
        """Take the next turn for ``op``."""
        if self.last is not None and self.last.stream != op.stream:
            op.deps = (*op.deps, self.last)
        self.last = op


class Host:
    """The CPU issue thread of one rank: runs its steps in order and ahead of the GPU."""

    def __init__(
        self,
        env: simpy.Environment,
        streams: Sequence[str],
        memory: Memory | None = None,
        contention: Contention | None = None,
    ) -> None:
        self.env = env
        self.memory = memory
        self.streams = {name: Stream(env, name, contention) for name in streams}
        self.communicators: defaultdict[str, Communicator] = defaultdict(Communicator)

    def run(self, steps: Sequence[Step]) -> Process:
        """The host's process."""
        env, clock = self.env, Timer(self.env)
        for step in steps:
            if type(step) is Op:
                if step.launch_seconds:
                    yield clock.arm(step.launch_seconds)
                step.issued = env.now
                if step.communicator is not None:
                    self.communicators[step.communicator].enqueue(step)
                self.streams[step.stream].enqueue(step)
            elif type(step) is HostWait:
                step.start = env.now
                yield from self.wait(step.ops)
                step.end = env.now
            elif (process := step.act(self)) is not None:  # type: ignore[union-attr]
                yield from process

    def wait(self, ops: Sequence[Op]) -> Process:
        """Block until all ``ops`` have ended."""
        for op in ops:
            if not op.finished:
                done = self.env.event()
                op.when_finished(done.succeed)
                yield done


def start(
    env: simpy.Environment,
    steps: Sequence[Step],
    memory: Memory | None = None,
    contention: Contention | None = None,
) -> Host:
    """Put one rank's host and streams into ``env``; they run when ``env`` does."""
    streams = dict.fromkeys(step.stream for step in steps if type(step) is Op)
    host = Host(env, list(streams), memory, contention)
    env.process(host.run(steps))
    return host


def run(steps: Sequence[Step], memory: Memory | None = None) -> None:
    """Run one rank's ``steps`` to the end; times are written into the ops and waits.

    Raises ``RuntimeError`` if an op never ran: the steps wait for something that was never issued.
    """
    env = simpy.Environment()
    start(env, steps, memory)
    env.run()
    check_all_ran(steps)


def check_all_ran(steps: Sequence[Step]) -> None:
    """Raise ``RuntimeError`` for an op that never ran."""
    for op in steps:
        if type(op) is Op and not op.finished:
            raise RuntimeError(f"{op!r} never ran: it waits for an op that was never issued")
