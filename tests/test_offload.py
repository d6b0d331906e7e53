"""CPU offload of FSDP1 and FSDP2: exact small timelines, host waits, memory, and laws."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fsdp_scenarios import Timeline, tables
from recordings import program_of, read_recording, scenario_of
from trace_rules import violations

from fsdpsim import engine
from fsdpsim.allocator import AllocatorSettings
from fsdpsim.engine import CPU, HostWait, Op
from fsdpsim.explain import explain
from fsdpsim.ledger.runs import held_at
from fsdpsim.memory import Free, GpuMemory, Malloc
from fsdpsim.order import host_order
from fsdpsim.program import TRANSFERS, Mark, Program
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, ScenarioError, load
from fsdpsim.simulate import simulate
from fsdpsim.summary import summary
from fsdpsim.trace import encode, trace

OFFLOAD: dict[str, dict[str, Any]] = {
    "fsdp1": {"cpu_offload": True},
    "fsdp2": {"offload_policy": "cpu"},
}
#: 1024 parameters over 4 ranks: 1 s for each shard of 1024 bytes; SGD's 12 bytes per parameter of
#: two shards of 256, for 4 ranks: 6 s.
HARDWARE = {
    "gpus_per_node": 4,
    "host_to_device_bandwidth": "1024 B/s",
    "host": {"optimizer_bandwidth": "4096 B/s"},
}


def scenario(
    runtime: str,
    layers: int = 2,
    *,
    hardware: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    root: bool = False,
    **options: Any,
) -> Scenario:
    found = tables(
        runtime, layers, root=root, world=4, fsdp=OFFLOAD[runtime] | (fsdp or {}), **options
    )
    return load(found | {"hardware": HARDWARE | (hardware or {})})


def run(runtime: str, layers: int = 2, **options: Any) -> Result:
    return simulate(scenario(runtime, layers, **options))


def spans(result: Result, *kinds: str) -> list[tuple[str, str, float, float]]:
    """(kind, unit, start, end) of the last step, from its first op."""
    ops = [op for op in Timeline(result).ops if op.kind in kinds]
    first = min(op.start for op in Timeline(result).ops)
    return [(op.kind, op.unit, op.start - first, op.end - first) for op in ops]


def waits(result: Result, cause: str) -> list[HostWait]:
    last = result.scenario.iterations - 1
    return [w for w in result.host_waits if w.cause == cause and w.iteration == last]


# ---- exact timelines


EVERYTHING = (*TRANSFERS, "all_gather", "forward", "backward", "reduce_scatter", "optimizer")


def test_fsdp1_timeline() -> None:
    """Shards come ahead of all-gathers; each gradient goes right behind its reduce-scatter."""
    result = run("fsdp1")
    assert spans(result, *EVERYTHING) == [
        ("h2d", "1", 0.0, 1.0),
        ("all_gather", "1", 1.0, 2.5),
        ("forward", "1", 2.5, 4.5),
        ("h2d", "2", 1.0, 2.0),
        ("all_gather", "2", 2.5, 4.0),
        ("forward", "2", 4.5, 6.5),
        ("h2d", "2", 2.0, 3.0),
        ("all_gather", "2", 4.0, 5.5),
        ("h2d", "1", 3.0, 4.0),
        ("all_gather", "1", 5.5, 7.0),
        ("backward", "2", 6.5, 10.5),
        ("reduce_scatter", "2", 10.5, 12.0),
        ("d2h", "2", 12.0, 13.0),
        ("backward", "1", 10.5, 14.5),
        ("reduce_scatter", "1", 14.5, 16.0),
        ("d2h", "1", 16.0, 17.0),
        ("optimizer", "", 17.0, 23.0),
    ]
    assert result.step_time == 23.0


def test_fsdp2_timeline() -> None:
    """The copy is on the stream of the copy-in, which in backward waits for the last copy-out."""
    result = run("fsdp2")
    assert spans(result, *EVERYTHING) == [
        ("h2d", "1", 0.0, 1.0),
        ("all_gather", "1", 1.0, 2.5),
        ("forward", "1", 2.5, 4.5),
        ("h2d", "2", 1.0, 2.0),
        ("all_gather", "2", 2.5, 4.0),
        ("forward", "2", 4.5, 6.5),
        ("h2d", "2", 4.5, 5.5),
        ("all_gather", "2", 5.5, 7.0),
        ("h2d", "1", 7.0, 8.0),
        ("all_gather", "1", 8.0, 9.5),
        ("backward", "2", 7.0, 11.0),
        ("reduce_scatter", "2", 11.0, 12.5),
        ("d2h", "2", 12.5, 13.5),
        ("backward", "1", 11.0, 15.0),
        ("reduce_scatter", "1", 15.0, 16.5),
        ("d2h", "1", 16.5, 17.5),
        ("optimizer", "", 17.5, 23.5),
    ]
    assert result.step_time == 23.5


@pytest.mark.parametrize(
    ("runtime", "down"), [("fsdp1", "pre_unshard"), ("fsdp2", "all_gather_copy_in")]
)
def test_copies_run_on_the_streams_of_torch(runtime: str, down: str) -> None:
    result = run(runtime)
    up = {"fsdp1": "post_backward", "fsdp2": "reduce_scatter"}[runtime]
    assert {op.stream for op in result.ops if op.kind == "h2d"} == {down}
    assert {op.stream for op in result.ops if op.kind == "d2h"} == {up}
    hybrid = run(runtime, fsdp={"sharding_factor": 2})
    assert {op.stream for op in hybrid.ops if op.kind == "d2h"} == {"all_reduce"}


# ---- what is copied, and when


def copies(result: Result, kind: str) -> list[tuple[str, int]]:
    return [(op.unit, op.nbytes) for op in Timeline(result).all(kind)]


def test_fsdp1_copies_flat_parameters_also_where_nothing_is_gathered() -> None:
    """SHARD_GRAD_OP keeps units unsharded until backward, and copies their shards all the same."""
    result = run("fsdp1", fsdp={"sharding_strategy": "SHARD_GRAD_OP"})
    assert [unit for unit, _ in copies(result, "h2d")] == ["1", "2", "2", "1"]
    assert result.collectives["all_gather"].count == 2
    root = run("fsdp1", root=True)  # the root is not freed after forward
    assert Counter(unit for unit, _ in copies(root, "h2d"))["root"] == 2


def test_fsdp2_copies_parameter_by_parameter_what_is_gathered_from_shards() -> None:
    result = run("fsdp2", root=True)  # embedding and head; kept after forward
    per_param = [("root", 1024), ("root", 1024)]
    assert copies(result, "h2d")[:2] == per_param
    assert Counter(unit for unit, _ in copies(result, "h2d")) == {"root": 2, "1": 2, "2": 2}
    assert [c for c in copies(result, "d2h") if c[0] == "root"] == per_param


@pytest.mark.parametrize("value", [False, 2])
def test_fsdp2_does_not_copy_what_stays_on_the_gpu(value: object) -> None:
    """Kept whole, or as a shard of two ranks: backward needs nothing from the host."""
    result = run("fsdp2", fsdp={"reshard_after_forward": value})
    assert {op.phase for op in Timeline(result).all("h2d")} == {"forward"}
    assert result.collectives["all_gather"].count == (2 if value is False else 4)


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_mixed_precision_casts_behind_the_copy(runtime: str) -> None:
    """What crosses PCIe is fp32 both ways; the cast and its result are on the GPU."""
    result = run(runtime, training={"param_dtype": "bfloat16", "reduce_dtype": "float32"})
    assert {size for kind in TRANSFERS for _, size in copies(result, kind)} == {1024}
    ops = [op for op in Timeline(result).ops if op.unit == "1" and op.phase == "forward"]
    names = [op.name.split(" (")[0] for op in ops]
    copy_in = ["all_gather_copy_in"] if runtime == "fsdp2" else []
    assert names[: 3 + len(copy_in)] == ["Memcpy HtoD", "cast_shard", *copy_in, "all_gather"]


def test_frozen_parameters_come_up_and_no_gradient_goes_down() -> None:
    for runtime in OFFLOAD:
        result = run(runtime, training={"frozen": ["1"]})
        assert {unit for unit, _ in copies(result, "h2d")} == {"1", "2"}
        assert [unit for unit, _ in copies(result, "d2h")] == ["2"]


# ---- who waits


def test_fsdp1_waits_once_at_the_end_of_backward() -> None:
    result = run("fsdp1", layers=3)
    (wait,) = waits(result, "offload")
    assert wait.end == Timeline(result).all("d2h")[-1].end


def test_fsdp2_waits_for_each_gradient() -> None:
    result = run("fsdp2", layers=3)
    assert [w.ops for w in waits(result, "offload")] == [
        (op,) for op in sorted(Timeline(result).all("d2h"), key=lambda op: op.unit)
    ]


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_the_cpus_update_when_gradients_are_there_and_the_next_step_waits(runtime: str) -> None:
    result = run(runtime)
    (update,) = Timeline(result, 2).all("optimizer")
    assert update.stream == CPU
    assert update.start == Timeline(result, 2).all("d2h")[-1].end
    assert Timeline(result, 3).ops[0].start == update.end
    assert result.host_blocked["cpu_optimizer"] == update.seconds == 6.0


def test_fsdp2_adds_accumulated_gradients_on_the_cpus() -> None:
    """The sum needs the copy's result: both block, in each micro-batch after the first."""
    result = run("fsdp2", training={"gradient_accumulation_steps": 3})
    time = Timeline(result)
    sums = time.all("accumulate_gradient")
    assert [op.unit for op in sums] == ["2", "1", "2", "1"]
    # 3 x 1024 bytes for each of 4 ranks at 4096 bytes/s.
    assert {op.seconds for op in sums} == {3.0}
    assert len(waits(result, "offload")) == 2
    assert [w.ops[0].kind for w in waits(result, "blocking_copy")] == ["d2h"] * 4
    later = time.all("d2h")[2:]
    assert [op.start for op in sums] == [op.end for op in later]


