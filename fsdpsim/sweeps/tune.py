"""``fsdpsim tune``: the fastest configuration that fits, by branch and bound.

Every point gets lower bounds of its time and memory first (:mod:`fsdpsim.sweeps.bounds`), which
costs far less than simulating it. Points that cannot fit are dropped. The others are simulated in
order of their time bound until the next bound is above the time of the last place that is kept: no
point after it can win one, so the kept places are those of the full product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.scenario.sweep_table import Axis
from fsdpsim.simulate import UNLIMITED
from fsdpsim.sweeps.api import run_points
from fsdpsim.sweeps.bounds import capacity
from fsdpsim.sweeps.execute import Executor, Workers, workers
from fsdpsim.sweeps.grid import Grid, Point
from fsdpsim.sweeps.pareto import MEMORY, cost, objective
from fsdpsim.sweeps.point import Simulator
from fsdpsim.sweeps.row import Row
from fsdpsim.sweeps.space import GRANULARITY, search_axes

#: Points that are simulated before the bound is looked at again, for any number of workers.
WAVE = 32

#: Bounds and times are sums of floats in different orders.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What another value of one choice would cost, all others being as in the best."""

    settings: dict[str, Any]
    """The keys that differ."""
    row: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of a search."""

    figure: str
    """What was optimised: ``step_time_s`` or ``tokens_per_s_per_gpu``."""
    keys: tuple[str, ...]
    """The choices."""
    best: Row | None
    """None when nothing fits."""
    confirmed: Row | None
    """The best once more with one op per kernel, if the search had one per unit and pass."""
    runners_up: tuple[Row, ...]
    alternatives: tuple[Alternative, ...]
    smallest: Row | None
    """When nothing fits: the point that needs least memory."""
    smallest_bytes: int | None
    """What it allocates at its peak, given room."""
    points: int
    """Combinations in the product."""
    left_out: int
    """By ``where`` of ``[sweep]``."""
    invalid: int
    too_large: int
    """Dropped by their memory bound."""
    too_slow: int
    """Dropped by their time bound."""
    simulated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A point that may fit, and the least cost that it can have."""

    point: Point
    bound: float


def tune(
    scenario: Scenario,
    executor: Executor | None = None,
    *,
    memory: int | None = None,
    keep: int = 5,
    jobs: int = 1,
    axes: Iterable[Axis] | None = None,
    on_progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
) -> Tuned:
    """Search for the fastest point that does not run out of ``memory`` bytes per GPU.

    ``memory``
        The device's memory; default: the scenario's hardware.
    ``keep``
        Places: the best and ``keep - 1`` runners-up, no two of the same time and memory.
    ``axes``
        What to choose from; default: see :func:`fsdpsim.sweeps.space.search_axes`.
    ``on_progress``
        Called with a word for what is done, how much of it, and of how much at most.

    Fast is tokens per second where choices change the work of a step, else the step time; of two
    that are as fast the one with less memory is better. Raises :class:`ScenarioError` where there
    is no memory to fit into.
    """
    if memory is None and scenario.hardware is None:
        text = "has no [hardware], so no memory to fit into; give --memory, e.g. --memory 80GiB"
        raise ScenarioError(scenario.source, [Problem("", text)])
    choices = tuple(search_axes(scenario) if axes is None else axes)
    device = () if memory is None else (Axis(keys=("hardware.memory",), rows=((memory,),)),)
    search = _Search(Grid(scenario, (*device, *choices)), keep, on_progress)
    with workers(executor, jobs) as staff:
        search.run(staff)
        return search.outcome(staff, _keys(axis for axis in choices if len(axis.rows) > 1))


def _keys(axes: Iterable[Axis]) -> tuple[str, ...]:
    return tuple(key for axis in axes for key in axis.keys)


