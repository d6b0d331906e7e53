"""ZeRO++'s int8 all-gathers and hierarchical partitioning under FSDP1 and FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fsdp_scenarios import Timeline, scenario, tables
from recordings import program_of

from fsdpsim.ledger.quantised import VARIANTS, volume
from fsdpsim.memory import Malloc
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

INT8 = {"all_gather_dtype": "int8"}
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
RUNTIMES = ("fsdp1", "fsdp2")


def run(runtime: str, layers: int = 4, *, nodes: int = 1, **fsdp: Any) -> Result:
    found = tables(runtime, layers, root=False, fsdp=fsdp, training=MIXED)
    return simulate(load(found | {"hardware": {"nodes": nodes, "gpus_per_node": 8 // nodes}}))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_shard_is_quantised_gathered_and_restored(runtime: str) -> None:
    time = Timeline(run(runtime, **INT8))
    gather = time.all("all_gather", 1)[0]
    assert gather.collective.dtype == "int8"
    assert (gather.collective.nbytes, gather.collective.shard_nbytes) == (1024, 128)
    restore = "dequantize_param" if runtime == "fsdp1" else "dequantize_copy_out"
    quantize, restored = time.all("quantize_shard", 1)[0], time.all(restore, 1)[0]
    assert quantize.end <= gather.start and gather.end <= restored.start
    assert restored.end <= time.all("forward", 1)[0].start
    assert not time.all("cast_shard")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_it_halves_what_all_gathers_send_and_nothing_else(runtime: str) -> None:
    plain, int8 = run(runtime).collectives, run(runtime, **INT8).collectives
    for kind, share in (("all_gather", 2), ("reduce_scatter", 1)):
        assert plain[kind].bytes_sent_per_rank == share * int8[kind].bytes_sent_per_rank
        assert plain[kind].count == int8[kind].count


def buffers(runtime: str, **fsdp: Any) -> Counter[tuple[str, int]]:
    program = program_of(scenario(runtime, 2, root=False, fsdp=fsdp, training=MIXED))
    last = (s.buffer for s in program.steps if type(s) is Malloc and s.buffer.iteration == 3)
    return Counter((b.name, b.nbytes) for b in last if b.category == "all_gather")


def test_memory_beside_the_whole_parameters() -> None:
    """FSDP1 gathers into a buffer of its own; FSDP2's copy-out restores, from half the output."""
    assert buffers("fsdp1", **INT8) == {
        ("mp_shard", 128): 4,
        ("quantized_param", 1024): 4,
        ("full_param", 2048): 4,
    }
    assert buffers("fsdp2", **INT8) == {
        ("quantize_shard", 128): 4,
        ("all_gather_output", 1024): 4,
        ("1.weight", 2048): 2,
        ("2.weight", 2048): 2,
    }


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_whole_parameter_is_not_quantised(runtime: str) -> None:
    alone = tables(runtime, 2, root=False, world=1, fsdp=INT8, training=MIXED)
    names = {op.name for op in simulate(load(alone)).ops}
    assert not {name for name in names if "quantize" in name}


def test_offloaded_shards_are_quantised_on_the_gpu() -> None:
    for runtime, key in (("fsdp1", {"cpu_offload": True}), ("fsdp2", {"offload_policy": "cpu"})):
        result = run(runtime, **INT8, **key)
        assert {op.nbytes for op in Timeline(result).all("h2d")} == {512}  # fp32
        assert Timeline(result).all("quantize_shard")


# ---- hierarchical partitioning: reshard_after_forward = n


def test_a_copy_per_node_is_gathered_inside_it() -> None:
    """ZeRO++'s hpZ: forward gathers over all ranks, backward over the node from a second partition
    in the compute dtype, which is not quantised."""
    result = run("fsdp2", nodes=2, reshard_after_forward=4, **INT8)
    time = Timeline(result)
    seen = {
        (op.phase, op.collective.group_size, op.collective.dtype) for op in time.all("all_gather")
    }
    assert seen == {("forward", 8, "int8"), ("backward", 4, "bfloat16")}
    between = result.collectives["all_gather"].bytes_sent_between_nodes_per_rank
    assert between == 7 / 8 * 1024 * 4


@pytest.mark.parametrize(
    ("name", "fsdp"),
    [
        ("ZeRO-3", {"reshard_after_forward": True}),
        ("int8 gathers, both", {"reshard_after_forward": True, **INT8}),
        ("qwZ + copy in node (hpZ)", {"reshard_after_forward": 4, **INT8}),
    ],
)
def test_simulated_volume_is_the_ledger_s(name: str, fsdp: dict[str, Any]) -> None:
    """What a rank sends in rings over the nodes is what a node puts on the network."""
    result = run("fsdp2", nodes=2, **fsdp)
    variant = next(v for v in VARIANTS if v.name == name)
    expected = volume(variant, 4 * 1024, result.scenario.device)
    collectives = result.collectives.values()
    between = sum(c.bytes_sent_between_nodes_per_rank for c in collectives)
    assert between == expected.network_bytes
    inside = sum(c.bytes_sent_per_rank for c in collectives) - between
    assert inside == expected.in_node_bytes
