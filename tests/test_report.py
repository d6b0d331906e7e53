"""The report: its data equals the result, and nothing in it can run but what is ours."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import HOSTILE, SCENARIOS, data_of, hostile, html_of, run

from fsdpsim.cli import main
from fsdpsim.commands.run import rows
from fsdpsim.plots.style import CATEGORIES, HOST, KINDS, contrast, shaded
from fsdpsim.report.colours import DARK_PAPER, LEAST_CONTRAST, lifted
from fsdpsim.report.encode import Ticks, changes, deltas, script_json, scrub
from fsdpsim.report.page import asset
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate
from fsdpsim.summary import summary

# ---- encoding


@given(
    st.recursive(
        st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_in_a_script_element_has_no_markup_and_reads_back(data: Any) -> None:
    text = script_json(data)
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == data


@given(st.lists(st.integers(-(2**50), 2**50)))
def test_deltas_and_changes_read_back(values: list[int]) -> None:
    assert list(accumulate(deltas(values))) == values
    held = dict(map(tuple, changes(values)))
    assert (
        list(accumulate(range(len(values)), lambda v, i: held.get(i, v), initial=0))[1:] == values
    )


@given(st.floats(1e-9, 1e6), st.data())
def test_ticks_keep_order_and_eleven_digits(longest: float, data: st.DataObject) -> None:
    ticks = Ticks(longest)
    one, other = (data.draw(st.floats(0, longest)) for _ in range(2))
    assert (ticks(one) <= ticks(other)) == (one <= other) or ticks(one) == ticks(other)
    assert abs(ticks(one) / ticks.per_second - one) <= 1e-11 * longest
    assert longest * ticks.per_second < 2**53


@given(st.text())
def test_scrubbed_text_is_printable(text: str) -> None:
    assert scrub(text).isprintable() and len(scrub(text)) == len(text)


def test_the_palette_is_that_of_the_charts_and_stands_out_on_dark_paper() -> None:
    style = data_of(html_of(run("textbook_overlap")))["style"]
    for name, look in KINDS.items():
        shown = style["kinds"][name]
        assert (shown["label"], shown["letter"]) == (look.label, look.letter)
        assert shown["colour"]["light"] == [look.colour, shaded(look.colour, 1)]
    assert {name: look["label"] for name, look in style["categories"].items()} == {
        name: look.label for name, look in CATEGORIES.items()
    }
    for look in (*KINDS.values(), *CATEGORIES.values(), *HOST.values()):
        assert contrast(lifted(look.colour), DARK_PAPER) >= LEAST_CONTRAST


# ---- the page


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._open, []).append(data)


def test_the_same_scenario_gives_the_same_bytes(small: Result) -> None:
    assert html_of(small) == html_of(run("fsdp1_13b_64gpu"))


def test_nothing_in_the_page_can_run_but_what_its_policy_states(small: Result) -> None:
    parsed = Parsed(html_of(small))
    policy = next(
        str(a["content"])
        for _, a in parsed.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    for kind, tag, texts in (
        ("script-src", "script", parsed.text["script"][1:]),  # the first is the data
        ("style-src", "style", parsed.text["style"]),
    ):
        hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert rules[kind].split() == [f"'sha256-{h}'" for h in hashes], tag
    assert not {name for _, attributes in parsed.elements for name in attributes} & {
        "src",
        "href",
        "style",
        "srcset",
        "action",
    }
    assert not [n for _, attributes in parsed.elements for n in attributes if n.startswith("on")]


def test_hostile_names_add_no_elements_and_stay_whole() -> None:
    plain, harmful = Parsed(html_of(run("fsdp1_13b_64gpu"))), Parsed(html_of(hostile()))
    known = {tag for tag, _ in plain.elements}
    assert {tag for tag, _ in harmful.elements} <= known
    assert sum(tag == "script" for tag, _ in harmful.elements) == 3
    assert harmful.text["title"] == harmful.text["h1"] == [HOSTILE[0]]
    strings = data_of(html_of(hostile()))["strings"]
    assert {scrub(name) for name in HOSTILE} <= set(strings)
    assert all(text.isprintable() for text in strings)


def test_the_words_are_those_of_run_and_explain(small: Result) -> None:
    text = " ".join(chain.from_iterable(Parsed(html_of(small)).text.values()))
    for label, value in rows(summary(small)):
        assert label in text and value.split(" (")[0] in text
    for words in ("Where the time goes", "The critical path", "The peak: 3.06 GiB allocated"):
        assert words in text


def scenario_files() -> Iterator[Any]:
    for path in sorted(SCENARIOS.glob("*.toml")):
        large = path.stem in ("rate_limiter_helps", "rate_limiter_neutral")
        yield pytest.param(path, id=path.stem, marks=pytest.mark.slow if large else ())


@pytest.mark.parametrize("path", list(scenario_files()))
def test_every_scenario_file_has_a_page(path: Path) -> None:
    html = html_of(simulate(load(path)))
    assert len(html) < 8e6
    assert data_of(html)["timeline"]["iterations"]


def test_an_out_of_memory_has_a_page() -> None:
    result = run("fsdp1_13b_64gpu", 'hardware.memory="4 GiB"')
    assert result.memory.oom is not None
    html = html_of(result)
    assert data_of(html)["memory"]["oom"]["buffer"] == result.memory.oom.buffer.name
    assert "It asked for" in html


def test_ten_thousand_ops_stay_below_three_megabytes(large: Result) -> None:
    assert len(html_of(large).encode()) < 3e6


# ---- the data


@pytest.mark.parametrize("name", ["textbook", "small", "large"])
def test_ops_and_tiles_read_back(name: str, request: pytest.FixtureRequest) -> None:
    result: Result = request.getfixturevalue(name)
    data = data_of(html_of(result))
    ops, host, per_second = (
        data["timeline"]["ops"],
        data["timeline"]["host"],
        data["ticks_per_second"],
    )
    for column in ("issued", "start", "end"):
        exact = [getattr(op, column) for op in result.ops]
        shown = [ticks / per_second for ticks in accumulate(ops[column])]
        assert shown == pytest.approx(exact, rel=0, abs=1 / per_second)
    number = {id(op): i for i, op in enumerate(result.ops)}
    assert ops["deps"] == [[number[id(dep)] for dep in op.deps] for op in result.ops]
    assert [data["strings"][i] for i in ops["name"]] == [op.name for op in result.ops]
    ends, tile_ends = list(accumulate(ops["end"])), list(accumulate(host["end"]))
    for start, bound in zip(accumulate(ops["start"]), ops["bound"], strict=True):
        reached = 0 if bound == -1 else ends[bound] if bound >= 0 else tile_ends[-2 - bound]
        assert start == reached  # one rank, no contention: every start has a binding constraint


@pytest.mark.parametrize("name", ["small", "large"])
def test_levels_of_memory_read_back(name: str, request: pytest.FixtureRequest) -> None:
    result: Result = request.getfixturevalue(name)
    memory = data_of(html_of(result))["memory"]
    buffers, events = memory["buffers"], memory["events"]
    sign = [1 if event > 0 else -1 for event in events]
    nbytes = [s * buffers["nbytes"][abs(e) - 1] for s, e in zip(sign, events, strict=True)]
    rounding = [s * buffers["rounding"][abs(e) - 1] for s, e in zip(sign, events, strict=True)]
    requested, allocated = (
        list(accumulate(nbytes)),
        list(accumulate(map(sum, zip(nbytes, rounding, strict=True)))),
    )
    beside = {k: list(held(memory[k], len(events))) for k in ("requested", "active", "reserved")}
    assert list(
        zip(
            (a + b for a, b in zip(requested, beside["requested"], strict=True)),
            allocated,
            (a + b for a, b in zip(allocated, beside["active"], strict=True)),
            beside["reserved"],
            strict=True,
        )
    ) == [sample[3:] for sample in result.memory.samples]


def held(changed: list[list[int]], length: int) -> Iterator[int]:
    at, value = dict(map(tuple, changed)), 0
    for i in range(length):
        value = at.get(i, value)
        yield value


# ---- the command


def test_the_command_writes_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    file = str(SCENARIOS / "textbook_overlap.toml")
    assert main(["report", file, "--set", "title=mine", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    html = path.read_text(encoding="utf-8")
    assert Parsed(html).text["title"] == ["mine"] and "What would help" in html
    assert main(["report", file, "--no-remedies", "-o", str(tmp_path)]) == 0
    assert "What would help" not in (tmp_path / "textbook_overlap.html").read_text()
    assert [p.suffix for p in tmp_path.iterdir()] == [".html", ".html"]


@pytest.mark.parametrize("output", ["report.toml", "report"])
def test_a_bad_path_is_one_message(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(SCENARIOS / "textbook_overlap.toml")
    assert main(["report", file, "--no-remedies", "-o", str(tmp_path / output)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_what_is_shipped_is_stated_with_its_licence() -> None:
    about = asset("vendor/README.md")
    library = asset("vendor/uPlot.iife.min.js")
    version = re.search(r"v(\d+\.\d+\.\d+)", library[:200])
    assert version is not None and f"| {version[1]} |" in about
    assert f"uPlot {version[1]}" in asset("page.html")
    assert "MIT License" in asset("vendor/uPlot.LICENSE")
