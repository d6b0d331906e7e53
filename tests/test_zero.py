"""ZeRO-1 and ZeRO-2 as runtimes: volume, memory, and when things happen."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_scenarios import Timeline, run

from fsdpsim.result import Result

MIXED = {"param_dtype": "float16", "optimizer": "adamw"}


def _run(runtime: str, *, training: dict[str, Any] | None = None, **fsdp: Any) -> Result:
    training = MIXED | (training or {})
    return run(runtime, 6, world=4, parameters=4096, fsdp=fsdp, training=training)


def _elements(result: Result) -> int:
    return sum(unit.numel for unit in result.workload.units)


@pytest.mark.parametrize(
    ("runtime", "fsdp", "volume"),
    [("zero1", {}, 2), ("zero2", {}, 2), ("zero1", {"all_reduce": True}, 3)],
)
def test_volume_in_units_of_the_gradient(runtime: str, fsdp: dict[str, Any], volume: int) -> None:
    result = _run(runtime, **fsdp)
    sent = sum(c.bytes_sent_per_rank for c in result.collectives.values())
    assert sent == volume * 3 / 4 * 2 * _elements(result)


def test_state_is_four_plus_twelve_over_n_bytes() -> None:
    """Whole fp16 parameters; the fp32 copy and two moments of this rank's quarter."""
    result = _run("zero1", training={"iterations": 1})
    psi, live = _elements(result), 0
    for sample in result.memory.samples:
        live += sample.buffer.nbytes if sample.is_malloc else -sample.buffer.nbytes
    assert live == 2 * psi + 12 * psi // 4


def test_stage_1_keeps_the_gradient_until_backward_ends() -> None:
    time = Timeline(_run("zero1", reduce_bucket_size=4096))
    last_backward = time.all("backward")[-1]
    assert len(time.all("reduce_scatter")) > 1
    assert all(op.start >= last_backward.end for op in time.all("reduce_scatter"))


def test_stage_2_reduces_during_backward_and_holds_less() -> None:
    result = _run("zero2", reduce_bucket_size=4096)
    time = Timeline(result)
    assert time.all("reduce_scatter")[0].start < time.all("backward")[-1].start
    assert result.peak("allocated") < _run("zero1", reduce_bucket_size=4096).peak("allocated")


@pytest.mark.parametrize("runtime", ["zero1", "zero2"])
def test_forward_waits_for_the_updated_parameters(runtime: str) -> None:
    result = _run(runtime)
    gathers = Timeline(result, 2).all("all_gather")
    assert Timeline(result, 3).all("forward")[0].start >= gathers[-1].end


@pytest.mark.parametrize(("runtime", "reductions"), [("zero1", 1), ("zero2", 3)])
def test_accumulation(runtime: str, reductions: int) -> None:
    """Stage 1 reduces the sum once, stage 2 every micro-batch."""
    result = _run(runtime, training={"gradient_accumulation_steps": 3})
    assert result.collectives["reduce_scatter"].count == reductions
    assert result.collectives["all_gather"].count == 1


@pytest.mark.parametrize("runtime", ["zero1", "zero2"])
def test_two_buckets_are_under_way_at_most(runtime: str) -> None:
    """The CPU thread waits until the bucket before the last is reduced, so that a fast one asks for
    no more memory than a slow one."""
    result = _run(runtime, reduce_bucket_size=4096)
    time = Timeline(result)
    copies, reductions = time.all("copy_to_bucket"), time.all("reduce_scatter")
    assert len(reductions) > 3
    assert all(c.issued >= r.end for c, r in zip(copies[2:], reductions, strict=False))
    assert result.host_blocked["gradient_buckets"] > 0
    alive = peak = 0
    for sample in result.memory.samples:
        if sample.buffer.name == "reduce_bucket":
            alive += 1 if sample.is_malloc else -1
            peak = max(peak, alive)
    assert peak <= 2
