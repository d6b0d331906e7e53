"""``fsdpsim replay`` on a snapshot that ``fsdpsim snapshot`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fsdp_scenarios import tables

from fsdpsim.cli import main
from fsdpsim.resolved import as_toml


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(as_toml(tables("fsdp2", 4, parameters=1 << 22)), encoding="utf-8")
    path = tmp_path / "snap.pickle"
    assert main(["snapshot", str(scenario), "-o", str(path)]) == 0
    return path


def test_it_replays_our_own_snapshot_exactly(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["replay", str(snapshot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True


def test_it_shows_what_other_settings_would_have_given(
    snapshot: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    arguments = ["--set", "allocator.expandable_segments=true", "--json"]
    assert main(["replay", str(snapshot), *arguments]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert device["what_if"]["peak_reserved_bytes"] > 0
    assert main(["replay", str(snapshot), *arguments[:2]]) == 0
    assert "with the new settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "allocator.expandable=true"], "expandable"),
        (["--set", "hardware.memory=1GiB"], "only the keys of [allocator]"),
        (["--set", "nonsense"], "nonsense"),
        (["--capacity", "ten"], "--capacity"),
        (["--capacity", "0"], "--capacity: '0' is not allowed; it must be more than zero"),
        (["--set", "allocator.per_process_memory_fraction=0.5"], "give --total-memory SIZE too"),
    ],
)
def test_mistakes_are_one_message(
    snapshot: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["replay", str(snapshot), *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_a_capacity_needs_no_other_setting(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["replay", str(snapshot), "--capacity", "50 MB", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert (
        device["recorded"]["peak_reserved_bytes"] > 50e6 >= device["fresh"]["peak_reserved_bytes"]
    )
    assert device["fresh"]["num_ooms"] > 0
    assert device["what_if"] is None
    assert device["notes"] == [
        "50000000 bytes can be allocated in runs with nothing cached at the start"
    ]


def test_a_fraction_is_said_to_be_the_limit(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    fraction = "allocator.per_process_memory_fraction=0.5"
    arguments = ["--set", fraction, "--total-memory", "100 MB", "--json"]
    assert main(["replay", str(snapshot), *arguments]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert device["what_if"]["num_ooms"] > 0
    assert device["notes"] == [
        "the capacity of the device is not in a snapshot: the memory fraction is the only limit, "
        "50000000 bytes"
    ]


def test_an_oom_of_a_device_without_room_for_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The context and NCCL leave nothing of 1 GiB."""
    path = tmp_path / "snap.pickle"
    scenario = Path(__file__).parents[1] / "scenarios" / "llama3_8b_8xh100.toml"
    assert main(["snapshot", str(scenario), "--set", "hardware.memory=1 GiB", "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["replay", str(path), "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert (device["capacity_bytes"], device["recorded"]["num_ooms"]) == (0, 1)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04c"])
def test_a_damaged_file_is_one_message(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "snap.pickle"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
