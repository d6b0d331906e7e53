"""The README's commands and Python run as written, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.cli import COMMANDS, main
from fsdpsim.hardware import Hardware, HostCosts
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.noise_table import Noise
from fsdpsim.scenario.runtimes import RUNTIMES, UnitOverride
from fsdpsim.scenario.sweep_table import Range, SweepTable
from fsdpsim.scenario.workload_tables import ParamTable, Training, UnitTable, Workload

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[str]:
    lines = [line for block in _blocks("console") for line in block.splitlines()]
    commands = [line[2:].partition("  #")[0] for line in lines if line.startswith("$ ")]
    return [command for command in commands if command.startswith("fsdpsim ")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds the scenarios, so that outputs leave nothing in the project."""
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_run_in_order(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = _commands()
    assert len(commands) > 10
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
        capsys.readouterr()
    written = {path.name for path in place.iterdir()} - {"scenarios"}
    assert written >= {"llama3.png", "report.html", "step.pt.trace.json.gz", "step.pickle"}


def test_python_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in _blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "27.0" in capsys.readouterr().out


def test_scenario_is_valid(place: Path) -> None:
    (block,) = _blocks("toml")
    path = place / "scenarios.toml"
    path.write_text(block.replace("models/", "scenarios/models/"), encoding="utf-8")
    assert main(["check", str(path)]) == 0


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_command_is_mentioned() -> None:
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", README), command


#: Tables whose keys the README lists. Of [hardware] it names some: ``check`` prints them all.
TABLES = (
    Scenario,
    Workload,
    UnitTable,
    ParamTable,
    Training,
    *RUNTIMES.values(),
    UnitOverride,
    AllocatorSettings,
    Noise,
    SweepTable,
    Range,
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_key_is_mentioned(table: type[BaseModel]) -> None:
    missing = [key for key in table.model_fields if not re.search(rf"\b{key}\b", README)]
    assert not missing


def test_keys_that_the_readme_lists_exist() -> None:
    """In the table of keys."""
    rows = [row for row in README.splitlines() if row.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if row.startswith("| table | keys"))
    end = next(i for i, row in enumerate(rows) if row.startswith("| FSDP1 | FSDP2"))
    listed = {w for row in rows[start:end] for w in re.findall(r"`([a-z][a-z0-9_]*)", row)}
    known = {key for table in (*TABLES, Hardware, HostCosts) for key in table.model_fields}
    assert listed <= known | set(RUNTIMES)
