"""Laws of the FSDP runtimes for random models and settings, and the volume they communicate."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from fsdp_scenarios import run
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpsim.engine import Op
from fsdpsim.memory import Free, Malloc
from fsdpsim.program import Mark
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

PERSISTENT = {"parameters", "optimizer_state"}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A [workload]: one to five units of random shapes, any call order, perhaps a root."""
    count = draw(st.integers(1, 5))
    seconds = st.sampled_from([0.25, 1.0, 3.0])
    names = [f"b{i}" for i in range(count)]
    units = [
        {
            "name": name,
            "params": [
                {"name": f"{name}.p{j}", "shape": draw(st.lists(st.integers(1, 9), max_size=3))}
                for j in range(draw(st.integers(1, 3)))
            ],
            **{key: draw(seconds) for key in ("forward", "backward")},
            **{key: draw(seconds) for key in ("all_gather", "reduce_scatter", "all_reduce")},
        }
        for name in names
    ]
    calls = draw(st.lists(st.sampled_from(names), min_size=1, max_size=7))
    if draw(st.booleans()):
        shape = [draw(st.integers(1, 9)), 3]
        params = [{"name": f"{part}.w", "shape": shape} for part in ("embed", "head")]
        units.append({"name": "root", "params": params, "parts": ["embed", "head"]})
        calls = ["embed", *calls, "head"]
    times = dict.fromkeys(("forward", "backward", "all_gather", "reduce_scatter"), 1.0)
    launch = draw(st.sampled_from([0.0, 0.5]))
    return {"units": units, "calls": calls, "kernel_launch": launch, "all_reduce": 1.0, **times}


@st.composite
def fsdp1_tables(draw: st.DrawFn) -> dict[str, Any]:
    factor = draw(st.sampled_from([2, 4]))
    plain, hybrid = ["FULL_SHARD", "SHARD_GRAD_OP"], ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    prefetch = st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"])
    booleans = ("forward_prefetch", "limit_all_gathers", "use_orig_params", "no_sync")
    return {
        "runtime": "fsdp1",
        "sharding_factor": factor,
        "sharding_strategy": draw(st.sampled_from(plain if factor == 4 else hybrid)),
        "backward_prefetch": draw(prefetch),
        **{key: draw(st.booleans()) for key in booleans},
    }


@st.composite
def fsdp2_tables(draw: st.DrawFn) -> dict[str, Any]:
    booleans = (
        "separate_reduce_scatter_group",
        "requires_gradient_sync",
        "requires_all_reduce",
        "reshard_after_backward",
    )
    return {
        "runtime": "fsdp2",
        "sharding_factor": draw(st.sampled_from([2, 4])),
        "reshard_after_forward": draw(st.sampled_from([True, False, 2])),
        "forward_prefetch": draw(st.integers(0, 2)),
        "backward_prefetch": draw(st.integers(0, 2)),
        "reduce_scatter_max_input_buffers": draw(st.integers(1, 3)),
        **{key: draw(st.booleans()) for key in booleans},
    }


@st.composite
def results(draw: st.DrawFn) -> Result:
    mixed = draw(st.booleans())
    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if mixed else {}
    workload, forwards = draw(models()), draw(st.integers(1, 2))
    # Each reentrant checkpoint has a backward of its own: a unit used twice is reduced twice.
    once = forwards == 1 and len(set(workload["calls"])) == len(workload["calls"])
    training = {
        "iterations": draw(st.integers(1, 3)),
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "forwards_per_backward": forwards,
        "activation_checkpointing": draw(st.sampled_from(["none", "full"])),
        "checkpoint_placement": draw(st.sampled_from(["inside", "outside"])),
        "checkpoint_reentrant": once and draw(st.booleans()),
        "optimizer": "sgd",
        **dtypes,
    }
    tables = {
        "workload": workload,
        "training": training,
        "hardware": {"gpus_per_node": 4},
        "fsdp": draw(st.one_of(fsdp1_tables(), fsdp2_tables())),
    }
    return simulate(load(tables))


@settings(max_examples=40, deadline=None)
@given(results())
def test_units_compute_only_while_unsharded(result: Result) -> None:
    """In host order, which is also the order that makes it true on the GPU, and in time."""
    unsharded: Counter[str] = Counter()
    gathered: dict[str, Op] = {}
    for step in result.program.steps:
        if type(step) in (Malloc, Free) and step.buffer.unsharded is not None:
            unsharded[step.buffer.unit] += 1 if type(step) is Malloc else -1
        elif type(step) is Op and step.kind == "all_gather":
            gathered[step.unit] = step
        elif type(step) is Op and step.kind in ("forward", "backward", "recompute"):
            assert unsharded[step.unit] > 0
            assert step.start >= gathered[step.unit].end


