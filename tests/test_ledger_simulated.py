"""The simulated runtimes against the formulas: every byte between them has a cause."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from recordings import read_recording, scenario_of

from fsdpsim import Scenario, load, simulate
from fsdpsim.ledger.differences import (
    WHY,
    Comparison,
    copied_comparison,
    held_comparison,
    kept_comparison,
    sent_comparison,
    unexplained,
)
from fsdpsim.ledger.model_states import StateBytes
from fsdpsim.ledger.runs import Run, offload_run, runs
from fsdpsim.scenario.runtimes import ZeroOffload

PAPER = StateBytes()

#: Settings of a recording whose own schedule changes the counts: no formula speaks of them.
OWN_SCHEDULE = ("accum_no", "frozen_prefix", "reuse", "skip_block", "two_forwards", "no_sync")


def scenario(**changes: Any) -> Scenario:
    """Four equal units and a root with odd sizes, fp32 with bf16 compute, on 2 nodes of 4."""
    block = [{"name": f"w{i}", "shape": shape} for i, shape in enumerate(([30, 7], [30], [7, 30]))]
    units = [{"name": f"blocks.{i}", "params": block} for i in range(4)]
    units = [{"name": "root", "params": [{"name": "head", "shape": [11, 7]}]}, *units]
    for unit in units:
        unit["params"] = [p | {"name": f"{unit['name']}.{p['name']}"} for p in unit["params"]]
    times = dict.fromkeys(("forward", "backward", "optimizer"), "1 ms") | {"kernel_launch": "1 us"}
    tables = {
        "workload": {"units": units, **times},
        "training": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "fsdp": {"runtime": "fsdp2"},
        "hardware": {"nodes": 2, "gpus_per_node": 4},
    }
    for key, value in changes.items():
        tables[key] = tables[key] | value
    return load(tables)


def add_up(comparison: Comparison) -> Fraction:
    return comparison.formula + sum((d.nbytes for d in comparison.differences), start=Fraction(0))


def of(comparison: Comparison) -> dict[str, float]:
    return {d.cause: float(d.nbytes) for d in comparison.differences}


# ---- every recorded run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Recordings with uneven sizes: they pad. A few, since each is run under every runtime."""
    if "recording_path" in metafunc.fixturenames:
        directory = Path(metafunc.config.getoption("--golden-dir"))
        paths = sorted([*directory.glob("*uneven6*.json"), *directory.glob("*odd3*.json")])[::8]
        metafunc.parametrize("recording_path", paths, ids=lambda path: path.stem)


def test_differences_explain_recorded_runs(recording_path: Path) -> None:
    for run in runs(scenario_of(read_recording(recording_path))):
        for comparison in (held_comparison(run, PAPER), sent_comparison(run)):
            assert add_up(comparison) == comparison.simulated
            assert all(d.cause in WHY and d.nbytes for d in comparison.differences)
            if not any(word in recording_path.stem for word in OWN_SCHEDULE):
                assert unexplained(comparison) == 0, (run.strategy.name, run.runtime)


# ---- one scenario, every strategy

ALL = {f"{run.strategy.name} {run.runtime}": run for run in runs(scenario())}
PSI = sum(unit.numel for unit in ALL["DDP ddp"].workload.units)


def test_every_strategy_with_a_runtime_is_run() -> None:
    assert list(ALL) == [
        "DDP ddp",
        "ZeRO-1 zero1",
        "ZeRO-1 by all-reduce zero1",
        "ZeRO-2/SHARD_GRAD_OP zero2",
        "ZeRO-2/SHARD_GRAD_OP fsdp1",
        "ZeRO-2/SHARD_GRAD_OP fsdp2",
        "ZeRO-3/FULL_SHARD fsdp1",
        "ZeRO-3/FULL_SHARD fsdp2",
        "HYBRID_SHARD F=4 fsdp1",
        "HYBRID_SHARD F=4 fsdp2",
    ]


@pytest.mark.parametrize("name", ALL)
def test_what_a_run_holds_and_sends_is_explained(name: str) -> None:
    run = ALL[name]
    for comparison in (held_comparison(run, PAPER), sent_comparison(run)):
        assert add_up(comparison) == comparison.simulated
        assert unexplained(comparison) == 0


