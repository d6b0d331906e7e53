"""Reading scenario files: TOML, overrides, and errors that name file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsdpsim.scenario.keys import set_key, split_key
from fsdpsim.scenario.problems import Problem, all_problems
from fsdpsim.scenario.schema import Scenario

#: Larger files are refused: no scenario comes near, and a mistaken path often does.
MAX_FILE_BYTES = 1_000_000


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


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario from a file, or from a dictionary of the same shape.

    ``overrides`` are ``"dotted.key=value"`` with the value as TOML writes it. Raises
    :class:`ScenarioError` with every fault at once.
    """
    if isinstance(source, Mapping):
        return _load(dict(source), overrides, "scenario", Path())
    return read_scenario(Path(source), overrides)


def read_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file. Raises :class:`ScenarioError`."""
    return _load(_read_toml(path), overrides, str(path), path.parent)


def _load(data: dict[str, Any], overrides: Sequence[str], source: str, base: Path) -> Scenario:
    changed = apply_overrides(data, overrides, source)
    try:
        return validate(changed, source, base)
    except ScenarioError as error:
        keys = [override.partition("=")[0].strip() for override in overrides]
        raise ScenarioError(source, [_blamed(p, keys) for p in error.problems]) from None


def _blamed(problem: Problem, set_keys: Sequence[str]) -> Problem:
    """``problem`` with a note if it is not the file that says so."""
    if any(f"{problem.key}.".startswith(f"{key}.") for key in set_keys):
        return Problem(problem.key, f"{problem.text} (from --set)")
    return problem


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
        return tomllib.loads(data.decode("utf-8-sig"))  # Windows editors write a BOM
    except UnicodeDecodeError:
        raise fail("is not text in UTF-8, so not TOML") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise fail(f"is not TOML: {error}") from None
    except RecursionError:
        raise fail("is nested too deeply") from None


def apply_overrides(data: dict[str, Any], overrides: Sequence[str], source: str) -> dict[str, Any]:
    """``data`` with each ``dotted.key=value`` set; tables on the way are made if missing."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            problems.append(Problem("--set", f"{override!r} is not KEY=VALUE"))
            continue
        try:
            data = set_key(data, split_key(key), _toml_value(text.strip()))
        except ValueError:
            problems.append(Problem("--set", f"{key!r} is not a dotted key"))
    if problems:
        raise ScenarioError(source, problems)
    return data


def _toml_value(text: str) -> Any:
    """A value in TOML, or else a bare word: ``fsdp.runtime=fsdp1``, ``hardware.memory=40GiB``."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def validate(data: dict[str, Any], source: str, base: Path) -> Scenario:
    """The scenario that ``data`` describes; ``base`` is where relative paths in it start.

    A table may be one that is validated already. Raises :class:`ScenarioError`.
    """
    try:
        scenario = Scenario.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise ScenarioError(source, all_problems(error, data, {"base": base})) from None
    scenario._source, scenario._tables, scenario._base = source, data, base
    return scenario
