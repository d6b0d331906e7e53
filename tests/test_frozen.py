"""``training.frozen``: what its names mean, whatever the unit size, and names that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpsim.cli import main
from fsdpsim.frozen import freeze
from fsdpsim.model import parameters, read_model_config
from fsdpsim.scenario import load
from fsdpsim.simulate import build_workload
from fsdpsim.workload import Param, Unit

LLAMA = Path(__file__).parents[1] / "scenarios" / "models" / "llama3_8b.json"
UNITS = (
    Unit(name="a", params=(Param(name="a.in.weight", shape=(2,)), Param(name="a.out", shape=(3,)))),
    Unit(name="b", params=(Param(name="b.weight", shape=(5,), requires_grad=False),)),
)


def trained(units: tuple[Unit, ...]) -> set[str]:
    return {p.name for unit in units for p in unit.params if p.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ((), {"a.in.weight", "a.out"}),
        (("b",), {"a.in.weight", "a.out"}),
        (("a",), set()),
        (("a.in",), {"a.out"}),
        (("*.weight",), {"a.out"}),
        (("a.o*", "a.in.weight"), set()),
    ],
)
def test_units_modules_and_parameters(patterns: tuple[str, ...], left: set[str]) -> None:
    assert trained(freeze(UNITS, patterns)) == left


def test_each_name_that_means_nothing_is_a_fault() -> None:
    with pytest.raises(ValueError, match=r'"a.inn" .* did you mean a.in\?; .*"zzz" .* units are a'):
        freeze(UNITS, ("a", "a.inn", "zzz"))


def model(runtime: str, frozen: list[str], **fsdp: Any) -> dict[str, Any]:
    return {
        "model": {"hf_config": str(LLAMA), "num_hidden_layers": 4},
        "training": {"frozen": frozen, "granularity": "units", "seq_len": 64},
        "fsdp": {"runtime": runtime, **fsdp},
    }


@pytest.mark.parametrize("names", [["layers.0", "embed"], ["layers.1.attention"], ["head"]])
def test_names_of_units_mean_the_same_under_every_unit_size(names: list[str]) -> None:
    """So that runtimes and unit sizes can be compared: DDP has no units, only the whole model."""
    left = {
        frozenset(trained(build_workload(load(data)).units))
        for data in (
            model("ddp", names),
            model("zero2", names),
            *(model("fsdp2", names, unit=u) for u in ("model", "block", "sublayer", {"blocks": 2})),
            model("fsdp1", names, wrap_embedding=True, wrap_head=True),
        )
    }
    (only,) = left
    config = read_model_config({"hf_config": str(LLAMA), "num_hidden_layers": 4})
    assert 0 < len(only) < len(parameters(config))


def test_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slip.toml"
    path.write_text(
        f'[model]\nhf_config = "{LLAMA}"\n[training]\nfrozen = ["layer.0"]\n'
        '[fsdp]\nruntime = "fsdp2"\n',
        encoding="utf-8",
    )
    assert main(["run", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f'fsdpsim: {path}: training.frozen: "layer.0" is no unit, module or parameter; '
        "did you mean layers.0?\n"
    )


@pytest.mark.parametrize(
    ("frozen", "share"),
    [
        ([], 1.0),
        (["*"], 1 / 3),  # forward only
        (["layers.*"], None),  # gradients still flow through to the embedding
    ],
)
def test_model_flops_leave_out_what_frozen_parameters_save(
    frozen: list[str], share: float | None
) -> None:
    def flops(frozen: list[str]) -> float:
        table = {"hf_config": str(LLAMA)}
        training = {"seq_len": 64, "frozen": frozen}
        scenario = load({"model": table, "training": training, "fsdp": {"runtime": "fsdp2"}})
        return build_workload(scenario).flops_per_token

    found = flops(frozen) / flops([])
    if share is None:
        assert 2 / 3 < found < 1
    else:
        assert found == pytest.approx(share)
