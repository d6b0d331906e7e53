"""The points of a sweep: the product of its axes, less what its constraints leave out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpsim.resolved import FOLLOWS
from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.scenario.expressions import Expression
from fsdpsim.scenario.keys import set_key, split_key
from fsdpsim.scenario.loading import validate
from fsdpsim.scenario.sweep_table import DERIVED, Axis

#: Keys that decide what other keys of their table are when the file does not say.
DECIDES_DEFAULTS = {"hardware": "hardware.gpu", "fsdp": "fsdp.runtime", "model": "model.hf_config"}

#: Validated tables that one process keeps.
MAX_SHARED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of values. ``index`` counts through the whole product, last axis fastest."""

    index: int
    settings: dict[str, Any]


class Variations:
    """Scenarios that differ from ``base`` in some keys. Tables that agree are validated once."""

    def __init__(self, base: Scenario) -> None:
        self.base = base
        tables = {name: getattr(base, name) for name in Scenario.model_fields if name != "sweep"}
        self._shared: dict[str, Any] = {k: v for k, v in tables.items() if v is not None}
        self._known: dict[str, Any] = {}

    def at(self, settings: Mapping[str, Any]) -> Scenario:
        """The scenario with ``settings`` (dotted keys). Raises :class:`ScenarioError`."""
        raw: Mapping[str, Any] = {k: v for k, v in self.base.tables.items() if k != "sweep"}
        own: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            path = split_key(key)
            raw = set_key(raw, path, value)
            own.setdefault(path[0], {})[key] = value
        names = {name: json.dumps([name, given], default=repr) for name, given in own.items()}
        varied = {name: self._known.get(named, raw[name]) for name, named in names.items()}
        scenario = validate(self._shared | varied, self.base.source, self.base.base)
        scenario._tables = dict(raw)
        self._remember({named: getattr(scenario, name) for name, named in names.items()})
        return scenario

    def _remember(self, tables: Mapping[str, Any]) -> None:
        if len(self._known) > MAX_SHARED:
            self._known.clear()
        self._known.update(tables)


class Grid:
    """All points of the ``[sweep]`` table of ``scenario``, or of other ``axes``."""

    def __init__(self, scenario: Scenario, axes: tuple[Axis, ...] | None = None) -> None:
        if axes is None and scenario.sweep is None:
            text = (
                'has no [sweep] table; write for example "fsdp.sharding_factor" = [1, 2, 4] under '
                "[sweep]"
            )
            raise ScenarioError(scenario.source, [Problem("", text)])
        self.scenario = scenario
        self.variations = Variations(scenario)
        table = scenario.sweep
        self.axes = axes if axes is not None else table.axes() if table is not None else ()
        self.constraints = () if table is None else table.constraints()

    def __len__(self) -> int:
        """Points of the product, those that ``where`` leaves out included."""
        count = 1
        for axis in self.axes:
            count *= len(axis.rows)
        return count

    @property
    def keys(self) -> tuple[str, ...]:
        """The varied keys, in order."""
        return tuple(key for axis in self.axes for key in axis.keys)

    def settings(self, index: int) -> dict[str, Any]:
        """The values of the point at ``index``."""
        chosen: list[dict[str, Any]] = []
        for axis in reversed(self.axes):
            index, row = divmod(index, len(axis.rows))
            chosen.append(axis.settings(row))
        return {key: value for own in reversed(chosen) for key, value in own.items()}

    def points(self, start: int = 0) -> Iterator[Point]:
        """The points that satisfy ``where``, from ``start`` on. Raises :class:`ScenarioError`."""
        for index in range(start, len(self)):
            point = Point(index=index, settings=self.settings(index))
            if self.wants(point):
                yield point

    def wants(self, point: Point) -> bool:
        """Whether ``point`` satisfies ``where``. Raises :class:`ScenarioError`."""
        view = _View(self, point)
        return all(self._holds(constraint, view) for constraint in self.constraints)

    def _holds(self, constraint: Expression, view: _View) -> bool:
        try:
            return bool(constraint(view.value))
        except _InvalidPointError:
            return True  # the point is run, and its row says what is wrong with it
        except ValueError as error:
            problem = Problem("sweep.where", str(error))
            raise ScenarioError(self.scenario.source, [problem]) from None


class _InvalidPointError(Exception):
    """A constraint reads a key whose value only a valid scenario has."""


class _View:
    """The keys of one point as constraints see them; the point is validated only if need be."""

    def __init__(self, grid: Grid, point: Point) -> None:
        self.grid = grid
        self.point = point
        self._scenario: Scenario | None = None

    def value(self, name: str) -> Any:
        """The value of a dotted key, defaults filled in."""
        if name in self.point.settings:
            return self.point.settings[name]
        scenario = self._valid() if self._follows_from_others(name) else self.grid.scenario
        if name in DERIVED:
            return getattr(scenario, name)
        found = _at(scenario, split_key(name))
        if found is None and name in FOLLOWS:
            return getattr(scenario, FOLLOWS[name])
        return found

    def _follows_from_others(self, name: str) -> bool:
        table = split_key(name)[0]
        if name in DERIVED or name in FOLLOWS:
            return True
        deciding = (table, DECIDES_DEFAULTS.get(table))
        inside = (name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in self.keys)
        return any(key in deciding for key in self.keys) or any(inside)

    @property
    def keys(self) -> tuple[str, ...]:
        """The varied keys."""
        return self.grid.keys

    def _valid(self) -> Scenario:
        if self._scenario is None:
            try:
                self._scenario = self.grid.variations.at(self.point.settings)
            except ScenarioError:
                raise _InvalidPointError from None
        return self._scenario


def _at(scenario: Any, path: tuple[str, ...]) -> Any:
    value = scenario
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value
