"""The rate limiter's three faces, from one mechanism, and what a limit of two means in PyTorch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def _pair(name: str, **overrides: Any) -> tuple[Result, Result]:
    """With the limiter and without."""
    path = SCENARIOS / f"{name}.toml"
    extra = [f"{key}={value}" for key, value in overrides.items()]
    limited, free = (
        simulate(load(path, [f"fsdp.limit_all_gathers={limit}", *extra]))
        for limit in ("true", "false")
    )
    return limited, free


def test_it_helps_where_memory_is_nearly_full() -> None:
    limited, free = _pair("rate_limiter_helps")
    assert free.step_time >= 1.5 * limited.step_time
    assert limited.memory.allocator.num_alloc_retries == 0
    assert free.memory.allocator.num_alloc_retries > 0


def test_it_changes_nothing_where_memory_is_ample() -> None:
    limited, free = _pair("rate_limiter_neutral")
    assert free.step_time == pytest.approx(limited.step_time, rel=0.01)
    assert free.memory.allocator.num_alloc_retries == 0


def test_it_hurts_where_the_cpu_needs_its_lead() -> None:
    limited, free = _pair("rate_limiter_hurts")
    assert 1.01 <= limited.step_time / free.step_time <= 1.10


def test_the_three_differ_only_in_model_batch_memory_and_host_speed() -> None:
    tables = [
        _flat(tomllib.loads((SCENARIOS / f"rate_limiter_{name}.toml").read_text(encoding="utf-8")))
        for name in ("helps", "neutral", "hurts")
    ]
    differing = {key for key in tables[0] if len({repr(t[key]) for t in tables}) > 1}
    assert all(set(t) == set(tables[0]) for t in tables)
    assert differing == {
        "title",
        "model.n_layer",
        "training.micro_batch_size",
        "hardware.memory",
        "hardware.host.kernel_launch",
    }


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
        found |= inner
    return found


def test_13b_as_real_fsdp1_keeps_three_units_with_the_limiter_and_all_without() -> None:
    limited, free = _pair("fsdp1_13b_64gpu")
    assert limited.max_unsharded_units == 3
    assert free.max_unsharded_units == 80 * limited.scenario.iterations
    assert free.step_time == pytest.approx(limited.step_time, rel=1e-9)
