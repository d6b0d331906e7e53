"""The ten acceptance checks of the runtime's specification (section 9.4), by number."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from fsdp_scenarios import Timeline, run, scenario, tables

from fsdpsim.engine import Op
from fsdpsim.intervals import subtract, total, union
from fsdpsim.memory import Free, Malloc
from fsdpsim.program import Program
from fsdpsim.result import Result
from fsdpsim.scenario import ScenarioError, load
from fsdpsim.schedules.fsdp1 import Fsdp1Runtime
from fsdpsim.simulate import build_costs, build_workload, record, simulate

PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")

# ---- 1. The rate limiter: X(q)e = unit whose unshard runs, queue length seen, event popped.

LIMITER = {
    "PRE it1": "r(0)- 1(0)- 2(1)- 3(2)f1 4(2)f2 5(2)f3 6(2)f4 "
    "r(2)f5 6(1)- 5(1)- 4(2)f6 3(2)b6 2(2)b5 1(2)b4",
    "PRE it2": "r(4)b3 1(3)b2 2(3)b1 3(3)br 4(3)f1 5(3)f2 6(3)f3 "
    "r(3)f4 6(2)f5 5(1)- 4(2)f6 3(2)b6 2(2)b5 1(2)b4",
    "PRE no root it2": "1(3)b3 2(3)b2 3(3)b1 4(3)f1 5(3)f2 6(3)f3 "
    "6(3)f4 5(2)f5 4(2)f6 3(2)b6 2(2)b5 1(2)b4",
    "POST it2": "r(3)b2 1(2)b1 2(2)br 3(2)f1 4(2)f2 5(2)f3 6(2)f4 "
    "r(2)f5 6(1)- 5(2)f6 4(2)b6 3(2)b5 2(2)b4 1(2)b3",
    "fwd it4": "r(5)b4 1(4)b3 2(3)b2 3(3)b1 4(3)br 5(3)f1 6(3)f2 "
    "r(4)f3 6(3)f4 5(2)f5 4(1)- 3(2)f6 2(2)b6 1(2)b5",
    "GRAD_OP it2": "r(4)b3 1(3)b2 2(2)b1 3(1)- 4(1)- 5(1)- 6(1)- "
    "r(1)- 6(1)- 5(1)- 4(2)br 3(2)b6 2(2)b5 1(2)b4",
}


def _limiter_calls(monkeypatch: pytest.MonkeyPatch, fsdp: dict[str, Any], root: bool) -> list[str]:
    calls: dict[int, list[str]] = defaultdict(list)
    original = Fsdp1Runtime._rate_limiter

    def logged(self: Fsdp1Runtime) -> None:
        queue = list(self.free_events)
        original(self)
        popped = queue[0] if len(self.free_events) < len(queue) else None
        event = f"{popped.phase[0]}{_short(popped.unit)}" if popped else "-"
        unit = _short(self.program.unit)
        calls[self.program.iteration].append(f"{unit}({len(queue)}){event}")

    monkeypatch.setattr(Fsdp1Runtime, "_rate_limiter", logged)
    _program("fsdp1", 6, root=root, fsdp=fsdp, training={"iterations": 6})
    return [" ".join(calls[i]) for i in sorted(calls)]


def _short(unit: str) -> str:
    return "r" if unit == "root" else unit


def _program(runtime: str, layers: int, **options: Any) -> Program:
    chosen = scenario(runtime, layers, **options)
    costs = build_costs(chosen)
    return record(chosen, build_workload(chosen, costs), costs)


@pytest.mark.parametrize(
    ("fsdp", "root", "first", "settled"),
    [
        ({}, True, "PRE it1", "PRE it2"),
        ({}, False, None, "PRE no root it2"),
        ({"backward_prefetch": "BACKWARD_POST"}, True, None, "POST it2"),
        ({"backward_prefetch": "NO_PREFETCH"}, True, None, "POST it2"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, True, None, "GRAD_OP it2"),
    ],
)
def test_01_limiter_sequences(
    monkeypatch: pytest.MonkeyPatch,
    fsdp: dict[str, Any],
    root: bool,
    first: str | None,
    settled: str,
) -> None:
    calls = _limiter_calls(monkeypatch, fsdp, root)
    if first is not None:
        assert calls[0] == LIMITER[first]
    assert calls[1:] == [LIMITER[settled]] * 5


def test_01_limiter_sequence_with_forward_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _limiter_calls(monkeypatch, {"forward_prefetch": True}, True)
    assert calls[3:] == [LIMITER["fwd it4"]] * 3


def test_01_no_shard_never_waits() -> None:
    result = run("fsdp1", fsdp={"sharding_strategy": "NO_SHARD"})
    assert not result.host_waits


# ---- 2. Issue orders.


def _issued(program: Program, iteration: int) -> str:
    words = []
    for op in program.steps:
        if type(op) is Op and op.iteration == iteration and op.kind in ORDER:
            part = {"forward": "F", "backward": "B"}.get(op.kind)
            words.append((part or ORDER[op.kind]) + _short(op.unit))
    return " ".join(words)


ORDER = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "forward": "F",
    "backward": "B",
}
FORWARD = "AGr Fr AG1 F1 AG2 F2 AG3 F3 AG4 F4 Fr"
PRE = "AG4 Br AG3 B4 RS4 AG2 B3 RS3 AG1 B2 RS2 B1 RS1 Br RSr"


@pytest.mark.parametrize(
    ("fsdp", "expected"),
    [
        ({}, f"{FORWARD} {PRE}"),
        (
            {"backward_prefetch": "BACKWARD_POST"},
            f"{FORWARD} Br AG4 B4 AG3 RS4 B3 AG2 RS3 B2 AG1 RS2 B1 RS1 Br RSr",
        ),
        (
            {"backward_prefetch": "NO_PREFETCH"},
            f"{FORWARD} Br AG4 B4 RS4 AG3 B3 RS3 AG2 B2 RS2 AG1 B1 RS1 Br RSr",
        ),
        (
            {"forward_prefetch": True},
            "AGr AG1 Fr AG2 F1 AG3 F2 AG4 F3 F4 Fr "
            "AG4 Br AG3 B4 AG2 B3 RS4 AG1 B2 RS3 B1 RS2 Br RS1 RSr",
        ),
    ],
)
def test_02_issue_order_of_fsdp1(fsdp: dict[str, Any], expected: str) -> None:
    assert _issued(_program("fsdp1", 4, fsdp=fsdp), 3) == expected


@pytest.mark.parametrize(
    ("fsdp", "expected"),
    [
        ({}, f"{FORWARD} {PRE}"),
        ({"reshard_after_forward": False}, f"{FORWARD} Br B4 RS4 B3 RS3 B2 RS2 B1 RS1 Br RSr"),
        (
            {"sharding_factor": 4},
            f"{FORWARD} AG4 Br AG3 B4 RS4 AR4 AG2 B3 RS3 AR3 AG1 B2 RS2 AR2 B1 RS1 AR1 Br RSr ARr",
        ),
        (
            {
                "overrides": {
                    "1": {"forward_prefetch": ["2", "3"]},
                    "2": {"forward_prefetch": ["3", "4"]},
                    "3": {"backward_prefetch": ["2", "1"]},
                    "4": {"backward_prefetch": ["3", "2"]},
                }
            },
            "AGr Fr AG1 AG2 AG3 F1 AG4 F2 F3 F4 Fr "
            "AG4 Br AG3 AG2 B4 RS4 AG1 B3 RS3 B2 RS2 B1 RS1 Br RSr",
        ),
    ],
)
def test_02_issue_order_of_fsdp2(fsdp: dict[str, Any], expected: str) -> None:
    assert _issued(_program("fsdp2", 4, fsdp=fsdp), 3) == expected


def _split(*, head_in_root: bool) -> dict[str, Any]:
    """Embedding wrapped; the head wrapped too, or left to the root."""
    table = tables("fsdp2", 4)
    workload = table["workload"]
    embed, head = workload["units"].pop()["params"]
    workload["units"].append({"name": "embed", "params": [embed]})
    if head_in_root:
        workload["units"].append({"name": "root", "params": [head], "parts": ["head"]})
    else:
        workload["units"].append({"name": "head", "params": [head]})
        workload["units"].append({"name": "root", "params": [], "parts": []})
    return table


def _issued_by(table: dict[str, Any]) -> str:
    chosen = load(table)
    costs = build_costs(chosen)
    return _issued(record(chosen, build_workload(chosen, costs), costs), 3)


def test_02_issue_order_with_embedding_and_head_wrapped() -> None:
    assert _issued_by(_split(head_in_root=False)) == (
        "AGembed Fembed AG1 F1 AG2 F2 AG3 F3 AG4 F4 AGhead Fhead "
        "AGhead AG4 Bhead RShead AG3 B4 RS4 AG2 B3 RS3 AG1 B2 RS2 AGembed B1 RS1 Bembed RSembed"
    )


def test_02_issue_order_with_embedding_wrapped_and_head_in_the_root() -> None:
    assert _issued_by(_split(head_in_root=True)) == (
        "AGr AGembed Fembed AG1 F1 AG2 F2 AG3 F3 AG4 F4 Fr "
        "AG4 Br AG3 B4 RS4 AG2 B3 RS3 AG1 B2 RS2 AGembed B1 RS1 Bembed RSr RSembed"
    )


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_02_communicators_run_in_issue_order(runtime: str) -> None:
    result = run(runtime, 6, fsdp={"sharding_factor": 4})
    by_communicator: dict[str, list[Op]] = defaultdict(list)
    for op in result.ops:
        if op.communicator is not None:
            by_communicator[op.communicator].append(op)
    assert set(by_communicator) == {"shard", "replicate"}
    for ops in by_communicator.values():
        assert all(a.end <= b.start for a, b in pairwise(ops))


# ---- 3. What backward prefetch buys in FSDP1.


def test_03_none_exposes_both_collectives() -> None:
    time = Timeline(run("fsdp1", 6, fsdp={"backward_prefetch": "NO_PREFETCH"}))
    for i in range(2, 7):
        reduce = time.one("reduce_scatter", i)
        assert time.one("backward", i - 1).start >= reduce.end


@pytest.mark.parametrize("launch", [0.0, 5.0])
def test_03_post_issues_the_gather_after_the_backward(launch: float) -> None:
    """No stream waits for the backward (see golden_sync): a CPU that is ahead still overlaps."""
    fsdp, work = {"backward_prefetch": "BACKWARD_POST"}, {"kernel_launch": launch}
    time = Timeline(run("fsdp1", 6, fsdp=fsdp, workload=work))
    for i in range(2, 7):
        gather, backward = time.one("all_gather", i - 1, "backward"), time.one("backward", i)
        assert time.ops.index(gather) > time.ops.index(backward)
        if launch:  # a CPU as slow as the GPU: what is issued later starts later
            assert gather.start >= backward.end
        if i < 6:
            assert gather.start >= time.one("reduce_scatter", i + 1).end


def test_03_pre_gathers_back_to_back() -> None:
    seconds = {"all_gather": 3.0, "reduce_scatter": 0.5}
    time = Timeline(run("fsdp1", 6, seconds=seconds))
    gathers = [time.one("all_gather", i, "backward") for i in (6, 5)]
    assert gathers[1].start == gathers[0].end


# ---- 4. FSDP2's all-gather waits.


@pytest.mark.parametrize("gather", [0.25, 1.5, 3.0, 9.0])
def test_04_gather_waits_for_the_copy_out_two_units_back(gather: float) -> None:
    time = Timeline(run("fsdp2", 6, seconds={"all_gather": gather}))
    copy_outs = time.all("all_gather_copy_out", phase="forward")
    gathers = time.all("all_gather", phase="forward")
    assert len(gathers) == len(copy_outs) == 7
    for i in range(2, 7):
        assert gathers[i].start >= copy_outs[i - 2].end
    for i in range(1, 6):
        later = time.one("all_gather_copy_out", i + 1, "backward")
        assert time.one("all_gather", i, "backward").start >= later.end


def test_04_never_more_than_two_gather_outputs() -> None:
    result = run("fsdp2", 8)
    alive = most = 0
    for sample in result.memory.samples:
        if sample.buffer.name == "all_gather_output":
            alive += 1 if sample.is_malloc else -1
            most = max(most, alive)
    assert most == 2


# ---- 5. Compute and slow reduce-scatters.

SLOW = {"forward": 1.0, "backward": 2.0, "all_gather": 0.5, "reduce_scatter": 5.0}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_05_copy_in_waits_for_the_kth_last_reduce_scatter(k: int) -> None:
    fsdp = {"reshard_after_forward": False, "reduce_scatter_max_input_buffers": k}
    time = Timeline(run("fsdp2", 6, seconds=SLOW, fsdp=fsdp))
    for i in range(1, 7 - k):
        gate, backward = time.one("reduce_scatter", i + k), time.one("backward", i)
        copy_in = time.one("reduce_scatter_copy_in", i)
        assert copy_in.start == max(gate.end, backward.end)
        if k < 3:
            assert gate.end > backward.end


def _idle(result: Result) -> float:
    """Seconds between the first and last backward in which compute is idle."""
    time = Timeline(result)
    backward = time.all("backward")
    busy = union((op.start, op.end) for op in time.ops if op.stream == "compute")
    return total(subtract([(backward[0].start, backward[-1].end)], busy))


def test_05_shard_grad_op_never_idles_in_backward() -> None:
    result = run("fsdp1", 6, seconds=SLOW, fsdp={"sharding_strategy": "SHARD_GRAD_OP"})
    assert _idle(result) == 0.0
    time = Timeline(result)
    assert result.window[1] == time.all("reduce_scatter")[-1].end > time.all("backward")[-1].end


def test_05_full_resharding_gains_only_from_a_group_of_its_own_and_more_inputs() -> None:
    def step(runtime: str, **fsdp: Any) -> float:
        """Every second reduce-scatter is slower than a backward, their mean is not."""
        times = {"forward": 1.0, "backward": 4.0, "all_gather": 0.25}
        table = tables(runtime, 12, seconds=times, fsdp=fsdp)
        for i, unit in enumerate(table["workload"]["units"]):
            unit["reduce_scatter"] = (7.0, 0.5)[i % 2]
        return simulate(load(table)).step_time

    separate = {"separate_reduce_scatter_group": True}
    one = step("fsdp2")
    assert step("fsdp2", reduce_scatter_max_input_buffers=99) == one
    assert step("fsdp1") == one
    assert step("fsdp2", **separate) == pytest.approx(one, rel=0.02)
    assert step("fsdp2", **separate, reduce_scatter_max_input_buffers=2) < 0.85 * one


# ---- 6. Memory and the speed of the CPU.


@pytest.mark.parametrize("launch", [0.0, 0.01, 0.1, 1.0])
def test_06_fsdp2_peak_does_not_depend_on_the_cpu(launch: float) -> None:
    big = {"parameters": 1 << 24}
    reference = run("fsdp2", 6, **big)
    result = run("fsdp2", 6, workload={"kernel_launch": launch}, **big)
    assert result.peak("allocated") == reference.peak("allocated")
    assert result.peak("reserved") == reference.peak("reserved")


def test_06_fsdp1_reserves_more_without_limiter_on_a_fast_cpu() -> None:
    def reserved(limit: bool, launch: float) -> int:
        fsdp, work = {"limit_all_gathers": limit}, {"kernel_launch": launch}
        result = run("fsdp1", 8, fsdp=fsdp, workload=work, parameters=1 << 24)
        return result.peak("reserved")

    assert reserved(False, 0.0) > 1.5 * reserved(True, 0.0)
    assert reserved(False, 0.0) > 1.5 * reserved(False, 1.0)


# ---- 7. Hybrid sharding.

HYBRID = {"sharding_factor": 4}


def _all_reduces_overlap(time: Timeline) -> bool:
    others = union((op.start, op.end) for op in time.ops if op.kind in ("all_gather", "backward"))
    reduces = union((op.start, op.end) for op in time.all("all_reduce"))
    return total(subtract(reduces, others)) < total(reduces)


def test_07_hsdp_waits_for_the_last_all_reduce_only_at_the_end() -> None:
    result = run("fsdp2", 6, fsdp=HYBRID, seconds={"all_reduce": 20.0})
    time = Timeline(result)
    assert _all_reduces_overlap(time)
    for i in range(1, 6):  # the next unit's copy-in waits for the reduce-scatter, not beyond
        copy_in, gate = time.one("reduce_scatter_copy_in", i), time.one("reduce_scatter", i + 1)
        assert gate.end <= copy_in.start < time.one("all_reduce", i + 1).end
    assert result.window[1] == time.all("all_reduce")[-1].end


def test_07_fsdp1_hybrid_gradients_wait_for_the_all_reduce_stream() -> None:
    """Without a cast the reduce-scatter's output is the gradient: its free records the stream."""
    result = run("fsdp1", 4, world=4, fsdp={"sharding_factor": 2})
    grads = [s for s in result.program.steps if type(s) is Free and s.buffer.name == "sharded_grad"]
    assert grads
    assert all(free.record_streams == ("all_reduce",) for free in grads)