@dataclass(slots=True)
class _Search:
    """The state of one search."""

    grid: Grid
    keep: int
    on_progress: Callable[[str, int, int], object]
    figure: str = ""
    places: list[tuple[float, float, int, Row]] = field(default_factory=list)
    candidates: list[_Candidate] = field(default_factory=list)
    wanted: int = 0
    invalid: int = 0
    too_large: int = 0
    simulated: int = 0
    bounds: list[tuple[float, int]] = field(default_factory=list)
    """Least peak in bytes and index of every valid point."""

    def __post_init__(self) -> None:
        self.figure = objective(self.grid.scenario, self.grid.keys)

    def run(self, staff: Workers) -> None:
        """Bound all points, then simulate in waves while any may still win a place."""
        self._bound_all()
        self.candidates.sort(key=lambda c: (c.bound, c.point.index))
        for start in range(0, len(self.candidates), WAVE):
            wave = self.candidates[start : start + WAVE]
            hopeful = [c.point for c in wave if c.bound * (1 - ROUNDING) <= self._limit()]
            if not hopeful:
                break
            # In the order of the product, in which neighbours share their workload.
            self._simulate(sorted(hopeful, key=lambda point: point.index), staff)

    def _bound_all(self) -> None:
        simulator = Simulator(self.grid.scenario)
        for point in self.grid.points():
            self.wanted += 1
            self.on_progress("bounded", point.index + 1, len(self.grid))
            try:
                scenario = simulator.variations.at(point.settings)
                bounds = simulator.bounds(scenario)
            except ScenarioError:
                self.invalid += 1
                continue
            self.bounds.append((bounds.peak_bytes, point.index))
            if bounds.peak_bytes > capacity(scenario):
                self.too_large += 1
                continue
            per_token = self.figure == "tokens_per_s_per_gpu"
            bound = bounds.seconds_per_token if per_token else bounds.step_time
            self.candidates.append(_Candidate(point=point, bound=bound))

    def _limit(self) -> float:
        """The cost that a point must not exceed to win a place."""
        return self.places[-1][0] if len(self.places) == self.keep else float("inf")

    def _simulate(self, points: Sequence[Point], staff: Workers) -> None:
        for row in run_points(self.grid, points, staff):
            self.simulated += 1
            self.on_progress("simulated", self.simulated, len(self.candidates))
            value = cost(row, self.figure)
            if value is not None:
                self.places.append((value, row.figures[MEMORY], row.point, row))
        self.places.sort(key=lambda place: place[:3])
        # Choices that change nothing must not fill all places: of equal outcomes the first counts.
        distinct = {place[:2]: place for place in reversed(self.places)}
        self.places = [distinct[key] for key in sorted(distinct)][: self.keep]

    def outcome(self, staff: Workers, keys: tuple[str, ...]) -> Tuned:
        """The places, and the neighbours of the best."""
        rows = [row for *_, row in self.places]
        needed, smallest = (None, None) if rows else self._smallest(staff)
        return Tuned(
            figure=self.figure,
            keys=keys,
            best=rows[0] if rows else None,
            confirmed=self._confirmed(rows[0], staff) if rows else None,
            runners_up=tuple(rows[1:]),
            alternatives=tuple(self._alternatives(rows[0], staff)) if rows else (),
            smallest=smallest,
            smallest_bytes=needed,
            points=len(self.grid),
            left_out=len(self.grid) - self.wanted,
            invalid=self.invalid,
            too_large=self.too_large,
            too_slow=len(self.candidates) - self.simulated,
            simulated=self.simulated,
        )

    def _smallest(self, staff: Workers) -> tuple[int | None, Row | None]:
        """The least peak of all points on a device without limit, and that point as it is here."""
        self.bounds.sort()
        best: tuple[int, int] | None = None
        for start in range(0, len(self.bounds), WAVE):
            wave = self.bounds[start : start + WAVE]
            hopeful = sorted(index for least, index in wave if best is None or least < best[0])
            if not hopeful:
                break
            self.on_progress("sized", start, len(self.bounds))
            points = [self._point(index, {"hardware.memory": UNLIMITED}) for index in hopeful]
            for row in run_points(self.grid, points, staff):
                if row.figures:
                    found = row.figures["peak_allocated_bytes"], row.point
                    best = found if best is None else min(best, found)
        if best is None:
            return None, None
        return best[0], next(run_points(self.grid, [self._point(best[1], {})], staff))

    def _point(self, index: int, changed: dict[str, Any]) -> Point:
        return Point(index=index, settings=self.grid.settings(index) | changed)

    def _confirmed(self, best: Row, staff: Workers) -> Row | None:
        if best.settings.get(GRANULARITY) != "units":
            return None
        kernels = self._point(best.point, {GRANULARITY: "kernels"})
        return next(run_points(self.grid, [kernels], staff))

    def _alternatives(self, best: Row, staff: Workers) -> Iterator[Alternative]:
        """The best with one choice changed, for every other value of every choice."""
        changed = list(self._neighbours(best))
        rows = run_points(self.grid, [point for _, point in changed], staff)
        for (settings, _), row in zip(changed, rows, strict=True):
            yield Alternative(settings=settings, row=row)

    def _neighbours(self, best: Row) -> Iterator[tuple[dict[str, Any], Point]]:
        stride = len(self.grid)
        for axis in self.grid.axes:
            count = len(axis.rows)
            stride //= count
            here = best.point // stride % count
            own = axis.settings(here)
            for other in (i for i in range(count) if i != here):
                index = best.point + (other - here) * stride
                point = Point(index=index, settings=self.grid.settings(index))
                if self.grid.wants(point):
                    yield {k: v for k, v in axis.settings(other).items() if v != own[k]}, point
