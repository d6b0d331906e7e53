"""``fsdpsim report``: one HTML page with the summary, interactive charts, and the explanation."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, output_file, spare_inputs

HELP = "write one HTML page: summary, interactive timeline and memory, explanation"

ENDINGS = (".html", ".htm")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="an .html file, or a directory; default: FILE's name with .html, here",
    )
    parser.add_argument(
        "--no-remedies",
        action="store_true",
        help="do not simulate what would help",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate the file and write its page; a bad path is found before anything is simulated."""
    from fsdpsim.commands.run import rows
    from fsdpsim.explain import try_remedies
    from fsdpsim.files import write_text
    from fsdpsim.report import page
    from fsdpsim.simulate import simulate
    from fsdpsim.summary import summary

    path = output_file(args.output, f"{args.file.stem}.html", ENDINGS, "a page")
    scenario = common.load_scenario(args)
    spare_inputs([path], files_of([scenario]))
    result = simulate(scenario)
    trials = None if args.no_remedies else try_remedies(result)
    write_text(path, page(result, rows=rows(summary(result)), trials=trials))
    print(path)
    return 0
