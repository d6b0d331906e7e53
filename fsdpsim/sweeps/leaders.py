"""The rows worth showing, kept while any number of rows goes by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fsdpsim.faults import did_you_mean
from fsdpsim.sweeps.pareto import ParetoFront
from fsdpsim.sweeps.row import MORE_IS_BETTER, Row

#: Rows without figures that are shown with their reason.
MAX_REJECTED = 10


class UnknownKeyError(ValueError):
    """``--sort`` names what no row has."""


@dataclass(slots=True, kw_only=True)
class Leaders:
    """The first ``top`` rows by ``sort``, the Pareto front, and how many had which status.

    ``sort`` is a setting or a figure by dotted name: smallest first, largest first after a ``-`` or
    where more is better. Rows that lack it, such as those without enough memory, come last.
    """

    sort: str
    top: int
    front: ParetoFront
    rows: list[Row] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        """Take ``row`` in. Raises :class:`UnknownKeyError`."""
        self.counts[row.status] += 1
        if row.status in ("invalid", "failed"):
            if len(self.rejected) < MAX_REJECTED:
                self.rejected.append(row)
            return
        self._check(row)
        self.front.add(row)
        self.rows.append(row)
        if len(self.rows) >= 2 * self.top:
            self._cut()

    def best(self) -> list[Row]:
        """The first rows, in order."""
        self._cut()
        return self.rows

    def _cut(self) -> None:
        self.rows.sort(key=self._rank)
        del self.rows[self.top :]

    @property
    def key(self) -> str:
        """What is sorted by, without the sign."""
        return self.sort.removeprefix("-")

    def _rank(self, row: Row) -> tuple[bool, float, str, int]:
        value = row.get(self.key)
        number = float(value) if isinstance(value, (int, float)) else 0.0
        descending = self.sort.startswith("-") or self.key in MORE_IS_BETTER
        text = value if isinstance(value, str) else ""
        return value is None, -number if descending else number, text, row.point

    def _check(self, row: Row) -> None:
        known: dict[str, Any] = row.flat()
        if row.status == "ok" and self.key not in known:
            hint = did_you_mean(self.key, known, f"known are {', '.join(known)}")
            raise UnknownKeyError(f"--sort {self.key}: no such setting or figure; {hint}")