@pytest.mark.parametrize("name", ALL)
def test_a_simulation_counts_the_same(name: str) -> None:
    """What is recorded is what runs: collectives of the last iteration, and bytes in memory."""
    run = ALL[name]
    result = simulate(run.scenario)
    for kind, summary in result.collectives.items():
        assert summary.bytes_sent_per_rank == pytest.approx(float(run.sent[kind]), rel=1e-12)
    assert set(result.collectives) == set(run.sent)
    assert sum(s.time_s for s in result.collectives.values()) == pytest.approx(run.seconds)
    at_update = next(m.time for m in reversed(result.marks) if m.event == "optimizer_step")
    before = [s for s in result.memory.samples if s.time <= at_update]
    assert sum(s.buffer.nbytes * (1 if s.is_malloc else -1) for s in before) == run.held_total


def test_ddp_keeps_buckets_beside_gradients() -> None:
    run = ALL["DDP ddp"]
    held = held_comparison(run, PAPER)
    assert held.formula == 16 * PSI
    assert of(held) == {"buckets": 2 * PSI}
    assert run.held == {
        "parameters": 6 * PSI,
        "gradients": 2 * PSI,
        "optimizer_state": 8 * PSI,
        "reduce_scatter": 2 * PSI,
    }
    assert sent_comparison(run).simulated == Fraction(7, 4) * 2 * PSI


def test_ddp_with_bucket_views_holds_what_the_formula_says() -> None:
    own = scenario(fsdp={"runtime": "ddp", "gradient_as_bucket_view": True})
    held = held_comparison(next(iter(runs(own))), PAPER)
    assert held.simulated == held.formula == 16 * PSI


def zero_scenario(**changes: Any) -> Scenario:
    """No padding anywhere, 16-bit gradients: what the paper counts."""
    units = [{"name": f"blocks.{i}", "params": [{"shape": [64, 8]}]} for i in range(4)]
    training = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"} | changes
    times = dict.fromkeys(("forward", "backward"), "1 ms")
    return load(
        {
            "workload": {"units": units, **times},
            "training": training,
            "fsdp": {"runtime": "zero2"},
            "hardware": {"nodes": 2, "gpus_per_node": 4},
        }
    )


ZERO_ROWS = ("ZeRO-1", "ZeRO-1 by all-reduce", "ZeRO-2/SHARD_GRAD_OP")


@pytest.mark.parametrize(("name", "volume"), [*zip(ZERO_ROWS, (2, 3, 2), strict=True)])
def test_zero_holds_and_sends_what_its_formulas_say(name: str, volume: int) -> None:
    psi, rows = (
        4 * 512,
        {(r.strategy.name, r.scenario.fsdp.runtime): r for r in runs(zero_scenario())},
    )
    run = rows[name, "zero2" if "ZeRO-2" in name else "zero1"]
    held, sent = held_comparison(run, PAPER), sent_comparison(run)
    assert sent.simulated == sent.formula == volume * Fraction(7, 8) * 2 * psi
    assert held.simulated == Fraction(2 * psi) + Fraction(14 * psi, 8)
    # Stage 1 has reduced its whole gradients by the time the optimizer steps.
    stage_1 = {"reduced": 2 * psi / 8 - 2 * psi} if volume == 3 or name == "ZeRO-1" else {}
    assert of(held) == stage_1
    assert held.formula == held.simulated - sum(map(Fraction, stage_1.values()))


def test_zero_reduces_per_micro_batch_from_stage_2_on() -> None:
    found = {r.runtime: r for r in runs(zero_scenario(gradient_accumulation_steps=3))}
    psi = 4 * 512
    assert found["zero2"].sent_total == (3 + 1) * Fraction(7, 8) * 2 * psi
    for name in ("zero1", "zero2"):
        assert unexplained(sent_comparison(found[name])) == 0


