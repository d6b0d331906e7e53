"""``fsdpsim ledger --infinity``: the bandwidth that offloading needs, and the sizes it allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Group

from fsdpsim.ledger import infinity
from fsdpsim.ledger.model_states import ddp, zero
from fsdpsim.ledger.residual import Shape
from fsdpsim.ledger.views.common import (
    Report,
    Shown,
    counted,
    head,
    show_count,
    show_decimal,
    show_head,
    show_rate,
    table,
)
from fsdpsim.ledger.views.residual import shape_of
from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.simulate import build_workload
from fsdpsim.workload import Workload

#: Wanted efficiencies for which bandwidths are given.
EFFICIENCIES = (0.5, 0.9, 0.99)


def report(scenario: Scenario, *, cpu_memory: int, nvme: int) -> Report:
    """What offloading needs, what links bring, and how large a model may be.

    ``cpu_memory`` and ``nvme`` are bytes of one node.
    """
    workload, hardware = build_workload(scenario), scenario.device
    found = head(scenario, workload)
    peak = hardware.peak_flops * hardware.gemm_efficiency[-1][1] * hardware.efficiency
    found["achievable_flops"] = peak
    found["requirements"] = [
        _requirement(name, intensity, peak)
        for name, intensity in _intensities(scenario, workload).items()
    ]
    found["owner_bytes_per_s"] = infinity.owner_bandwidth()
    found["partitioned"] = [_links(n * hardware.gpus_per_node) for n in _powers(hardware.nodes)]
    cluster = infinity.Cluster(
        nodes=hardware.nodes,
        gpus_per_node=hardware.gpus_per_node,
        gpu_memory=hardware.memory,
        cpu_memory=cpu_memory,
        nvme=nvme,
    )
    found["cluster"] = asdict(cluster)
    largest = infinity.largest_models(cluster, ddp(), zero(3, cluster.gpus))
    found["largest_models"] = [asdict(model) for model in largest]
    return found


def _intensities(scenario: Scenario, workload: Workload) -> dict[str, float]:
    """AIT of the scenario; that of checkpoints needs the hidden size, so a [model]."""
    if scenario.model is not None:
        return infinity.intensities(shape_of(scenario))
    if not workload.tokens:
        text = "--infinity needs the tokens per GPU: give workload.tokens, or a [model]"
        raise ScenarioError(scenario.source, [Problem("", text)])
    found = infinity.intensities(Shape(batch=1, seq_len=workload.tokens, hidden=1, layers=1))
    del found["activation checkpoints"]
    return found


def _requirement(name: str, intensity: float, peak: float) -> Report:
    return {
        "what": name,
        "flops_per_byte": intensity,
        "bytes_per_s": {
            wanted: infinity.bandwidth_for(wanted, intensity, peak) for wanted in EFFICIENCIES
        },
    }


def _links(links: int) -> Report:
    return {
        "links": links,
        "cpu_bytes_per_s": infinity.partitioned_bandwidth(links, infinity.CPU_BANDWIDTH),
        "nvme_bytes_per_s": infinity.partitioned_bandwidth(links, infinity.NVME_BANDWIDTH),
    }


def _powers(nodes: int) -> list[int]:
    """1, 2, 4, ... nodes, and all of them."""
    return sorted({min(2**i, nodes) for i in range(nodes.bit_length() + 1)})


# ---- the terminal


def tables(found: Report) -> Shown:
    """Bandwidth needed, bandwidth brought, and sizes."""
    yield show_head(found)
    yield _requirements_table(found)
    yield _links_table(found)
    yield _sizes_table(found)


def _requirements_table(found: Report) -> Group:
    rate = found["achievable_flops"] / 1e12
    return table(
        f"Bandwidth per GPU for an efficiency, at {rate:.0f} TFLOP/s (GEMMs'), no overlap",
        "what moves",
        "FLOP/byte",
        *(f"{wanted:.0%}" for wanted in EFFICIENCIES),
        rows=map(_requirement_cells, found["requirements"]),
    )


def _requirement_cells(row: Report) -> Iterator[str]:
    yield row["what"]
    yield f"{row['flops_per_byte']:,.0f}"
    yield from map(show_rate, row["bytes_per_s"].values())


def _links_table(found: Report) -> Group:
    limit = show_rate(infinity.GPU_TO_GPU_BANDWIDTH)
    owner = show_rate(found["owner_bytes_per_s"])
    rows = [
        (
            f"cut over {counted(row['links'], 'GPU')}",
            show_rate(row["cpu_bytes_per_s"]),
            show_rate(row["nvme_bytes_per_s"]),
        )
        for row in found["partitioned"]
    ]
    return table(
        f"Parameters from CPU or NVMe, with the paper's DGX-2 links (GPU to GPU at most {limit})",
        "each parameter is",
        "from CPU",
        "from NVMe",
        rows=[("one owner's", owner, owner), *rows],
    )


def _sizes_table(found: Report) -> Group:
    cluster = found["cluster"]
    rows = (
        (row["name"], show_count(row["parameters"]), row["limited_by"])
        for row in found["largest_models"]
    )
    reserve = show_decimal(infinity.RESERVE)
    return table(
        f"Largest model with {show_decimal(cluster['cpu_memory'])} of CPU memory and "
        f"{show_decimal(cluster['nvme'])} of NVMe per node, {reserve} of each GPU left free",
        "states lie on",
        "parameters",
        "limited by",
        rows=rows,
    )
