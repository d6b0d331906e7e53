"""The discrete-event engine: one host thread, streams and communicators on SimPy.

A host runs a list of steps in order. An :class:`Op` step pays its launch cost and is enqueued on
its stream; a :class:`HostWait` step blocks the host; any other step is an action taken at that
moment of host time (memory, marks). Without contention an op starts at

    start = max(issued, stream free, communicator free, dependencies done)

This module knows nothing of FSDP. Times are seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import simpy
from simpy.events import NORMAL

#: Stream of what the host's CPUs run beside its issue thread: no wait for the device waits for it.
CPU = "cpu"

#: What takes host time: it arms the host's timer, and yields until that calls.
Process = Generator[None, None, None]


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
        self.waiters: list[Callable[[float], object]] | None = None

    def __repr__(self) -> str:
        return f"Op({self.name!r} on {self.stream}, {self.start} to {self.end})"

    def when_finished(self, callback: Callable[[float], object]) -> None:
        """Call ``callback`` with the time at this op's end, which lies ahead."""
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


class HostWork:
    """Time that the CPU thread spends without launching: hooks, Python, a CPU optimizer.

    The engine fills ``start`` and ``end`` (seconds).
    """

    __slots__ = ("cause", "end", "iteration", "seconds", "start", "unit")

    def __init__(self, seconds: float, cause: str, unit: str, iteration: int) -> None:
        self.seconds = seconds
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

    def attach(self, streams: Streams) -> None:
        """Learn of the streams of this memory's GPU, before all else."""

    def malloc(self, host: Host, buffer: Any) -> Process | None:
        """Allocate ``buffer`` at this host time; return what the host must wait for, or None."""

    def free(self, host: Host, buffer: Any, record_streams: Sequence[str]) -> None:
        """Free ``buffer`` at this host time."""


class Rendezvous(Protocol):
    """Where one collective's ops on several ranks wait for each other."""

    def arrive(self, begin: Callable[[float], object], now: float) -> bool:
        """Whether all members are here at ``now``; if not, the last one calls ``begin``."""


class Contention(Protocol):
    """What makes ops that run at the same time slower; None in its place: nothing does."""

    def begin(self, op: Op, finish: Callable[[], object]) -> None:
        """Run ``op``; call ``finish`` at its end, whenever that will be."""


Step = Op | HostWait | HostWork | Action


class Clock(simpy.Environment):
    """SimPy's environment, which also jumps over time in which nothing is scheduled."""

    def jump(self, time: float) -> bool:
        """Make it ``time`` (seconds, not before now) unless something comes before or just then.

        The same as an event at ``time`` would do, without the event.
        """
        # SimPy has no public way to do this; its clock and its queue are these two attributes.
        queue = self._queue
        if queue and queue[0][0] <= time:
            return False
        self._now = time
        return True


class Timer(simpy.Event):
    """A triggered event that is scheduled again and again: half the cost of a Timeout per op."""

    def __init__(self, env: simpy.Environment, callback: Callable[[Any], object]) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._armed: list[Callable[[Any], Any]] = [callback]

    def arm(self, delay: float) -> None:
        """Trigger ``delay`` seconds from now."""
        self.callbacks = self._armed
        self.env.schedule(self, NORMAL, delay)