@pytest.mark.parametrize(
    ("runtime", "option"), [("fsdp1", {"cpu_offload": True}), ("fsdp2", {"offload_policy": "cpu"})]
)
def test_what_is_offloaded_is_not_held(runtime: str, option: dict[str, Any]) -> None:
    own = scenario(fsdp={"runtime": runtime, **option})
    run = of_runtime(own, "ZeRO-3/FULL_SHARD", runtime)
    held, without = (
        held_comparison(run, PAPER),
        held_comparison(ALL[f"ZeRO-3/FULL_SHARD {runtime}"], PAPER),
    )
    assert held.simulated == 0 and unexplained(held) == 0
    assert of(held)["offload"] == -float(without.simulated)
    assert (
        sent_comparison(run).simulated
        == sent_comparison(ALL[f"ZeRO-3/FULL_SHARD {runtime}"]).simulated
    )


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_int8_halves_what_is_gathered(runtime: str) -> None:
    run = of_runtime(
        scenario(fsdp={"runtime": runtime, "all_gather_dtype": "int8"}),
        "ZeRO-3/FULL_SHARD",
        runtime,
    )
    plain = ALL[f"ZeRO-3/FULL_SHARD {runtime}"]
    assert run.sent["all_gather"] == plain.sent["all_gather"] / 2
    assert run.sent["reduce_scatter"] == plain.sent["reduce_scatter"]
    assert unexplained(sent_comparison(run)) == 0


def test_full_sharding_pads_and_keeps_the_root() -> None:
    """FSDP1 pads 77 and 450 elements to 80 and 456; FSDP2 pads 11 rows to 16, and 30 and 7 to 32
    and 8. Both send gradients in fp32 and gather the root once."""
    for name, root, block in (
        ("ZeRO-3/FULL_SHARD fsdp1", 80, 456),
        ("ZeRO-3/FULL_SHARD fsdp2", 16 * 7, 32 * 7 + 32 + 8 * 30),
    ):
        run, padded = ALL[name], root + 4 * block
        held, sent = held_comparison(run, PAPER), sent_comparison(run)
        assert held.formula == Fraction(16 * PSI, 8)
        assert of(held) == {"padding": 16 * (padded - PSI) / 8}
        assert sent.formula == Fraction(7, 8) * 3 * 2 * PSI
        assert of(sent) == {
            "dtypes": 7 / 8 * 2 * PSI,
            "padding": 7 / 8 * 8 * (padded - PSI),
            "root": -7 / 8 * 2 * root,
        }


def test_hybrid_sharding_all_reduces_the_shards() -> None:
    run = ALL["HYBRID_SHARD F=4 fsdp2"]
    padded = 12 * 7 + 4 * (32 * 7 + 32 + 8 * 30)
    assert run.sent["all_reduce"] == 4 * padded // 4
    assert run.sent["reduce_scatter"] == Fraction(3, 4) * 4 * padded
    assert sent_comparison(run).formula == Fraction(3 * 3, 4) * 2 * PSI + Fraction(2 * PSI, 4)


def test_shard_grad_op_has_shards_when_the_optimizer_steps() -> None:
    """ZeRO-2's whole parameters live from forward to backward only: 2 P (1 - 1 / N) less."""
    for name in ("ZeRO-2/SHARD_GRAD_OP fsdp1", "ZeRO-2/SHARD_GRAD_OP fsdp2"):
        held = held_comparison(ALL[name], PAPER)
        assert of(held)["resharded"] == -2 * PSI * 7 / 8
        assert ALL[name].held.keys() == {"parameters", "gradients", "optimizer_state"}


# ---- settings of a runtime that change the figures


def of_runtime(own: Scenario, strategy: str, runtime: str) -> Run:
    return next(run for run in runs(own) if (run.strategy.name, run.runtime) == (strategy, runtime))


FSDP2 = ("ZeRO-3/FULL_SHARD", "fsdp2")


@pytest.mark.parametrize(
    ("changes", "row", "cause", "expected"),
    [
        (
            {"fsdp": {"overrides": {"blocks.3": {"reshard_after_forward": False}}}},
            FSDP2,
            "kept",
            lambda: -7 / 8 * 2 * 496,
        ),
        ({"fsdp": {"reshard_after_forward": True}}, FSDP2, "root", lambda: 0.0),
        (
            {"fsdp": {"reshard_after_forward": 2}},
            FSDP2,
            "post_forward",
            lambda: (1 / 2 - 7 / 8) * 2 * (112 + 4 * 496),
        ),
        (
            {"training": {"gradient_accumulation_steps": 3}},
            ("ZeRO-2/SHARD_GRAD_OP", "fsdp2"),
            "accumulation",
            lambda: 2 * 7 / 8 * 2 * (112 + 4 * 496),
        ),
        (
            {
                "training": {"gradient_accumulation_steps": 3},
                "fsdp": {"runtime": "ddp"},
            },
            ("DDP", "ddp"),
            "accumulation",
            lambda: 2 * 7 / 4 * 2 * PSI,
        ),
        (
            {"training": {"frozen": ["blocks.0.w0"]}},
            ("ZeRO-3/FULL_SHARD", "fsdp1"),
            "flat_parameter",
            lambda: 7 / 8 * 4 * 210,
        ),
    ],
    ids=["kept", "root", "post_forward", "accumulation_zero2", "accumulation_ddp", "frozen"],
)
def test_settings_show_up_under_their_cause(
    changes: dict[str, Any], row: tuple[str, str], cause: str, expected: Callable[[], float]
) -> None:
    comparison = sent_comparison(of_runtime(scenario(**changes), *row))
    assert unexplained(comparison) == 0
    assert of(comparison).get(cause, 0.0) == expected()


