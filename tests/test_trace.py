"""Kineto traces: exact spans, every rule of the format, torch's labels, and the command."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import read_recording, scenario_of
from trace_rules import Event, end, ns, slices, violations

from fsdpsim.allocator import CudaFree, CudaMalloc
from fsdpsim.cli import main
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import simulate
from fsdpsim.trace import encode, trace, write_trace, write_traces
from fsdpsim.trace.device import compute_name
from fsdpsim.trace.lanes import STREAM_IDS

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "scenarios"
RECORDINGS = sorted((Path(__file__).parent / "data" / "golden").glob("*.json"))
PREFETCH = SCENARIOS / "textbook_backward_prefetch.toml"
LLAMA = SCENARIOS / "llama3_8b_8xh100.toml"
#: Two blocks of a model of 1B parameters, two short iterations, with the hardware's costs.
SMALL = (
    'model.hf_config="models/llama3.2_1b.json"',
    "model.num_hidden_layers=2",
    "training.seq_len=2048",
    "training.iterations=2",
)
SECOND = 10**9


def parsed(result: Result, rank: int = 0) -> tuple[dict[str, Any], str]:
    text = encode(trace(result, rank)).decode("ascii")
    return json.loads(text), text


def events_of(result: Result) -> list[Event]:
    found: list[Event] = parsed(result)[0]["traceEvents"]
    return found


def recorded(name: str, **workload: Any) -> Scenario:
    path = next(path for path in RECORDINGS if path.stem.startswith(name))
    return changed(scenario_of(read_recording(path)), **workload)


def changed(scenario: Scenario, **workload: Any) -> Scenario:
    assert scenario.workload is not None
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update=workload)})


def small(*overrides: str) -> Result:
    return simulate(load(LLAMA, [*SMALL, *overrides]))


# ---- exact spans


def test_kernels_are_the_ops() -> None:
    """The lecture's chart: overlap and backward prefetch take 27 s."""
    found = events_of(simulate(load(PREFETCH)))
    spans = [
        (e["tid"], e["args"]["unit"], e["args"]["kind"], ns(e) / SECOND, end(e) / SECOND)
        for e in slices(found, "kernel")
    ]
    compute = [(unit, kind, a, b) for tid, unit, kind, a, b in spans if tid == 7]
    assert compute == [
        ("unit.0", "forward", 1.5, 3.5),
        ("unit.1", "forward", 3.5, 5.5),
        ("unit.2", "forward", 5.5, 7.5),
        ("unit.3", "forward", 7.5, 9.5),
        ("unit.3", "backward", 9.5, 13.5),
        ("unit.2", "backward", 13.5, 17.5),
        ("unit.1", "backward", 17.5, 21.5),
        ("unit.0", "backward", 21.5, 25.5),
    ]
    gathers = [(unit, a, b) for tid, unit, kind, a, b in spans if kind == "all_gather"]
    assert gathers[4:6] == [("unit.2", 7.5, 9.0), ("unit.1", 15.0, 16.5)]
    assert spans[-1] == (20, "unit.0", "reduce_scatter", 25.5, 27.0)


