"""Scenario files: what they may say, and one clear message for each thing that they may not."""

from __future__ import annotations

import copy
import json
import pickle
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpsim.resolved import as_toml, resolved
from fsdpsim.scenario import Problem, Scenario, ScenarioError, load
from fsdpsim.simulate import build_workload

ROOT = Path(__file__).parents[1]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.toml"))
LLAMA = ROOT / "scenarios" / "models" / "llama3_8b.json"

WORKLOAD = {
    "units": 4,
    "forward": "2 s",
    "backward": "4 s",
    "all_gather": "1.5 s",
    "reduce_scatter": "1.5 s",
}


def tables(runtime: str = "textbook", **changes: Any) -> dict[str, Any]:
    """A valid scenario with ``table__key=value`` changed."""
    found: dict[str, Any] = {"workload": dict(WORKLOAD), "fsdp": {"runtime": runtime}}
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if key:
            found.setdefault(table, {})[key] = value
        else:
            found[table] = value
    return found


def problems(data: Mapping[str, Any], *overrides: str) -> list[str]:
    """The lines of the message."""
    with pytest.raises(ScenarioError) as caught:
        build_workload(load(data, overrides))
    return [str(problem) for problem in caught.value.problems]


def the_problem(data: Mapping[str, Any], *overrides: str) -> str:
    (found,) = problems(data, *overrides)
    return found


# ---- files that are none


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a scenario needs [fsdp] and either [workload] or [model]"),
        (b" \n\t\n", "is empty; a scenario needs [fsdp] and either [workload] or [model]"),
        (b"\x89PNG\r\n\x1a\n\xff", "is not text in UTF-8, so not TOML"),
        (b"[fsdp\nruntime = 1", "is not TOML: "),
        (b"{}", "is not TOML: "),
        (b"a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        (b"a = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
        (b"a = " + b"[" * 5000, "is nested too deeply"),
        (b"#" * 10_000_000, "is larger than 1 MB; this is no scenario file"),
    ],
)
def test_what_is_no_scenario_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    text = b'fsdp.runtime = "textbook"\nworkload = { units = 2, forward = "1 s" }\n'
    path.write_bytes(b"\xef\xbb\xbf" + text)
    assert load(path).fsdp.runtime == "textbook"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path / "absent.toml")
    assert (
        str(caught.value)
        == f"{tmp_path / 'absent.toml'}: cannot be read: No such file or directory"
    )


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"


# ---- one fault, one line: key, what was given, what is allowed

