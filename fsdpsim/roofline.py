"""Seconds of a kernel: the slower of its arithmetic and its memory traffic (Williams et al. 2009).

seconds = max(FLOPs / (peak x efficiency), floor + bytes / (bandwidth x efficiency)), the rate of
matrix products times ``Hardware.efficiency`` and of the slowest rank (``Hardware.slowest_rank``).
The floor (launch latency on the GPU, ramp of the first and last wave) makes memory-bound kernels
slow when small: half of the bandwidth is reached at floor x bandwidth bytes, 8 MB on a H100.
Arithmetic has no floor of its own, since the published GEMM efficiencies are of whole kernels and
contain it.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from fsdpsim.hardware import AttentionCosts, Hardware
from fsdpsim.workload import Attention, Kernel

#: `Hardware` field with the peak of a dtype.
_PEAK = {
    "bfloat16": "peak_flops",
    "float16": "peak_flops",
    "tfloat32": "peak_flops_tf32",
    "float32": "peak_flops_fp32",
    "float8_e4m3fn": "peak_flops_fp8",
    "int8": "peak_flops_fp8",
}
#: Kinds that run on tensor cores; the arithmetic of the others is float32 on the CUDA cores.
_TENSOR_KINDS = ("gemm", "attention", "unit")
#: What an attention kernel is that does not say.
DEFAULT_ATTENTION = Attention(implementation="flash2", seq_len=4096)


def kernel_seconds(kernel: Kernel, hardware: Hardware, *, dtype: str | None = None) -> float:
    """Seconds of ``kernel`` alone on the GPU; ``kernel.seconds`` when given.

    ``dtype`` replaces the kernel's, for example ``tfloat32`` where float32 matmuls may use it.
    Raises ``ValueError`` for a dtype that the GPU has no peak for.
    """
    if kernel.seconds is not None:
        return kernel.seconds
    floor = hardware.kernel_floor * kernel.launches
    memory = floor + _memory_seconds(kernel.nbytes, hardware.memory_efficiency, hardware)
    return max(_arithmetic_seconds(kernel, hardware, dtype or kernel.dtype), memory)


def copy_seconds(nbytes: float, hardware: Hardware, *, cast: bool = False) -> float:
    """Seconds of a copy kernel of FSDP that reads and writes ``nbytes`` in all.

    ``cast``: it changes the dtype on the way, as the copy into the reduce-scatter's input does.
    """
    share = hardware.cast_copy_efficiency if cast else hardware.copy_efficiency
    return hardware.kernel_floor + _memory_seconds(nbytes, share, hardware)


def gemm_efficiency(flops: float, hardware: Hardware) -> float:
    """Share of the peak that a matrix product of ``flops`` = 2MNK reaches."""
    curve = hardware.gemm_efficiency
    right = bisect_right(curve, (flops, math.inf))
    if right == 0:
        return curve[0][1]
    if right == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 + (y1 - y0) * math.log(flops / x0) / math.log(x1 / x0)


def ridge_point(hardware: Hardware, *, dtype: str = "bfloat16") -> float:
    """FLOPs per byte above which a large GEMM is limited by arithmetic."""
    reached = hardware.gemm_efficiency[-1][1] * _peak(dtype, hardware)
    return reached / (hardware.memory_bandwidth * hardware.memory_efficiency)


def _memory_seconds(nbytes: float, share: float, hardware: Hardware) -> float:
    return nbytes / (hardware.memory_bandwidth * share)


def _arithmetic_seconds(kernel: Kernel, hardware: Hardware, dtype: str) -> float:
    flops = kernel.flops
    if not flops and kernel.gemm:
        flops = 2.0 * math.prod(kernel.gemm)
    if not flops:
        return 0.0
    if kernel.kind not in _TENSOR_KINDS:
        return flops / hardware.peak_flops_fp32
    return flops / (_peak(dtype, hardware) * _tensor_efficiency(kernel, flops, hardware))


def _tensor_efficiency(kernel: Kernel, flops: float, hardware: Hardware) -> float:
    if kernel.kind == "attention":
        return attention_efficiency(kernel, hardware)
    mean = gemm_efficiency(flops / kernel.launches, hardware) * hardware.efficiency
    return mean / hardware.slowest_rank


def attention_efficiency(kernel: Kernel, hardware: Hardware) -> float:
    """Share of the peak that a fused attention kernel reaches."""
    shape = kernel.attention or DEFAULT_ATTENTION
    cost: AttentionCosts = getattr(hardware.attention, shape.implementation)
    plateau, half = cost.forward, cost.forward_half_length
    # torch names the kernels *_attention_forward and *_attention_backward, FlashAttention *_bwd.
    if "backward" in kernel.name or "bwd" in kernel.name:
        plateau, half = cost.backward, cost.backward_half_length
    heads = cost.head_dim_64 if shape.head_dim <= 64 else 1.0
    return plateau * heads / (1 + half / shape.seq_len)


def _peak(dtype: str, hardware: Hardware) -> float:
    peak: float | None = getattr(hardware, _PEAK[dtype]) if dtype in _PEAK else None
    if peak is None:
        raise ValueError(f"{hardware.gpu} has no peak FLOP/s for {dtype!r}")
    return peak
