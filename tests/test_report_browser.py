"""The report in a real browser: what it shows equals the result, and hostile names stay text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import chromium
import pytest
from reports import HOSTILE, data_of, hostile, html_of, opened

from fsdpsim.explain import explain
from fsdpsim.explain.critical import path_totals
from fsdpsim.explain.timeline import Timeline, span
from fsdpsim.plots.curve import LEVELS, memory_curve
from fsdpsim.plots.style import CATEGORIES
from fsdpsim.plots.view import make_view
from fsdpsim.report.encode import scrub
from fsdpsim.result import Result

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    with chromium.launched(program) as running:
        yield running


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
    assert report.place(9.5, "compute")[0] == pytest.approx(at[0], abs=1)
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
    left, top = report.tab.run(
        "(({left, top}) => [left, top])"
        "(document.querySelector('#overview canvas').getBoundingClientRect())"
    )
    strip = report.area("timeline")
    places = [strip[0] + (time - whole[0]) / (whole[1] - whole[0]) * strip[2] for time in (14, 10)]
    report.tab.drag((places[0], top + 20), (places[1], top + 20))
    assert report.span == pytest.approx((6.0, 14.0), abs=0.2)
    report.tab.drag((left + 130, top + 20), (places[0], top + 20))
    assert report.span == pytest.approx((whole[0], 14.0), abs=0.2)
    report.press("0")
    report.tab.click(*first, count=2)
    start, end = report.span
    assert 5 < start < 5.5 and 7.5 < end < 8.5  # forward of unit 2: 5.5 to 7.5


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
    bars = report.tab.run("report.model.lanes.reduce((sum, lane) => sum + lane.count, 0)")
    assert 1000 < drawn < 1.1 * width * lanes < bars / 2
    points = report.tab.run("report.memoryChart.plot.data[0].length")
    assert points <= 8 * width


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
    times = "report.memoryChart.curve.time.slice(-100).join()"
    report.tab.run(f"({change})('clock', 'host')")
    before = report.tab.run(times)
    report.tab.run(f"({change})('clock', 'gpu')")
    assert "GPU runs" in report.text("#memory-note")
    assert report.tab.run(times) != before
    assert report.tab.complaints() == []


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
    assert seen == set(HOSTILE)
    report.tab.run("report.setIteration(report.model.iterations.length - 1)")
    left, top, width, height = report.area("memory")
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        report.tab.hover(left + share * width, top + height / 2)
    assert report.tab.run("'harmed' in window") is False
    assert report.tab.run("Object.keys(Object.prototype).length") == 0
    assert report.tab.run("document.querySelectorAll('main img, #tooltip img').length") == 0
    assert report.tab.complaints() == []


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
