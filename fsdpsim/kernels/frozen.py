"""What autograd leaves out when parameters are frozen, or nothing before them is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from fsdpsim.kernels.tape import GRAD, Op, Step, Tape


def prune(tape: Tape, frozen: Collection[str], x: str, *, x_requires_grad: bool) -> Tape:
    """``tape`` without the backward kernels, and the saved tensors, that no gradient needs.

    ``frozen`` names parameters as the tape does; ``x`` is the stretch's input. A tensor requires a
    gradient when it depends on x, if x does, or on a parameter that is trained.
    """
    requiring = {x} if x_requires_grad else set()
    ops = []
    for op in tape.ops:
        if not requiring.isdisjoint(op.inputs) or not set(op.params) <= set(frozen):
            requiring.update(op.outputs)
        requiring.update(view for tensor, view in op.views if tensor in requiring)
        ops.append(_pruned(op, frozen, requiring))
    return replace(tape, ops=ops)


def requires_grad(tape: Tape, output: str) -> bool:
    """Whether the output of a pruned tape does."""
    last = next(op for op in reversed(tape.ops) if output in op.outputs)
    return bool(last.backward or last.passes)


def _pruned(op: Op, frozen: Collection[str], requiring: Collection[str]) -> Op:
    backward = tuple(reversed([*_useful(op, frozen, requiring)]))
    needed = {name for step in backward for name in (*step.reads, *step.keeps)}
    return replace(
        op,
        backward=backward,
        saves=tuple(name for name in op.saves if name in needed),
        passes=tuple(pair for pair in op.passes if pair[0] in requiring),
    )


def _useful(op: Op, frozen: Collection[str], requiring: Collection[str]) -> Iterator[Step]:
    """Steps, last first, that lead to a gradient of a trained parameter or of an input."""
    trained = not set(op.params) <= set(frozen)
    wanted = {GRAD + name for name in requiring}
    for step in reversed(op.backward):
        gradients = tuple(name for name in step.gradients if name not in frozen)
        prepares = trained and not step.writes and not step.gradients
        if gradients or prepares or not wanted.isdisjoint(step.writes):
            wanted.update(step.reads)
            yield replace(step, gradients=gradients)
