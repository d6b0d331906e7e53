"""Whole passes as single kernels: a coarser timeline with the same seconds and bytes.

Peaks of what the kernels allocate are the same too. With gradients beside them they can be a little
higher: what a pass frees bit by bit is freed at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdpsim.workload import Kernel, Part, Tensor, Workload

Seconds = Callable[[Kernel], float]

#: Saved for backward, saved for recompute only, left by recompute, and freed within its pass.
SAVED, CHECKPOINT, RECOMPUTED, WORKING = "saved", "checkpoint", "recomputed", "working"


def coarsen(
    workload: Workload, seconds: Seconds, gradients: Mapping[tuple[str, str], int] | None = None
) -> Workload:
    """Merge the kernels of each pass of each part into one of kind ``unit``.

    ``seconds`` is the cost model's time of one kernel. The merged kernel takes exactly the sum,
    with the launches, FLOPs, bytes and gradients of all; of their buffers it keeps what outlives
    the pass and the highest level within it. ``gradients``: bytes by the names of a unit and of a
    parameter. They are all there when the merged kernel begins, and its own buffers are the
    smaller for it.
    """
    parts = tuple(_coarse(part, seconds, gradients or {}) for part in workload.parts)
    return replace(workload, parts=parts)


def merge(name: str, kernels: Sequence[Kernel], seconds: Seconds) -> Kernel:
    """One kernel that stands for ``kernels``, without their buffers."""
    return Kernel(
        name=name,
        kind="unit",
        seconds=sum(map(seconds, kernels)),
        flops=sum(kernel.flops for kernel in kernels),
        nbytes=sum(kernel.nbytes for kernel in kernels),
        dtype=kernels[0].dtype,
        gradients=tuple(name for kernel in kernels for name in kernel.gradients),
        launches=sum(kernel.launches for kernel in kernels),
    )


def _coarse(part: Part, seconds: Seconds, gradients: Mapping[tuple[str, str], int]) -> Part:
    sizes = {
        tensor.name: tensor.nbytes
        for kernels in (part.forward, part.recompute, part.backward)
        for kernel in kernels
        for tensor in kernel.allocates
    }

    def after(kernels: Sequence[Kernel]) -> int:
        return levels(kernels, sizes)[1]

    def whole(name: str, kernels: Sequence[Kernel], kept: dict[str, int]) -> tuple[Kernel, ...]:
        if not kernels:
            return ()
        kernel = merge(f"{part.name}.{name}", kernels, seconds)
        grads = {grad: gradients.get((part.unit, grad), 0) for grad in kernel.gradients}
        highest = levels(kernels, sizes, grads)[0] - sum(grads.values())
        working = highest - sum(kept.values())
        lumps = _lumps(kept | {WORKING: working})
        drops = tuple(lump.name for lump in lumps if lump.name == WORKING)
        return (replace(kernel, allocates=lumps, frees=drops),)

    # Where no gradient flows on, a region's recompute is the last that needs its input.
    released = max(-after(part.recompute), 0)
    saved = {SAVED: after(part.forward) - released, CHECKPOINT: released}
    recomputed = {RECOMPUTED: max(after(part.recompute), 0)}
    forward = whole("forward", part.forward, saved)
    recompute = whole("recompute", part.recompute, recomputed)
    backward = whole("backward", part.backward, {})
    return replace(
        part,
        forward=forward,
        recompute=_freeing(recompute, {CHECKPOINT: released}),
        backward=_freeing(backward, {SAVED: saved[SAVED]} | recomputed),
    )


def _lumps(sizes: dict[str, int]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name=name, nbytes=nbytes, category="temporaries")
        if name == WORKING
        else Tensor(name=name, nbytes=nbytes)
        for name, nbytes in sizes.items()
        if nbytes > 0
    )


def _freeing(kernels: tuple[Kernel, ...], sizes: dict[str, int]) -> tuple[Kernel, ...]:
    names = tuple(name for name, nbytes in sizes.items() if nbytes > 0)
    return tuple(replace(kernel, frees=(*kernel.frees, *names)) for kernel in kernels)


def levels(
    kernels: Sequence[Kernel], sizes: Mapping[str, int], gradients: Mapping[str, int] | None = None
) -> tuple[int, int]:
    """Bytes above the start: the highest level within ``kernels``, and the level after them.

    ``sizes`` gives the bytes of every buffer by name, ``gradients`` those of gradients that count.
    """
    level = highest = 0
    for kernel in kernels:
        level += sum(tensor.nbytes for tensor in kernel.allocates)
        level += sum(gradients[name] for name in kernel.gradients) if gradients else 0
        highest = max(highest, level)
        level -= sum(sizes[name] for name in kernel.frees)
    return highest, level
