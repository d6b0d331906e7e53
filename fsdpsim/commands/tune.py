"""``fsdpsim tune``: the fastest configuration that fits in memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common
from fsdpsim.commands.points import setting, settings_text, short_names, table
from fsdpsim.commands.workers import add_workers, dask_executor, positive

if TYPE_CHECKING:
    from rich.table import Table

    from fsdpsim.scenario import Scenario
    from fsdpsim.sweeps import Row
    from fsdpsim.sweeps.tune import Tuned

HELP = "find the fastest configuration that fits in memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    common.add_json(parser)
    add_workers(parser)
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="BYTES",
        help="memory of the GPU, e.g. 80GiB; default: the scenario's hardware",
    )
    parser.add_argument(
        "--keep", type=positive, default=5, metavar="N", help="places to show (default: 5)"
    )


def memory(text: str) -> int:
    """A size in bytes, for argparse."""
    from fsdpsim.units import parse

    try:
        nbytes = round(parse(text, "bytes"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than zero")
    return nbytes


def run(args: argparse.Namespace) -> int:
    """Search, and show the best, its runners-up, and what each choice costs."""
    from fsdpsim.sweeps.tune import tune

    scenario = common.load_scenario(args)
    with dask_executor(args.dask) as executor, _progress() as on_progress:
        tuned = tune(
            scenario,
            executor,
            memory=args.memory,
            keep=args.keep,
            jobs=args.jobs,
            on_progress=on_progress,
        )
    if args.json:
        common.print_json(_as_json(tuned))
    else:
        _print(scenario, tuned)
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object]]:
    """One line on the terminal, if there is one."""
    terminal = sys.stderr.isatty()

    def show(stage: str, done: int, total: int) -> None:
        if terminal and (done % 50 == 0 or stage == "simulated"):
            print(f"\r{stage} {done:,} of {total:,} points ", end="", file=sys.stderr, flush=True)

    yield show
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _as_json(tuned: Tuned) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(tuned)


def _print(scenario: Scenario, tuned: Tuned) -> None:
    console = common.console()
    console.print(scenario.title or scenario.name, markup=False, style="bold")
    console.print(_counts(tuned), markup=False)
    if tuned.best is None:
        console.print(_nothing_fits(tuned), markup=False)
        return
    rows = [tuned.best, *tuned.runners_up]
    differing = [k for k in tuned.keys if any(r.settings[k] != rows[0].settings[k] for r in rows)]
    console.print(f"Best: {settings_text(tuned.best, tuned.keys)}", markup=False)
    console.print(table(rows, differing, width=console.width))
    if tuned.confirmed is not None:
        console.print(_confirmation(tuned.confirmed), markup=False)
    console.print("\nWhat each choice costs, the others being as in the best:", markup=False)
    console.print(_choices(tuned, tuned.best))


def _counts(tuned: Tuned) -> str:
    words = {
        "simulated": tuned.simulated,
        "cannot fit": tuned.too_large,
        "cannot be as fast": tuned.too_slow,
        "invalid": tuned.invalid,
        "left out by where": tuned.left_out,
    }
    shown = [f"{count:,} {word}" for word, count in words.items() if count]
    return f"{tuned.points:,} configurations: {', '.join(shown)}"


def _nothing_fits(tuned: Tuned) -> str:
    from fsdpsim.units import show_bytes

    if tuned.smallest is None:
        return "nothing fits: no configuration is valid"
    settings = settings_text(tuned.smallest, tuned.keys)
    needed = show_bytes(tuned.smallest_bytes or 0)
    return (
        f"nothing fits; closest is {settings}, which allocates {needed}: out of memory, "
        f"{tuned.smallest.reason}"
    )


def _confirmation(row: Row) -> str:
    from fsdpsim.units import show_bytes, show_seconds

    if row.status != "ok":
        return f"\nSimulated kernel by kernel, the best does not fit: {row.reason}"
    step = show_seconds(row.figures["step_time_s"])
    reserved = show_bytes(row.figures["peak_reserved_bytes"])
    return f"\nSimulated kernel by kernel, the best takes {step} and {reserved}."


def _choices(tuned: Tuned, best: Row) -> Table:
    from rich.table import Table
    from rich.text import Text

    names = short_names(tuned.keys)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for label in ("choice", "instead of"):
        shown.add_column(label)
    for label in ("time", "reserved"):
        shown.add_column(label, justify="right", no_wrap=True)
    for other in tuned.alternatives:
        changed = ", ".join(f"{names[k]} = {setting(v)}" for k, v in other.settings.items())
        instead = ", ".join(setting(best.settings[k]) for k in other.settings)
        shown.add_row(Text(changed), Text(instead), *_differences(tuned, best, other.row))
    return shown


def _differences(tuned: Tuned, best: Row, other: Row) -> tuple[str, str]:
    from fsdpsim.sweeps.pareto import MEMORY, cost
    from fsdpsim.units import show_bytes

    mine, its = cost(best, tuned.figure), cost(other, tuned.figure)
    if its is None or mine is None:
        return {"oom": "out of memory"}.get(other.status, other.status), ""
    more = other.figures[MEMORY] - best.figures[MEMORY]
    sign = "-" if more < 0 else "+"
    return f"{its / mine - 1:+.2%}", f"{sign}{show_bytes(abs(more))}"
