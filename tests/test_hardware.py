"""The hardware table: presets, overrides, and what is refused."""

from __future__ import annotations

import pytest
from fsdp_scenarios import tables
from pydantic import ValidationError

from fsdpsim.hardware import DEFAULT_GPU, PRESETS, Hardware, preset_names, read_preset
from fsdpsim.scenario import ScenarioError, load
from fsdpsim.simulate import simulate

EXPECTED = {
    "A100-SXM-40GB",
    "A100-SXM-80GB",
    "B200",
    "H100-SXM-80GB",
    "H100-SXM-96GB-500W",
    "H200-SXM-141GB",
    "MI300X",
    "V100-SXM-32GB",
}


def test_an_empty_table_is_one_node_of_the_default_preset() -> None:
    hardware = Hardware()
    assert hardware.gpu == DEFAULT_GPU == "H100-SXM-80GB"
    assert (hardware.nodes, hardware.gpus_per_node, hardware.world_size) == (1, 8, 8)
    assert hardware.peak_flops == 989.4e12
    assert hardware.memory_bandwidth == 3.35e12


def test_preset_names() -> None:
    assert set(preset_names()) == EXPECTED
    assert preset_names() == sorted(EXPECTED)


@pytest.mark.parametrize("gpu", sorted(EXPECTED))
def test_every_preset_is_a_complete_and_plausible_machine(gpu: str) -> None:
    hardware = Hardware(gpu=gpu, nodes=4)
    assert hardware.world_size == 32
    assert 15e12 <= hardware.peak_flops_fp32 <= hardware.peak_flops_tf32 <= hardware.peak_flops
    assert 30 * 2**30 < hardware.memory < 200 * 2**30
    # A node's NICs never outrun its NVLink.
    assert hardware.inter_node_bandwidth < hardware.intra_node_bandwidth
    assert 0.5 < hardware.efficiency <= 1.0
    assert isinstance(hash(hardware), int)


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_number_of_a_preset_stands_under_a_comment(path) -> None:  # type: ignore[no-untyped-def]
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("[")]
        if any("=" in line and not line.startswith("#") for line in lines):
            has_comment = any(line.startswith("#") for line in lines)
            in_commented_table = paragraph.startswith("[") or "\n[" in paragraph
            assert has_comment or in_commented_table or lines[0].startswith("base"), paragraph


def test_the_slowest_of_several_gpus() -> None:
    """The expected largest of n standard normal numbers: 1.4236 of 8, 2.5076 of 100."""
    assert Hardware(nodes=1, gpus_per_node=1).slowest_rank == 1.0
    assert Hardware(nodes=64, speed_spread=0.0).slowest_rank == 1.0
    for nodes, gpus, largest in ((1, 8, 1.4236), (25, 4, 2.5076)):
        hardware = Hardware(nodes=nodes, gpus_per_node=gpus, speed_spread=0.01)
        assert hardware.slowest_rank == pytest.approx(1 + 0.01 * largest, abs=2e-4)


def test_a_preset_can_build_on_another() -> None:
    small, big = Hardware(gpu="A100-SXM-40GB"), Hardware(gpu="A100-SXM-80GB")
    assert small.memory == 42298834944
    assert small.nccl == big.nccl
    assert small.peak_flops == big.peak_flops
    assert "base" not in read_preset("A100-SXM-40GB")


def test_every_field_can_be_overridden_with_units() -> None:
    hardware = Hardware.model_validate(
        {
            "gpu": "H100-SXM-80GB",
            "nodes": 8,
            "peak_flops": "500 TFLOP/s",
            "memory": "40 GiB",
            "inter_node_bandwidth": "100 Gb/s",
            "host": {"kernel_launch": "5 us"},
            "nccl": {"nvls": False, "simple": {"base": "1 us"}},
        }
    )
    assert hardware.peak_flops == 500e12
    assert hardware.memory == 40 * 2**30
    assert hardware.inter_node_bandwidth == 12.5e9
    assert hardware.host.kernel_launch == 5e-6
    assert not hardware.nccl.nvls
    # What a nested table leaves out stays the preset's.
    default = Hardware()
    assert hardware.host.cuda_malloc == default.host.cuda_malloc
    assert hardware.nccl.simple.base == 1e-6
    assert hardware.nccl.simple.step == default.nccl.simple.step
    assert hardware.nccl.ll == default.nccl.ll


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("H100-SXM-80", "H100-SXM-80GB"),
        ("h200", "H200-SXM-141GB"),
        ("mi300x", "MI300X"),
        ("A100-80GB", "A100-SXM-80GB"),
    ],
)
def test_an_unknown_preset_names_the_nearest_and_lists_all(written: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="is not a GPU preset") as error:
        Hardware(gpu=written)
    assert f'did you mean "{nearest}"?' in str(error.value)
    for name in EXPECTED:
        assert name in str(error.value)