SECONDS = 'write for example "5 us", "12.5 ms", "2 s"'
UNIT = {"name": "a", "forward": "1 s"}
FAULTS = {
    # keys
    "unknown table": (
        tables(hardwear={}),
        "hardwear: unknown key; did you mean hardware?",
    ),
    "unknown key": (
        tables(fsdp__overlapp=True),
        "fsdp.overlapp: unknown key; did you mean overlap?",
    ),
    "key of another table": (
        tables(workload__gpus_per_node=8),
        "workload.gpus_per_node: unknown key; did you mean hardware.gpus_per_node?",
    ),
    "unknown key inside a unit": (
        tables(workload__units=[{"name": "a", "forward": "1 s", "forwrad": "1 s"}]),
        "workload.units.0.forwrad: unknown key; did you mean forward?",
    ),
    "unknown key of a table in a table": (
        tables(hardware__host={"kernel_lunch": "1 us"}),
        "hardware.host.kernel_lunch: unknown key; did you mean kernel_launch?",
    ),
    "unknown setter": (
        tables("fsdp2", fsdp__overrides={"unit.1": {"reshard_after_forwards": False}}),
        'fsdp.overrides."unit.1".reshard_after_forwards: unknown key; did you mean '
        "reshard_after_forward?",
    ),
    "no fsdp": (
        {"workload": WORKLOAD},
        'fsdp: is missing; runtime must be one of "textbook", "ddp", ',
    ),
    "no runtime": (
        {"workload": WORKLOAD, "fsdp": {"overlap": True}},
        'fsdp.runtime: is missing; runtime must be one of "textbook", "ddp", ',
    ),
    "unknown runtime": (
        tables("fsdp3"),
        'fsdp.runtime: "fsdp3" is not a runtime; runtime must be one of "textbook", ',
    ),
    "not a table": (tables(fsdp=3), "fsdp: 3 is not allowed; it must be a table"),
    "no work": (
        {"fsdp": {"runtime": "fsdp2"}},
        "has neither [workload] (units with durations) nor [model]; give one of them",
    ),
    "both kinds of work": (
        tables("fsdp2", model={"hf_config": str(LLAMA)}),
        "has both [workload] and [model]; give the one or the other",
    ),
    "missing key": (
        tables(workload={"forward": "1 s"}),
        "workload.units: is missing",
    ),
    # quantities
    "negative duration": (
        tables(workload__forward="-2 s"),
        'workload.forward: "-2 s" is not allowed; it must be more than zero',
    ),
    "zero duration": (
        tables(workload__backward="0 s"),
        'workload.backward: "0 s" is not allowed; it must be more than zero',
    ),
    "not a number": (
        tables(workload__forward=float("nan")),
        f"workload.forward: nan is not a finite number; {SECONDS}",
    ),
    "infinite": (
        tables(workload__forward=float("inf")),
        f"workload.forward: inf is not a finite number; {SECONDS}",
    ),
    "wrong dimension": (
        tables(workload__forward="2 GB"),
        f'workload.forward: "2 GB" is in bytes, not seconds; {SECONDS}',
    ),
    "half a bandwidth": (
        tables(hardware__intra_node_bandwidth="400 Gb"),
        'hardware.intra_node_bandwidth: "400 Gb" has an unknown unit "Gb"; write for example '
        '"450 GB/s", "400 Gb/s", "1.6 Tb/s"',
    ),
    "truth is no duration": (
        tables(workload__forward=True),
        "workload.forward: true is not allowed; it must be a list, or a quantity such as "
        '"5 us", "12.5 ms", "2 s"',
    ),
    "an entry of a list": (
        tables(workload__forward=["1 s", "2 m", "1 s", "1 s"]),
        f'workload.forward.1: "2 m" has an unknown unit "m"; {SECONDS}',
    ),
    "a list too short": (
        tables(workload__forward=["1 s", "2 s"]),
        "workload.forward: has 2 entries for 4 units",
    ),
    "an empty list": (
        tables(workload__forward=[]),
        "workload.forward: [] is not allowed; it must be a list that is not empty",
    ),
    "no duration at all": (
        tables(workload={"units": 2, "parameters": 5}),
        'workload.forward: is missing, and unit "unit.0" has not both parameters and tokens',
    ),
    "negative activations": (
        tables(workload__activations="-1 MB"),
        'workload.activations: "-1 MB" is not allowed; it must be more than zero',
    ),
    # counts and choices
    "zero units": (
        tables(workload__units=0),
        "workload.units: 0 is not allowed; it must be at least 1",
    ),
    "more units than any model": (
        tables(workload__units=10**10),
        "workload.units: 10000000000 is not allowed; it must be at most 100,000",
    ),
    "more chunks than tokens": (
        tables("fsdp2", training__chunked_loss=10**12),
        "training.chunked_loss: 1000000000000 is not allowed; it must be at most 10,000",
    ),
    "more passes than patience": (
        tables("fsdp2", training={"iterations": 1000, "gradient_accumulation_steps": 1000}),
        "training: asks for 1,000,000 forward passes in all; at most 100,000 can be",
    ),
    "more ranks than patience": (
        tables("fsdp2", noise__jitter=0.1, hardware__nodes=10**6),
        "noise: simulates each of 8,000,000 ranks; at most 10,000 can be",
    ),
    "units in words": (
        tables(workload__units="four"),
        'workload.units: "four" is not allowed; it must be an integer, or a list',
    ),
    "truth is no count": (
        tables(fsdp__sharding_factor=True),
        "fsdp.sharding_factor: true is not allowed; it must be an integer",
    ),
    "a quoted number": (
        tables(hardware__gpus_per_node="8"),
        'hardware.gpus_per_node: "8" is not allowed; it must be an integer',
    ),
    "a share above one": (
        tables(workload__efficiency=1.5),
        "workload.efficiency: 1.5 is not allowed; it must be at most 1.0",
    ),
    "a share that is not a number": (
        tables(workload__efficiency=float("nan")),
        "workload.efficiency: nan is not allowed; it must be a finite number",
    ),
    "a quoted truth": (
        tables(fsdp__overlap="yes"),
        'fsdp.overlap: "yes" is not allowed; it must be true or false',
    ),
    "an unknown word": (
        tables(training__optimizer="lion"),
        'training.optimizer: "lion" is not allowed; it must be "adamw", "adam", "sgd", '
        '"sgd_momentum" or "none"',
    ),
    "a table of another kind": (
        tables(training__activation_checkpointing={"each": 2}),
        "training.activation_checkpointing: { each = 2 } is not allowed; it must be "
        '"none", "selective", "submodules" or "full", or { every = ... }, or { fraction = ... }',
    ),
    "a table of the right kind": (
        tables(training__activation_checkpointing={"every": 0}),
        "training.activation_checkpointing.every: 0 is not allowed; it must be at least 1",
    ),
    "no limit": (
        tables(fsdp__limit_all_gathers=True),
        "fsdp.limit_all_gathers: true is not a limit: give the number of unsharded units, or false",
    ),
    "a limit of zero": (
        tables(fsdp__limit_all_gathers=0),
        "fsdp.limit_all_gathers: 0 is not a limit: give the number of unsharded units, or false",
    ),
    "a limit in words": (
        tables(fsdp__limit_all_gathers="two"),
        'fsdp.limit_all_gathers: "two" is not allowed; it must be the number of units that may be '
        "unsharded at once, or false",
    ),
    "a title that controls the terminal": (
        tables(title="\x1b[31mred"),
        'title: "\\u001b[31mred" holds characters that cannot be printed',
    ),
    "an unknown GPU": (
        tables(hardware__gpu="H100-SXM"),
        'hardware.gpu: "H100-SXM" is not a GPU preset; did you mean "H100-SXM-80GB"?',
    ),
    "an unknown allocator setting": (
        tables(allocator__expandable_segment=True),
        "allocator.expandable_segment: unknown key; did you mean expandable_segments?",
    ),
    "a word for true": (
        tables(allocator__expandable_segments="yes"),
        'allocator.expandable_segments: "yes" is not allowed; it must be true or false',
    ),
    "a number in quotes": (
        tables(allocator__max_split_size_mb="64"),
        'allocator.max_split_size_mb: "64" is not allowed; it must be an integer',
    ),
    "a word for true in the hardware": (
        tables(hardware__contention="on"),
        'hardware.contention: "on" is not allowed; it must be true or false',
    ),
    "noise in quotes": (
        tables(noise__jitter="0.1"),
        'noise.jitter: "0.1" is not allowed; it must be a number',
    ),
    # several keys at once
    "factor and world size": (
        tables(fsdp__sharding_factor=3),
        "fsdp.sharding_factor: 3 does not divide the world size 8 (nodes x gpus_per_node); it may "
        "be 1, 2, 4, 8",
    ),
    "factor and node": (
        tables(fsdp__sharding_factor=4, hardware={"nodes": 2, "gpus_per_node": 6}),
        "fsdp.sharding_factor: 4 neither divides the 6 GPUs of a node nor is a multiple of them; "
        "it may be 1, 2, 3, 6, 12",
    ),
    "factor and strategy": (
        tables("fsdp1", fsdp__sharding_factor=4, fsdp__sharding_strategy="FULL_SHARD"),
        'fsdp.sharding_strategy: "FULL_SHARD" shards over all 8 ranks; with '
        'fsdp.sharding_factor = 4 use "HYBRID_SHARD" or "_HYBRID_SHARD_ZERO2"',
    ),
    "smaller shards": (
        tables("fsdp2", fsdp__reshard_after_forward=3),
        "fsdp.reshard_after_forward: 3 does not divide fsdp.sharding_factor = 8",
    ),
    "smaller shards of one unit": (
        tables("fsdp2", fsdp__overrides={"unit.0": {"reshard_after_forward": 5}}),
        'fsdp.overrides."unit.0".reshard_after_forward: 5 does not divide fsdp.sharding_factor = 8',
    ),
    "accumulation in the textbook": (
        tables(training__gradient_accumulation_steps=2),
        "training.gradient_accumulation_steps: 2 is not allowed under the textbook runtime, which "
        'has one forward and backward per step; use fsdp.runtime = "fsdp1" or "fsdp2"',
    ),
    "a model in the textbook": (
        {"model": {"hf_config": str(LLAMA)}, "fsdp": {"runtime": "textbook"}},
        'fsdp.runtime: "textbook" takes a [workload] of units with durations; for a [model] use '
        '"fsdp1", "fsdp2" or "ddp"',
    ),
    # names
    "two units of one name": (
        tables(workload__units=[UNIT, UNIT]),
        'workload.units: 2 units are named "a"',
    ),
    "two parts of one name": (
        tables(workload__units=[UNIT | {"parts": ["b"]}, UNIT | {"name": "b"}]),
        'workload.units: 2 parts are named "b"',
    ),
    "a call of no part": (
        tables(workload__calls=["unit.0", "unit.4"]),
        'workload.calls: "unit.4" is not a part of any unit; did you mean unit.3?',
    ),
    "nothing to checkpoint": (
        tables("fsdp2", workload__checkpointed=["unit.1", "units.*"]),
        'workload.checkpointed: "units.*" is not a part of any unit; did you mean unit.',
    ),
    "setters of no unit": (
        tables("fsdp2", fsdp__overrides={"unit.9": {"reshard_after_forward": False}}),
        'fsdp.overrides."unit.9": "unit.9" is not a unit; did you mean unit.3?',
    ),
    "nothing to freeze": (
        tables("fsdp2", training__frozen=["unit.9"]),
        'training.frozen: "unit.9" is no unit, module or parameter; did you mean unit.3?',
    ),
    "prefetch of no unit": (
        tables("fsdp2", fsdp__overrides={"unit.1": {"forward_prefetch": ["block"]}}),
        'fsdp.overrides."unit.1".forward_prefetch: "block" is not a unit; units are unit.0, '
        "unit.1, unit.2, unit.3, root",
    ),
    "early unshard of no unit": (
        tables("fsdp2", fsdp__unshard_early=["units.1"]),
        'fsdp.unshard_early: "units.1" is not a unit; did you mean unit.1?',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    data, message = FAULTS[name]
    assert the_problem(data).startswith(message)


#: JSON, with which as_toml writes single values, has no such numbers.
WRITABLE = [name for name in FAULTS if not name.startswith(("not a num", "infin", "a share that"))]


@pytest.mark.parametrize("name", WRITABLE)
def test_faults_of_files_read_as_those_of_dictionaries(name: str, tmp_path: Path) -> None:
    data, message = FAULTS[name]
    path = tmp_path / "scenario.toml"
    path.write_text(as_toml(data), encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        build_workload(load(path))
    assert str(caught.value).startswith(f"{path}: {message}")


MODEL_FAULTS = {
    "absent": (
        {"hf_config": "absent.json"},
        "model.hf_config: cannot read {}/absent.json: No such",
    ),
    "a directory": ({"hf_config": "."}, "model.hf_config: cannot read {}: Is a directory"),
    "no path": ({"hf_config": 3}, "model.hf_config: 3 is not allowed; it must be the path of"),
    "not JSON": ({"hf_config": "torn.json"}, "model.hf_config: {}/torn.json is not JSON: "),
    "not text": ({"hf_config": "binary.json"}, "model.hf_config: {}/binary.json is not JSON: "),
    "not an object": ({"hf_config": "list.json"}, "model.hf_config: {}/list.json holds list, not"),
    "too little": (
        {"hf_config": "little.json"},
        "model: the model config lacks num_hidden_layers (looked for num_hidden_layers, n_layer, "
        "n_layers); num_attention_heads (looked for num_attention_heads, n_head, n_heads)",
    ),
    "a bad number in the file": (
        {"hf_config": "bad.json"},
        "model.hidden_size: -64 is not allowed; it must be at least 1 (in bad.json)",
    ),
    "a bad number beside it": (
        {"hf_config": "bad.json", "hidden_size": True},
        "model.hidden_size: true is not allowed; it must be an integer",
    ),
    "too many layers": (
        {"hf_config": str(LLAMA), "num_hidden_layers": 10**6},
        "model.num_hidden_layers: 1000000 is not allowed; it must be at most 10,000",
    ),
    "an unknown key": (
        {"hf_config": str(LLAMA), "hiden_size": 64},
        "model.hiden_size: unknown key; did you mean hidden_size?",
    ),
}


@pytest.mark.parametrize("name", MODEL_FAULTS)
def test_faults_of_model_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"hidden_size": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "little.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    (tmp_path / "bad.json").write_text(
        json.dumps(json.loads(LLAMA.read_text()) | {"hidden_size": -64})
    )
    table, message = MODEL_FAULTS[name]
    path = tmp_path / "scenario.toml"
    path.write_text(as_toml({"model": table, "fsdp": {"runtime": "fsdp2"}}))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    (found,) = caught.value.problems
    assert str(found).startswith(message.format(tmp_path))


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        ({"unit": "blocks"}, 'fsdp.unit: "blocks" is not a unit size; use "model", "block", '),
        ({"unit": {"block": 2}}, "fsdp.unit: { block = 2 } is not a unit size; use"),
        ({"unit": {"blocks": 0}}, "fsdp.unit.blocks: 0 is not allowed; it must be at least 1"),
        ({"unit": {"blocks": 99}}, "fsdp.unit: blocks = 99 is more than the model's 32 blocks"),
        ({"unit": ["layers.*"]}, 'fsdp.unit: "layers.*" matches no module; some are model.layers'),
        ({"unit": 2}, "fsdp.unit: 2 is not allowed; it must be a string, or a table, or a list"),
        (
            {"overrides": {"layers.99": {"reshard_after_forward": False}}},
            'fsdp.overrides."layers.99": "layers.99" is not a unit; did you mean layers.9?',
        ),
        ({"unshard_early": ["embed"]}, 'fsdp.unshard_early: "embed" is not a unit; units are'),
    ],
)
def test_units_that_a_model_does_not_have(fsdp: dict[str, Any], message: str) -> None:
    data = {"model": {"hf_config": str(LLAMA)}, "fsdp": {"runtime": "fsdp2", **fsdp}}
    assert the_problem(data).startswith(message)


