"""The causes of the step, summed: the rows that add up to the step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from fsdpsim.explain.causes import Gap, Segment, apportion


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the compute stream did, or why it was idle."""

    cause: str
    """Busy: the kind of op. Idle: a collective's kind (it runs), ``queue``, ``side_copy``,
    ``launch``, ``hook``, ``cuda_malloc``, what the host waited for, or ``other_ranks``."""
    busy: bool
    """Whether the compute stream ran something."""
    waits_for: str
    """Kind of the op that an idle compute stream waited for; empty when busy."""
    behind: str
    """Kind of the collective that ran in front, when the cause is a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Cause):
    """One cause within the step. The ``seconds`` of all parts sum to the step time exactly."""

    seconds: float
    count: int
    """Busy: ops. Idle: gaps of the compute stream in which it is found."""
    units: tuple[str, ...]
    """Units whose op ran or was waited for, in order of their first time."""


def parts(
    segments: Sequence[Segment], gaps: Sequence[Gap], step_time: float
) -> tuple[list[Part], dict[str, float]]:
    """The causes of the step, busy ones first, then by length; and the idle seconds by reason.

    A reason is why what was waited for had not come earlier. Both sum to the idle time exactly.
    """
    seconds = _cells(segments, gaps, step_time)
    by_cause: dict[Cause, float] = {}
    by_reason: dict[str, float] = {}
    for (cause, reason), length in seconds.items():
        by_cause[cause] = by_cause.get(cause, 0.0) + length
        if not cause.busy:
            by_reason[reason] = by_reason.get(reason, 0.0) + length
    counts, units = _counts(segments, gaps)
    found = [
        Part(**asdict(cause), seconds=length, count=counts[cause], units=tuple(units[cause]))
        for cause, length in by_cause.items()
    ]
    return (
        sorted(found, key=lambda part: (not part.busy, -part.seconds)),
        dict(sorted(by_reason.items(), key=lambda item: -item[1])),
    )


def _cells(
    segments: Sequence[Segment], gaps: Sequence[Gap], step_time: float
) -> dict[tuple[Cause, str], float]:
    """Seconds by cause and reason: rounded once, so that all sums of them agree."""
    exact: dict[tuple[Cause, str], Fraction] = {}
    for reason, group in _groups(segments, gaps):
        for segment in group:
            key = _cause(segment), reason
            exact[key] = exact.get(key, Fraction(0)) + segment.exact
    return dict(zip(exact, apportion(list(exact.values()), step_time), strict=True))


def _counts(
    segments: Sequence[Segment], gaps: Sequence[Gap]
) -> tuple[Counter[Cause], dict[Cause, dict[str, None]]]:
    """In how many groups each cause is found, and for which units."""
    counts: Counter[Cause] = Counter()
    units: dict[Cause, dict[str, None]] = {}
    for _, group in _groups(segments, gaps):
        counts.update({_cause(segment) for segment in group})
        for segment in group:
            named = units.setdefault(_cause(segment), {})
            if (op := segment.op if segment.busy else segment.waits_for) is not None:
                named.setdefault(op.unit)
    return counts, units


def _groups(
    segments: Iterable[Segment], gaps: Iterable[Gap]
) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Each busy segment, and each gap with its reason."""
    yield from (("", [segment]) for segment in segments if segment.busy)
    yield from ((gap.held_by, gap.segments) for gap in gaps)


def _cause(segment: Segment) -> Cause:
    idle_for = None if segment.busy else segment.waits_for
    return Cause(
        cause=segment.cause,
        busy=segment.busy,
        waits_for="" if idle_for is None else idle_for.kind,
        behind="" if segment.behind is None else segment.behind.kind,
    )
