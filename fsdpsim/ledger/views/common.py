"""What all views share: the facts of the scenario, and numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdpsim.ledger.differences import WHY, Comparison
from fsdpsim.scenario import Problem, Scenario, ScenarioError
from fsdpsim.workload import Workload

Report = dict[str, Any]

#: What a view prints, in order: tables and paragraphs.
Shown = Iterator[RenderableType]


def head(scenario: Scenario, workload: Workload) -> Report:
    """What every report says of its scenario. Raises :class:`ScenarioError` without parameters."""
    numel = sum(unit.numel for unit in workload.units)
    if not numel:
        text = "the ledger counts parameters: give workload.parameters, or a [model]"
        raise ScenarioError(scenario.source, [Problem("", text)])
    return {
        "scenario": scenario.name,
        "title": scenario.title,
        "parameters": numel,
        "world_size": scenario.world_size,
        "nodes": scenario.device.nodes,
        "gpu": scenario.device.gpu,
        "gpu_memory_bytes": scenario.device.memory,
    }


def show_head(report: Report) -> str:
    """One line: the title, the model's size and the cluster."""
    name = report["title"] or report["scenario"]
    gpus = f"{report['world_size']} x {report['gpu']} on {counted(report['nodes'], 'node')}"
    return f"{name}: {show_count(report['parameters'])} parameters, {gpus}"


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def show_decimal(nbytes: float) -> str:
    """Bytes in powers of ten, as the papers write them: ``38.5 GB``."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def show_rate(rate: float) -> str:
    """Bytes per second in powers of ten: ``1.231 TB/s``."""
    return f"{show_decimal(rate)}/s"


def show_count(number: float) -> str:
    """A number of parameters: ``12.58B``."""
    return _scaled(number, ("", "K", "M", "B", "T", "P")).replace(" ", "")


def compared(comparison: Comparison) -> Report:
    """A formula, the simulator's count, and what lies between, as JSON has it."""
    return {
        "formula_bytes": number_of(comparison.formula),
        "differences_bytes": {d.cause: number_of(d.nbytes) for d in comparison.differences},
        "simulated_bytes": number_of(comparison.simulated),
    }


def number_of(value: Fraction) -> float:
    """An integer where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def causes(figures: Iterable[Report]) -> dict[str, str]:
    """The reasons for the differences that occur in what :func:`compared` gave."""
    found = {cause for figure in figures for cause in figure["differences_bytes"]}
    return {cause: why for cause, why in WHY.items() if cause in found}


def show_differences(figure: Report) -> str:
    """``padding +3 GB, root -1 GB``, from what :func:`compared` gave."""
    items = figure["differences_bytes"].items()
    return ", ".join(f"{c} {'-' if n < 0 else '+'}{show_decimal(abs(n))}" for c, n in items)


def _scaled(value: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= 1000 and index < len(names) - 1:
        value, index = value / 1000, index + 1
    return f"{value:.4g} {names[index]}".strip()


def table(
    title: str, *columns: str, rows: Iterable[Iterable[str]], texts: Iterable[int] = (0,)
) -> Group:
    """A table under its title; the columns numbered in ``texts`` are left-aligned."""
    found = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if index in texts else "right"
        found.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell) for cell in row))
    return Group(Text(title, style="bold"), found)