# ---- options of another runtime


@pytest.mark.parametrize(
    ("runtime", "key", "value", "says"),
    [
        (
            "fsdp2",
            "sharding_strategy",
            "FULL_SHARD",
            "is not an option of fsdp2: FULL_SHARD is resh",
        ),
        (
            "fsdp2",
            "limit_all_gathers",
            True,
            "is not an option of fsdp2: FSDP2 has no rate limiter",
        ),
        ("fsdp2", "use_orig_params", True, "is not an option of fsdp2: FSDP2 always keeps"),
        (
            "fsdp2",
            "no_sync",
            True,
            "is not an option of fsdp2: write requires_gradient_sync = false",
        ),
        ("fsdp2", "overlap", False, "is not an option of fsdp2: FSDP2 always overlaps"),
        ("fsdp2", "backward_prefetch", "BACKWARD_PRE", "(set_modules_to_backward_prefetch); 0 is"),
        ("fsdp2", "forward_prefetch", True, "(set_modules_to_forward_prefetch)"),
        ("fsdp1", "reshard_after_forward", True, "is not an option of fsdp1: write sharding_strat"),
        (
            "fsdp1",
            "requires_gradient_sync",
            False,
            "is not an option of fsdp1: write no_sync = true",
        ),
        ("fsdp1", "overrides", {}, "is not an option of fsdp1: FSDP1 has no per-unit setters"),
        ("fsdp1", "unshard_early", [], "is not an option of fsdp1: FSDP1 has no unshard()"),
        ("fsdp1", "limit_all_gathers", 2, "2 is not allowed; it must be true or false: the limit"),
        ("fsdp1", "backward_prefetch", 1, '"BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH"'),
        ("fsdp1", "forward_prefetch", 1, "it must be true or false: FSDP1 gathers one unit ahead"),
        ("ddp", "sharding_factor", 8, "is not an option of ddp: DDP shards nothing"),
        ("ddp", "unit", "block", "is not an option of ddp: DDP has buckets"),
        ("ddp", "limit_all_gathers", True, "is not an option of ddp: DDP keeps all parameters"),
        (
            "textbook",
            "sharding_strategy",
            "FULL_SHARD",
            "is not an option of textbook: the textbook",
        ),
        ("textbook", "reshard_after_forward", True, "is not an option of textbook: the textbook"),
        ("textbook", "backward_prefetch", "PRE", 'must be "BACKWARD_PRE" or "NO_PREFETCH"'),
    ],
)
def test_options_of_another_runtime(runtime: str, key: str, value: object, says: str) -> None:
    found = the_problem(tables(runtime, **{f"fsdp__{key}": value}))
    assert found.startswith(f"fsdp.{key}: ")
    assert says in found


