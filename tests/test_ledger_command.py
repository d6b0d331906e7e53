"""``fsdpsim ledger`` as users call it: tables that fit 100 columns, JSON, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpsim.commands import ledger as command

SCENARIOS = Path(__file__).parents[1] / "scenarios"
THIRTEEN_B = SCENARIOS / "ledger_13b_64gpu.toml"
LINEAR = SCENARIOS / "ledger_flat_parameter.toml"
FLAGS = ("--layout", "--residual", "--offload", "--infinity")

GPT2 = f"""
[model]
hf_config = "{SCENARIOS / "models" / "gpt2.json"}"
[training]
seq_len = 512
micro_batch_size = 2
granularity = "units"
[fsdp]
runtime = "fsdp2"
[hardware]
nodes = 2
"""


@pytest.fixture(autouse=True)
def terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    path = tmp_path / "gpt2.toml"
    path.write_text(GPT2, encoding="utf-8")
    return path


def call(*args: object) -> int:
    from fsdpsim.cli import main

    return main(["ledger", *map(str, args)])


def report(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    assert call(*args, "--json") == 0
    return json.loads(capsys.readouterr().out)


# ---- JSON


def test_13b_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, THIRTEEN_B)
    rows = {row["strategy"]: row for row in found["strategies"]}
    full, hybrid = rows["ZeRO-3/FULL_SHARD"], rows["HYBRID_SHARD F=8"]
    assert round(full["sent_across_nodes_bytes"] / 1e9, 2) == 75.29
    assert round(full["bare_communication_s"], 2) == 1.51
    assert round(hybrid["sent_across_nodes_bytes"] / 1e9, 2) == 5.58
    assert [rule["total"] for rule in found["bytes_per_parameter"]] == [16, 20]
    assert rows["DDP"]["fits"] == [False, False]
    assert full["fits"] == [True, True]
    runtimes = {row["runtime"] for row in found["simulated"]}
    assert runtimes == {"ddp", "zero1", "zero2", "fsdp1", "fsdp2"}
    for row in found["simulated"]:
        for figure in (row["model_states"], row["sent"]):
            differences = sum(figure["differences_bytes"].values())
            assert figure["formula_bytes"] + differences == pytest.approx(figure["simulated_bytes"])
            assert figure["differences_bytes"].keys() <= found["causes"].keys()


def test_k_follows_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """SGD keeps the fp32 copy only: 8 bytes per parameter, 12 with fp32 gradients."""
    found = report(capsys, LINEAR, "--set", "training.optimizer=sgd")
    assert [rule["total"] for rule in found["bytes_per_parameter"]] == [8, 12]


def test_layout_in_json_has_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, LINEAR, "--layout")
    (unit,) = found["units"]
    assert unit["fsdp1"]["padding_numel"] == 1
    assert unit["fsdp1"]["ranks"][15] == {"rank": 15, "held": [], "padding": 1}
    assert len(unit["fsdp2"]["ranks"]) == 16


def test_equal_units_are_listed_once(capsys: pytest.CaptureFixture[str], gpt2: Path) -> None:
    found = report(capsys, gpt2, "--layout")
    assert [len(unit["units"]) for unit in found["units"]] == [12, 1]
    assert found["units"][0]["params"][0]["name"] == "ln_1.weight"
    blocks = report(capsys, THIRTEEN_B, "--layout")
    assert [len(unit["units"]) for unit in blocks["units"]] == [1, 40]


def test_residual_states_of_a_model(capsys: pytest.CaptureFixture[str], gpt2: Path) -> None:
    found = report(capsys, gpt2, "--residual")
    activations = found["activations"]
    assert activations["formula_bytes"] == 2 * 12 * 768 * 2 * 512 * 12
    assert activations["checkpoint_bytes"] == 2 * 768 * 2 * 512 * 12
    assert activations["simulated_bytes"] > activations["checkpoint_bytes"]
    assert found["largest_operator"]["shape"] == [50257, 768]
    outcomes = [outcome["served"] for outcome in found["fragmentation"]["outcomes"]]
    assert outcomes == [False, True]


def test_full_checkpointing_keeps_one_input_per_block(
    capsys: pytest.CaptureFixture[str], gpt2: Path
) -> None:
    """Twice the blocks hold twice the checkpoints, to the byte; head and loss hold the rest."""
    full = ("--set", "training.activation_checkpointing=full")
    twelve = report(capsys, gpt2, "--residual", *full)["activations"]
    half = ("--set", "model.num_hidden_layers=6")
    six = report(capsys, gpt2, "--residual", *full, *half)["activations"]
    assert twelve["checkpoint_bytes"] == 2 * six["checkpoint_bytes"]
    more = twelve["simulated_bytes"] - six["simulated_bytes"]
    assert more == twelve["checkpoint_bytes"] - six["checkpoint_bytes"]


def test_expandable_segments_change_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--set", "allocator.expandable_segments=true")
    found = report(capsys, LINEAR, "--residual", *options)["fragmentation"]
    assert [outcome["served"] for outcome in found["outcomes"]] == [True, True]


def test_offload_in_json_has_all_placements(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, LINEAR, "--offload")
    assert len(found["placements"]) == 128
    assert found["optimal"]["gpu_memory"] == 2


def test_the_simulated_zero_offload_stands_beside_its_formula(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, SCENARIOS / "zero_offload_10b_v100.toml", "--offload")["simulated"]
    psi = 50 * 12 * 4096**2
    for figure, volume in (("crosses_pcie", 4), ("on_gpu", 2)):
        assert found[figure]["formula_bytes"] == found[figure]["simulated_bytes"] == volume * psi


def test_infinity_takes_the_sizes_of_a_node(capsys: pytest.CaptureFixture[str], gpt2: Path) -> None:
    found = report(capsys, gpt2, "--infinity", "--cpu-memory", "2 TB", "--nvme", "40 TB")
    sizes = {row["name"]: row["parameters"] for row in found["largest_models"]}
    assert sizes["ZeRO-Infinity, CPU"] == 2 * 2_000_000_000_000 // 20
    assert sizes["ZeRO-Infinity, NVMe"] == 2 * 40_000_000_000_000 // 20
    assert [row["what"] for row in found["requirements"]] == [
        "parameters and gradients",
        "optimizer state",
        "activation checkpoints",
    ]
    assert [row["links"] for row in found["partitioned"]] == [8, 16]


def test_infinity_of_given_durations_knows_no_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, THIRTEEN_B, "--infinity")
    assert [row["flops_per_byte"] for row in found["requirements"]] == [16_384, 4096]


# ---- the terminal


@pytest.mark.parametrize("flag", ["", *FLAGS])
@pytest.mark.parametrize("which", ["13b", "gpt2"])
def test_tables_fit_100_columns(
    capsys: pytest.CaptureFixture[str], gpt2: Path, which: str, flag: str
) -> None:
    assert call(THIRTEEN_B if which == "13b" else gpt2, *flag.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)


def test_the_table_names_what_differs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    call(LINEAR)
    shown = capsys.readouterr().out
    assert "padding +" in shown
    assert "padding: FSDP1 pads each flat parameter to F" in shown
    assert "buckets: DDP copies gradients into buckets" in shown


# ---- refusals


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert call(*args) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1
    return found.err


def test_a_workload_without_parameters_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    path = SCENARIOS / "textbook_no_overlap.toml"
    for flag in ("", *FLAGS):
        assert "give workload.parameters, or a [model]" in refused(capsys, path, *flag.split())


def test_infinity_without_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give workload.tokens" in refused(capsys, LINEAR, "--infinity")


def test_sizes_of_other_views_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nvme goes with --infinity" in refused(capsys, LINEAR, "--nvme", "1 TB")
    text = refused(capsys, LINEAR, "--infinity", "--cpu-memory", "1 TB/s")
    assert '--cpu-memory: "1 TB/s" is in bytes/s, not bytes' in text
    text = refused(capsys, LINEAR, "--infinity", "--nvme", "-1")
    assert "--nvme: '-1' is not allowed; it must be zero or more" in text


def test_two_views_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        call(LINEAR, "--layout", "--offload")
    assert exit_info.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_each_flag_has_its_view() -> None:
    assert tuple(f"--{name}" for name in command.VIEWS) == FLAGS
