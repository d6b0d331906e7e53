"""HolisticTraceAnalysis and torch read what we write, and agree with our own figures.

Neither is a dependency: install the ``interop`` extra in an environment of its own and run
``pytest -m interop``.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import read_recording, scenario_of

from fsdpsim.program import IterationStart
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import simulate
from fsdpsim.snapshot import snapshot, write_snapshot
from fsdpsim.trace import write_trace

# Warnings of theirs are about their own code.
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[1]
RECORDINGS = Path(__file__).parent / "data" / "golden"
PREFETCH = ROOT / "scenarios" / "textbook_backward_prefetch.toml"
LLAMA = ROOT / "scenarios" / "llama3_8b_8xh100.toml"
MICROSECOND = 1e-6


def textbook() -> Scenario:
    return load(PREFETCH, ['workload.kernel_launch="12 us"'])


def recorded(name: str) -> Scenario:
    """One iteration of a recorded run; a launch cost, without which HTA sees no launches."""
    scenario = scenario_of(read_recording(RECORDINGS / f"{name}.json"))
    assert scenario.workload is not None
    workload = scenario.workload.model_copy(update={"kernel_launch": 12e-6})
    training = scenario.training.model_copy(update={"iterations": 1})
    return scenario.model_copy(update={"workload": workload, "training": training})


def llama() -> Scenario:
    return load(LLAMA, ["training.iterations=1"])


SCENARIOS = {
    "textbook": textbook,
    "fsdp1": lambda: recorded("fsdp1__equal4__full_bwdpre__ws2"),
    "fsdp1 hybrid": lambda: recorded("fsdp1__uneven6__hybrid__ws4"),
    "llama": llama,
}


@pytest.fixture(scope="module", params=SCENARIOS)
def analysed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Result, Any]]:
    """A result of one iteration, and HTA's analysis of its trace in exact nanoseconds."""
    trace_analysis = pytest.importorskip("hta.trace_analysis", reason="the interop extra is absent")
    folder = tmp_path_factory.mktemp("traces")
    result = simulate(SCENARIOS[request.param]())
    write_trace(result, folder / "rank0.pt.trace.json.gz")
    logging.getLogger("hta").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
        yield result, trace_analysis.TraceAnalysis(trace_dir=str(folder))


def kernel_time(result: Result) -> float:
    """HTA's: from the first kernel's start to the last one's end."""
    return result.iteration_ends[-1] - min(op.start for op in result.ops if op.start is not None)


def test_temporal_breakdown(analysed: tuple[Result, Any]) -> None:
    result, analysis = analysed
    (row,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    print(row)
    assert row["kernel_time(us)"] * MICROSECOND == pytest.approx(kernel_time(result), abs=1e-8)
    assert row["compute_time(us)"] * MICROSECOND == pytest.approx(result.compute_time, abs=1e-7)
    exposed = row["non_compute_time(us)"] * MICROSECOND
    assert exposed == pytest.approx(result.exposed_communication, abs=1e-7)


def test_communication_computation_overlap(analysed: tuple[Result, Any]) -> None:
    result, analysis = analysed
    (row,) = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
    print(row)
    communication = sum(end - start for start, end in result.communication_busy)
    hidden = 100 * (1 - result.exposed_communication / communication)
    assert row["comp_comm_overlap_pctg"] == pytest.approx(hidden, abs=0.005)  # two decimals


def test_critical_path(analysed: tuple[Result, Any]) -> None:
    """From the CPU's first call to the end of the last kernel: HTA finds a chain that long."""
    result, analysis = analysed
    graph, success = analysis.critical_path_analysis(
        rank=0, annotation="ProfilerStep", instance_id=0
    )
    assert success
    print(graph.summary())
    length = sum(edge.weight for edge in graph.critical_path_edges_set) * MICROSECOND
    begin = next(s.time for s in result.program.steps if isinstance(s, IterationStart))
    assert begin is not None
    assert length == pytest.approx(result.iteration_ends[-1] - begin, abs=1e-7)


@pytest.mark.parametrize("analysed", ["textbook"], indirect=True)
def test_critical_path_of_the_textbook(analysed: tuple[Result, Any]) -> None:
    """First gather, all compute, last reduce-scatter: the chain that the lecture draws."""
    result, analysis = analysed
    graph, _ = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=0)
    nodes = [graph.node_list[node] for node in graph.critical_path_nodes]
    rows = [graph.trace_df.loc[node.ev_idx] for node in nodes if node.is_start]
    starts = [row.ts * MICROSECOND for row in rows if row.stream > 0]
    ops = [op for op in result.ops if op.collective is None]
    chain = [result.ops[0], *ops, result.ops[-1]]
    assert starts == pytest.approx([op.start for op in chain], abs=1e-9)


def test_other_analyses_run(analysed: tuple[Result, Any]) -> None:
    result, analysis = analysed
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    print(kinds)
    assert set(kinds["kernel_type"]) >= {"COMPUTATION", "COMMUNICATION"}
    seconds = kernels["sum (us)"].sum() * MICROSECOND
    assert seconds == pytest.approx(sum(op.end - op.start for op in result.ops), abs=1e-5)
    launches = analysis.get_cuda_kernel_launch_stats(visualize=False)[0]
    assert len(launches) == len(result.ops)
    assert analysis.get_profiler_steps() == [0]
    assert analysis.get_queue_length_summary() is not None


# ---- torch's reader of memory snapshots


@pytest.fixture(scope="module")
def viewer() -> Any:
    return pytest.importorskip("torch.cuda._memory_viz", reason="torch is absent")


SNAPSHOTS = {
    "llama": llama,
    "expandable": lambda: load(
        LLAMA, ["training.iterations=1", "allocator.expandable_segments=true"]
    ),
    "out of memory": lambda: load(LLAMA, ['hardware.memory="30 GB"']),
    "pending": lambda: recorded("fsdp1__equal4__full_bwdpre__ws2"),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_torch_reads_a_snapshot(name: str, viewer: Any, tmp_path: Path) -> None:
    path = tmp_path / "snap.pickle"
    write_snapshot(SNAPSHOTS[name](), path)
    with path.open("rb") as file:
        data = pickle.load(file)
    assert data == snapshot(SNAPSHOTS[name]())
    assert "allocated" in viewer.segsum(data)
    text = viewer.trace(data)
    assert f"{len(data['device_traces'][0])} entries" in text
    assert "<script" in viewer.trace_plot(data)
    for draw in (viewer.memory, viewer.segments):
        assert draw(data, format_flamegraph=lambda lines: lines)
