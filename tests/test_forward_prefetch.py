"""Explicit forward prefetch gains where the host is slow, and nowhere else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def _gain(name: str, *overrides: str) -> float:
    """What gathering two units ahead gains, as a fraction of the step."""
    path = SCENARIOS / f"forward_prefetch_{name}.toml"
    without, ahead = (
        simulate(load(path, [f"fsdp.forward_prefetch={depth}", *overrides])).step_time
        for depth in (0, 2)
    )
    return without / ahead - 1


def test_it_gains_with_small_kernels_and_a_slow_host() -> None:
    assert _gain("helps") >= 0.05


def test_it_changes_nothing_with_large_kernels() -> None:
    assert abs(_gain("neutral")) < 0.005


def test_it_changes_nothing_with_a_fast_host() -> None:
    assert abs(_gain("helps", "hardware.host.kernel_launch=2 us")) < 0.005


def test_the_two_differ_only_in_the_micro_batch() -> None:
    helps, neutral = (
        tomllib.loads((SCENARIOS / f"forward_prefetch_{name}.toml").read_text(encoding="utf-8"))
        for name in ("helps", "neutral")
    )
    assert helps["training"].pop("micro_batch_size") < neutral["training"].pop("micro_batch_size")
    assert helps.pop("title") != neutral.pop("title")
    assert helps == neutral


@pytest.mark.parametrize("name", ["helps", "neutral"])
def test_with_unchanged_memory_limits(name: str) -> None:
    result = simulate(load(SCENARIOS / f"forward_prefetch_{name}.toml"))
    assert result.memory.oom is None
    assert result.memory.allocator.num_alloc_retries == 0
