"""Running many points, here or elsewhere, with results in the order of the points.

Whatever the executor, rows come out in the same order and with the same bytes. A worker that dies
loses nothing: its points are run again, each in a process of its own.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from itertools import islice
from typing import Any, Protocol, Self

from fsdpsim.processes import begin_worker
from fsdpsim.scenario import Scenario
from fsdpsim.sweeps.grid import Point
from fsdpsim.sweeps.point import Simulator, empty_row, run_chunk

#: Points per task: enough to hide what a task costs (0.2 ms in a process pool, 1 ms in dask).
CHUNK = 4

#: Tasks in flight in an executor that does not say how many workers it has.
WINDOW = 256

#: How often a point is tried on its own before its row says that it failed.
TRIES = 2


class Future(Protocol):
    """What ``submit`` returns, as in :mod:`concurrent.futures`."""

    def result(self) -> Any:
        """Wait for the outcome; raises what the task raised."""

    def cancel(self) -> Any:
        """Do not start it, if that is still possible."""


class Executor(Protocol):
    """Anything with ``submit``, as :class:`concurrent.futures.Executor` has it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Run ``fn(*args)`` somewhere."""


class Workers:
    """Somewhere to run points. A context manager, for what must be closed at the end."""

    def lines(self, scenario: Scenario, points: Iterable[Point]) -> Iterator[str]:
        """The rows of ``points`` as JSON, in their order."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def workers(executor: Executor | None, jobs: int) -> Workers:
    """Workers of ``executor``, or else ``jobs`` processes: this one if it is one."""
    if executor is not None:
        return _Elsewhere(executor)
    return _Processes(jobs) if jobs > 1 else _Here()


class _Here(Workers):
    """This process, one point after the other."""

    def __init__(self) -> None:
        self._simulator: Simulator | None = None

    def lines(self, scenario: Scenario, points: Iterable[Point]) -> Iterator[str]:
        for point in points:
            if self._simulator is None or self._simulator.variations.base is not scenario:
                self._simulator = Simulator(scenario)
            yield self._simulator.line(point)


class _Elsewhere(Workers):
    """Tasks on an executor that belongs to the caller."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        count = getattr(executor, "_max_workers", None)
        self.window = 2 * count if isinstance(count, int) else WINDOW

    def submit(self, base: bytes, points: Sequence[Point]) -> Future:
        """One task for ``points``. Raises what ``submit`` raises: the executor itself is broken."""
        return self.executor.submit(run_chunk, base, points)

    def submit_alone(self, base: bytes, point: Point) -> Future:
        """One task for a point whose first one was lost."""
        return self.submit(base, [point])

    def lines(self, scenario: Scenario, points: Iterable[Point]) -> Iterator[str]:
        base = pickle.dumps(scenario)
        pending: deque[tuple[Sequence[Point], Future]] = deque()
        try:
            for chunk in _chunks(points):
                pending.append((chunk, self.submit(base, chunk)))
                if len(pending) >= self.window:
                    yield from self._outcome(base, *pending.popleft())
            while pending:
                yield from self._outcome(base, *pending.popleft())
        finally:
            for _, future in pending:
                future.cancel()

    def _outcome(self, base: bytes, chunk: Sequence[Point], future: Future) -> Iterator[str]:
        lines: Iterable[str]
        try:
            lines = future.result()
        except Exception:
            lines = (self._alone(base, point) for point in chunk)
        yield from lines

    def _alone(self, base: bytes, point: Point) -> str:
        """The row of one point whose task was lost."""
        lost: Exception | None = None
        for _ in range(TRIES):
            future = self.submit_alone(base, point)
            try:
                lines: list[str] = future.result()
                return lines[0]
            except Exception as error:
                lost = error
        text = f"its worker died ({TRIES} times): {type(lost).__name__}: {lost}"
        return empty_row(point, "failed", text).as_json()


class _Processes(_Elsewhere):
    """A process pool of ours, which is replaced when a worker's death has broken it."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.pool = _pool(jobs)
        super().__init__(self.pool)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def submit(self, base: bytes, points: Sequence[Point]) -> Future:
        try:
            return self.pool.submit(run_chunk, base, points)
        except BrokenExecutor:
            # What else was in flight is lost too, and is run again when its turn comes.
            self.pool = _pool(self.jobs)
            return self.pool.submit(run_chunk, base, points)

    def submit_alone(self, base: bytes, point: Point) -> Future:
        # Alone in its process, so that no other point can take the blame for its death.
        with _pool(1) as pool:
            return pool.submit(run_chunk, base, [point])


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, initializer=begin_worker)


def _chunks(points: Iterable[Point]) -> Iterator[list[Point]]:
    iterator = iter(points)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
