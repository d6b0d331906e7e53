"""The page's words: figures as cards, the explanation and remedies as headings, texts and tables.

The explanation is what ``fsdpsim explain`` prints, table by table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from xml.etree.ElementTree import Element

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdpsim.explain import Explanation, Trial
from fsdpsim.explain.tables import Section, explanation_tables, trial_tables
from fsdpsim.report.html import element
from fsdpsim.result import Result

#: A figure that fits a card, with a note in parentheses.
SHORT = re.compile(r"(?P<value>(?:[^(,]|,(?! )){1,24}?)(?: \((?P<note>.*)\))?")

#: How rows of ``explain`` are styled in a terminal, and their class on the page.
ROW_CLASSES = {"yellow": "idle", "bold": "whole", "dim": "quiet"}


def heading(result: Result) -> Element:
    """What was simulated."""
    scenario = result.scenario
    words = [f"runtime {scenario.fsdp.runtime}"]
    size = scenario.world_size
    if scenario.hardware is not None:
        words.append(f"{size} GPU{'s' if size > 1 else ''} ({scenario.hardware.gpu})")
        words.append(f"F = {scenario.shard_factor}")
    words.append(f"iterations: {scenario.iterations}")
    words.append(f"ops: {len(result.ops):,}")
    words.append(scenario.source)
    name = element("h1", scenario.title or scenario.name)
    return element("div", name, element("p", " · ".join(words)))


def figures(rows: Sequence[tuple[str, str]]) -> Element:
    """(label, text) rows as cards, the long ones as lines below."""
    short = [(label, SHORT.fullmatch(text)) for label, text in rows]
    cards = [_card(label, found) for label, found in short if found is not None]
    lines = [_figure(*row, element("span")) for row in rows if not SHORT.fullmatch(row[1])]
    return element(
        "div", element("dl", *cards, css="cards"), element("dl", *lines, css="lines"), css="figures"
    )


def _card(label: str, found: re.Match[str]) -> Element:
    return _figure(label, found["value"], element("small", found["note"] or ""))


def _figure(label: str, text: str, note: Element) -> Element:
    return element("div", element("dt", label), element("dd", text, note))


def explanation(found: Explanation, trials: Sequence[Trial] | None) -> Iterator[Element]:
    """The whole explanation; its title is the page's already."""
    _title, *tables = explanation_tables(found)
    yield from _blocks(tables)
    if trials is not None:
        yield from _blocks(trial_tables(trials, after_oom=found.oom is not None))


def _blocks(found: Iterable[RenderableType]) -> Iterator[Element]:
    for block in found:
        if isinstance(block, Group):
            yield from _blocks(block.renderables)
        elif isinstance(block, Section):
            yield element("section", element("h3", block.title), _table(block.table))
        elif isinstance(block, Text):
            yield element("p", block.plain.strip(), css=ROW_CLASSES.get(str(block.style), ""))
        else:
            raise TypeError(f"no HTML for {block!r}")


def _table(table: Table) -> Element:
    sides = ["number" if column.justify == "right" else "" for column in table.columns]
    names = [_plain(column.header) for column in table.columns]
    head = [element("th", name, css=side) for name, side in zip(names, sides, strict=True)]
    body = []
    columns = [list(column.cells) for column in table.columns]
    for row, cells in zip(table.rows, zip(*columns, strict=True), strict=True):
        data = [element("td", _plain(c), css=side) for c, side in zip(cells, sides, strict=True)]
        body.append(element("tr", *data, css=ROW_CLASSES.get(str(row.style or ""), "")))
    thead, tbody = element("thead", element("tr", *head)), element("tbody", *body)
    return element("div", element("table", thead, tbody), css="scroll")


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
