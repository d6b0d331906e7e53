"""The kernels of gradient clipping and of an optimizer step over one rank's shard.

All are bound by memory. A multi-tensor kernel (``_foreach_*``, ``_fused_*``) takes many tensors in
one launch, and as many launches as its argument struct needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpsim.workload import DTYPE_BYTES, Kernel, Tensor

#: Elements that one multi-tensor launch covers: 320 blocks of 65536 (torch
#: ``aten/src/ATen/native/cuda/MultiTensorApply.cuh``: depth_to_max_blocks, kChunkSize).
ELEMENTS_PER_LAUNCH = 320 * 65536

#: How many tensors one multi-tensor launch takes, by the number of lists (same file).
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One ``_foreach`` operation: how often it reads or writes each kind of element."""

    name: str
    params: int = 0
    grads: int = 0
    states: int = 0
    scratch: int = 0
    """Reads and writes of a buffer as large as the state, which only lives within the step."""
    lists: int = 2

    def nbytes(self, numel: int, param: int, grad: int, state: int) -> int:
        """Bytes moved for ``numel`` elements of the given sizes."""
        per_element = self.params * param + self.grads * grad
        return numel * (per_element + (self.states + self.scratch) * state)


# torch/optim/adamw.py _multi_tensor_adam and torch/optim/sgd.py _multi_tensor_sgd, operation by
# operation; "fused" is torch/csrc .../fused_adam_impl.cu, one read and write of everything.
_ADAMW_FOREACH = (
    Pass(name="mul_", params=2, lists=1),
    Pass(name="lerp_", grads=1, states=2),
    Pass(name="mul_", states=2, lists=1),
    Pass(name="addcmul_", grads=1, states=2, lists=3),  # grad x grad: the second read hits L1
    Pass(name="sqrt", states=1, scratch=1),
    Pass(name="div_", scratch=2, lists=1),
    Pass(name="add_", scratch=2, lists=1),
    Pass(name="addcdiv_", params=2, states=1, scratch=1, lists=3),
)
_ADAM_FOREACH = _ADAMW_FOREACH[1:]
_ADAM_FUSED = (Pass(name="fused", params=2, grads=1, states=4, lists=4),)
_SGD = (Pass(name="add_", params=2, grads=1),)
_MOMENTUM = (Pass(name="mul_", states=2, lists=1), Pass(name="add_", states=2, grads=1))
_MOMENTUM_STEP = Pass(name="add_", params=2, states=1)
_SGD_FUSED = (Pass(name="fused", params=2, grads=1),)
_MOMENTUM_FUSED = (Pass(name="fused", params=2, grads=1, states=2, lists=3),)

#: optimizer -> (operations of foreach, operations of fused, states per parameter).
OPTIMIZERS: dict[str, tuple[tuple[Pass, ...], tuple[Pass, ...], int]] = {
    "adamw": (_ADAMW_FOREACH, _ADAM_FUSED, 2),
    "adam": (_ADAM_FOREACH, _ADAM_FUSED, 2),
    "sgd": (_SGD, _SGD_FUSED, 0),
    "sgd_momentum": ((*_MOMENTUM, _MOMENTUM_STEP), _MOMENTUM_FUSED, 1),
}


def optimizer_states(optimizer: str) -> int:
    """Tensors of state per parameter. Raises ``ValueError`` for an unknown optimizer."""
    return _known(optimizer)[2]


def optimizer_state_bytes(optimizer: str, state_dtype: str = "float32") -> int:
    """Bytes of state per local element. Raises ``ValueError`` for an unknown optimizer."""
    return optimizer_states(optimizer) * DTYPE_BYTES[state_dtype]


def optimizer_kernels(
    numels: Sequence[int],
    optimizer: str = "adamw",
    *,
    fused: bool = True,
    param_dtype: str = "float32",
    grad_dtype: str = "float32",
    state_dtype: str = "float32",
) -> tuple[Kernel, ...]:
    """The kernels of one step over local tensors of ``numels`` elements.

    ``fused`` reads and writes everything once; otherwise ``foreach`` runs one operation after the
    other, with a scratch copy of each second moment for Adam. Raises ``ValueError`` for an
    optimizer that is not one of :data:`OPTIMIZERS`.
    """
    foreach, one_kernel, _ = _known(optimizer)
    sizes = tuple(DTYPE_BYTES[dtype] for dtype in (param_dtype, grad_dtype, state_dtype))
    passes = one_kernel if fused else foreach
    scratch = [index for index, p in enumerate(passes) if p.scratch]
    numel = sum(numels)
    buffers = tuple(
        Tensor(name=f"denominator {n}", nbytes=numel * sizes[2], category="temporaries")
        for n, numel in enumerate(numels if scratch else ())
    )
    return tuple(
        Kernel(
            name=f"{optimizer}.{p.name}",
            nbytes=p.nbytes(numel, *sizes),
            dtype=param_dtype,
            allocates=buffers if scratch and index == scratch[0] else (),
            frees=tuple(b.name for b in buffers) if scratch and index == scratch[-1] else (),
            launches=_launches(numel, len(numels), p.lists),
        )
        for index, p in enumerate(passes)
    )


def clip_kernels(numels: Sequence[int], *, grad_dtype: str = "float32") -> tuple[Kernel, ...]:
    """``clip_grad_norm_`` over local gradients of ``numels`` elements.

    Norms, total, coefficient, scaling in place; without the all-reduce of the total norm, which is
    one element.
    """
    size, numel, tensors = DTYPE_BYTES[grad_dtype], sum(numels), len(numels)

    def kernel(name: str, nbytes: int, launches: int = 1, kind: str = "elementwise") -> Kernel:
        return Kernel(
            name=f"clip_grad_norm.{name}",
            kind=kind,
            nbytes=nbytes,
            dtype=grad_dtype,
            launches=launches,
        )

    return (
        kernel("norm", numel * size, _launches(numel, tensors, 1), "reduction"),
        kernel("total", 2 * tensors * size, kind="reduction"),
        kernel("coefficient", 3 * size),
        kernel("scale", 2 * numel * size, _launches(numel, tensors, 1)),
    )


def _launches(numel: int, tensors: int, lists: int) -> int:
    by_elements = -(-numel // ELEMENTS_PER_LAUNCH)
    return max(1, by_elements, -(-tensors // TENSORS_PER_LAUNCH[lists]))


def _known(optimizer: str) -> tuple[tuple[Pass, ...], tuple[Pass, ...], int]:
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optimizer = {optimizer!r} is not known; use one of {known}")
    return OPTIMIZERS[optimizer]
