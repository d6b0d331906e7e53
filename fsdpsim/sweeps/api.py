"""``fsdpsim.sweep``: every point of a scenario's ``[sweep]`` table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdpsim.scenario import Scenario
from fsdpsim.sweeps.execute import Executor, Workers, workers
from fsdpsim.sweeps.grid import Grid, Point
from fsdpsim.sweeps.row import Row
from fsdpsim.sweeps.store import Store


def sweep(
    scenario: Scenario,
    executor: Executor | None = None,
    *,
    jobs: int = 1,
    directory: Path | None = None,
    restart: bool = False,
) -> list[Row]:
    """Simulate every point of the ``[sweep]`` table of ``scenario``; returns a row for each.

    ``executor``
        Anything with ``submit`` as in :mod:`concurrent.futures`, for example
        ``dask.distributed.Client(...).get_executor()``. It and ``jobs`` processes change how long
        the sweep takes and nothing else.
    ``directory``
        Rows are appended to ``results.jsonl`` there as they come, and a sweep that was interrupted
        goes on where it stopped; ``restart`` discards what is there.

    Points that run out of memory are results; points that are no valid scenario, or that fail, have
    a row with the reason. Raises :class:`fsdpsim.ScenarioError` if there is nothing to sweep,
    :class:`fsdpsim.files.OutputError` if ``directory`` cannot be used.
    """
    grid = Grid(scenario)
    with workers(executor, jobs) as staff:
        if directory is None:
            return list(run_points(grid, grid.points(), staff))
        with Store(directory, grid, restart=restart) as store:
            rows = list(stored_points(grid, store, staff))
            store.write_csv()
        return rows


def run_points(grid: Grid, points: Iterable[Point], staff: Workers) -> Iterator[Row]:
    """Rows of ``points``, in their order, as they come."""
    return map(Row.of_json, staff.lines(grid.scenario, points))


def stored_points(grid: Grid, store: Store, staff: Workers) -> Iterator[Row]:
    """All rows of the sweep: first those that ``store`` has, then new ones, which it gets."""
    start = store.next_index
    if start:
        yield from store.read_rows()
    for line in staff.lines(grid.scenario, grid.points(start)):
        store.append(line)
        yield Row.of_json(line)
