"""``fsdpsim run -o DIR``: what is written, that it agrees, and that it is the same every time."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trace_rules import violations

from fsdpsim.cli import main
from fsdpsim.order import host_order
from fsdpsim.outputs import MEMORY_COLUMNS, OP_COLUMNS, distinct, table, write_all, write_everything
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate
from fsdpsim.summary import summary

ROOT = Path(__file__).parents[1]
PREFETCH = ROOT / "scenarios" / "textbook_backward_prefetch.toml"
FILES = {
    "summary.json",
    "ops.csv",
    "memory.csv",
    "order.json",
    "trace.json.gz",
    "snapshot.pickle",
    "gantt.png",
}


@pytest.fixture(scope="module")
def result() -> Result:
    """Two FSDP2 units with names that CSV and JSON must not trip over."""
    units = [
        {"name": name, "params": [{"name": "w", "shape": [4096, 4]}]}
        for name in ('a,"b"', "c;d=1+1")
    ]
    seconds = {"forward": 1.0, "backward": 2.0, "all_gather": 0.1, "reduce_scatter": 0.1}
    return simulate(
        load(
            {
                "title": 'comma, "quote"',
                "workload": {"units": units, **seconds, "activations": "1 MiB"},
                "hardware": {"gpus_per_node": 2},
                "training": {"iterations": 2, "param_dtype": "bfloat16"},
                "fsdp": {"runtime": "fsdp2"},
            }
        )
    )


@pytest.fixture(scope="module")
def folder(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "deep" / "folder"
    write_everything(result, path)
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_everything_is_there_and_nothing_else(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES


def test_summary_is_what_json_prints(folder: Path, result: Result) -> None:
    assert json.loads((folder / "summary.json").read_text()) == summary(result)


def test_ops_have_their_times(folder: Path, result: Result) -> None:
    found = rows(folder / "ops.csv")
    assert tuple(found[0]) == OP_COLUMNS
    assert [
        (int(r["op"]), r["name"], r["unit"], float(r["start_s"]), float(r["end_s"])) for r in found
    ] == [(i, op.name, op.unit, op.start, op.end) for i, op in enumerate(result.ops)]


def test_ops_say_what_collectives_move(folder: Path, result: Result) -> None:
    found = [r for r in rows(folder / "ops.csv") if r["kind"] == "all_gather"]
    assert len(found) == result.collectives["all_gather"].count * 2
    assert {(r["nbytes"], r["group_size"], r["dtype"]) for r in found} == {
        ("32768", "2", "bfloat16")
    }
    assert {r["trigger"] for r in found} == {"demand", "prefetch"}


def test_memory_has_every_level(folder: Path, result: Result) -> None:
    found = rows(folder / "memory.csv")
    assert tuple(found[0]) == MEMORY_COLUMNS
    for level in ("requested", "allocated", "active", "reserved"):
        written = [int(r[f"{level}_bytes"]) for r in found]
        assert written == [getattr(s, level) for s in result.memory.samples]
    assert [r["event"] == "malloc" for r in found] == [s.is_malloc for s in result.memory.samples]


def test_text_is_quoted_for_csv() -> None:
    names = ('a,"b"', "c\nd", "層", "")
    written = table(("name", "seconds"), [(name, 0.1 + 0.2) for name in names])
    assert [row["name"] for row in csv.DictReader(io.StringIO(written, newline=""))] == [*names]
    assert written.count("0.30000000000000004\n") == len(names)


def test_order_is_that_of_the_last_iteration(folder: Path, result: Result) -> None:
    assert json.loads((folder / "order.json").read_text()) == host_order(result.program, 1)


def test_trace_chart_and_snapshot_are_of_their_kind(folder: Path) -> None:
    text = gzip.decompress((folder / "trace.json.gz").read_bytes()).decode()
    assert violations(json.loads(text), text) == []
    assert (folder / "gantt.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    snapshot = pickle.loads((folder / "snapshot.pickle").read_bytes())
    assert snapshot["device_traces"][0]


def test_out_of_memory_is_written_too(tmp_path: Path) -> None:
    overrides = [
        'model.hf_config="models/llama3.2_1b.json"',
        "model.num_hidden_layers=2",
        "training.iterations=2",
        'hardware.memory="5 GB"',
    ]
    failed = simulate(load(ROOT / "scenarios" / "llama3_8b_8xh100.toml", overrides))
    assert failed.memory.oom is not None
    write_everything(failed, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert json.loads((tmp_path / "summary.json").read_text())["oom"]["what"]


def test_several_results_get_a_folder_each(tmp_path: Path, result: Result) -> None:
    write_all([result, result], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"scenario", "scenario-2"}


def test_folders_are_distinct_and_inside() -> None:
    assert distinct(["a", "b", "a", "a-2", "a"]) == ["a", "b", "a-2", "a-2-2", "a-3"]
    assert distinct(["..", "."]) == ["scenario", "scenario-2"]


def test_the_same_scenario_gives_the_same_bytes(tmp_path: Path) -> None:
    """In another process too, with another order of hashes."""
    command = [sys.executable, "-m", "fsdpsim", "run", str(PREFETCH), "-o", str(tmp_path / "1")]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
    assert main(["run", str(PREFETCH), "-o", str(tmp_path / "2")]) == 0
    for name in FILES:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_an_unwritable_place_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["run", str(PREFETCH), "-o", str(blocked / "dir")]) == 2
    captured: Any = capsys.readouterr()
    assert "cannot be made a directory" in captured.err
    assert "Traceback" not in captured.err
