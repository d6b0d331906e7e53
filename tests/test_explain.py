"""Every moment of a step has one cause, the sums are exact, and the statements are true."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsdp_scenarios
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import read_recording, scenario_of

from fsdpsim.cli import main
from fsdpsim.engine import Op
from fsdpsim.explain import explain, try_remedies
from fsdpsim.explain.catalogue import IDEAS, remedies, vary
from fsdpsim.explain.causes import apportion, last_op, partition
from fsdpsim.explain.critical import path_totals
from fsdpsim.explain.owners import alive_after, by_category, by_unit
from fsdpsim.explain.timeline import Timeline, span
from fsdpsim.program import COMPUTE
from fsdpsim.result import Result
from fsdpsim.scenario import ScenarioError, load
from fsdpsim.scenario.runtimes import RUNTIMES
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def textbook(name: str, *overrides: str) -> Result:
    return simulate(load(SCENARIOS / f"textbook_{name}.toml", overrides))


#: Six units with parameters on a GPU; times in ms so that nothing is hidden by coincidence.
SIX_UNITS = """
[workload]
units = [
  { name = "embed", parameters = 50_000_000, forward = "0.2 ms", backward = "0.4 ms" },
  { name = "layers.0", parameters = 200_000_000 },
  { name = "layers.1", parameters = 200_000_000 },
  { name = "layers.2", parameters = 200_000_000 },
  { name = "layers.3", parameters = 200_000_000 },
  { name = "head", parameters = 50_000_000 },
]
forward = "3 ms"
backward = "6 ms"
activations = "1 GiB"
kernel_launch = "20 us"
optimizer = "1 ms"
[training]
param_dtype = "bfloat16"
reduce_dtype = "float32"
[fsdp]
runtime = "fsdp2"
[hardware]
gpu = "H100-SXM-80GB"
"""


@pytest.fixture
def six_units(tmp_path: Path) -> Path:
    path = tmp_path / "six_units.toml"
    path.write_text(SIX_UNITS, encoding="utf-8")
    return path


def causes(result: Result) -> dict[tuple[str, str, str], float]:
    return {(p.cause, p.waits_for, p.behind): p.seconds for p in explain(result).parts}


# ---- the lecture's charts


def test_without_prefetch_each_backward_gather_queues_behind_a_reduce_scatter() -> None:
    assert causes(textbook("overlap")) == {
        ("forward", "", ""): 8.0,
        ("backward", "", ""): 16.0,
        ("all_gather", "all_gather", ""): 6.0,
        ("queue", "all_gather", "reduce_scatter"): 4.5,
        ("reduce_scatter", "reduce_scatter", ""): 1.5,
    }


def test_with_prefetch_only_the_ends_are_exposed() -> None:
    found = explain(textbook("backward_prefetch"))
    waits = [p for p in found.parts if not p.busy]
    assert [(p.cause, p.units, p.seconds, p.count) for p in waits] == [
        ("all_gather", ("unit.0",), 1.5, 1),
        ("reduce_scatter", ("unit.0",), 1.5, 1),
    ]
    assert found.held_by == {"step_start": 1.5, "compute": 1.5}


def test_without_overlap_the_compute_stream_runs_the_collectives() -> None:
    found = explain(textbook("no_overlap"))
    assert all(part.busy for part in found.parts)
    assert causes(textbook("no_overlap"))["all_gather", "", ""] == 7 * 1.5
    assert (found.idle, found.busy) == (0.0, 40.5)


def test_the_rate_limiter_holds_gathers_back() -> None:
    found = explain(textbook("overlap", "fsdp.limit_all_gathers=1"))
    # The gathers of units 1 to 3 in forward are issued when the unit before has run.
    assert found.held_by["rate_limiter"] == 3 * 1.5


def test_gaps_of_the_chart_without_prefetch() -> None:
    _, gaps = partition(Timeline(textbook("overlap")))
    spans = [(gap.start, gap.end) for gap in gaps]
    assert spans == [(0, 1.5), (13.5, 16.5), (20.5, 23.5), (27.5, 30.5), (34.5, 36)]
    queued, ran = gaps[1].segments
    assert queued.waits_for is not None and queued.op is not None and ran.op is not None
    assert (queued.waits_for.kind, queued.waits_for.unit) == ("all_gather", "unit.2")
    assert (queued.op.kind, queued.op.unit, queued.end) == ("reduce_scatter", "unit.3", 15.0)
    assert ran.op is queued.waits_for


def test_critical_path_of_the_chart_without_prefetch() -> None:
    path = explain(textbook("overlap")).critical_path
    assert [(s.start, s.end, s.repeats, s.steps) for s in path] == [
        (0.0, 1.5, 1, ("all_gather",)),
        (1.5, 9.5, 1, ("forward",)),
        (9.5, 30.5, 3, ("backward", "reduce_scatter", "all_gather")),
        (30.5, 34.5, 1, ("backward",)),
        (34.5, 36.0, 1, ("reduce_scatter",)),
    ]
    assert path[2].seconds == {"backward": 12.0, "reduce_scatter": 4.5, "all_gather": 4.5}


def test_lower_bounds_and_exposure_of_the_chart_without_prefetch() -> None:
    found = explain(textbook("overlap"))
    bounds = {bound.resource: bound.seconds for bound in found.lower_bounds}
    assert bounds == {"compute": 24.0, "communicator shard": 16.5}
    exposed = {(row.kind, row.unit): (row.count, row.exposed) for row in found.exposed}
    assert exposed["all_gather", "unit.0"] == (2, 3.0)
    assert exposed["all_gather", "unit.3"] == (1, 0.0)
    assert sum(row.exposed for row in found.exposed) == textbook("overlap").exposed_communication


def test_a_start_that_nothing_on_this_rank_explains_is_due_to_others() -> None:
    result = textbook("overlap")
    last = result.ops[-1]
    assert span(last) == (34.5, 36.0)
    last.start = 35.0  # as if another rank had come late
    waits = {(p.cause, p.waits_for): p.seconds for p in explain(result).parts if not p.busy}
    assert waits["other_ranks", "reduce_scatter"] == 0.5
    assert waits["reduce_scatter", "reduce_scatter"] == 1.0


def test_a_straggler_is_the_cause(six_units: Path) -> None:
    result = simulate(load(six_units, ["noise.stragglers.3=1.5"]))
    check_sums(Timeline(result))
    found = explain(result)
    assert max(found.held_by, key=found.held_by.__getitem__) == "other_ranks"
    late = sum(p.seconds for p in found.parts if p.cause == "other_ranks")
    alone = explain(simulate(load(six_units)))
    assert 0 < late < found.step_time - alone.step_time


# ---- laws


#: Few values, so that several constraints bind at once; and any, so that sums are rounded.
positive = st.sampled_from([0.25, 0.1, 1.0, 1.5, 3.7]) | st.floats(0.01, 5)
durations = st.just(0.0) | positive


@st.composite
def results(draw: st.DrawFn) -> Result:
    runtime = draw(st.sampled_from(["textbook", "fsdp1", "fsdp2", "ddp"]))
    options: dict[str, Any] = {}
    if runtime in ("textbook", "fsdp1"):
        prefetch = st.sampled_from(["BACKWARD_PRE", "NO_PREFETCH"])
        options = {
            "backward_prefetch": draw(prefetch),
            "forward_prefetch": draw(st.booleans()),
            "limit_all_gathers": draw(st.sampled_from([False, True if runtime == "fsdp1" else 2])),
        }
    if runtime == "fsdp2":
        options = {
            "reshard_after_forward": draw(st.sampled_from([True, False, 2])),
            "separate_reduce_scatter_group": draw(st.booleans()),
            "reduce_scatter_max_input_buffers": draw(st.integers(1, 2)),
        }
    if runtime != "ddp":
        options["sharding_factor"] = draw(st.sampled_from([2, 8]))
    kinds = ("forward", "backward", "all_gather", "reduce_scatter", "all_reduce")
    return fsdp_scenarios.run(
        runtime,
        draw(st.integers(1, 5)),
        root=runtime == "ddp" or draw(st.booleans()),
        seconds={kind: draw(positive) for kind in kinds},
        fsdp=options,
        training={"read_loss": draw(st.booleans()), "iterations": draw(st.integers(1, 3))},
        workload={"kernel_launch": draw(durations), "optimizer": draw(durations)},
    )


@given(results())
@settings(max_examples=60, deadline=None)
def test_laws(result: Result) -> None:
    timeline = Timeline(result)
    check_sums(timeline)
    check_segments(timeline)
    check_path(timeline)
    for bound in explain(result).lower_bounds:
        if bound.resource != "host":  # the host may have worked for this step before it began
            assert bound.seconds <= result.step_time * (1 + 1e-12)


def check_sums(timeline: Timeline) -> None:
    """Segments cover the step; parts, reasons and path sum to it to the last bit, in any order."""
    result = timeline.result
    segments, _ = partition(timeline)
    low, high = map(Fraction, result.window)
    assert sum((s.exact for s in segments), Fraction(0)) == high - low
    for one, other in pairwise(segments):
        assert one.end == other.start
    found = explain(result)
    seconds = [part.seconds for part in found.parts]
    assert sum(seconds) == sum(reversed(seconds)) == result.step_time
    assert found.busy + found.idle == result.step_time
    assert sum(found.held_by.values()) == found.idle
    assert sum(path_totals(found.critical_path).values()) == result.step_time


def check_segments(timeline: Timeline) -> None:
    """What a segment names ran, or was done by the host, all the time."""
    segments, gaps = partition(timeline)
    for segment in segments:
        assert segment.start < segment.end
        assert segment.op is not None or segment.host is not None
        if segment.op is not None:
            start, end = span(segment.op)
            assert start <= segment.start and segment.end <= end
            assert (segment.op.stream == COMPUTE) == segment.busy
        if segment.host is not None:
            assert segment.host.start <= segment.start and segment.end <= segment.host.end
        if segment.behind is not None:
            check_queue(segment.waits_for, segment.behind)
    compute = [span(op) for op in timeline.result.ops if op.stream == COMPUTE]
    for gap in gaps:
        assert not any(
            start < gap.end and end > gap.start and start < end for start, end in compute
        )
        assert gap.next_op is None or span(gap.next_op)[0] == gap.end


def check_queue(awaited: Op | None, behind: Op) -> None:
    """The one in front had ended before, on the same stream or communicator."""
    assert awaited is not None and awaited.collective is not None
    assert span(behind)[1] <= span(awaited)[0]
    assert behind.stream == awaited.stream or behind.communicator == awaited.communicator


def check_path(timeline: Timeline) -> None:
    """Tiles lead from the end to the start, each to the one that it ended with."""
    low, high = timeline.result.window
    tiles = list(timeline.walk_back(last_op(timeline.result), high, low))
    assert (tiles[0].end, tiles[-1].start) == (high, low)
    for later, earlier in pairwise(tiles):
        assert earlier.end == later.start
    for tile in tiles:
        node = tile.op or tile.host
        assert node is not None and node.start is not None and node.end is not None
        assert node.start <= tile.start < tile.end <= node.end


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "recording_path" in metafunc.fixturenames:
        paths = sorted(Path(metafunc.config.getoption("--golden-dir")).glob("*.json"))[::6]
        metafunc.parametrize("recording_path", paths, ids=lambda path: path.stem)


def test_recorded_runs_are_explained_without_remainder(recording_path: Path) -> None:
    timeline = Timeline(simulate(scenario_of(read_recording(recording_path))))
    check_sums(timeline)
    check_segments(timeline)
    check_path(timeline)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_apportioned_parts_sum_to_the_total_in_any_order(lengths: list[float]) -> None:
    exact = [Fraction(length) for length in lengths]
    total = float(sum(exact, Fraction(0)))
    found = apportion(exact, total)
    assert sum(found) == sum(reversed(found)) == sum(sorted(found)) == total
    digit = Fraction(0) if not total else Fraction(total) / 2**52
    assert all(abs(Fraction(a) - b) <= digit for a, b in zip(found, exact, strict=True))


# ---- the host


def test_a_slow_host_is_the_cause(six_units: Path) -> None:
    result = simulate(load(six_units, ['workload.kernel_launch="1.5 ms"']))
    found = explain(result)
    assert {p.cause for p in found.parts if not p.busy} == {"launch"}
    assert found.lower_bounds[0].resource == "host"
    assert [s.steps for s in found.critical_path] == [("host",), ("optimizer",)]


def test_allocator_retries_block_the_host(six_units: Path) -> None:
    overrides = ["fsdp.runtime=fsdp1", "hardware.memory=10.5GiB"]
    result = simulate(load(six_units, overrides))
    assert result.host_blocked["alloc_retry"] > 0
    idle = {p.cause: p.seconds for p in explain(result).parts if not p.busy}
    assert 0 < idle["alloc_retry"] <= result.host_blocked["alloc_retry"]


def test_host_tiles_cover_the_hosts_time(six_units: Path) -> None:
    result = simulate(load(six_units, ["fsdp.runtime=fsdp1", "training.read_loss=true"]))
    tiles = Timeline(result).host
    assert tiles[0].start == 0.0
    assert all(one.end == other.start for one, other in pairwise(tiles))
    blocked = sum(t.end - t.start for t in tiles if t.cause == "rate_limiter" and t.iteration == 2)
    assert blocked == pytest.approx(result.host_blocked["rate_limiter"], rel=1e-12)
    assert {"launch", "rate_limiter", "read_loss"} <= {tile.cause for tile in tiles}


# ---- memory


@given(results(), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_owners_sum_to_the_allocated_level(result: Result, at: int) -> None:
    samples = result.memory.samples
    if not samples:
        return
    at %= len(samples)
    alive = alive_after(samples[: at + 1])
    for owners in (by_category(alive), by_unit(alive)):
        assert sum(owner.allocated for owner in owners) == samples[at].allocated
        assert sum(owner.count for owner in owners) == len(alive)


def test_peak_owners_sum_to_the_peak(six_units: Path) -> None:
    result = simulate(load(six_units))
    peak = explain(result).peak
    assert peak is not None and peak.allocated == result.peak("allocated")
    assert sum(owner.allocated for owner in peak.owners) == peak.allocated
    assert sum(owner.requested for owner in peak.owners) <= peak.requested
    activations = next(o for o in peak.categories if o.category == "activations")
    assert (activations.requested, activations.count) == (6 * 2**30, 6)


def test_without_parameters_there_is_no_peak() -> None:
    assert explain(textbook("overlap")).peak is None


def test_an_out_of_memory_is_explained_and_avoided(six_units: Path) -> None:
    result = simulate(load(six_units, ["hardware.memory=9.5GiB"]))
    found = explain(result)
    oom = found.oom
    assert oom is not None and found.parts == () and found.as_json()["step_time_s"] is None
    assert (oom.buffer, oom.unit, oom.next_op, oom.next_unit) == (
        "saved",
        "head",
        "forward",
        "head",
    )
    assert sum(oom.unusable.values()) + oom.report.allocated == oom.report.reserved
    assert sum(owner.allocated for owner in oom.owners) == oom.report.allocated
    assert oom.missing > 0
    trials = {trial.text: trial for trial in try_remedies(result)}
    assert trials["allocator.expandable_segments=true"].fits
    assert trials["training.activation_checkpointing=full"].fits
    failing = trials["fsdp.sharding_factor=1"]
    assert not failing.fits and failing.step_time is None and failing.oom


# ---- remedies


def test_the_remedy_of_the_chart_without_prefetch() -> None:
    best, *rest = try_remedies(textbook("overlap"))
    assert (best.text, best.step_time) == ("fsdp.backward_prefetch=BACKWARD_PRE", 27.0)
    assert (best.time_gain, best.verdict) == (0.25, "helps")
    assert {trial.verdict for trial in rest} == {"no change"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_remedies_are_valid_different_and_simulated_as_named(runtime: str) -> None:
    result = fsdp_scenarios.run(runtime, 2)
    found = list(remedies(result.scenario, for_oom=True))
    texts = [remedy.text for remedy in found]
    assert len(texts) == len(set(texts)) and texts
    for remedy, trial in zip(found, try_remedies(result), strict=False):
        assert remedy.scenario.fsdp.runtime == runtime
        vary(result.scenario, trial.changes)  # what is named can be loaded
        assert "None" not in trial.text
    trial = try_remedies(result)[-1]
    again = simulate(vary(result.scenario, trial.changes))
    assert (trial.step_time, trial.peak_reserved) == (again.step_time, again.peak("reserved"))


@pytest.mark.parametrize(
    ("strategy", "hybrid"),
    [("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")],
)
def test_sharding_factors_divide_and_change_the_strategy(strategy: str, hybrid: str) -> None:
    scenario = fsdp_scenarios.scenario("fsdp1", fsdp={"sharding_strategy": strategy})
    found = [r for r in remedies(scenario) if r.what == "sharding factor"]
    pairs = [
        (r.changes["fsdp.sharding_factor"], r.changes["fsdp.sharding_strategy"]) for r in found
    ]
    assert pairs == [(1, "NO_SHARD"), (2, hybrid), (4, hybrid)]


def test_every_idea_names_runtimes_and_keys_of_the_schema() -> None:
    for idea in IDEAS:
        for runtime in idea.runtimes:
            scenario = fsdp_scenarios.scenario(runtime, 2)
            for changes in idea.alternatives(scenario):
                try:
                    vary(scenario, changes)
                except ScenarioError as error:
                    assert "unknown key" not in str(error) and "not an option" not in str(error)


# ---- the command


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_json_parts_sum_to_the_step_time(
    capsys: pytest.CaptureFixture[str], six_units: Path
) -> None:
    found = json.loads(explained(capsys, str(six_units), "--json", "--no-remedies"))
    assert sum(part["seconds"] for part in found["parts"]) == found["step_time_s"]
    assert found["remedies"] is None and found["oom"] is None
    assert (
        sum(o["allocated_bytes"] for o in found["peak"]["owners"])
        == (found["peak"]["allocated_bytes"])
    )


def test_same_scenario_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SCENARIOS / "textbook_overlap.toml")
    assert explained(capsys, path, "--json") == explained(capsys, path, "--json")
    assert explained(capsys, path) == explained(capsys, path)


@pytest.mark.parametrize("overrides", [[], ["hardware.memory=9.5GiB"], ["fsdp.runtime=fsdp1"]])
def test_text_fits_a_terminal_of_100_columns(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    six_units: Path,
    overrides: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    sets = [word for override in overrides for word in ("--set", override)]
    text = explained(capsys, str(six_units), *sets)
    assert max(map(len, text.splitlines())) <= 100
    assert "simulated" in text


def test_names_are_not_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "markup.toml"
    text = SIX_UNITS.replace('"layers.0"', '"[red]x[/blue]"')
    path.write_text(f'title = "[bold]t[/]"\n{text}', encoding="utf-8")
    found = explained(capsys, str(path), "--no-remedies")
    assert "[red]x[/blue]" in found and "[bold]t[/]" in found