# ---- all faults at once


def test_all_faults_of_a_file_are_reported_together() -> None:
    """Also those that are found only by looking at several keys, of which others are at fault."""
    data = tables(
        "fsdp2",
        titel="x",
        workload__forward="2 GB",
        workload__calls=["unit.7"],
        fsdp__reshard_after_forward=3,
        fsdp__limit_all_gathers=True,
        fsdp__unshard_early=["unit.7"],
        training__optimiser="adam",
        training__seq_len=0,
        hardware={"gpus_per_node": 8, "memory": "80 XB"},
        allocator={"expandable_segment": True, "max_split_size_mb": 1},
    )
    assert {problem.partition(": ")[0] for problem in problems(data)} == {
        "titel",
        "workload.forward",
        "workload.calls",
        "fsdp.reshard_after_forward",
        "fsdp.limit_all_gathers",
        "fsdp.unshard_early",
        "training.optimiser",
        "training.seq_len",
        "hardware.memory",
        "allocator.expandable_segment",
        "allocator",
    }


def test_what_rests_on_a_fault_is_not_reported() -> None:
    """Whether 16 divides the world size depends on the nodes, which are to be corrected first."""
    data = tables(fsdp__sharding_factor=16, hardware={"nodes": "two", "gpus_per_node": 8})
    assert the_problem(data) == 'hardware.nodes: "two" is not allowed; it must be an integer'


