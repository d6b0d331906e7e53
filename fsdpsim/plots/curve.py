"""Memory over time as columns: the allocator's levels, the stack of categories, unsharded units.

The CPU thread allocates and frees, so memory changes at host time. A block whose free waits for an
event (``record_stream``) is in use until the GPU has passed it; the allocator itself notices only
at its next malloc, so ``active`` falls later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpsim.engine import Op
from fsdpsim.intervals import Interval, clip, total
from fsdpsim.memory import CATEGORIES, Buffer, Free, Malloc
from fsdpsim.plots.view import View, host_starts, last_begun, step_window
from fsdpsim.program import COMPUTE, IterationStart
from fsdpsim.result import Result

Clock = Literal["host", "gpu"]
LEVELS = ("requested", "allocated", "active", "reserved")
PENDING = "pending"


class Change(NamedTuple):
    """One change of memory at ``time`` (seconds) after sample number ``sample``."""

    time: float
    sample: int
    buffer: Buffer
    kind: Literal["malloc", "free", "release"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Columns of equal length; entry i holds from ``time[i]`` to ``time[i + 1]``."""

    clock: Clock
    time: NDArray[np.float64]
    """Seconds, ascending; several changes may share one."""
    sample: NDArray[np.int64]
    """The last sample before or at each change."""
    levels: dict[str, NDArray[np.int64]]
    """Bytes by the names of :data:`LEVELS`."""
    categories: dict[str, NDArray[np.int64]]
    """Bytes of live buffers by ``memory.CATEGORIES``, and of ``pending`` ones: dropped, but the GPU
    has not passed the event that makes them reusable."""
    unsharded: NDArray[np.int64]
    """Gatherings of a unit's parameters that hold memory."""

    def __len__(self) -> int:
        return len(self.time)

    @property
    def has_bytes(self) -> bool:
        """Whether any buffer has a size: a [workload] without parameters has none."""
        return bool(len(self) and self.levels["reserved"].max() > 0)

    def between(self, low: int, high: int) -> Curve:
        """Entries ``low`` to ``high``, exclusive."""
        return self.take(np.arange(low, high))

    def take(self, index: NDArray[np.int64]) -> Curve:
        """The entries at ``index``."""
        return Curve(
            clock=self.clock,
            time=self.time[index],
            sample=self.sample[index],
            levels={name: column[index] for name, column in self.levels.items()},
            categories={name: column[index] for name, column in self.categories.items()},
            unsharded=self.unsharded[index],
        )


def memory_curve(view: View, clock: Clock | None = None) -> Curve:
    """Memory in the view: from the level that the shown iteration starts with.

    ``clock``: ``host``, or ``gpu`` to draw each change where the GPU runs the compute kernel issued
    next, or in host time where the GPU has run all that was issued; default: :func:`default_clock`.
    """
    result = view.result
    clock = clock or default_clock(view)
    changes = list(_changes(result, clock))
    whole = _columns(result, changes, clock)
    low, high = _shown(view, whole)
    shown = whole.between(low, high)
    if low:
        shown.time[0] = min(shown.time[0], view.start)  # the level that the view begins with
    return shown


def default_clock(view: View) -> Clock:
    """``host``, unless the CPU makes the changes in less than half of the time the GPU has them.

    So it is where the CPU issues all at once, far ahead of the GPU: the curve would be a spike, or
    not in the step at all. The middle half of the changes counts, as the CPU may wait at the end.

    The order of changes is the allocator's on either clock. Where blocks wait for events, though,
    the time at which the CPU freed them is what makes the peak, and the clock stays ``host``.
    Without bytes only the units count, and the GPU is what has them.
    """
    result = view.result
    if any(_release(s.buffer) for s in result.memory.samples):
        return "host"
    if not any(s.buffer.nbytes for s in result.memory.samples):
        return "gpu"
    iteration = last_begun(result) if view.iteration is None else view.iteration
    own = _samples_of(result, iteration)
    host = _middle_half([sample.time for sample in result.memory.samples[own]])
    gpu = _middle_half(_gpu_times(result)[own])
    seen = total(clip([host], step_window(result, iteration)))
    return "host" if 2 * seen >= gpu[1] - gpu[0] else "gpu"


def _middle_half(times: list[float]) -> Interval:
    """From when to when the middle half of ``times`` (ascending) lies."""
    quarter = len(times) // 4
    return (times[quarter], times[-1 - quarter]) if times else (0.0, 0.0)


def _samples_of(result: Result, iteration: int | None) -> slice:
    """Which samples belong to ``iteration``; None: all."""
    if iteration is None:
        return slice(None)
    later = iteration + 1 < len(host_starts(result))
    end = first_sample(result, iteration + 1) if later else None
    return slice(first_sample(result, iteration), end)


def settled(curve: Curve) -> Curve:
    """One entry per instant, the last; and of those before it the one where a column has its peak.

    At one instant the CPU may free a block and allocate the next: what is between lasts no time.
    """
    starts = np.flatnonzero(np.diff(curve.time, prepend=-np.inf) > 0)
    kept = set((np.append(starts[1:], len(curve)) - 1).tolist())
    kept.update(int(column.argmax()) for column in _watched(curve))
    return curve.take(np.array(sorted(kept)))


def thinned(curve: Curve, low: float, high: float, columns: int = 1600) -> Curve:
    """At most seven entries for each of ``columns`` equal slices of ``low`` to ``high`` seconds.

    Kept are each slice's last entry and the highest of every level: no peak is lost.
    """
    if len(curve) <= 7 * columns:
        return curve
    slices = np.clip((curve.time - low) / (high - low), 0, 1) * columns
    starts = np.flatnonzero(np.diff(slices.astype(np.int64), prepend=-1))
    ends = np.append(starts[1:], len(curve))
    kept = {0, *(int(e) - 1 for e in ends)}
    for column in _watched(curve):
        kept.update(int(a) + int(column[a:b].argmax()) for a, b in zip(starts, ends, strict=True))
    return curve.take(np.array(sorted(kept)))