@settings(max_examples=40, deadline=None)
@given(results())
def test_every_gather_is_freed_once(result: Result) -> None:
    live: Counter[int] = Counter()
    gathers = set()
    for step in result.program.steps:
        if type(step) in (Malloc, Free) and step.buffer.unsharded is not None:
            gathers.add(step.buffer.unsharded)
            live[step.buffer.unsharded] += 1 if type(step) is Malloc else -1
    assert len(gathers) == sum(
        type(s) is Op and s.kind == "all_gather" for s in result.program.steps
    )
    assert set(live.values()) == {0}


@settings(max_examples=40, deadline=None)
@given(results())
def test_gradients_are_reduced_once_per_synchronised_step(result: Result) -> None:
    synchronises = result.scenario.training.gradient_accumulation_steps
    fsdp = result.scenario.fsdp
    skips_all_reduce = not getattr(fsdp, "requires_all_reduce", True)
    once = {"reduce_scatter": synchronises, "all_reduce": 1 if skips_all_reduce else synchronises}
    if getattr(fsdp, "no_sync", False) or not getattr(fsdp, "requires_gradient_sync", True):
        once = {"reduce_scatter": 1, "all_reduce": 1}
    if result.scenario.replicas == 1:
        once["all_reduce"] = 0
    ran = {op.unit for op in result.ops if op.kind == "backward"}
    reduced = Counter((op.kind, op.unit, op.iteration) for op in result.ops if op.kind in once)
    backwards = Counter((op.unit, op.iteration) for op in result.ops if op.kind == "backward")
    for unit in ran:
        for iteration in range(result.scenario.iterations):
            for kind, times in once.items():
                count = reduced[kind, unit, iteration]
                if getattr(fsdp, "requires_gradient_sync", True):
                    assert count == times
                else:  # in the last micro-batch each backward of a reused unit reduces
                    assert min(times, 1) <= count <= times * backwards[unit, iteration]


@settings(max_examples=40, deadline=None)
@given(results())
def test_only_what_the_strategy_keeps_is_left_after_the_optimizer(result: Result) -> None:
    live: dict[int, Any] = {}
    for step in result.program.steps:
        if type(step) is Malloc:
            live[id(step.buffer)] = step.buffer
        elif type(step) is Free:
            del live[id(step.buffer)]
        elif type(step) is Mark and step.event == "zero_grad":
            kept = {b.category for b in live.values()} - PERSISTENT
            assert kept <= {"gradients"}  # zero_grad drops them just below
    assert {b.category for b in live.values()} <= PERSISTENT


@settings(max_examples=40, deadline=None)
@given(results())
def test_communicators_and_streams_run_one_op_at_a_time_in_order(result: Result) -> None:
    lanes: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in result.ops:
        lanes["stream", op.stream].append(op)
        if op.communicator is not None:
            lanes["communicator", op.communicator].append(op)
    for ops in lanes.values():
        assert all(a.end <= b.start for a, b in pairwise(ops))


# ---- Volume per GPU and step, counted from the simulated collectives, in units of psi elements.


def _volume(runtime: str, world: int, **fsdp: Any) -> float:
    result = run(runtime, 6, world=world, fsdp=fsdp, parameters=4096)
    elements = sum(unit.numel for unit in result.workload.units)
    return sum(c.bytes_sent_per_rank for c in result.collectives.values()) / (4 * elements)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_ddp_sends_two_psi(n: int) -> None:
    assert _volume("ddp", n) == pytest.approx(2 * (n - 1) / n)
    assert _volume("fsdp1", n, sharding_strategy="NO_SHARD") == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_zero_2_style_sends_two_psi(n: int) -> None:
    """Gradients reduce-scattered once, parameters gathered once."""
    assert _volume("fsdp1", n, sharding_strategy="SHARD_GRAD_OP") == pytest.approx(2 * (n - 1) / n)
    assert _volume("fsdp2", n, reshard_after_forward=False) == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_full_sharding_sends_three_psi(n: int) -> None:
    assert _volume("fsdp2", n, reshard_after_forward=True) == pytest.approx(3 * (n - 1) / n)


def test_four_ranks_send_one_and_a_half_and_two_and_a_quarter() -> None:
    assert _volume("ddp", 4) == 1.5
    assert _volume("fsdp2", 4, reshard_after_forward=True) == 2.25
