"""Which parameters are not trained: ``training.frozen`` applied to units."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from fsdpsim.faults import Fault, FaultsError, did_you_mean
from fsdpsim.units import shown
from fsdpsim.workload import Param, Unit

KEY = "training.frozen"


def freeze(
    units: Sequence[Unit],
    patterns: Sequence[str],
    also: Mapping[str, Collection[str]] | None = None,
) -> tuple[Unit, ...]:
    """``units`` with the parameters untrained that ``patterns`` name, or a unit or module of them.

    ``also`` holds further names of parameters, by their own. Raises ``FaultsError`` for a pattern
    that names nothing: a slip there would train what was meant to be frozen.
    """
    if not patterns:
        return tuple(units)
    names = {
        (unit.name, param.name): {
            unit.name,
            *_modules(param.name),
            *(also or {}).get(param.name, ()),
        }
        for unit in units
        for param in unit.params
    }
    known = {name for of_param in names.values() for name in of_param}
    found = {pattern: {n for n in known if fnmatchcase(n, pattern)} for pattern in patterns}
    some = ", ".join(unit.name for unit in units[:3])
    faults = [Fault(KEY, _unknown(p, known, some)) for p, matches in found.items() if not matches]
    if faults:
        raise FaultsError(*faults)
    frozen = set().union(*found.values())

    def trained(unit: Unit, param: Param) -> Param:
        kept = names[unit.name, param.name].isdisjoint(frozen)
        return param if kept else replace(param, requires_grad=False)

    return tuple(
        replace(unit, params=tuple(trained(unit, param) for param in unit.params)) for unit in units
    )


def _modules(param: str) -> Iterator[str]:
    """A parameter's own name and those of the modules around it: ``a.b.weight``, ``a.b``, ``a``."""
    parts = param.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _unknown(pattern: str, known: Collection[str], some: str) -> str:
    hint = did_you_mean(pattern, sorted(known), f"some units are {some}")
    return f"{shown(pattern)} is no unit, module or parameter; {hint}"
