"""``fsdpsim run``: simulate scenarios and print their summaries."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, spare_inputs

if TYPE_CHECKING:
    from rich.table import Table

HELP = "simulate and print a summary"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser, many=True)
    common.add_json(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write summary, charts and timeline here"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate each file; a predicted out-of-memory is an answer, not a failure."""
    from fsdpsim.simulate import simulate
    from fsdpsim.summary import summary

    scenarios = common.load_scenarios(args)
    if args.output is not None:
        from fsdpsim.outputs import written_paths

        spare_inputs(written_paths(scenarios, args.output), files_of(scenarios))
    results = [simulate(scenario) for scenario in scenarios]
    summaries = [summary(result) for result in results]
    if args.output is not None:
        from fsdpsim.outputs import write_all

        write_all(results, args.output)
    if args.json:
        common.print_json(summaries if len(summaries) > 1 else summaries[0])
    else:
        console = common.console()
        for figures in summaries:
            console.print(_table(figures))
    return 0


def _table(figures: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = figures["title"] or figures["scenario"]
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(figures):
        table.add_row(name, Text(value))
    return table


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (label, text) rows; figures that do not apply are left out."""
    return [
        *_time_rows(figures),
        *_memory_rows(figures),
        *_collective_rows(figures),
        *_transfer_rows(figures),
    ]


def _time_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    from fsdpsim.units import show_seconds

    if figures["oom"]:
        oom = figures["oom"]
        where = f"{oom['what']} of {oom['unit'] or 'the training loop'} in {oom['phase']}"
        return [("out of memory", f"at {show_seconds(oom['when_s'])}: {where}")]
    step, compute = figures["step_time_s"], figures["compute_time_s"]
    exposed = figures["exposed_communication_s"]
    found = [
        ("step time", show_seconds(step)),
        (
            "compute time",
            f"{show_seconds(compute)} ({compute / step:.1%} of the step)" if step else "0 s",
        ),
        ("exposed communication", show_seconds(exposed)),
    ]
    if figures["tokens_per_s_per_gpu"]:
        found.append(("tokens per second and GPU", f"{figures['tokens_per_s_per_gpu']:,.0f}"))
    if figures["mfu"]:
        found.append(("MFU", f"{figures['mfu']:.1%}"))
    for cause, seconds in figures["host_blocked_s"].items():
        found.append((f"host blocked: {cause}", show_seconds(seconds)))
    return found


def _memory_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    from fsdpsim.units import show_bytes

    found = [("unsharded units at once", str(figures["max_unsharded_units"]))]
    if figures["peak_requested_bytes"]:
        levels = ("requested", "allocated", "active", "reserved")
        found += [(f"peak {lv}", show_bytes(figures[f"peak_{lv}_bytes"])) for lv in levels]
    if figures["host_memory_bytes"]:
        found.append(("host memory", show_bytes(figures["host_memory_bytes"])))
    if figures["num_alloc_retries"]:
        found.append(("cudaMalloc retries", str(figures["num_alloc_retries"])))
    return found


def _collective_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    from fsdpsim.units import show_seconds

    found = []
    for kind, s in figures["collectives"].items():
        sent = s["bytes_sent_per_rank"]  # nothing where only durations are given
        parts = [f"{s['count']} x", *([f"{sent / 1e9:.2f} GB sent per rank"] if sent else [])]
        parts += [show_seconds(s["time_s"]), f"{show_seconds(s['exposed_s'])} exposed"]
        found.append((kind, ", ".join(parts)))
    return found


def _transfer_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    from fsdpsim.units import show_seconds

    return [
        (
            f"copies {kind}",
            f"{s['count']} x, {s['bytes_copied'] / 1e9:.2f} GB, {show_seconds(s['time_s'])}, "
            f"{show_seconds(s['exposed_s'])} exposed",
        )
        for kind, s in figures["transfers"].items()
    ]