def test_faults_beside_a_missing_runtime() -> None:
    data = {"workload": WORKLOAD | {"units": 0}, "fsdp": {"sharding_factor": 3}, "model": 3}
    keys = {problem.partition(": ")[0] for problem in problems(data)}
    assert keys == {"fsdp.runtime", "workload.units", "model"}


def test_a_message_of_several_lines_names_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(as_toml(tables(workload__units=0, fsdp__overlapp=True)))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path}:\n"
        "  workload.units: 0 is not allowed; it must be at least 1\n"
        "  fsdp.overlapp: unknown key; did you mean overlap?"
    )


def test_errors_survive_pickling() -> None:
    """Sweeps send them between processes."""
    error = ScenarioError("a.toml", [Problem("fsdp", "is missing")])
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.problems) == (str(error), error.problems)


# ---- overrides


def test_overrides_are_values_in_toml_or_bare_words() -> None:
    scenario = load(
        tables("fsdp1"),
        [
            "fsdp.runtime=fsdp2",
            "fsdp.reshard_after_forward=4",
            'fsdp.overrides."unit.1".reshard_after_forward=false',
            "workload.forward=3 s",
            'workload.backward=["1 s", "2 s", "3 s", "4 s"]',
            "training.frozen = ['unit.0']",
            "hardware.memory=40GiB",
            "title=a = b",
        ],
    )
    assert scenario.fsdp.runtime == "fsdp2"
    assert scenario.fsdp.reshard_after_forward == 4
    assert scenario.fsdp.overrides["unit.1"].reshard_after_forward is False
    assert scenario.workload is not None
    assert scenario.workload.forward == 3.0
    assert scenario.workload.backward == [1.0, 2.0, 3.0, 4.0]
    assert scenario.training.frozen == ("unit.0",)
    assert scenario.device.memory == 40 * 2**30
    assert scenario.title == "a = b"