def test_a_flat_parameter_has_gradient_and_state_for_its_frozen_part() -> None:
    own = scenario(training={"frozen": ["blocks.0.w0"]})
    held = held_comparison(of_runtime(own, "ZeRO-3/FULL_SHARD", "fsdp1"), PAPER)
    assert of(held)["flat_parameter"] == 12 * 210 / 8
    assert unexplained(held) == 0


def test_no_sync_is_the_scenario_s_own_schedule() -> None:
    own = scenario(
        training={"gradient_accumulation_steps": 2}, fsdp={"runtime": "fsdp1", "no_sync": True}
    )
    comparison = sent_comparison(of_runtime(own, "ZeRO-3/FULL_SHARD", "fsdp1"))
    assert unexplained(comparison) == Fraction(-7, 8) * 4 * (80 + 4 * 456)
    assert add_up(comparison) == comparison.simulated


def test_an_int_reshard_that_does_not_divide_the_node_is_left_out_of_hybrid_sharding() -> None:
    own = scenario(fsdp={"reshard_after_forward": 8})
    hybrid = of_runtime(own, "HYBRID_SHARD F=4", "fsdp2")
    assert unexplained(sent_comparison(hybrid)) == 0


def test_a_model_of_hugging_face_is_explained_too() -> None:
    config = Path(__file__).parents[1] / "scenarios" / "models" / "gpt2.json"
    own = load(
        {
            "model": {"hf_config": str(config)},
            "training": {"granularity": "units", "seq_len": 512},
            "fsdp": {"runtime": "fsdp1", "use_orig_params": True},
            "hardware": {"nodes": 2, "gpus_per_node": 8},
        }
    )
    for run in runs(own):
        for comparison in (held_comparison(run, PAPER), sent_comparison(run)):
            assert unexplained(comparison) == 0
            assert add_up(comparison) == comparison.simulated


# ---- ZeRO-Offload


@pytest.mark.parametrize("delayed", [False, True])
def test_zero_offload_copies_and_keeps_what_the_placement_says(delayed: bool) -> None:
    own = zero_scenario()
    fsdp = own.fsdp.model_copy(update={"reduce_bucket_size": 512})
    for table in (fsdp, ZeroOffload(runtime="zero_offload", delayed_parameter_update=delayed)):
        run = offload_run(own.model_copy(update={"fsdp": table}))
        copied, kept = copied_comparison(run), kept_comparison(run)
        assert copied.simulated == copied.formula == Fraction(4 * 4 * 512, 8)
        assert kept.simulated == kept.formula == 2 * 4 * 512


@pytest.mark.parametrize(
    ("own", "causes"),
    [
        (scenario(), {"dtypes", "padding"}),  # 2,061 parameters over 8 ranks, fp32 gradients
        (
            scenario(training={"gradient_accumulation_steps": 3}),
            {"dtypes", "padding", "accumulation"},
        ),
        (scenario(training={"frozen": ["blocks.0"]}), {"dtypes", "padding"}),
        (zero_scenario(gradient_accumulation_steps=2), {"accumulation"}),
    ],
)
def test_what_zero_offload_copies_is_explained(own: Scenario, causes: set[str]) -> None:
    run = offload_run(own)
    for comparison in (copied_comparison(run), kept_comparison(run)):
        assert add_up(comparison) == comparison.simulated
        assert unexplained(comparison) == 0
    assert of(copied_comparison(run)).keys() == causes


def test_one_gpu_has_ddp_only() -> None:
    own = scenario(hardware={"nodes": 1, "gpus_per_node": 1})
    (run,) = runs(own)
    assert run.sent_total == 0
    assert held_comparison(run, PAPER).formula == 16 * PSI
