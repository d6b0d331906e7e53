"""What ``fsdpsim run -o DIR`` writes: figures, tables, order, chart, trace and memory snapshot.

Every file is written whole or not at all, and the same scenario gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdpsim.engine import Op
from fsdpsim.files import make_directory, write_text, write_with
from fsdpsim.memory import Sample
from fsdpsim.order import host_order
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario
from fsdpsim.snapshot import write_snapshot
from fsdpsim.summary import summary
from fsdpsim.trace import write_trace

FILES = (
    "summary.json",
    "ops.csv",
    "memory.csv",
    "order.json",
    "gantt.png",
    "trace.json.gz",
    "snapshot.pickle",
)
"""What is written of one result."""

OP_COLUMNS = (
    "op",
    "name",
    "kind",
    "stream",
    "unit",
    "phase",
    "iteration",
    "issued_s",
    "start_s",
    "end_s",
    "communicator",
    "group_size",
    "nbytes",
    "dtype",
    "trigger",
)
"""Columns of ``ops.csv``: one row per op in issue order; ``nbytes`` is a collective's full
size, or what a copy between host and device moves."""

MEMORY_COLUMNS = (
    "time_s",
    "event",
    "buffer",
    "unit",
    "category",
    "phase",
    "iteration",
    "stream",
    "nbytes",
    "requested_bytes",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
)
"""Columns of ``memory.csv``: one row per malloc and free in host order, and the levels after it."""


def write_all(results: Sequence[Result], folder: Path) -> None:
    """Write one result into ``folder``, several into folders in it, named after their files.

    Raises :class:`fsdpsim.files.OutputError`.
    """
    folders = _folders([result.scenario for result in results], folder)
    for result, own in zip(results, folders, strict=True):
        write_everything(result, own)


def written_paths(scenarios: Sequence[Scenario], folder: Path) -> Iterator[Path]:
    """What :func:`write_all` writes for the results of ``scenarios``."""
    return (own / name for own in _folders(scenarios, folder) for name in FILES)


def _folders(scenarios: Sequence[Scenario], folder: Path) -> list[Path]:
    if len(scenarios) == 1:
        return [folder]
    return [folder / name for name in distinct(scenario.name for scenario in scenarios)]


def distinct(names: Iterable[str]) -> list[str]:
    """``names`` as folders: -2, -3, ... behind those that an earlier one has taken."""
    found: dict[str, None] = {}
    for name in names:
        first = name if name.strip(".") else "scenario"  # "." and ".." are folders already
        candidate, number = first, 1
        while candidate in found:
            number += 1
            candidate = f"{first}-{number}"
        found[candidate] = None
    return list(found)


def write_everything(result: Result, folder: Path) -> None:
    """Write ``result`` into ``folder``, which is made if need be.

    Files: ``summary.json`` (as ``run --json`` prints it), ``ops.csv``, ``memory.csv``,
    ``order.json`` (the last iteration), ``gantt.png``, ``trace.json.gz`` and ``snapshot.pickle``;
    of several simulated ranks rank 0. There is no ``gantt.png`` where memory ran out before
    anything ran. Raises :class:`fsdpsim.files.OutputError`.
    """

    make_directory(folder)
    program, last = result.program, result.scenario.iterations - 1
    write_text(folder / "summary.json", _json(summary(result)))
    write_text(folder / "ops.csv", table(OP_COLUMNS, op_rows(result)))
    write_text(folder / "memory.csv", table(MEMORY_COLUMNS, memory_rows(result)))
    write_text(folder / "order.json", _json(host_order(program, last)))
    write_trace(result, folder / "trace.json.gz")
    write_snapshot(result.scenario, folder / "snapshot.pickle")
    _write_gantt(result, folder / "gantt.png")


def _write_gantt(result: Result, path: Path) -> None:
    from fsdpsim.plots import NothingRanError, timeline, write_figure

    try:
        figure = timeline(result)
    except NothingRanError:
        path.unlink(missing_ok=True)  # one of an earlier run would pass for this run's
        return
    write_with(path, lambda temporary: write_figure(figure, temporary))


def op_rows(result: Result) -> Iterator[tuple[Any, ...]]:
    """Rows of ``ops.csv``; times are seconds from the start of the simulation."""
    for index, op in enumerate(result.ops):
        yield (
            index,
            op.name,
            op.kind,
            op.stream,
            op.unit,
            op.phase,
            op.iteration,
            op.issued,
            op.start,
            op.end,
            *_collective(op),
        )


def _collective(op: Op) -> tuple[Any, ...]:
    info = op.collective
    if info is None:
        return ("", "", op.nbytes or "", "", "")
    return (op.communicator, info.group_size, info.nbytes, info.dtype, info.trigger or "")


def memory_rows(result: Result) -> Iterator[tuple[Any, ...]]:
    """Rows of ``memory.csv``; times are seconds of host time from the start of the simulation."""
    return (_memory_row(sample) for sample in result.memory.samples)


def _memory_row(sample: Sample) -> tuple[Any, ...]:
    buffer = sample.buffer
    return (
        sample.time,
        "malloc" if sample.is_malloc else "free",
        buffer.name,
        buffer.unit,
        buffer.category,
        buffer.phase,
        buffer.iteration,
        buffer.stream,
        buffer.nbytes,
        sample.requested,
        sample.allocated,
        sample.active,
        sample.reserved,
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV with a header; floats are written so that they can be read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