def test_the_last_override_of_a_key_wins() -> None:
    assert load(tables(), ["workload.units=2", "workload.units=3"]).workload.units == 3


def test_overrides_leave_the_dictionary_alone() -> None:
    data = tables()
    before = copy.deepcopy(data)
    load(data, ["workload.units=2", "fsdp.overlap=false"])
    assert data == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fsdp.overlap", "--set: 'fsdp.overlap' is not KEY=VALUE"),
        ("=3", "--set: '=3' is not KEY=VALUE"),
        ("a b=3", "--set: 'a b' is not a dotted key"),
        ("fsdp..x=3", "--set: 'fsdp..x' is not a dotted key"),
        ("fsdp.overlapp=3", "fsdp.overlapp: unknown key; did you mean overlap? (from --set)"),
        ("fsdp=3", "fsdp: 3 is not allowed; it must be a table (from --set)"),
        (
            "workload.units=0",
            "workload.units: 0 is not allowed; it must be at least 1 (from --set)",
        ),
        (
            "workload.forward=2 GB",
            f'workload.forward: "2 GB" is in bytes, not seconds; {SECONDS} (from --set)',
        ),
        ("workload.forward=", f'workload.forward: "" is not a quantity in seconds; {SECONDS} '),
        ("workload.forward=1 #\nx=1", 'workload.forward: "1 #\\nx=1" is not a quantity'),
        ("fsdp.sharding_factor=5", "fsdp.sharding_factor: 5 does not divide the world size 8"),
    ],
)
def test_faults_of_overrides(override: str, message: str) -> None:
    assert the_problem(tables(), override).startswith(message)


