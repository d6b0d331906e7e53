"""The ``fsdpsim`` command: arguments in, files and figures out.

Exit status: 0 (also for a predicted out-of-memory), 2 for bad input, 1 for a fault of ours, 130 for
Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from fsdpsim import __version__

#: Commands in the order of ``--help``; each is a module of :mod:`fsdpsim.commands`.
COMMANDS = (
    "run",
    "check",
    "plot",
    "report",
    "order",
    "explain",
    "compare",
    "sweep",
    "tune",
    "ledger",
    "trace",
    "snapshot",
    "replay",
    "validate",
)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="fsdpsim",
        description="Predict how PyTorch FSDP runs: timelines, peak memory, and why.",
    )
    parser.add_argument("--version", action="version", version=f"fsdpsim {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"fsdpsim.commands.{name}")
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("fsdpsim: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # its reader has gone: what it wanted it has
        return 0
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()  # a file would have a name: it is the output that has no room
        print(f"fsdpsim: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        if not _is_users(error):
            raise
        print(f"fsdpsim: {error}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a title may hold what it cannot show
    try:
        args = build_parser().parse_args(argv)
        status: int = args.run(args)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a fault can still be reported
    return status


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_users(error: Exception) -> bool:
    """Whether ``error`` is about the input, so that its message is all there is to say."""
    from fsdpsim.allocator import RequestTooLargeError
    from fsdpsim.commands.common import UsageError
    from fsdpsim.files import OutputError
    from fsdpsim.scenario import ScenarioError

    return isinstance(error, (ScenarioError, OutputError, UsageError, RequestTooLargeError))


if __name__ == "__main__":
    sys.exit(main())
