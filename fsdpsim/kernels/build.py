"""A model's config, its FSDP units and a micro-batch size make a workload.

Blocks that compute the same share their kernels: each variant is laid out once, and only the
kernels that produce the gradient of a parameter, which they name, exist per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fsdpsim.kernels import blocks, inductor, tape
from fsdpsim.kernels.blocks import Batch, X
from fsdpsim.kernels.frozen import prune, requires_grad
from fsdpsim.kernels.lifetimes import Edges, PartKernels, cut, lay_out, plan_buffers
from fsdpsim.kernels.loss import LOSS
from fsdpsim.kernels.tape import Op, Passes, Tape
from fsdpsim.model.config import ModelConfig
from fsdpsim.model.modules import HEAD, block_path, flops_per_token
from fsdpsim.model.wrap import ROOT, Wrapping
from fsdpsim.workload import DTYPE_BYTES, Kernel, Part, Workload

Checkpointing = str | Mapping[str, float]
Run = Callable[[Tape], Passes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Ops that are laid out together: the embedding, a block, or norm, head and loss."""

    name: str
    prefix: str
    """Put before the names of modules and parameters."""
    tape: Tape
    passes: Passes
    x: str = ""
    x_requires_grad: bool = False
    y: str = ""

    @property
    def holds_input(self) -> bool:
        """Whether the stretch before must keep x until its own backward."""
        later = (*self.passes.recompute, *self.passes.backward)
        return self.x_requires_grad and any(self.x in step.touches for _, step in later)


def build_workload(
    config: ModelConfig,
    wrapping: Wrapping,
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: str = "bfloat16",
    activation_checkpointing: Checkpointing = "none",
    compile: bool = False,
    chunked_loss: int = 1,
    compile_loss: bool | None = None,
    keep_logits: bool = False,
    fused_norm: bool = True,
    repeat_kv: bool = False,
    attention: str = "flash2",
    logged_cross_entropies: int = 0,
    count_embedding: bool = True,
) -> Workload:
    """The units of ``wrapping`` and the kernels of one micro-batch on one rank.

    ``activation_checkpointing``
        ``"none"``, ``"full"`` (each block keeps its input only), ``{"every": k}`` (so for every
        k-th block), ``{"fraction": p}`` (so for the share p of the blocks, evenly spaced, as
        fms-fsdp does), ``"selective"`` (each block keeps its input, the output of attention and of
        every second matmul: torchtitan's per-op policy) or ``"submodules"`` (norms, attention and
        MLP each keep their input: NeMo Automodel).
    ``compile``
        The blocks run as Inductor fuses them.
    ``chunked_loss``, ``compile_loss``
        In how many pieces the loss is computed, and whether it is compiled
        (:func:`fsdpsim.kernels.loss.cross_entropy`); by default as the blocks, unless in pieces or
        with kept logits.
    ``keep_logits``
        The training loop has the fp32 logits in a variable while it goes backward.
    ``fused_norm``
        Eager RMSNorm is one kernel (torch 2.9 and later), else eight around an fp32 copy.
    ``repeat_kv``
        Grouped keys and values are copied to every head before attention (torchtitan until 2025,
        transformers without ``enable_gqa``).
    ``attention``
        The implementation, a key of ``hardware.attention``: decides the kernels' speed.
    ``logged_cross_entropies``
        How many more cross-entropies the trainer computes for its logs.
    ``count_embedding``
        See :func:`fsdpsim.model.flops_per_token`.

    A checkpoint covers a block also where units are smaller. Dropout is taken to be off. Raises
    ``ValueError`` for a setting that is none of these.
    """
    if compile_loss is None:
        compile_loss = compile and chunked_loss == 1 and not keep_logits
    _check_sizes(micro_batch_size=micro_batch_size, seq_len=seq_len, chunked_loss=chunked_loss)
    _check(config, seq_len, dtype)
    _check_loss(chunked_loss, compile_loss=compile_loss, keep_logits=keep_logits)
    batch = Batch(
        size=micro_batch_size,
        seq_len=seq_len,
        dtype=dtype,
        compiled=compile,
        fused_norm=fused_norm,
        repeat_kv=repeat_kv,
        attention=attention,
    )
    end = blocks.tail(
        config,
        batch,
        chunks=chunked_loss,
        compiled=compile_loss,
        keep_logits=keep_logits,
        logged=logged_cross_entropies,
    )
    frozen = {p.name for unit in wrapping.units for p in unit.params if not p.requires_grad}
    stretches = tuple(_stretches(config, batch, activation_checkpointing, end, frozen))
    parts = tuple(_parts(stretches, wrapping))
    flops = flops_per_token(config, seq_len, count_embedding=count_embedding)
    return Workload(
        units=wrapping.units,
        parts=parts,
        tokens=batch.tokens,
        flops_per_token=flops * _share_computed(parts) if frozen else flops,
    )


