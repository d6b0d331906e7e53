"""``fsdpsim snapshot``: the simulated memory as torch would dump it."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, output_file, spare_inputs

HELP = "write a torch memory snapshot for pytorch.org/memory_viz"

ENDINGS = (".pickle", ".pkl")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="a .pickle file, or a directory; default: FILE's name with .pickle, here",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and write; after a predicted out-of-memory, the state that it left."""
    from fsdpsim.snapshot import write_snapshot

    path = output_file(args.output, f"{args.file.stem}.pickle", ENDINGS, "a snapshot")
    scenario = common.load_scenario(args)
    spare_inputs([path], files_of([scenario]))
    write_snapshot(scenario, path)
    print(path)
    return 0
