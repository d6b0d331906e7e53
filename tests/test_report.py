"""The report: its data equals the result, nothing in it can run, and a real browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import chromium
import pytest
from fsdp_scenarios import tables
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.cli import main
from fsdpsim.commands.run import rows
from fsdpsim.explain import explain
from fsdpsim.explain.critical import path_totals
from fsdpsim.explain.timeline import Timeline, span
from fsdpsim.plots.curve import LEVELS, memory_curve
from fsdpsim.plots.style import CATEGORIES, HOST, KINDS, shaded
from fsdpsim.plots.view import make_view
from fsdpsim.report import page
from fsdpsim.report.colours import DARK_PAPER, LEAST_CONTRAST, contrast, lifted
from fsdpsim.report.encode import Ticks, changes, deltas, script_json, scrub
from fsdpsim.report.page import asset
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


@pytest.fixture(scope="module")
def textbook() -> Result:
    return run("textbook_backward_prefetch")


@pytest.fixture(scope="module")
def large() -> Result:
    """At least ten thousand kernels and collectives."""
    result = run("rate_limiter_hurts", "training.iterations=5")
    assert len(result.ops) > 10_000
    return result


@pytest.fixture(scope="module")
def small() -> Result:
    """A real FSDP1 step with bytes, streams, and frees that wait for events."""
    return run("fsdp1_13b_64gpu")


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


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


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


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda p: p.stem)
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


@pytest.mark.parametrize("output", ["report.toml", "report", "absent/report.html"])
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


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    with chromium.launched(program) as running:
        yield running


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


browser_test = pytest.mark.browser


@browser_test
@pytest.mark.parametrize("name", ["textbook", "small", "large"])
@pytest.mark.parametrize("dark", [False, True])
def test_it_loads_alone_and_without_complaints(
    name: str, dark: bool, browser: chromium.Browser, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    report = opened(browser, request.getfixturevalue(name), tmp_path, dark=dark)
    assert report.tab.complaints() == []
    assert report.tab.requests() == [(tmp_path / "report.html").as_uri()]
    assert report.tab.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert report.tab.run("document.getElementById('charts').hidden") is False


@browser_test
def test_hovering_tells_the_facts_of_every_op(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    for op in textbook.ops:
        start, end = span(op)
        report.tab.hover(*report.place((start + end) / 2, op.stream))
        assert report.text("#tooltip h4") == op.name
        facts = report.facts("#tooltip")
        assert facts["unit"] == op.unit and facts["stream"] == op.stream
        assert facts["phase"] == f"{op.phase}, iteration 1"
        assert facts["duration"] == f"{end - start:g} s"
        assert facts["runs"] == f"{start:g} s to {end:g} s"
        assert facts["issued"].startswith(f"{op.issued:g} s")
        assert ("communicator" in facts) == (op.collective is not None)
    report.tab.hover(5, 5)
    assert report.tab.run("document.getElementById('tooltip').hidden") is True


@browser_test
def test_an_idle_time_says_its_cause(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    report.tab.hover(*report.place(0.75, "compute"))
    assert report.text("#tooltip h4") == "compute stream idle"
    assert report.facts("#tooltip") == {
        "from": "0 s to 1.5 s",
        "duration": "1.5 s",
        "1.5 s": "waits for all_gather: it runs",
        "then": "forward of unit.0",
    }
    report.tab.run("report.focus()")
    report.press("0", "i")
    low, high = report.span
    assert low < 25.5 and high > 27.0 and high - low < 4


@browser_test
def test_zooming_by_wheel_and_keys_and_back(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    whole, at = report.span, report.place(9.5, "compute")
    report.tab.wheel(*at, -300)
    assert report.span == whole  # the page's own scrolling, until a click into the charts
    report.tab.wheel(*at, -300, ctrl=True)
    low, high = report.span
    assert high - low < 0.7 * (whole[1] - whole[0])
    assert report.place(9.5, "compute")[0] == pytest.approx(at[0], abs=0.01)
    report.press("0")  # not for the charts either
    assert report.span == (low, high)
    report.tab.click(*at)
    report.press("0")
    assert report.span == whole
    report.press("+", "+")
    closer = report.span
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2.25)
    report.press("ArrowRight")
    assert report.span[0] > closer[0] and report.span[1] > closer[1]
    report.press("ArrowLeft", "-", "-")
    assert report.span == pytest.approx(whole)
    report.tab.wheel(*at, -300)
    assert report.span[1] - report.span[0] < 0.7 * (whole[1] - whole[0])
    report.press("Home")
    assert report.span == whole


@browser_test
def test_dragging_moves_selects_and_never_leaves_the_iteration(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    whole = report.span
    first, last = report.place(6.0, "compute"), report.place(14.0, "compute")
    report.tab.drag(first, last)
    assert report.span == whole
    report.tab.drag(first, last, shift=True)
    assert report.span == pytest.approx((6.0, 14.0), abs=0.1)
    report.tab.drag(report.place(12.0, "compute"), report.place(8.0, "compute"))
    assert report.span == pytest.approx((10.0, 18.0), abs=0.1)
    left, _top, width, _ = report.tab.run(
        "(r => [r.left, r.top, r.width, r.height])"
        "(document.querySelector('#overview canvas').getBoundingClientRect())"
    )
    middle = report.place(14.0, "compute")[0]
    assert left < middle < left + width
    report.press("0")
    report.tab.click(*first, count=2)
    start, end = report.span
    assert 5 < start < 5.5 and 7.5 < end < 8.5  # forward of unit 2: 5.5 to 7.5


@browser_test
def test_clicking_follows_what_an_op_waited_for(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    timeline = Timeline(textbook)
    report = opened(browser, textbook, tmp_path)
    op = next(op for op in textbook.ops if op.kind == "backward" and op.unit == "unit.1")
    start, end = span(op)
    report.tab.click(*report.place((start + end) / 2, op.stream))
    followed = [op]
    while not hasattr(node := timeline.binding(followed[-1]), "cause") and node is not None:
        report.press("Enter")
        followed.append(node)  # type: ignore[arg-type]
        assert report.text("#details h3").strip() == f"{node.name} of {node.unit}"  # type: ignore[union-attr]
    assert len(followed) > 3
    for node in followed[-2::-1]:
        report.press("Backspace")
        assert report.text("#details h3").strip() == f"{node.name} of {node.unit}"
    depends = report.tab.run("[...document.querySelectorAll('.links p')].map(p => p.innerText)")
    assert any(dep.name in depends[0] and dep.unit in depends[0] for dep in op.deps)
    report.tab.run("document.querySelector('.links button').click()")
    assert report.text("#details h3").strip() == f"{op.deps[0].name} of {op.deps[0].unit}"
    report.press("Escape")
    assert "Point at a bar" in report.text("#details")


@browser_test
@pytest.mark.parametrize("name", ["textbook", "small", "large"])
def test_the_critical_path_is_the_explanations(
    name: str, browser: chromium.Browser, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    result: Result = request.getfixturevalue(name)
    report = opened(browser, result, tmp_path)
    report.tab.run("report.toggleCritical()")
    shown = report.tab.run(
        "report.path.map(({node, start, end}) =>"
        " [node >= 0 ? report.model.text(report.model.ops.kind[node]) : 'host', start, end])"
    )
    assert shown[0][2] == pytest.approx(result.window[1])
    assert shown[-1][1] == pytest.approx(result.window[0])
    assert all(later[1] == earlier[2] for later, earlier in pairwise(shown))
    known = path_totals(explain(result).critical_path)
    for kind in ("forward", "backward", "all_gather", "reduce_scatter"):
        total = sum(end - start for shown_kind, start, end in shown if shown_kind == kind)
        assert total == pytest.approx(known.get(kind, 0.0), abs=1e-9)


@browser_test
@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("clock", ["host", "gpu"])
def test_the_memory_chart_is_that_of_the_plots(
    name: str, clock: Any, browser: chromium.Browser, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    result: Result = request.getfixturevalue(name)
    report = opened(browser, result, tmp_path)
    whole = memory_curve(make_view(result, iteration="all"), clock)
    times = [float(t) for t in whole.time[:: max(len(whole) // 40, 1)]]
    columns = [*LEVELS, *CATEGORIES, "unsharded"]
    shown = report.tab.run(
        f"{json.dumps(times)}.map(time => {{ const curve = report.memory.curve('{clock}');"
        f" const at = curve.at(time * (1 + 1e-9) + 1e-12);"
        f" return {json.dumps(columns)}.map(name => curve.columns[name][at]); }})"
    )
    for time, row in zip(times, shown, strict=True):
        at = int((whole.time <= time * (1 + 1e-9) + 1e-12).sum()) - 1
        known = {**whole.levels, **whole.categories, "unsharded": whole.unsharded}
        assert row == [known[column][at] for column in columns], time


@browser_test
def test_the_peak_and_its_owners_are_the_explanations(
    large: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    peak = explain(large).peak
    assert peak is not None
    report = opened(browser, large, tmp_path)
    peaks = dict(report.tab.run("report.memoryChart.peaks()"))
    assert peaks == {level: large.peak(level) for level in LEVELS}
    for level in LEVELS:
        assert report.text(f"#peak-{level}").startswith(", peak ")
    left, top, width, height = report.area("memory")
    share = report.tab.run(
        "report.span.share(report.memoryChart.curve.time[report.memoryChart.peakEntry()])"
    )
    report.tab.hover(left + share * width + 2, top + height / 2)
    assert report.text("#tooltip h4").endswith(": the peak")
    facts = report.facts("#tooltip")
    assert facts["CPU thread"] == f"allocates {peak.buffer} of {peak.unit} ({peak.phase})"
    table = report.text("#tooltip table")
    for owner in peak.categories:
        assert CATEGORIES[owner.category].label in table
    shown = report.tab.run(
        "report.memory.owners(report.memoryChart.curve.sample[report.memoryChart.peakEntry()])"
        ".map(units => units.reduce((sum, [, size]) => sum + size, 0))"
    )
    order = data_of(html_of(large))["memory"]["categories"]
    known = {owner.category: owner.allocated for owner in peak.categories}
    assert shown == [known.get(name, 0) for name in order]


@browser_test
def test_both_charts_have_one_time_axis(
    small: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, small, tmp_path)
    report.tab.run("report.span.zoom(7, report.span.low + 0.3 * report.span.length)")
    report.tab.frames()
    scales = report.tab.run(
        "[report.timeline, report.memoryChart].map(({plot}) => [plot.scales.x.min,"
        " plot.scales.x.max, plot.bbox.left, plot.bbox.width])"
    )
    assert scales[0] == scales[1]
    left, top, width, height = report.area("timeline")
    report.tab.hover(left + 0.25 * width, top + height / 2)
    cursors = report.tab.run("[report.timeline, report.memoryChart].map(c => c.plot.cursor.left)")
    assert cursors == pytest.approx([0.25 * width] * 2, abs=1)


@browser_test
def test_ten_thousand_ops_are_drawn_by_the_pixel(
    large: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, large, tmp_path)
    report.tab.run("report.setIteration(report.model.iterations.length - 1)")
    drawn = report.tab.run(
        "(() => { const context = report.timeline.plot.ctx, fill = context.fillRect; let count = 0;"
        " context.fillRect = function (...box) { count += 1; fill.apply(context, box); };"
        " report.timeline.plot.redraw(false, false); report.timeline._draw();"
        " delete context.fillRect; return count; })()"
    )
    _, _, width, _ = report.area("timeline")
    lanes = report.tab.run("report.model.lanes.length")
    assert 1000 < drawn <= width * lanes
    points = report.tab.run("report.memoryChart.plot.data[0].length")
    assert points <= 8 * width


@browser_test
def test_searching_selecting_an_iteration_and_the_clock(
    small: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, small, tmp_path)
    last = small.scenario.iterations - 1
    ops = [op for op in small.ops if op.iteration == last and op.unit == "unit.17"]
    report.tab.run("report.focus()")
    report.press("/", *"unit.17")
    assert report.text("#found") == f"{len(ops)} ops"
    report.press("Enter")
    assert report.text("#details h3").strip() == f"{ops[0].name} of unit.17"
    report.press("Enter")
    assert report.text("#details h3").strip() == f"{ops[1].name} of unit.17"
    report.press("Escape")
    assert report.text("#found") == ""
    change = (
        "(id, value) => { const field = document.getElementById(id); field.value = value;"
        " field.dispatchEvent(new Event('change')); }"
    )
    report.tab.run(f"({change})('iteration', '0')")
    view = make_view(small, iteration=1)
    low, high = report.span
    assert low <= view.start and high >= view.end and high - low < 1.02 * (view.end - view.start)
    before = report.tab.run("report.memoryChart.curve.time.at(-1)")
    report.tab.run(f"({change})('clock', 'gpu')")
    assert "GPU runs" in report.text("#memory-note")
    assert report.tab.run("report.memoryChart.curve.time.at(-1)") != before
    assert report.tab.complaints() == []


@browser_test
def test_every_control_can_be_reached_and_worked_by_keys(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    reached = []
    for _ in range(20):
        report.press("Tab")
        reached.append(report.tab.run("document.activeElement.id"))
    order = ["theme", "iteration", "zoom-out", "zoom-in", "reset", "critical", "search", "plots"]
    assert [each for each in reached if each in order][: len(order)] == order
    report.tab.run("report.focus()")
    report.press("n")
    assert report.text("#details h3").strip()
    first = report.text("#details h3")
    report.press("n")
    assert report.text("#details h3") != first
    report.press("p", "ArrowDown")
    assert report.facts("#details")["stream"] == "communication"


@browser_test
def test_hostile_names_stay_text(browser: chromium.Browser, tmp_path: Path) -> None:
    result = hostile()
    report = opened(browser, result, tmp_path)
    assert report.tab.complaints() == []
    last = result.scenario.iterations - 1
    seen = set()
    for op in result.ops:
        start, end = span(op)
        if op.iteration == last and end > start and op.unit:
            report.tab.run(
                f"report.select({result.ops.index(op)}); report.span.fit({start}, {end})"
            )
            report.tab.frames()
            report.tab.hover(*report.place((start + end) / 2, op.stream))
            assert report.facts("#tooltip")["unit"] == scrub(op.unit)
            assert scrub(op.unit) in report.tab.run(
                "document.getElementById('details').textContent"
            )
            seen.add(op.unit)
    assert seen == set(HOSTILE)[:0] or len(seen) >= len(HOSTILE) - 1
    report.tab.run("report.setIteration(report.model.iterations.length - 1)")
    left, top, width, height = report.area("memory")
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        report.tab.hover(left + share * width, top + height / 2)
    assert report.tab.run("'harmed' in window") is False
    assert report.tab.run("Object.prototype.toString.call({}.units)") == "[object Undefined]"
    assert report.tab.run("document.querySelectorAll('main img, #tooltip img').length") == 0
    assert report.tab.complaints() == []


@browser_test
def test_the_policy_stops_what_is_not_ours(
    textbook: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, textbook, tmp_path)
    report.tab.run(
        "(() => { const script = document.createElement('script');"
        " try { script.text = 'window.harmed = 1'; } catch { }"
        " document.body.append(script); })()"
    )
    refused = report.tab.run(
        "(() => { try { document.body.innerHTML = '<p>'; return false; }"
        " catch { return true; } })()"
    )
    assert refused is True and report.tab.run("'harmed' in window") is False


@browser_test
def test_it_prints_on_white_and_returns(
    small: Result, browser: chromium.Browser, tmp_path: Path
) -> None:
    report = opened(browser, small, tmp_path, dark=True)
    report.tab.run(
        "window.addEventListener('beforeprint', () => {"
        " window.printed = document.documentElement.dataset.theme; })"
    )
    width = report.tab.run("report.timeline.plot.width")
    assert report.tab.pdf().startswith(b"%PDF")
    assert report.tab.run("window.printed") == "light"
    report.tab.frames()
    assert report.tab.run("document.documentElement.dataset.theme") == "dark"
    assert report.tab.run("report.timeline.plot.width") == width
    assert report.tab.complaints() == []
