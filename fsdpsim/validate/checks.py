"""What sources publish beyond throughput and peak memory, each figure with its allowed range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from typing import Any

from fsdpsim.processes import map_in_processes
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario
from fsdpsim.simulate import simulate
from fsdpsim.validate.predict import Prediction, predict
from fsdpsim.validate.rows import GIB, Measurements, Row
from fsdpsim.validate.scenarios import scenario_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One published figure beside the simulated one, in the unit that ``name`` states."""

    name: str
    published: float
    predicted: float
    low: float
    """Least value of ``predicted`` that counts as right."""
    high: float
    """Largest."""

    @property
    def holds(self) -> bool:
        """Whether the simulated figure lies in the allowed range."""
        return self.low <= self.predicted <= self.high

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "holds": self.holds}


def _within(name: str, published: float, predicted: float, tolerance: float) -> Check:
    return Check(
        name=name,
        published=published,
        predicted=predicted,
        low=published * (1 - tolerance),
        high=published * (1 + tolerance),
    )


def run_checks(data: Measurements, *, jobs: int = 1) -> list[Check]:
    """Simulate what the checks need, in ``jobs`` processes."""
    return list(chain.from_iterable(map_in_processes(jobs, _checks, GROUPS, repeat(data))))


def _checks(group: Callable[[Measurements], Iterator[Check]], data: Measurements) -> list[Check]:
    return list(group(data))


# ---- time


def kernel_digest(data: Measurements) -> Iterator[Check]:
    """NeMo Automodel's nsys report of one 70B step, FSDP2 on 64 H100, of some rank."""
    profile = next(p for p in data.profiles if p["id"] == "prof-nemo-fsdp2-fp32rs")
    scenario = scenario_of(data.row(profile["row"]), data)
    slowest = simulate(scenario)
    for published in profile["collectives"]:
        kind = published["op"]
        summary = slowest.collectives[kind]
        yield _within(f"70B: {kind} count", published["count"], summary.count, 0)
        mean = 1e3 * summary.time_s / summary.count
        yield _within(f"70B: {kind} mean ms", published["mean_ms"], mean, 0.15)
    exposed = 1e3 * exposed_on_a_mean_rank(scenario, slowest)
    published = profile["overlap"]["total_exposed_ms"]
    yield Check(
        name="70B: exposed communication ms",
        published=published,
        predicted=exposed,
        low=published / 1.5,
        high=published * 1.5,
    )
    yield _within("70B: step ms", profile["step_ms"], 1e3 * slowest.step_time, 0.08)


def exposed_on_a_mean_rank(scenario: Scenario, slowest: Result) -> float:
    """Seconds in which a GPU of mean speed only communicates, in a job whose ``slowest`` is known.

    Its kernels end earlier, and in the collectives that follow it waits for the slowest GPU: all
    ranks have the same step time.
    """
    device = scenario.device.model_copy(update={"speed_spread": 0.0})
    mean = simulate(scenario.model_copy(update={"hardware": device}))
    return slowest.exposed_communication + slowest.compute_time - mean.compute_time


def scaling_out(data: Measurements) -> Iterator[Check]:
    """MosaicML's MPT-7B, the same batch per GPU on 8 and on 512 H100."""
    few, many = data.row("mpt-039"), data.row("mpt-010")
    yield Check(
        name="MPT-7B, 8 to 512 H100: throughput lost %",
        published=100 * (1 - many["tps_per_gpu"] / few["tps_per_gpu"]),
        predicted=100 * (1 - _seconds(few, data) / _seconds(many, data)),
        low=5,
        high=15,
    )


def backward_prefetch(data: Measurements) -> Iterator[Check]:
    """The FSDP paper's Figure 6b: GPT-175B on 128 A100, 2 sequences per GPU."""
    row = {**data.row("vldb-175b-bs2-128"), "tps_per_gpu": 1.0}  # what is measured does not matter
    without = _seconds({**row, "backward_prefetch": "NO_PREFETCH"}, data)
    gain = without / _seconds({**row, "backward_prefetch": "BACKWARD_PRE"}, data) - 1
    yield Check(
        name="GPT-175B: backward prefetch gains %",
        published=18,
        predicted=100 * gain,
        low=10,
        high=30,
    )


# ---- memory


def resharding(data: Measurements) -> Iterator[Check]:
    """torchtitan PR 822: Llama 3 8B without and with resharding after forward."""
    rows = [data.row(f"tt-log-reshard-{how}") for how in ("never", "default")]
    never, default = (_predicted(row, data) for row in rows)
    yield _within(
        "Llama 3 8B: reshard never minus default, reserved GiB",
        _measured("reshard never minus default", data),
        (never.peak_reserved - default.peak_reserved) / GIB,
        0.05,
    )
    assert never.step_time is not None and default.step_time is not None
    yield Check(
        name="Llama 3 8B: never resharding gains %",
        published=100 * (rows[0]["tps_per_gpu"] / rows[1]["tps_per_gpu"] - 1),
        predicted=100 * (default.step_time / never.step_time - 1),
        low=1,
        high=5,
    )


