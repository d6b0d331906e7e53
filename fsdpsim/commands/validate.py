"""``fsdpsim validate``: predictions against published training runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common
from fsdpsim.commands.paths import spare_inputs
from fsdpsim.commands.workers import positive

if TYPE_CHECKING:
    from rich.table import Table

    from fsdpsim.validate import Measurements, Outcome

HELP = "compare predictions with published training runs"

#: What is written with ``-o``.
FILES = ("validate.json", "validate.csv", "validate.png")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "rows",
        nargs="?",
        type=Path,
        metavar="ROWS.json",
        help="runs to compare with, as fsdpsim/data/measurements.json; default: that file",
    )
    common.add_json(parser)
    parser.add_argument(
        "-j",
        "--jobs",
        type=positive,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes (default: one per CPU, at most 8)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help=f"write {', '.join(FILES)} here",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="only rows whose id contains TEXT, e.g. --only tt-log"
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="print the efficiency of each machine that fits these rows best, and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Predict every row that can be modelled, and print what was found."""
    from fsdpsim.validate import RowsError, read_measurements, report, run_checks

    try:
        data = read_measurements(args.rows) if args.rows else read_measurements()
    except RowsError as error:
        raise common.UsageError(str(error)) from None
    if args.fit:
        return _fit(data, args)
    if args.rows is not None and args.output is not None:
        spare_inputs((args.output / name for name in FILES), [args.rows])
    outcomes = _outcomes(data, args)
    found = report(outcomes, data)
    if args.rows is None and not args.only:
        found["checks"] = [check.as_dict() for check in run_checks(data, jobs=args.jobs)]
    if args.output is not None:
        _write(found, args.output)
    if args.json:
        common.print_json(found)
    else:
        _print(found)
    return 0


def _outcomes(data: Measurements, args: argparse.Namespace) -> list[Outcome]:
    from fsdpsim.validate import predict_rows

    rows = [row for row in data.rows if not args.only or args.only in row["id"]]
    if not rows:
        raise common.UsageError(f"no row's id contains {args.only!r}")
    outcomes = []
    for number, outcome in enumerate(predict_rows(data, rows, jobs=args.jobs), start=1):
        outcomes.append(outcome)
        if sys.stderr.isatty():
            end = "\r" if number < len(rows) else "\n"
            print(f"{number} of {len(rows)} rows", end=end, file=sys.stderr, flush=True)
    return outcomes


def _fit(data: Measurements, args: argparse.Namespace) -> int:
    from fsdpsim.validate import fit_efficiencies

    for machine, (efficiency, count) in fit_efficiencies(data, jobs=args.jobs).items():
        print(f"{machine}: efficiency = {efficiency:.3f}  # {count} rows")
    return 0


def _write(found: dict[str, Any], folder: Path) -> None:
    import json

    from fsdpsim.files import make_directory, write_bytes, write_text
    from fsdpsim.validate import as_csv
    from fsdpsim.validate.scatter import scatter_png

    make_directory(folder)
    write_text(folder / "validate.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
    write_text(folder / "validate.csv", as_csv(found["rows"]))
    write_bytes(folder / "validate.png", scatter_png(found["rows"]))


# ---- text


def _print(found: dict[str, Any]) -> None:
    console = common.console()
    tables = [_rows(found["rows"]), _skipped(found["skipped"]), _sources(found), _trends(found)]
    for table in (*tables, _checks(found.get("checks", ())), _overall(found)):
        if table.row_count:
            console.print(table)
            console.print()


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _rows(rows: list[dict[str, Any]]) -> Table:
    table = _table("Rows", "id", "measured", "predicted", "error", "reserved", "predicted", "error")
    for row in rows:
        table.add_row(
            row["id"],
            _seconds(row["measured_step_time_s"]),
            _seconds(row["predicted_step_time_s"]) or "out of memory",
            _signed(row["step_time_error"]),
            _gib(row["measured_peak_reserved_bytes"]),
            _gib(row["predicted_peak_reserved_bytes"]),
            _signed(row["peak_reserved_error"]),
        )
    return table


def _skipped(skipped: list[dict[str, Any]]) -> Table:
    table = _table("Skipped", "reason", "rows")
    reasons: dict[str, list[str]] = {}
    for entry in skipped:
        reasons.setdefault(entry["reason"], []).append(entry["id"])
    for reason, ids in reasons.items():
        table.add_row(reason, ", ".join(ids) if len(ids) <= 4 else f"{len(ids)} rows")
    return table


ERROR_COLUMNS = ("rows", "median", "mean", "p90", "max", "bias")


def _error_cells(errors: dict[str, Any]) -> list[str]:
    kinds = ("median", "mean", "p90", "max")
    return [
        str(errors["n"]),
        *(_share(errors[f"{kind}_abs_error"]) for kind in kinds),
        _signed(errors["bias"]),
    ]


def _sources(found: dict[str, Any]) -> Table:
    table = _table("By source (quality A)", "source", *ERROR_COLUMNS)
    for source, figures in found["by_source"].items():
        for key, errors in figures.items():
            table.add_row(f"{source} {_label(key)}", *_error_cells(errors))
    return table


def _trends(found: dict[str, Any]) -> Table:
    table = _table("Step time by (bias per doubling)", "", *ERROR_COLUMNS)
    for trend in found["trends"]:
        table.add_row(f"{trend['quantity']} ({_signed(trend['bias_per_doubling'])})")
        for label, errors in trend["bins"].items():
            table.add_row(f"  {label}", *_error_cells(errors))
    return table


def _checks(checks: Sequence[dict[str, Any]]) -> Table:
    table = _table("Other published figures", "", "published", "predicted", "allowed", "")
    for check in checks:
        figures = (f"{check[key]:.4g}" for key in ("published", "predicted"))
        allowed = f"{check['low']:.4g} to {check['high']:.4g}"
        table.add_row(check["name"], *figures, allowed, "" if check["holds"] else "missed")
    return table


def _overall(found: dict[str, Any]) -> Table:
    table = _table("Overall (quality A)", "", *ERROR_COLUMNS)
    for key, errors in found["overall"].items():
        table.add_row(_label(key), *_error_cells(errors))
    trivial = found["trivial"]["step_time"]
    table.add_row("step time of one MFU per machine", *_error_cells(trivial))
    for key, errors in found["other_quality"].items():
        if errors["n"]:
            table.add_row(f"other quality: {_label(key)}", *_error_cells(errors))
    return table


def _label(key: str) -> str:
    return {"step_time": "step time", "peak_reserved": "peak reserved"}[key]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f} GiB"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