def test_07_fsdp1_hybrid_has_no_wait_per_unit() -> None:
    seconds = {"all_reduce": 20.0, "reduce_scatter": 0.5, "all_gather": 0.5}
    result = run("fsdp1", 6, fsdp=HYBRID, seconds=seconds)
    assert _idle(result) == 0.0
    assert _all_reduces_overlap(Timeline(result))
    assert result.window[1] == Timeline(result).all("all_reduce")[-1].end


# ---- 8. Between iterations.


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_08_next_iteration_gathers_after_the_optimizer(runtime: str) -> None:
    result = run(runtime, 4, workload={"optimizer": 3.0})
    for iteration in range(3):
        optimizer = Timeline(result, iteration).all("optimizer")[-1]
        first = Timeline(result, iteration + 1).all("all_gather")[0]
        assert first.start >= optimizer.end


def test_08_fsdp1_issues_after_the_limiters_target_of_the_iteration_before() -> None:
    result = run("fsdp1", 6)
    first = Timeline(result, 1).all("all_gather")[0]
    target = Timeline(result, 0).one("backward", 3)  # r(4)b3
    assert first.issued >= target.end


# ---- 9. All-gathers under activation checkpointing.


def _backward_gathers(runtime: str, **training: Any) -> list[int]:
    training = {"activation_checkpointing": "full", **training}
    time = Timeline(run(runtime, 4, training=training))
    return [len(time.all("all_gather", i, "backward")) for i in range(1, 5)]


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_09_non_reentrant_checkpoints_gather_once(runtime: str, placement: str) -> None:
    assert _backward_gathers(runtime, checkpoint_placement=placement) == [1, 1, 1, 1]


