"""Which points no other point beats in both time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fsdpsim.scenario import Scenario
from fsdpsim.sweeps.row import Row

MEMORY = "peak_reserved_bytes"

#: Keys that change how much work a step does: between such points only throughput compares.
WORK = (
    "training.micro_batch_size",
    "training.seq_len",
    "training.gradient_accumulation_steps",
    "training.forwards_per_backward",
    "workload.tokens",
)


def objective(scenario: Scenario, keys: Iterable[str]) -> str:
    """The figure that says how fast a point is when ``keys`` vary."""
    workload = scenario.workload
    if workload is not None and workload.tokens is None:
        return "step_time_s"  # there are no tokens to count
    varied = any(key in WORK or key in ("training", "workload", "model") for key in keys)
    return "tokens_per_s_per_gpu" if varied else "step_time_s"


def cost(row: Row, figure: str) -> float | None:
    """The figure as a number of which less is better (seconds per token); None if there is none."""
    value = row.get(figure)
    if not isinstance(value, (int, float)) or row.status != "ok":
        return None
    if figure != "tokens_per_s_per_gpu":
        return float(value)
    return 1 / value if value else None


@dataclass(slots=True)
class ParetoFront:
    """The best trade-offs between ``figure`` and peak memory among the rows added so far."""

    figure: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Take ``row`` in, unless another is at least as good in both and better in one."""
        mine = self._place(row)
        if mine is None or any(_beats(self._known(other), mine) for other in self.rows):
            return
        self.rows = [r for r in self.rows if not _beats(mine, self._known(r))]
        self.rows.append(row)

    def __iter__(self) -> Iterator[Row]:
        """From the fastest to the smallest."""
        return iter(sorted(self.rows, key=lambda row: (*self._known(row), row.point)))

    def _place(self, row: Row) -> tuple[float, float] | None:
        time = cost(row, self.figure)
        return None if time is None else (time, row.figures[MEMORY])

    def _known(self, row: Row) -> tuple[float, float]:
        place = self._place(row)
        assert place is not None
        return place


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b
