"""One point's outcome: its settings and every figure, as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "oom", "invalid", "failed"]

#: Figures of which more is better.
MORE_IS_BETTER = ("tokens_per_s_per_gpu", "mfu")


def value_text(value: Any) -> str:
    """A value of a swept key as people say it: ``4 blocks``, ``fsdp1, SHARD_GRAD_OP``."""
    if value is None:
        return "default"
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        return json.dumps(value, default=str)
    if len(value) == 1 and isinstance(count := next(iter(value.values())), int):
        return f"{count} {next(iter(value))}"
    words = (v if isinstance(v, str) else f"{k} = {value_text(v)}" for k, v in value.items())
    return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome of one point."""

    point: int
    """Index in the product of all axes."""
    settings: dict[str, Any]
    """Dotted key -> value, as the sweep gives it."""
    status: Status
    """``oom``: runs out of memory, which is an answer; ``invalid``: no such configuration exists;
    ``failed``: an error of ours."""
    reason: str = ""
    """Why there is no step time; empty for ``ok``."""
    figures: Mapping[str, Any]
    """As ``fsdpsim run --json``; empty when nothing was simulated."""

    def as_json(self) -> str:
        """One line without its end: the same row gives the same bytes."""
        fields = (self.point, self.settings, self.status, self.reason, self.figures)
        return json.dumps(dict(zip(_FIELDS, fields, strict=True)), allow_nan=False, default=str)

    @classmethod
    def of_json(cls, line: str) -> Row:
        """The row of a line. Raises ``ValueError`` for anything else."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or tuple(fields) != _FIELDS:
            raise ValueError("not a row of a sweep")
        return cls(**fields)

    def flat(self) -> dict[str, Any]:
        """All columns of a table: the settings, then status, reason and figures by dotted name."""
        own = {"status": self.status, "reason": self.reason}
        return {"point": self.point, **self.settings, **own, **dict(flatten(self.figures))}

    def get(self, key: str) -> Any:
        """A figure by dotted name, or a setting; None where this row has none."""
        if key in self.settings:
            return self.settings[key]
        value: Any = self.figures
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


_FIELDS = ("point", "settings", "status", "reason", "figures")


def flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested mappings and lists; numbers of a list count from 0."""
    for key, value in figures.items():
        if isinstance(value, (list, tuple)):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
