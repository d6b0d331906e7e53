"""ZeRO-Offload: exact timelines with and without delayed update, formulas, and the paper's case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsdp_scenarios import Timeline, tables
from recordings import program_of
from trace_rules import violations

from fsdpsim.engine import CPU
from fsdpsim.ledger.offload import optimal
from fsdpsim.ledger.runs import held_at, sent_in
from fsdpsim.program import TRANSFERS
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate
from fsdpsim.trace import encode, trace

V100 = Path(__file__).parents[1] / "scenarios" / "zero_offload_10b_v100.toml"

#: Two blocks of 1024 parameters in fp16, one bucket each. One GPU: 2 s for 2048 bytes each way, and
#: 7 s for Adam's 28 bytes of each parameter. Four GPUs: 0.5 s for a quarter, 7 s for four of them.
HARDWARE = {
    "host_to_device_bandwidth": "1024 B/s",
    "host": {"optimizer_bandwidth": "4096 B/s"},
}
EVERYTHING = (*TRANSFERS, "all_gather", "forward", "backward", "reduce_scatter", "optimizer")


def run(gpus: int = 1, *, delayed: bool = False, **options: Any) -> Result:
    fsdp = {"reduce_bucket_size": 1024, "delayed_parameter_update": delayed}
    training = {"param_dtype": "float16", "optimizer": "adam"} | options.pop("training", {})
    found = tables(
        "zero_offload",
        options.pop("layers", 2),
        root=False,
        fsdp=fsdp | options.pop("fsdp", {}),
        training=training,
        **options,
    )
    return simulate(load(found | {"hardware": HARDWARE | {"gpus_per_node": gpus}}))


def spans(result: Result) -> list[tuple[str, str, float, float]]:
    """(kind, unit, start, end) of the last step, from its first forward."""
    time = Timeline(result)
    first = time.all("forward")[0].start
    ops = [op for op in time.ops if op.kind in EVERYTHING]
    return sorted((op.kind, op.unit, op.start - first, op.end - first) for op in ops)


# ---- exact timelines


def test_gradients_go_down_beside_backward_and_parameters_come_up_beside_the_update() -> None:
    result = run()
    assert spans(result) == [
        ("backward", "1", 8.0, 12.0),
        ("backward", "2", 4.0, 8.0),
        ("d2h", "1", 12.0, 14.0),
        ("d2h", "2", 8.0, 10.0),
        ("forward", "1", 0.0, 2.0),
        ("forward", "2", 2.0, 4.0),
        ("h2d", "1", 21.0, 23.0),
        ("h2d", "2", 28.0, 30.0),
        ("optimizer", "1", 14.0, 21.0),
        ("optimizer", "2", 21.0, 28.0),
    ]
    assert result.iteration_times == [30.0] * 4


def test_delayed_the_cpus_work_beside_the_next_step() -> None:
    """Parameters come up where backward has used the old ones for the last time. With 14 s of CPU
    time against 12 s of computing, the CPUs set the pace."""
    result = run(delayed=True)
    assert spans(result) == [
        ("backward", "1", 8.0, 12.0),
        ("backward", "2", 4.0, 8.0),
        ("d2h", "1", 12.0, 14.0),
        ("d2h", "2", 8.0, 10.0),
        ("forward", "1", 0.0, 2.0),
        ("forward", "2", 2.0, 4.0),
        ("h2d", "1", 14.0, 16.0),
        ("h2d", "2", 8.0, 10.0),
        ("optimizer", "1", 7.0, 14.0),
        ("optimizer", "2", 0.0, 7.0),
    ]
    assert result.step_time == 16.0


def test_delayed_and_hidden() -> None:
    """With less to do for the CPUs a step is its computing and the last copy."""
    result = run(delayed=True, workload={"optimizer": 5.0})
    assert result.step_time == 14.0
    assert run(workload={"optimizer": 5.0}).step_time == 12.0 + 2.0 + 5.0 + 2.0


def test_several_gpus_reduce_update_their_parts_and_gather() -> None:
    result = run(4)
    assert spans(result) == [
        ("all_gather", "1", 21.5, 23.0),
        ("all_gather", "2", 28.5, 30.0),
        ("backward", "1", 8.0, 12.0),
        ("backward", "2", 4.0, 8.0),
        ("d2h", "1", 13.5, 14.0),
        ("d2h", "2", 9.5, 10.0),
        ("forward", "1", 0.0, 2.0),
        ("forward", "2", 2.0, 4.0),
        ("h2d", "1", 21.0, 21.5),
        ("h2d", "2", 28.0, 28.5),
        ("optimizer", "1", 14.0, 21.0),
        ("optimizer", "2", 21.0, 28.0),
        ("reduce_scatter", "1", 12.0, 13.5),
        ("reduce_scatter", "2", 8.0, 9.5),
    ]


# ---- which parameters a step uses


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("gpus", [1, 4])
def test_a_step_uses_gradients_of_the_step_before_or_of_two_before(
    delayed: bool, gpus: int
) -> None:
    """The update of a step's gradients ends before the forward that is one or two steps later, and
    delayed not before the next one: that one runs at the same time."""
    result = run(gpus, delayed=delayed)
    for step in range(2):
        gradients = Timeline(result, step).all("d2h")
        updates = Timeline(result, step + delayed).all("optimizer")
        assert updates[0].start >= max(op.end for op in gradients)
        last = max(op.end for op in Timeline(result, step + delayed).all("h2d"))
        assert last > max(op.end for op in updates)
        assert Timeline(result, step + 1 + delayed).all("forward")[0].start >= last
        beside = Timeline(result, step + 1).all("forward")[0]
        assert (beside.start < updates[-1].end) is delayed


def test_old_parameters_are_overwritten_only_after_their_last_use() -> None:
    time = Timeline(run(delayed=True, workload={"optimizer": 0.5}))
    for copy in time.all("h2d"):
        assert copy.start >= time.one("backward", copy.unit).end
        assert copy.start >= time.one("optimizer", copy.unit).end


# ---- volume and memory: the formulas


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("delayed", [False, True])
def test_the_simulation_counts_what_the_optimal_placement_says(gpus: int, delayed: bool) -> None:
    """4 bytes of each parameter over PCIe, 2 on the GPU, 14 and the 16-bit copy in host memory; of
    each rank's part, where there are several."""
    result, best = run(gpus, delayed=delayed), optimal()
    psi, program = 2048, program_of(result.scenario)
    moved = sum(s.bytes_copied for s in result.transfers.values())
    assert moved == best.communication * psi // gpus
    assert held_at(program, "zero_grad") == {"parameters": best.gpu_memory * psi}
    second = 2 if delayed else 0  # gradients of two steps
    assert result.host_memory == (best.cpu_memory + 2 + second) * psi // gpus
    sent = sent_in(program, 3)
    assert sum(sent.values()) == (2 * 2 * psi * (gpus - 1) / gpus)


