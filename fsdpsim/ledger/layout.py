"""Which rank holds which elements of which parameter, with padding.

Sources: torch 2.13 ``_flat_param.py`` (FSDP1 concatenates a unit's parameters, pads and cuts the
whole) and ``_fsdp_param.py`` (FSDP2 cuts each parameter along dim 0, as ``torch.chunk`` does, and
pads each rank's chunk to the first's rows). PyTorch FSDP, arXiv 2304.11277, figure 3, shows a 4 x 3
linear layer over 16 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpsim.sharding import (
    FLAT_PARAM_ALIGNMENT_BYTES,
    ShardedSize,
    flat_parameter,
    padded_numel,
)
from fsdpsim.workload import DTYPE_BYTES, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a flat parameter: one parameter, or padding (``param`` is None)."""

    param: str | None
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Elements ``start`` to ``stop`` of one flattened parameter, on one rank."""

    param: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements held."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds of one unit; ``padding`` elements beside what is ``held``."""

    rank: int
    held: tuple[Held, ...]
    padding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """FSDP1's flat parameter of one unit: its pieces in order, over ``size.factor`` ranks."""

    size: ShardedSize
    pieces: tuple[Piece, ...]

    def holding(self, rank: int) -> Holding:
        """The elements of rank ``rank``: the equal share of the padded whole at its place."""
        first = rank * self.size.shard
        last = first + self.size.shard
        held = tuple(
            Held(
                param=piece.param,
                start=max(first, piece.start) - piece.start,
                stop=min(last, piece.stop) - piece.start,
            )
            for piece in self.pieces
            if piece.param is not None and piece.start < last and piece.stop > first
        )
        return Holding(rank=rank, held=held, padding=_padding(self.size.shard, held))


def _padding(shard: int, held: Sequence[Held]) -> int:
    return shard - sum(h.numel for h in held)


def flat_layout(
    params: Sequence[Param], factor: int, *, compute_dtype: str, use_orig_params: bool
) -> FlatLayout:
    """The pieces of FSDP1's flat parameter; the last one may be padding to ``factor`` ranks."""
    size = flat_parameter(
        params, factor, compute_dtype=compute_dtype, use_orig_params=use_orig_params
    )
    alignment = 1
    if use_orig_params:
        alignment = FLAT_PARAM_ALIGNMENT_BYTES // DTYPE_BYTES[compute_dtype]
    pieces: list[Piece] = []
    end = 0
    for param in params:
        start = math.ceil(end / alignment) * alignment
        _pad(pieces, end, start)
        pieces.append(Piece(param=param.name, start=start, numel=param.numel))
        end = start + param.numel
    _pad(pieces, end, size.padded)
    return FlatLayout(size=size, pieces=tuple(pieces))


def _pad(pieces: list[Piece], start: int, stop: int) -> None:
    if stop > start:
        pieces.append(Piece(param=None, start=start, numel=stop - start))


def per_parameter_holding(params: Sequence[Param], factor: int, rank: int) -> Holding:
    """FSDP2's rows of each parameter on rank ``rank``, as ranges of the flattened parameter."""
    held = tuple(h for param in params if (h := _rows(param, factor, rank)).numel)
    shard = sum(padded_numel(param, factor) for param in params) // factor
    return Holding(rank=rank, held=held, padding=_padding(shard, held))


def _rows(param: Param, factor: int, rank: int) -> Held:
    share = padded_numel(param, factor) // factor
    start = min(rank * share, param.numel)
    return Held(param=param.name, start=start, stop=min(start + share, param.numel))