def test_lanes_have_stable_numbers_and_names() -> None:
    trace_, _ = parsed(simulate(recorded("fsdp2__equal4__hsdp")))
    names = {
        e["tid"]: e["args"]["name"]
        for e in trace_["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 0
    }
    assert names == {
        7: "stream 7 compute",
        20: "stream 20 all_gather_copy_in",
        24: "stream 24 all_gather",
        28: "stream 28 reduce_scatter",
        32: "stream 32 all_reduce",
        -1: "synchronization",
    }


def test_a_launch_shares_its_cost_among_its_calls() -> None:
    result = simulate(changed(load(PREFETCH), kernel_launch=12e-6))
    found = slices(events_of(result), "cpu_op", "cuda_runtime")
    assert [(e["name"], ns(e), end(e)) for e in found[:6]] == [
        ("c10d::_allgather_base_", 0, 12_000),
        ("cudaLaunchKernelExC", 4_000, 8_000),
        ("cudaEventRecord", 8_000, 12_000),
        ("forward", 12_000, 24_000),
        ("cudaStreamWaitEvent", 15_000, 18_000),
        ("cudaLaunchKernel", 18_000, 21_000),
    ]


def test_collectives_say_what_they_move() -> None:
    """A reduce-scatter of 2 ranks in an odd shape: padded elements in, the shard out."""
    result = simulate(recorded("fsdp2__uneven6__hsdp__"))
    by_kind = {e["args"]["kind"]: e for e in slices(events_of(result), "kernel")}
    ops = {op.kind: op for op in result.ops}
    for kind, name in (
        ("all_gather", "_allgather_base"),
        ("reduce_scatter", "_reduce_scatter_base"),
        ("all_reduce", "allreduce"),
    ):
        args, info = by_kind[kind]["args"], ops[kind].collective
        assert args["Collective name"] == name
        assert args["dtype"] == "Float"
        assert args["Group size"] == 2
        whole = info.nbytes // 4
        shard = whole if kind == "all_reduce" else whole // 2
        assert args["In msg nelems"] == (shard if kind == "all_gather" else whole)
        assert args["Out msg nelems"] == (shard if kind == "reduce_scatter" else whole)
    assert by_kind["all_gather"]["args"]["Process Group Ranks"] == "[0, 1]"
    assert by_kind["all_reduce"]["args"]["Process Group Ranks"] == "[0, 2]"


def test_process_groups_of_another_rank() -> None:
    """HSDP on 4 ranks, 2 per shard: rank 3 shards with 2 and replicates 1."""
    trace_, text = parsed(simulate(recorded("fsdp2__uneven6__hsdp__")), rank=3)
    assert [g["ranks"] for g in trace_["distributedInfo"]["pg_config"]] == [[2, 3], [1, 3]]
    assert violations(trace_, text) == []


def test_long_rank_lists_end_in_an_ellipsis() -> None:
    kernel = slices(events_of(simulate(load(SCENARIOS / "textbook_13b_64gpu.toml"))), "kernel")[0]
    assert kernel["args"]["Process Group Ranks"].startswith("[0, 1, 2, ")
    assert kernel["args"]["Process Group Ranks"].endswith("28, 29, ...]")
    assert kernel["args"]["Process Group Description"] == "default_pg"


# ---- annotations


def annotations(result: Result, iteration: int) -> list[str]:
    """Names on the CPU thread in one iteration, without those of collectives."""
    found = slices(events_of(result), "user_annotation")
    names = [e["name"] for e in found if not e["name"].startswith("nccl:")]
    first = names.index(f"ProfilerStep#{iteration}")
    return names[first + 1 :]


def test_fsdp2_labels_are_torchs() -> None:
    names = annotations(simulate(recorded("fsdp2__equal4__default__ws2")), 1)
    assert names[:9] == [
        "forward",
        "FSDP::root_pre_forward",
        "FSDP::pre_forward",
        "FSDP::all_gather",
        "FSDP::all_gather_copy_out",
        "forward (embed)",
        "FSDP::pre_forward (blocks.0)",
        "FSDP::all_gather (blocks.0)",
        "FSDP::all_gather_copy_out (blocks.0)",
    ]
    start = names.index("backward (blocks.2)")
    assert names[start : start + 9] == [
        "backward (blocks.2)",
        "FSDP::post_backward_accumulate (blocks.2)",
        "FSDP::post_backward_reshard (blocks.2)",
        "FSDP::post_backward_rs_wait (blocks.2)",
        "FSDP::post_backward_reduce (blocks.2)",
        "FSDP::pre_backward (blocks.1)",
        "FSDP::all_gather_copy_out (blocks.1)",
        "FSDP::backward_prefetch for blocks.0",
        "FSDP::all_gather (blocks.0)",
    ]
    assert (
        names[-5:]
        == [
            "FSDP::root_post_backward_callback",
            "FSDP::post_backward_accumulate",
            "FSDP::post_backward_reshard",
            "FSDP::post_backward_reduce",
            "Optimizer.step#SGD.step",
        ]
        or names[-1] == "Optimizer.step#SGD.step"
    )


def test_fsdp1_labels_are_torchs() -> None:
    names = annotations(simulate(recorded("fsdp1__equal4__full_bwdpre__ws2")), 1)
    fsdp = "FullyShardedDataParallel."
    assert names[:6] == [
        "forward",
        f"{fsdp}_root_pre_forward",
        f"{fsdp}_pre_forward",
        f"{fsdp}rate_limiter",
        "forward (embed)",
        f"{fsdp}_pre_forward",
    ]
    start = names.index("backward (blocks.2)")
    assert names[start : start + 5] == [
        "backward (blocks.2)",
        f"{fsdp}_post_backward_hook",
        f"{fsdp}_pre_backward_hook",
        f"{fsdp}_pre_backward_prefetch",
        f"{fsdp}rate_limiter",
    ]


def test_ddp_has_torchs_label_of_the_forward() -> None:
    workload = {"units": 2, "forward": 1.0, "backward": 2.0, "all_reduce": 0.5, "parameters": 64}
    scenario = load(
        {
            "workload": workload,
            "training": {"iterations": 1, "optimizer": "adamw"},
            "fsdp": {"runtime": "ddp"},
            "hardware": {"gpus_per_node": 2},
        }
    )
    assert annotations(simulate(scenario), 0) == [
        "DistributedDataParallel.forward",
        "forward (unit.0)",
        "forward (unit.1)",
        "backward",
        "backward (unit.1)",
        "backward (unit.0)",
        "Optimizer.step#AdamW.step",
    ]


def test_recomputation_lies_in_the_backward_that_asks_for_it() -> None:
    names = annotations(simulate(recorded("fsdp2__equal4__ac_inside__ws2")), 0)
    start = names.index("backward (blocks.3)")
    assert names[start + 1] == "recompute (blocks.3)"


def test_iterations_follow_one_another() -> None:
    result = simulate(recorded("fsdp2__equal4__default__ws2", kernel_launch=1e-3))
    steps = [e for e in events_of(result) if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in steps] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert end(steps[0]) == ns(steps[1])
    assert end(steps[1]) == round(result.iteration_ends[-1] * SECOND)


def test_host_waits_are_event_synchronisations() -> None:
    result = simulate(load(PREFETCH))
    found = events_of(result)
    calls = [e for e in found if e["name"] == "cudaEventSynchronize"]
    assert [(ns(e), end(e)) for e in calls] == [
        (round(w.start * SECOND), round(w.end * SECOND)) for w in result.host_waits
    ]
    assert len([e for e in found if e["name"] == "Event Sync"]) == len(calls) > 0


# ---- memory


def test_memory_events_add_up() -> None:
    """The instants' bytes sum to the total they carry, and the counters end there."""
    result = small()
    found = events_of(result)
    total = 0
    for event in (e for e in found if e["name"] == "[memory]"):
        total += event["args"]["Bytes"]
        assert total == event["args"]["Total Allocated"]
    last = result.memory.samples[-1]
    counters = {e["name"]: e["args"]["bytes"] for e in found if e["ph"] == "C"}
    assert counters == {"allocated": last.allocated, "reserved": last.reserved}
    assert total == last.allocated > 0


def test_driver_calls_are_what_the_host_paid() -> None:
    result = small('hardware.memory="7 GB"')
    assert result.memory.allocator.num_alloc_retries > 0
    found = slices(events_of(result), "cuda_runtime")
    for kind, name in ((CudaMalloc, "cudaMalloc"), (CudaFree, "cudaFree")):
        paid = [c for c in result.memory.paid_calls if type(c.call) is kind]
        spans = [(ns(e), end(e)) for e in found if e["name"] == name]
        assert spans == [(round(c.start * SECOND), round(c.end * SECOND)) for c in paid]
    stalled = sum(s.end - s.start for s in result.memory.stalls)
    shown = sum(end(e) - ns(e) for e in found if e["name"] in ("cudaMalloc", "cudaFree"))
    assert shown == pytest.approx(stalled * SECOND, rel=1e-6)


def test_out_of_memory_ends_the_trace() -> None:
    result = small('hardware.memory="5 GB"')
    assert result.memory.oom is not None
    trace_, text = parsed(result)
    assert violations(trace_, text) == []
    host = [e for e in slices(trace_["traceEvents"]) if e["pid"] == 1000]
    assert max(map(end, host)) == round(result.memory.oom.time * SECOND)


# ---- the rules


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("textbook*.toml")), ids=lambda p: p.stem)
def test_scenario_files_keep_the_rules(path: Path) -> None:
    assert violations(*parsed(simulate(load(path)))) == []


