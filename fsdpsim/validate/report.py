"""The results of a validation as one JSON-ready dictionary, as CSV, and as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from fsdpsim.model import ModelConfig, parameters
from fsdpsim.validate.predict import Outcome
from fsdpsim.validate.rows import (
    Measurements,
    Row,
    measured_reserved_bytes,
    measured_step_seconds,
    tokens_per_step,
)
from fsdpsim.validate.scenarios import model_config
from fsdpsim.validate.statistics import (
    errors_of,
    is_clean,
    peak_reserved_error,
    step_time_error,
    trends,
    trivial_errors,
)

#: What is compared: key in the report -> signed error of an outcome.
FIGURES: dict[str, Callable[[Outcome], float | None]] = {
    "step_time": step_time_error,
    "peak_reserved": peak_reserved_error,
}


def report(outcomes: Sequence[Outcome], data: Measurements) -> dict[str, Any]:
    """Everything that was found.

    ``overall``, ``by_source``, ``trends`` and ``trivial`` are of the rows of quality A and A-;
    ``other_quality`` of the others. Errors are fractions of the measured value.
    """
    modelled = [o for o in outcomes if o.prediction is not None]
    clean = [o for o in modelled if is_clean(o.row)]
    other = [o for o in modelled if not is_clean(o.row)]
    return {
        "overall": _figures(clean),
        "trivial": {"step_time": trivial_errors(clean).as_dict()},
        "other_quality": _figures(other),
        "by_source": {
            source: errors
            for source in dict.fromkeys(o.row.get("source", "") for o in clean)
            if (errors := _of_source(clean, source))
        },
        "trends": [
            {
                "quantity": trend.quantity,
                "bias_per_doubling": trend.per_doubling,
                "bins": {label: errors.as_dict() for label, errors in trend.bins},
            }
            for trend in trends(clean, lambda row: _parameters(row, data))
        ],
        "rows": [row_figures(o) for o in modelled],
        "skipped": [
            {"id": o.row["id"], "quality": o.row.get("quality"), "reason": o.skipped}
            for o in outcomes
            if o.prediction is None
        ],
    }


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {key: errors_of(map(error, outcomes)).as_dict() for key, error in FIGURES.items()}


def _of_source(outcomes: Sequence[Outcome], source: str) -> dict[str, Any]:
    found = _figures([o for o in outcomes if o.row.get("source", "") == source])
    return {key: errors for key, errors in found.items() if errors["n"]}


def _parameters(row: Row, data: Measurements) -> float:
    config = ModelConfig.model_validate(model_config(row, data))
    return float(sum(p.numel for p in parameters(config)))


def row_figures(outcome: Outcome) -> dict[str, Any]:
    """One row, measured and predicted, flat: a line of the CSV file."""
    row, found = outcome.row, outcome.prediction
    assert found is not None
    tokens, step = tokens_per_step(row), found.step_time
    return {
        "id": row["id"],
        "source": row.get("source"),
        "quality": row.get("quality"),
        "hardware": row["hw"],
        "model": row["model"],
        "n_gpus": row["n_gpus"],
        "seq_len": row["seq_len"],
        "micro_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row.get("grad_accum") or 1,
        "measured_step_time_s": measured_step_seconds(row),
        "predicted_step_time_s": step,
        "step_time_error": step_time_error(outcome),
        "measured_tokens_per_s_per_gpu": row.get("tps_per_gpu"),
        "predicted_tokens_per_s_per_gpu": tokens / step if tokens and step else None,
        "measured_peak_reserved_bytes": measured_reserved_bytes(row),
        "predicted_peak_reserved_bytes": found.peak_reserved,
        "peak_reserved_error": peak_reserved_error(outcome),
        "predicted_peak_active_bytes": found.peak_active,
        "predicted_peak_allocated_bytes": found.peak_allocated,
        "predicted_num_alloc_retries": found.num_alloc_retries,
        "predicted_out_of_memory": step is None,
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a report as CSV with a header; absent values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
