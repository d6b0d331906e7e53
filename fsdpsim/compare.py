"""Two results side by side: the settings, the figures and the causes that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fsdpsim.explain import Explanation, explain
from fsdpsim.explain.parts import Cause, Part
from fsdpsim.resolved import resolved
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.keys import join_key, split_key
from fsdpsim.summary import summary
from fsdpsim.units import dimension_of

#: Figures of the summary that are compared, in this order; those that neither has are left out.
FIGURES = (
    "step_time_s",
    "compute_time_s",
    "exposed_communication_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "num_alloc_retries",
    "max_unsharded_units",
)

#: Changes below this share of the step (or of the figure) are what rounding leaves of none.
NOISE = 1e-12

#: Keys that say nothing of what is simulated.
NOT_SETTINGS = ("title", "sweep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A dotted key whose values differ; None where a scenario does not have it."""

    key: str
    a: Any
    b: Any
    given: bool
    """Whether either file (or an override) says it; else it follows from another setting."""
    dimension: str | None
    """What it measures, if it is a quantity: a key of :data:`fsdpsim.units.SYMBOLS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the summary of both, also where it is equal. The name ends in the unit."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange(Cause):
    """Seconds of one cause in both steps."""

    a: float
    b: float

    @property
    def change(self) -> float:
        """Seconds that B spends more on it; the changes sum to that of the step time."""
        return self.b - self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between two scenarios and their simulated steps."""

    a: str
    b: str
    """Names for tables: titles where they differ, else file names."""
    settings: tuple[Setting, ...]
    figures: tuple[Figure, ...]
    causes: tuple[CauseChange, ...]
    """Largest change first; empty when either runs out of memory."""
    oom_a: dict[str, Any] | None
    oom_b: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        causes = [asdict(c) | {"change": c.change} for c in self.causes]
        return asdict(self) | {"causes": [_seconds(c) for c in causes]}


def _seconds(cause: dict[str, Any]) -> dict[str, Any]:
    return {f"{k}_s" if k in ("a", "b", "change") else k: v for k, v in cause.items()}


def compare(a: Result, b: Result) -> Comparison:
    """Compare the steps of two results."""
    figures_a, figures_b = summary(a), summary(b)
    names = _names(a.scenario, b.scenario)
    steps = [found["step_time_s"] or 0.0 for found in (figures_a, figures_b)]
    return Comparison(
        a=names[0],
        b=names[1],
        settings=tuple(differing_settings(a.scenario, b.scenario)),
        figures=tuple(_figures(figures_a, figures_b, max(steps))),
        causes=tuple(_cause_changes(explain(a), explain(b), max(steps))),
        oom_a=figures_a["oom"],
        oom_b=figures_b["oom"],
    )


def _figures(a: Mapping[str, Any], b: Mapping[str, Any], step: float) -> Iterator[Figure]:
    for name in FIGURES:
        one, other = (None if _unknown(name, found) else found[name] for found in (a, b))
        if one and other:
            other = _unless_noise(one, other, step if name.endswith("_s") else abs(one))
        if one or other:
            yield Figure(name=name, a=one, b=other)


def _unless_noise(a: Any, b: Any, scale: float) -> Any:
    """``b``, or ``a`` if they differ only by rounding."""
    return a if abs(b - a) <= NOISE * scale else b


def _unknown(name: str, figures: Mapping[str, Any]) -> bool:
    """There is no step to time after an out-of-memory."""
    return figures["oom"] is not None and name.endswith("_s")


def _names(a: Scenario, b: Scenario) -> tuple[str, str]:
    for one, other in ((a.title, b.title), (a.name, b.name), (a.source, b.source)):
        if one != other and one and other:
            return one, other
    return f"{a.name} (A)", f"{b.name} (B)"


def differing_settings(a: Scenario, b: Scenario) -> Iterator[Setting]:
    """Dotted keys of the resolved scenarios with different values, sorted."""
    flat_a, flat_b = (dict(_flat(resolved(scenario))) for scenario in (a, b))
    given = {key for scenario in (a, b) for key, _ in _flat(scenario.tables)}
    for key in sorted(flat_a.keys() | flat_b.keys()):
        one, other = flat_a.get(key), flat_b.get(key)
        if one != other:
            dimension = _dimension(a, key) or _dimension(b, key)
            yield Setting(key=key, a=one, b=other, given=key in given, dimension=dimension)


def _dimension(scenario: Scenario, key: str) -> str | None:
    table: Any = scenario
    *path, last = split_key(key)
    for part in path:
        table = getattr(table, part, None)
    return dimension_of(getattr(type(table), "model_fields", {}).get(last))


def _flat(tables: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if not path and key in NOT_SETTINGS:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, key))
        else:
            yield join_key((*path, key)), value


def _cause_changes(a: Explanation, b: Explanation, step: float) -> list[CauseChange]:
    if a.oom is not None or b.oom is not None:
        return []
    seconds_a, seconds_b = (
        {_cause(part): part.seconds for part in found.parts} for found in (a, b)
    )
    changes = []
    for cause in dict.fromkeys([*seconds_a, *seconds_b]):
        one, other = seconds_a.get(cause, 0.0), seconds_b.get(cause, 0.0)
        changes.append(CauseChange(**asdict(cause), a=one, b=_unless_noise(one, other, step)))
    return sorted(changes, key=lambda c: (-abs(c.change), -c.a))


def _cause(part: Part) -> Cause:
    return Cause(cause=part.cause, busy=part.busy, waits_for=part.waits_for, behind=part.behind)
