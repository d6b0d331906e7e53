"""What the shipped sweeps must find: granularity, message size, hybrid sharding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fsdpsim.scenario import load
from fsdpsim.sweeps import Row, sweep

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def rows_of(name: str, *overrides: str) -> list[Row]:
    return sweep(load(SCENARIOS / name, overrides))


# ---- hybrid sharding


@pytest.fixture(scope="module")
def hybrid() -> dict[int, Row]:
    rows = rows_of("sweep_hybrid_8x8.toml")
    return {row.settings["fsdp.sharding_factor"]: row for row in rows}


MODEL_BYTES = 2 * (40 * 12 * 5120**2 + 32_000 * 5120)


def between_nodes(row: Row) -> float:
    found = row.figures["collectives"].values()
    return sum(c["bytes_sent_between_nodes_per_rank"] for c in found)


def test_full_sharding_sends_75_gb_off_the_node_and_hybrid_sharding_5(
    hybrid: dict[int, Row],
) -> None:
    assert round(MODEL_BYTES / 1e9, 2) == 25.49
    assert between_nodes(hybrid[64]) == pytest.approx(3 * 63 / 64 * MODEL_BYTES, rel=1e-12)
    assert between_nodes(hybrid[8]) == pytest.approx(2 * 7 / 8 * MODEL_BYTES / 8, rel=1e-12)
    assert round(between_nodes(hybrid[64]) / 1e9, 2) == 75.29
    assert round(between_nodes(hybrid[8]) / 1e9, 2) == 5.58


def test_network_seconds_of_full_sharding_against_compute(hybrid: dict[int, Row]) -> None:
    figures = hybrid[64].figures
    latency = 3 * 41 * 63 * 10e-6
    seconds = sum(c["time_s"] for c in figures["collectives"].values())
    assert seconds - latency == pytest.approx(75.29e9 / 50e9, rel=1e-3)
    assert round(seconds - latency, 2) == 1.51
    assert round(figures["compute_time_s"], 2) == 2.53


def test_memory_falls_with_f_and_the_smallest_do_not_fit(hybrid: dict[int, Row]) -> None:
    assert [hybrid[f].status for f in (1, 2)] == ["oom", "oom"]
    fitting = [hybrid[f].figures["peak_allocated_bytes"] for f in (4, 8, 16, 32, 64)]
    assert all(a > b for a, b in pairwise(fitting))
    # Between F = 4 and 8 an eighth of the sharded state goes: 2 + 12 bytes and the gradient's 2.
    state = MODEL_BYTES // 2 * 16
    assert fitting[0] - fitting[1] == pytest.approx(state / 8, rel=0.02)


def test_a_group_on_one_node_sends_nothing_off_it(hybrid: dict[int, Row]) -> None:
    kinds = hybrid[8].figures["collectives"]
    assert kinds["all_gather"]["bytes_sent_between_nodes_per_rank"] == 0
    assert kinds["reduce_scatter"]["bytes_sent_between_nodes_per_rank"] == 0
    sent = kinds["all_reduce"]["bytes_sent_per_rank"]
    assert kinds["all_reduce"]["bytes_sent_between_nodes_per_rank"] == sent > 0


# ---- message size


@pytest.fixture(scope="module")
def pieces() -> dict[int, Row]:
    return {row.settings["workload.units"]: row for row in rows_of("sweep_message_size.toml")}


def gather_seconds(row: Row) -> float:
    """One pass over all elements: forward and backward gather each piece."""
    return row.figures["collectives"]["all_gather"]["time_s"] / 2


def test_pieces_hold_all_elements(pieces: dict[int, Row]) -> None:
    for count, row in pieces.items():
        assert count * row.settings["workload.parameters"] == 2**30


def test_33_million_elements_a_piece_take_13_percent_longer_than_one_piece(
    pieces: dict[int, Row],
) -> None:
    ratio = gather_seconds(pieces[32]) / gather_seconds(pieces[1])
    exact = (32 * 7 * 5e-6 + 7 / 8 * 2**32 / 450e9) / (7 * 5e-6 + 7 / 8 * 2**32 / 450e9)
    assert ratio == pytest.approx(exact, rel=1e-9)
    assert round(ratio, 2) == 1.13


def test_smaller_pieces_only_take_longer_and_ever_more(pieces: dict[int, Row]) -> None:
    seconds = [gather_seconds(row) for row in pieces.values()]
    assert all(a < b for a, b in pairwise(seconds))
    assert seconds[-1] > 4 * seconds[0]


# ---- unit size


@pytest.fixture(scope="module")
def unit_sizes() -> list[Row]:
    smaller = [
        "sweep.'fsdp.unit'=[{blocks=20}, {blocks=10}, {blocks=5}, 'block', 'sublayer', 'linear']",
        "training.iterations=2",
    ]
    return rows_of("sweep_unit_size_13b.toml", *smaller)


def test_smaller_units_need_less_memory_and_more_collectives(unit_sizes: list[Row]) -> None:
    memory = [row.figures["peak_allocated_bytes"] for row in unit_sizes]
    assert all(a > b for a, b in pairwise(memory))
    calls = [sum(c["count"] for c in row.figures["collectives"].values()) for row in unit_sizes]
    assert all(a < b for a, b in pairwise(calls))
    # Two all-gathers and a reduce-scatter of every unit (281: the head is a linear layer too); the
    # root stays gathered between forward and backward.
    assert calls == [3 * units + 2 for units in (2, 4, 8, 40, 80, 281)]


def test_communication_time_rises_as_units_get_smaller(unit_sizes: list[Row]) -> None:
    times = [sum(c["time_s"] for c in row.figures["collectives"].values()) for row in unit_sizes]
    assert all(a < b for a, b in pairwise(times))


def test_a_block_is_the_fastest_unit_and_the_extremes_expose_communication(
    unit_sizes: list[Row],
) -> None:
    exposed = {
        str(row.settings["fsdp.unit"]): row.figures["exposed_communication_s"] for row in unit_sizes
    }
    steps = {str(row.settings["fsdp.unit"]): row.figures["step_time_s"] for row in unit_sizes}
    assert min(steps, key=lambda unit: steps[unit]) == "block"
    assert exposed["{'blocks': 20}"] > 5 * exposed["block"]
    assert exposed["linear"] > 2 * exposed["block"]


def test_the_peak_is_the_sharded_state_and_a_few_of_the_largest_unit(unit_sizes: list[Row]) -> None:
    """O(sum psi / F + max psi): what grows with the unit is a small multiple of it."""
    block = 317_204_480  # parameters of a Llama 2 13B block
    by_unit = {str(row.settings["fsdp.unit"]): row.figures for row in unit_sizes}
    large, small = by_unit["{'blocks': 10}"], by_unit["{'blocks': 5}"]
    added = (large["peak_allocated_bytes"] - small["peak_allocated_bytes"]) / (5 * block)
    # bf16 parameters gathered once or twice, bf16 gradients and fp32 reduce-scatter input
    assert 2 + 2 + 4 <= added <= 2 * 2 + 2 + 4 + 4
