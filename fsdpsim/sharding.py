"""How FSDP cuts parameters: padding, shard sizes, and which ranks form a group.

Sizes are elements unless they say bytes. Sources: torch 2.13 ``_flat_param.py`` (FSDP1) and
``_fsdp_param.py`` (FSDP2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fsdpsim.workload import DTYPE_BYTES, Param

#: FSDP1 aligns each original parameter to 16 bytes with ``use_orig_params=True``.
FLAT_PARAM_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class ShardedSize:
    """Elements of one unit: ``numel`` as the gradient has it, ``padded`` as it is gathered."""

    numel: int
    padded: int
    factor: int

    @property
    def shard(self) -> int:
        """Padded elements per rank."""
        return self.padded // self.factor


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def flat_parameter(
    params: Iterable[Param],
    factor: int,
    *,
    compute_dtype: str,
    use_orig_params: bool,
    group: int | None = None,
) -> ShardedSize:
    """FSDP1's flat parameter over ``factor`` ranks.

    Without ``use_orig_params`` only the tail is padded, and the gradient is not. With it, each
    parameter but the first starts at a multiple of 16 bytes and the whole is padded to the size of
    the process group (``group``; by default ``factor``, but NO_SHARD shards nothing over its own).
    """
    if not use_orig_params:
        numel = sum(p.numel for p in params)
        return ShardedSize(numel, _round_up(numel, factor), factor)
    alignment = FLAT_PARAM_ALIGNMENT_BYTES // DTYPE_BYTES[compute_dtype]
    numel = 0
    for param in params:
        numel = _round_up(numel, alignment) + param.numel
    numel = _round_up(numel, group or factor)
    return ShardedSize(numel, numel, factor)


def first_shard(params: Iterable[Param], size: ShardedSize, compute_dtype: str) -> tuple[int, ...]:
    """Elements of each original parameter in the first rank's shard of a flat parameter.

    Parameters that lie beyond it are left out: for ``use_orig_params=True``, whose optimizer sees
    the parameters one by one.
    """
    alignment = FLAT_PARAM_ALIGNMENT_BYTES // DTYPE_BYTES[compute_dtype]
    start, found = 0, []
    for param in params:
        start = _round_up(start, alignment)
        found.append(min(start + param.numel, size.shard) - start)
        start += param.numel
    return tuple(numel for numel in found if numel > 0)


def per_parameter(params: Iterable[Param], factor: int) -> ShardedSize:
    """FSDP2's dim-0 sharding over ``factor`` ranks: each padded to ceil(d0 / factor) rows."""
    numel = padded = 0
    for param in params:
        numel += param.numel
        padded += padded_numel(param, factor)
    return ShardedSize(numel, padded, factor)


def padded_numel(param: Param, factor: int) -> int:
    """Elements of one FSDP2 parameter with dim-0 padding on all ranks (a scalar is one row)."""
    rows = param.shape[0] if param.shape else 1
    return math.ceil(rows / factor) * factor * math.prod(param.shape[1:])
