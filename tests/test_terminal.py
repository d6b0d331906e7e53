"""On a narrow terminal tables break between words, never inside a name or a number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fsdpsim.cli import main

SCENARIOS = Path(__file__).parents[1] / "scenarios"
LLAMA = str(SCENARIOS / "llama3_8b_8xh100.toml")
COARSE = "--set=training.granularity=units"

COMMANDS = {
    "run": [LLAMA, COARSE],
    "compare": [LLAMA, COARSE, "--set=training.seq_len=4096"],
    "explain": [LLAMA, COARSE, "--no-remedies"],
    "ledger": [LLAMA, COARSE],
    "validate": ["--only", "tt-log-reshard", "-j", "1"],
}


def shown(
    columns: int, command: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> str:
    patch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    assert main([command, *COMMANDS[command]]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_words_stay_whole(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = shown(300, command, capsys, monkeypatch)
    for columns in (40, 75):
        narrow = shown(columns, command, capsys, monkeypatch)
        assert Counter(narrow.split()) == Counter(wide.split())
        assert len(narrow.splitlines()) > len(wide.splitlines())


def test_what_fits_is_as_narrow_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(40, "run", capsys, monkeypatch)
    assert max(map(len, text.splitlines())) <= 40