def test_all_malformed_overrides_are_reported_together() -> None:
    assert len(problems(tables(), "x", "=1", "a b=2")) == 3


# ---- what is valid


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_resolved_scenarios_read_back_as_themselves(path: Path) -> None:
    scenario = load(path)
    again = load(tomllib.loads(as_toml(resolved(scenario))))
    assert again.model_dump() == scenario.model_dump()


def test_scenarios_know_where_they_come_from() -> None:
    scenario = load(SCENARIOS[0])
    assert (scenario.source, scenario.name) == (str(SCENARIOS[0]), SCENARIOS[0].stem)
    assert load(tables()).name == "scenario"


def test_scenarios_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tables()).title = "other"  # type: ignore[misc]


def test_defaults() -> None:
    scenario = load(tables("fsdp2"))
    assert (scenario.world_size, scenario.shard_factor, scenario.replicas) == (8, 8, 1)
    assert (scenario.param_dtype, scenario.reduce_dtype) == (None, None)
    assert load(tables()).iterations == 1


@pytest.mark.parametrize(
    ("fsdp", "factor"),
    [
        ({"runtime": "fsdp1"}, 16),
        ({"runtime": "fsdp1", "sharding_strategy": "HYBRID_SHARD"}, 8),
        ({"runtime": "fsdp1", "sharding_strategy": "NO_SHARD"}, 1),
        ({"runtime": "fsdp1", "sharding_factor": 4}, 4),
        ({"runtime": "ddp"}, 1),
        ({"runtime": "fsdp2", "sharding_factor": 2}, 2),
    ],
)
def test_sharding_factor(fsdp: dict[str, Any], factor: int) -> None:
    scenario = load(tables(fsdp=fsdp, hardware={"nodes": 2}))
    assert (scenario.shard_factor, scenario.replicas) == (factor, 16 // factor)


# ---- anything at all is a scenario or a ScenarioError

VALID: list[dict[str, Any]] = [
    tables(),
    tables("fsdp1", hardware={"nodes": 2}, training={"frozen": ["unit.0"]}),
    tables(
        "fsdp2",
        fsdp__overrides={"unit.*": {"reshard_after_forward": 4, "forward_prefetch": ["unit.0"]}},
        fsdp__unshard_early=["unit.0"],
        training={"activation_checkpointing": {"every": 2}, "micro_batch_size": 2},
    ),
    tables("ddp", workload__units=[{"name": "a", "params": [{"name": "w", "shape": [2, 3]}]}]),
    {"model": json.loads(LLAMA.read_text()), "fsdp": {"runtime": "fsdp2", "unit": {"blocks": 2}}},
    tables(allocator={"max_split_size_mb": 64}, sweep={"fsdp.sharding_factor": [1, 2, 4]}),
]

words = st.sampled_from(
    ["", "2 s", "-1 s", "1 GB", "textbook", "fsdp1", "fsdp2", "ddp", "BACKWARD_PRE", "unit.0", "*"]
)
numbers = st.sampled_from([0, 1, 2, 3, 7, 8, -1, 10**18, 0.5, 1e300, float("nan"), float("inf")])
scalars = words | numbers | st.booleans() | st.text(max_size=5) | st.dates()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of nested tables and lists lies."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in items:
        found.append((*prefix, key))
        if isinstance(value, (dict, list)):
            found += paths_of(value, (*prefix, key))
    return found


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """A valid scenario with keys dropped, renamed, and given other values."""
    data = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        *tables_, key = draw(st.sampled_from(paths_of(data) or [("fsdp",)]))
        inside: Any = data
        for part in tables_:
            inside = inside[part]
        kind = draw(st.sampled_from(["drop", "rename", "replace", "replace"]))
        if kind == "replace" or not isinstance(inside, dict):
            inside[key] = draw(values)
        elif kind == "drop":
            inside.pop(key, None)
        else:
            inside[draw(st.text(max_size=6) | st.just(f"{key}s"))] = inside.pop(key, 1)
    return data


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_a_mutated_scenario_is_a_scenario_or_a_scenario_error(data: dict[str, Any]) -> None:
    try:
        scenario = load(data)
        build_workload(scenario)
    except ScenarioError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.text.strip()
            assert "pydantic" not in str(problem).lower()
            assert "\n" not in str(problem)
    else:
        assert isinstance(scenario, Scenario)


@given(st.text(max_size=30))
def test_any_override_is_a_scenario_or_a_scenario_error(override: str) -> None:
    try:
        load(tables(), [override])
    except ScenarioError as error:
        assert error.problems


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_file_is_a_scenario_or_a_scenario_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioError):
        load(path)