def test_no_sync_copies_gradients_once_a_step() -> None:
    training = {"gradient_accumulation_steps": 3}
    for runtime, key in (
        ("fsdp1", {"no_sync": True}),
        ("fsdp2", {"requires_gradient_sync": False}),
    ):
        result = run(runtime, training=training, fsdp=key)
        assert len(copies(result, "d2h")) == 2
        assert not [op for op in Timeline(result).all("accumulate_gradient") if op.stream == CPU]


# ---- pinned or not, and the link


def test_memory_that_can_be_paged_is_slower_and_blocks() -> None:
    pinned, paged = run("fsdp2"), run("fsdp2", fsdp={"pin_memory": False})
    assert {op.seconds for op in paged.ops if op.kind in TRANSFERS} == {2.0}
    blocked = waits(paged, "blocking_copy")
    assert [w.ops for w in blocked] == [(op,) for op in Timeline(paged).ops if op.kind in TRANSFERS]
    assert all(w.end == w.ops[0].end for w in blocked)
    assert not waits(pinned, "blocking_copy") and not waits(paged, "offload")
    assert paged.step_time > pinned.step_time
    assert "Pageable" in Timeline(paged).all("h2d")[0].name


@pytest.mark.parametrize(("sharing", "seconds"), [(1, 1.0), (2, 2.0), (4, 4.0), (16, 4.0)])
def test_gpus_behind_one_switch_share_its_link(sharing: int, seconds: float) -> None:
    result = run("fsdp1", hardware={"gpus_per_pcie_switch": sharing})
    assert {op.seconds for op in result.ops if op.kind in TRANSFERS} == {seconds}