class Stream(Timer):
    """A FIFO of ops that run one at a time; as an event, the end of the op that runs.

    A callback rather than a generator: exactly one SimPy event per op, the least there is.
    """

    def __init__(
        self, env: simpy.Environment, name: str, contention: Contention | None = None
    ) -> None:
        # The event that SimPy hands to its callback is this stream. A bound method would make a
        # cycle, and what the stream ran last would stay until the collector comes.
        super().__init__(env, Stream._finish)
        self.name = name
        self.contention = contention
        self.head: Op | None = None
        """The op that runs, or that waits for others before it may."""
        self.queue: deque[Op] = deque()
        """The ops behind it."""
        self.last: Op | None = None

    def enqueue(self, op: Op, now: float) -> None:
        """Append ``op``; it starts at once if nothing is before it."""
        self.last = op
        if self.head is None:
            self.head = op
            self._start(now)
        else:
            self.queue.append(op)

    def _start(self, now: float) -> None:
        """Begin the head, or have what it waits for call here again."""
        op = self.head
        assert op is not None
        for dep in op.deps:
            if not dep.finished:
                dep.when_finished(self._start)
                return
        if op.rendezvous is None or op.rendezvous.arrive(self._begin, now):
            self._begin(now)

    def _begin(self, now: float) -> None:
        op = self.head
        assert op is not None
        op.start = now
        if self.contention is not None:
            self.contention.begin(op, self._finish)
        else:
            op.end = now + op.seconds
            self.arm(op.seconds)

    def _finish(self) -> None:
        op = self.head
        assert op is not None
        op.finished = True
        if self.contention is not None:
            op.end = self.env.now
        now = op.end
        assert now is not None
        if op.waiters is not None:
            for callback in op.waiters:
                callback(now)
            op.waiters = None
        if self.queue:
            self.head = self.queue.popleft()
            self._start(now)
        else:
            self.head = None


class Streams(dict[str, Stream]):
    """The streams of one GPU by name, each made when it is first used."""

    def __init__(self, env: simpy.Environment, contention: Contention | None) -> None:
        super().__init__()
        self.env = env
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


class Host(Timer):
    """The CPU issue thread of one rank: runs its steps in order and ahead of the GPU.

    As an event, the end of what it waits for; then its generator goes on.
    """

    def __init__(
        self,
        env: Clock,
        steps: Iterable[Step],
        memory: Memory | None = None,
        contention: Contention | None = None,
    ) -> None:
        generator = self._run(env, steps)
        super().__init__(env, generator.send)
        self.now = env.now
        """When its present step began (seconds)."""
        self.memory = memory
        self.streams = Streams(env, contention)
        if memory is not None:
            memory.attach(self.streams)
        self.communicators: defaultdict[str, Communicator] = defaultdict(Communicator)
        self._done = False
        next(generator)

    def _run(self, env: Clock, steps: Iterable[Step]) -> Process:
        streams, communicators, now = self.streams, self.communicators, self.now
        yield  # until the simulation begins
        for step in steps:
            if type(step) is Op:
                if step.launch_seconds:
                    now += step.launch_seconds
                    if not env.jump(now):
                        self.arm(step.launch_seconds)
                        yield
                    self.now = now
                step.issued = now
                if step.communicator is not None:
                    communicators[step.communicator].enqueue(step)
                streams[step.stream].enqueue(step, now)
            elif type(step) is HostWait:
                step.start = now
                yield from self.wait(step.ops)
                step.end = self.now = now = env.now
            elif type(step) is HostWork:
                step.start = now
                now += step.seconds
                if not env.jump(now):
                    self.arm(step.seconds)
                    yield
                step.end = self.now = now
            elif (process := step.act(self)) is not None:  # type: ignore[union-attr]
                yield from process
                self.now = now = env.now
        self._armed = []  # lets go of this generator
        self._done = True
        yield

    def check_finished(self) -> None:
        """Raise ``RuntimeError`` if, with nothing left to happen, an op or the host still waits."""
        for stream in self.streams.values():
            if stream.head is not None:
                raise RuntimeError(f"{stream.head!r} waits for an op that was never issued")
        if not self._done:
            raise RuntimeError("the host waits for an op that was never issued")

    def wait(self, ops: Iterable[Op]) -> Process:
        """Block until all ``ops`` have ended."""
        for op in ops:
            if not op.finished:
                op.when_finished(self._go_on)
                yield

    def _go_on(self, _now: float) -> None:
        self.arm(0)


def start(
    env: Clock,
    steps: Iterable[Step],
    memory: Memory | None = None,
    contention: Contention | None = None,
) -> Host:
    """Put one rank's host into ``env``; it runs when ``env`` does."""
    host = Host(env, steps, memory, contention)
    host.arm(0)
    return host


def run(steps: Iterable[Step], memory: Memory | None = None) -> None:
    """Run one rank's ``steps`` to the end; times are written into the ops and waits.

    Raises ``RuntimeError`` if the steps wait for something that was never issued.
    """
    env = Clock()
    host = start(env, steps, memory)
    env.run()
    host.check_finished()
