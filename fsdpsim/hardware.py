"""The ``[hardware]`` table: GPUs, links, NCCL and the host, as numbers in SI base units.

A preset (``presets/*.toml``) gives every number, with its source beside it; a scenario overrides
any of them. Nothing here computes a duration: see :mod:`fsdpsim.collectives` for collectives and
:mod:`fsdpsim.roofline` for kernels.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from math import floor
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    field_validator,
    model_validator,
)

from fsdpsim.faults import Fault, FaultsError, not_allowed
from fsdpsim.units import (
    Bytes,
    BytesOrZero,
    BytesPerSecond,
    Count,
    FlopPerSecond,
    SecondsOrZero,
    Share,
    shown,
)

DEFAULT_GPU = "H100-SXM-80GB"
PRESETS = Path(__file__).with_name("presets")

Factor = Annotated[float, Field(ge=1, strict=True)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProtocolCost(_Table):
    """What one ring collective costs with one NCCL protocol, on one node."""

    base: SecondsOrZero
    """Seconds of an empty collective: launch, first synchronisation."""
    step: SecondsOrZero
    """Seconds per ring step (n - 1 of them, 2 (n - 1) for an all-reduce)."""
    bandwidth: Share
    """Share of the ring's bandwidth that the protocol's flags leave for data."""


class NcclCosts(_Table):
    """NCCL's latencies and bandwidths on one node, fitted to published nccl-tests curves.

    The form of the model is documented in :mod:`fsdpsim.collectives`.
    """

    ll: ProtocolCost
    """LL: 4 bytes of data with each 4 bytes of flag."""
    ll128: ProtocolCost
    """LL128: 120 bytes of data in each 128."""
    simple: ProtocolCost
    """Simple: chunks of hundreds of KiB, a flag for each."""
    ll_max_bandwidth: BytesPerSecond
    """Ceiling of LL's bus bandwidth that NCCL's tuner assumes when it picks a protocol."""
    tail: Annotated[float, Field(ge=0, strict=True)]
    """Chunk times that Simple spends outside the ring's steady state, per pass over the ring."""
    # NCCL's logs: "24 coll channels" on one node of 8 A100 SXM4 or H100 (p5.48xlarge, in
    # awsome-distributed-training), "16 coll channels" over nodes with 8 NICs each (two per NIC).
    channels: Count = 24
    """Thread blocks, one multiprocessor each, of a collective inside a node."""
    network_channels: Count = 16
    """The same of a collective over nodes."""
    nvls: StrictBool
    """NVLink SHARP: the NVSwitch reduces; all-reduce only."""
    nvls_latency: SecondsOrZero
    """Seconds of an NVLS all-reduce of nothing."""
    nvls_bandwidth: Share
    """Share of ``intra_node_bandwidth`` that NVLS reaches."""


class AttentionCosts(_Table):
    """How fast one implementation of fused causal attention is, counting the FLOPs it executes.

    The share of the peak falls for short sequences, whose first and last tiles cost as much but
    hold less, as 1 / (1 + half length / sequence length).
    """

    forward: Share
    """Share of the peak in forward, for long sequences and heads of 128 elements."""
    backward: Share
    """The same in backward, whose FLOPs are 2.5 times forward's."""
    # FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, H100, 512 to 16 k tokens:
    # FlashAttention-2 forward, causal, 191 260 298 319 333 335 TFLOP/s; backward, not causal, 214
    # 260 291 310 318 322 (the causal mask adds half a tile of 128 to rows of half the work).
    forward_half_length: Count = 300
    """Tokens at which half of that is reached in forward."""
    backward_half_length: Count = 400
    """The same in backward."""
    # Same figures, heads of 64 against 128 at 16 k: 299 of 335 forward, 291 of 322 backward.
    head_dim_64: Share = 0.9
    """Share of that for heads of 64 elements or fewer."""


class AttentionTable(_Table):
    """The implementations of fused attention that ``training.attention`` can name."""

    flash1: AttentionCosts
    """FlashAttention 1."""
    flash2: AttentionCosts
    """FlashAttention 2: what torch's SDPA takes by itself."""
    flash3: AttentionCosts
    """FlashAttention 3."""
    cudnn: AttentionCosts
    """cuDNN's, also TransformerEngine's."""
    triton: AttentionCosts
    """flash-attention's Triton kernel of 2023."""