def test_a_dgx_2_gives_each_gpu_3_gb_per_second() -> None:
    """ZeRO-Infinity (arXiv 2104.07857), table 2: 12 GB/s alone, 3.0 when all 16 GPUs read."""
    found = tables("fsdp1", 2, root=False, parameters=16 * 1024, fsdp={"cpu_offload": True})
    for gpus, rate in ((1, 12e9), (16, 3e9)):
        hardware = {"gpu": "V100-SXM-32GB", "gpus_per_node": gpus, "gpus_per_pcie_switch": 4}
        op = Timeline(simulate(load(found | {"hardware": hardware}))).all("h2d")[0]
        assert op.nbytes / op.seconds == rate


def test_the_optimizer_s_rate() -> None:
    """ZeRO-Offload, table 4: 10 billion parameters in 2.57 s fused, in 14.76 s operation by
    operation; one rank of a node with two has half of it."""
    for fused, paper in ((True, 2.57), (False, 14.76)):
        for gpus in (1, 2):
            result = simulate(
                load(
                    {
                        "workload": {
                            "units": 1,
                            "parameters": 10**10,
                            "forward": 1.0,
                            "backward": 1.0,
                        },
                        "training": {"optimizer": "adam", "optimizer_fused": fused},
                        "fsdp": {"runtime": "fsdp1", "cpu_offload": True},
                        "hardware": {"gpus_per_node": gpus, "memory": "1 TB"},
                    }
                )
            )
            (update,) = Timeline(result).all("optimizer")
            assert update.seconds == pytest.approx(paper, rel=2e-3)


