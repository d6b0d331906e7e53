"""Simulating single points, in whatever process: what points share is built once for all."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fsdpsim.collector import paused_collector
from fsdpsim.costs import Costs
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, ScenarioError
from fsdpsim.simulate import build_costs, build_workload, simulate
from fsdpsim.summary import summary
from fsdpsim.sweeps.bounds import LowerBounds, lower_bounds
from fsdpsim.sweeps.grid import Point, Variations
from fsdpsim.sweeps.row import Row, Status
from fsdpsim.workload import Workload

#: Workloads that one process keeps: at kernel granularity one takes up to a megabyte.
MAX_WORKLOADS = 64

#: Names of what does not differ from point to point.
CONSTANT = ("scenario", "title")


class Simulator:
    """Runs points of one sweep, one after the other."""

    def __init__(self, base: Scenario) -> None:
        self.variations = Variations(base)
        self._workloads: OrderedDict[tuple[Any, ...], tuple[Workload, Any]] = OrderedDict()

    def line(self, point: Point) -> str:
        """The row of ``point`` as JSON. No error escapes: it becomes the row's reason."""
        try:
            with paused_collector():
                return self._row(point).as_json()
        except ScenarioError as error:
            reason = "; ".join(str(problem) for problem in error.problems)
            return empty_row(point, "invalid", reason).as_json()
        except Exception as error:
            return empty_row(point, "failed", f"{type(error).__name__}: {error}").as_json()

    def _row(self, point: Point) -> Row:
        result = self.simulate(self.variations.at(point.settings))
        figures = {k: v for k, v in summary(result).items() if k not in CONSTANT}
        oom = figures["oom"]
        return Row(
            point=point.index,
            settings=point.settings,
            status="oom" if oom else "ok",
            reason=_describe(oom) if oom else "",
            figures=figures,
        )

    def simulate(self, scenario: Scenario) -> Result:
        """As :func:`fsdpsim.simulate`, for figures; earlier points may have built the workload."""
        workload = self.workload(scenario, build_costs(scenario))
        return simulate(scenario, workload=workload, marks=False)

    def bounds(self, scenario: Scenario) -> LowerBounds:
        """What ``scenario`` needs at least. Raises :class:`ScenarioError`."""
        costs = build_costs(scenario)
        return lower_bounds(scenario, self.workload(scenario, costs), costs)

    def workload(self, scenario: Scenario, costs: Costs) -> Workload:
        """The workload of ``scenario``: it follows from these tables and from the unit size."""
        fsdp = scenario.fsdp
        tables = (scenario.workload, scenario.model, scenario.training, scenario.hardware)
        unit = [getattr(fsdp, k, None) for k in ("unit", "wrap_embedding", "wrap_head")]
        key = (*map(id, tables), fsdp.runtime, repr(unit))
        if key in self._workloads:
            self._workloads.move_to_end(key)
        else:
            # The tables are kept with it: an id is unique only among living objects.
            self._workloads[key] = build_workload(scenario, costs), tables
            if len(self._workloads) > MAX_WORKLOADS:
                self._workloads.popitem(last=False)
        return self._workloads[key][0]


def run_chunk(base: bytes, points: Sequence[Point]) -> list[str]:
    """The rows of ``points`` as lines of JSON; ``base`` is the pickled base scenario.

    Runs in any process that has this package: it takes and returns plain data.
    """
    simulator = _simulator(base, threading.get_ident())
    return [simulator.line(point) for point in points]


@lru_cache(maxsize=8)
def _simulator(base: bytes, thread: int) -> Simulator:
    """One for each thread: its caches are not made for several."""
    return Simulator(pickle.loads(base))


def empty_row(point: Point, status: Status, reason: str) -> Row:
    """The row of a point that has no figures."""
    return Row(point=point.index, settings=point.settings, status=status, reason=reason, figures={})


def _describe(oom: dict[str, Any]) -> str:
    where = f"{oom['what']} of {oom['unit'] or 'the training loop'}"
    return f"{where} in {oom['phase']} of iteration {oom['iteration'] + 1}"
