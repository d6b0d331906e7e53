"""What forward does and what backward does after it, as steps over named buffers.

An :class:`Op` is one autograd node: its forward kernels, what it saves, and its backward kernels.
From a list of ops this module derives the three passes of a stretch of a model: forward, the
recompute of activation checkpointing, and backward in autograd's order. How long a buffer lives
follows from them (:mod:`fsdpsim.kernels.lifetimes`); it is stated nowhere else.

Names: the gradient of ``q`` is ``d.q``; further contributions to it, before they are added, are
``d.q+`` and ``d.q++``; the recomputed ``q`` is ``q'``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdpsim.workload import DTYPE_BYTES, Attention

Steps = tuple[tuple[int, "Step"], ...]
"""Steps, each with the index of the op that it belongs to."""

Again = tuple[list[tuple[int, "Step"]], dict[str, str]]
"""Steps of a recompute, and the new names of what they make."""

GRAD = "d."
AGAIN = "'"
MORE = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel: it reads and writes whole buffers, and a buffer lives from its first write on."""

    name: str
    kind: str = "elementwise"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    """Buffers that autograd still holds while this runs, though the kernel does not read them."""
    extra: float = 0.0
    """Bytes moved besides the buffers: weights, tables, gradients of parameters."""
    flops: float = 0.0
    gemm: tuple[int, int, int] | None = None
    attention: Attention | None = None
    gradients: tuple[str, ...] = ()
    """Parameters whose gradient it produces, named relative to the block."""

    @property
    def fusible(self) -> bool:
        """Whether Inductor would fuse it with its neighbours: pointwise work and row reductions."""
        return self.kind in ("elementwise", "reduction") and not self.gradients

    @property
    def touches(self) -> tuple[str, ...]:
        """All buffers that must exist while it runs."""
        return (*self.reads, *self.writes, *self.keeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One autograd node with the module that it belongs to."""

    owner: str
    """Module relative to the block; says to which unit the op belongs."""
    forward: tuple[Step, ...]
    backward: tuple[Step, ...] = ()
    saves: tuple[str, ...] = ()
    """Inputs and outputs that autograd keeps for backward."""
    passes: tuple[tuple[str, str], ...] = ()
    """(input, output) pairs with one gradient: additions, which run no backward kernel."""
    views: tuple[tuple[str, str], ...] = ()
    """(tensor, slice of it) pairs; a slice takes no memory, but its gradient does."""
    policy: str = ""
    """``mm`` or ``attention``: what selective checkpointing looks at."""
    params: tuple[str, ...] = ()
    """Parameters that it uses, named relative to the block."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Every buffer that forward writes, scratch included."""
        return tuple(dict.fromkeys(name for step in self.forward for name in step.writes))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Buffers from other ops that forward uses."""
        mine = set(self.outputs)
        reads = dict.fromkeys(n for step in self.forward for n in (*step.reads, *step.keeps))
        return tuple(name for name in reads if name not in mine)

    @property
    def submodule(self) -> str:
        """The direct child of the block that it belongs to; empty for the residual additions."""
        return "" if self.passes else self.owner.partition(".")[0]

    @property
    def fusible(self) -> bool:
        """Whether forward is pointwise work that Inductor may run again instead of saving."""
        return all(step.fusible for step in self.forward)


@dataclass(slots=True)
class Tape:
    """Ops in forward order and the size of every buffer; filled by :mod:`fsdpsim.kernels.ops`."""

    tokens: int
    dtype: str = "bfloat16"
    compiled: bool = False
    """Write each composite (norm, rope, SwiGLU) as one kernel, as Inductor ends up with."""
    fused_norm: bool = True
    """Whether eager RMSNorm is one kernel (torch 2.9, TransformerEngine) or eight."""
    owner: str = ""
    ops: list[Op] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def element(self) -> int:
        """Bytes per element of the activations."""
        return DTYPE_BYTES[self.dtype]

    def buffer(self, name: str, width: int, element: int | None = None) -> str:
        """Declare a buffer of ``width`` elements per token; returns its name."""
        self.sizes[name] = self.tokens * width * (self.element if element is None else element)
        return name

    def nbytes(self, name: str) -> int:
        """Bytes of a buffer; a gradient and a recomputed copy are as large as the tensor."""
        if name in self.sizes:
            return self.sizes[name]
        return self.sizes[name.removeprefix(GRAD).rstrip(AGAIN + MORE)]

    def add(
        self,
        *forward: Step,
        backward: tuple[Step, ...] = (),
        saves: tuple[str, ...] = (),
        passes: tuple[tuple[str, str], ...] = (),
        views: tuple[tuple[str, str], ...] = (),
        policy: str = "",
    ) -> None:
        """Append an op that belongs to the current owner."""
        self.ops.append(
            Op(
                owner=self.owner,
                forward=forward,
                backward=backward,
                saves=saves,
                passes=passes,
                views=views,
                policy=policy,
                params=tuple(name for step in backward for name in step.gradients),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The steps of one stretch of a model."""

    forward: Steps
    recompute: Steps
    backward: Steps
    gradient_of: Mapping[str, str]
    """Tensor, as backward knows it -> the buffer that holds its gradient."""


def plain(tape: Tape) -> Passes:
    """Forward, then backward from what autograd saved."""
    backward, gradients = _backward(tape.ops, {}, {})
    return Passes(
        forward=_forward(tape.ops), recompute=(), backward=backward, gradient_of=gradients
    )


def compiled(tape: Tape) -> Passes:
    """As Inductor partitions it: pointwise results that cost no extra memory are not saved.

    A pointwise op runs again, just before backward needs its result, when what it reads takes less
    memory than what it wrote. Source: the min-cut partitioner of functorch
    (``torch/_functorch/partitioners.py``), which minimises saved bytes over fusible recomputation.
    """
    again = _cheap_to_recompute(tape)
    backward, gradients = _backward(tape.ops, {}, again)
    return Passes(
        forward=_forward(tape.ops), recompute=(), backward=backward, gradient_of=gradients
    )


def checkpointed(tape: Tape, kept: Iterable[str]) -> Passes:
    """Forward that keeps only ``kept`` (and the stretch's input), recompute, backward.

    [Note: Early stop] Recompute ends as soon as the last saved tensor exists again, so the last
    matmul does not run a second time (``torch.utils.checkpoint``, ``_StopRecomputationError``). A
    compiled recompute runs only what backward needs, and a compiled forward saves nothing else.
    """
    kept = set(kept)
    recompute, renamed = _recomputation(tape, range(len(tape.ops)), kept)
    backward, gradients = _backward(tape.ops, renamed, {})
    if not tape.compiled:
        unused = kept.difference(*(step.touches for _, step in (*recompute, *backward)))
        backward = _hold_to_the_end(backward, unused & set(tape.sizes))
    return Passes(
        forward=_forward(tape.ops),
        recompute=tuple(recompute),
        backward=backward,
        gradient_of=gradients,
    )


def checkpointed_apart(tape: Tape) -> Passes:
    """Each submodule of a block (norms, attention, MLP) under a checkpoint of its own.

    All their inputs are kept, and each is recomputed within backward, just before its own.
    """
    regions = {
        name: [index for index, op in enumerate(tape.ops) if op.submodule == name]
        for name in dict.fromkeys(op.submodule for op in tape.ops if op.submodule)
    }
    again = {i: _recomputation(tape, r, set()) for r in regions.values() for i in r[-1:]}
    backward, gradients = _backward(tape.ops, {}, {}, again)
    return Passes(
        forward=_forward(tape.ops), recompute=(), backward=backward, gradient_of=gradients
    )


def selected(ops: Sequence[Op]) -> set[str]:
    """Buffers that per-op selective checkpointing keeps: attention, and every second matmul.

    Source: torchtitan ``_apply_op_sac``: of the matmuls of a block, in order of execution, the
    first, third, ... are saved, the others recomputed; attention outputs are always saved.
    """
    mms = [op for op in ops if op.policy == "mm"][::2]
    attention = [op for op in ops if op.policy == "attention"]
    return {name for op in (*mms, *attention) for name in op.outputs}


def _forward(ops: Sequence[Op]) -> Steps:
    return tuple((index, step) for index, op in enumerate(ops) for step in op.forward)


def _recomputation(tape: Tape, region: Sequence[int], kept: set[str]) -> Again:
    """The steps that run the ops of ``region`` again, and the new names of what they make."""
    choose = _needed_again if tape.compiled else _until_early_stop
    renamed: dict[str, str] = {}
    steps: list[tuple[int, Step]] = []
    for index in choose(tape.ops, region, kept):
        op = tape.ops[index]
        if not kept.issuperset(op.outputs):
            renamed |= {name: name + AGAIN for name in op.outputs}
            steps += [(index, _rename(step, renamed)) for step in op.forward]
    return steps, renamed


def _until_early_stop(ops: Sequence[Op], region: Sequence[int], kept: set[str]) -> list[int]:
    last = max((i for i in region if ops[i].saves), default=region[0])
    saves_own_output = not set(ops[last].saves).isdisjoint(ops[last].outputs)
    return [i for i in region if i < last or (i == last and saves_own_output)]


def _needed_again(ops: Sequence[Op], region: Sequence[int], kept: set[str]) -> list[int]:
    needed = {name for i in region for name in ops[i].saves} - kept
    chosen = []
    for index in reversed(region):
        if not needed.isdisjoint(ops[index].outputs):
            chosen.append(index)
            needed |= set(ops[index].inputs) - kept
    return chosen[::-1]


def _cheap_to_recompute(tape: Tape) -> dict[str, Op]:
    saved = {name for op in tape.ops for name in op.saves}
    again: dict[str, Op] = {}
    for op in tape.ops:
        outputs = saved & set(op.outputs)
        if not op.fusible or not outputs:
            continue
        more = set(op.inputs) - saved
        if sum(map(tape.nbytes, more)) < sum(map(tape.nbytes, outputs)):
            again |= dict.fromkeys(outputs - set(op.saves), op)
            saved = (saved - set(again)) | more
    return again


class _Backward:
    """Walks the ops in reverse and keeps track of which buffer holds which gradient."""

    def __init__(
        self, renamed: Mapping[str, str], again: Mapping[str, Op], regions: Mapping[int, Again]
    ) -> None:
        self.renamed = dict(renamed)
        self.again = again
        self.regions = regions
        self.gradients: dict[str, str] = {}
        self.contributions: Counter[str] = Counter()
        self.steps: list[tuple[int, Step]] = []

    def differentiate(self, index: int, op: Op) -> None:
        """Append the backward of ``op``, whose last kernel is still covered by all it has saved."""
        if index in self.regions:
            steps, self.renamed = self.regions[index]
            self.steps += steps
        written = dict.fromkeys(n for step in op.backward for n in step.writes if _is_grad(n))
        second = [name for name in written if name.removeprefix(GRAD) in self.gradients]
        self.contributions.update(second)
        renamed = {name: name + MORE * self.contributions[name] for name in second}
        incoming = dict.fromkeys(n for step in op.backward for n in step.reads if _is_grad(n))
        for step in op.backward:
            held = (*op.saves, *incoming) if step is op.backward[-1] else ()
            self._append(index, step, held, renamed)
        for name, more in renamed.items():
            self._accumulate(index, name, more)
        for tensor, output in op.passes:
            self.gradients.setdefault(tensor, self._now(GRAD + output))

    def _append(
        self, index: int, step: Step, held: tuple[str, ...], renamed: Mapping[str, str]
    ) -> None:
        for name in (*step.reads, *held):
            self._run_again(index, name)
        reads = tuple(map(self._now, step.reads))
        writes = tuple(renamed.get(name) or self._now(name) for name in step.writes)
        keeps = tuple(map(self._now, held))
        self.steps.append((index, replace(step, reads=reads, writes=writes, keeps=keeps)))

    def _run_again(self, index: int, name: str) -> None:
        if name not in self.again or name in self.renamed:
            return
        op = self.again[name]
        for read in op.inputs:
            self._run_again(index, read)
        self.renamed |= {output: output + AGAIN for output in op.outputs}
        self.steps += [(index, _rename(step, self.renamed)) for step in op.forward]

    def _accumulate(self, index: int, name: str, more: str) -> None:
        """[Note: In place] Autograd adds a second contribution into the first, which it owns."""
        total = self._now(name)
        step = Step(name="accumulate", reads=(total, more), writes=(total,))
        self.steps.append((index, step))

    def _now(self, name: str) -> str:
        """The buffer that stands for a tensor or gradient at this point of backward."""
        if _is_grad(name):
            return self.gradients.setdefault(name.removeprefix(GRAD), name)
        return self.renamed.get(name, name)


def _backward(
    ops: Sequence[Op],
    renamed: Mapping[str, str],
    again: Mapping[str, Op],
    regions: Mapping[int, Again] | None = None,
) -> tuple[Steps, dict[str, str]]:
    walk = _Backward(renamed, again, regions or {})
    for index in reversed(range(len(ops))):
        walk.differentiate(index, ops[index])
    again_too = {name + AGAIN: buffer for name, buffer in walk.gradients.items()}
    return tuple(walk.steps), walk.gradients | again_too


def _is_grad(name: str) -> bool:
    return name.startswith(GRAD)


def _rename(step: Step, names: Mapping[str, str]) -> Step:
    return replace(
        step,
        reads=tuple(names.get(name, name) for name in step.reads),
        writes=tuple(names.get(name, name) for name in step.writes),
        keeps=tuple(names.get(name, name) for name in step.keeps),
    )


def _hold_to_the_end(steps: Steps, names: Iterable[str]) -> Steps:
    """The cache of selective checkpointing holds what it saved in vain until backward is over."""
    if not steps:
        return steps
    index, last = steps[-1]
    return (*steps[:-1], (index, replace(last, keeps=(*last.keeps, *sorted(names)))))
