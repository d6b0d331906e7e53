"""Sets of addresses, as disjoint half-open spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class Spans:
    """Disjoint spans ``[start, end)`` in address order; adjacent ones are joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the span that holds ``address``."""
        position = bisect_right(self._starts, address) - 1
        if position < 0 or address >= self._ends[position]:
            return None
        return self._starts[position], self._ends[position]

    def add(self, start: int, end: int) -> None:
        """Add addresses; what is there already is absorbed."""
        first = bisect_right(self._ends, start - 1) if start else 0
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> bool:
        """Remove addresses that lie in one span; False, and nothing removed, if they do not."""
        span = self.find(start)
        if span is None or end > span[1]:
            return False
        position = bisect_right(self._starts, start) - 1
        rest = [part for part in ((span[0], start), (end, span[1])) if part[0] < part[1]]
        self._starts[position : position + 1] = [part[0] for part in rest]
        self._ends[position : position + 1] = [part[1] for part in rest]
        return True
