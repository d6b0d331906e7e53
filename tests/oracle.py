"""What the engine must give, bit for bit: a plain loop over the host's steps in issue order.

    start = max(issued, stream free, communicator free, dependencies done)

Without contention nothing that is issued later can change when an op starts, so one pass is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpsim.engine import HostWait, HostWork, Op, Step
from fsdpsim.memory import Free, Malloc
from fsdpsim.program import IterationStart, Mark, Program

#: (issued, start, end) of an op, (start, end) of a stretch of host time, (time,) of anything else.
Times = tuple[float | None, ...]


def evaluate(steps: Sequence[Step], stalls: Mapping[int, float] | None = None) -> list[Times]:
    """The times of each step; neither ops nor steps are changed.

    ``stalls`` maps the index of a step that stops the host, such as an allocation that has to ask
    the driver, to the time at which the host goes on.
    """
    host = 0.0
    stream_free: dict[str, float] = {}
    communicator_free: dict[str, float] = {}
    ends: dict[Op, float] = {}
    found: list[Times] = []
    for index, step in enumerate(steps):
        if isinstance(step, Op):
            host += step.launch_seconds
            start = max(host, stream_free.get(step.stream, 0.0), *(ends[dep] for dep in step.deps))
            if step.communicator is not None:
                start = max(start, communicator_free.get(step.communicator, 0.0))
                communicator_free[step.communicator] = start + step.seconds
            stream_free[step.stream] = ends[step] = start + step.seconds
            found.append((host, start, ends[step]))
        elif isinstance(step, HostWait):
            begin, host = host, max([host, *(ends[op] for op in step.ops)])
            found.append((begin, host))
        elif isinstance(step, HostWork):
            begin, host = host, host + step.seconds
            found.append((begin, host))
        else:
            found.append((host,))
            host = (stalls or {}).get(index, host)
    return found


def simulated(steps: Sequence[Step]) -> list[Times]:
    """The times that the engine wrote into ``steps``, in the shape of :func:`evaluate`."""
    return [_times(step) for step in steps]


def _times(step: Step) -> Times:
    match step:
        case Op():
            return step.issued, step.start, step.end
        case HostWait() | HostWork():
            return step.start, step.end
        case Malloc():
            return (step.buffer.allocated_at,)
        case Free():
            return (step.buffer.freed_at,)
        case Mark() | IterationStart():
            return (step.time,)
    raise TypeError(f"the oracle knows no step {step!r}")


def stalls_of(program: Program, samples: Sequence[object]) -> dict[int, float]:
    """Where the allocator stopped the host, from its samples: one for each malloc and free."""
    memory_steps = [i for i, s in enumerate(program.steps) if isinstance(s, (Malloc, Free))]
    found = {}
    for index, sample in zip(memory_steps, samples, strict=True):
        (began,) = _times(program.steps[index])
        if sample.time != began:  # type: ignore[attr-defined]
            found[index] = sample.time  # type: ignore[attr-defined]
    return found
