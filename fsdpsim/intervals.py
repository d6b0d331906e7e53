"""Sets of time as sorted, disjoint intervals. All values in seconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times covered by any of ``intervals``, sorted and disjoint; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: list[Interval], removed: list[Interval]) -> list[Interval]:
    """What of ``intervals`` no interval of ``removed`` covers; both are unions."""
    left: list[Interval] = []
    index = 0
    for start, end in intervals:
        while index < len(removed) and removed[index][1] <= start:
            index += 1
        at = index
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > start:
                left.append((start, removed[at][0]))
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def total(intervals: Iterable[Interval]) -> float:
    """Summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The part of each interval inside ``window``."""
    low, high = window
    return [(max(a, low), min(b, high)) for a, b in intervals if a < high and b > low]
