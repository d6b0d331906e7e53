"""``fsdpsim trace``: the simulated run as a profiler trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, output_file, spare_inputs

HELP = "write a Kineto trace for Perfetto and HolisticTraceAnalysis"

ENDINGS = (".json", ".json.gz")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="a .json or .json.gz file, or a directory; "
        "default: FILE's name with .pt.trace.json.gz, here",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and write a file per simulated rank; an out-of-memory is traced up to there."""
    from fsdpsim.simulate import simulate
    from fsdpsim.trace import rank_paths, write_traces

    path = output_file(args.output, f"{args.file.stem}.pt.trace.json.gz", ENDINGS, "a trace")
    scenario = common.load_scenario(args)
    ranks = scenario.world_size if scenario.noise is not None else 1
    spare_inputs(rank_paths(path, ranks), files_of([scenario]))
    for written in write_traces(simulate(scenario), path):
        print(written)
    return 0
