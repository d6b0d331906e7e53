"""The roofline of a step: its points are the step's kernels, and no roof is broken."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import pytest

from fsdpsim.cli import main
from fsdpsim.plots import roofline
from fsdpsim.plots.roofline import points_of
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parents[1] / "scenarios"
LLAMA = SCENARIOS / "llama3_8b_8xh100.toml"


@lru_cache
def run(*overrides: str) -> Result:
    return simulate(load(LLAMA, ["model.num_hidden_layers=4", "training.seq_len=512", *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.granularity=units",),
        ("training.gradient_accumulation_steps=2", "training.activation_checkpointing=full"),
    ],
)
def test_points_are_the_kernels_of_the_step(overrides: tuple[str, ...]) -> None:
    result = run(*overrides)
    training = result.scenario.training
    kernels = [
        kernel
        for part in result.workload.parts
        for kernel in (*part.forward, *part.recompute, *part.backward)
    ] * training.gradient_accumulation_steps
    points = points_of(result)
    assert sum(p.flops for p in points) == pytest.approx(sum(k.flops for k in kernels))
    seconds = sum(result.costs.kernel(k) for k in kernels if k.flops)
    assert sum(p.seconds for p in points) == pytest.approx(seconds)
    assert [p.seconds for p in points] == sorted((p.seconds for p in points), reverse=True)
    device = result.scenario.device
    for point in points:
        roof = min(device.peak_flops, point.intensity * device.memory_bandwidth)
        assert 0 < point.rate <= roof


def test_what_is_drawn() -> None:
    result = run()
    axes = roofline(result).axes[0]
    drawn = {c.get_gid(): c.get_offsets()[0] for c in axes.collections}
    for point in points_of(result):
        x, y = drawn[point.names[0]]
        assert (x, y) == pytest.approx((point.intensity, point.rate / 1e12))
    assert drawn["step"][1] == pytest.approx(
        sum(p.flops for p in points_of(result)) / result.step_time / 1e12
    )
    (peaks,) = [line for line in axes.lines if line.get_gid() == "peaks"]
    device = result.scenario.device
    assert peaks.get_xdata()[1] == device.peak_flops / device.memory_bandwidth
    assert math.isclose(max(peaks.get_ydata()), device.peak_flops / 1e12)


@pytest.mark.parametrize("memory", ["1 GiB", "4 GiB"])
def test_out_of_memory_leaves_the_kernels(memory: str) -> None:
    """Before anything ran, or during a step: their costs are known, the time of the step is not."""
    result = run(f"hardware.memory='{memory}'")
    assert result.memory.oom is not None
    figure = roofline(result)
    said = [text.get_text() for text in figure.texts]
    assert "out of memory at" in said[0] and "what its kernels would reach" in said[0]
    assert not any("of the step" in text or "whole step" in text for text in said)
    drawn = {c.get_gid(): c.get_offsets()[0] for c in figure.axes[0].collections}
    assert set(drawn) == {point.names[0] for point in points_of(result)}


def test_given_durations_have_no_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    path = SCENARIOS / "textbook_overlap.toml"
    assert main(["plot", str(path), "--chart", "roofline", "-o", "never.png"]) == 2
    assert "a roofline needs kernels with FLOPs" in capsys.readouterr().err


def test_the_same_step_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.svg" for i in range(2)]
    for path in paths:
        overrides = ["--set", "model.num_hidden_layers=2", "--set", "training.seq_len=128"]
        assert main(["plot", str(LLAMA), *overrides, "--chart", "roofline", "-o", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
