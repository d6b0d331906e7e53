"""Which modules are wrapped together: a model's parameters as FSDP units.

As with ``fully_shard``, a unit holds the parameters of its modules that no inner unit holds, and
the root holds the rest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fsdpsim.model.config import ModelConfig
from fsdpsim.model.modules import (
    HEAD,
    Module,
    block_path,
    embedding_paths,
    final_norm_path,
    modules,
)
from fsdpsim.units import shown
from fsdpsim.workload import Param, Unit

ROOT = "root"

#: Unit sizes with a name of their own, smallest last.
UNIT_SIZES = ("model", "block", "sublayer", "linear")

UnitSpec = str | Mapping[str, int] | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """FSDP units in forward order, the root last, and the unit that each module belongs to."""

    units: tuple[Unit, ...]
    unit_of: Mapping[str, str]
    """Fully qualified module name -> unit name. Compute changes unit where this changes."""


def form_units(
    config: ModelConfig,
    unit: UnitSpec = "block",
    *,
    wrap_embedding: bool = False,
    wrap_head: bool = False,
    dtype: str = "float32",
) -> Wrapping:
    """Form the FSDP units of a model.

    ``unit`` is ``"model"`` (everything in the root), ``"block"``, ``{"blocks": k}`` (k consecutive
    blocks per unit, the last with what remains), ``"sublayer"`` (attention and MLP apart, each with
    the norm before it), ``"linear"`` (each linear layer, and a layer's experts together), or a list
    of module names, each match one unit; in these ``*``, ``?`` and ``[0-9]`` match within one
    component of a name, never across a dot. ``wrap_embedding`` makes a unit ``embed`` of the
    embeddings, ``wrap_head`` a unit ``head`` of the final norm and head, as torchtitan does; tied
    weights stay together in the root. ``dtype`` is the original dtype of the parameters.

    Raises ``ValueError`` for a unit that is none of these, or matches nothing.
    """
    tree = modules(config, dtype)
    wraps = [*_inner_wraps(config, unit, tree)]
    untied = unit != "model" and not config.tie_word_embeddings
    if wrap_embedding and untied:
        wraps.append(("embed", embedding_paths(config)))
    if wrap_head and untied:
        wraps.append(("head", (final_norm_path(config), HEAD)))
    unit_of = _innermost(wraps, tree)
    if config.tie_word_embeddings:
        unit_of[HEAD] = unit_of[embedding_paths(config)[0]] = ROOT
    return Wrapping(units=_units(tree, unit_of, _parents(wraps)), unit_of=unit_of)


def unit_names(config: ModelConfig) -> dict[str, set[str]]:
    """Parameter -> the units that hold it under the unit sizes with a name, the root apart."""
    names: dict[str, set[str]] = {}
    for size in UNIT_SIZES:
        for unit in form_units(config, size, wrap_embedding=True, wrap_head=True).units:
            for param in unit.params if not unit.is_root else ():
                names.setdefault(param.name, set()).add(unit.name)
    return names


def _inner_wraps(
    config: ModelConfig, unit: UnitSpec, tree: Sequence[Module]
) -> Iterable[tuple[str, Sequence[str]]]:
    if unit == "model":
        return ()
    if unit == "block":
        return _groups_of_blocks(config, 1)
    if unit == "sublayer":
        return _sublayers(config, tree)
    if unit == "linear":
        kinds = ("linear", "experts")
        return [(_short(config, m.name), (m.name,)) for m in tree if m.kind in kinds and m.params]
    if isinstance(unit, Mapping):
        return _groups_of_blocks(config, _block_count(config, unit))
    if isinstance(unit, str) or not all(isinstance(p, str) for p in unit):
        raise ValueError(f"{shown(unit)} is not a unit size; {_choices()}")
    return _matches(config, unit, tree)


def _choices() -> str:
    names = ", ".join(f'"{name}"' for name in UNIT_SIZES)
    return f"use {names}, {{ blocks = k }}, or a list of module names or patterns"


def _block_count(config: ModelConfig, unit: Mapping[str, int]) -> int:
    k = unit.get("blocks")
    if set(unit) != {"blocks"} or not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"{shown(dict(unit))} is not a unit size; {_choices()}")
    if k > config.num_hidden_layers:
        raise ValueError(f"blocks = {k} is more than the model's {config.num_hidden_layers} blocks")
    return k


def _groups_of_blocks(config: ModelConfig, k: int) -> Iterator[tuple[str, Sequence[str]]]:
    n = config.num_hidden_layers
    for first in range(0, n, k):
        last = min(first + k, n) - 1
        name = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        yield name, [f"{block_path(config)}.{i}" for i in range(first, last + 1)]


def _sublayers(config: ModelConfig, tree: Sequence[Module]) -> Iterator[tuple[str, Sequence[str]]]:
    groups: dict[str, list[str]] = {}
    for module in tree:
        if module.sublayer:
            block = module.name[: _end_of_block(config, module.name)]
            groups.setdefault(f"{_short(config, block)}.{module.sublayer}", []).append(module.name)
    yield from groups.items()


def _end_of_block(config: ModelConfig, name: str) -> int:
    start = len(block_path(config)) + 1
    return name.index(".", start)


def _matches(
    config: ModelConfig, patterns: Sequence[str], tree: Sequence[Module]
) -> Iterator[tuple[str, Sequence[str]]]:
    names = [module.name for module in tree]
    for pattern in patterns:
        if not any(_matches_name(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise ValueError(f"{shown(pattern)} matches no module; some are {', '.join(near)}")
    for name in names:
        if any(_matches_name(pattern, name) for pattern in patterns):
            yield _short(config, name), (name,)


def _matches_name(pattern: str, name: str) -> bool:
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def _short(config: ModelConfig, name: str) -> str:
    """A unit's name: the module's, with the family's path to its blocks written ``layers``."""
    blocks = block_path(config)
    if name.startswith(f"{blocks}."):
        return "layers" + name[len(blocks) :]
    return name.removeprefix("model.").removeprefix("transformer.")


def _innermost(
    wraps: Iterable[tuple[str, Sequence[str]]], tree: Sequence[Module]
) -> dict[str, str]:
    wrapped = {module: unit for unit, members in wraps for module in members}
    return {module.name: _owner(module.name, wrapped) for module in tree}


def _owner(name: str, wrapped: Mapping[str, str]) -> str:
    while name:
        if name in wrapped:
            return wrapped[name]
        name = name.rpartition(".")[0]
    return ROOT


def _parents(wraps: Iterable[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """unit -> the unit around it, where that is not the root."""
    wrapped = {module: unit for unit, members in wraps for module in members}
    around = ((u, _owner(members[0].rpartition(".")[0], wrapped)) for u, members in wraps)
    return {unit: parent for unit, parent in around if parent != ROOT}


def _units(
    tree: Sequence[Module], unit_of: Mapping[str, str], parents: Mapping[str, str]
) -> tuple[Unit, ...]:
    params: dict[str, list[Param]] = {}
    for module in tree:
        params.setdefault(unit_of[module.name], []).extend(module.params)
    root = params.pop(ROOT, [])
    inner = (
        Unit(name=name, params=tuple(ps), parent=parents.get(name)) for name, ps in params.items()
    )
    return (*inner, Unit(name=ROOT, params=tuple(root), is_root=True))
