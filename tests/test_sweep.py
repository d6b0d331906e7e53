"""Sweeps: the same rows from any executor, kept through interruptions, and the command."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdpsim
from fsdpsim.cli import main
from fsdpsim.files import OutputError
from fsdpsim.resolved import as_toml
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import simulate
from fsdpsim.summary import summary
from fsdpsim.sweeps import Grid, Point, Row, execute, sweep
from fsdpsim.sweeps import point as point_module
from fsdpsim.sweeps.leaders import Leaders, UnknownKeyError
from fsdpsim.sweeps.pareto import ParetoFront
from fsdpsim.sweeps.store import OtherSweepError, Store

GPT2 = Path(__file__).parent.parent / "scenarios" / "models" / "gpt2.json"

TABLES: dict[str, Any] = {
    "title": "four units",
    "workload": {
        "units": 4,
        "parameters": 3_000_000,
        "activations": "8 MiB",
        "tokens": 512,
        "forward": "2 ms",
        "backward": "4 ms",
    },
    "training": {"iterations": 2},
    "fsdp": {"runtime": "fsdp2"},
    "hardware": {"nodes": 2, "gpus_per_node": 4, "memory": "2.3 GB"},
    "sweep": {
        "fsdp.sharding_factor": [1, 2, 3, 4, 8],
        "fsdp.reshard_after_forward": [True, False],
        "fsdp.forward_prefetch": [0, 1],
    },
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load(TABLES)


@pytest.fixture(scope="module")
def rows(scenario: Scenario) -> list[Row]:
    return sweep(scenario)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "four.toml"
    path.write_text(as_toml(TABLES))
    return path


def lines_of(rows: list[Row]) -> list[str]:
    return [row.as_json() for row in rows]


# ---- what a row says


def test_every_row_is_what_run_says_of_that_point(scenario: Scenario, rows: list[Row]) -> None:
    base = {name: table for name, table in TABLES.items() if name != "sweep"}
    assert [row.point for row in rows] == list(range(20))
    for row in rows:
        keys = {key.partition(".")[2]: value for key, value in row.settings.items()}
        if row.status == "invalid":
            assert keys["sharding_factor"] == 3
            assert "does not divide the world size 8" in row.reason
            continue
        figures = summary(simulate(load({**base, "fsdp": {**base["fsdp"], **keys}})))
        for name in ("scenario", "title"):
            del figures[name]
        assert row.figures == json.loads(json.dumps(figures))
        assert (row.status == "oom") == (figures["oom"] is not None)


def test_noise_and_contention_are_simulated_as_run_does() -> None:
    tables = {name: table for name, table in TABLES.items() if name != "sweep"}
    varied = {"noise.jitter": [0.0, 0.2], "hardware.contention": [True, False]}
    for row in sweep(load({**tables, "sweep": varied})):
        overrides = [f"{key}={json.dumps(value)}" for key, value in row.settings.items()]
        assert row.figures["step_time_s"] == simulate(load(tables, overrides)).step_time


def test_out_of_memory_is_a_result_and_invalid_points_have_a_reason(rows: list[Row]) -> None:
    statuses = {row.settings["fsdp.sharding_factor"]: row.status for row in rows}
    assert statuses == {1: "ok", 2: "oom", 3: "invalid", 4: "ok", 8: "ok"}
    lost = next(row for row in rows if row.status == "oom")
    assert lost.reason == "reduce_scatter_output of unit.3 in backward of iteration 2"
    assert lost.figures["peak_reserved_bytes"] > 0
    assert lost.figures["step_time_s"] is None


def test_rows_survive_json(rows: list[Row]) -> None:
    for row in rows:
        assert Row.of_json(row.as_json()) == row
        assert "\n" not in row.as_json()


@pytest.mark.parametrize("line", ["", "{", "1", "[]", '{"point": 1}', "null"])
def test_what_is_no_row_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        Row.of_json(line)


def test_the_function_is_exported() -> None:
    assert fsdpsim.sweep is sweep


# ---- the same from anywhere


class Lazy:
    """The least that ``submit`` may be: everything happens when a result is asked for."""

    class Task:
        def __init__(self, call: Callable[[], Any]) -> None:
            self.call = call

        def result(self) -> Any:
            return self.call()

        def cancel(self) -> None:
            pass

    def submit(self, fn: Callable[..., Any], *args: Any) -> Task:
        return Lazy.Task(lambda: fn(*args))


def test_threads_and_any_object_with_submit_give_the_same(
    scenario: Scenario, rows: list[Row]
) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert lines_of(sweep(scenario, threads)) == lines_of(rows)
    assert lines_of(sweep(scenario, Lazy())) == lines_of(rows)


def test_processes_give_the_same(scenario: Scenario, rows: list[Row]) -> None:
    assert lines_of(sweep(scenario, jobs=2)) == lines_of(rows)
    with ProcessPoolExecutor(2) as processes:
        assert lines_of(sweep(scenario, processes)) == lines_of(rows)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_points_changes_nothing(
    scenario: Scenario, rows: list[Row], seed: int
) -> None:
    points = list(Grid(scenario).points())
    Random(seed).shuffle(points)
    with execute.workers(None, 1) as here:
        found = sorted(here.lines(scenario, points), key=lambda line: Row.of_json(line).point)
    assert found == lines_of(rows)


def test_points_that_share_a_model_share_its_workload_and_nothing_else() -> None:
    tables = {
        "model": {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 512,
        },
        "training": {"iterations": 2, "seq_len": 64},
        "fsdp": {"runtime": "fsdp1"},
        "hardware": {"nodes": 1, "gpus_per_node": 4},
        "sweep": {
            "fsdp.runtime": ["fsdp1", "fsdp2", "ddp"],
            "fsdp.unit": ["block", "model"],
            "training.micro_batch_size": [1, 2],
            "training.granularity": ["kernels", "units"],
            "hardware.gpu": ["H100-SXM-80GB", "A100-SXM-80GB"],
        },
    }
    grid = Grid(load(tables))
    points = list(grid.points())
    Random(0).shuffle(points)
    together = point_module.Simulator(grid.scenario)
    for point in points[:20]:
        alone = point_module.Simulator(grid.scenario)
        assert together.line(point) == alone.line(point)


# ---- what goes wrong


class Crash(point_module.Simulator):
    """Fails, or takes its process with it, at one point."""

    deadly = False

    def _row(self, point: Point) -> Row:
        if point.index == 7:
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("no such luck")
        return super()._row(point)


class DeadlyCrash(Crash):
    deadly = True


def test_a_point_that_fails_does_not_stop_the_rest(
    scenario: Scenario, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "Simulator", Crash)
    found = sweep(scenario)
    assert found[7].status == "failed"
    assert found[7].reason == "ZeroDivisionError: no such luck"
    assert found[7].settings == rows[7].settings
    assert lines_of(found[:7] + found[8:]) == lines_of(rows[:7] + rows[8:])


def test_a_worker_that_dies_takes_only_its_own_point_along(
    scenario: Scenario, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_module, "Simulator", DeadlyCrash)
    point_module._simulator.cache_clear()
    found = sweep(scenario, jobs=2)
    point_module._simulator.cache_clear()
    assert found[7].status == "failed"
    assert "its worker died" in found[7].reason
    assert lines_of(found[:7] + found[8:]) == lines_of(rows[:7] + rows[8:])


def test_a_task_that_an_executor_loses_is_run_again(scenario: Scenario, rows: list[Row]) -> None:
    class Forgetful(Lazy):
        count = 0

        def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
            self.count += 1
            if self.count == 2:
                lost: Future[Any] = Future()
                lost.set_exception(ConnectionError("worker gone"))
                return lost
            return super().submit(fn, *args)

    assert lines_of(sweep(scenario, Forgetful())) == lines_of(rows)


# ---- the directory


def test_a_directory_holds_every_row_and_a_table(
    scenario: Scenario, rows: list[Row], tmp_path: Path
) -> None:
    assert sweep(scenario, directory=tmp_path) == rows
    assert (tmp_path / "results.jsonl").read_text() == "".join(f"{x}\n" for x in lines_of(rows))
    with (tmp_path / "results.csv").open(newline="") as table:
        cells = list(csv.DictReader(table))
    assert len(cells) == len(rows)
    for row, found in zip(rows, cells, strict=True):
        assert (
            found["fsdp.reshard_after_forward"]
            == str(row.settings["fsdp.reshard_after_forward"]).lower()
        )
        assert found["status"] == row.status
        if row.status == "ok":
            assert float(found["step_time_s"]) == row.figures["step_time_s"]
            gathers = row.get("collectives.all_gather.count")  # none with F = 1
            assert found["collectives.all_gather.count"] == (
                "" if gathers is None else str(gathers)
            )
            assert found["iteration_times_s.1"] == repr(row.figures["iteration_times_s"][1])


@given(cut=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_whatever_was_written_when_it_was_killed_it_ends_the_same(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    scenario = load({**TABLES, "sweep": {"fsdp.sharding_factor": [2, 3, 4]}})
    whole = tmp_path_factory.mktemp("whole")
    sweep(scenario, directory=whole)
    data = (whole / "results.jsonl").read_bytes()
    torn = tmp_path_factory.mktemp("torn")
    (torn / "sweep.json").write_bytes((whole / "sweep.json").read_bytes())
    (torn / "results.jsonl").write_bytes(data[: cut % (len(data) + 1)])
    sweep(scenario, directory=torn)
    for name in ("results.jsonl", "results.csv", "sweep.json"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_killed_at_any_moment_a_second_run_goes_on(file: Path, tmp_path: Path, jobs: str) -> None:
    slow = ["--set", 'sweep."training.iterations"={first=1, last=3, step=1}']
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["sweep", str(file), *slow, "-o", str(whole)]) == 0
    command = [sys.executable, "-m", "fsdpsim", "sweep", str(file), *slow, "-j", jobs]
    process = subprocess.Popen([*command, "-o", str(killed)], stdout=subprocess.DEVNULL)
    rows = killed / "results.jsonl"
    while process.poll() is None and not (rows.exists() and rows.stat().st_size > 20_000):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    size = rows.stat().st_size
    assert 0 < size < (whole / "results.jsonl").stat().st_size
    assert main(["sweep", str(file), *slow, "-j", jobs, "-o", str(killed)]) == 0
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in killed.iterdir()) == names
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_finished_sweep_runs_nothing_again(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sweep(scenario, directory=tmp_path)
    monkeypatch.setattr(execute, "Simulator", None)
    assert sweep(scenario, directory=tmp_path, jobs=1) == first


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workload.forward", "3 ms", "workload.forward: 0.002 then, 0.003 now"),
        ("training.iterations", 3, "training.iterations: 2 then, 3 now"),
        ("sweep.where", ["fsdp.forward_prefetch == 0"], "sweep.where.0: None then"),
        ('sweep."fsdp.forward_prefetch"', [0, 2], "1 then, 2 now"),
    ],
)
def test_a_changed_scenario_is_refused(
    scenario: Scenario, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    sweep(scenario, directory=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = load(TABLES, [f"{key}={json.dumps(value)}"])
    with pytest.raises(OtherSweepError) as error:
        sweep(changed, directory=tmp_path)
    assert words in str(error.value)
    assert "--restart" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(sweep(changed, directory=tmp_path, restart=True)) == len(
        list(Grid(changed).points())
    )


def test_another_version_is_refused(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(scenario, directory=tmp_path)
    monkeypatch.setattr("fsdpsim.sweeps.store.__version__", "9.9")
    with pytest.raises(OtherSweepError, match=r"fsdpsim: .* then, 9\.9 now"):
        sweep(scenario, directory=tmp_path)


def test_a_changed_model_file_is_noticed(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 128,
    }
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps(config))
    tables = {
        "model": {"hf_config": str(paths[0])},
        "training": {"iterations": 1, "seq_len": 16},
        "fsdp": {"runtime": "fsdp2"},
        "sweep": {"model.hf_config": [str(path) for path in paths]},
    }
    sweep(load(tables), directory=tmp_path / "out")
    paths[1].write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(OtherSweepError, match="model_files"):
        sweep(load(tables), directory=tmp_path / "out")


def test_rows_of_unknown_origin_are_refused(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(OtherSweepError, match=r"without sweep\.json"):
        sweep(scenario, directory=tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(OtherSweepError, match=r"unreadable sweep\.json"):
        sweep(scenario, directory=tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == "{}\n"


def test_two_sweeps_cannot_write_to_one_directory(scenario: Scenario, tmp_path: Path) -> None:
    hold = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fsdpsim.sweeps.store import _locked\n"
        "lock = _locked(Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(OutputError, match="another sweep is writing there now"):
            sweep(scenario, directory=tmp_path)
        other.kill()
    assert len(sweep(scenario, directory=tmp_path)) == 20


def test_a_directory_that_cannot_be_one_is_a_clear_error(
    scenario: Scenario, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made a directory"):
        sweep(scenario, directory=tmp_path / "file")


def test_memory_does_not_grow_with_the_rows(scenario: Scenario, tmp_path: Path) -> None:
    grid = Grid(scenario)
    leaders = Leaders(sort="step_time_s", top=3, front=ParetoFront("step_time_s"))
    with execute.workers(None, 1) as here, Store(tmp_path, grid) as store:
        rows = [Row.of_json(line) for line in here.lines(scenario, grid.points())]
        for _ in range(50):
            for row in rows:
                leaders.add(row)
        store.write_csv()
    assert len(leaders.rows) <= 6
    assert len(leaders.rejected) <= 10
    assert leaders.counts.total() == 50 * len(rows)


# ---- best rows and the front


def row_of(point: int, step: float, memory: int, status: Any = "ok") -> Row:
    figures = {"step_time_s": step, "peak_reserved_bytes": memory}
    return Row(point=point, settings={"k": point}, status=status, figures=figures)


places = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=20)


@given(places)
def test_front_holds_exactly_what_no_other_point_beats(found: list[tuple[int, int]]) -> None:
    rows = [row_of(i, step, memory) for i, (step, memory) in enumerate(found)]
    front = ParetoFront("step_time_s")
    for row in rows:
        front.add(row)
    expected = [
        row.point
        for row, (step, memory) in zip(rows, found, strict=True)
        if not any(s <= step and m <= memory and (s, m) != (step, memory) for s, m in found)
    ]
    assert sorted(row.point for row in front) == expected
    times = [row.figures["step_time_s"] for row in front]
    assert times == sorted(times)


@given(places, st.integers(1, 5), st.sampled_from(["step_time_s", "-step_time_s", "k"]))
def test_leaders_are_the_first_of_all(found: list[tuple[int, int]], top: int, sort: str) -> None:
    rows = [row_of(i, step, memory) for i, (step, memory) in enumerate(found)]
    leaders = Leaders(sort=sort, top=top, front=ParetoFront("step_time_s"))
    for row in rows:
        leaders.add(row)
    sign = -1 if sort.startswith("-") else 1
    expected = sorted(rows, key=lambda r: (sign * r.get(sort.removeprefix("-")), r.point))
    assert leaders.best() == expected[:top]


def test_sorting_by_what_no_row_has_says_what_there_is() -> None:
    leaders = Leaders(sort="step_tme_s", top=3, front=ParetoFront("step_time_s"))
    with pytest.raises(UnknownKeyError, match="did you mean step_time_s"):
        leaders.add(row_of(0, 1.0, 1))


# ---- commands


def test_the_command_prints_the_best_the_rejected_and_what_it_wrote(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(file), "-o", str(tmp_path / "out"), "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "four units: 20 points; 12 ran, 4 out of memory, 4 invalid" in text
    assert "invalid: fsdp.sharding_factor = 3, fsdp.reshard_after_forward = true" in text
    for name in ("results.jsonl", "results.csv", "pareto.png"):
        assert f"wrote {tmp_path / 'out' / name}" in text
        assert (tmp_path / "out" / name).stat().st_size > 500
    assert len([line for line in text.splitlines() if " ms " in line]) == 3


def test_json_holds_every_row(
    file: Path, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(file), "--json", "--sort", "peak_reserved_bytes"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"ok": 12, "oom": 4, "invalid": 4, "failed": 0}
    assert found["rows"] == [json.loads(row.as_json()) for row in rows]
    ok = [row for row in rows if row.status == "ok"]
    smallest = min(ok, key=lambda row: (row.figures["peak_reserved_bytes"], row.point))
    assert found["best"][0] == smallest.point
    assert smallest.figures["peak_reserved_bytes"] in [
        rows[point].figures["peak_reserved_bytes"] for point in found["pareto"]
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sort", "step_tme_s"], "did you mean step_time_s"),
        (["--restart"], "give the directory too"),
        (["--set", 'sweep."fsdp.unt"=[1]'], "did you mean unit?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["sweep", str(file), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["-j", "0"], ["--top", "x"], ["-j", "2", "--dask", "a:1"]])
def test_wrong_arguments_are_usage_errors(file: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["sweep", str(file), *arguments])
    assert error.value.code == 2


def test_a_scenario_without_a_sweep_says_how_to_write_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(as_toml({name: table for name, table in TABLES.items() if name != "sweep"}))
    assert main(["sweep", str(path)]) == 2
    assert "has no [sweep] table" in capsys.readouterr().err


def test_a_constraint_alone_leaves_nothing_to_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tune`` takes it: the table is no mistake as such."""
    path = tmp_path / "plain.toml"
    path.write_text(as_toml({**TABLES, "sweep": {"where": ["fsdp.sharding_factor > 1"]}}))
    assert main(["sweep", str(path)]) == 2
    assert f"{path}: sweep: varies nothing; write for example" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ("[1]", "four units: 1 point; 1 ran"),
        ("[3]", "four units: 1 point; nothing ran: 1 invalid"),
        ("[3, 5]", "four units: 2 points; nothing ran: 2 invalid"),
    ],
)
def test_the_headline_counts_what_ran(
    factors: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(as_toml({name: table for name, table in TABLES.items() if name != "sweep"}))
    arguments = ["--set", f'sweep={{"fsdp.sharding_factor" = {factors}}}']
    assert main(["sweep", str(path), *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == words


@pytest.mark.parametrize("key", ["fsdp.unshard_early", "fsdp.overrides"])
@pytest.mark.parametrize("order", [1, -1])
def test_units_that_a_point_names_must_exist_wherever_it_stands(key: str, order: int) -> None:
    """Points share workloads, whose cache knows nothing of these names."""
    values: dict[str, list[Any]] = {
        "fsdp.unshard_early": [["layers.0"], ["nonexistent"]],
        "fsdp.overrides": [{"layers.0": {"reshard_after_forward": False}}, {"nonexistent": {}}],
    }
    model = {"hf_config": str(GPT2)}
    tables = {
        "model": model,
        "fsdp": {"runtime": "fsdp2"},
        "hardware": {"gpus_per_node": 2},
        "training": {"seq_len": 64, "iterations": 1},
        "sweep": {key: values[key][::order]},
    }
    rows = sweep(load(tables))
    assert [row.status for row in rows] == ["ok", "invalid"][::order]


def test_without_marks_the_figures_are_the_same(scenario: Scenario) -> None:
    assert summary(simulate(scenario, marks=False)) == summary(simulate(scenario))
