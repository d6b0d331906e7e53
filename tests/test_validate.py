"""fsdpsim validate: errors over published runs, statistics, and what is left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.cli import main
from fsdpsim.validate import SkipRow, predict_row, read_measurements, scenario_of
from fsdpsim.validate.statistics import errors_of, is_clean, quantile, slope

DATA = read_measurements()


def _bf16_fsdp(row: dict) -> bool:
    dtype = str(row.get("param_dtype") or "bf16")
    return row.get("fsdp_only", True) and not row.get("float8") and dtype.startswith("bf16")


def test_at_least_85_percent_of_the_clean_rows_are_modelled() -> None:
    rows = [row for row in DATA.rows if is_clean(row) and _bf16_fsdp(row)]
    modelled = 0
    for row in rows:
        try:
            scenario_of(row, DATA)
            modelled += 1
        except SkipRow:
            pass
    assert modelled / len(rows) >= 0.85


def test_the_reason_of_a_skipped_row_does_not_look_at_its_measured_value() -> None:
    for row in DATA.rows:
        try:
            scenario_of(row, DATA)
            reason = None
        except SkipRow as skipped:
            reason = str(skipped)
        other = {**row, "tps_per_gpu": 1.0, "step_time_s": 1.0}
        if reason == "no step time or throughput published":
            continue
        try:
            scenario_of(other, DATA)
            assert reason is None
        except SkipRow as skipped:
            assert str(skipped) == reason


@pytest.mark.slow
def test_the_targets_hold_and_the_trivial_predictor_is_beaten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step, memory = found["overall"]["step_time"], found["overall"]["peak_reserved"]
    trivial = found["trivial"]["step_time"]
    assert step["median_abs_error"] <= 0.05
    assert step["mean_abs_error"] <= 0.08
    assert step["p90_abs_error"] <= 0.15
    assert memory["median_abs_error"] <= 0.08
    for key in ("median_abs_error", "mean_abs_error", "p90_abs_error"):
        assert step[key] < 0.6 * trivial[key]


def test_files_of_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "nemo"
    assert main(["validate", "--only", only, "-j", "1", "-o", str(tmp_path)]) == 0
    assert "peak reserved" in capsys.readouterr().out
    found = json.loads((tmp_path / "validate.json").read_text())
    assert all(only in row["id"] for row in found["rows"])
    lines = (tmp_path / "validate.csv").read_text().splitlines()
    assert len(lines) == len(found["rows"]) + 1
    assert (tmp_path / "validate.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_user_refer_to_the_shipped_tables(tmp_path: Path) -> None:
    row = next(r for r in DATA.rows if is_clean(r) and not r["id"].startswith("tt"))
    (tmp_path / "rows.json").write_text(json.dumps([row]), encoding="utf-8-sig")
    assert read_measurements(tmp_path / "rows.json").models == DATA.models


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": 3}'])
def test_a_file_that_holds_no_rows(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert main(["validate", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("hw", None), ("n_gpus", 0), ("tps_per_gpu", "fast"), ("strategy", 3), ("seq_len", True)],
)
def test_a_field_of_a_wrong_type_is_named(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([DATA.rows[0], {**DATA.rows[1], key: value}]))
    assert main(["validate", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"rows[1] ({DATA.rows[1]['id']}): {key}: " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "fields",
    [{"strategy": None}, {"strategy": "all of it"}, {"shard_factor": 3}, {"n_gpus": "8-16"}],
)
def test_a_row_that_cannot_be_a_scenario_is_skipped(fields: dict[str, object]) -> None:
    row = next(r for r in DATA.rows if r["impl"] == "FSDP1" and is_clean(r) and _bf16_fsdp(r))
    assert predict_row(DATA, {**row, **fields}).skipped


def test_a_row_without_activation_checkpointing_is_skipped() -> None:
    row = {**DATA.rows[0], "act_ckpt": None}
    outcome = predict_row(DATA, row)
    assert outcome.prediction is None
    assert "checkpointing" in outcome.skipped


def test_statistics() -> None:
    errors = errors_of([0.1, -0.3, None, 0.2])
    assert (errors.n, errors.median_abs_error, errors.max_abs_error) == (3, 0.2, 0.3)
    assert errors.mean_abs_error == pytest.approx(0.2)
    assert errors.bias == pytest.approx(0.0)
    assert errors_of([None]).median_abs_error is None
    assert quantile([0.0, 1.0], 0.9) == 0.9


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_the_slope_of_a_line(a: float, b: float) -> None:
    assert slope([(x, a + b * x) for x in (1.0, 2.0, 5.0)]) == pytest.approx(b, abs=1e-9)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups on this system")
@pytest.mark.parametrize("command", [["validate"], ["validate", "--fit"]])
@pytest.mark.parametrize("seconds", [0.6, 2])
def test_ctrl_c_is_one_line_whatever_the_workers_do(command: list[str], seconds: float) -> None:
    """They still import their modules after the shorter time."""
    code = (
        "import sys; from fsdpsim.cli import main; import fsdpsim.validate\n"
        "if __name__ == '__main__': print(flush=True); sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command, "-j", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "fsdpsim: interrupted\n")
