"""What of a result is in the picture: which iteration, which seconds, which units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from fsdpsim.intervals import Interval
from fsdpsim.program import IterationStart
from fsdpsim.result import Result
from fsdpsim.units import show_seconds

#: (axis unit, its seconds): the first that the span reaches is used.
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

#: The axis begins where the CPU begins the iteration, unless that is earlier than the step's start
#: by more than this share of the step.
MOST_LEAD = 0.5


class NothingRanError(ValueError):
    """Memory ran out before there was anything to draw: an answer, but no picture."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A window on ``result``. Times are seconds from the start of the simulation."""

    result: Result
    iteration: int | None
    """From 0; None shows all."""
    start: float
    end: float
    origin: float
    """What the axis calls 0: the start of the shown iteration's step."""
    zoomed: bool = False
    """The user asked for these seconds: what lies outside does not count as shown."""
    units: frozenset[str] | None = None
    """Names of the units in focus; None: all."""

    @cached_property
    def time_unit(self) -> tuple[str, float]:
        """The axis unit and its seconds: picked once, from what the axis spans."""
        span = self.end - self.start
        return next((unit for unit in TIME_UNITS if span >= unit[1]), TIME_UNITS[-1])

    def x(self, seconds: float) -> float:
        """Where a time lies on the axis, in the axis unit."""
        return (seconds - self.origin) / self.time_unit[1]

    @property
    def limits(self) -> tuple[float, float]:
        """The axis limits: a hair wider than the window, so that nothing hides in the frame."""
        margin = 0.006 * (self.end - self.start)
        return self.x(self.start - margin), self.x(self.end + margin)

    def shows(self, start: float, end: float) -> bool:
        """Whether any of this time is in the window."""
        return start <= self.end and end >= self.start

    def in_focus(self, unit: str, iteration: int) -> bool:
        """Whether this is what the user asked to see, rather than its surroundings."""
        return self.of_iteration(iteration) and (self.units is None or unit in self.units)

    def of_iteration(self, iteration: int) -> bool:
        """Whether ``iteration`` (from 0) is the one shown."""
        return self.iteration is None or iteration == self.iteration

    @cached_property
    def short_names(self) -> dict[str, str]:
        """Unit names for bars: ``layers.12`` is 12, as long as no other unit is 12 too."""
        return short_names([unit.name for unit in self.result.workload.units])

    @cached_property
    def unit_index(self) -> dict[str, int]:
        """Position of each unit in module order."""
        return {unit.name: i for i, unit in enumerate(self.result.workload.units)}


def check_ran(result: Result, ran: bool, what: str) -> None:
    """Raise :class:`NothingRanError` if memory ran out and not even ``what`` was there before."""
    oom = result.memory.oom
    if oom is not None and not ran:
        when = show_seconds(oom.time)
        raise NothingRanError(
            f"{result.scenario.source}: out of memory at {when}, before {what}: nothing to draw"
        )


def make_view(
    result: Result,
    *,
    iteration: int | str | None = None,
    time: tuple[float | None, float | None] | None = None,
    units: str | None = None,
) -> View:
    """The view of ``iteration`` (from 1, or ``all``; default: the last that has begun).

    ``time`` narrows it to (start, end) seconds on its own axis; None leaves an end open. ``units``:
    see :func:`select_units`. Raises ``ValueError`` for what the result does not have.
    """
    index = _iteration_index(result, iteration)
    window = step_window(result, index)
    origin = window[0]
    if index is not None:
        window = _with_host(result, index, window)
    zoomed = time is not None and time != (None, None)
    if time is not None:
        window = _narrowed(window, origin, time)
    if window[1] <= window[0]:
        window = (window[0], window[0] + 1e-6)  # out of memory before anything ran
    return View(
        result=result,
        iteration=index,
        start=window[0],
        end=window[1],
        origin=origin,
        zoomed=zoomed,
        units=None if units is None else select_units(result, units),
    )


