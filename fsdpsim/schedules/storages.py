"""Which parameters' tensors share a buffer: none, or with ``granularity = "units"`` many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from fsdpsim.workload import Param, Unit, Workload


class Storage(NamedTuple):
    """Parameters whose unsharded tensors, or whose gradients, are one buffer."""

    name: str
    """What the buffer is called."""
    names: tuple[str, ...]
    """Of the parameters."""
    numel: int
    params: tuple[Param, ...]


class Storages:
    """Sorts a workload's parameters into storages.

    When lumped, all that are asked for at once share one, but for a parameter that several parts
    use: the gradients of its uses are added up, so it is alone.
    """

    def __init__(self, workload: Workload, *, lumped: bool) -> None:
        self.lumped = lumped
        uses = Counter(name for part in workload.parts for name in part.params or ())
        self._alone = {name for name, count in uses.items() if count > 1}
        self._of_gradients: dict[tuple[str, ...], tuple[Storage, ...]] = {}

    def of(self, params: Iterable[Param]) -> tuple[Storage, ...]:
        """The storages of ``params``."""
        if not self.lumped:
            return tuple(_storage((param,)) for param in params)
        alone, together = list[Param](), list[Param]()
        for param in params:
            (alone if param.name in self._alone else together).append(param)
        groups = [*((param,) for param in alone), *([tuple(together)] if together else [])]
        return tuple(map(_storage, groups))

    def of_gradients(self, unit: Unit, names: tuple[str, ...]) -> tuple[Storage, ...]:
        """Those of the trained parameters among ``names``, which are of ``unit``."""
        found = self._of_gradients.get(names)
        if found is None:
            trained = {param.name: param for param in unit.params if param.requires_grad}
            found = self.of(trained[name] for name in names if name in trained)
            self._of_gradients[names] = found
        return found


def _storage(params: tuple[Param, ...]) -> Storage:
    first, more = params[0].name, len(params) - 1
    return Storage(
        name=f"{first} and {more} more" if more else first,
        names=tuple(param.name for param in params),
        numel=sum(param.numel for param in params),
        params=params,
    )