@pytest.mark.parametrize("memory", ["80 GB", "7 GB"])
@pytest.mark.parametrize("expandable", ["false", "true"])
def test_a_model_keeps_the_rules(memory: str, expandable: str) -> None:
    result = small(f'hardware.memory="{memory}"', f"allocator.expandable_segments={expandable}")
    assert violations(*parsed(result)) == []


#: Nothing, less than a nanosecond, and times that are no whole number of nanoseconds.
launch_costs = st.sampled_from([0.0, 3e-10, 1e-9, 1e-5 / 3, 1e-5, 0.4])


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(RECORDINGS), launch=launch_costs)
def test_recorded_runs_keep_the_rules(path: Path, launch: float) -> None:
    scenario = changed(scenario_of(read_recording(path)), kernel_launch=launch)
    assert violations(*parsed(simulate(scenario))) == []


#: Also less than a nanosecond: no duration at all in a trace.
durations = st.one_of(st.just(1e-12), st.floats(1e-10, 5.0))


@st.composite
def textbooks(draw: st.DrawFn) -> Scenario:
    """Lecture scenarios of any durations."""
    units = draw(st.integers(1, 5))
    times = ("forward", "backward", "all_gather", "reduce_scatter")
    workload: dict[str, Any] = {
        name: draw(st.lists(durations, min_size=units, max_size=units)) for name in times
    }
    workload |= {"units": units, "kernel_launch": draw(launch_costs), "parameters": 4096}
    fsdp = {
        "runtime": "textbook",
        "overlap": draw(st.booleans()),
        "backward_prefetch": draw(st.sampled_from(["BACKWARD_PRE", "NO_PREFETCH"])),
        "forward_prefetch": draw(st.booleans()),
        "limit_all_gathers": draw(st.sampled_from([False, 1, 2, 3])),
        "reshard_last_unit": draw(st.booleans()),
    }
    training = {"iterations": draw(st.integers(1, 2))}
    return load({"workload": workload, "fsdp": fsdp, "training": training})


