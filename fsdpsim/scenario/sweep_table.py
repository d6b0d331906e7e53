"""The ``[sweep]`` table: which keys vary, over which values, which combinations to leave out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from fsdpsim.faults import did_you_mean
from fsdpsim.model.config import NAMES, ModelConfig
from fsdpsim.scenario.expressions import Expression, parse_expression
from fsdpsim.scenario.hints import other_runtime
from fsdpsim.scenario.keys import join_key, split_key
from fsdpsim.scenario.runtimes import Table

#: More points than this are refused: no one waits for them, and a slip in a range makes them.
MAX_POINTS = 10_000_000

#: The same for the values of one range.
MAX_RANGE = 100_000

#: What a table that varies nothing lacks.
EXAMPLE = 'write for example "fsdp.sharding_factor" = [1, 2, 4]'

#: Keys of the whole scenario that ``where`` may read beside those of the file.
DERIVED = ("world_size", "replicas")


class Range(Table):
    """Numbers from ``first`` to ``last``, both included, by a step or by a factor."""

    first: int | float
    last: int | float
    step: int | float | None = None
    factor: int | float | None = None

    def values(self) -> tuple[int | float, ...]:
        """The numbers. Raises ``ValueError`` for a range that never ends or holds nothing."""
        if (self.step is None) == (self.factor is None):
            raise ValueError("a range needs either step or factor")
        if self.step is not None and self.step <= 0:
            raise ValueError(f"step = {self.step} must be more than zero")
        if self.factor is not None and (self.factor <= 1 or self.first <= 0):
            raise ValueError("a range by factor needs factor > 1 and first > 0")
        if self.first > self.last:
            raise ValueError(f"first = {self.first} is more than last = {self.last}")
        return tuple(self._numbers())

    def _numbers(self) -> Iterator[int | float]:
        # Fractions of the decimals as written: 0.1, 0.2, 0.3 and not 0.30000000000000004.
        first, last = Fraction(str(self.first)), Fraction(str(self.last))
        step, factor = Fraction(str(self.step or 0)), Fraction(str(self.factor or 1))
        whole = all(isinstance(n, int) for n in (self.first, self.step or 0, self.factor or 1))
        for _ in range(MAX_RANGE):
            yield int(first) if whole else float(first)
            first = first * factor + step
            if first > last:
                return
        raise ValueError(f"a range of more than {MAX_RANGE:,} values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Keys that vary together: ``rows[i]`` holds the i-th value of each key."""

    keys: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def settings(self, index: int) -> dict[str, Any]:
        """The i-th value of each key."""
        return dict(zip(self.keys, self.rows[index], strict=True))


def _values(given: Any) -> tuple[Any, ...]:
    if isinstance(given, Mapping):
        return Range.model_validate(given).values()
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(
            f"{given!r} is not a list of values, nor a range such as "
            "{ first = 1, last = 64, factor = 2 }"
        )
    if not _is_finite(given):
        raise ValueError(f"{given!r} holds nan or inf; no key takes them")
    return tuple(given)


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


Values = Annotated[tuple[Any, ...], BeforeValidator(_values)]


