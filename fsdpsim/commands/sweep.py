"""``fsdpsim sweep``: simulate every point of a scenario's ``[sweep]`` table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, spare_inputs
from fsdpsim.commands.points import settings_text, table
from fsdpsim.commands.workers import add_workers, dask_executor, positive

if TYPE_CHECKING:
    from rich.progress import Progress

    from fsdpsim.sweeps import Grid, Row
    from fsdpsim.sweeps.leaders import Leaders
    from fsdpsim.sweeps.store import Store

HELP = "simulate every combination of the keys that [sweep] varies"

#: What is written with ``-o``.
FILES = ("sweep.json", "results.jsonl", "results.csv", "sweep.png", "pareto.png", ".lock")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    common.add_json(parser)
    add_workers(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="append results here as they come; run again to go on after an interruption",
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard what the directory holds and begin anew"
    )
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="setting or figure to sort by, e.g. peak_reserved_bytes or --sort=-mfu (descending); "
        "default: step_time_s, or tokens_per_s_per_gpu when the work per step varies",
    )
    parser.add_argument(
        "--top", type=positive, default=20, metavar="N", help="rows of the table (default: 20)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the points, show the best, and write what was asked for."""
    from fsdpsim.sweeps import Grid
    from fsdpsim.sweeps.api import run_points, stored_points
    from fsdpsim.sweeps.execute import workers
    from fsdpsim.sweeps.leaders import Leaders, UnknownKeyError
    from fsdpsim.sweeps.pareto import ParetoFront, objective
    from fsdpsim.sweeps.store import Store

    if args.restart and args.output is None:
        raise common.UsageError("--restart discards what -o DIR holds; give the directory too")
    grid = Grid(common.load_scenario(args))
    _check_axes(grid)
    if args.output is not None:
        spare_inputs((args.output / name for name in FILES), files_of([grid.scenario]))
    figure = objective(grid.scenario, grid.keys)
    kept: list[Row] = []
    leaders = Leaders(sort=args.sort or figure, top=args.top, front=ParetoFront(figure))
    with ExitStack() as stack:
        executor = stack.enter_context(dask_executor(args.dask))
        staff = stack.enter_context(workers(executor, args.jobs))
        if args.output is None:
            rows = run_points(grid, grid.points(), staff)
        else:
            store = stack.enter_context(Store(args.output, grid, restart=args.restart))
            rows = stored_points(grid, store, staff)
        try:
            for row in stack.enter_context(progress(rows, len(grid))):
                leaders.add(row)
                if args.json:
                    kept.append(row)
        except UnknownKeyError as error:
            raise common.UsageError(str(error)) from None
        written = _write(grid, store) if args.output is not None else []
    if args.json:
        common.print_json(_as_json(grid, leaders, kept))
    else:
        _print(grid, leaders, written)
    return 0


def _check_axes(grid: Grid) -> None:
    """A table with ``where`` alone is for ``tune``, which has axes of its own."""
    from fsdpsim.scenario import Problem, ScenarioError
    from fsdpsim.scenario.sweep_table import EXAMPLE

    if not grid.axes:
        raise ScenarioError(grid.scenario.source, [Problem("sweep", f"varies nothing; {EXAMPLE}")])


def _write(grid: Grid, store: Store) -> list[Path]:
    from fsdpsim.plots.sweep import write_sweep_figures

    figures = write_sweep_figures(grid, store.read_rows(), store.directory)
    return [store.rows_path, store.write_csv(), *figures]


@contextmanager
def progress(rows: Iterable[Row], total: int) -> Iterator[Iterator[Row]]:
    """``rows`` with a bar on the terminal, if there is one: done, rate and time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
        auto_refresh=False,  # no second thread: processes are forked while it is shown
    )
    with bar:
        yield _counted(rows, bar, total)


def _counted(rows: Iterable[Row], bar: Progress, total: int) -> Iterator[Row]:
    task, shown = bar.add_task("", total=total, rate=""), 0.0
    for row in rows:
        yield row
        if bar.disable:
            continue
        speed = bar.tasks[0].speed
        bar.update(task, completed=row.point + 1, rate=f"{speed:,.1f} points/s" if speed else "")
        if bar.get_time() > shown + 0.1:
            shown = bar.get_time()
            bar.refresh()


# ---- output


def _print(grid: Grid, leaders: Leaders, written: Iterable[Path]) -> None:
    console = common.console()
    console.print(_headline(grid, leaders), markup=False)
    if leaders.best():
        front = leaders.front.rows
        console.print(table(leaders.best(), grid.keys, front=front, width=console.width))
    for row in leaders.rejected:
        console.print(f"{row.status}: {settings_text(row)}: {row.reason}", markup=False)
    hidden = leaders.counts["invalid"] + leaders.counts["failed"] - len(leaders.rejected)
    if hidden:
        console.print(f"and {hidden} more points that are invalid or failed", markup=False)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _as_json(grid: Grid, leaders: Leaders, rows: Iterable[Row]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "scenario": grid.scenario.name,
        "title": grid.scenario.title,
        "points": len(grid),
        "counts": {s: leaders.counts[s] for s in ("ok", "oom", "invalid", "failed")},
        "sort": leaders.sort,
        "best": [row.point for row in leaders.best()],
        "pareto": [row.point for row in leaders.front],
        "rows": [asdict(row) for row in rows],
    }


def _headline(grid: Grid, leaders: Leaders) -> str:
    counts, left_out = leaders.counts, len(grid) - leaders.counts.total()
    words = {"ok": "ran", "oom": "out of memory", "invalid": "invalid", "failed": "failed"}
    shown = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    shown += [f"{left_out} left out by where"] if left_out else []
    name = grid.scenario.title or grid.scenario.name
    points = f"{len(grid)} point{'' if len(grid) == 1 else 's'}"
    nothing = "" if counts["ok"] or counts["oom"] else "nothing ran: "
    return f"{name}: {points}; {nothing}{', '.join(shown)}"