@pytest.mark.parametrize("written", ["../secrets", "", 7, None, ["H100-SXM-80GB"]])
def test_what_is_no_name_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="is not a GPU preset"):
        Hardware.model_validate({"gpu": written})


@pytest.mark.parametrize(
    ("table", "where", "says"),
    [
        ({"peak_flop": 1e15}, "peak_flop", "Extra inputs"),
        ({"nccl": {"nvsl": True}}, "nccl.nvsl", "Extra inputs"),
        ({"host": {"launch": 1}}, "host.launch", "Extra inputs"),
        ({"memory": "80 GB/s"}, "memory", "not bytes"),
        ({"nodes": 0}, "nodes", "greater than or equal to 1"),
        ({"memory_efficiency": 1.2}, "memory_efficiency", "less than or equal to 1"),
        ({"compute_slowdown": 0.9}, "compute_slowdown", "greater than or equal to 1"),
        ({"collective_model": "logp"}, "collective_model", "nccl"),
        ({"gemm_efficiency": []}, "gemm_efficiency", "at least one"),
        ({"gemm_efficiency": [[1e9, 0.5], [1e9, 0.6]]}, "gemm_efficiency", "rise"),
        ({"gemm_efficiency": [[0, 0.5]]}, "gemm_efficiency", "positive"),
        ({"gemm_efficiency": [[1e9, 0.6], [1e10, 0.5]]}, "gemm_efficiency", "not fall"),
        ({"gemm_efficiency": [[1e9, 0.6], [1e10, 1.5]]}, "gemm_efficiency", "in (0, 1]"),
    ],
)
def test_bad_values_are_refused_where_they_stand(
    table: dict[str, object], where: str, says: str
) -> None:
    with pytest.raises(ValidationError) as error:
        Hardware.model_validate(table)
    found = {".".join(map(str, e["loc"])): e["msg"] for e in error.value.errors()}
    assert list(found) == [where]
    assert says in found[where]


def test_it_is_frozen_and_equal_by_value() -> None:
    assert Hardware() == Hardware(gpu="H100-SXM-80GB")
    assert hash(Hardware()) == hash(Hardware())
    with pytest.raises(ValidationError, match="frozen"):
        Hardware().nodes = 2  # type: ignore[misc]


def test_stand_alone_bandwidths_lose_nothing_to_kernels() -> None:
    hardware = Hardware()
    assert hardware.intra_node_in_training < 1
    alone = hardware.stand_alone()
    assert (alone.intra_node_in_training, alone.inter_node_in_training) == (1.0, 1.0)
    assert alone.nccl == hardware.nccl


def test_memory_outside_the_allocator() -> None:
    hardware = Hardware()
    context = 500 * 2**20
    assert hardware.memory_outside_allocator(0) == context
    assert hardware.memory_outside_allocator(1) == context + 2**30
    assert hardware.memory_outside_allocator(3) == context + 2**30 + 2 * 2**29


def test_hook_cost_of_a_llama_block_is_half_a_layer_boundary() -> None:
    # NeMo Automodel: 71 to 83 us at the boundary of two units with 9 parameters, two hooks.
    assert 71e-6 <= 2 * Hardware().host.hook(9) <= 83e-6


def test_what_lies_outside_is_counted_alike_after_an_out_of_memory() -> None:
    """Communicators take their buffers whether or not the job lives long enough to use them."""
    table = tables("fsdp2", 4, parameters=1 << 24)
    table["hardware"] |= {"memory": "1.6 GiB"}
    result = simulate(load(table))
    assert result.memory.oom is not None
    capacity = result.memory.allocator.reserved.memory.capacity
    assert result.outside_allocator + capacity == result.costs.hardware.memory


def test_no_calibration_makes_matrix_products_faster_than_the_peak() -> None:
    assert Hardware(efficiency=1.282).efficiency == 1.282
    with pytest.raises(ScenarioError) as caught:
        load(tables("fsdp2", 2) | {"hardware": {"efficiency": 5}})
    assert str(caught.value) == (
        "scenario: hardware.efficiency: 5.0 is not allowed; it must be at most 1.282: "
        "gemm_efficiency alone reaches 0.78 of the peak"
    )
