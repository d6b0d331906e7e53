"""Whose bytes they are: buffers alive at a moment of host time, by category and unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdpsim.memory import CATEGORIES, Buffer, Sample
from fsdpsim.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Buffers of one category, or of one unit in it. Sizes are bytes."""

    category: str
    unit: str
    """Empty for the training loop, or when the whole category is meant."""
    allocated: int
    """Blocks of the allocator; these sum to the ``allocated`` level."""
    requested: int
    """What the tensors need."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of the step at which most bytes were allocated."""

    time: float
    """Host time in seconds from the start of the simulation."""
    buffer: str
    """The allocation that reached it, and its unit and phase."""
    unit: str
    phase: str
    requested: int
    allocated: int
    active: int
    """More than ``allocated`` by what is freed but waits for an event."""
    reserved: int
    """More than ``active`` by what is cached and free."""
    peak_reserved: int
    """The most that was reserved at any moment of the step."""
    categories: tuple[Owner, ...]
    owners: tuple[Owner, ...]
    """By category and unit."""


def peak(result: Result) -> Peak | None:
    """The step's peak of allocated memory; None when no memory was simulated."""
    samples = result.step_samples
    if not samples or result.peak("allocated") == 0:
        return None
    at = max(range(len(samples)), key=lambda i: (samples[i].allocated, -i))
    sample = samples[at]
    everything = result.memory.samples
    alive = alive_after(everything[: len(everything) - len(samples) + at + 1])
    return Peak(
        time=sample.time,
        buffer=sample.buffer.name,
        unit=sample.buffer.unit,
        phase=sample.buffer.phase,
        requested=sample.requested,
        allocated=sample.allocated,
        active=sample.active,
        reserved=sample.reserved,
        peak_reserved=result.peak("reserved"),
        categories=by_category(alive),
        owners=by_unit(alive),
    )


def alive_after(samples: Sequence[Sample]) -> dict[Buffer, int]:
    """Buffers that are alive after ``samples`` (from the first on), and the bytes of their blocks.

    A block may change once it is freed, so its size is read from the rise of the allocated level.
    """
    alive: dict[Buffer, int] = {}
    allocated = 0
    for sample in samples:
        if sample.is_malloc:
            alive[sample.buffer] = sample.allocated - allocated
        else:
            alive.pop(sample.buffer)
        allocated = sample.allocated
    return alive


def by_category(alive: dict[Buffer, int]) -> tuple[Owner, ...]:
    """One row per category, largest first."""
    return _grouped(((b.category, ""), b.nbytes, size) for b, size in alive.items())


def by_unit(alive: dict[Buffer, int]) -> tuple[Owner, ...]:
    """One row per category and unit, largest first."""
    return _grouped(((b.category, b.unit), b.nbytes, size) for b, size in alive.items())


def _grouped(buffers: Iterable[tuple[tuple[str, str], int, int]]) -> tuple[Owner, ...]:
    rows: dict[tuple[str, str], list[int]] = {}
    for key, requested, allocated in buffers:
        row = rows.setdefault(key, [0, 0, 0])
        row[0] += allocated
        row[1] += requested
        row[2] += 1
    found = [
        Owner(category=c, unit=u, allocated=row[0], requested=row[1], count=row[2])
        for (c, u), row in rows.items()
    ]
    return tuple(sorted(found, key=lambda o: (-o.allocated, CATEGORIES.index(o.category), o.unit)))
