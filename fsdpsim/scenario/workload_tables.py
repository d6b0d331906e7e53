"""The ``[workload]`` and ``[training]`` tables."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from fsdpsim.faults import Fault, FaultsError
from fsdpsim.scenario.runtimes import Table
from fsdpsim.units import Bytes, Count, CountOrZero, Few, Label, Seconds, SecondsOrZero, Share

#: The root unit: parameters that no other unit holds.
ROOT = "root"

#: More units are refused: no model has them, and a slip would fill the memory.
MAX_UNITS = 100_000

DType = Literal["float64", "float32", "float16", "bfloat16"]
PerUnit = Annotated[list[Seconds], Field(min_length=1)] | Seconds


class ParamTable(Table):
    """One parameter tensor of a unit."""

    name: Label = ""
    shape: tuple[CountOrZero, ...]
    dtype: DType = "float32"
    requires_grad: StrictBool = True


class UnitTable(Table):
    """One FSDP unit; durations left out come from ``[workload]``."""

    name: Label
    """``root`` is the root unit: parameters that no other unit holds."""
    params: tuple[ParamTable, ...] = ()
    parameters: Count | None = None
    """Number of parameters, where their shapes do not matter."""
    parts: tuple[Label, ...] | None = None
    """Stretches of compute of this unit, for ``calls``; default: one of the unit's own name."""
    forward: Seconds | None = None
    backward: Seconds | None = None
    all_gather: Seconds | None = None
    reduce_scatter: Seconds | None = None
    all_reduce: Seconds | None = None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Its stretches of compute; a root without parameters has none by itself."""
        if self.parts is not None:
            return self.parts
        return (self.name,) if self.name != ROOT or self.params else ()

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of :attr:`params`; those left out are numbered."""
        return tuple(param.name or f"{self.name}.{i}" for i, param in enumerate(self.params))


class Workload(Table):
    """Units with given durations. A duration may be a list with one entry per unit."""

    units: (
        Annotated[int, Field(ge=1, le=MAX_UNITS, strict=True)]
        | Annotated[tuple[UnitTable, ...], Field(min_length=1, max_length=MAX_UNITS)]
    )
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
    optimizer: SecondsOrZero | None = None
    """Seconds of the optimizer step. Left out: none on the GPU; on the CPUs (offloading) from the
    parameters and ``hardware.host``."""
    kernel_launch: SecondsOrZero = 0.0
    """Host seconds per launch."""
    parameters: Count | Annotated[list[Count], Field(min_length=1)] | None = None
    """Parameters of each unit; with it memory is counted."""
    dtype: DType = "float32"
    """Original dtype of these parameters."""
    activations: Bytes | Annotated[list[Bytes], Field(min_length=1)] | None = None
    """Bytes that each unit keeps from forward to backward."""
    tokens: Count | None = None
    """Tokens per GPU and micro-batch."""
    efficiency: Share = 1.0
    """Share of ``hardware.peak_flops`` that compute reaches, where it follows from ``tokens``."""
    checkpointed: tuple[str, ...] | None = None
    """Parts that activation checkpointing covers (names may hold ``*``). Default: all but the
    root's."""
    checkpoint_regions: tuple[tuple[str, ...], ...] = ()
    """Groups of consecutive parts that are recomputed together; default: each part by itself."""
    calls: tuple[str, ...] = ()
    """Order in which forward calls the parts; a part may come twice or not at all."""

    @property
    def tables(self) -> tuple[UnitTable, ...]:
        """One table per unit: ``unit.0``, ``unit.1``, ... where only their number is given."""
        if isinstance(self.units, int):
            return tuple(UnitTable(name=f"unit.{i}") for i in range(self.units))
        return self.units

    @property
    def untimed(self) -> str | None:
        """The first unit of unknown duration: neither forward, nor parameters and tokens."""
        if self.forward is not None:
            return None
        counted = self.parameters is not None and self.tokens is not None
        for unit in self.tables:
            own = unit.parameters is not None and self.tokens is not None
            if unit.forward is None and not counted and not own:
                return unit.name
        return None

    @model_validator(mode="after")
    def _fits_together(self) -> Workload:
        tables = self.tables
        faults = [*self._lengths(tables), *self._names(tables)]
        if faults:
            raise FaultsError(*faults)
        return self

    def _lengths(self, tables: tuple[UnitTable, ...]) -> Iterator[Fault]:
        for key, value in self:
            if isinstance(value, list) and len(value) != len(tables):
                text = f"has {len(value)} entries for {len(tables)} units"
                yield Fault(key, text, ("units",))

    def _names(self, tables: tuple[UnitTable, ...]) -> Iterator[Fault]:
        units = [unit.name for unit in tables]
        parts = [part for unit in tables for part in unit.part_names]
        for names, what in ((units, "units"), (parts, "parts")):
            for name, count in Counter(names).items():
                if count > 1 and not (names is parts and Counter(units)[name] > 1):
                    yield Fault("units", f'{count} {what} are named "{name}"')
        for unit in tables:
            for name, count in Counter(unit.param_names).items():
                if count > 1:
                    text = f'{count} parameters of "{unit.name}" are named "{name}"'
                    yield Fault("units", text)
        regions = (part for region in self.checkpoint_regions for part in region)
        for pattern in self.checkpointed or ():
            if not any(fnmatchcase(part, pattern) for part in parts):
                yield _no_part("checkpointed", pattern, parts)
        for key, called in (("calls", self.calls), ("checkpoint_regions", regions)):
            for name in dict.fromkeys(called):
                if name not in parts:
                    yield _no_part(key, name, parts)