def test_09_reentrant_checkpoint_around_fsdp1_gathers_twice_without_prefetch() -> None:
    reentrant = {"checkpoint_placement": "outside", "checkpoint_reentrant": True}
    assert _backward_gathers("fsdp1", **reentrant) == [2, 2, 2, 2]
    training = {"activation_checkpointing": "full", **reentrant}
    gathers = Timeline(run("fsdp1", 4, training=training)).all("all_gather", phase="backward")
    assert {op.collective.trigger for op in gathers} == {"demand"}


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_09_reentrant_checkpoint_inside_is_like_any_other(runtime: str) -> None:
    plain, reentrant = (
        run(
            runtime,
            4,
            training={"activation_checkpointing": "full", "checkpoint_reentrant": reentrant},
        )
        for reentrant in (False, True)
    )
    assert _backward_gathers(runtime, checkpoint_reentrant=True) == [1, 1, 1, 1]
    assert reentrant.step_time == plain.step_time


def test_09_a_unit_prefetched_from_a_reentrant_checkpoint_is_trained() -> None:
    """torch makes its views under ``enable_grad``: without a gradient it would not be reduced."""
    reentrant = {"checkpoint_placement": "outside", "checkpoint_reentrant": True}
    table = tables(
        "fsdp1",
        4,
        root=False,
        fsdp={"forward_prefetch": True},
        training={"activation_checkpointing": "full", **reentrant},
        workload={"checkpointed": ["1", "2", "3"]},
    )
    time = Timeline(simulate(load(table)))
    assert len(time.all("reduce_scatter")) == 4


