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
from functools import partial
from typing import Any, Protocol

import simpy
from simpy.events import NORMAL

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
        self._armed = list(callbacks)

    def arm(self, delay: float) -> Timer:
        """Trigger ``delay`` seconds from now."""
        self.callbacks = self._armed.copy()
        self.env.schedule(self, NORMAL, delay)
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
        self._idle = True
        self._timer = Timer(env, self._finish)

    def enqueue(self, op: Op) -> None:
        """Append ``op``; it starts at once if nothing is before it."""
        self.last = op
        self.queue.append(op)
        if self._idle:
            self._start_next()

    def _start_next(self) -> None:
        """Begin the head of the queue, or have what it waits for call here again."""
        op = self.queue[0]
        self._idle = False
        for dep in op.deps:
            if not dep.finished:
                dep.when_finished(self._start_next)
                return
        if op.rendezvous is None or op.rendezvous.arrive(self._begin):
            self._begin()

    def _begin(self) -> None:
        self.running = op = self.queue.popleft()
        op.start = now = self.env.now
        if self.contention is not None:
            self.contention.begin(op, self._finish)
        else:
            op.end = now + op.seconds
            self._timer.arm(op.seconds)

    def _finish(self, _: simpy.Event | None = None) -> None:
        op = self.running
        assert op is not None
        op.finished = True
        if self.contention is not None:
            op.end = self.env.now
        if op.waiters is not None:
            for callback in op.waiters:
                callback()
        if self.queue:
            self._start_next()
        else:
            self._idle = True


class Streams(dict[str, Stream]):
    """The streams of one GPU by name, each made when it is first used."""

    def __init__(self, env: simpy.Environment, contention: Contention | None) -> None:
        super().__init__()
        self._make = partial(Stream, env, contention=contention)

    def __missing__(self, name: str) -> Stream:
        self[name] = stream = self._make(name)
        return stream


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
        memory: Memory | None = None,
        contention: Contention | None = None,
    ) -> None:
        self.env = env
        self.memory = memory
        self.streams = Streams(env, contention)
        self.communicators: defaultdict[str, Communicator] = defaultdict(Communicator)
        self.process: simpy.Process | None = None

    def run(self, steps: Sequence[Step]) -> Process:
        """The host's process."""
        env, clock = self.env, Timer(self.env)
        streams, communicators, now = self.streams, self.communicators, env.now
        for step in steps:
            if type(step) is Op:
                if step.launch_seconds:
                    yield clock.arm(step.launch_seconds)
                    now = env.now
                step.issued = now
                if step.communicator is not None:
                    communicators[step.communicator].enqueue(step)
                streams[step.stream].enqueue(step)
            elif type(step) is HostWait:
                step.start = now
                yield from self.wait(step.ops)
                step.end = now = env.now
            elif (process := step.act(self)) is not None:  # type: ignore[union-attr]
                yield from process
                now = env.now

    def check_finished(self) -> None:
        """Raise ``RuntimeError`` if, with nothing left to happen, an op or the host still waits."""
        for stream in self.streams.values():
            if stream.queue:
                raise RuntimeError(f"{stream.queue[0]!r} waits for an op that was never issued")
        if self.process is not None and self.process.is_alive:
            raise RuntimeError("the host waits for an op that was never issued")

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
    """Put one rank's host into ``env``; it runs when ``env`` does."""
    host = Host(env, memory, contention)
    host.process = env.process(host.run(steps))
    return host


def run(steps: Sequence[Step], memory: Memory | None = None) -> None:
    """Run one rank's ``steps`` to the end; times are written into the ops and waits.

    Raises ``RuntimeError`` if the steps wait for something that was never issued.
    """
    env = simpy.Environment()
    host = start(env, steps, memory)
    env.run()
    host.check_finished()
