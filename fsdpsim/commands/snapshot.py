"""``fsdpsim snapshot``: the simulated memory as torch would dump it."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdpsim.commands import common

HELP = "write a torch memory snapshot for pytorch.org/memory_viz"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="file to write; default: FILE's stem.pickle",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and write; after a predicted out-of-memory, the state that it left."""
    from fsdpsim.snapshot import write_snapshot

    scenario = common.load_scenario(args)
    path = args.output or Path(f"{scenario.name}.pickle")
    write_snapshot(scenario, path)
    print(path)
    return 0
