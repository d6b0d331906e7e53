"""Pydantic's faults in the words of the scenario file: which key, what it says, what is allowed."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from fsdpsim.faults import TYPES, FaultsError, expected, not_allowed
from fsdpsim.scenario.hints import expected_value, other_runtime
from fsdpsim.scenario.keys import join_key, split_key
from fsdpsim.scenario.runtimes import RUNTIMES, Table, Textbook
from fsdpsim.scenario.schema import Scenario
from fsdpsim.units import shown

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: the dotted key (empty for the whole file) and what is wrong with it."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass(frozen=True, slots=True, eq=False)
class _Detail:
    """One of pydantic's faults, and where it lies in the file."""

    path: Path
    kind: str
    given: Any
    context: Mapping[str, Any]
    message: str
    member: str = ""
    """Which type of a union it comes from: pydantic reports the faults of all of them."""
    union: Path = ()
    """The key that holds the union."""

    @property
    def is_mismatch(self) -> bool:
        """Whether the value is of another kind than this member of the union asks for."""
        kinds = (*TYPES, "quantity_type", "literal_error")
        return self.kind in kinds and self.path == self.union

    @property
    def expected(self) -> str:
        """What pydantic asks for, without the "it must be"."""
        return expected(self.kind, self.context, self.message)


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    text: str
    reads: tuple[Path, ...] = ()
    is_unknown: bool = False
    """An unknown key: nothing else can rest on it."""

    def rests_on(self, blamed: Iterable[Path]) -> bool:
        """Whether a key at fault, or one inside or around it, is this fault's or read by it."""
        return any(
            a[: len(b)] == b or b[: len(a)] == a for a in (self.path, *self.reads) for b in blamed
        )


def all_problems(
    error: ValidationError, data: Mapping[str, Any], context: Mapping[str, Any]
) -> list[Problem]:
    """Every fault of ``data``; ``error`` is what validating it has raised.

    Pydantic judges keys together only when each by itself is valid. So what is at fault is taken
    out and the rest validated again, until nothing new comes to light.
    """
    found: list[_Found] = []
    blamed: set[Path] = set()
    rest, latest = data, _found(error, data)
    while latest:
        found += [f for f in latest if not f.rests_on(blamed)]
        blamed.update(f.path for f in latest if f.path and not f.is_unknown)
        before, rest = rest, _without(rest, latest)
        latest = _found_again(rest, context) if rest != before else []
    found.sort(key=lambda f: _position(f.path, data))
    return [Problem(join_key(f.path), f.text) for f in found]


def _found_again(data: Mapping[str, Any], context: Mapping[str, Any]) -> list[_Found]:
    try:
        Scenario.model_validate(data, context=context)
    except ValidationError as error:
        return _found(error, data)
    return []


def _position(path: Path, data: Any) -> list[int]:
    """Where ``path`` stands in the file, so that faults come in its order; what is missing last."""
    position: list[int] = []
    for part in path:
        keys = [*map(str, data if isinstance(data, Mapping) else range(len(data)))]
        if part not in keys:
            return [*position, len(keys)]
        position.append(keys.index(part))
        data = _at((part,), data)
        if not isinstance(data, (Mapping, list, tuple)):
            break
    return position


def _without(data: Mapping[str, Any], found: Iterable[_Found]) -> dict[str, Any]:
    """``data`` without the keys at fault; a table that lacks a key goes; [fsdp] is made plain."""
    rest = dict(data)
    for table, *keys in (f.path for f in found if f.path):
        key = keys[0] if keys else ""
        if isinstance(rest.get(table), Mapping) and key in rest[table] and key != "runtime":
            rest[table] = {k: v for k, v in rest[table].items() if k != key}
        else:
            rest.pop(table, None)
    return rest if "fsdp" in rest else rest | {"fsdp": {"runtime": "textbook"}}


def _found(error: ValidationError, data: Mapping[str, Any]) -> list[_Found]:
    unions: defaultdict[Path, defaultdict[str, list[_Detail]]] = defaultdict(
        lambda: defaultdict(list)
    )
    found: list[_Found] = []
    for fault in error.errors(include_url=False):
        detail = _locate(dict(fault), data)
        if detail.kind == "too_short" and detail.given:
            continue  # of a list whose entries are at fault, pydantic counts only the others
        if detail.member:
            unions[detail.union][detail.member].append(detail)
        else:
            found += _plain(detail, data)
    for path, members in unions.items():
        found += _of_union(path, members, data)
    return found


def _locate(fault: dict[str, Any], data: Any) -> _Detail:
    """Follow pydantic's location through the file; it also names members of unions on the way."""
    path: list[str] = []
    member = ""
    union: Path = ()
    for part in fault["loc"]:
        if _holds(data, part):
            data = data[part]
        elif not _is_key(part, path, fault):
            if not member and part not in RUNTIMES:
                member, union = str(part), tuple(path)
            continue
        path.append(str(part))
    return _Detail(
        tuple(path),
        fault["type"],
        fault["input"],
        fault.get("ctx", {}),
        fault["msg"],
        member,
        union,
    )