class HostCosts(_Table):
    """Seconds that the thread that issues the work spends. Defaults are eager PyTorch."""

    # 10 us median between consecutive allocator requests of a H100-class training step (public
    # snapshot kk_ctx128_fullstep); A100 traces under the profiler show 20 to 32 us, of which
    # cudaLaunchKernel itself is 4 to 6 us (HolisticTraceAnalysis and param test traces).
    kernel_launch: SecondsOrZero = 10e-6
    """Per kernel: dispatcher, autograd and cudaLaunchKernel."""
    # p50 1.0 to 2.4 us, 1 us, and 0.5 to 1 us in the same traces.
    event_record: SecondsOrZero = 1.7e-6
    """cudaEventRecord."""
    stream_wait_event: SecondsOrZero = 1e-6
    """cudaStreamWaitEvent."""
    event_query: SecondsOrZero = 0.75e-6
    """cudaEventQuery."""
    # NeMo Automodel's nsys report of FSDP2 on Llama 3 70B: 71 to 83 us at a layer boundary, which
    # is two hooks of a unit with 9 parameters, so 38.5 us per hook. How much of it is per parameter
    # no source says; a third is assumed.
    fsdp_hook: SecondsOrZero = 25e-6
    """Per FSDP hook (pre/post, forward/backward) of a unit, beside its launches."""
    fsdp_hook_per_parameter: SecondsOrZero = 1.5e-6
    """Per parameter tensor of the unit and hook: views, ``setattr``, resizes."""
    # Public snapshot kk_ctx128_fullstep, 782 segment allocations and 430 frees: p50 133 us and
    # 100 us since the allocator's previous event, about 10 us of it the host's own work.
    cuda_malloc: SecondsOrZero = 123e-6
    """cudaMalloc of a segment."""
    cuda_free: SecondsOrZero = 90e-6
    """cudaFree of a segment, after the device is idle."""
    # ZeRO-Offload (arXiv 2101.06840), table 4: CPU-Adam updates 10 billion parameters in 2.57 s; it
    # moves 28 bytes of each.
    optimizer_bandwidth: BytesPerSecond = 109e9
    """Bytes/s that a fused optimizer on the CPUs reads and writes, all ranks of a node together."""
    # The same table: PyTorch's Adam takes 14.76 s; its operations move 72 bytes of each parameter.
    foreach_optimizer_bandwidth: BytesPerSecond = 48.8e9
    """The same for an optimizer that runs one operation after the other."""

    def hook(self, parameters: int) -> float:
        """Seconds of one FSDP hook of a unit with ``parameters`` parameter tensors."""
        return self.fsdp_hook + self.fsdp_hook_per_parameter * parameters


