"""Errors of predictions, as fractions of the measured value, and how they depend on the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from fsdpsim.validate.predict import Outcome
from fsdpsim.validate.rows import Row, measured_reserved_bytes, measured_step_seconds

#: A job that ran, but is predicted to run out of memory, counts as this error.
OUT_OF_MEMORY = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Statistics of (predicted - measured) / measured."""

    n: int
    median_abs_error: float | None
    mean_abs_error: float | None
    p90_abs_error: float | None
    max_abs_error: float | None
    bias: float | None
    """Mean of the signed errors: positive when predictions are too large."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def errors_of(values: Iterable[float | None]) -> Errors:
    """Statistics of signed errors; None is left out."""
    signed = [v for v in values if v is not None]
    if not signed:
        return Errors(
            n=0,
            median_abs_error=None,
            mean_abs_error=None,
            p90_abs_error=None,
            max_abs_error=None,
            bias=None,
        )
    absolute = sorted(map(abs, signed))
    return Errors(
        n=len(signed),
        median_abs_error=median(absolute),
        mean_abs_error=fmean(absolute),
        p90_abs_error=quantile(absolute, 0.9),
        max_abs_error=absolute[-1],
        bias=fmean(signed),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ordered values lie, linear between neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


# ---- one row


def step_time_error(outcome: Outcome) -> float | None:
    """Signed error of the step time, so also of 1 / tokens per second; None if not measured."""
    measured, found = measured_step_seconds(outcome.row), outcome.prediction
    if measured is None or found is None:
        return None
    return OUT_OF_MEMORY if found.step_time is None else found.step_time / measured - 1


def peak_reserved_error(outcome: Outcome) -> float | None:
    """Signed error of the peak of reserved memory; None if not measured."""
    measured, found = measured_reserved_bytes(outcome.row), outcome.prediction
    if measured is None or found is None:
        return None
    return OUT_OF_MEMORY if found.step_time is None else found.peak_reserved / measured - 1


def is_clean(row: Row) -> bool:
    """Whether the source is of quality A or A-; a row that does not say counts."""
    return str(row.get("quality") or "A") in ("A", "A-")


# ---- many rows


#: What errors are held against: label -> value of a row (None leaves it out).
SCALES: Mapping[str, Callable[[Row, Any], float | None]] = {
    "sequence length": lambda row, _: row["seq_len"],
    "GPUs": lambda row, _: row["n_gpus"],
    "model parameters": lambda row, parameters: parameters,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How the signed error of the step time depends on one quantity."""

    quantity: str
    per_doubling: float
    """Slope of the error over log2 of the quantity."""
    bins: tuple[tuple[str, Errors], ...]


def trends(outcomes: Sequence[Outcome], parameters: Callable[[Row], float | None]) -> list[Trend]:
    """The trends of the step time's error over all :data:`SCALES`."""
    found = []
    for quantity, scale in SCALES.items():
        points = [
            (value, error)
            for o in outcomes
            if (error := step_time_error(o)) is not None
            and (value := scale(o.row, parameters(o.row)))
        ]
        if points:
            found.append(_trend(quantity, points))
    return found


def _trend(quantity: str, points: Sequence[tuple[float, float]]) -> Trend:
    bins: dict[int, list[float | None]] = {}
    for value, error in points:
        bins.setdefault(math.floor(math.log2(value) / 2), []).append(error)
    return Trend(
        quantity=quantity,
        per_doubling=slope([(math.log2(value), error) for value, error in points]),
        bins=tuple((_bin_label(n), errors_of(bins[n])) for n in sorted(bins)),
    )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares; 0 when all points lie at one place."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _bin_label(n: int) -> str:
    return f"{_short(4**n)} to {_short(4 ** (n + 1))}"


def _short(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


# ---- the trivial predictor


def trivial_errors(outcomes: Sequence[Outcome]) -> Errors:
    """Errors of one constant MFU per machine, the best one for these same rows.

    The predictor knows the model's FLOPs (6 N and attention) and the GPU's peak, and nothing else.
    """
    groups: dict[str, list[float]] = {}
    for outcome in outcomes:
        measured, found = measured_step_seconds(outcome.row), outcome.prediction
        if measured is not None and found is not None:
            ideal = found.model_flops / found.peak_flops
            groups.setdefault(outcome.row["hw"], []).append(ideal / measured)
    return errors_of(mfu / median(mfus) - 1 for mfus in groups.values() for mfu in mfus)
