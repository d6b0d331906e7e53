"""``fsdpsim explain``: why the step takes this long, what the peak is made of, what would help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdpsim.commands import common

HELP = "say why the step takes this long, what the peak is made of, and what would help"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    common.add_json(parser)
    parser.add_argument(
        "--no-remedies",
        action="store_true",
        help="do not simulate what would help",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate the file, explain the result, and try the remedies."""
    from fsdpsim.explain import explain, try_remedies
    from fsdpsim.simulate import simulate

    result = simulate(common.load_scenario(args))
    found = explain(result)
    trials = None
    if not args.no_remedies:
        with _status() as progress:
            trials = try_remedies(result, progress)
    if args.json:
        from fsdpsim.explain.explanation import trials_json

        common.print_json({**found.as_json(), "remedies": trials_json(trials)})
        return 0
    from fsdpsim.explain.tables import explanation_tables, trial_tables

    console = common.console()
    for renderable in explanation_tables(found):
        console.print(renderable)
    if trials is not None:
        for renderable in trial_tables(trials, after_oom=found.oom is not None):
            console.print(renderable)
    return 0


@contextmanager
def _status() -> Iterator[Callable[[str], object]]:
    """Shows on a terminal which remedy is being simulated."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("") as status:
        yield lambda text: status.update(Text(f"simulating {text}"))
