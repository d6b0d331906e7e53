"""``fsdpsim tune``: bounds that never exceed a simulation, and the best of the full product."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import read_recording, scenario_of

from fsdpsim.cli import main
from fsdpsim.resolved import as_toml
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, ScenarioError, load
from fsdpsim.scenario.runtimes import RUNTIMES
from fsdpsim.scenario.sweep_table import Axis
from fsdpsim.simulate import build_costs, build_workload, simulate
from fsdpsim.sweeps import Grid, Row, tune
from fsdpsim.sweeps.api import run_points
from fsdpsim.sweeps.bounds import LowerBounds, lower_bounds
from fsdpsim.sweeps.execute import workers
from fsdpsim.sweeps.space import search_axes, sharding_factors
from fsdpsim.sweeps.tune import Tuned

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 2048,
}
SMALL: dict[str, Any] = {
    "model": MODEL,
    "training": {"iterations": 2, "seq_len": 256, "granularity": "units"},
    "fsdp": {"runtime": "fsdp2"},
    "hardware": {"nodes": 2, "gpus_per_node": 2, "context_memory": 0, "nccl_memory": 0},
}


def bounds_of(scenario: Scenario) -> LowerBounds:
    costs = build_costs(scenario)
    return lower_bounds(scenario, build_workload(scenario, costs), costs)


def check_bounds(scenario: Scenario) -> Result:
    bounds, result = bounds_of(scenario), simulate(scenario)
    assert result.memory.oom is None
    assert bounds.step_time <= result.step_time * (1 + 1e-12)
    assert bounds.peak_bytes <= result.peak("requested")
    if result.tokens_per_second is not None:
        assert bounds.tokens == round(result.tokens_per_second * result.step_time)
    return result


# ---- bounds


def test_bounds_hold_for_every_recorded_run_of_torch(golden: list[Path]) -> None:
    for path in golden:
        check_bounds(scenario_of(read_recording(path)))


def test_no_work_of_an_iteration_starts_before_all_of_the_last_has_ended(
    golden: list[Path],
) -> None:
    for path in golden:
        result = simulate(scenario_of(read_recording(path)))
        for iteration, end in enumerate(result.iteration_ends[:-1]):
            later = (op.start for op in result.ops if op.iteration > iteration)
            assert min(later) >= end - 1e-9, path.name


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> list[Path]:
    paths = sorted(request.config.getoption("--golden-dir").glob("*.json"))
    if not paths:
        pytest.skip("no recordings")
    return [path for path in paths if "iterations" in json.loads(path.read_text())][::3]


runtimes = st.one_of(
    st.fixed_dictionaries(
        {
            "runtime": st.just("fsdp1"),
            "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
            "forward_prefetch": st.booleans(),
            "limit_all_gathers": st.booleans(),
            "sharding_factor": st.sampled_from([1, 2, 4]),
            "unit": st.sampled_from(["block", "model", "linear"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "runtime": st.just("fsdp2"),
            "reshard_after_forward": st.booleans(),
            "forward_prefetch": st.integers(0, 2),
            "sharding_factor": st.sampled_from([1, 2, 4]),
            "unit": st.sampled_from(["block", "sublayer", "linear"]),
            "wrap_head": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"runtime": st.just("ddp"), "bucket_cap_mb": st.sampled_from([1, 25])}),
)


trainings = st.fixed_dictionaries(
    {
        "iterations": st.integers(1, 3),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        "granularity": st.sampled_from(["kernels", "units"]),
        "seq_len": st.sampled_from([64, 256]),
        "optimizer": st.sampled_from(["adamw", "sgd", "none"]),
        "gradient_accumulation_steps": st.integers(1, 2),
        "frozen": st.sampled_from([[], ["model.layers.0.*"], ["*embed*"]]),
    }
)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_bounds_hold_for_random_configurations(data: st.DataObject) -> None:
    fsdp, training = data.draw(runtimes), data.draw(trainings)
    check_bounds(load({**SMALL, "fsdp": fsdp, "training": training}))


@given(
    limit=st.sampled_from([False, 1, 2, 3]),
    reshard_last_unit=st.booleans(),
    overlap=st.booleans(),
    iterations=st.integers(1, 3),
    optimizer=st.sampled_from([0.0, 5.0]),
    gather=st.floats(0.1, 9.0),
    checkpointing=st.sampled_from(["none", "full"]),
)
@settings(max_examples=30, deadline=None)
def test_bounds_hold_for_the_lectures_runtime(
    limit: Any,
    reshard_last_unit: bool,
    overlap: bool,
    iterations: int,
    optimizer: float,
    gather: float,
    checkpointing: str,
) -> None:
    workload = {
        "units": 3,
        "parameters": [512, 1024, 2048],
        "forward": 2.0,
        "all_gather": gather,
        "reduce_scatter": 1.5,
        "optimizer": optimizer,
        "activations": [100, 200, 300],
    }
    fsdp = {
        "runtime": "textbook",
        "limit_all_gathers": limit,
        "reshard_last_unit": reshard_last_unit,
        "overlap": overlap,
    }
    training = {"iterations": iterations, "activation_checkpointing": checkpointing}
    check_bounds(load({"workload": workload, "fsdp": fsdp, "training": training}))


@pytest.mark.parametrize(
    "more",
    [
        {"noise": {"jitter": 0.3}},
        {"noise": {"jitter": 0.9, "seed": 3}},
        {"noise": {"stragglers": {0: 2.0}}},
        {"noise": {"stragglers": {3: 1.5}}},
        {"hardware": {**SMALL["hardware"], "contention": True}},
        {"fsdp": {"runtime": "fsdp2", "offload_policy": "cpu"}},
        {"fsdp": {"runtime": "fsdp1", "cpu_offload": True}},
        {"fsdp": {"runtime": "fsdp2", "all_gather_dtype": "int8"}},
        {"fsdp": {"runtime": "zero1"}},
        {"fsdp": {"runtime": "zero2"}},
        {"fsdp": {"runtime": "zero_offload", "delayed_parameter_update": True}},
    ],
)
def test_bounds_hold_where_the_step_is_not_as_simple(more: dict[str, Any]) -> None:
    check_bounds(load({**SMALL, **more}))


def test_bounds_are_close_where_compute_or_communication_is_all() -> None:
    slow = {**SMALL["hardware"], "inter_node_bandwidth": "100 MB/s"}
    scenario = load({**SMALL, "hardware": slow})
    assert bounds_of(scenario).step_time > 0.9 * simulate(scenario).step_time
    alone = load({**SMALL, "hardware": {"gpus_per_node": 1}})
    busy = simulate(alone)
    kernels = sum(
        op.seconds
        for op in busy.ops
        if op.iteration == 1 and op.kind in ("forward", "recompute", "backward")
    )
    assert bounds_of(alone).step_time == pytest.approx(kernels, rel=1e-12)


def test_the_first_recording_of_the_lecture_needs_what_the_bound_says() -> None:
    """Shard, state and the largest unit with its gradient: a single unit leaves nothing else."""
    scenario = load(
        {
            "workload": {"units": 1, "parameters": 1000 * 512, "forward": 1.0},
            "training": {"optimizer_state_bytes": 8},
            "fsdp": {"runtime": "textbook"},
            "hardware": {"nodes": 1, "gpus_per_node": 8},
        }
    )
    result = check_bounds(scenario)
    shard, whole = 4 * 1000 * 512 // 8, 4 * 1000 * 512
    assert bounds_of(scenario).peak_bytes == shard + 2 * shard + 2 * whole
    assert result.peak("requested") == shard + 2 * shard + 2 * whole + shard


# ---- the search


def small_axes(**more: list[Any]) -> tuple[Axis, ...]:
    choices = {
        "fsdp.unit": ["model", {"blocks": 2}, "block"],
        "training.micro_batch_size": [1, 4],
        "training.activation_checkpointing": ["none", "full"],
        "fsdp.sharding_factor": [1, 2, 4],
        "fsdp.reshard_after_forward": [True, False],
        **more,
    }
    return tuple(
        Axis(keys=(key,), rows=tuple((v,) for v in values)) for key, values in choices.items()
    )


def full_product(scenario: Scenario, memory: int) -> list[Row]:
    device = Axis(keys=("hardware.memory",), rows=((memory,),))
    grid = Grid(scenario, (device, *small_axes()))
    with workers(None, 1) as here:
        rows = list(run_points(grid, grid.points(), here))
    assert len(rows) == 72
    best: dict[tuple[float, int], Row] = {}
    for row in rows:
        if row.status == "ok":
            figures = row.figures
            place = (1 / figures["tokens_per_s_per_gpu"], figures["peak_reserved_bytes"])
            best.setdefault(place, row)
    return [best[place] for place in sorted(best)]


@pytest.mark.parametrize("memory", [2**31, 80 * 2**20, 40 * 2**20])
def test_the_best_and_its_runners_up_are_those_of_the_full_product(memory: int) -> None:
    scenario = load(SMALL)
    expected = full_product(scenario, memory)
    found = tune.tune(scenario, memory=memory, axes=small_axes(), keep=4)
    kept = ([found.best] if found.best else []) + list(found.runners_up)
    assert [row.point for row in kept] == [row.point for row in expected[:4]]
    assert kept == expected[:4]
    dropped = found.too_large + found.too_slow + found.invalid + found.left_out
    assert found.points == 72 == found.simulated + dropped


def test_pruning_saves_simulations() -> None:
    """Where communication is slow, small F wins by far and large F need not be simulated."""
    slow = {**SMALL["hardware"], "inter_node_bandwidth": "10 MB/s"}
    found = tune.tune(load({**SMALL, "hardware": slow}), memory=2**31, axes=small_axes(), keep=1)
    assert found.best is not None
    assert found.too_slow > 20
    tight = tune.tune(load(SMALL), memory=40 * 2**20, axes=small_axes(), keep=1)
    assert tight.too_large > 10


def test_the_number_of_workers_changes_nothing() -> None:
    scenario = load(SMALL)
    alone = tune.tune(scenario, memory=80 * 2**20, axes=small_axes())
    assert tune.tune(scenario, memory=80 * 2**20, axes=small_axes(), jobs=2) == alone


def test_what_each_choice_costs_is_the_best_with_one_choice_changed() -> None:
    found = tune.tune(load(SMALL), memory=2**31, axes=small_axes())
    assert found.best is not None
    assert len(found.alternatives) == 2 + 1 + 1 + 2 + 1
    for other in found.alternatives:
        assert other.row.settings == {**found.best.settings, **other.settings}
        assert [found.best.settings[key] != v for key, v in other.settings.items()] == [True]


def test_when_nothing_fits_the_closest_is_named() -> None:
    found = tune.tune(load(SMALL), memory=2**20, axes=small_axes())
    assert found.best is None
    assert found.simulated == 0
    assert found.too_large == found.points
    assert found.smallest is not None
    assert found.smallest.status == "oom"
    grid = Grid(load(SMALL), small_axes())
    with workers(None, 1) as here:
        every = [row for row in run_points(grid, grid.points(), here) if row.figures]
    needed = min(row.figures["peak_allocated_bytes"] for row in every)
    assert found.smallest_bytes == needed
    (same,) = [row for row in every if row.settings == _without_memory(found.smallest.settings)]
    assert same.figures["peak_allocated_bytes"] == needed


def _without_memory(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "hardware.memory"}


def test_constraints_of_the_sweep_table_hold_and_its_axes_replace_the_default_ones() -> None:
    scenario = load(
        {
            **SMALL,
            "sweep": {
                "fsdp.sharding_factor": [2, 4],
                "where": "training.micro_batch_size * fsdp.sharding_factor <= 4",
            },
        }
    )
    axes = {axis.keys[0]: axis for axis in search_axes(scenario)}
    assert axes["fsdp.sharding_factor"].rows == ((2,), (4,))
    assert "fsdp.unit" in axes
    found = tune.tune(
        scenario,
        memory=2**31,
        axes=(axes["fsdp.sharding_factor"], axes["training.micro_batch_size"]),
    )
    assert found.best is not None
    assert (found.points, found.left_out) == (10, 7)
    kept = (found.best, *found.runners_up)
    assert all(
        row.settings["training.micro_batch_size"] * row.settings["fsdp.sharding_factor"] <= 4
        for row in kept
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_point_of_the_default_search_is_valid(runtime: str) -> None:
    tables = dict(SMALL)
    if runtime == "textbook":
        del tables["model"]
        tables["workload"] = {"units": 3, "forward": 1.0, "activations": 100}
    scenario = load({**tables, "fsdp": {"runtime": runtime}})
    grid = Grid(scenario, search_axes(scenario))
    assert len(grid) >= 24
    for index in range(0, len(grid), max(len(grid) // 97, 1)):
        grid.variations.at(grid.settings(index))


@pytest.mark.parametrize(
    ("nodes", "local", "factors"),
    [(8, 8, (1, 2, 4, 8, 16, 32, 64)), (1, 6, (1, 2, 6)), (3, 4, (1, 2, 4, 12))],
)
def test_sharding_factors_lie_within_a_node_or_over_whole_nodes(
    nodes: int, local: int, factors: tuple[int, ...]
) -> None:
    hardware = {"nodes": nodes, "gpus_per_node": local}
    found = sharding_factors(load({**SMALL, "hardware": hardware}))
    assert found == factors
    assert all(a < b for a, b in pairwise(found))


def test_memory_is_needed() -> None:
    tables = {name: table for name, table in SMALL.items() if name != "hardware"}
    with pytest.raises(ScenarioError, match="give --memory"):
        tune.tune(load(tables))


# ---- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    sweep = {
        "fsdp.unit": ["model", "block"],
        "training.micro_batch_size": [1, 2],
        "training.activation_checkpointing": ["none"],
        "fsdp.forward_prefetch": [0],
        "fsdp.backward_prefetch": [0],
    }
    training = {"iterations": 2, "seq_len": 256}
    path.write_text(as_toml({**SMALL, "title": "small", "training": training, "sweep": sweep}))
    return path


def test_the_command_says_what_is_best_and_what_choices_cost(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(file), "--memory", "1GiB", "--keep", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("small\n36 configurations: ")
    assert "Best: fsdp.unit = " in text
    assert "Simulated kernel by kernel, the best takes " in text
    assert "What each choice costs" in text
    assert "sharding_factor = " in text


def test_json_is_the_whole_outcome(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(file), "--memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(Tuned.__dataclass_fields__)
    assert found["best"]["status"] == found["confirmed"]["status"] == "ok"
    assert found["best"]["settings"]["training.granularity"] == "units"
    assert found["confirmed"]["settings"]["training.granularity"] == "kernels"


def test_nothing_fits_is_an_answer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(file), "--memory", "1 MiB"]) == 0
    assert "nothing fits; closest is " in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["80", "-1GiB", "80 GB/s", "0 B", "much"])
def test_memory_is_a_size(file: Path, memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    if memory == "80":  # bytes: a valid size into which nothing fits
        assert main(["tune", str(file), "--memory", memory]) == 0
        return
    with pytest.raises(SystemExit) as error:
        main(["tune", str(file), f"--memory={memory}"])
    assert error.value.code == 2
    assert "argument --memory" in capsys.readouterr().err