class SweepTable(BaseModel):
    """Every key beside ``zip`` and ``where`` is a dotted scenario key with its values."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Values]

    zip: tuple[dict[str, Values], ...] = ()
    """Tables of keys that vary together: the lists of one table have the same length."""
    where: tuple[str, ...] = ()
    """Only points that satisfy all of these are run, e.g. "fsdp.sharding_factor >= 4"."""

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, data: Any) -> Any:
        """Unquoted dotted keys come as nested tables: they mean the same."""
        if not isinstance(data, Mapping):
            return data
        flat = {key: data[key] for key in ("zip", "where") if key in data}
        if isinstance(flat.get("zip"), Mapping):
            flat["zip"] = [flat["zip"]]
        if isinstance(flat.get("where"), str):
            flat["where"] = [flat["where"]]
        if isinstance(flat.get("zip"), (list, tuple)):
            flat["zip"] = [dict(_flat(z)) if isinstance(z, Mapping) else z for z in flat["zip"]]
        return flat | dict(_flat({k: v for k, v in data.items() if k not in flat}))

    @model_validator(mode="after")
    def _fits_together(self) -> SweepTable:
        keys = [key for axis in self.axes() for key in axis.keys]
        if not keys and not self.where:
            raise ValueError(f"varies nothing; {EXAMPLE}")
        for key in keys:
            inside = [
                k
                for k in keys
                if k != key and split_key(k)[: len(split_key(key))] == split_key(key)
            ]
            if keys.count(key) > 1 or inside:
                raise ValueError(
                    f"{key} is set twice" + (f": also by {inside[0]}" if inside else "")
                )
        if self.num_points > MAX_POINTS:
            raise ValueError(f"{self.num_points:,} points; at most {MAX_POINTS:,} can be swept")
        self.constraints()
        return self

    def axes(self) -> tuple[Axis, ...]:
        """The lists that are multiplied, in the order of the file; zipped tables come last."""
        single = [
            Axis(keys=(key,), rows=tuple((v,) for v in values))
            for key, values in (self.__pydantic_extra__ or {}).items()
        ]
        return (*single, *map(_zipped, self.zip))

    @property
    def num_points(self) -> int:
        """Points of the product, those that ``where`` leaves out included."""
        count = 1
        for axis in self.axes():
            count *= len(axis.rows)
        return count

    def constraints(self) -> tuple[Expression, ...]:
        """``where``, ready to be evaluated. Raises ``ValueError``."""
        return tuple(map(parse_expression, self.where))


def _zipped(table: Mapping[str, tuple[Any, ...]]) -> Axis:
    lengths = {key: len(values) for key, values in table.items()}
    if not lengths:
        raise ValueError("an empty zip table varies nothing")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        raise ValueError(f"zipped lists differ in length: {shown}")
    return Axis(keys=tuple(table), rows=tuple(zip(*table.values(), strict=True)))


def _flat(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = (*prefix, *(split_key(key) if not prefix else (key,)))
        if isinstance(value, Mapping) and not set(value) <= set(Range.model_fields):
            yield from _flat(value, path)
        else:
            yield join_key(path), value


# ---- do the keys exist?


def check_keys(table: SweepTable, schema: type[BaseModel], runtime: type[BaseModel] | None) -> None:
    """Raise ``ValueError`` for every swept or constrained key that ``schema`` does not have.

    ``runtime`` is the ``[fsdp]`` table's class; while fsdp.runtime itself varies, a key of any
    runtime will do.
    """
    keys = [key for axis in table.axes() for key in axis.keys]
    if any(key in ("fsdp", "fsdp.runtime") for key in keys):
        runtime = None
    read = [name for constraint in table.constraints() for name in constraint.names]
    wanted = [*keys, *(name for name in read if name not in DERIVED)]
    faults = [_fault(key, schema, runtime) for key in dict.fromkeys(wanted)]
    if found := [fault for fault in faults if fault]:
        raise ValueError("; ".join(found))


def _fault(key: str, schema: type[BaseModel], runtime: type[BaseModel] | None) -> str:
    """What is wrong with one key, or nothing."""
    *path, last = split_key(key)
    if (*path, last)[0] in ("sweep", "title"):
        return f"{key} cannot be swept"
    inside: list[Any] = [schema]
    for depth, part in enumerate((*path, last)):
        if depth == 1 and path[0] == "fsdp" and runtime is not None:
            inside = [runtime]
        found = [annotation for outer in inside for annotation in _field(outer, part)]
        if not found:
            return _unknown(key, part, inside, runtime)
        inside = [member for annotation in found for member in _members(annotation)]
    return ""


def _members(annotation: Any) -> Iterator[Any]:
    """The annotation itself, or the members of a union such as ``Hardware | None``."""
    if get_origin(annotation) in (UnionType, Union):
        for member in get_args(annotation):
            yield from _members(member)
    elif get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation


def _field(annotation: Any, name: str) -> Iterator[Any]:
    """What the key ``name`` holds in a table of this type; nothing if there is no such key."""
    if get_origin(annotation) in (dict, Mapping):  # the names are the user's own
        yield get_args(annotation)[1]
    elif name not in _known([annotation]):
        return
    elif annotation is ModelConfig:
        yield Any
    else:
        yield annotation.model_fields[name].annotation


def _model_keys() -> list[str]:
    """Keys of ``[model]``: any spelling of a ``config.json``."""
    spellings = (key.split(".")[0] for names in NAMES.values() for key in names)
    return list(dict.fromkeys(["hf_config", *spellings, *ModelConfig.model_fields]))


def _known(inside: Iterable[Any]) -> list[str]:
    tables = [a for a in inside if isinstance(a, type) and issubclass(a, BaseModel)]
    names = (_model_keys() if t is ModelConfig else t.model_fields for t in tables)
    return list(dict.fromkeys(name for fields in names for name in fields))


def _unknown(key: str, part: str, inside: Iterable[Any], runtime: type[BaseModel] | None) -> str:
    known = _known(inside)
    if runtime is not None and (hint := other_runtime(part, _name_of(runtime))):
        return f"{key} {hint}"
    if not known:
        return f"{key} is not a key: {part!r} would lie inside a plain value"
    hint = did_you_mean(part, known, f"known are {', '.join(known)}")
    return f"{key}: unknown key {part!r}; {hint}"


def _name_of(runtime: type[BaseModel]) -> str:
    """What ``fsdp.runtime`` says for this table."""
    return str(get_args(runtime.model_fields["runtime"].annotation)[0])
