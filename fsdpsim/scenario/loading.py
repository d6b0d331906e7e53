"""Reading scenario files: TOML, overrides, and errors that name file and key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fsdpsim.scenario.hints import other_runtime
from fsdpsim.scenario.keys import set_key, split_key
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, Textbook
from fsdpsim.scenario.schema import Scenario

#: Larger files are refused: no scenario comes near, and a mistaken path often does.
MAX_FILE_BYTES = 1_000_000

RUNTIMES: dict[str, type[BaseModel]] = {
    "textbook": Textbook,
    "ddp": Ddp,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: the dotted key (empty for the whole file) and what is wrong with it."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


class ScenarioError(ValueError):
    """A scenario that cannot be used; ``problems`` holds every fault found in it."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        text = f"{source}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{source}:", *lines])
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScenarioError, (self.source, self.problems)


def load(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario from a file, or from a dictionary of the same shape.

    ``overrides`` are ``"dotted.key=value"`` with the value as TOML writes it. Raises
    :class:`ScenarioError` with every fault at once.
    """
    if isinstance(source, Mapping):
        return validate(apply_overrides(dict(source), overrides, "scenario"), "scenario", Path())
    return read_scenario(Path(source), overrides)


def read_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario file. Raises :class:`ScenarioError`."""
    data = apply_overrides(_read_toml(path), overrides, str(path))
    return validate(data, str(path), path.parent)


def _read_toml(path: Path) -> dict[str, Any]:
    def fail(text: str) -> ScenarioError:
        return ScenarioError(str(path), [Problem("", text)])

    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise fail(f"is larger than {MAX_FILE_BYTES // 1_000_000} MB; this is no scenario file")
    if not data.strip():
        raise fail("is empty; a scenario needs [fsdp] and either [workload] or [model]")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise fail("is not text in UTF-8, so not TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise fail(f"is not TOML: {error}") from None
    except RecursionError:
        raise fail("is nested too deeply") from None


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], source: str) -> dict[str, Any]:
    """``data`` with each ``dotted.key=value`` set; tables on the way are made if missing."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ScenarioError(source, [Problem("--set", f"{override!r} is not key=value")])
        try:
            path = split_key(key)
        except ValueError:
            raise ScenarioError(source, [Problem(key, "is not a dotted key")]) from None
        data = set_key(data, path, _toml_value(text.strip()))
    return data


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return (
            text  # a bare word or quantity: --set fsdp.runtime=fsdp1, --set hardware.memory=40GiB
        )


def validate(data: dict[str, Any], source: str, base: Path) -> Scenario:
    """The scenario that ``data`` describes; ``base`` is where relative paths in it start.

    A table may be one that is validated already. Raises :class:`ScenarioError`.
    """
    try:
        scenario = Scenario.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise ScenarioError(source, problems_of(error, data)) from None
    scenario._source, scenario._tables, scenario._base = source, data, base
    return scenario


def problems_of(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's faults in the words of the scenario file; one per key."""
    found: dict[str, Problem] = {}
    for fault in error.errors(include_url=False):
        path = _keys(fault["loc"], data)
        key = ".".join(_quoted(part) for part in path)
        problem = Problem(key, _text(dict(fault), path, data))
        # A union reports each of its members; the first that is not a mere type mismatch tells most.
        if key not in found or "valid" in found[key].text[:22]:
            found[key] = problem
    return list(found.values())


def _keys(loc: tuple[int | str, ...], data: Any) -> list[str]:
    """The part of pydantic's location that exists in the file (it adds names of union members)."""
    keys: list[str] = []
    for part in loc:
        if isinstance(data, Mapping) and (part in data or not isinstance(part, int)):
            if part in data:
                keys.append(str(part))
                data = data[part]
            elif part is loc[-1] and not _is_member(str(part)):
                keys.append(str(part))
        elif isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data):
            keys.append(str(part))
            data = data[part]
    return keys


def _is_member(part: str) -> bool:
    return part in RUNTIMES or "[" in part or part in ("int", "str", "bool", "constrained-int")


def _quoted(part: str) -> str:
    return f'"{part}"' if "." in part else part


def _text(fault: dict[str, Any], path: list[str], data: Mapping[str, Any]) -> str:
    given, kind = fault.get("input"), fault["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, data)
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_not_found":
        return f"runtime is missing; one of {_listed(RUNTIMES)}"
    if kind == "union_tag_invalid":
        runtime = given.get("runtime") if isinstance(given, Mapping) else given
        return f"runtime = {runtime!r} is not known; one of {_listed(RUNTIMES)}" + _near(
            str(runtime), RUNTIMES
        )
    if kind in ("value_error", "assertion_error"):
        return str(fault["ctx"]["error"]) if "ctx" in fault else fault["msg"]
    allowed = fault["msg"].removeprefix("Input should be ").removeprefix("Input ")
    return f"{given!r} is not allowed; it must be {allowed}"


def _unknown_key(path: list[str], data: Mapping[str, Any]) -> str:
    *tables, key = path
    fields = _fields_at(tables, data)
    if tables == ["fsdp"] and (hint := other_runtime(key, str(data["fsdp"].get("runtime")))):
        return hint
    near = _near(key, fields)
    return f"unknown key{near or f'; known are {_listed(fields)}'}"


def _fields_at(tables: list[str], data: Mapping[str, Any]) -> list[str]:
    if tables[:1] == ["fsdp"] and len(tables) == 1:
        return list(RUNTIMES[data["fsdp"]["runtime"]].model_fields)
    model: Any = Scenario
    for part in tables:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = _model_in(field.annotation if field is not None else model)
    return list(getattr(model, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    """The table class inside an annotation such as ``Hardware | None`` or ``tuple[UnitTable, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [_model_in(arg) for arg in getattr(annotation, "__args__", ())]
    return next((model for model in inner if model is not None), None)


def _near(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