def test_no_more_than_two_buckets_are_on_their_way() -> None:
    """The CPU thread waits for the copy of the bucket before the last."""
    fast = run(layers=8, seconds={"forward": 0.01, "backward": 0.01})
    slow = run(layers=8, seconds={"forward": 9.0, "backward": 9.0})
    assert fast.peak("active") == slow.peak("active")
    copies = Timeline(fast).all("d2h")
    backward = Timeline(fast).all("backward")
    assert all(op.issued >= copy.end for op, copy in zip(backward[3:], copies, strict=False))


@pytest.mark.parametrize("delayed", [False, True])
def test_micro_batches_add_up_on_the_gpu(delayed: bool) -> None:
    """As DeepSpeed: the sum so far comes up, the new gradient is added, and it goes down again."""
    result = run(delayed=delayed, training={"gradient_accumulation_steps": 3})
    time = Timeline(result)
    assert len(time.all("d2h")) == 3 * 2
    assert len(time.all("h2d")) == 2 * 2 + 2  # sums of two micro-batches, and the parameters
    assert len(time.all("accumulate_sharded_gradient")) == 2 * 2
    assert len(time.all("optimizer")) == 2
    program = program_of(result.scenario)
    assert held_at(program, "zero_grad") == {"parameters": 2 * 2048}


def test_memory_that_can_be_paged_blocks() -> None:
    result = run(fsdp={"pin_memory": False})
    assert {op.seconds for op in result.ops if op.kind in TRANSFERS} == {4.0}
    assert result.host_blocked["blocking_copy"] > 0
    assert result.step_time > run().step_time


@pytest.mark.parametrize("delayed", [False, True])
def test_traces_follow_the_rules(delayed: bool) -> None:
    result = run(4, delayed=delayed, workload={"kernel_launch": 0.001})
    data = trace(result)
    assert violations(data, encode(data).decode("ascii")) == []
    beside = [e for e in data["traceEvents"] if e.get("name") == "optimizer_step (CPU)"]
    assert len(beside) == sum(op.stream == CPU for op in result.ops)


@pytest.mark.parametrize("gpus", [1, 4])
def test_units_of_unknown_size_take_their_time_and_nothing_else(gpus: int) -> None:
    """A [workload] of durations only: nothing to copy, nothing to update."""
    data = {
        "workload": {"units": 2, "forward": 2.0, "backward": 4.0},
        "fsdp": {"runtime": "zero_offload"},
        "hardware": {"gpus_per_node": gpus, "collective_model": "alpha_beta"},
    }
    assert simulate(load(data)).compute_time == 12.0


# ---- 10 billion parameters on a V100


def test_ten_billion_parameters_on_one_v100() -> None:
    """What is not computing is the update and a bucket each way; delayed, one bucket's way up."""
    psi, tokens = 50 * 12 * 4096**2, 8192
    computing = 8 * psi * tokens / 62.5e12
    adam, bucket = 28 * psi / 109e9, 2 * psi / 50 / 12e9
    plain = simulate(load(V100))
    assert plain.step_time == pytest.approx(computing + adam + 2 * bucket, rel=1e-3)
    delayed = simulate(load(V100, ["fsdp.delayed_parameter_update=true"]))
    assert delayed.step_time == pytest.approx(computing + bucket, rel=1e-3)
    assert 1.12 <= plain.step_time / delayed.step_time <= 1.59
    assert plain.memory.oom is None
    assert plain.peak("reserved") < plain.scenario.device.memory


def test_delayed_update_gains_less_the_more_there_is_to_compute() -> None:
    gains, rates = [], []
    for tokens in (2048, 4096, 8192, 16384, 32768):
        plain, delayed = (
            simulate(
                load(V100, [f"workload.tokens={tokens}", f"fsdp.delayed_parameter_update={d}"])
            )
            for d in ("false", "true")
        )
        gains.append(plain.step_time / delayed.step_time)
        rates.append(8 * 50 * 12 * 4096**2 * tokens / plain.step_time / 1e12)
    assert gains == sorted(gains, reverse=True)
    assert rates == sorted(rates)
    assert rates[1] > 40  # FLOP/s with recompute, of which 62.5 T are the kernels' own
    assert simulate(load(V100, ["workload.tokens=1024"])).step_time < 2 * 2.6
