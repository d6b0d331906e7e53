"""A parameter that two parts of the model use: its gradients are added, and then reduced once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpsim.engine import Op
from fsdpsim.memory import Free, Malloc
from fsdpsim.result import Result
from fsdpsim.scenario import ScenarioError, load
from fsdpsim.simulate import simulate

GPT2 = Path(__file__).parent.parent / "scenarios" / "models" / "gpt2.json"
TIED = "grad transformer.wte.weight"


def run(runtime: str, *, steps: int = 1, **fsdp: Any) -> Result:
    return simulate(
        load(
            {
                "model": {"hf_config": str(GPT2)},
                "hardware": {"gpus_per_node": 4},
                "fsdp": {"runtime": runtime, **fsdp},
                "training": {
                    "seq_len": 64,
                    "iterations": 2,
                    "gradient_accumulation_steps": steps,
                    "param_dtype": "bfloat16",
                    "reduce_dtype": "bfloat16",
                },
            }
        )
    )


def elements(result: Result) -> int:
    return sum(unit.numel for unit in result.workload.units)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("runtime", "reductions"), [("zero1", {1: 1, 2: 1}), ("zero2", {1: 1, 2: 2})]
)
def test_zero_reduces_each_gradient_once(
    runtime: str, reductions: dict[int, int], steps: int
) -> None:
    result = run(runtime, steps=steps, reduce_bucket_size=2**20)
    sent = result.collectives["reduce_scatter"].bytes_sent_per_rank
    assert sent == pytest.approx(reductions[steps] * 3 / 4 * 2 * elements(result), rel=1e-3)


def test_ddp_reduces_once_and_after_the_last_use() -> None:
    result = run("ddp")
    assert result.collectives["all_reduce"].bytes_sent_per_rank == pytest.approx(
        2 * 3 / 4 * 2 * elements(result), rel=1e-3
    )
    last = [op for op in result.ops if op.iteration == 1]
    copies = sum(op.name == "copy_to_bucket" for op in last)
    assert copies == sum(len(unit.params) for unit in result.workload.units)
    steps = result.program.steps
    second = max(i for i, s in enumerate(steps) if type(s) is Malloc and s.name == TIED)
    kernel = next(s for s in steps[second:] if type(s) is Op and s.kind == "backward")
    reduced = [op for op in last if op.kind == "all_reduce"][-1]
    assert steps.index(reduced) > second
    assert reduced.start >= kernel.end


@pytest.mark.parametrize("runtime", ["ddp", "zero1", "zero2", "fsdp1", "fsdp2"])
def test_the_second_gradient_is_added_and_freed(runtime: str) -> None:
    result = run(runtime)
    steps = [s for s in result.program.steps if getattr(s, "iteration", 1) == 1]
    tied = [s for s in steps if type(s) is Malloc and s.name == TIED]
    added = [s for s in steps if type(s) is Op and s.name == "accumulate_gradient"]
    assert (len(tied), len(added)) == (2, 1)
    freed = [s.buffer for s in result.program.steps if type(s) is Free]
    assert all(buffer in freed for buffer in tied)


@pytest.mark.parametrize("as_view", [True, False])
def test_ddp_adds_what_a_micro_batch_before_has_left(as_view: bool) -> None:
    one, two = (run("ddp", steps=steps, gradient_as_bucket_view=as_view) for steps in (1, 2))
    params = sum(len(unit.params) for unit in one.workload.units)

    def additions(result: Result) -> int:
        return sum(op.name == "accumulate_gradient" and op.iteration == 1 for op in result.ops)

    # Of one micro-batch: the tied embedding's second use.
    assert (additions(one), additions(two)) == (1, 2 + params)


def test_ddp_drops_gradients_that_are_in_a_bucket() -> None:
    beside, inside = (
        run("ddp", gradient_as_bucket_view=as_view).peak("allocated") for as_view in (False, True)
    )
    assert inside < beside


# ---- names


def test_parameters_of_one_name_in_two_units_are_two() -> None:
    def peak(runtime: str, names: tuple[str, str]) -> int:
        units = [
            {"name": unit, "params": [{"name": name, "shape": [size]}]}
            for unit, name, size in zip("ab", names, (1000, 4000), strict=True)
        ]
        times = {"forward": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 1.0}
        table = {"workload": {"units": units, **times}, "fsdp": {"runtime": runtime}}
        return simulate(load(table)).peak("requested")

    for runtime in ("ddp", "zero2", "fsdp1", "fsdp2"):
        assert peak(runtime, ("weight", "weight")) == peak(runtime, ("a.weight", "b.weight"))


def test_parameters_of_one_name_in_one_unit_are_refused() -> None:
    units = [{"name": "a", "params": [{"name": "weight", "shape": [8]}] * 2}]
    with pytest.raises(ScenarioError, match='2 parameters of "a" are named "weight"'):
        load({"workload": {"units": units, "forward": 1.0}, "fsdp": {"runtime": "fsdp2"}})