def _holds(data: Any, part: int | str) -> bool:
    if isinstance(data, (list, tuple)):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, Mapping) and part in data


def _is_key(part: int | str, path: list[str], fault: Mapping[str, Any]) -> bool:
    """Whether a part of a location that the file does not hold is a key, not a type's name."""
    missing = fault["type"] == "missing" and part is fault["loc"][-1]
    return missing or path == ["sweep"]  # whose dotted keys may be written as tables


# ---- one fault


def _plain(detail: _Detail, data: Mapping[str, Any]) -> Iterator[_Found]:
    error = detail.context.get("error")
    if isinstance(error, FaultsError):
        for key, text, reads in error.faults:
            here = detail.path
            yield _Found((*here, *_split(key)), text, tuple((*here, *_split(r)) for r in reads))
    elif detail.kind in ("union_tag_not_found", "union_tag_invalid"):
        yield _Found((*detail.path, "runtime"), _runtime(detail.given))
    else:
        unknown = detail.kind == "extra_forbidden" and len(detail.path) <= 2
        yield _Found(detail.path, _text(detail, data), is_unknown=unknown)


def _split(key: str) -> Path:
    try:
        return split_key(key) if key else ()
    except ValueError:
        return (key,)  # someone's odd key in quotes


_RUNTIME = f"runtime must be one of {', '.join(map(shown, RUNTIMES))}"


def _runtime(table: Any) -> str:
    if "runtime" not in table:
        return f"is missing; {_RUNTIME}"
    runtime = table["runtime"]
    return f"{shown(runtime)} is not a runtime; {_RUNTIME}" + _near(str(runtime), RUNTIMES)


def _text(detail: _Detail, data: Mapping[str, Any]) -> str:
    if detail.kind == "extra_forbidden":
        return _unknown_key(detail.path, data)
    if detail.kind == "missing":
        return "is missing" if detail.path != ("fsdp",) else f"is missing; {_RUNTIME}"
    if detail.kind == "value_error":
        return str(detail.context["error"])
    return not_allowed(detail.given, _hint(detail, data) or detail.expected)


def _hint(detail: _Detail, data: Mapping[str, Any]) -> str | None:
    if detail.path[:1] != ("fsdp",) or len(detail.path) != 2:
        return None
    return expected_value(detail.path[1], _runtime_name(data))


# ---- unions


def _of_union(
    path: Path, members: Mapping[str, list[_Detail]], data: Mapping[str, Any]
) -> Iterator[_Found]:
    """The faults of the member that the value was meant for; where that is open, one for all."""
    right = [details for details in members.values() if not any(d.is_mismatch for d in details)]
    right.sort(key=len)
    if len(right) == 1 or (right and len(right[0]) < len(right[1])):
        for detail in right[0]:
            yield from _plain(detail, data)
        return
    wanted = [_member(name, details) for name, details in members.items()]
    first = next(iter(members.values()))[0]
    hint = _hint(first, data) if first.path == path else None
    yield _Found(path, not_allowed(_at(path, data), hint or ", or ".join(dict.fromkeys(wanted))))


def _member(name: str, details: list[_Detail]) -> str:
    """What one member of a union looks like: ``{ every = ... }`` for a table."""
    table = next((t for t in Table.__subclasses__() if t.__name__ == name), None)
    if table is None:
        return details[0].expected
    needed = (key for key, field in table.model_fields.items() if field.is_required())
    return "{ " + ", ".join(f"{key} = ..." for key in needed) + " }"


def _at(path: Path, data: Any) -> Any:
    for part in path:
        data = data[part] if isinstance(data, Mapping) else data[int(part)]
    return data


# ---- unknown keys


def _unknown_key(path: Path, data: Mapping[str, Any]) -> str:
    *tables, key = path
    fields = _fields_at(tables, data)
    if tables == ["fsdp"] and (hint := other_runtime(key, _runtime_name(data))):
        return hint
    if near := _near(key, fields):
        return f"unknown key{near}"
    for table in Scenario.model_fields:
        if key in _fields_at([table], data):
            return f"unknown key; did you mean {table}.{key}?"
    return f"unknown key; known are {', '.join(fields)}"


def _fields_at(tables: list[str], data: Mapping[str, Any]) -> list[str]:
    model: Any = Scenario
    for part in tables:
        field = getattr(model, "model_fields", {}).get(part)
        model = _model_in(field.annotation if field is not None else model)
        if model is Textbook:
            model = RUNTIMES.get(_runtime_name(data), Textbook)
    return list(getattr(model, "model_fields", {}))


def _runtime_name(data: Mapping[str, Any]) -> str:
    fsdp = data.get("fsdp")
    return str(fsdp.get("runtime") if isinstance(fsdp, Mapping) else None)


def _model_in(annotation: Any) -> Any:
    """The table class inside an annotation: ``Hardware | None``, ``tuple[UnitTable, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [_model_in(arg) for arg in getattr(annotation, "__args__", ())]
    return next((model for model in inner if model is not None), None)


def _near(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""
