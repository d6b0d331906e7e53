"""Dotted keys: ``fsdp.overrides."layers.0".reshard_after_forward``, quoted as in TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@lru_cache(maxsize=4096)
def split_key(key: str) -> tuple[str, ...]:
    """The parts of a dotted key; quotes protect dots. Raises ``ValueError``."""
    # Two values, so that a key which brings its own (a = 1 #) is not taken for one.
    (parts, value), (_, other) = (_parsed(key, n) for n in (0, 1))
    if (value, other) != (0, 1):
        raise ValueError(f"{key!r} is not a dotted key")
    return parts


def _parsed(key: str, value: int) -> tuple[tuple[str, ...], Any]:
    try:
        node: Any = tomllib.loads(f"{key.strip()} = {value}")
    except tomllib.TOMLDecodeError:
        raise ValueError(f"{key!r} is not a dotted key") from None
    parts = []
    while isinstance(node, dict) and len(node) == 1:
        name, node = next(iter(node.items()))
        parts.append(name)
    return tuple(parts), node


def join_key(parts: Iterable[str]) -> str:
    """The dotted key of ``parts``: the inverse of :func:`split_key`."""
    return ".".join(part if _BARE.fullmatch(part) else _quoted(part) for part in parts)


def _quoted(part: str) -> str:
    # TOML's basic strings are JSON's, but for DEL and characters beyond the basic plane.
    return json.dumps(part, ensure_ascii=False).replace("\x7f", "\\u007f")


def set_key(data: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of ``data`` with the key at ``path`` set; tables on the way are made if missing."""
    head, *rest = path
    if rest:
        inner = data.get(head)
        value = set_key(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**data, head: value}
