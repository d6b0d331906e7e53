"""Gradient buckets: parameters in reverse order, cut where a bucket is full, and who uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpsim.memory import Buffer
from fsdpsim.schedules.autograd import Node
from fsdpsim.schedules.runtime import Runtime
from fsdpsim.schedules.storages import Storage
from fsdpsim.workload import Param, Unit, nbytes

#: The names of a unit and of one of its parameters.
Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose gradients are reduced together, as (unit, parameter)."""

    params: list[tuple[str, Param]] = field(default_factory=list)
    buffer: Buffer | None = None
    ready: set[Key] = field(default_factory=set)

    @property
    def keys(self) -> list[Key]:
        """Of its parameters."""
        return [(unit, param.name) for unit, param in self.params]

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


class BucketedRuntime(Runtime):
    """What DDP and ZeRO share: whole gradients, each complete when all uses are differentiated."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.incomplete: dict[Key, Buffer] = {}
        """Gradients in autograd's hands: some use of the parameter is not differentiated yet."""
        self.grads: dict[Key, Buffer] = {}
        """The parameters' ``.grad``."""
        self._uses: Counter[Key] = Counter()

    def grad_dtype(self, param: Param) -> str:
        """The dtype of its gradient."""
        raise NotImplementedError

    def parameter_nodes(self, unit: Unit, params: tuple[Param, ...]) -> tuple[Node, ...]:
        """No hook waits behind them, but each use will have to be differentiated."""
        self._uses.update((unit.name, param.name) for param in params)
        return ()

    def allocate_gradients(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """Autograd writes each gradient into a new tensor, and adds up those of several uses."""
        for param in _params(storages):
            size = nbytes(param.numel, self.grad_dtype(param))
            new = self.program.malloc(f"grad {param.name}", size, "gradients")
            self.add_gradient(self.incomplete, (unit.name, param.name), new)

    def gradients_written(self, unit: Unit, storages: Sequence[Storage]) -> None:
        """After the last use: ``AccumulateGrad`` and its hooks."""
        for param in _params(storages):
            key = (unit.name, param.name)
            self._uses[key] -= 1
            if not self._uses[key]:
                with self.program.for_unit(unit.name):
                    self.accumulate_grad(key, self.incomplete.pop(key))

    def accumulate_grad(self, key: Key, new: Buffer) -> None:
        """``new`` is complete: it becomes ``.grad``, or is added to it."""
        self.add_gradient(self.grads, key, new)


def _params(storages: Sequence[Storage]) -> Iterator[Param]:
    return (param for storage in storages for param in storage.params)
