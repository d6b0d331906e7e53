"""Which modules one forward calls, and how they nest: the tree that the training step walks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fsdpsim.memory import Buffer
from fsdpsim.workload import Param, Part, Unit, Workload

#: Compute outside all FSDP units, such as a loss that the training loop computes.
OUTSIDE = Unit(name="")


@dataclass(slots=True, eq=False)
class PartCall:
    """One run of a part in one forward, and the buffers that its backward needs."""

    part: Part
    unit: Unit
    trained: tuple[Param, ...]
    """The parameters whose gradients this part's backward produces."""
    unnamed: tuple[str, ...]
    """Names of those among them whose gradient none of its kernels names."""
    number: int
    """How often the part has run before in this iteration."""
    tensors: dict[str, Buffer] = field(default_factory=dict)
    region: Region | None = None
    """What its backward must recompute first; None without activation checkpointing."""

    @property
    def label(self) -> str:
        """The unit's name, or the part's outside all units."""
        return self.unit.name or self.part.name


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of one unit's module: what runs between its pre- and its post-forward hook."""

    unit: Unit
    children: list[PartCall | ModuleCall] = field(default_factory=list)

    def parts(self) -> Iterator[PartCall]:
        """All parts below, in call order."""
        for child in self.children:
            if isinstance(child, PartCall):
                yield child
            else:
                yield from child.parts()


Item = PartCall | ModuleCall


@dataclass(slots=True, eq=False)
class Region:
    """What is recomputed together, by the first backward in it."""

    items: Sequence[Item]
    with_hooks: bool
    """Checkpointing wraps the units, so that their forward hooks run again."""


def parts_of(items: Sequence[Item]) -> Iterator[PartCall]:
    """The parts of ``items`` and below, in call order."""
    for item in items:
        yield from (item,) if isinstance(item, PartCall) else item.parts()


def is_checkpointed(items: Sequence[Item]) -> bool:
    """Whether any part of ``items`` is recomputed in backward."""
    return any(call.part.recompute for call in parts_of(items))


def grouped(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Consecutive ``items`` of one named checkpoint region together, all others alone."""

    def key(numbered: tuple[int, Item]) -> str | int:
        index, item = numbered
        first = next(parts_of([item]), None)
        return (first.part.region if first is not None else "") or index

    for _, group in groupby(enumerate(items), key):
        yield [item for _, item in group]


def assign_regions(items: Sequence[Item], *, outside: bool) -> None:
    """Give every checkpointed part below ``items`` the region that it is recomputed with.

    Named regions hold what they name. Otherwise checkpointing covers one part, or, with
    ``outside``, one call of a unit's module with its hooks.
    """
    for group in grouped(items):
        item = group[0]
        named = next(parts_of(group)).part.region if is_checkpointed(group) else ""
        if named:
            _share(Region(group, with_hooks=outside))
        elif isinstance(item, PartCall):
            if item.part.recompute:
                _share(Region(group, with_hooks=False))
        elif outside and not item.unit.is_root and is_checkpointed(group):
            _share(Region(group, with_hooks=True))
        else:
            assign_regions(item.children, outside=outside)


def _share(region: Region) -> None:
    for call in parts_of(region.items):
        call.region = region


class CallTree:
    """Builds the tree of one forward after the other, from the parts' call order."""

    def __init__(self, workload: Workload) -> None:
        self._units = {unit.name: unit for unit in workload.units}
        self._parts = {part.name: part for part in workload.parts}
        self._order = workload.calls or tuple(self._parts)
        self._paths = {name: self._path(unit) for name, unit in self._units.items()}
        self._trained = {part.name: self._trained_by(part) for part in workload.parts}
        self._unnamed = {part.name: self._unnamed_by(part) for part in workload.parts}
        self._numbers: dict[str, int] = {}
        self.recomputes = any(part.recompute for part in workload.parts)
        """Whether there is any activation checkpointing."""

    def _path(self, unit: Unit) -> list[Unit]:
        """From the root down to ``unit``."""
        if unit.is_root:
            return [unit]
        root = next(u for u in self._units.values() if u.is_root)
        return [*self._path(self._units[unit.parent] if unit.parent else root), unit]

    def _trained_by(self, part: Part) -> tuple[Param, ...]:
        params = self._units[part.unit].params if part.unit else ()
        names = part.params
        return tuple(p for p in params if p.requires_grad and (names is None or p.name in names))

    def _unnamed_by(self, part: Part) -> tuple[str, ...]:
        named = {name for kernel in part.backward for name in kernel.gradients}
        return tuple(p.name for p in self._trained[part.name] if p.name not in named)

    def begin_iteration(self) -> None:
        """Number the calls of each part from zero again."""
        self._numbers.clear()

    def forward(self) -> tuple[ModuleCall, list[PartCall]]:
        """The root's module call of the next forward, and what runs after it outside all units.

        Consecutive parts of one unit lie in one call of its module, unless a part comes again.
        """
        root = ModuleCall(next(u for u in self._units.values() if u.is_root))
        stack, after = [root], list[PartCall]()
        for part in (self._parts[name] for name in self._order):
            if not part.unit:
                after.append(self._numbered(part, OUTSIDE))
                continue
            path = self._paths[part.unit]
            del stack[_common(stack, path, part) :]
            for unit in path[len(stack) :]:
                call = ModuleCall(unit)
                stack[-1].children.append(call)
                stack.append(call)
            stack[-1].children.append(self._numbered(part, path[-1]))
        return root, after

    def _numbered(self, part: Part, unit: Unit) -> PartCall:
        number = self._numbers.get(part.name, 0)
        self._numbers[part.name] = number + 1
        return PartCall(part, unit, self._trained[part.name], self._unnamed[part.name], number)


def _common(stack: list[ModuleCall], path: list[Unit], part: Part) -> int:
    """How many of the open calls ``part`` belongs to."""
    depth = 1  # the root's call stays open
    while depth < min(len(stack), len(path)) and stack[depth].unit is path[depth]:
        if any(call.part is part for call in stack[depth].parts()):
            break
        depth += 1
    return depth
