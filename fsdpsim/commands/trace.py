"""``fsdpsim trace``: the simulated run as a profiler trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdpsim.commands import common

HELP = "write a Kineto trace for Perfetto and HolisticTraceAnalysis"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="file to write, compressed if it ends in .gz; default: FILE's stem.pt.trace.json.gz",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and write a file per simulated rank; an out-of-memory is traced up to there."""
    from fsdpsim.simulate import simulate
    from fsdpsim.trace import write_traces

    scenario = common.load_scenario(args)
    path = args.output or Path(f"{scenario.name}.pt.trace.json.gz")
    for written in write_traces(simulate(scenario), path):
        print(written)
    return 0
