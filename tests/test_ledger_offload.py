"""ZeRO-R, ZeRO-Offload and ZeRO-Infinity against the figures of papers and lecture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.ledger import infinity, residual
from fsdpsim.ledger.fragmentation import EXAMPLE, run_story
from fsdpsim.ledger.infinity import Cluster, bandwidth_for, efficiency, largest_models
from fsdpsim.ledger.model_states import ddp, zero
from fsdpsim.ledger.offload import NODES, optimal, placement, placements
from fsdpsim.ledger.residual import Shape

GB = 1e9

# ---- ZeRO-R


def test_activations_of_gpt_2() -> None:
    """ZeRO, 3.2: 1.5B (48 layers of 1600), 1K tokens, batch 32: about 60 GB; checkpoints 5 GB."""
    gpt2 = Shape(batch=32, seq_len=1024, hidden=1600, layers=48)
    assert 2 * residual.activation_elements(gpt2) / GB == pytest.approx(60, rel=0.01)
    assert residual.checkpoint_bytes(gpt2) / GB == pytest.approx(5.03, abs=0.01)
    assert residual.checkpoint_bytes(gpt2, interval=2) / GB == pytest.approx(2.52, abs=0.01)


def test_partitioned_checkpoints_of_the_100b_model() -> None:
    """By the formula 67.1 and 4.2 GB; ZeRO, 6.1, says 33 and 2 GB (the first lecture, 6.1)."""
    model = Shape(batch=32, seq_len=1024, hidden=8192, layers=125)
    assert round(residual.checkpoint_bytes(model) / GB, 1) == 67.1
    assert round(residual.partitioned_checkpoint_bytes(model, 16) / GB, 1) == 4.2
    assert residual.partitioning_overhead() < 0.1


@pytest.mark.parametrize(("billions", "gigabytes"), [(1.5, 6), (3, 12), (175, 700)])
def test_one_buffer_for_all_gradients(billions: float, gigabytes: float) -> None:
    """ZeRO, 3.2, and the first lecture, 6.2: 4 bytes per parameter."""
    assert residual.fused_buffer_bytes(round(billions * GB)) == gigabytes * GB


def test_working_memory_of_the_largest_linear_layer() -> None:
    """hd to 4 hd: 1.1 GB for 8K, 68.7 GB for 64K, and a sixteenth of it in 16 tiles."""

    def working(hidden: int, tiles: int = 1) -> float:
        return residual.working_memory_bytes(4 * hidden**2, tiles=tiles) / GB

    assert round(working(8 * 1024), 1) == 1.1
    assert round(working(64 * 1024), 1) == 68.7
    assert working(64 * 1024, tiles=16) == working(64 * 1024) / 16 == working(16 * 1024)


def test_activation_working_memory() -> None:
    """ZeRO-Infinity, equation 5, by hand for 2 sequences of 4 tokens, 3 wide, 5 heads."""
    shape = Shape(batch=2, seq_len=4, hidden=3, layers=9, heads=5)
    each = residual.activation_working_memory_bytes(shape)
    assert each == 2 * 4 * (16 * 3 + 2 * 5 * 4)
    assert residual.activation_working_memory_bytes(shape, interval=3) == 3 * each


# ---- fragmentation, on the allocator itself


def test_checkpoints_between_activations_break_the_memory_up() -> None:
    """More than 30 % of the device is free (ZeRO, 6.3), and half of it cannot be had."""
    scattered = run_story(EXAMPLE, AllocatorSettings(), contiguous=False)
    assert not scattered.served
    assert scattered.free > 0.8 * EXAMPLE.capacity
    assert scattered.free > EXAMPLE.request
    assert scattered.in_pieces + len(EXAMPLE.activations) * EXAMPLE.checkpoint <= scattered.reserved
    assert scattered.reserved + EXAMPLE.request > EXAMPLE.capacity


def test_one_buffer_for_checkpoints_keeps_it_whole() -> None:
    contiguous = run_story(EXAMPLE, AllocatorSettings(), contiguous=True)
    assert contiguous.served
    assert contiguous.free == run_story(EXAMPLE, AllocatorSettings(), contiguous=False).free


def test_expandable_segments_return_the_pieces() -> None:
    """Their free pages are unmapped one by one, so checkpoints pin only their own."""
    settings = AllocatorSettings(expandable_segments=True)
    assert run_story(EXAMPLE, settings, contiguous=False).served


# ---- ZeRO-Offload


def test_four_placements_communicate_at_most_4_bytes_per_parameter() -> None:
    """ZeRO-Offload, table 1: everything on the GPU; g16, the update, or both on the CPU."""
    update = {"p32", "m32", "v32", "update", "float2half"}
    cheap = [p for p in placements() if p.communication <= 4]
    found = {frozenset(p.on_cpu): (p.communication, p.gpu_memory) for p in cheap}
    assert found == {
        frozenset(): (0, 16),
        frozenset({"g16"}): (4, 14),
        frozenset(update): (4, 4),
        frozenset(update | {"g16"}): (4, 2),
    }


def test_the_optimum_is_unique() -> None:
    least = [p for p in placements() if p.communication == 4 and p.gpu_memory == 2]
    assert least == [optimal()]
    assert set(NODES) - set(optimal().on_cpu) == {"p16"}


def test_all_placements_are_enumerated() -> None:
    found = placements()
    assert len(found) == 128 == len({p.on_cpu for p in found})
    assert all(p.gpu_memory + p.cpu_memory == 16 for p in found)
    assert min(p.communication for p in found if p.on_cpu) == 4


def test_6_bytes_of_communication_empty_the_gpu() -> None:
    """The first lecture, 7.1: the choice of ZeRO-Infinity."""
    empty = [p for p in placements() if p.gpu_memory == 0]
    assert min(p.communication for p in empty) == 6
    assert placement(NODES).communication == 6


def test_a_node_that_must_stay_on_the_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="forward_backward"):
        placement(("forward_backward",))


# ---- ZeRO-Infinity

V100 = 70e12
WHOLE = Shape(batch=2, seq_len=1024, hidden=8192, layers=100)


@given(
    batch=st.integers(1, 64),
    seq=st.integers(1, 8192),
    hidden=st.integers(1, 65536),
    layers=st.integers(1, 200),
    interval=st.integers(1, 8),
)
def test_intensities_are_the_paper_s(
    batch: int, seq: int, hidden: int, layers: int, interval: int
) -> None:
    """Section 4.1: seq bsz, seq bsz / 4 and 24 hd ci, whatever the depth."""
    shape = Shape(batch=batch, seq_len=seq, hidden=hidden, layers=layers)
    assert list(infinity.intensities(shape, interval=interval).values()) == pytest.approx(
        [seq * batch, seq * batch / 4, 24 * hidden * interval]
    )


def test_exercise_7() -> None:
    """70 TFLOPS, 1024 tokens, batch 2, 90 %: 308 GB/s for parameters, 1.23 TB/s for states."""
    found = infinity.intensities(WHOLE)
    assert round(bandwidth_for(0.9, found["parameters and gradients"], V100) / GB) == 308
    assert round(bandwidth_for(0.9, found["optimizer state"], V100) / 1e12, 2) == 1.23


def test_the_paper_s_bandwidths_suffice() -> None:
    """Section 4.2: 70 GB/s for parameters at the smallest batch, 1.5 TB/s for the optimizer at 90 %
    with batch 2, 2 GB/s for checkpoints of 2K hidden, 1 GB/s from 8K on."""
    assert efficiency(1024, 70e9, V100) > 0.5
    assert efficiency(512, 1.5e12, V100) > 0.9
    assert efficiency(24 * 2048, 2e9, V100) > 0.5
    assert efficiency(24 * 8192, 1e9, V100) > 0.5
    assert efficiency(24 * 2048, 4e9, V100) > 0.7


@given(
    wanted=st.floats(0.01, 0.99),
    intensity=st.floats(1, 1e6),
    peak=st.floats(1e12, 1e16),
)
def test_a_bandwidth_gives_the_efficiency_that_asked_for_it(
    wanted: float, intensity: float, peak: float
) -> None:
    bandwidth = bandwidth_for(wanted, intensity, peak)
    assert efficiency(intensity, bandwidth, peak) == pytest.approx(wanted)


@pytest.mark.parametrize("wanted", [0, 1, 1.5])
def test_an_efficiency_outside_0_and_1_is_refused(wanted: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bandwidth_for(wanted, 1024, V100)


def test_all_links_together_beat_one_owner() -> None:
    """Section 6.1: 16 links bring 48 GB/s from CPUs, one owner's PCIe 12; the GPUs take 70. On 64
    DGX-2 the links add up to 3 TB/s from CPUs and 1.5 TB/s from NVMe."""
    assert infinity.owner_bandwidth() == 12e9
    assert infinity.partitioned_bandwidth(16, infinity.CPU_BANDWIDTH) == 48e9
    assert infinity.partitioned_bandwidth(1024, infinity.CPU_BANDWIDTH) == 70e9
    assert 1024 * infinity.CPU_BANDWIDTH > 3e12
    assert 1024 * infinity.NVME_BANDWIDTH > 1.5e12


def test_largest_models_of_a_dgx_2() -> None:
    """16 V100 of 32 GB: ZeRO-Offload about 13B (limited by the GPU), ZeRO-Infinity over 1T."""
    cluster = Cluster(nodes=1, gpus_per_node=16, gpu_memory=32_000_000_000)
    found = {m.name: m for m in largest_models(cluster, ddp(), zero(3, 16))}
    assert {name: m.parameters / GB for name, m in found.items()} == {
        "DDP": 1.75,
        "ZeRO-3 on GPUs": 28,
        "ZeRO-Offload": 14,
        "ZeRO-Infinity, CPU": 75,
        "ZeRO-Infinity, NVMe": 1400,
    }
    assert found["ZeRO-Offload"].limited_by == "GPU"


def test_32_nodes_hold_32_trillion_parameters() -> None:
    """The paper trains 32T on 32 DGX-2; NVMe alone would hold 44.8T in 20 bytes each."""
    cluster = Cluster(nodes=32, gpus_per_node=16, gpu_memory=32_000_000_000)
    *_, nvme = largest_models(cluster, ddp(), zero(3, cluster.gpus))
    assert nvme.parameters == 44_800_000_000_000


def test_a_small_cpu_memory_limits_zero_offload() -> None:
    cluster = Cluster(nodes=1, gpus_per_node=1, gpu_memory=80_000_000_000, cpu_memory=140_000_000)
    found = {m.name: m for m in largest_models(cluster, ddp(), zero(3, 1))}
    assert found["ZeRO-Offload"].parameters == 10_000_000
    assert found["ZeRO-Offload"].limited_by == "CPU"