def select_units(result: Result, text: str) -> frozenset[str]:
    """Names of the units that ``text`` means: ``A:B``, or names with ``*``, separated by commas.

    ``A:B`` counts in module order from 0 and leaves B out, as a Python slice. Raises ``ValueError``
    if there are none.
    """
    names = [unit.name for unit in result.workload.units]
    if match := re.fullmatch(r"\s*(-?\d*)\s*:\s*(-?\d*)\s*", text):
        low, high = (int(bound) if bound else None for bound in match.groups())
        found = names[low:high]
    else:
        patterns = [part.strip() for part in text.split(",")]
        found = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    if not found:
        raise ValueError(
            f"units {text!r}: none of the {len(names)} units, {names[0]} to {names[-1]}"
        )
    return frozenset(found)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name from its first number on, or whole where that would make two alike."""
    found = {name: m[1] if (m := re.search(r"\.(\d.*)", name)) else name for name in names}
    values = list(found.values())
    return {n: short if values.count(short) == 1 else n for n, short in found.items()}


def host_starts(result: Result) -> list[float]:
    """When the CPU thread began each iteration that it has begun."""
    starts = (step for step in result.program.steps if type(step) is IterationStart)
    return [start.time for start in starts if start.time is not None]


def host_span(result: Result, iteration: int | None) -> Interval:
    """From when to when the CPU thread worked on ``iteration`` (None: on all of them)."""
    starts = host_starts(result) or [0.0]
    if iteration is not None and iteration + 1 < len(starts):
        return starts[iteration], starts[iteration + 1]
    ends = [sample.time for sample in result.memory.samples[-1:]]
    ends += [op.issued for op in result.ops[-1:] if op.issued is not None]
    ends += [wait.end for wait in result.host_waits[-1:] if wait.end is not None]
    start = 0.0 if iteration is None else starts[iteration]
    return start, max([start, *ends])


def last_begun(result: Result) -> int | None:
    """The last iteration that has begun, from 0; None where memory ran out before the first."""
    begun = len(host_starts(result))
    return begun - 1 if begun else None


def _iteration_index(result: Result, iteration: int | str | None) -> int | None:
    last = last_begun(result)
    if iteration == "all" or last is None:
        return None
    if iteration is None:
        return last
    begun = last + 1
    if not isinstance(iteration, int) or not 1 <= iteration <= begun:
        raise ValueError(f"iteration {iteration}: there are iterations 1 to {begun}, and all")
    return iteration - 1


def step_window(result: Result, iteration: int | None) -> Interval:
    """From the end of all work before ``iteration`` to the end of its own, or out of memory."""
    ends = [0.0, *result.iteration_ends]
    oom = result.memory.oom
    last = max(ends[-1], oom.time) if oom else ends[-1]
    if iteration is None:
        return 0.0, last
    ran_out = oom is not None and iteration == last_begun(result)
    return ends[iteration], last if ran_out else ends[iteration + 1]


def _with_host(result: Result, iteration: int, window: Interval) -> Interval:
    """The window with the CPU's run-ahead, and what it does after the last kernel, if in reach."""
    start, end = host_span(result, iteration)
    reach = MOST_LEAD * (window[1] - window[0])
    return (
        min(window[0], start) if window[0] - start <= reach else window[0],
        max(window[1], end) if end - window[1] <= reach else window[1],
    )


def _narrowed(window: Interval, origin: float, time: tuple[float | None, float | None]) -> Interval:
    low = window[0] if time[0] is None else origin + time[0]
    high = window[1] if time[1] is None else origin + time[1]
    if high <= window[0] or low >= window[1]:
        first, last = (show_seconds(end - origin) for end in window)
        raise ValueError(f"time: nothing is there; the axis goes from {first} to {last}")
    if not low < high:
        first, last = (show_seconds(end - origin) for end in (low, high))
        raise ValueError(f"time: {first} to {last} ends before it begins")
    return low, high