@settings(max_examples=40, deadline=None)
@given(scenario=textbooks())
def test_textbook_runs_keep_the_rules(scenario: Scenario) -> None:
    result = simulate(scenario)
    trace_, text = parsed(result)
    assert violations(trace_, text) == []
    kernels = slices(trace_["traceEvents"], "kernel")
    assert [(ns(e), end(e)) for e in kernels] == [
        (round(op.start * SECOND), round(op.end * SECOND))  # type: ignore[operator]
        for op in result.ops
    ]


# ---- the rules can be broken


def first(events: list[Event], **wanted: Any) -> Event:
    return next(e for e in events if all(e.get(k) == v for k, v in wanted.items()))


def _overlap(events: list[Event]) -> None:
    first(events, cat="kernel")["dur"] += 0.001 + 2e6


def _cross(events: list[Event]) -> None:
    first(events, cat="cpu_op")["dur"] += 0.001


def _null(events: list[Event]) -> None:
    first(events, cat="kernel")["dur"] = None


def _negative(events: list[Event]) -> None:
    first(events, cat="kernel")["dur"] = -1.0


def _same_correlation(events: list[Event]) -> None:
    calls = slices(events, "cuda_runtime")
    calls[1]["args"]["correlation"] = calls[0]["args"]["correlation"]


def _lose_a_flow(events: list[Event]) -> None:
    events.remove(first(events, ph="f"))


def _move_a_flow(events: list[Event]) -> None:
    first(events, ph="s")["ts"] += 1.0e9


def _early_kernel(events: list[Event]) -> None:
    kernel = slices(events, "kernel")[-1]
    call = first(events, ph="s", id=kernel["args"]["correlation"])
    kernel["ts"] = call["ts"] - 0.001


def _memcpy(events: list[Event]) -> None:
    next(e for e in slices(events, "kernel") if e["tid"] == 7)["name"] = "Memcpy DtoD"


def _late_wait(events: list[Event]) -> None:
    first(events, name="Stream Wait Event")["ts"] += 0.5


def _unnamed(events: list[Event]) -> None:
    events.remove(first(events, name="thread_name"))


def _unchanged_counter(events: list[Event]) -> None:
    events.append(copy.deepcopy([e for e in events if e["ph"] == "C"][-1]))


@pytest.mark.parametrize(
    "damage",
    [
        _overlap,
        _cross,
        _null,
        _negative,
        _same_correlation,
        _lose_a_flow,
        _move_a_flow,
        _early_kernel,
        _memcpy,
        _late_wait,
        _unnamed,
        _unchanged_counter,
    ],
)
def test_the_rules_find_damage(damage: Callable[[list[Event]], None]) -> None:
    scenario = recorded("fsdp2__equal4__bf16__ws2", kernel_launch=1e-5)
    trace_, text = parsed(simulate(scenario))
    assert violations(trace_, text) == []
    damage(trace_["traceEvents"])
    assert violations(trace_, text) != []


# ---- names that nobody checks


NASTY = ['"}],"x":[{"', "Sync Memcpy", "</script>", "nccl层", "%s{name}\\", "a" * 300]


