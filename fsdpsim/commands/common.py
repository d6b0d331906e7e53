"""Arguments and output that several commands share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fsdpsim.scenario import Scenario

#: Characters of a line, also where a terminal says less: text would fall to pieces.
NARROWEST = 30


def add_scenario(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """Add the FILE argument (or FILE...) and ``--set``."""
    if many:
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="scenario file")
    else:
        parser.add_argument("file", type=Path, metavar="FILE", help="scenario file")
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="override a key, e.g. --set fsdp.limit_all_gathers=false (repeatable)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def load_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """The scenarios of ``FILE...``; all files' faults are reported together."""
    from fsdpsim.scenario import ScenarioError, load

    scenarios, errors = [], []
    for path in args.files:
        try:
            scenarios.append(load(path, args.overrides))
        except ScenarioError as error:
            errors.append(error)
    if errors:
        raise UsageError("\n".join(map(str, errors)))
    return scenarios


def load_scenario(args: argparse.Namespace) -> Scenario:
    """The scenario of ``FILE``."""
    from fsdpsim.scenario import load

    return load(args.file, args.overrides)


def parse_size(text: str, option: str, *, zero: bool = False) -> int:
    """Bytes that ``option`` says, none only with ``zero``. Raises :class:`UsageError`."""
    from fsdpsim.units import parse

    try:
        nbytes = round(parse(text, "bytes"))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if nbytes < (0 if zero else 1):
        least = "zero or more" if zero else "more than zero"
        raise UsageError(f"{option}: {text!r} is not allowed; it must be {least}")
    return nbytes


class UsageError(Exception):
    """A mistake of the user's that no other error names; the message says what to do."""


def print_json(data: Any) -> None:
    """Print ``data`` as JSON: the same data gives the same bytes."""
    print(json.dumps(data, indent=2, allow_nan=False))


def console() -> Console:
    """Where tables go: as wide as the terminal, 100 columns without one."""
    import shutil

    from fsdpsim.commands.terminal import Terminal

    width = shutil.get_terminal_size((100, 24)).columns
    return Terminal(width=max(width, NARROWEST), highlight=False)
