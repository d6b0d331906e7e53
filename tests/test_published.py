"""What published profiles and papers say beyond throughput and peak memory, simulated."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

import pytest

from fsdpsim.simulate import simulate
from fsdpsim.validate import Prediction, predict, read_measurements, scenario_of

DATA = read_measurements()

pytestmark = pytest.mark.slow


def test_kernel_digest_of_the_70b_step() -> None:
    """NeMo Automodel's nsys report, FSDP2 on 64 H100: counts, mean durations, step time."""
    profile = next(p for p in DATA.profiles if p["id"] == "prof-nemo-fsdp2-fp32rs")
    result = simulate(scenario_of(DATA.row(profile["row"]), DATA))
    durations = defaultdict(list)
    for op in result.ops:
        if op.iteration == result.scenario.iterations - 1:
            durations[op.kind].append(op.end - op.start)
    for published in profile["collectives"]:
        simulated = durations[published["op"]]
        assert len(simulated) == published["count"]
        assert fmean(simulated) == pytest.approx(published["mean_ms"] / 1000, rel=0.15)
    assert result.step_time == pytest.approx(profile["step_ms"] / 1000, rel=0.08)


def test_what_resharding_after_forward_costs_on_llama_3_8b() -> None:
    never, always = (_predicted(DATA.row(f"tt-log-reshard-{how}")) for how in ("never", "always"))
    identity = next(m for m in DATA.memory_identities if m["name"] == "reshard never minus default")
    more = (never.peak_reserved - always.peak_reserved) / 2**30
    assert more == pytest.approx(identity["measured_gib"], rel=0.05)
    assert never.step_time is not None and always.step_time is not None
    assert 1.01 < always.step_time / never.step_time < 1.05


def test_backward_prefetch_of_gpt_175b_on_128_a100() -> None:
    """The FSDP paper's Figure 6b: about 18 %."""
    row = {**DATA.row("vldb-175b-bs2-128"), "tps_per_gpu": 1.0}  # what is measured does not matter
    times = {}
    for prefetch in ("BACKWARD_PRE", "NO_PREFETCH"):
        times[prefetch] = _predicted({**row, "backward_prefetch": prefetch}).step_time
    assert 1.10 < times["NO_PREFETCH"] / times["BACKWARD_PRE"] < 1.30


def _predicted(row: Any) -> Prediction:
    return predict(scenario_of(row, DATA))
