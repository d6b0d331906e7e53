"""Where output may go: never onto what is read, and only to a name that says what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdpsim.cli import main
from fsdpsim.validate.rows import MEASUREMENTS

SCENARIOS = Path(__file__).parents[1] / "scenarios"
PREFETCH = SCENARIOS / "textbook_backward_prefetch.toml"

#: Command -> the ending of its file.
ENDINGS = {
    "plot": ".png",
    "compare": ".png",
    "report": ".html",
    "trace": ".json",
    "snapshot": ".pickle",
}
#: Command -> a file that it writes into its directory.
MEMBERS = {"run": "summary.json", "sweep": "sweep.json"}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def overrides(command: str) -> list[str]:
    """A second scenario for ``compare``, and something to vary for ``sweep``."""
    return {
        "compare": ["--set", "workload.forward=3 s"],
        "sweep": ["--set", 'sweep={"workload.units" = [2, 3]}'],
    }.get(command, [])


@pytest.mark.parametrize("command", ["trace", "snapshot", "report", "plot"])
@pytest.mark.parametrize(("name", "ending"), [("a.toml", "the ending '.toml'"), ("a", "no ending")])
def test_the_ending_must_be_that_of_what_is_written(
    command: str, name: str, ending: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = shutil.copy(PREFETCH, tmp_path / name)
    message = error_of(capsys, command, scenario, "-o", scenario)
    assert message.startswith(f"fsdpsim: -o {scenario}: {ending}; a ")
    assert f"{ENDINGS[command]}" in message
    assert Path(scenario).read_bytes() == PREFETCH.read_bytes()


@pytest.mark.parametrize("command", ENDINGS)
@pytest.mark.parametrize("linked", [False, True])
def test_the_scenario_is_not_overwritten(
    command: str, linked: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = output = tmp_path / f"scenario{ENDINGS[command]}"
    shutil.copy(PREFETCH, scenario)
    if linked:
        output = tmp_path / f"link{ENDINGS[command]}"
        output.symlink_to(scenario)
    message = error_of(capsys, command, scenario, "-o", output, *overrides(command))
    assert message.startswith(f"fsdpsim: {output}: is read as input, and would be overwritten")
    assert scenario.read_bytes() == PREFETCH.read_bytes()


@pytest.mark.parametrize("command", ["plot", "report", "trace", "snapshot"])
def test_nor_by_the_default_output(
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(PREFETCH, tmp_path / "a")
    ending = ".pt.trace.json.gz" if command == "trace" else ENDINGS[command]
    (tmp_path / f"a{ending}").symlink_to("a")
    assert "is read as input" in error_of(capsys, command, "a")
    assert (tmp_path / "a").read_bytes() == PREFETCH.read_bytes()


@pytest.mark.parametrize("command", MEMBERS)
def test_nor_by_a_file_of_a_directory(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = shutil.copy(PREFETCH, tmp_path / MEMBERS[command])
    message = error_of(capsys, command, scenario, "-o", tmp_path, *overrides(command))
    assert message.startswith(f"fsdpsim: {scenario}: is read as input")
    assert [path.name for path in tmp_path.iterdir()] == [MEMBERS[command]]
    assert Path(scenario).read_bytes() == PREFETCH.read_bytes()


def test_the_rows_of_validate_are_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = tmp_path / "validate.json"
    row = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))["rows"][0]
    rows.write_text(json.dumps({"rows": [row]}))
    before = rows.read_bytes()
    assert "is read as input" in error_of(capsys, "validate", rows, "-o", tmp_path, "-j", 1)
    assert rows.read_bytes() == before


def test_the_config_of_the_model_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario, config = tmp_path / "a.toml", tmp_path / "model.json"
    shutil.copy(SCENARIOS / "models" / "llama3_8b.json", config)
    before = config.read_bytes()
    scenario.write_text('model.hf_config = "model.json"\nfsdp.runtime = "fsdp2"\n')
    assert f"{config}: is read as input" in error_of(capsys, "trace", scenario, "-o", config)
    assert config.read_bytes() == before


def test_nor_by_the_trace_of_one_of_several_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = tmp_path / "a.rank1.json"
    shutil.copy(SCENARIOS / "jitter_full_shard.toml", scenario)
    before = scenario.read_bytes()
    message = error_of(capsys, "trace", scenario, "-o", tmp_path / "a.json")
    assert f"{scenario}: is read as input" in message
    assert [path.name for path in tmp_path.iterdir()] == [scenario.name]
    assert scenario.read_bytes() == before


@pytest.mark.parametrize("command", ENDINGS)
def test_missing_directories_are_made(command: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "inner" / f"a{ENDINGS[command]}"
    assert main([command, str(PREFETCH), "-o", str(output), *overrides(command)]) == 0
    assert output.stat().st_size > 0


@pytest.mark.parametrize("command", ["report", "trace", "snapshot"])
def test_an_output_directory_takes_the_default_name(command: str, tmp_path: Path) -> None:
    assert main([command, str(PREFETCH), "-o", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    assert written.name.startswith(f"{PREFETCH.stem}.")