def test_given_seconds_of_the_optimizer_are_the_cpus() -> None:
    result = run("fsdp2", workload={"optimizer": 2.5})
    (update,) = Timeline(result).all("optimizer")
    assert (update.stream, update.seconds) == (CPU, 2.5)


# ---- memory


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_nothing_of_the_model_is_on_the_gpu_between_uses(runtime: str) -> None:
    result = run(runtime, layers=3, root=True, training={"optimizer": "adamw"})
    program = program_of(result.scenario)
    alive: dict[int, str] = {}
    steps = 0
    for step in program.steps:
        if type(step) is Malloc:
            alive[id(step.buffer)] = step.buffer.category
        elif type(step) is Free:
            del alive[id(step.buffer)]
        elif type(step) is Mark and step.event in ("optimizer_step", "zero_grad"):
            assert not alive
            steps += 1
        assert not {"parameters", "optimizer_state"} & set(alive.values())
    assert steps == 2 * result.scenario.iterations
    # fp32: a parameter, its gradient and two moments of a quarter of 5 x 1024.
    assert result.host_memory == 16 * 5 * 256
    assert summary(result)["host_memory_bytes"] == result.host_memory


def test_without_offloading_there_is_nothing_of_it() -> None:
    for runtime in OFFLOAD:
        result = simulate(load(tables(runtime, 2)))
        assert result.host_memory == 0 and result.transfers == {}


def test_fsdp1_holds_every_sharded_gradient_until_backward_ends() -> None:
    """``_saved_grad_shard`` lives until the final callback; FSDP2 drops each after its copy."""
    most = {}
    for runtime in OFFLOAD:
        alive: Counter[str] = Counter()
        most[runtime] = 0
        for step in program_of(scenario(runtime, layers=5)).steps:
            if type(step) in (Malloc, Free) and step.buffer.name in (
                "sharded_grad",
                "reduce_scatter_output",
            ):
                alive[step.buffer.name] += 1 if type(step) is Malloc else -1
                most[runtime] = max(most[runtime], sum(alive.values()))
    assert most == {"fsdp1": 5, "fsdp2": 1}


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_offloading_lowers_the_peak(runtime: str) -> None:
    options = {"training": {"optimizer": "adamw"}, "parameters": 4096}
    plain = simulate(load(tables(runtime, 6, world=4, **options)))
    offloaded = run(runtime, layers=6, root=True, **options)
    assert offloaded.peak("allocated") < plain.peak("allocated")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_no_shard_copies_whole_parameters_and_blocks_for_gradients(dtype: str | None) -> None:
    """One GPU: torch makes it NO_SHARD. An fp32 copy is saved by autograd from forward on."""
    training = {"param_dtype": dtype} if dtype else {}
    result = run("fsdp1", hardware={"gpus_per_node": 1}, training=training)
    assert copies(result, "h2d") == [("1", 4096), ("2", 4096), ("2", 4096), ("1", 4096)]
    assert [w.ops[0].kind for w in waits(result, "blocking_copy")] == ["d2h", "d2h"]
    program, alive, most = program_of(result.scenario), Counter[str](), 0
    for step in program.steps:
        if type(step) in (Malloc, Free) and step.buffer.name in ("device_shard", "mp_shard"):
            alive[step.buffer.name] += 1 if type(step) is Malloc else -1
            most = max(most, alive["mp_shard" if dtype else "device_shard"])
    assert most == (2 if dtype else 4)
    assert not any(alive.values())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_single_rank_of_fsdp2_copies_out_of_the_host(dtype: str | None) -> None:
    training = {"param_dtype": dtype} if dtype else {}
    result = run("fsdp2", hardware={"gpus_per_node": 1}, training=training)
    assert copies(result, "h2d") == [("1", 4096), ("2", 4096), ("2", 4096), ("1", 4096)]
    assert {op.stream for op in Timeline(result).all("h2d")} == {"compute"}
    assert "all_gather" not in result.collectives


