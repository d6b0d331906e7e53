"""Bytes sent per step against the papers, the lectures' exercises and DESIGN's figures."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.hardware import Hardware
from fsdpsim.ledger.communication import (
    Traffic,
    bare_seconds,
    hybrid_factors,
    traffic,
    transfers,
)
from fsdpsim.ledger.model_states import Strategy, ddp, hybrid_shard, zero, zero_1_by_all_reduce
from fsdpsim.ledger.quantised import VARIANTS, volume, volumes

PSI = 1_000_000_000


def cluster(nodes: int, gpus: int, **bandwidths: str) -> Hardware:
    return Hardware.model_validate({"nodes": nodes, "gpus_per_node": gpus, **bandwidths})


def sent(strategy: Strategy, hardware: Hardware, units: Sequence[int] = (PSI,)) -> Traffic:
    return traffic(transfers(strategy, units, hardware))


# ---- ZeRO's volumes and the first lecture's exercises


@pytest.mark.parametrize(
    ("strategy", "volume"),
    [
        (ddp(), 2),
        (zero(1, 4), 2),
        (zero_1_by_all_reduce(4), 3),
        (zero(2, 4), 2),
        (zero(3, 4), 3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_volumes_of_zero(strategy: Strategy, volume: int) -> None:
    """ZeRO, section 7, as a ring of four sends it: 2 P is 1.5 P sent, 3 P is 2.25 P, in 2 bytes."""
    assert sent(strategy, cluster(1, 4)).total == volume * 0.75 * 2 * PSI


def test_exercise_2_zero_2_sends_what_data_parallelism_sends() -> None:
    for n in (2, 4, 8, 64):
        hardware = cluster(max(n // 8, 1), min(n, 8))
        assert sent(zero(2, n), hardware).total == sent(ddp(), hardware).total
        assert sent(ddp(), hardware).total == pytest.approx(2 * (n - 1) / n * 2 * PSI)


def test_exercise_3_half_of_the_all_reduce_of_zero_1_is_wasted() -> None:
    """All-reduce and all-gather are 3 (N - 1) / N x 2 P; with a reduce-scatter it is 2."""
    hardware, ring = cluster(1, 8), 7 / 8 * 2 * PSI
    assert sent(zero_1_by_all_reduce(8), hardware).total == 3 * ring
    assert sent(zero(1, 8), hardware).total == 2 * ring


def test_exercise_6_hybrid_sharding_leaves_the_node_with_a_thirteenth() -> None:
    """8 nodes of 8: 2 x 7/8 x M/8 = 0.22 M against 3 x 63/64 M = 2.95 M."""
    hardware, model = cluster(8, 8), 2 * PSI
    hybrid = sent(hybrid_shard(8), hardware)
    full = sent(zero(3, 64), hardware)
    assert hybrid.across_nodes == 2 * 7 / 8 / 8 * model
    assert hybrid.in_node == 3 * 7 / 8 * model
    assert full.across_nodes == 3 * 63 / 64 * model
    assert full.in_node == 0
    assert full.across_nodes / hybrid.across_nodes == pytest.approx(13.5)


def test_13b_on_64_gpus() -> None:
    """The first lecture, 5.5: M = 25.49 GB in 40 blocks and an embedding."""
    hardware = cluster(8, 8, inter_node_bandwidth="50 GB/s", intra_node_bandwidth="450 GB/s")
    units = [32_000 * 5120] + [12 * 5120**2] * 40
    assert round(2 * sum(units) / 1e9, 2) == 25.49
    full = sent(zero(3, 64), hardware, units)
    assert round(full.across_nodes / 1e9, 2) == 75.29
    assert round(bare_seconds(full, hardware), 2) == 1.51
    assert round(sent(hybrid_shard(8), hardware, units).across_nodes / 1e9, 2) == 5.58


# ---- the second lecture


def test_its_layer_of_4_mb() -> None:
    """Section 2.1: 4 ranks, 3 x 3 MB, 2.25 times the layer."""
    layer = transfers(zero(3, 4), [4_000_000], cluster(1, 4), gather_bytes=1, reduce_bytes=1)
    assert [transfer.sent for transfer in layer] == [3e6, 3e6, 3e6]


def test_its_7b_table_counts_elements() -> None:
    """Section 1.3 prints 14 GB for DDP and 21 GB for ZeRO-3: 2 P and 3 P elements. In 16 bit that
    is 28 and 42 GB, of which a ring of 8 sends 7/8."""
    hardware, numel = cluster(1, 8), 7_000_000_000
    assert sent(ddp(), hardware, [numel]).total == pytest.approx(7 / 8 * 28e9)
    assert sent(zero(3, 8), hardware, [numel]).total == pytest.approx(7 / 8 * 42e9)


def test_its_evaluator_s_times() -> None:
    """70.6B on 16 nodes of 8 over 25 GB/s: by its formulas ZeRO-3 takes 7.89 s, not 16.8.

    The evaluator counts 3 P in GiB with one byte per element and without (N - 1) / N. The 16.8 s of
    its closing lines are what 16 bit and a ring give. Its HYBRID_SHARD sends 2 P between nodes; the
    all-reduce is over shards only, an eighth of that.
    """
    hardware = cluster(16, 8, inter_node_bandwidth="25 GB/s", intra_node_bandwidth="400 GB/s")
    numel = 70_600_000_000
    assert round(3 * numel / 2**30 / 25, 2) == 7.89
    assert round(2 * numel / 2**30 / 25, 2) == 5.26

    one_byte = transfers(zero(3, 128), [numel], hardware, gather_bytes=1, reduce_bytes=1)
    ring, gib = 127 / 128, 2**30 / 1e9
    seconds = bare_seconds(traffic(one_byte), hardware)
    assert seconds / ring / gib == pytest.approx(7.89, abs=0.005)

    full = bare_seconds(sent(zero(3, 128), hardware, [numel]), hardware)
    assert round(full, 1) == 16.8
    hybrid = sent(hybrid_shard(8), hardware, [numel])
    assert hybrid.across_nodes == pytest.approx(2 * 15 / 16 * 2 * numel / 8)
    assert hybrid.across_nodes < 2 * numel / 4


# ---- laws


@given(
    nodes=st.sampled_from((1, 2, 4, 8)),
    gpus=st.sampled_from((1, 2, 4, 8)),
    units=st.lists(st.integers(1, 10**9), min_size=1, max_size=5),
    micro=st.integers(1, 4),
)
def test_reducing_in_two_steps_sends_no_less(
    nodes: int, gpus: int, units: list[int], micro: int
) -> None:
    """Hybrid sharding all-reduces beside what full sharding does inside the group."""
    hardware = cluster(nodes, gpus)
    for factor in hybrid_factors(hardware):
        both = transfers(hybrid_shard(factor), units, hardware, micro_batches=micro)
        assert [t.kind for t in both] == [
            "all_gather",
            "all_gather",
            "reduce_scatter",
            "all_reduce",
        ]
        assert all(t.times == micro for t in both)
        assert both[3].nbytes * factor == both[2].nbytes
        total = traffic(both)
        assert total.on_network <= total.across_nodes
        assert (total.across_nodes > 0) == (nodes > 1)


def test_whole_gradients_are_reduced_once_for_all_micro_batches() -> None:
    hardware = cluster(1, 8)
    for strategy, times in ((ddp(), [1]), (zero(1, 8), [1, 1]), (zero(2, 8), [4, 1])):
        found = transfers(strategy, [PSI], hardware, micro_batches=4)
        assert [t.times for t in found] == times


def test_hybrid_factors_fit_the_nodes() -> None:
    assert hybrid_factors(cluster(1, 8)) == [2, 4]
    assert hybrid_factors(cluster(8, 8)) == [2, 4, 8, 16, 32]
    assert hybrid_factors(cluster(4, 6)) == [2, 3, 6, 12]
    assert hybrid_factors(cluster(1, 1)) == []


def test_a_factor_that_nodes_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="neither divides 8 GPUs per node nor is a multiple"):
        transfers(hybrid_shard(12), [PSI], cluster(3, 8))


# ---- ZeRO++


def test_zero_plus_plus_moves_a_quarter() -> None:
    """arXiv 2306.10209: 3 M, 2.5 M with an int8 forward gather, 1.5 M with a copy in the node,
    0.75 M with int4 gradients."""
    assert [v.volume for v in volumes(PSI, cluster(8, 8))] == [3, 2.5, 2, 1.5, 0.75]


def test_zero_plus_plus_on_many_nodes_comes_close_to_the_paper_s_volumes() -> None:
    model = 2 * PSI
    for found in volumes(PSI, cluster(1024, 8)):
        assert found.network_bytes == pytest.approx(found.volume * model, rel=1e-3)


def test_unquantised_zero_3_is_what_its_rings_send_over_the_network() -> None:
    """A node sends what its GPUs send on the mean, times their number."""
    hardware = cluster(8, 8)
    assert volume(VARIANTS[0], PSI, hardware).network_bytes == pytest.approx(
        8 * sent(zero(3, 64), hardware).on_network
    )


def test_the_copy_in_the_node_costs_its_shard_and_nvlink() -> None:
    found = volume(VARIANTS[3], PSI, cluster(8, 8))
    assert found.secondary_bytes == 2 * PSI // 8
    assert Fraction(found.in_node_bytes) == Fraction(7, 8) * 2 * PSI


def test_one_node_has_no_network() -> None:
    plain, *rest = volumes(PSI, cluster(1, 8))
    assert plain.in_node_bytes == sent(zero(3, 8), cluster(1, 8)).in_node
    assert all(v.network_bytes == 0 and v.in_node_bytes < plain.in_node_bytes for v in rest)
