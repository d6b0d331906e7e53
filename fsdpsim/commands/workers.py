"""Options that say where points are simulated: processes of this machine, or a dask cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common

if TYPE_CHECKING:
    from fsdpsim.sweeps.execute import Executor


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add ``-j`` and ``--dask``."""
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument(
        "-j", "--jobs", type=positive, default=1, metavar="N", help="processes (default: 1)"
    )
    workers.add_argument(
        "--dask", metavar="ADDRESS", help="run on a dask cluster, e.g. tcp://10.0.0.1:8786"
    )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "number"  # argparse shows it: invalid number value: '0'


@contextmanager
def dask_executor(address: str | None) -> Iterator[Executor | None]:
    """The executor of a dask cluster; None without an address."""
    if address is None:
        yield None
        return
    try:
        client_class: Any = import_module("distributed").Client
    except ImportError:
        raise common.UsageError(
            "--dask needs the package distributed: pip install 'fsdpsim[dask]'"
        ) from None
    try:
        client = client_class(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise common.UsageError(f"--dask {address}: cannot connect: {error}") from None
    with client:
        yield client.get_executor()
