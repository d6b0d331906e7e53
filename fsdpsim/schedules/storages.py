"""Which parameters' tensors share a buffer: none, or with ``granularity = "units"`` many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fsdpsim.workload import Param, Part, Unit, Workload


class Storage(NamedTuple):
    """Parameters whose unsharded tensors, or whose gradients, are one buffer."""

    name: str
    """What the buffer is called."""
    names: tuple[str, ...]
    """Of the parameters."""
    numel: int
    params: tuple[Param, ...]
    is_shared: bool
    """Whether several parts of the model use the parameter."""


def _used(part: Part, units: Mapping[str, Unit]) -> Iterable[str]:
    if part.params is not None or not part.unit:
        return part.params or ()
    return (param.name for param in units[part.unit].params)


class Storages:
    """Sorts a workload's parameters into storages.

    When lumped, all that are asked for at once share one, but for a parameter that several parts
    use: the gradients of its uses are added up, so it is alone.
    """

    def __init__(self, workload: Workload, *, lumped: bool) -> None:
        self.lumped = lumped
        units = {unit.name: unit for unit in workload.units}
        uses = Counter((part.unit, name) for part in workload.parts for name in _used(part, units))
        self._shared = {key for key, count in uses.items() if count > 1}
        self._of_gradients: dict[tuple[str, tuple[str, ...]], tuple[Storage, ...]] = {}

    def of(self, unit: Unit, params: Iterable[Param]) -> tuple[Storage, ...]:
        """The storages of ``params``, which are of ``unit``."""
        alone, together = list[Param](), list[Param]()
        for param in params:
            apart = not self.lumped or (unit.name, param.name) in self._shared
            (alone if apart else together).append(param)
        groups = [*((param,) for param in alone), *([tuple(together)] if together else [])]
        return tuple(self._storage(unit, group) for group in groups)

    def of_gradients(self, unit: Unit, names: tuple[str, ...]) -> tuple[Storage, ...]:
        """Those of the trained parameters among ``names``, which are of ``unit``."""
        found = self._of_gradients.get((unit.name, names))
        if found is None:
            trained = {param.name: param for param in unit.params if param.requires_grad}
            found = self.of(unit, (trained[name] for name in names if name in trained))
            self._of_gradients[unit.name, names] = found
        return found

    def _storage(self, unit: Unit, params: tuple[Param, ...]) -> Storage:
        first, more = params[0].name, len(params) - 1
        return Storage(
            name=f"{first} and {more} more" if more else first,
            names=tuple(param.name for param in params),
            numel=sum(param.numel for param in params),
            params=params,
            is_shared=(unit.name, first) in self._shared,
        )
