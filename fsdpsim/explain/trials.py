"""Simulating the remedies: what each would change in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdpsim.explain.catalogue import Remedy, remedies
from fsdpsim.result import Result
from fsdpsim.scenario import ScenarioError
from fsdpsim.simulate import simulate

#: Smaller changes than this share of the step or the peak do not count.
NOTICEABLE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One remedy, simulated. Gains are against the scenario as it is: more is better."""

    what: str
    changes: dict[str, Any]
    text: str
    """The changes as ``--set`` takes them."""
    fits: bool
    step_time: float | None
    """Seconds; None when memory runs out."""
    peak_allocated: int
    peak_reserved: int
    time_gain: float | None
    """Share of the step time saved; None when either runs out of memory."""
    allocated_gain: int
    """Bytes of the peak saved."""
    reserved_gain: int
    oom: str
    """What memory ran out for; empty when it fits."""

    @property
    def verdict(self) -> str:
        """``helps`` (in something), ``hurts``, or ``no change``; for one that runs out, ``oom``."""
        if not self.fits:
            return "oom"
        gains = [
            self.time_gain or 0.0,
            _share(self.allocated_gain, self.peak_allocated),
            _share(self.reserved_gain, self.peak_reserved),
        ]
        if any(gain > NOTICEABLE for gain in gains):
            return "helps"
        return "hurts" if any(gain < -NOTICEABLE for gain in gains) else "no change"


def _share(gain: int, left: int) -> float:
    before = gain + left
    return gain / before if before else 0.0


def try_remedies(result: Result, progress: Callable[[str], object] = str) -> list[Trial]:
    """Each remedy of the catalogue, simulated; those that save most time first.

    After an out-of-memory: the ones that fit, fastest first, then those that do not.
    """
    trials = list(_trials(result, progress))
    if result.memory.oom is not None:
        return sorted(trials, key=lambda t: (not t.fits, t.step_time or 0.0))
    return sorted(trials, key=lambda t: (-max(t.time_gain or 0.0, NOTICEABLE), -t.reserved_gain))


def _trials(result: Result, progress: Callable[[str], object]) -> Iterator[Trial]:
    for remedy in remedies(result.scenario, for_oom=result.memory.oom is not None):
        progress(remedy.text)
        try:
            yield _trial(result, remedy, simulate(remedy.scenario))
        except ScenarioError:
            continue  # only the model can tell, for example a unit size that it does not have


def _trial(before: Result, remedy: Remedy, after: Result) -> Trial:
    oom = after.memory.oom
    both_fit = before.memory.oom is None and oom is None
    saved = 1 - after.step_time / before.step_time if both_fit and before.step_time else None
    return Trial(
        what=remedy.what,
        changes=dict(remedy.changes),
        text=remedy.text,
        fits=oom is None,
        step_time=None if oom else after.step_time,
        peak_allocated=after.peak("allocated"),
        peak_reserved=after.peak("reserved"),
        time_gain=saved,
        allocated_gain=before.peak("allocated") - after.peak("allocated"),
        reserved_gain=before.peak("reserved") - after.peak("reserved"),
        oom="" if oom is None else f"{oom.buffer.name} of {oom.buffer.unit} in {oom.buffer.phase}",
    )
