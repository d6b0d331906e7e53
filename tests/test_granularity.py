"""``granularity = "units"``: one op and one buffer where there are many, and the same totals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fsdpsim.memory import Malloc
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

MODELS = Path(__file__).parent.parent / "scenarios" / "models"


def run(model: str, runtime: str, granularity: str, **training: Any) -> Result:
    return simulate(
        load(
            {
                "model": {"hf_config": str(MODELS / f"{model}.json")},
                "hardware": {"gpus_per_node": 4},
                "fsdp": {"runtime": runtime},
                "training": {"granularity": granularity, "seq_len": 128, **training},
            }
        )
    )


def sizes(result: Result, *categories: str) -> Counter[str]:
    """Bytes of the step's buffers by category."""
    found: Counter[str] = Counter()
    for step in result.program.steps:
        if type(step) is Malloc and step.category in categories:
            found[step.category] += step.nbytes
    return found


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("model", ["gpt2", "llama3.2_1b", "tinyllama_1.1b"])
def test_same_bytes_in_fewer_buffers(model: str, runtime: str, steps: int) -> None:
    fine, coarse = (
        run(model, runtime, granularity, gradient_accumulation_steps=steps)
        for granularity in ("kernels", "units")
    )
    kinds = ("parameters", "optimizer_state", "all_gather", "reduce_scatter", "gradients")
    assert sizes(coarse, *kinds) == sizes(fine, *kinds)
    assert {k: v.count for k, v in coarse.collectives.items()} == {
        k: v.count for k, v in fine.collectives.items()
    }
    assert coarse.memory.samples[-1].requested == fine.memory.samples[-1].requested
    # Buffers that a pass frees one after the other, beside gradients that it writes, are freed at
    # its end.
    peaks = [result.peak("requested") for result in (fine, coarse)]
    assert 0.99 * peaks[0] <= peaks[1] <= 1.1 * peaks[0]
    mallocs = [sum(type(s) is Malloc for s in r.program.steps) for r in (fine, coarse)]
    assert mallocs[1] < mallocs[0] / 2


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_one_buffer_for_what_lives_and_dies_together(runtime: str) -> None:
    result = run("llama3.2_1b", runtime, "units", iterations=1)
    found = Counter(
        (step.unit, step.category)
        for step in result.program.steps
        if type(step) is Malloc and step.name.startswith(("grad ", "optimizer_state"))
    )
    block = "layers.3"
    assert found[block, "gradients"] == 1
    assert found[block, "optimizer_state"] == 2


def test_a_tied_embedding_is_a_buffer_of_its_own() -> None:
    result = run("gpt2", "fsdp2", "units", iterations=1)
    grads = [
        step.name
        for step in result.program.steps
        if type(step) is Malloc and step.name.startswith("grad ") and "wte" in step.name
    ]
    assert grads == ["grad transformer.wte.weight"] * 2
