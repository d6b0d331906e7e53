"""The one number that is fitted: how fast each machine's matrix products are.

The same job differs by up to a third between machines of one kind of GPU (power limit, cooling,
drivers, library versions), which no preset can know. Step time is close to linear in
1 / efficiency, so that two simulations of each row give the whole curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fsdpsim.validate.predict import predict_rows
from fsdpsim.validate.rows import Measurements, Row, measured_step_seconds
from fsdpsim.validate.statistics import is_clean

#: Efficiencies at which the rows are simulated.
PROBES = (0.7, 0.9)

#: Efficiencies that are tried.
CANDIDATES = tuple(n / 1000 for n in range(400, 1201))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Step time of one row over 1 / efficiency, as a fraction of the measured time."""

    at_zero: float
    slope: float

    def error(self, efficiency: float) -> float:
        return abs(self.at_zero + self.slope / efficiency - 1)


def fit_efficiencies(data: Measurements, *, jobs: int = 1) -> dict[str, tuple[float, int]]:
    """Machine -> (the efficiency of least mean error over its clean rows, their number)."""
    rows = [row for row in data.rows if is_clean(row)]
    lines = _lines(data, rows, jobs)
    return {
        machine: (min(CANDIDATES, key=lambda e: fmean(line.error(e) for line in own)), len(own))
        for machine, own in sorted(lines.items())
    }


def _lines(data: Measurements, rows: Sequence[Row], jobs: int) -> dict[str, list[_Line]]:
    slow, fast = (predict_rows(data, rows, jobs=jobs, efficiency=e) for e in PROBES)
    lines: dict[str, list[_Line]] = {}
    for row, first, second in zip(rows, slow, fast, strict=True):
        measured = measured_step_seconds(row)
        if measured is None or first.prediction is None or second.prediction is None:
            continue
        times = first.prediction.step_time, second.prediction.step_time
        if times[0] is not None and times[1] is not None:
            slope = (times[0] - times[1]) / (1 / PROBES[0] - 1 / PROBES[1]) / measured
            line = _Line(at_zero=times[0] / measured - slope / PROBES[0], slope=slope)
            lines.setdefault(row["hw"], []).append(line)
    return lines
