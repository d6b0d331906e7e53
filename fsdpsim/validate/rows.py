"""Published training runs as rows: what ran, on what, how fast, in how much memory.

The shipped data set is ``fsdpsim/data/measurements.json``; its own ``schema`` table describes each
field. A user's file may hold the same tables, or only ``rows`` (an object or a plain list) that
refer to the shipped ``models`` and ``hardware``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from fsdpsim.faults import expected, not_allowed

#: The data set that ``fsdpsim validate`` reads by default.
MEASUREMENTS = Path(__file__).parents[1] / "data" / "measurements.json"

GIB = 2**30

Row = Mapping[str, Any]
"""One run; a field that its source does not state is absent or None."""


class RowsError(ValueError):
    """A file of rows that cannot be used; the message names it."""


_Count = Annotated[int, Field(ge=1, strict=True)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class _Fields(BaseModel):
    """Types of what is read of a row; a count may also be a text such as "8 to 512"."""

    id: str
    hw: str
    model: str
    source: str | None = None
    date: str | None = None
    impl: str | None = None
    strategy: str | None = None
    n_gpus: _Count | str | None = None
    shard_factor: _Count | None = None
    micro_batch: _Count | str | None = None
    seq_len: _Count | str | None = None
    grad_accum: _Count | None = None
    backward_prefetch: str | None = None
    tps_per_gpu: _Positive | None = None
    step_time_s: _Positive | None = None
    mfu_pct: _Positive | None = None
    hfu_pct: _Positive | None = None
    peak_mem_gib: _Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Rows with the tables that they refer to."""

    rows: tuple[Row, ...]
    models: Mapping[str, Mapping[str, Any]]
    hardware: Mapping[str, Mapping[str, Any]]
    profiles: tuple[Mapping[str, Any], ...] = ()
    memory_identities: tuple[Mapping[str, Any], ...] = ()

    def row(self, name: str) -> Row:
        """The row with this ``id``. Raises ``KeyError``."""
        return next(iter(r for r in self.rows if r["id"] == name), None) or _missing(name)


def _missing(name: str) -> Row:
    raise KeyError(f"no row {name!r}")


def read_measurements(path: Path = MEASUREMENTS) -> Measurements:
    """Read a file of rows. Raises :class:`RowsError` when it is not one."""
    data = _read_json(path)
    tables = data if isinstance(data, Mapping) else {"rows": data}
    rows = tables.get("rows")
    if not isinstance(rows, list) or not all(isinstance(r, Mapping) and "id" in r for r in rows):
        raise RowsError(f"{path}: needs a list `rows` of objects, each with an `id`")
    for number, row in enumerate(rows):
        _check_fields(path, f"rows[{number}] ({row['id']})", row)
    shipped = _read_json(MEASUREMENTS)
    return Measurements(
        rows=tuple(rows),
        models={**shipped["models"], **tables.get("models", {})},
        hardware={**shipped["hardware"], **tables.get("hardware", {})},
        profiles=tuple(tables.get("profiles", ())),
        memory_identities=tuple(tables.get("memory_identities", ())),
    )


def _check_fields(path: Path, where: str, row: Row) -> None:
    try:
        _Fields.model_validate(row)
    except ValidationError as errors:
        first = errors.errors()[0]
        if first["type"] == "missing":
            text = "is missing"
        else:
            wanted = expected(first["type"], first.get("ctx", {}), first["msg"])
            text = not_allowed(first["input"], wanted)
        raise RowsError(f"{path}: {where}: {first['loc'][0]}: {text}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RowsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RowsError(f"{path}: is not JSON: {error}") from None


def measured_step_seconds(row: Row) -> float | None:
    """Seconds per optimizer step, reported or derived from tokens/s; None when not published."""
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    tokens = tokens_per_step(row)
    return tokens / row["tps_per_gpu"] if tokens and row.get("tps_per_gpu") else None


def tokens_per_step(row: Row) -> int | None:
    """Tokens per GPU and optimizer step; None when the row does not say."""
    sizes: Sequence[Any] = [row.get(k) for k in ("micro_batch", "seq_len")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return int(sizes[0]) * int(sizes[1]) * int(row.get("grad_accum") or 1)


def measured_reserved_bytes(row: Row) -> float | None:
    """Peak bytes that the caching allocator reserved; None when not published or another level."""
    gib, kind = row.get("peak_mem_gib"), str(row.get("peak_mem_kind") or "")
    return gib * GIB if gib and kind.startswith("reserved") else None
