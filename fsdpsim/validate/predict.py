"""What the simulator says of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from fsdpsim.processes import map_in_processes
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario
from fsdpsim.simulate import simulate
from fsdpsim.validate.rows import Measurements, Row
from fsdpsim.validate.scenarios import SkipRow, scenario_of

#: Iterations that are simulated: the second has the optimizer's state and FSDP1's recorded order.
ITERATIONS = 2

#: Micro-batches that are simulated; each further one takes what the last of these adds.
MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds and bytes of one optimizer step in steady state."""

    step_time: float | None
    """None when the job is predicted to run out of memory."""
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    num_alloc_retries: int
    model_flops: float
    """Model FLOPs per GPU and step, as MFU counts them."""
    peak_flops: float
    """The GPU's peak, FLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row with its prediction, or with the reason why it has none."""

    row: Row
    prediction: Prediction | None = None
    skipped: str = ""


def predict(scenario: Scenario) -> Prediction:
    """Simulate ``scenario``, with at most :data:`MICRO_BATCHES` micro-batches per step."""
    steps = scenario.training.gradient_accumulation_steps
    result = _simulate(scenario, min(steps, MICRO_BATCHES))
    step_time = None if result.memory.oom else result.step_time
    if step_time is not None and steps > MICRO_BATCHES:
        fewer = _simulate(scenario, MICRO_BATCHES - 1)
        step_time += (steps - MICRO_BATCHES) * (step_time - fewer.step_time)
    return Prediction(
        step_time=step_time,
        peak_allocated=result.peak("allocated"),
        peak_active=result.peak("active"),
        peak_reserved=result.peak("reserved"),
        num_alloc_retries=result.memory.allocator.num_alloc_retries,
        model_flops=result.workload.flops_per_token * result.workload.tokens * steps,
        peak_flops=scenario.device.peak_flops,
    )


def _simulate(scenario: Scenario, micro_batches: int) -> Result:
    update = {"iterations": ITERATIONS, "gradient_accumulation_steps": micro_batches}
    training = scenario.training.model_copy(update=update)
    return simulate(scenario.model_copy(update={"training": training}), marks=False)


def predict_row(data: Measurements, row: Row, efficiency: float | None = None) -> Outcome:
    """The outcome of ``row``; ``efficiency`` replaces that of its machine."""
    try:
        scenario = scenario_of(row, data, efficiency=efficiency)
    except SkipRow as reason:
        return Outcome(row=row, skipped=str(reason))
    return Outcome(row=row, prediction=predict(scenario))


def predict_rows(
    data: Measurements,
    rows: Sequence[Row],
    *,
    jobs: int = 1,
    efficiency: float | None = None,
) -> Iterator[Outcome]:
    """The outcomes of ``rows`` in their order, worked out in ``jobs`` processes."""
    return map_in_processes(jobs, partial(predict_row, data), rows, repeat(efficiency))
