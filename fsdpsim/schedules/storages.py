"""Which parameters' tensors share a buffer: none, or with ``granularity = "units"`` many."""

from __future__ import annotations

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

    When lumped, those that one part of the model uses share one. A parameter that several parts use
    is alone: the gradients of its uses are added up.
    """

    def __init__(self, workload: Workload, *, lumped: bool) -> None:
        self.lumped = lumped
        units = {unit.name: unit for unit in workload.units}
        self._users: dict[tuple[str, str], list[str]] = {}
        for part in workload.parts:
            for name in _used(part, units):
                self._users.setdefault((part.unit, name), []).append(part.name)
        self._of_gradients: dict[tuple[str, tuple[str, ...]], tuple[Storage, ...]] = {}

    def of(self, unit: Unit, params: Iterable[Param]) -> tuple[Storage, ...]:
        """The storages of ``params``, which are of ``unit``."""
        groups: dict[object, list[Param]] = {}
        for param in params:
            users = self._users.get((unit.name, param.name), [])
            together = self.lumped and len(users) == 1
            groups.setdefault(users[0] if together else (param.name,), []).append(param)
        return tuple(self._storage(unit, tuple(group)) for group in groups.values())

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
            is_shared=len(self._users.get((unit.name, first), ())) > 1,
        )
