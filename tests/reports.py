"""Pages to test: scenarios, hostile names, and what a person can point at in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import chromium
from fsdp_scenarios import tables

from fsdpsim.commands.run import rows
from fsdpsim.report import page
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate
from fsdpsim.summary import summary

SCENARIOS = Path(__file__).parent.parent / "scenarios"

#: Names that would do harm wherever a text is taken for markup, script or a key.
HOSTILE = (
    "</script><script>window.harmed=1</script>",
    '<img src=x onerror="window.harmed=1">',
    "<!--<script>",
    "__proto__",
    "constructor",
    "\"'`${window.harmed=1}",
    "&amp;&#60;b&#62; \\u2028",
)


def run(name: str, *overrides: str) -> Result:
    return simulate(load(SCENARIOS / f"{name}.toml", list(overrides)))


def html_of(result: Result) -> str:
    return page(result, rows=rows(summary(result)))


def hostile() -> Result:
    """A scenario in which all names that a user can choose are hostile."""
    found = tables("fsdp1", layers=len(HOSTILE) - 1)
    units = found["workload"]["units"]
    new = dict(zip((unit["name"] for unit in units), HOSTILE, strict=False))
    for unit in units:
        unit["name"] = new[unit["name"]]
    found["workload"]["calls"] = [new.get(call, call) for call in found["workload"]["calls"]]
    return simulate(load({"title": HOSTILE[0], **found}))


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


class Report:
    """A page in a browser, by what a person can point at."""

    def __init__(self, tab: chromium.Tab) -> None:
        self.tab = tab

    def area(self, chart: str) -> tuple[float, float, float, float]:
        return tuple(
            self.tab.run(
                f"(({{left, top, width, height}}) => [left, top, width, height])"
                f"(document.querySelector('#{chart} .u-over').getBoundingClientRect())"
            )
        )

    def place(self, time: float, lane: str) -> tuple[float, float]:
        """Where ``time`` (seconds from the simulation's start) is on ``lane``."""
        left, top, width, height = self.area("timeline")
        share = self.tab.run(f"report.span.share({time!r})")
        names = self.tab.run("report.model.lanes.map(lane => lane.name)")
        return left + share * width, top + (names.index(lane) + 0.5) / len(names) * height

    @property
    def span(self) -> tuple[float, float]:
        return tuple(self.tab.run("[report.span.low, report.span.high]"))

    def text(self, selector: str) -> str:
        return self.tab.run(f"document.querySelector('{selector}').innerText")

    def facts(self, selector: str) -> dict[str, str]:
        return dict(
            self.tab.run(
                f"[...document.querySelectorAll('{selector} dl > div')].map("
                "each => [...each.children].map(child => child.textContent))"
            )
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.key(key)


def opened(browser: chromium.Browser, result: Result, folder: Path, **options: Any) -> Report:
    path = folder / "report.html"
    path.write_text(html_of(result), encoding="utf-8")
    return Report(browser.open(path, **options))
