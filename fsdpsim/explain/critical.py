"""The critical path: from the end of the step back to its start through binding constraints.

Every op on it started when the one before it ended, so the step cannot be shorter unless something
on the path is. Its tiles are merged into as few segments as say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from fsdpsim.explain.causes import HOOKS, OTHER_RANKS, apportion, last_op, side_work
from fsdpsim.explain.timeline import Tile, Timeline
from fsdpsim.program import COMPUTE

#: Longest pattern that is looked for in the path, how often it must come, and how many segments
#: read well.
MAX_PATTERN = 8
MIN_REPEATS = 3
MAX_SEGMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSegment:
    """A stretch of the critical path: ``steps`` in order, ``repeats`` times. Times are seconds."""

    start: float
    end: float
    phase: str
    steps: tuple[str, ...]
    """What bound the step: a phase (its compute), a kind of collective, ``side_copy``, ``host``."""
    repeats: int
    units: tuple[str, ...]
    """Units of the segment in order of their first time."""
    seconds: dict[str, float]
    """By kind of op or cause."""


@dataclass(slots=True, eq=False)
class _Item:
    """Consecutive tiles of the same step."""

    start: float
    end: float
    phase: str
    steps: tuple[str, ...]
    repeats: int = 1
    units: dict[str, None] = field(default_factory=dict)
    exact: dict[str, Fraction] = field(default_factory=dict)

    def join(self, other: _Item) -> None:
        """Take over ``other``, which follows."""
        self.end = other.end
        self.units |= other.units
        for kind, length in other.exact.items():
            self.exact[kind] = self.exact.get(kind, Fraction(0)) + length


def critical_path(timeline: Timeline) -> list[PathSegment]:
    """The path in order of time. The seconds of all segments sum to the step time exactly."""
    low, high = timeline.result.window
    tiles = list(timeline.walk_back(last_op(timeline.result), high, low))
    items = _merged(list(_items(tiles))[::-1], lambda item: (item.phase, *item.steps))
    found = _repeats(items)
    if len(found) > MAX_SEGMENTS:
        found = _repeats(_merged(items, lambda item: item.phase))
    cells = [(item, kind) for item in found for kind in item.exact]
    lengths = apportion([item.exact[kind] for item, kind in cells], timeline.result.step_time)
    seconds = dict(zip(((id(i), k) for i, k in cells), lengths, strict=True))
    return [
        PathSegment(
            start=item.start,
            end=item.end,
            phase=item.phase,
            steps=item.steps,
            repeats=item.repeats,
            units=tuple(item.units),
            seconds={kind: seconds[id(item), kind] for kind in item.exact},
        )
        for item in found
    ]


def path_totals(path: Sequence[PathSegment]) -> dict[str, float]:
    """Seconds of the whole path by kind, longest first."""
    totals: dict[str, float] = {}
    for segment in path:
        for kind, seconds in segment.seconds.items():
            totals[kind] = totals.get(kind, 0.0) + seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _items(tiles: Sequence[Tile]) -> Iterator[_Item]:
    """One item per tile, in the order given (latest first): the host works for what comes after."""
    phase = ""
    for tile in tiles:
        op = tile.op
        phase = op.phase if op is not None else phase
        step, kind, unit = _describe(tile, phase)
        length = Fraction(tile.end) - Fraction(tile.start)
        units: dict[str, None] = {unit: None} if unit else {}
        yield _Item(tile.start, tile.end, phase, (step,), units=units, exact={kind: length})


def _describe(tile: Tile, phase: str) -> tuple[str, str, str]:
    """(step, kind, unit) of one tile."""
    op, host = tile.op, tile.host
    if op is not None:
        if op.collective is not None:
            return op.kind, op.kind, op.unit
        if op.stream == COMPUTE:
            return phase, op.kind, op.unit
        return side_work(op), side_work(op), op.unit
    if host is None:
        return OTHER_RANKS, OTHER_RANKS, ""
    return "host", "hook" if host.cause in HOOKS else host.cause, host.unit


def _merged(items: Sequence[_Item], key: Callable[[_Item], object]) -> list[_Item]:
    """Neighbours of equal ``key`` as one."""
    found: list[_Item] = []
    for item in items:
        if found and key(found[-1]) == key(item):
            found[-1].steps = tuple(dict.fromkeys((*found[-1].steps, *item.steps)))
            found[-1].join(item)
        else:
            found.append(_copy(item))
    return found


def _repeats(items: Sequence[_Item]) -> list[_Item]:
    """A pattern that repeats without a break becomes one item; the longest stretch is taken."""
    found: list[_Item] = []
    keys = [(item.phase, item.steps) for item in items]
    at = 0
    while at < len(items):
        size, times = max(
            ((p, _times(keys, at, p)) for p in range(1, MAX_PATTERN + 1)),
            key=lambda pair: (pair[0] * pair[1] if pair[1] >= MIN_REPEATS else 1, -pair[0]),
        )
        if times < MIN_REPEATS:
            size = times = 1
        whole = _copy(items[at])
        for item in items[at + 1 : at + size * times]:
            whole.join(item)
        whole.steps = _steps(items[at : at + size])
        whole.repeats = times
        found.append(whole)
        at += size * times
    return found


def _steps(pattern: Sequence[_Item]) -> tuple[str, ...]:
    """The steps of a pattern; of whole phases each step once, as their order is lost anyway."""
    steps = [step for item in pattern for step in item.steps]
    return tuple(steps if len(steps) == len(pattern) else dict.fromkeys(steps))


def _times(keys: Sequence[object], at: int, size: int) -> int:
    """How often the pattern of ``size`` keys at ``at`` follows itself."""
    pattern, times = keys[at : at + size], 1
    if len(pattern) < size:
        return 0
    while keys[at + size * times : at + size * (times + 1)] == pattern:
        times += 1
    return times


def _copy(item: _Item) -> _Item:
    return _Item(
        item.start,
        item.end,
        item.phase,
        item.steps,
        units=dict(item.units),
        exact=dict(item.exact),
    )
