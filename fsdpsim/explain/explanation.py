"""The whole explanation of one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdpsim.explain.bounds import Bound, Exposure, exposures, lower_bounds
from fsdpsim.explain.causes import partition
from fsdpsim.explain.critical import PathSegment, critical_path, path_totals
from fsdpsim.explain.oom import OomCause, oom_cause
from fsdpsim.explain.owners import Peak, peak
from fsdpsim.explain.parts import Part, parts
from fsdpsim.explain.timeline import Timeline
from fsdpsim.explain.trials import Trial
from fsdpsim.intervals import Interval
from fsdpsim.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one simulated step takes its time and memory. Times are seconds, sizes bytes.

    After an out-of-memory there is no step: ``oom`` is all there is to say beside the peak.
    """

    scenario: str
    title: str
    window: Interval
    step_time: float
    parts: tuple[Part, ...]
    """Their ``seconds`` sum to ``step_time``, exactly and in any order."""
    held_by: dict[str, float]
    """The idle seconds again, by why what was waited for had not come earlier; they sum to
    ``idle`` exactly."""
    critical_path: tuple[PathSegment, ...]
    """All ``seconds`` of the segments sum to ``step_time`` exactly."""
    lower_bounds: tuple[Bound, ...]
    exposed: tuple[Exposure, ...]
    peak: Peak | None
    oom: OomCause | None

    @property
    def busy(self) -> float:
        """Seconds in which the compute stream ran something."""
        return sum(part.seconds for part in self.parts if part.busy)

    @property
    def idle(self) -> float:
        """Seconds in which the compute stream waited; with ``busy``, the step time exactly."""
        return sum(part.seconds for part in self.parts if not part.busy)

    def as_json(self) -> dict[str, Any]:
        """Plain data: names of seconds end in ``_s``, of bytes in ``_bytes``."""
        return {
            "scenario": self.scenario,
            "title": self.title,
            "step_time_s": None if self.oom else self.step_time,
            "busy_s": self.busy,
            "idle_s": self.idle,
            "parts": [_renamed(asdict(part)) for part in self.parts],
            "idle_held_by_s": self.held_by,
            "critical_path": {
                "by_kind_s": path_totals(self.critical_path),
                "segments": [_renamed(asdict(segment)) for segment in self.critical_path],
            },
            "lower_bounds": [_renamed(asdict(bound)) for bound in self.lower_bounds],
            "exposed_communication": [_renamed(asdict(row)) for row in self.exposed],
            "peak": None if self.peak is None else _renamed(asdict(self.peak)),
            "oom": None if self.oom is None else _oom_json(self.oom),
        }


def explain(result: Result) -> Explanation:
    """Explain the step of ``result``: its last iteration."""
    ran = result.memory.oom is None
    timeline = Timeline(result)
    segments, gaps = partition(timeline) if ran else ([], [])
    causes, held_by = parts(segments, gaps, result.step_time)
    return Explanation(
        scenario=result.scenario.name,
        title=result.scenario.title,
        window=result.window,
        step_time=result.step_time,
        parts=tuple(causes),
        held_by=held_by,
        critical_path=tuple(critical_path(timeline)) if ran else (),
        lower_bounds=tuple(lower_bounds(timeline)) if ran else (),
        exposed=tuple(exposures(result)) if ran else (),
        peak=peak(result),
        oom=oom_cause(result),
    )


#: Fields that are quantities, and what their JSON names end in.
_SECONDS = frozenset({"start", "end", "time", "exposed"})
_BYTES = frozenset({"requested", "allocated", "active", "reserved", "peak_reserved", "missing"})


def _renamed(value: Any) -> Any:
    """Field names with their unit, as ``run --json`` has them."""
    if isinstance(value, dict):
        return {_name(key): _renamed(item) for key, item in value.items()}
    return [_renamed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _name(key: str) -> str:
    return f"{key}_s" if key in _SECONDS else f"{key}_bytes" if key in _BYTES else key


def trials_json(trials: Sequence[Trial] | None) -> list[dict[str, Any]] | None:
    """The remedies as plain data; None if none was tried."""
    if trials is None:
        return None
    return [
        {
            "what": trial.what,
            "changes": trial.changes,
            "verdict": trial.verdict,
            "fits": trial.fits,
            "step_time_s": trial.step_time,
            "time_gain": trial.time_gain,
            "peak_allocated_bytes": trial.peak_allocated,
            "peak_reserved_bytes": trial.peak_reserved,
            "allocated_gain_bytes": trial.allocated_gain,
            "reserved_gain_bytes": trial.reserved_gain,
            "oom": trial.oom or None,
        }
        for trial in trials
    ]


def _oom_json(oom: OomCause) -> dict[str, Any]:
    report = {k: v for k, v in asdict(oom.report).items() if k not in ("stream", "rejected")}
    fields = asdict(oom)
    del fields["report"], fields["outside_allocator"]
    return {
        **_renamed(fields),
        "stream": oom.report.stream,
        "rejected": oom.report.rejected,
        **{f"{key}_bytes": value for key, value in report.items()},
        "outside_allocator_bytes": oom.outside_allocator,
        "unusable_bytes": oom.unusable,
    }
