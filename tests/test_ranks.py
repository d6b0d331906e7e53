"""Several ranks: collectives start with their last member; and contention on one GPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fsdp_scenarios import tables
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpsim.engine import Op
from fsdpsim.result import Result
from fsdpsim.scenario import ScenarioError, load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def _run(runtime: str, noise: dict[str, Any] | None, **options: Any) -> Result:
    table = tables(runtime, 4, **options)
    return simulate(load(table if noise is None else table | {"noise": noise}))


def _collectives(result: Result) -> list[list[Op]]:
    return [
        [s for s in program.steps if type(s) is Op and s.collective is not None]
        for program in result.ranks
    ]


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2", "ddp"])
def test_without_differences_one_rank_stands_for_all(runtime: str) -> None:
    fsdp = {} if runtime == "ddp" else {"sharding_factor": 4}
    one, all_ranks = _run(runtime, None, fsdp=fsdp), _run(runtime, {}, fsdp=fsdp)
    assert len(all_ranks.ranks) == 8
    assert [(o.start, o.end) for o in one.ops] == [(o.start, o.end) for o in all_ranks.ops]


@settings(max_examples=25, deadline=None)
@given(
    runtime=st.sampled_from(["fsdp1", "fsdp2"]),
    factor=st.sampled_from([1, 2, 4, 8]),
    jitter=st.floats(0.0, 0.5),
    seed=st.integers(0, 9),
)
def test_members_of_a_group_start_together(
    runtime: str, factor: int, jitter: float, seed: int
) -> None:
    noise = {"jitter": jitter, "seed": seed}
    result = _run(runtime, noise, fsdp={"sharding_factor": factor}, training={"iterations": 2})
    starts: dict[Any, set[float]] = defaultdict(set)
    for rank, ops in enumerate(_collectives(result)):
        turns: dict[str, int] = defaultdict(int)
        for op in ops:
            replicates = op.collective.group == "replicate"
            group = rank % factor if replicates else rank // factor
            starts[op.communicator, group, turns[op.communicator]].add(op.start)
            turns[op.communicator] += 1
    assert all(len(together) == 1 for together in starts.values())


def test_a_straggler_slows_everyone() -> None:
    plain = _run("fsdp2", {}).step_time
    slow = _run("fsdp2", {"stragglers": {"5": 1.5}})
    assert slow.step_time > 1.3 * plain
    compute = [
        sum(s.seconds for s in program.steps if type(s) is Op and s.kind == "backward")
        for program in slow.ranks
    ]
    assert compute[5] == 1.5 * compute[0]


def test_the_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    times = [_run("fsdp1", {"jitter": 0.2, "seed": seed}).step_time for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_jitter_keeps_the_mean_duration() -> None:
    result = _run("fsdp2", {"jitter": 0.3, "seed": 7}, training={"iterations": 20})
    factors = [
        s.seconds / 4.0
        for program in result.ranks
        for s in program.steps
        if type(s) is Op and s.kind == "backward"
    ]
    mean = sum(factors) / len(factors)
    deviation = (sum((f - mean) ** 2 for f in factors) / len(factors)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.03)
    assert deviation == pytest.approx(0.3, abs=0.05)


def test_hybrid_sharding_loses_less_to_stragglers_than_full_sharding() -> None:
    loss = {}
    for name in ("jitter_full_shard", "jitter_hybrid"):
        noisy = simulate(load(SCENARIOS / f"{name}.toml"))
        plain = simulate(load(SCENARIOS / f"{name}.toml", ["noise.jitter=0"]))
        loss[name] = noisy.step_time / plain.step_time - 1
    assert 0.02 < loss["jitter_hybrid"] < 0.85 * loss["jitter_full_shard"]


def test_a_straggler_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="rank 8"):
        _run("fsdp2", {"stragglers": {"8": 2.0}})


# ---- contention


def _contended(runtime: str = "fsdp2", **hardware: Any) -> Result:
    table = tables(runtime, 4)
    table["hardware"] |= {"contention": True, **hardware}
    return simulate(load(table))


def test_factors_of_one_change_nothing() -> None:
    plain = _run("fsdp2", None)
    same = _contended(compute_slowdown=1.0, communication_slowdown=1.0)
    assert same.step_time == plain.step_time
    assert [op.start for op in same.ops] == [op.start for op in plain.ops]


def test_an_op_takes_its_time_plus_what_overlap_costs() -> None:
    factors = {"compute_slowdown": 1.25, "communication_slowdown": 1.5}
    result = _contended(**factors)
    for op in result.ops:
        if op.seconds == 0.0:
            continue
        others = [o for o in result.ops if (o.collective is None) != (op.collective is None)]
        overlap = sum(max(0.0, min(op.end, o.end) - max(op.start, o.start)) for o in others)
        factor = factors["compute_slowdown" if op.collective is None else "communication_slowdown"]
        alone = op.end - op.start - overlap
        assert alone + overlap / factor == pytest.approx(op.seconds)


def test_collectives_on_one_link_share_it() -> None:
    """FSDP2 with a separate reduce-scatter group runs two collectives at once."""
    seconds = {"all_gather": 6.0, "reduce_scatter": 6.0}
    table = tables("fsdp2", 6, seconds=seconds, fsdp={"separate_reduce_scatter_group": True})
    alone = simulate(load(table)).step_time
    ones = {"contention": True, "compute_slowdown": 1.0, "communication_slowdown": 1.0}
    table["hardware"] |= ones
    assert simulate(load(table)).step_time > alone


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_two_collectives_slow_kernels_down_as_one_does(factor: float) -> None:
    """Hybrid sharding: an all-gather inside a node beside an all-reduce between nodes."""
    hybrid = {"nodes": 2, "gpus_per_node": 4}
    table = tables("fsdp2", 4, fsdp={"sharding_factor": 4}, seconds={"all_reduce": 6.0})
    table["hardware"] = {**hybrid, "contention": True, "compute_slowdown": factor}
    kernels = [op for op in simulate(load(table)).ops if op.collective is None]
    stretched = [(op.end - op.start) / op.seconds for op in kernels if op.seconds]
    assert 1 < max(stretched) <= factor * (1 + 1e-9)


def test_collectives_leave_kernels_a_multiprocessor() -> None:
    table = tables("fsdp2", 4)
    table["hardware"] |= {"contention": True, "nccl": {"channels": 200}}
    result = simulate(load(table))
    assert result.step_time < 200 * _run("fsdp2", None).step_time


def test_the_rank_that_runs_out_of_memory_is_the_one_shown() -> None:
    """With jitter the ranks free at different times; on a device that only just fails, one does."""
    options = {"parameters": 1 << 24, "training": {"iterations": 2}}
    table = tables("fsdp1", 4, fsdp={"limit_all_gathers": False}, **options)
    table["noise"] = {"jitter": 0.3}
    table["hardware"] |= {"memory": "400 MiB", "context_memory": 0, "nccl_memory": 0}
    result = simulate(load(table))
    assert result.memory.oom is not None
    assert result.memory in result.memories
