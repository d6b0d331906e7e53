"""A scenario with every default filled in, as TOML that can be read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fsdpsim.scenario import Scenario

#: Keys whose default follows from other tables: key -> property of :class:`Scenario`.
FOLLOWS = {
    "fsdp.sharding_factor": "shard_factor",
    "training.param_dtype": "param_dtype",
    "training.reduce_dtype": "reduce_dtype",
    "training.iterations": "iterations",
}


def resolved(scenario: Scenario) -> dict[str, Any]:
    """The tables of ``scenario`` with defaults, in SI base units; without keys that are None."""
    tables = scenario.model_dump(mode="json", exclude_none=True)
    if scenario.hardware is None:
        tables.pop("hardware", None)
    return tables


def unset_keys(scenario: Scenario) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Table -> the keys that TOML cannot write because they have no value.

    Where the value follows from other keys it stands behind: ``iterations (here 3)``.
    """
    found = {}
    for path, names in _unset(scenario.model_dump(), ()):
        found[path] = tuple(_with_value(scenario, path, name) for name in names)
    return found


def _unset(
    table: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    if path:
        yield path, tuple(key for key, value in table.items() if value is None)
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _unset(value, (*path, key))


def _with_value(scenario: Scenario, path: tuple[str, ...], name: str) -> str:
    source = FOLLOWS.get(".".join((*path, name)))
    value = getattr(scenario, source) if source is not None else None
    return _key(name) if value is None else f"{_key(name)} (here {value})"


def as_toml(
    tables: Mapping[str, Any], unset: Mapping[tuple[str, ...], tuple[str, ...]] | None = None
) -> str:
    """``tables`` as TOML text; keys that are ``unset`` are named in comments."""
    return "\n".join(_table_lines(tables, (), unset or {}))


def _table_lines(
    table: Mapping[str, Any],
    path: tuple[str, ...],
    unset: Mapping[tuple[str, ...], tuple[str, ...]],
) -> Iterator[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and (plain or not inner):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    if names := unset.get(path):
        yield f"# not set: {', '.join(names)}"
    for key, value in inner.items():
        yield from _table_lines(value, (*path, key), unset)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
