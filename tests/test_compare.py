"""Two results side by side: the changes of all causes sum to the change of the step time."""

from __future__ import annotations

import json
from pathlib import Path

import fsdp_scenarios
import pytest

from fsdpsim.cli import main
from fsdpsim.compare import compare
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"
OVERLAP = str(SCENARIOS / "textbook_overlap.toml")
PREFETCH = str(SCENARIOS / "textbook_backward_prefetch.toml")


def test_the_lectures_two_charts() -> None:
    found = compare(simulate(load(OVERLAP)), simulate(load(PREFETCH)))
    assert [s.key for s in found.settings] == ["fsdp.backward_prefetch"]
    figures = {f.name: (f.a, f.b) for f in found.figures}
    assert figures["step_time_s"] == (36.0, 27.0)
    assert figures["exposed_communication_s"] == (12.0, 3.0)
    changes = {(c.cause, c.waits_for, c.behind): c.change for c in found.causes}
    assert changes["all_gather", "all_gather", ""] == -4.5
    assert changes["queue", "all_gather", "reduce_scatter"] == -4.5
    assert sum(changes.values()) == -9.0


def test_settings_that_only_follow_are_told_from_those_that_are_given() -> None:
    tables = fsdp_scenarios.tables("fsdp2", 2)
    a = load(tables)
    b = load(tables | {"hardware": {"gpu": "A100-SXM-80GB"}})
    found = compare(simulate(a), simulate(b))
    keys = {setting.key for setting in found.settings}
    assert {s.key for s in found.settings if s.given} == {"hardware.gpu"}
    assert {"hardware.peak_flops", "hardware.memory_bandwidth"} < keys


def test_the_same_scenario_has_no_differences() -> None:
    result = simulate(load(OVERLAP))
    found = compare(result, result)
    assert found.settings == ()
    assert all(f.a == f.b for f in found.figures)
    assert all(c.change == 0 for c in found.causes)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", OVERLAP, PREFETCH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(c["change_s"] for c in found["causes"]) == -9.0
    assert found["oom_a"] is None
    step = next(f for f in found["figures"] if f["name"] == "step_time_s")
    assert (step["a"], step["b"]) == (36.0, 27.0)


def test_one_file_is_compared_with_its_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    override = "fsdp.backward_prefetch=BACKWARD_PRE"
    assert main(["compare", OVERLAP, "--set", override]) == 0
    text = capsys.readouterr().out
    assert "B takes 27 s, 25.0% less than A's 36 s." in text


def test_two_files_share_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", OVERLAP, PREFETCH, "--set", "workload.all_gather=3"]) == 0
    assert "workload.all_gather" not in capsys.readouterr().out


def test_one_file_alone_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", OVERLAP]) == 2
    assert "second file" in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "both.doc"
    assert main(["compare", OVERLAP, PREFETCH, "-o", str(path)]) == 2
    assert ".png" in capsys.readouterr().err and not path.exists()


def test_picture_of_both_on_one_time_axis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "both.svg"
    assert main(["compare", OVERLAP, PREFETCH, "-o", str(path)]) == 0
    first = path.read_bytes()
    assert first.startswith(b"<?xml") and b"27 s" in first
    assert main(["compare", OVERLAP, PREFETCH, "-o", str(path)]) == 0
    assert path.read_bytes() == first
    assert capsys.readouterr().out.endswith("both.svg\n")


def test_a_picture_that_cannot_be_written_is_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["compare", OVERLAP, PREFETCH, "-o", str(tmp_path / "file" / "both.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_rounding_leaves_is_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    """The second iteration is the first, at times that round otherwise."""
    file = str(SCENARIOS / "textbook_13b_64gpu.toml")
    assert main(["compare", file, "--set", "training.iterations=2"]) == 0
    text = capsys.readouterr().out
    assert "Both take " in text
    assert " ns" not in text
    found = compare(simulate(load(file)), simulate(load(file, ["training.iterations=2"])))
    assert all(cause.change == 0 for cause in found.causes)


@pytest.mark.parametrize(
    ("override", "row"),
    [
        ('hardware.memory="40 GiB"', "hardware.memory 79.18 GiB 40.00 GiB"),
        ("hardware.memory=85018877623", "hardware.memory 85018877624 85018877623"),
        (
            'hardware.inter_node_bandwidth="1 Gb/s"',
            "hardware.inter_node_bandwidth 50 GB/s 125 MB/s",
        ),
        ('hardware.host.kernel_launch="2 us"', "hardware.host.kernel_launch 10 us 2 us"),
        ('hardware.peak_flops="1 TFLOP/s"', "hardware.peak_flops 989.4 TFLOP/s 1 TFLOP/s"),
    ],
)
def test_quantities_have_units_unless_they_would_look_alike(
    override: str, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(SCENARIOS / "llama3_8b_8xh100.toml")
    overrides = [override, "training.granularity=units"]
    assert main(["compare", file, *(f"--set={o}" for o in overrides)]) == 0
    assert row in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_quantities_that_a_table_gives_unit_by_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", OVERLAP, "--set", 'workload.forward=["1 s", 2, 2, "3 ms"]']) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "workload.forward 2 s 1 s, 2 s, 2 s, 3 ms" in rows