# ---- laws


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Recordings of real runs without offloading; FSDP1 cannot add gradients on the host."""
    if "recording_path" in metafunc.fixturenames:
        directory = Path(metafunc.config.getoption("--golden-dir"))
        paths = [p for p in sorted(directory.glob("*.json"))[::3] if "fsdp1" not in p.stem]
        paths += [p for p in sorted(directory.glob("fsdp1*.json"))[::3] if "accum" not in p.stem]
        metafunc.parametrize("recording_path", paths, ids=lambda path: path.stem)


def test_offloading_changes_no_hook_and_no_collective(recording_path: Path) -> None:
    recorded = scenario_of(read_recording(recording_path))
    table = recorded.fsdp.model_copy(update=OFFLOAD[recorded.fsdp.runtime])
    offloaded = recorded.model_copy(update={"fsdp": table})
    last = recorded.iterations - 1
    before, after = program_of(recorded), program_of(offloaded)
    assert host_order(after, last) == host_order(before, last)
    assert held_at(after, "zero_grad") == {}
    gathered = [s for s in after.steps if type(s) is Op and s.kind == "all_gather"]
    brought = Counter(s.unit for s in after.steps if type(s) is Op and s.kind == "h2d")
    if recorded.shard_factor > 1:
        for op in gathered:
            assert brought[op.unit] or op.collective.group.startswith("post_forward")


@pytest.mark.parametrize("runtime", OFFLOAD)
@pytest.mark.parametrize("bandwidth", ["256 B/s", "1024 B/s", "1 GB/s"])
def test_a_slower_link_is_never_faster(runtime: str, bandwidth: str) -> None:
    slow = run(runtime, layers=4, hardware={"host_to_device_bandwidth": bandwidth})
    fast = run(runtime, layers=4, hardware={"host_to_device_bandwidth": "2 GB/s"})
    plain = simulate(load(tables(runtime, 4, root=False, world=4)))
    assert slow.step_time >= fast.step_time >= plain.step_time


# ---- around it


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_copies_count_neither_as_compute_nor_as_collectives(runtime: str) -> None:
    result = run(runtime)
    assert result.compute_time == 12.0  # F + B of two units
    figures = summary(result)["transfers"]
    assert {k: (v["count"], v["bytes_copied"], v["time_s"]) for k, v in figures.items()} == {
        "h2d": (4, 4096, 4.0),
        "d2h": (2, 2048, 2.0),
    }
    assert 0 < figures["d2h"]["exposed_s"] <= 2.0


def test_copies_are_not_slowed_by_kernels_or_collectives() -> None:
    result = run("fsdp2", hardware={"contention": True})
    for op in result.ops:
        if op.kind in TRANSFERS or op.stream == CPU:
            assert op.end - op.start == pytest.approx(op.seconds, rel=1e-12)


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_an_explanation_names_copies_and_cpus(runtime: str) -> None:
    found = explain(run(runtime))
    idle = {part.cause: part.seconds for part in found.parts if not part.busy}
    assert idle["cpu_optimizer"] == 6.0 and idle["h2d"] == 1.0 and idle["offload"] > 0
    bounds = {bound.resource: bound.seconds for bound in found.lower_bounds}
    assert (bounds["h2d"], bounds["d2h"], bounds["CPUs"]) == (4.0, 2.0, 6.0)
    assert sum(part.seconds for part in found.parts) == found.step_time


@pytest.mark.parametrize("runtime", OFFLOAD)
def test_a_trace_has_memcpy_slices_and_the_cpus_beside_the_thread(runtime: str) -> None:
    result = run(runtime, workload={"kernel_launch": 0.001})
    data = trace(result)
    assert violations(data, encode(data).decode("ascii")) == []
    events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    shown = [e for e in events if e["cat"] == "gpu_memcpy"]
    ran = [op for op in result.ops if op.kind in TRANSFERS]
    assert Counter(e["name"] for e in shown) == Counter(op.name for op in ran)
    assert {e["args"]["bytes"] for e in shown} == {1024}
    assert {e["args"]["memory bandwidth (GB/s)"] for e in shown} == {1024 / 10**9}
    assert sum(e["name"] == "cudaMemcpyAsync" for e in events) == len(ran)
    beside = [e for e in events if e["name"] == "optimizer_step (CPU)"]
    assert len(beside) == result.scenario.iterations
    assert {(e["cat"], e["dur"]) for e in beside} == {("cpu_op", 6e6)}
    assert encode(data) == encode(trace(result))


# ---- the scenario file


def problem(runtime: str, fsdp: dict[str, Any], **training: Any) -> str:
    data = tables(runtime, 2, training=training) | {"fsdp": {"runtime": runtime, **fsdp}}
    with pytest.raises(ScenarioError) as caught:
        load(data)
    (found,) = caught.value.problems
    return str(found)


def test_fsdp1_cannot_accumulate_in_host_memory() -> None:
    """torch's documentation of ``no_sync``: the newly reduced gradient replaces the earlier one."""
    text = problem("fsdp1", {"cpu_offload": True}, gradient_accumulation_steps=2)
    assert text.startswith("fsdp.cpu_offload: ") and "fsdp.no_sync = true" in text


