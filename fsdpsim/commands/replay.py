"""``fsdpsim replay``: a real memory snapshot under the recorded and under other settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common

if TYPE_CHECKING:
    from rich.table import Table

HELP = "replay a real memory snapshot, also under other allocator settings"

#: Column of the result -> heading of the table.
HEADINGS = {
    "device": "device",
    "run": "run",
    "peak_reserved_bytes": "peak reserved",
    "peak_active_bytes": "active",
    "peak_allocated_bytes": "allocated",
    "fragmentation": "fragmentation",
    "segments_opened": "segments opened",
    "segments_freed": "freed",
    "num_alloc_retries": "retries",
    "num_ooms": "OOMs",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "snapshot",
        type=Path,
        metavar="SNAPSHOT",
        help="file of torch.cuda.memory._dump_snapshot (.pickle, gzipped or not)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="allocator.KEY=VALUE",
        help="another setting, e.g. --set allocator.expandable_segments=true (repeatable)",
    )
    for name, text in (
        ("capacity", "bytes that could be allocated on the device, e.g. 78GiB; default: no limit"),
        ("total-memory", "bytes of the whole device, which a memory fraction needs"),
    ):
        parser.add_argument(f"--{name}", metavar="SIZE", help=text)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Replay and print what happened, what the replay gives, and what other settings would."""
    from fsdpsim.replay import replay

    settings = _settings(args.overrides)
    _check_fraction(settings, args.total_memory)
    try:
        result = replay(
            args.snapshot,
            settings or None,
            capacity=_size(args.capacity, "--capacity"),
            total_memory=_size(args.total_memory, "--total-memory"),
        )
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    if args.json:
        common.print_json(result.to_dict())
        return 0
    console = common.console()
    console.print(_table(result.rows(), args.snapshot.name))
    exact = "every decision equals" if result.exact else "not every decision equals"
    console.print(f"{exact} the recorded one")
    for note in result.notes():
        console.print(note, style="dim", markup=False)
    return 0


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The options of ``--set``, which may name keys of [allocator] only."""
    from fsdpsim.scenario import apply_overrides

    tables = apply_overrides({}, overrides, "--set")
    others = [key for key in tables if key != "allocator"]
    if others or not isinstance(tables.get("allocator", {}), dict):
        wrong = others[0] if others else "allocator"
        raise common.UsageError(
            f"--set {wrong}: a replay has only the keys of [allocator], for example "
            "--set allocator.expandable_segments=true"
        )
    return dict(tables.get("allocator", {}))


def _check_fraction(settings: dict[str, Any], total_memory: str | None) -> None:
    """Of memory that is not known, a fraction would limit nothing."""
    name = "per_process_memory_fraction"
    if settings.get(name) not in (None, 1) and total_memory is None:
        raise common.UsageError(
            f"--set allocator.{name}={settings[name]}: it is a fraction of the whole device, whose "
            "bytes are not in a snapshot; give --total-memory SIZE too"
        )


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else common.parse_size(text, option)


def _table(rows: list[dict[str, Any]], name: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    shown = {k: v for k, v in HEADINGS.items() if any(row[k] is not None for row in rows)}
    if len({row["device"] for row in rows}) == 1:
        del shown["device"]
    table = Table(title=Text(name), title_justify="left", box=None, pad_edge=False)
    for column, heading in shown.items():
        table.add_column(heading, justify="left" if column == "run" else "right")
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in shown))
    return table


def _cell(column: str, value: Any) -> str:
    from fsdpsim.units import show_bytes

    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:.2%}" if column == "fragmentation" else str(value)