def first_step(data: Measurements) -> Iterator[Check]:
    """The same log: after sharding, in the first step, and later."""
    result = simulate(scenario_of(data.row("tt-log-reshard-default"), data))
    samples = result.memory.samples
    sharded = max(s.reserved for s in samples if s.buffer.name.endswith("sharded_param"))
    first = max(s.reserved for s in samples if s.buffer.iteration == 0)
    yield _within(
        "Llama 3 8B: reserved after sharding GiB",
        _measured("device memory right after FSDP, 8 GPUs", data),
        sharded / GIB,
        0.05,
    )
    yield _within(
        "Llama 3 8B: later steps minus first step, reserved GiB",
        _measured("later steps minus first step, 8 GPUs", data),
        (result.peak("reserved") - first) / GIB,
        0.05,
    )


def more_gpus(data: Measurements) -> Iterator[Check]:
    """torchtitan: what sharding Llama 3 8B over more GPUs saves on each."""
    measured = _measured("8 GPUs minus 128 GPUs, batch 2", data)
    for number, name in enumerate(("tt-8b-h100-8-eager", "tt-8b-h100-128-compile")):
        row = data.row(name)
        yield _within(
            f"Llama 3 8B{', compiled' if row['compile'] else ''}: 8 minus 128 GPUs, reserved GiB",
            measured[number],
            _saved_by_more_gpus(row, 128, data),
            0.05,
        )
    yield _within(
        "Llama 3 8B, batch 1: 8 minus 64 GPUs, reserved GiB",
        _measured("8 GPUs minus 64 GPUs, batch 1 (PR 1881)", data),
        _saved_by_more_gpus(data.row("tt-1881-fsdp2-8"), 64, data),
        0.05,
    )


def _saved_by_more_gpus(row: Row, gpus: int, data: Measurements) -> float:
    few, many = (
        _predicted({**row, "n_gpus": n, "shard_factor": n}, data).peak_reserved for n in (8, gpus)
    )
    return (few - many) / GIB


def chunked_loss(data: Measurements) -> Iterator[Check]:
    """Cross-entropy in chunks instead of on all logits at once."""
    scenario = scenario_of(data.row("tt-log-eager-2025-03"), data)
    peaks = []
    for chunks in (1, 8):
        training = scenario.training.model_copy(update={"chunked_loss": chunks})
        peaks.append(predict(scenario.model_copy(update={"training": training})).peak_reserved)
    yield _within(
        "Llama 3 8B: chunked cross-entropy saves, reserved GiB",
        _measured("chunked cross entropy saving, batch 1 x 8192 x 128256", data),
        (peaks[0] - peaks[1]) / GIB,
        0.05,
    )


def reserved_over_active(data: Measurements) -> Iterator[Check]:
    """How much of what is reserved lies idle at the peak: torchtitan PR 165 and NeMo's 70B."""
    ratios = next(
        m["ratios"]
        for m in data.memory_identities
        if m["name"] == "reserved over active or allocated"
    )
    checkpointed = {**data.row("tt-165-fsdp1-sac"), "act_ckpt": "full"}
    rows = {
        "fsdp1_ac": checkpointed,
        "fsdp1_sac": data.row("tt-165-fsdp1-sac"),
        "fsdp2_ac": data.row("tt-165-fsdp2-ac"),
        "fsdp2_sac": data.row("tt-165-fsdp2-sac"),
        "nemo_fsdp2_70b": data.row("nemo-70b-fsdp2-fp32rs"),
    }
    for name, row in rows.items():
        found = _predicted(row, data)
        ratio = found.peak_reserved / found.peak_active
        yield _within(f"reserved over active: {name}", ratios[name], ratio, 0.05)


GROUPS = (
    kernel_digest,
    scaling_out,
    backward_prefetch,
    resharding,
    first_step,
    more_gpus,
    chunked_loss,
    reserved_over_active,
)


def _measured(name: str, data: Measurements) -> Any:
    return next(m["measured_gib"] for m in data.memory_identities if m["name"] == name)


def _predicted(row: Row, data: Measurements) -> Prediction:
    return predict(scenario_of(row, data))


def _seconds(row: Row, data: Measurements) -> float:
    seconds = _predicted(row, data).step_time
    assert seconds is not None
    return seconds
