"""``fsdpsim plot``: Gantt chart above the memory curve, on one time axis."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, spare_inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fsdpsim.result import Result

HELP = "draw the Gantt chart above the memory curve"


class TimelineOptions(TypedDict):
    """Keyword arguments of :func:`fsdpsim.plots.timeline`."""

    iteration: int | str | None
    time: tuple[float | None, float | None] | None
    units: str | None
    arrows: bool
    clock: Literal["host", "gpu"] | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser, many=True)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="a .png, .svg or .pdf file, or a directory (which several FILEs need); "
        "default: FILE's name with .png, here",
    )
    parser.add_argument(
        "--iteration", metavar="N", help="which one, from 1, or all; default: the last"
    )
    parser.add_argument(
        "--units",
        metavar="A:B",
        help="grey out all but units A to B-1, or names (with *, by comma)",
    )
    parser.add_argument(
        "--time", metavar="A:B", help='from A to B on the time axis, e.g. "10 ms:20 ms" or "1 s:"'
    )
    parser.add_argument(
        "--arrows", action="store_true", help="draw the waits between streams that bind"
    )
    parser.add_argument(
        "--memory-time",
        choices=("host", "gpu"),
        help="draw memory when the CPU allocates, or where the GPU runs what was issued next; "
        "default: host, unless the CPU is far ahead",
    )
    parser.add_argument(
        "--chart",
        choices=("timeline", "exposed", "roofline"),
        default="timeline",
        help="exposed: communication that nothing hides, by unit; roofline: what kernels reach of "
        "the GPU's arithmetic and memory",
    )


def run(args: argparse.Namespace) -> int:
    """Draw each file's picture; bad options are found before anything is simulated.

    Of a file that runs out of memory before there is anything to draw, only that is said.
    """
    from fsdpsim.files import write_with
    from fsdpsim.plots import NothingRanError, write_figure
    from fsdpsim.simulate import simulate

    paths = output_paths(args.files, args.output)
    options = _options(args)
    scenarios = common.load_scenarios(args)
    spare_inputs(paths, files_of(scenarios))
    for scenario, path in zip(scenarios, paths, strict=True):
        try:
            figure = _figure(simulate(scenario), args.chart, options)
        except NothingRanError as error:
            print(f"fsdpsim: {error}", file=sys.stderr)
            continue
        write_with(path, partial(write_figure, figure))
        print(path)
    return 0


def output_paths(files: list[Path], output: Path | None) -> list[Path]:
    """Where each file's picture goes. Raises :class:`UsageError` where it cannot be said."""
    from fsdpsim.plots.style import ending_of

    names = [f"{file.stem}.png" for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise common.UsageError(f"two pictures would be {twice}: draw these files one at a time")
    if output is None:
        return [Path(name) for name in names]
    if output.is_dir() or (len(files) > 1 and not output.suffix):
        return [output / name for name in names]
    if len(files) > 1:
        raise common.UsageError(f"-o {output}: give a directory for {len(files)} files")
    try:
        ending_of(output)
    except ValueError as error:
        raise common.UsageError(f"-o {error}") from None
    return [output]


def _options(args: argparse.Namespace) -> TimelineOptions:
    iteration: str | int | None = args.iteration
    if iteration not in (None, "all"):
        try:
            iteration = int(iteration)
        except ValueError:
            raise common.UsageError(f"--iteration {iteration}: a number from 1, or all") from None
    return {
        "iteration": iteration,
        "time": None if args.time is None else _time_range(args.time),
        "units": args.units,
        "arrows": args.arrows,
        "clock": args.memory_time,
    }


def _time_range(text: str) -> tuple[float | None, float | None]:
    from fsdpsim.units import parse

    start, colon, end = text.partition(":")
    if not colon:
        raise common.UsageError(f'--time {text}: write it as A:B, for example "10 ms:20 ms"')
    try:
        return (
            parse(start, "seconds") if start.strip() else None,
            parse(end, "seconds") if end.strip() else None,
        )
    except ValueError as error:
        raise common.UsageError(f"--time {text}: {error}") from None


def _figure(result: Result, chart: str, options: TimelineOptions) -> Figure:
    from fsdpsim.plots import NothingRanError, exposed, roofline, timeline

    try:
        if chart == "timeline":
            return timeline(result, **options)
        return exposed(result) if chart == "exposed" else roofline(result)
    except NothingRanError:
        raise
    except ValueError as error:
        raise common.UsageError(f"{result.scenario.source}: {error}") from None
