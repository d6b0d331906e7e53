"""Predictions against published training runs, and how far off they are."""

from fsdpsim.validate.checks import Check, run_checks
from fsdpsim.validate.fit import fit_efficiencies
from fsdpsim.validate.predict import Outcome, Prediction, predict, predict_row, predict_rows
from fsdpsim.validate.report import as_csv, report
from fsdpsim.validate.rows import MEASUREMENTS, Measurements, RowsError, read_measurements
from fsdpsim.validate.scenarios import SkipRow, scenario_of

__all__ = [
    "MEASUREMENTS",
    "Check",
    "Measurements",
    "Outcome",
    "Prediction",
    "RowsError",
    "SkipRow",
    "as_csv",
    "fit_efficiencies",
    "predict",
    "predict_row",
    "predict_rows",
    "read_measurements",
    "report",
    "run_checks",
    "scenario_of",
]