class Hardware(_Table):
    """One kind of GPU, how many, and what links them."""

    gpu: str = DEFAULT_GPU
    """Preset that gives every key which the table leaves out."""
    nodes: Count = 1
    """Machines. A node is one NVLink domain."""
    gpus_per_node: Count = 8
    """GPUs in each machine."""

    peak_flops: FlopPerSecond
    """FLOP/s of dense bf16 and fp16 on tensor cores, as the vendor states it."""
    peak_flops_tf32: FlopPerSecond
    """FLOP/s of dense TF32 (float32 matmuls when allowed)."""
    peak_flops_fp32: FlopPerSecond
    """FLOP/s of float32 outside tensor cores."""
    peak_flops_fp8: FlopPerSecond | None = None
    """FLOP/s of dense 8-bit types; absent when the GPU has none."""
    gemm_efficiency: tuple[tuple[StrictFloat, StrictFloat], ...]
    """(2MNK, share of the peak) of measured GEMMs: linear in log FLOPs between, flat outside."""
    attention: AttentionTable
    """Fused attention, by implementation."""
    efficiency: Annotated[float, Field(gt=0, strict=True)] = 1.0
    """Calibration: matrix products run at this times ``gemm_efficiency``, which was measured in
    loops of one kernel with nothing beside: power limit, clocks and library versions differ. 1.0
    means that nothing was calibrated; no product may be faster than the peak."""
    # Sinha et al. (SC 2022, arXiv 2208.11035): identical GPUs of five clusters vary by 8 % on
    # average from whisker to whisker, which of a normal distribution is 5.4 standard deviations.
    speed_spread: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.015
    """Relative standard deviation of the GPUs' speed in matrix products. Ranks wait for each other,
    so that a job runs at the pace of its slowest GPU; ``efficiency`` is of the mean one."""
    multiprocessors: Count
    """Streaming multiprocessors (AMD: compute units)."""

    memory: Bytes
    """Bytes that CUDA reports as the device's total."""
    memory_bandwidth: BytesPerSecond
    """Peak bytes/s of device memory."""
    # hbm_empirical_efficiency 0.8 and kernel_floor_us 3: ai-dynamo/aiconfigurator systems/*.yaml.
    memory_efficiency: Share = 0.8
    """Share of ``memory_bandwidth`` that large memory-bound kernels reach."""
    # NeMo Automodel's nsys report of FSDP2 on H100: split_with_sizes 2.72 TB/s of 3.35, chunk_cat
    # with bf16 to fp32 conversion 1.75 TB/s of 3.35.
    copy_efficiency: Share = 0.81
    """The same for FSDP's plain copies (all-gather copy-out)."""
    cast_copy_efficiency: Share = 0.52
    """The same for copies that change the dtype (reduce-scatter copy-in)."""
    kernel_floor: SecondsOrZero = 3e-6
    """Seconds of a memory-bound kernel that touches nothing."""
    # Allocator overheads as in PyTorch reports: context ~500 MiB with lazy loading
    # (pytorch#107667), NCCL ~1 GiB for the first communicator (NVIDIA/nccl#864, #1685).
    context_memory: BytesOrZero = 500 * 2**20
    """Bytes of the CUDA context and loaded kernels."""
    nccl_memory: BytesOrZero = 2**30
    """Bytes of buffers of the first communicator."""
    nccl_memory_per_communicator: BytesOrZero = 2**29
    """Bytes of each further communicator (a choice: no source gives a number)."""

    # PCIe 5 x16: 52.8 GB/s from each of 8 H100 to the host (NVIDIA/nvbandwidth issue 24).
    host_to_device_bandwidth: BytesPerSecond = 52.8e9
    """Bytes/s of copies between pinned host memory and one GPU, in each direction."""
    # 4 on DGX-2: 12 GB/s for one V100, 3.0 each when all 16 copy (ZeRO-Infinity, arXiv 2104.07857,
    # table 2; DeepSpeed issue 1137).
    gpus_per_pcie_switch: Count = 1
    """GPUs of a node that share that bandwidth: all ranks copy at the same time."""
    # An assumption: the driver copies once more, through a pinned buffer of its own.
    pageable_efficiency: Share = 0.5
    """Share of that bandwidth that copies of host memory which is not pinned reach."""

    collective_model: Literal["nccl", "alpha_beta"] = "nccl"
    """``alpha_beta``: steps x latency + bytes / bandwidth exactly, as textbooks write it."""
    intra_node_bandwidth: BytesPerSecond
    """Bytes/s per GPU and direction inside a node, as NCCL's rings reach it."""
    intra_node_latency: SecondsOrZero
    """Seconds per ring step inside a node; only ``alpha_beta`` reads it (else ``nccl``'s own)."""
    inter_node_bandwidth: BytesPerSecond
    """Bytes/s per GPU and direction between nodes: the node's NICs divided by its GPUs."""
    # NCCL src/graph/tuning.cc (5067397), ring latency over InfiniBand, Simple protocol. AWS EFA is
    # ten times slower: 150 to 400 us (tests/test_collectives.py).
    inter_node_latency: SecondsOrZero = 14e-6
    """Seconds per ring step between nodes (Simple; LL's and LL128's in NCCL's proportions)."""
    # NCCL src/graph/topo.h: 100 Gbit/s counted as 12 GB/s.
    inter_node_efficiency: Share = 0.96
    """Share of the NICs' line rate that payload gets."""
    # NVIDIA/nccl issue 1229: reduce-scatter busbw on 8x400G H100 nodes, 360 GB/s on 4 nodes down
    # to 260 on 128: 0.95 per doubling beside what ring latency explains for messages of 16 GiB.
    scale_out: Share = 0.95
    """Network bandwidth times this for each doubling beyond 4 nodes (collisions in the fabric)."""
    nccl: NcclCosts
    """NCCL's protocols."""
    # TraceLens, 8x MI300X FSDP trace: layer all-gather 231 GB/s under compute, 287 GB/s for the
    # root's without; reduce-scatter 239 and 298.
    intra_node_in_training: Share = 0.8
    """Bandwidth inside a node while kernels compute, against stand-alone."""
    # NeMo Automodel's nsys report, 64 H100: layer reduce-scatters of 3.4 GB take 21.5 ms on
    # average (17.2 ms at best, with no rank late), all-gathers of 1.7 GB 10.3 ms: 157 and
    # 164 GB/s against 345 stand-alone (nccl issue 1229).
    inter_node_in_training: Share = 0.45
    """The same for rings over nodes whose network is as fast as NVLink; a slow one loses less. It
    holds what waiting for late ranks costs."""
    contention: StrictBool = False
    """Model that kernels and collectives slow each other down while they overlap."""
    compute_slowdown: Factor | None = None
    """Contention: kernels take this many times longer while a collective runs. Left out, they lose
    the multiprocessors that NCCL's channels occupy."""
    communication_slowdown: Factor | None = None
    """Contention: collectives take this many times longer while a kernel runs. Left out, it follows
    from ``intra_node_in_training`` and ``inter_node_in_training``."""

    host: HostCosts = HostCosts()
    """The issuing thread."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return _merge(read_preset(data.get("gpu", DEFAULT_GPU)), data)

    @model_validator(mode="after")
    def _no_faster_than_the_peak(self) -> Self:
        reached = self.gemm_efficiency[-1][1]
        most = floor(1000 / reached) / 1000
        if self.efficiency > most:
            wanted = f"at most {most}: gemm_efficiency alone reaches {reached} of the peak"
            raise FaultsError(Fault("efficiency", not_allowed(self.efficiency, wanted)))
        return self

    @field_validator("gemm_efficiency")
    @classmethod
    def _rising_curve(
        cls, curve: tuple[tuple[float, float], ...]
    ) -> tuple[tuple[float, float], ...]:
        if not curve:
            raise ValueError("needs at least one [FLOPs, efficiency] point")
        flops, shares = zip(*curve, strict=True)
        if flops[0] <= 0 or any(a >= b for a, b in pairwise(flops)):
            raise ValueError(f"FLOPs must be positive and rise from point to point, not {flops}")
        if shares[0] <= 0 or shares[-1] > 1 or list(shares) != sorted(shares):
            raise ValueError(f"efficiencies must lie in (0, 1] and not fall, not {shares}")
        return curve

    @property
    def world_size(self) -> int:
        """Ranks: one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def slowest_rank(self) -> float:
        """How many times longer than on the mean GPU matrix products take on the slowest.

        1 + spread x the expected largest of N standard normal numbers (Blom 1958).
        """
        n = self.world_size
        return 1 + self.speed_spread * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))

    def taken_by_collectives(self, inside: int, between: int) -> float:
        """Share of the GPU that collectives inside nodes and between nodes take from kernels.

        Each occupies a multiprocessor per NCCL channel; one is always left. With a given
        ``compute_slowdown`` their number does not matter.
        """
        if not inside and not between:
            return 0.0
        if self.compute_slowdown is not None:
            return 1 - 1 / self.compute_slowdown
        channels = inside * self.nccl.channels + between * self.nccl.network_channels
        return min(channels, self.multiprocessors - 1) / self.multiprocessors

    def stand_alone(self) -> Self:
        """The same hardware with bandwidths as benchmarks see them, with no compute beside."""
        return self.model_copy(
            update={"intra_node_in_training": 1.0, "inter_node_in_training": 1.0}
        )

    def memory_outside_allocator(self, communicators: int) -> int:
        """Bytes of the context and of ``communicators`` NCCL communicators.

        The caching allocator does not see them; ``nvidia-smi`` does.
        """
        further = max(communicators - 1, 0) * self.nccl_memory_per_communicator
        return self.context_memory + (self.nccl_memory + further if communicators else 0)


def preset_names() -> list[str]:
    """Names that ``hardware.gpu`` may have, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_preset(name: str) -> dict[str, Any]:
    """The table of one preset. An unknown name is a ``ValueError`` that lists the presets."""
    if not isinstance(name, str) or name not in preset_names():
        raise FaultsError(Fault("gpu", _unknown_preset(name)))
    return _read(name)


@lru_cache
def _read(name: str) -> dict[str, Any]:
    table = tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))
    base = table.pop("base", None)
    return _merge(_read(base), table) if base else table


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``under``, tables within tables merged key by key."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _unknown_preset(name: object) -> str:
    names = preset_names()
    written = str(name).casefold()
    near = [n for n in names if written and n.casefold().startswith(written)]
    near += difflib.get_close_matches(str(name).upper(), names, n=1, cutoff=0.4)
    nearest = f'; did you mean "{near[0]}"?' if near else "."
    return f"{shown(name)} is not a GPU preset{nearest} Presets: {', '.join(names)}"
