"""What one rank computes: FSDP units, the parts of the model that run, and their kernels.

A :class:`Workload` says nothing of time, streams or FSDP's hooks. It is made from given durations
or from a model, and read by the schedules, which ask a cost model for seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Bytes per element of the dtypes that torch's FSDP accepts, by torch's own names.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
}


def nbytes(numel: int, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype``."""
    return numel * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter tensor, as ``named_parameters()`` would list it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """The original dtype: what the optimizer updates."""
    requires_grad: bool = True
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements (1 for a scalar shape)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A buffer that a kernel allocates; its name is local to one call of one :class:`Part`."""

    name: str
    nbytes: int
    category: str = "activations"
    """``activations``, ``temporaries`` (workspaces, dead within the pass) or ``gradients``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What decides how fast a fused attention kernel is."""

    implementation: str
    """A key of ``[hardware.attention]``: ``flash2``, ``cudnn``, ..."""
    seq_len: int
    head_dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel launch on the compute stream.

    Its duration is ``seconds`` when given; otherwise the cost model's roofline of ``flops`` and
    ``nbytes`` (bytes read plus written). ``gemm`` holds (M, N, K) when it is a matrix product.
    Buffers in ``allocates`` are allocated by the host just before the launch, those named in
    ``frees`` are dropped just after it.
    """

    name: str
    kind: str = "elementwise"
    """``gemm``, ``attention``, ``elementwise``, ``reduction``, ``embedding``; ``unit``: several."""
    seconds: float | None = None
    flops: float = 0.0
    nbytes: float = 0.0
    gemm: tuple[int, int, int] | None = None
    attention: Attention | None = None
    dtype: str = "bfloat16"
    allocates: tuple[Tensor, ...] = ()
    frees: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    """Backward: names of the parameters whose gradient this kernel produces (the schedule allocates
    them just before it; those that no kernel names appear at the start of the part's backward)."""
    launches: int = 1
    """Host launches that this entry stands for (more than 1 only for ``unit`` kernels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stretch of compute that belongs to one unit: a block, an embedding, a head.

    ``recompute`` is what activation checkpointing runs again before ``backward``; else empty.
    """

    name: str
    unit: str
    """Name of its unit; empty for compute outside the FSDP modules, such as the loss."""
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    recompute: tuple[Kernel, ...] = ()
    params: tuple[str, ...] | None = None
    """Names of the parameters that this part uses; None means all of its unit's."""
    region: str = ""
    """Consecutive parts of one non-empty name are checkpointed, and recomputed, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One FSDP unit: the parameters that are gathered, reduced and freed together."""

    name: str
    params: tuple[Param, ...] = ()
    is_root: bool = False
    parent: str | None = None
    """The unit whose module holds this one's; None is the root."""

    @property
    def numel(self) -> int:
        """Unpadded parameter elements."""
        return sum(p.numel for p in self.params)

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter is trained."""
        return any(p.requires_grad for p in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Units in module order (the root last), and parts in the order in which forward calls them."""

    units: tuple[Unit, ...]
    parts: tuple[Part, ...]
    calls: tuple[str, ...] = field(default=())
    """Names of parts in call order, some perhaps twice or never; empty means each part once."""
    tokens: int = 0
    """Tokens per rank and micro-batch (0 when unknown)."""
    flops_per_token: float = 0.0
    """Model FLOPs per token for forward and backward, as MFU counts them: no recompute, and nothing
    that frozen parameters leave out."""
