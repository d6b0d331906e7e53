"""``fsdpsim sweep``: simulate every point of a scenario's ``[sweep]`` table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from fsdpsim.sweeps import Grid, Row
    from fsdpsim.sweeps.execute import Executor
    from fsdpsim.sweeps.leaders import Leaders
    from fsdpsim.sweeps.store import Store

HELP = "simulate every combination of the keys that [sweep] varies"


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


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add ``-j`` and ``--dask``."""
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument(
        "-j", "--jobs", type=positive, default=1, metavar="N", help="processes (default: 1)"
    )
    workers.add_argument(
        "--dask", metavar="ADDRESS", help="run on a dask cluster, e.g. tcp://10.0.0.1:8786"
    )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "number"  # argparse shows it: invalid number value: '0'


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


def _write(grid: Grid, store: Store) -> list[Path]:
    from fsdpsim.plots.sweep import write_sweep_figures

    figures = write_sweep_figures(grid, store.read_rows(), store.directory)
    return [store.rows_path, store.write_csv(), *figures]


@contextmanager
def dask_executor(address: str | None) -> Iterator[Executor | None]:
    """The executor of a dask cluster; None without an address."""
    if address is None:
        yield None
        return
    try:
        client_class: Any = import_module("distributed").Client
    except ImportError:
        raise common.UsageError(
            "--dask needs the package distributed: pip install 'fsdpsim[dask]'"
        ) from None
    try:
        client = client_class(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise common.UsageError(f"--dask {address}: cannot connect: {error}") from None
    with client:
        yield client.get_executor()


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
        console.print(table(leaders.best(), grid.keys, front=leaders.front.rows))
    for row in leaders.rejected:
        console.print(f"{row.status}: {_settings(row)}: {row.reason}", markup=False)
    hidden = leaders.counts["invalid"] + leaders.counts["failed"] - len(leaders.rejected)
    if hidden:
        console.print(f"and {hidden} more points that are invalid or failed", markup=False)
    for path in written:
        console.print(f"wrote {path}", markup=False)


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
    return f"{name}: {len(grid)} points; {', '.join(shown)}"


def table(rows: list[Row], keys: tuple[str, ...], *, front: Iterable[Row] = ()) -> Table:
    """Rows as a table; ``*`` marks those of ``front``, which no other beats in time and memory."""
    from rich.table import Table
    from rich.text import Text

    names = short_names(keys)
    marked = {row.point for row in front}
    figures = [_figures(row) for row in rows]
    labels = [label for label in figures[0] if any(f[label] != "-" for f in figures)]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("")
    for key in keys:
        # Spaces, so that a long name breaks between words.
        shown.add_column(names[key].replace("_", " "), overflow="fold")
    for label in labels:
        shown.add_column(label, justify="right", no_wrap=True)
    for row, texts in zip(rows, figures, strict=True):
        settings = [Text(setting(row.settings[key])) for key in keys]
        star = "*" if row.point in marked else ""
        shown.add_row(star, *settings, *(Text(texts[label]) for label in labels))
    return shown


def _figures(row: Row) -> dict[str, str]:
    from fsdpsim.units import show_bytes, show_seconds

    figures, oom = row.figures, row.status == "oom"
    tokens, reserved = figures["tokens_per_s_per_gpu"], figures["peak_reserved_bytes"]
    collectives = figures["collectives"].values()
    between = sum(c["bytes_sent_between_nodes_per_rank"] for c in collectives)
    return {
        "step": "out of memory" if oom else show_seconds(figures["step_time_s"]),
        "exposed": "" if oom else show_seconds(figures["exposed_communication_s"]),
        "tok/s/GPU": "" if oom else f"{tokens:,.0f}" if tokens else "-",
        "reserved": show_bytes(reserved) if reserved else "-",
        "allocated": show_bytes(figures["peak_allocated_bytes"]) if reserved else "-",
        "calls": "" if oom else str(sum(c["count"] for c in collectives)),
        "off node": "" if oom else f"{between / 1e9:.2f} GB" if between else "-",
    }


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or the whole where two would look the same."""
    from fsdpsim.scenario.keys import split_key

    last = {key: split_key(key)[-1] for key in keys}
    return {k: name if list(last.values()).count(name) == 1 else k for k, name in last.items()}


def _settings(row: Row) -> str:
    return ", ".join(f"{key} = {setting(value)}" for key, value in row.settings.items())


def setting(value: Any) -> str:
    """A value of a swept key as people say it, cut if long."""
    from fsdpsim.sweeps.row import value_text

    text = value_text(value)
    return text if len(text) <= 50 else text[:47] + "..."
