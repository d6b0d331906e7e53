"""Whole passes as single kernels: a coarser timeline with the same seconds, bytes and peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdpsim.workload import Kernel, Part, Tensor, Workload

Seconds = Callable[[Kernel], float]

SAVED, RECOMPUTED, WORKING = "saved", "recomputed", "working"


def coarsen(workload: Workload, seconds: Seconds) -> Workload:
    """Merge the kernels of each pass of each part into one of kind ``unit``.

    ``seconds`` is the cost model's time of one kernel. The merged kernel takes exactly the sum,
    with the launches, FLOPs, bytes and gradients of all; of their buffers it keeps what outlives
    the pass and the highest level within it. Recompute must not leave less than it finds.
    """
    return replace(workload, parts=tuple(_coarse(part, seconds) for part in workload.parts))


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


def _coarse(part: Part, seconds: Seconds) -> Part:
    sizes = {
        tensor.name: tensor.nbytes
        for kernels in (part.forward, part.recompute, part.backward)
        for kernel in kernels
        for tensor in kernel.allocates
    }

    def whole(name: str, kernels: Sequence[Kernel], keeps: str) -> tuple[Kernel, ...]:
        if not kernels:
            return ()
        kernel = merge(f"{part.name}.{name}", kernels, seconds)
        lumps = _lumps(kernels, sizes, keeps)
        drops = tuple(lump.name for lump in lumps if lump.name == WORKING)
        return (replace(kernel, allocates=lumps, frees=drops),)

    frees = tuple(
        name
        for name, kernels in ((SAVED, part.forward), (RECOMPUTED, part.recompute))
        if levels(kernels, sizes)[1] > 0
    )
    backward = whole("backward", part.backward, "")
    return replace(
        part,
        forward=whole("forward", part.forward, SAVED),
        recompute=whole("recompute", part.recompute, RECOMPUTED),
        backward=tuple(replace(k, frees=(*k.frees, *frees)) for k in backward),
    )


def levels(kernels: Sequence[Kernel], sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes above the start: the highest level within ``kernels``, and the level after them.

    ``sizes`` gives the bytes of every buffer by name.
    """
    level = highest = 0
    for kernel in kernels:
        level += sum(tensor.nbytes for tensor in kernel.allocates)
        highest = max(highest, level)
        level -= sum(sizes[name] for name in kernel.frees)
    return highest, level


def _lumps(kernels: Sequence[Kernel], sizes: dict[str, int], keeps: str) -> tuple[Tensor, ...]:
    highest, after = levels(kernels, sizes)
    kept = max(after, 0)
    lumps = (
        Tensor(name=keeps, nbytes=kept),
        Tensor(name=WORKING, nbytes=highest - kept, category="temporaries"),
    )
    return tuple(lump for lump in lumps if lump.nbytes > 0)