@pytest.mark.parametrize(("runtime", "fails"), [("fsdp1", True), ("fsdp2", False)])
def test_09_several_reentrant_checkpoints_in_one_unit(runtime: str, fails: bool) -> None:
    """FSDP1 frees the unit after the first one's backward, in torch too (storage of size 0)."""
    table = tables(
        runtime,
        1,
        root=False,
        training={"activation_checkpointing": "full", "checkpoint_reentrant": True},
    )
    table["workload"]["units"][0]["parts"] = ["a", "b"]
    table["workload"]["calls"] = ["a", "b"]
    if fails:
        with pytest.raises(ScenarioError, match="checkpoint_reentrant: 1 holds several"):
            simulate(load(table))
    else:
        assert len(Timeline(simulate(load(table))).all("recompute")) == 2


def test_09_reentrant_checkpoint_around_fsdp2_gathers_once() -> None:
    reentrant = {"checkpoint_placement": "outside", "checkpoint_reentrant": True}
    assert _backward_gathers("fsdp2", **reentrant) == [1, 1, 1, 1]


def test_09_after_a_backward_fsdp2_gathers_on_the_current_stream() -> None:
    """Two forwards, one backward: the first recompute has a stream for it, the second has not."""
    training = {
        "activation_checkpointing": "full",
        "checkpoint_placement": "outside",
        "checkpoint_reentrant": True,
        "forwards_per_backward": 2,
    }
    time = Timeline(run("fsdp2", 4, training=training))
    streams = [op.stream for op in time.all("all_gather", 4, "backward")]
    assert streams == ["all_gather", "compute"]