def nasty(names: list[str]) -> Scenario:
    units = [
        {"name": name, "params": [{"name": f"{name}.weight", "shape": [64]}]} for name in names
    ]
    seconds = {"forward": 1.0, "backward": 2.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    return load(
        {
            "title": NASTY[0],
            "workload": {"units": units, **seconds},
            "hardware": {"gpus_per_node": 2},
            "training": {"iterations": 1},
            "fsdp": {"runtime": "fsdp2"},
        }
    )


def test_unit_names_are_only_text() -> None:
    trace_, text = parsed(simulate(nasty(NASTY)))
    assert violations(trace_, text) == []
    assert text.isascii()
    units = {e["args"].get("unit") for e in slices(trace_["traceEvents"], "kernel")}
    assert units >= set(NASTY)
    labels = {e["name"] for e in slices(trace_["traceEvents"], "user_annotation")}
    assert {f"FSDP::pre_forward ({name})" for name in NASTY} <= labels


@pytest.mark.parametrize(
    "name", ["Sync", "aMemcpy", "Memset", "x dma", "hipLaunch", "ncclKernel", "hccl"]
)
def test_kernel_names_stay_compute(name: str) -> None:
    shown = compute_name(name)
    assert not any(word in shown for word in ("Sync", "Memcpy", "Memset", "dma"))
    assert not shown.startswith(("hip", "hccl", "nccl"))
    assert shown.replace("_", "") == name


def test_plain_kernel_names_are_kept() -> None:
    assert compute_name("self_attn.q_proj.dgrad") == "self_attn.q_proj.dgrad"


def test_an_unknown_stream_gets_a_number_of_its_own() -> None:
    from fsdpsim.engine import Op
    from fsdpsim.trace.lanes import stream_ids

    ids = stream_ids([Op("a", "offload", 0.0), Op("b", "compute", 0.0), Op("c", "extra", 0.0)])
    assert ids == {"compute": 7, "offload": 36, "extra": 40}
    assert set(ids.values()) - {7} <= set(range(max(STREAM_IDS.values()) + 1, 100))


# ---- files and the command


def test_the_same_scenario_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_trace(simulate(load(PREFETCH)), tmp_path / name)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "c.json").read_bytes()


def test_command_writes_beside_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(PREFETCH)]) == 0
    assert capsys.readouterr().out == "textbook_backward_prefetch.pt.trace.json.gz\n"
    data = gzip.decompress(Path("textbook_backward_prefetch.pt.trace.json.gz").read_bytes())
    assert violations(json.loads(data), data.decode()) == []


def test_command_takes_a_path_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    argv = ["trace", str(PREFETCH), "-o", str(path), "--set", 'workload.forward="3 s"']
    assert main(argv) == 0
    kernels = slices(json.loads(path.read_text())["traceEvents"], "kernel")
    assert {e["dur"] for e in kernels if e["args"]["kind"] == "forward"} == {3e6}


def test_each_simulated_rank_has_a_file(tmp_path: Path) -> None:
    """With [noise] every rank is simulated: each file has its rank's own kernels and groups."""
    tables = {
        "workload": {
            "units": 2,
            "forward": 1.0,
            "backward": 2.0,
            "all_gather": 0.5,
            "reduce_scatter": 0.5,
            "parameters": 4096,
        },
        "hardware": {"gpus_per_node": 2},
        "training": {"iterations": 1},
        "fsdp": {"runtime": "fsdp2"},
        "noise": {"jitter": 0.2, "seed": 1},
    }
    result = simulate(load(tables))
    paths = write_traces(result, tmp_path / "t.json")
    assert [path.name for path in paths] == ["t.rank0.json", "t.rank1.json"]
    for rank, path in enumerate(paths):
        text = path.read_text()
        found = json.loads(text)
        assert violations(found, text) == []
        assert found["distributedInfo"]["rank"] == rank
        kernels = slices(found["traceEvents"], "kernel")
        assert {e["pid"] for e in kernels} == {rank}
        own = result.of_rank(rank)
        assert [ns(e) for e in kernels] == [round(op.start * SECOND) for op in own.ops]
        assert [e for e in found["traceEvents"] if e["name"] == "[memory]"]
    kernels_of = [slices(parsed(result, rank)[0]["traceEvents"], "kernel") for rank in (0, 1)]
    assert [e["dur"] for e in kernels_of[0]] != [e["dur"] for e in kernels_of[1]]


def test_command_names_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["trace", str(PREFETCH), "-o", str(tmp_path / "file" / "t.json")]) == 2
    message = capsys.readouterr().err
    assert "t.json: cannot be written" in message
    assert "Traceback" not in message