def _watched(curve: Curve) -> Iterator[NDArray[np.int64]]:
    """The columns whose peaks a picture must not lose."""
    yield from curve.levels.values()
    yield curve.categories[PENDING]
    yield curve.unsharded


# ---- changes in order


def _changes(result: Result, clock: Clock) -> Iterator[Change]:
    """Mallocs and frees in host order, each pending free followed by its release in due time."""
    samples = result.memory.samples
    times = [s.time for s in samples] if clock == "host" else _gpu_times(result)
    releases = sorted(
        (end, i)
        for i, sample in enumerate(samples)
        if not sample.is_malloc and (end := _release(sample.buffer, times[i])) is not None
    )
    next_release = 0
    for i, sample in enumerate(samples):
        while next_release < len(releases) and releases[next_release][0] <= times[i]:
            end, freed = releases[next_release]
            yield Change(end, i - 1, samples[freed].buffer, "release")
            next_release += 1
        yield Change(times[i], i, sample.buffer, "malloc" if sample.is_malloc else "free")
    for end, freed in releases[next_release:]:
        yield Change(end, len(samples) - 1, samples[freed].buffer, "release")


def _release(buffer: Buffer, freed_at: float | None = None) -> float | None:
    """When the GPU passes what a freed buffer waits for; None if it waits for nothing."""
    freed_at = buffer.freed_at if freed_at is None else freed_at
    end = max((op.end for op in buffer.pending if op.end is not None), default=None)
    return end if end is not None and freed_at is not None and end > freed_at else None


def _gpu_times(result: Result) -> list[float]:
    """For each sample the start of the compute kernel issued next, or the end of the last.

    Its host time where the GPU had run all kernels issued before: then the CPU is not ahead.
    """
    host = [sample.time for sample in result.memory.samples]
    times: list[float] = []
    waiting, last = 0, 0.0
    for step in result.program.steps:
        if isinstance(step, (Malloc, Free)):
            waiting += 1
        elif type(step) is Op and step.stream == COMPUTE and step.finished:
            assert step.start is not None and step.end is not None
            times += _gpu_time(host[len(times) : len(times) + waiting], last, step.start)
            waiting, last = 0, step.end
    end = max([last, *result.iteration_ends])
    times += _gpu_time(host[len(times) :], last, end)
    return times


def _gpu_time(host: list[float], before: float, after: float) -> list[float]:
    """Of samples between kernels that end at ``before`` and start at ``after``, in order."""
    times = [after if time < before else time for time in host]
    return np.minimum.accumulate(times[::-1])[::-1].tolist() if times else []


# ---- columns


def _columns(result: Result, changes: list[Change], clock: Clock) -> Curve:
    samples = result.memory.samples
    sample = np.array([c.sample for c in changes], dtype=np.int64)
    levels = np.array([s[3:] for s in samples], dtype=np.int64).reshape(-1, len(LEVELS))
    return Curve(
        clock=clock,
        time=np.array([c.time for c in changes]),
        sample=sample,
        levels={name: levels[sample, i] for i, name in enumerate(LEVELS)},
        categories=_stack(changes),
        unsharded=np.array(list(_unsharded(changes)), dtype=np.int64),
    )


def _stack(changes: list[Change]) -> dict[str, NDArray[np.int64]]:
    names = (*CATEGORIES, PENDING)
    steps = np.zeros((len(changes), len(names)), dtype=np.int64)
    where = {name: i for i, name in enumerate(names)}
    pending = {id(c.buffer) for c in changes if c.kind == "release"}
    for i, change in enumerate(changes):
        own, size = where[change.buffer.category], change.buffer.nbytes
        if change.kind == "malloc":
            steps[i, own] = size
        elif change.kind == "free":
            steps[i, own] = -size
            if id(change.buffer) in pending:
                steps[i, where[PENDING]] = size
        else:
            steps[i, where[PENDING]] = -size
    return dict(zip(names, steps.cumsum(axis=0).T, strict=True))


def _unsharded(changes: list[Change]) -> Iterator[int]:
    """How many gatherings hold memory after each change."""
    alive: dict[int, int] = {}
    pending = {id(c.buffer) for c in changes if c.kind == "release"}
    for change in changes:
        gather = change.buffer.unsharded
        if gather is not None:
            alive.setdefault(gather, 0)
            if change.kind == "malloc":
                alive[gather] += 1
            elif change.kind == "release" or id(change.buffer) not in pending:
                alive[gather] -= 1
            if not alive[gather]:
                del alive[gather]
        yield len(alive)


def _shown(view: View, curve: Curve) -> tuple[int, int]:
    """Entries of the shown iteration, or of a zoomed view, and the one before them."""
    high = int(np.searchsorted(curve.time, view.end, side="right"))
    if view.zoomed:
        return max(int(np.searchsorted(curve.time, view.start)) - 1, 0), high
    begun = len(host_starts(view.result))
    if view.iteration is None or begun == 1:
        return 0, high
    first = first_sample(view.result, view.iteration)
    return max(int(np.searchsorted(curve.sample, first)) - 1, 0), high


def first_sample(result: Result, iteration: int) -> int:
    """Number of the first memory sample of ``iteration``."""
    starts = [s for s in result.program.steps if type(s) is IterationStart]
    return starts[iteration].samples