@pytest.mark.parametrize(("runtime", "expected"), [("fsdp1", [2, 1, 2, 1]), ("fsdp2", [1] * 4)])
def test_09_one_region_over_two_units(runtime: str, expected: list[int]) -> None:
    table = tables(
        runtime,
        4,
        training={"activation_checkpointing": "full", "checkpoint_placement": "outside"},
        workload={"checkpoint_regions": [["1", "2"], ["3", "4"]]},
    )
    time = Timeline(simulate(load(table)))
    assert [len(time.all("all_gather", i, "backward")) for i in range(1, 5)] == expected


# ---- 10. Gradient accumulation without synchronisation.

MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.parametrize(
    ("runtime", "fsdp", "bytes_per_element"),
    [
        ("fsdp1", {"no_sync": True}, 2),
        ("fsdp2", {"requires_gradient_sync": False}, 4),
    ],
)
def test_10_unsynchronised_gradients_persist(
    runtime: str, fsdp: dict[str, Any], bytes_per_element: int
) -> None:
    training = {"gradient_accumulation_steps": 3, "iterations": 2, **MIXED}
    result = run(runtime, 4, fsdp=fsdp, training=training)
    micro_batches = _micro_batches(result.program)
    reductions = [
        [s for s in steps if type(s) is Op and s.kind == "reduce_scatter"]
        for steps in micro_batches
    ]
    assert [len(ops) for ops in reductions] == [0, 0, 5] * 2
    assert _live_gradients(micro_batches[0]) == 6 * 1024 * bytes_per_element


def _micro_batches(program: Program) -> list[list[Any]]:
    found: list[list[Any]] = []
    for step in program.steps:
        if getattr(step, "event", "") == "microbatch_begin":
            found.append([])
        elif found:
            found[-1].append(step)
    return found


def _live_gradients(steps: list[Any]) -> int:
    live: dict[int, int] = {}
    for step in steps:
        buffer = getattr(step, "buffer", None)
        if type(step) is Malloc and buffer.category == "gradients":
            live[id(buffer)] = buffer.nbytes
        elif buffer is not None:
            live.pop(id(buffer), None)
    return sum(live.values())
