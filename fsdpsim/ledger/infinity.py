"""ZeRO-Infinity: what bandwidth offloading needs, and how large a model may then be.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning", arXiv 2104.07857: section 3 (bytes), section 4 (arithmetic intensity AIT = FLOPs / bytes
moved, and efficiency = AIT bw / (AIT bw + peak) without overlap), section 6.1 (bandwidth-centric
partitioning) and figure 2 (sizes and bandwidths of a DGX-2).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpsim.ledger.model_states import StateBytes, Strategy, bytes_per_parameter, largest_model
from fsdpsim.ledger.offload import optimal
from fsdpsim.ledger.residual import Shape, checkpoint_bytes

#: Bytes/s of one PCIe 3 link, of CPU and NVMe reads per GPU when all GPUs of a DGX-2 read at once,
#: and between GPUs (figure 2b).
PCIE_BANDWIDTH = 12e9
CPU_BANDWIDTH = 3.0e9
NVME_BANDWIDTH = 1.6e9
GPU_TO_GPU_BANDWIDTH = 70e9

#: Bytes of CPU memory and NVMe in a DGX-2 (figure 2b), the paper's node.
DGX2_CPU_MEMORY = 1_500_000_000_000
DGX2_NVME = 28_000_000_000_000

#: Bytes of GPU memory left for activations and working memory in the estimates of sizes (a choice).
RESERVE = 4_000_000_000

#: 20 bytes per parameter, fp32 gradients among them (section 3).
INFINITY_BYTES = StateBytes(fp32_gradients=4)


def parameters(shape: Shape) -> int:
    """12 nl hd^2 (equation 1)."""
    return 12 * shape.layers * shape.hidden**2


def step_flops(shape: Shape) -> int:
    """Forward 2, backward 4, recompute 2 FLOPs per parameter and token (section 4.1)."""
    return (2 + 4 + 2) * shape.batch * shape.seq_len * parameters(shape)


def parameter_traffic(shape: Shape) -> int:
    """Bytes of parameters moved for forward, recompute, backward, and of gradients (4.1)."""
    return (3 + 1) * 2 * parameters(shape)


def optimizer_traffic(shape: Shape) -> int:
    """Bytes of optimizer state read and written, 16 per parameter each way (4.1)."""
    return 2 * 16 * parameters(shape)


def activation_traffic(shape: Shape, *, interval: int = 1) -> float:
    """Bytes of activation checkpoints written and read (4.1)."""
    return 2 * checkpoint_bytes(shape, interval=interval)


def intensities(shape: Shape, *, interval: int = 1) -> dict[str, float]:
    """AIT in FLOPs per byte (section 4.1): seq bsz, seq bsz / 4, and 24 hd ci."""
    flops = step_flops(shape)
    return {
        "parameters and gradients": flops / parameter_traffic(shape),
        "optimizer state": flops / optimizer_traffic(shape),
        "activation checkpoints": flops / activation_traffic(shape, interval=interval),
    }


def efficiency(intensity: float, bandwidth: float, peak_flops: float) -> float:
    """Share of ``peak_flops`` at ``bandwidth`` bytes/s when nothing overlaps (section 4)."""
    rate = intensity * bandwidth
    return rate / (rate + peak_flops)


def bandwidth_for(wanted: float, intensity: float, peak_flops: float) -> float:
    """Bytes/s at which a wanted efficiency is reached. Raises ``ValueError`` outside (0, 1)."""
    if not 0 < wanted < 1:
        raise ValueError(f"an efficiency lies between 0 and 1, not {wanted}")
    return wanted * peak_flops / ((1 - wanted) * intensity)


def partitioned_bandwidth(
    links: int, per_link: float, limit: float = GPU_TO_GPU_BANDWIDTH
) -> float:
    """Bytes/s of parameters when each of ``links`` GPUs fetches its part and all gather (6.1).

    ``per_link`` is what one link brings while all are busy; gathering is no faster than ``limit``.
    """
    return min(links * per_link, limit)


def owner_bandwidth(per_link: float = PCIE_BANDWIDTH, limit: float = GPU_TO_GPU_BANDWIDTH) -> float:
    """Bytes/s when one owner fetches a whole parameter over its link and broadcasts it (6.1)."""
    return min(per_link, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Bytes of each memory: of one GPU, and of one node's CPU and NVMe."""

    nodes: int
    gpus_per_node: int
    gpu_memory: int
    cpu_memory: int = DGX2_CPU_MEMORY
    nvme: int = DGX2_NVME

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest model in parameters, and the memory that ends it."""

    name: str
    parameters: int
    limited_by: str


def largest_models(cluster: Cluster, whole: Strategy, sharded: Strategy) -> tuple[Largest, ...]:
    """Largest model by where its states lie; ``whole`` is DDP and ``sharded`` ZeRO-3.

    ZeRO-Offload keeps 16-bit parameters whole on every GPU; each GPU's process offloads its part of
    the rest. ZeRO-Infinity keeps 20 bytes per parameter on the CPUs, or on NVMe.
    """
    gpu = max(cluster.gpu_memory - RESERVE, 0)
    place = optimal()
    on_gpu, on_cpu = gpu // place.gpu_memory, cluster.nodes * cluster.cpu_memory // place.cpu_memory
    states = StateBytes()
    infinity = int(bytes_per_parameter(whole, INFINITY_BYTES))
    return (
        _largest("DDP", largest_model(gpu, whole, states), "GPU"),
        _largest("ZeRO-3 on GPUs", largest_model(gpu, sharded, states), "GPU"),
        _largest("ZeRO-Offload", min(on_gpu, on_cpu), "GPU" if on_gpu <= on_cpu else "CPU"),
        _largest("ZeRO-Infinity, CPU", cluster.nodes * cluster.cpu_memory // infinity, "CPU"),
        _largest("ZeRO-Infinity, NVMe", cluster.nodes * cluster.nvme // infinity, "NVMe"),
    )


def _largest(name: str, numel: int, limited_by: str) -> Largest:
    return Largest(name=name, parameters=numel, limited_by=limited_by)
