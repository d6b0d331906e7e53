"""Gradient buckets: parameters in reverse order, cut where a bucket is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fsdpsim.memory import Buffer
from fsdpsim.workload import Param, Unit, nbytes


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose gradients are reduced together, as (unit, parameter)."""

    params: list[tuple[str, Param]] = field(default_factory=list)
    buffer: Buffer | None = None
    ready: set[str] = field(default_factory=set)

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(param.numel for _, param in self.params)

    @property
    def is_full(self) -> bool:
        """Whether every gradient has been produced."""
        return len(self.ready) == len(self.params)

    @property
    def unit(self) -> str:
        """The unit of the parameter that fills it last."""
        return self.params[-1][0]


def cut(units: Iterable[Unit], caps: Iterator[float], dtype: str | None) -> list[Bucket]:
    """Buckets of the trained parameters; each ends with the parameter that reaches its cap.

    ``caps`` yields the bytes of one bucket after the other; ``dtype`` None is the parameter's own.
    """
    trained = [(u.name, p) for u in units for p in u.params if p.requires_grad]
    buckets, size, cap = [Bucket()], 0, next(caps)
    for unit, param in reversed(trained):
        buckets[-1].params.append((unit, param))
        size += nbytes(param.numel, dtype or param.dtype)
        if size >= cap:
            buckets.append(Bucket())
            size, cap = 0, next(caps)
    return [bucket for bucket in buckets if bucket.params]