def _share_computed(parts: Iterable[Part]) -> float:
    """Share of a trained model's FLOPs that frozen parameters leave to do.

    A model that is trained computes twice the forward's matrix products in backward.
    """

    def products(kernels: Iterable[Kernel]) -> float:
        return sum(2.0 * math.prod(kernel.gemm) for kernel in kernels if kernel.gemm)

    forward = sum(products(part.forward) for part in parts)
    backward = sum(products(part.backward) for part in parts)
    return min((forward + backward) / (3 * forward), 1.0) if forward else 1.0


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")


def _check(config: ModelConfig, seq_len: int, dtype: str) -> None:
    if config.learned_pos_emb and seq_len > config.max_position_embeddings:
        raise ValueError(
            f"seq_len = {seq_len} is more than the model's {config.max_position_embeddings} "
            "learned positions (max_position_embeddings, n_positions or max_seq_len)"
        )
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype = {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")


def _check_loss(chunks: int, *, compile_loss: bool, keep_logits: bool) -> None:
    if chunks > 1 and compile_loss:
        raise ValueError("a compiled loss is computed in one piece; leave chunked_loss at 1")
    if keep_logits and (chunks > 1 or compile_loss):
        raise ValueError("keep_logits is for an eager loss in one piece")


def _stretches(
    config: ModelConfig, batch: Batch, checkpointing: Checkpointing, end: Tape, frozen: set[str]
) -> Iterator[_Stretch]:
    table, y = blocks.embedding(config, batch)
    table = prune(table, frozen, "", x_requires_grad=False)
    yield _Stretch(name="embed", prefix="", tape=table, passes=tape.plain(table), y=y)
    trained = requires_grad(table, y)
    variant = _Variants(config, batch, checkpointing)
    for i in range(config.num_hidden_layers):
        prefix = f"{block_path(config)}.{i}."
        local = frozenset(n.removeprefix(prefix) for n in frozen if n.startswith(prefix))
        body, passes = variant(i, local, trained)
        yield _Stretch(
            name=f"layers.{i}",
            prefix=prefix,
            tape=body,
            passes=passes,
            x=X,
            x_requires_grad=trained,
            y=variant.y,
        )
        trained = requires_grad(body, variant.y)
    end = prune(end, frozen, X, x_requires_grad=trained)
    passes = tape.compiled(end) if end.compiled else tape.plain(end)
    yield _Stretch(name="head", prefix="", tape=end, passes=passes, x=X, x_requires_grad=trained)


class _Variants:
    """The passes of a block, worked out once for each kind of block."""

    def __init__(self, config: ModelConfig, batch: Batch, checkpointing: Checkpointing) -> None:
        self.body, self.y = blocks.block(config, batch)
        self.plain = tape.compiled if batch.compiled else tape.plain
        self.checkpointed, self.chooses = _policy(checkpointing)
        self.known: dict[tuple[frozenset[str], bool, bool], tuple[Tape, Passes]] = {}

    def __call__(
        self, index: int, frozen: frozenset[str], x_requires_grad: bool
    ) -> tuple[Tape, Passes]:
        saving = self.chooses(index + 1)
        key = (frozen, x_requires_grad, saving)
        if key not in self.known:
            body = prune(self.body, frozen, X, x_requires_grad=x_requires_grad)
            run = self.checkpointed if saving and self.checkpointed else self.plain
            self.known[key] = body, run(body)
        return self.known[key]


def _policy(checkpointing: Checkpointing) -> tuple[Run | None, Callable[[int], bool]]:
    """How a checkpointed block runs, and whether the n-th block (from 1) is one."""
    if isinstance(checkpointing, str) and checkpointing in _POLICIES:
        return _POLICIES[checkpointing], lambda n: True
    if isinstance(checkpointing, Mapping) and len(checkpointing) == 1:
        ((key, value),) = checkpointing.items()
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key == "every" and number and value == int(value) >= 1:
            return _POLICIES["full"], lambda n: n % value == 0
        if key == "fraction" and number and 0 < value <= 1:
            # fms-fsdp ac_handler.py: a block is one when n p reaches the next half-integer.
            return _POLICIES["full"], lambda n: int(n * value + 0.5) > int((n - 1) * value + 0.5)
    names = ", ".join(f'"{name}"' for name in _POLICIES)
    raise ValueError(
        f"activation_checkpointing = {checkpointing!r} is not known; "
        f"use {names}, {{ every = k }} or {{ fraction = p }}"
    )


_POLICIES: dict[str, Run | None] = {
    "none": None,
    "selective": lambda body: tape.checkpointed(body, tape.selected(body.ops)),
    "submodules": tape.checkpointed_apart,
    "full": lambda body: tape.checkpointed(body, ()),
}


def _parts(stretches: Sequence[_Stretch], wrapping: Wrapping) -> Iterator[Part]:
    lay_out_once = _LayOut()
    names: set[str] = set()
    held = [*(stretch.holds_input for stretch in stretches[1:]), False]
    for stretch, y_held in zip(stretches, held, strict=True):
        groups = _groups(stretch, wrapping)
        part_of = tuple(n for n, (_, ops) in enumerate(groups) for _ in ops)
        made = lay_out_once(stretch, part_of, y_held)
        region = stretch.name if stretch.passes.recompute and len(groups) > 1 else ""
        for (unit, ops), kernels in zip(groups, made, strict=True):
            name = _name(stretch, unit, ops, len(groups), names)
            names.add(name)
            yield _part(name, unit, stretch.prefix, ops, kernels, region)


def _groups(stretch: _Stretch, wrapping: Wrapping) -> list[tuple[str, list[Op]]]:
    """Runs of ops of one unit, with the unit's name. The loss is a run of its own."""

    def key(op: Op) -> tuple[str, bool]:
        if op.owner == LOSS:
            return "", True
        return wrapping.unit_of[f"{stretch.prefix}{op.owner}"], False

    return [(unit, list(group)) for (unit, _), group in groupby(stretch.tape.ops, key)]


class _LayOut:
    """Lays out each variant of a stretch once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, tuple[int, ...], bool], tuple[PartKernels, ...]] = {}

    def __call__(
        self, stretch: _Stretch, part_of: tuple[int, ...], y_held: bool
    ) -> tuple[PartKernels, ...]:
        key = (id(stretch.passes), part_of, y_held)
        if key not in self.known:
            self.known[key] = _laid_out(stretch, part_of, y_held)
        return self.known[key]


def _laid_out(stretch: _Stretch, part_of: tuple[int, ...], y_held: bool) -> tuple[PartKernels, ...]:
    segments = cut(stretch.passes, part_of)
    edges = Edges(x=stretch.x, y=stretch.y, x_held=stretch.holds_input, y_held=y_held)
    gradient_of = stretch.passes.gradient_of
    if stretch.tape.compiled:
        segments = inductor.fuse(segments, gradient_of, edges)
    plan = plan_buffers(segments, gradient_of, edges)
    if stretch.tape.compiled:
        inductor.reuse(plan, segments, stretch.tape)
    return lay_out(stretch.tape, segments, plan)


def _name(stretch: _Stretch, unit: str, ops: Sequence[Op], parts: int, taken: set[str]) -> str:
    if ops[-1].owner == LOSS:
        return LOSS
    if unit != ROOT and unit not in taken and (parts > 1 or unit == stretch.name):
        return unit
    if parts == 1 or ops[-1].owner == HEAD:
        return stretch.name
    return f"{stretch.name}.{ops[0].owner}"


def _part(
    name: str, unit: str, prefix: str, ops: Sequence[Op], kernels: PartKernels, region: str
) -> Part:
    return Part(
        name=name,
        unit=unit,
        forward=kernels.forward,
        recompute=kernels.recompute,
        backward=tuple(_named(kernel, prefix) for kernel in kernels.backward),
        params=tuple(prefix + param for op in ops for param in op.params),
        region=region,
    )


def _named(kernel: Kernel, prefix: str) -> Kernel:
    if not kernel.gradients or not prefix:
        return kernel
    return replace(kernel, gradients=tuple(prefix + name for name in kernel.gradients))