@pytest.mark.parametrize(
    ("runtime", "option", "hint"),
    [
        ("fsdp1", {"offload_policy": "cpu"}, "cpu_offload = true"),
        ("fsdp1", {"pin_memory": False}, "always pins"),
        ("fsdp2", {"cpu_offload": True}, 'offload_policy = "cpu"'),
        ("fsdp2", {"pin_memory": False}, 'fsdp.offload_policy = "cpu"'),
        ("fsdp2", {"offload_policy": "nvme"}, "cpu"),
        ("ddp", {"cpu_offload": True}, "zero_offload"),
        ("textbook", {"offload_policy": "cpu"}, "fsdp2"),
        ("zero2", {"pin_memory": True}, "zero_offload"),
        ("fsdp1", {"delayed_parameter_update": True}, "zero_offload"),
        ("zero_offload", {"cpu_offload": True}, "always offloads"),
        ("zero_offload", {"all_gather_dtype": "int8"}, "whole"),
        ("ddp", {"all_gather_dtype": "int8"}, "whole"),
    ],
)
def test_hints_to_the_runtime_s_own_option(runtime: str, option: dict[str, Any], hint: str) -> None:
    text = problem(runtime, option)
    assert text.startswith(f"fsdp.{next(iter(option))}: ")
    assert hint in text


def test_a_retry_of_the_allocator_waits_for_the_gpu_only() -> None:
    """cudaFree waits for the device: not for what the CPUs do meanwhile."""
    program = Program()
    program.launch("kernel", 5.0, kind="copy")
    with program.on_stream(CPU):
        program.launch("optimizer_step", 100.0, kind="optimizer")
    program.free(program.malloc("first", 30 * 2**20, "temporaries"))
    program.malloc("second", 40 * 2**20, "temporaries")
    size = 50 * 2**20
    memory = GpuMemory(
        AllocatorSettings(), capacity=size, total=size, cuda_malloc=0.0, cuda_free=0.0
    )
    engine.run(program.steps, memory)
    (stall,) = memory.stalls
    assert (stall.cause, stall.start, stall.end) == ("alloc_retry", 0.0, 5.0)


def test_ranks_that_differ_offload_too() -> None:
    found = tables("fsdp2", 2, root=False, world=4, fsdp=OFFLOAD["fsdp2"])
    noise = {"jitter": 0.2, "seed": 1}
    result = simulate(load(found | {"hardware": HARDWARE, "noise": noise}))
    for program in result.ranks:
        ops = [s for s in program.steps if type(s) is Op]
        assert {op.seconds for op in ops if op.kind in TRANSFERS} == {1.0}
        assert {op.seconds for op in ops if op.stream == CPU} == {6.0}