def _no_part(key: str, name: str, parts: Sequence[str]) -> Fault:
    near = difflib.get_close_matches(name, parts, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Fault(key, f'"{name}" is not a part of any unit{hint}', ("units",))


class EveryKth(Table):
    """Checkpoint every k-th block fully."""

    every: Count


class Fraction(Table):
    """Checkpoint this share of the blocks fully, evenly spaced."""

    fraction: Share


class Training(Table):
    """The training loop."""

    iterations: Few | None = None
    """Iterations to simulate; figures are of the last. Default: as many as it takes to settle, 1
    for ``textbook``, 4 with FSDP1's ``forward_prefetch``, else 3."""
    micro_batch_size: Count = 1
    """Sequences per GPU and micro-batch."""
    seq_len: Count = 2048
    """Tokens per sequence."""
    gradient_accumulation_steps: Few = 1
    """Micro-batches per optimizer step."""
    forwards_per_backward: Few = 1
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
    checkpoint_reentrant: StrictBool = False
    """torch's ``use_reentrant``. Only with placement ``outside`` does FSDP notice."""
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
    optimizer_fused: StrictBool = True
    """One fused kernel, or for-each kernels."""
    optimizer_state_bytes: CountOrZero | None = None
    """Bytes of optimizer state per local parameter; default by ``optimizer`` (AdamW: two fp32)."""
    clip_grad_norm: StrictBool = True
    """Clip gradients by their total norm before the step ([model] only)."""
    compile: StrictBool = False
    """``torch.compile`` of each block: fewer, fused memory-bound kernels."""
    compile_loss: StrictBool | None = None
    """Logits to loss in one kernel each way: compiled, or a fused cross-entropy. Default: as
    ``compile``, unless in chunks or with ``keep_logits``."""
    chunked_loss: Few = 1
    """Pieces in which logits and loss are computed."""
    keep_logits: StrictBool = False
    """The training loop has the fp32 logits in a variable while it goes backward, as without a
    ``del pred`` before ``loss.backward()``."""
    logged_cross_entropies: CountOrZero = 0
    """Cross-entropies of the logits that the trainer computes again for its logs (Composer: 2)."""
    attention: Literal["flash1", "flash2", "flash3", "cudnn", "triton"] = "flash2"
    """Implementation of attention: FlashAttention 1 to 3, cuDNN's, or the Triton kernel that
    llm-foundry used in 2023. torch's SDPA takes FlashAttention 2 unless told otherwise."""
    fused_norm: StrictBool = True
    """Eager RMSNorm is one kernel (torch 2.9 and later), else eight around an fp32 copy."""
    repeat_kv: StrictBool = False
    """Grouped keys and values are copied to every head before attention, as torchtitan did until
    2025."""
    frozen: tuple[str, ...] = ()
    """Units, modules or parameters that are not trained; names may hold ``*``."""
    read_loss: StrictBool = False
    """The host reads the loss after each step, so it waits for the GPU."""
    granularity: Literal["kernels", "units"] | None = None
    """One op per kernel, or one per unit and pass, where FSDP's tensors of a unit that live and die
    together are one buffer too. Default: ``kernels`` for a [model]."""
