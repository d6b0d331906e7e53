"""The ``[workload]`` and ``[training]`` tables."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, PositiveInt, model_validator

from fsdpsim.scenario.runtimes import Table
from fsdpsim.units import Bytes, Seconds, SecondsOrZero

T = TypeVar("T")

DType = Literal["float64", "float32", "float16", "bfloat16"]
PerUnit = Annotated[list[Seconds], Field(min_length=1)] | Seconds


class ParamTable(Table):
    """One parameter tensor of a unit."""

    name: str = ""
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: DType = "float32"
    requires_grad: bool = True


class UnitTable(Table):
    """One FSDP unit; durations left out come from ``[workload]``."""

    name: str
    """``root`` is the root unit: parameters that no other unit holds."""
    params: tuple[ParamTable, ...] = ()
    parameters: PositiveInt | None = None
    """Number of parameters, where their shapes do not matter."""
    parts: tuple[str, ...] | None = None
    """Stretches of compute of this unit, for ``calls``; default: one of the unit's own name."""
    forward: Seconds | None = None
    backward: Seconds | None = None
    all_gather: Seconds | None = None
    reduce_scatter: Seconds | None = None
    all_reduce: Seconds | None = None


class Workload(Table):
    """Units with given durations. A duration may be a list with one entry per unit."""

    units: PositiveInt | Annotated[tuple[UnitTable, ...], Field(min_length=1)]
    """How many equal units, or a table for each."""
    forward: PerUnit | None = None
    """Seconds of a unit's forward. Left out: 2 x parameters x tokens FLOPs at ``efficiency``."""
    backward: PerUnit | None = None
    """Seconds of a unit's backward. Left out: twice the forward."""
    all_gather: PerUnit | None = None
    """Seconds of a unit's all-gather. Left out: from the parameters and ``[hardware]``."""
    reduce_scatter: PerUnit | None = None
    """Seconds of a unit's reduce-scatter; left out as ``all_gather``."""
    all_reduce: PerUnit | None = None
    """Seconds of a unit's all-reduce (replicated and hybrid sharding); left out as above."""
    optimizer: SecondsOrZero = 0.0
    """Seconds of the optimizer step on the GPU."""
    kernel_launch: SecondsOrZero = 0.0
    """Host seconds per launch."""
    parameters: PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Parameters of each unit; with it memory is counted."""
    dtype: DType = "float32"
    """Original dtype of these parameters."""
    activations: Bytes | Annotated[list[Bytes], Field(min_length=1)] | None = None
    """Bytes that each unit keeps from forward to backward."""
    tokens: PositiveInt | None = None
    """Tokens per GPU and micro-batch."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of ``hardware.peak_flops`` that compute reaches, where it follows from ``tokens``."""
    checkpointed: tuple[str, ...] | None = None
    """Parts that activation checkpointing covers (names may hold ``*``). Default: all but the
    root's."""
    checkpoint_regions: tuple[tuple[str, ...], ...] = ()
    """Groups of consecutive parts that are recomputed together; default: each part by itself."""
    calls: tuple[str, ...] = ()
    """Order in which forward calls the parts; a part may come twice or not at all."""

    @model_validator(mode="after")
    def _lists_have_one_entry_per_unit(self) -> Workload:
        count = self.units if isinstance(self.units, int) else len(self.units)
        for key, value in self:
            if isinstance(value, list) and len(value) != count:
                raise ValueError(f"{key} has {len(value)} entries for {count} units")
        return self

    @model_validator(mode="after")
    def _names_are_known(self) -> Workload:
        if isinstance(self.units, int):
            return self
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError("two units have the same name")
        return self


class EveryKth(Table):
    """Checkpoint every k-th block fully."""

    every: PositiveInt


class Fraction(Table):
    """Checkpoint this share of the blocks fully, evenly spaced."""

    fraction: Annotated[float, Field(gt=0, le=1)]


class Training(Table):
    """The training loop."""

    iterations: PositiveInt | None = None
    """Iterations to simulate; figures are of the last. Default: 1 for ``textbook``, else 4, by when
    FSDP1's rate limiter has settled."""
    micro_batch_size: PositiveInt = 1
    """Sequences per GPU and micro-batch."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    forwards_per_backward: PositiveInt = 1
    """Forwards whose losses are added before one backward."""
    activation_checkpointing: (
        Literal["none", "selective", "submodules", "full"] | EveryKth | Fraction
    ) = "none"
    """``full``: keep each block's input only; ``selective``: also keep every second matmul's output
    and attention's, as torchtitan; ``submodules``: norms, attention and MLP each keep their input,
    as NeMo Automodel; ``{ every = k }`` or ``{ fraction = p }``: full, for every k-th block or the
    share p of them."""
    checkpoint_placement: Literal["inside", "outside"] = "inside"
    """``inside``: FSDP(checkpoint(block)); ``outside``: checkpoint(FSDP(block))."""
    checkpoint_reentrant: bool = False
    """torch's ``use_reentrant``; only with placement ``outside`` does FSDP notice."""
    dtype: DType = "float32"
    """Original dtype of a [model]'s parameters: what the optimizer updates."""
    param_dtype: DType | None = None
    """Mixed precision: dtype of gathered parameters and compute. Default: the original dtype, but
    bfloat16 for a [model]."""
    reduce_dtype: DType | None = None
    """Mixed precision: dtype of gradient reduction. Default: ``param_dtype``, but float32 for a
    [model]."""
    optimizer: Literal["adamw", "adam", "sgd", "sgd_momentum", "none"] = "adamw"
    """Decides the state's bytes and the step's kernels."""
    optimizer_fused: bool = True
    """One fused kernel, or for-each kernels."""
    optimizer_state_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes of optimizer state per local parameter; default by ``optimizer`` (AdamW: two fp32)."""
    clip_grad_norm: bool = True
    """Clip gradients by their total norm before the step ([model] only)."""
    compile: bool = False
    """``torch.compile`` of each block: fewer, fused memory-bound kernels."""
    compile_loss: bool | None = None
    """Logits to loss in one kernel each way: compiled, or a fused cross-entropy. Default: as
    ``compile``, unless in chunks."""
    chunked_loss: PositiveInt = 1
    """Pieces in which logits and loss are computed."""
    fused_norm: bool = True
    """Eager RMSNorm is one kernel (torch 2.9 and later), else eight around an fp32 copy."""
    repeat_kv: bool = False
    """Grouped keys and values are copied to every head before attention, as torchtitan did until
    2025."""
    frozen: tuple[str, ...] = ()
    """Units or parameters that are not trained; names may hold ``*``."""
    read_loss: bool = False
    """The host reads the loss after each step, so it waits for the GPU."""
    granularity: Literal["kernels", "units"] | None = None
    """One op per kernel, or one per unit and pass. Default: ``kernels`` for a [model]."""
