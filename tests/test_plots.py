"""Pictures: what is plotted equals what was simulated; looks are checked by their laws."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import lru_cache
from importlib import util
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import recordings
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from fsdpsim.cli import main
from fsdpsim.memory import CATEGORIES
from fsdpsim.plots import comparison, exposed, style, timeline, write_figure
from fsdpsim.plots.bars import HOST_ROW, bindings, host_row
from fsdpsim.plots.columns import FAINTEST, Spans, columns
from fsdpsim.plots.curve import LEVELS, PENDING, memory_curve, settled, thinned
from fsdpsim.plots.exposed import exposed_by_unit
from fsdpsim.plots.memory import running
from fsdpsim.plots.text import rows_of, shortened, text_width, wrapped
from fsdpsim.plots.view import make_view, short_names
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

ROOT = Path(__file__).parent.parent
SCENARIOS = ROOT / "scenarios"
GOLDEN = Path(__file__).parent / "data" / "golden"

TEXTBOOK = ("textbook_no_overlap", "textbook_overlap", "textbook_backward_prefetch")
RECORDED = (
    "fsdp1__equal4__full_bwdpre__ws2",
    "fsdp1__uneven6__hybrid__ws4",
    "fsdp1__equal4__ac_inside__ws2",
    "fsdp2__uneven6__hsdp__ws4",
    "fsdp2__equal4__default__ws2",
)
DRAWN = (
    "textbook_overlap",
    "13b no limit",
    "126 units",
    "oom",
    "fsdp1__equal4__ac_inside__ws2",
    "fsdp2__uneven6__hsdp__ws4",
)
CASES = (*TEXTBOOK, "textbook_13b_64gpu", "13b no limit", "126 units", "oom", *RECORDED)


def units_scenario(count: int, **keys: object) -> dict[str, object]:
    """``count`` FSDP2 units of 10 million parameters with a CPU that takes time to launch."""
    workload = {
        "units": count,
        "parameters": 10_000_000,
        "activations": "64 MiB",
        "kernel_launch": "2 ms",
        "optimizer": "8 ms",
        **dict.fromkeys(("all_gather", "reduce_scatter"), "3 ms"),
        **{"forward": "5 ms", "backward": "10 ms"},
    }
    return {
        "title": f"{count} units",
        "workload": workload,
        "fsdp": {"runtime": "fsdp2"},
        "hardware": {"gpus_per_node": 8},
        "training": {"iterations": 2},
        **keys,
    }


@lru_cache
def result_of(case: str) -> Result:
    if case == "126 units":
        return simulate(load(units_scenario(126)))
    if case == "oom":
        hardware = {"gpus_per_node": 8, "memory": "3 GiB"}
        return simulate(load(units_scenario(40, hardware=hardware)))
    if case == "oom of llama":
        return simulate(load(SCENARIOS / "llama3_8b_8xh100.toml", ["hardware.memory='40 GiB'"]))
    if case == "13b no limit":
        path = SCENARIOS / "textbook_13b_64gpu.toml"
        return simulate(load(path, ["fsdp.limit_all_gathers=false"]))
    if case in RECORDED:
        recording = recordings.read_recording(GOLDEN / f"{case}.json")
        return simulate(recordings.scenario_of(recording))
    return simulate(load(SCENARIOS / f"{case}.toml"))


@lru_cache
def figure_of(case: str, iteration: str | None = None) -> Figure:
    if case == "long title":
        return timeline(simulate(load(units_scenario(4, title=LONG))))
    return timeline(result_of(case), iteration=iteration)


def drawn_bars(figure: Figure, row: str) -> list[tuple[float, float, str]]:
    """(left, right, colour) of the bars of a row, in the axis unit."""
    found = [c for c in figure.axes[0].collections if c.get_gid() == row]
    bars = []
    for collection in found:
        colours = collection.get_facecolor()
        for path, colour in zip(collection.get_paths(), colours, strict=True):
            box = path.get_extents()
            bars.append((box.x0, box.x1, to_hex(colour)))
    return bars


def line(figure: Figure, name: str) -> np.ndarray:
    """The heights of a curve of the lower panel."""
    (found,) = [drawn for drawn in figure.axes[1].lines if drawn.get_gid() == name]
    return np.asarray(found.get_ydata())


def path_of(case: str) -> str:
    return str(SCENARIOS / f"{case}.toml")


# ---- the Gantt chart is the timeline


@pytest.mark.parametrize("case", DRAWN)
def test_bars_are_the_ops(case: str) -> None:
    result = result_of(case)
    view, figure = make_view(result, iteration="all"), figure_of(case, "all")
    for stream in {op.stream for op in result.ops}:
        ops = sorted((op for op in result.ops if op.stream == stream), key=lambda op: op.start)
        bars, thin = drawn_bars(figure, stream), drawn_bars(figure, f"{stream} columns")
        pixel = (view.limits[1] - view.limits[0]) / 1571
        for op in ops:
            left, right = view.x(op.start), view.x(op.end)
            if bars and bars[0][:2] == (left, right):
                base = style.KINDS[op.kind].colour
                assert bars.pop(0)[2] in (base, style.shaded(base, 1))
            elif left < right:
                assert right - left < pixel
                assert any(a <= right and left <= b for a, b, _ in thin)
        assert not bars


def test_an_op_thinner_than_a_pixel_is_seen_where_it_is() -> None:
    """Hundreds of copies and collectives at a distance of two pixels, none of which takes one."""
    tables = units_scenario(126)
    tables["workload"] |= {"all_gather": "20 us", "reduce_scatter": "20 us"}  # type: ignore[operator]
    result = simulate(load(tables))
    view, figure = make_view(result, iteration="all"), timeline(result, iteration="all")
    figure.canvas.draw()
    image = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)  # type: ignore[attr-defined]
    axes, names = figure.axes[0], [label.get_text() for label in figure.axes[0].get_yticklabels()]
    for stream in ("all_gather", "reduce_scatter"):
        ops = [op for op in result.ops if op.stream == stream]
        middles = [(view.x((op.start + op.end) / 2), names.index(stream)) for op in ops]
        for x, y in axes.transData.transform(middles):
            near = image[round(image.shape[0] - y) + 9, int(x) - 1 : int(x) + 2]
            assert (near.max(axis=1) - near.min(axis=1)).max() > 40  # orange or red, not the grid
        busy = drawn_bars(figure, f"{stream} columns") + drawn_bars(figure, stream)
        shown = sum(right - left for left, right, _ in busy)
        assert shown < 0.7 * (view.limits[1] - view.limits[0])


def test_a_column_has_the_ink_of_its_share() -> None:
    left = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 2.4, 4.0, 5.0])
    right = np.array([0.25, 0.5, 0.75, 1.0, 1.9, 2.41, 5.0, 5.01])
    bars = Spans(left, right, np.array([0, 0, 0, 0, 1, 0, 1, 0]))
    thin = right - left < 1
    palette = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    found = columns(bars, thin, palette, low=0.0, width=1.0)
    assert found.left.tolist() == [0, 1, 2, 5]
    assert found.right.tolist() == [1, 2, 3, 6]
    assert found.rgba[:, 3].tolist() == [1, 0.9, FAINTEST, FAINTEST]
    assert found.rgba[:3, :3].tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 1]]


def test_columns_that_look_alike_are_one_rectangle() -> None:
    """What keeps an SVG of a hundred thousand kernels small."""
    left = np.arange(100_000) / 100
    bars = Spans(left, left + 0.01, np.zeros(100_000, dtype=np.int64))
    found = columns(bars, np.ones(100_000, dtype=np.bool_), np.zeros((1, 3)), low=0.0, width=1.0)
    assert found.right[-1] >= 1000 and len(found.left) <= 3


def test_default_view_has_the_last_iteration_in_colour_and_others_faded() -> None:
    result = result_of("fsdp1__equal4__full_bwdpre__ws2")
    view = make_view(result)
    shown = [op for op in result.ops if op.stream == "compute" and view.shows(op.start, op.end)]
    ops = [op for op in shown if op.seconds]
    bars = [bar for bar in drawn_bars(timeline(result), "compute") if bar[0] < bar[1]]
    assert len(bars) == len(ops) < sum(op.stream == "compute" for op in result.ops)
    vivid = {style.shaded(look.colour, i) for look in style.KINDS.values() for i in (0, 1)}
    for op, (_, _, colour) in zip(ops, bars, strict=True):
        assert (colour in vivid) == (op.iteration == result.scenario.iterations - 1)


def test_units_differ_in_shade_from_their_neighbours() -> None:
    colours = [colour for *_, colour in drawn_bars(figure_of(TEXTBOOK[1]), "compute")]
    forward, backward = colours[:4], colours[4:]
    for shades in (forward, backward):
        assert len(set(shades)) == 2
        assert all(a != b for a, b in itertools.pairwise(shades))


def test_the_cpu_row_has_launches_hooks_and_waits() -> None:
    result = result_of("126 units")
    view = make_view(result, iteration="all")
    launches = [(op.issued - op.launch_seconds, op.issued) for op in result.ops]
    bars = [bar for bar in host_row(view).bars if bar.look == style.HOST["launch"]]
    assert [(bar.start, bar.end) for bar in bars] == [(a, b) for a, b in launches if b > a]
    waits = drawn_bars(figure_of(TEXTBOOK[1]), HOST_ROW)
    assert [bar[:2] for bar in waits] == [
        (stall.start, stall.end) for stall in result_of(TEXTBOOK[1]).stalls()
    ]
    assert {bar[2] for bar in waits} == {style.HOST["rate_limiter"].colour}


def test_launches_without_cost_are_ticks() -> None:
    result = result_of(TEXTBOOK[2])
    (ticks,) = [
        c for c in timeline(result).axes[0].collections if c.get_gid() == f"{HOST_ROW} ticks"
    ]
    assert {segment[0][0] for segment in ticks.get_segments()} == {op.issued for op in result.ops}


def test_bindings_are_waits_for_another_row_that_set_the_start() -> None:
    view = make_view(result_of("textbook_overlap"))
    found = {(b.time, b.source, b.target) for b in bindings(view)}
    # B2 waits for A2, which waited behind R3, which waited for B3.
    assert {(16.5, "communication", "compute"), (13.5, "compute", "communication")} <= found
    assert (13.5, "compute", HOST_ROW) in found  # the limiter lets go at the end of B3
    for time, source, target in found:
        assert any(op.end == time and op.stream == source for op in view.result.ops)
        assert target == HOST_ROW or any(op.start == time for op in view.result.ops)


def test_many_bars_are_a_handful_of_artists() -> None:
    """What makes the drawing fast, and an SVG of it small: at most a few rectangles per pixel."""
    result = simulate(load(units_scenario(1000)))
    figure = timeline(result, iteration="all")
    assert len(result.ops) > 16_000
    assert len(figure.axes[0].get_children()) < 150
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection):
            assert len(collection.get_paths()) < 1800


# ---- memory is the allocator's


@pytest.mark.parametrize("case", CASES)
def test_curves_reach_the_reported_peaks(case: str) -> None:
    result = result_of(case)
    for clock in ("host", "gpu"):
        curve = memory_curve(make_view(result), clock)
        for level in LEVELS:
            assert curve.levels[level].max() == result.peak(level)


@pytest.mark.parametrize("case", DRAWN[1:])
def test_drawn_curves_reach_the_reported_peaks(case: str) -> None:
    result, figure = result_of(case), figure_of(case)
    scales = [2**power for power in (0, 10, 20, 30)]
    for level in LEVELS:
        assert any(line(figure, level).max() * s == result.peak(level) for s in scales)


@pytest.mark.parametrize("case", CASES)
def test_categories_add_up_to_what_is_allocated(case: str) -> None:
    curve = memory_curve(make_view(result_of(case), iteration="all"))
    live = sum(curve.categories[name] for name in CATEGORIES)
    levels = curve.levels
    rounding = levels["allocated"] - live
    assert (rounding >= 0).all()
    # A freed block counts as requested until the allocator has seen its event.
    waiting = levels["active"] - levels["allocated"]
    assert (live == levels["requested"])[waiting == 0].all()
    assert (live <= levels["requested"]).all()
    # A block may be reusable before the allocator has looked, never the other way round.
    assert (curve.categories[PENDING] + levels["allocated"] - rounding <= levels["active"]).all()
    assert (np.diff(curve.time) >= 0).all()


@pytest.mark.parametrize(
    ("case", "most"),
    [*((case, None) for case in TEXTBOOK), ("textbook_13b_64gpu", 2), ("13b no limit", 79)],
)
def test_unsharded_units_reach_the_reported_maximum(case: str, most: int | None) -> None:
    result = result_of(case)
    assert memory_curve(make_view(result)).unsharded.max() == result.max_unsharded_units
    assert most is None or result.max_unsharded_units == most
    assert memory_curve(make_view(result)).unsharded[-1] == 0


def test_without_bytes_the_lower_panel_counts_unsharded_units() -> None:
    figure = figure_of("textbook_backward_prefetch")
    assert figure.axes[1].get_ylabel() == "unsharded units"
    assert line(figure, "unsharded").max() == 2
    assert "GiB" in figure_of("textbook_13b_64gpu").axes[1].get_ylabel()


def test_a_cpu_far_ahead_leaves_a_readable_curve() -> None:
    """All is issued at one instant: in host time the curve would be one vertical line."""
    result = result_of("fsdp2__equal4__default__ws2")
    assert len({sample.time for sample in result.memory.samples}) == 1
    curve = memory_curve(make_view(result))
    assert curve.clock == "gpu"
    assert len(set(curve.time)) > 10
    figure = figure_of("fsdp2__equal4__default__ws2")
    assert "GPU time" in " ".join(text.get_text() for text in figure.texts)
    host = memory_curve(make_view(result_of("fsdp1__equal4__full_bwdpre__ws2")))
    assert host.clock == "host"


@pytest.mark.parametrize("iteration", [None, "all"])
def test_a_cpu_that_issues_all_and_then_waits_is_far_ahead_too(iteration: str | None) -> None:
    """Offloading: nearly all changes are in the first moments of a step that the CPU waits out."""
    override = 'fsdp.offload_policy="cpu"'
    result = simulate(load(SCENARIOS / "llama3_8b_8xh100.toml", [override]))
    view = make_view(result, iteration=iteration)
    curve = memory_curve(view)
    assert curve.clock == "gpu"
    peak = curve.time[curve.levels["allocated"].argmax()]
    assert running(view, float(peak)).unit == "loss"
    # The GPU has nothing left when the wait for gradients ends: what is freed then, is freed then.
    wait = [stall for stall in result.stalls() if stall.cause == "offload"][-1]
    high = curve.time[curve.levels["allocated"] > 2**30]
    assert high[-1] <= wait.end < view.end - 1


def test_gpu_time_is_host_time_where_the_gpu_waits_for_the_cpu() -> None:
    curve = memory_curve(make_view(result_of("oom"), iteration="all"), "gpu")
    assert (np.diff(curve.time) >= 0).all()
    result = result_of("126 units")
    first = memory_curve(make_view(result, iteration="all"), "gpu").time[0]
    assert first == result.memory.samples[0].time < result.ops[0].start


def test_thinning_keeps_every_peak_and_the_last_level() -> None:
    curve = memory_curve(make_view(result_of("126 units"), iteration="all"))
    thin = thinned(curve, curve.time[0], curve.time[-1], columns=20)
    assert len(thin) <= 7 * 20 + 1 < len(curve)
    for name in LEVELS:
        assert thin.levels[name].max() == curve.levels[name].max()
        assert thin.levels[name][-1] == curve.levels[name][-1]
        calm = settled(curve).levels[name]
        assert calm.max() == curve.levels[name].max()
        assert calm[-1] == curve.levels[name][-1]


def test_capacity_is_drawn_where_it_is_near_and_known() -> None:
    def drawn(figure: Figure) -> list[object]:
        return [found for found in figure.axes[1].lines if found.get_gid() == "capacity"]

    assert drawn(figure_of("13b no limit"))
    assert not drawn(figure_of("textbook_13b_64gpu"))
    legend = [text.get_text() for text in figure_of("textbook_13b_64gpu").texts]
    assert any("capacity" in text and "above the chart" in text for text in legend)
    assert not any("capacity" in t.get_text() for t in figure_of(TEXTBOOK[0]).texts)


def test_out_of_memory_is_said_and_marked() -> None:
    result = result_of("oom")
    assert result.memory.oom is not None
    figure = timeline(result)
    assert "out of memory at" in figure.texts[0].get_text()
    assert [found for found in figure.axes[1].lines if found.get_gid() == "oom"]


def test_out_of_memory_before_anything_ran_is_a_picture_too() -> None:
    hardware = {"gpus_per_node": 8, "memory": "1.6 GiB"}
    result = simulate(load(units_scenario(40, hardware=hardware)))
    assert result.memory.oom is not None and not result.ops
    assert "out of memory" in timeline(result).texts[0].get_text()


def test_without_even_one_allocation_there_is_a_message_and_no_picture(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an answer: exit status 0, and the other files are drawn."""
    oom, fits = path_of("llama3_8b_8xh100"), path_of("textbook_overlap")
    tiny = ["--set", 'hardware.memory="1 GiB"']
    assert main(["plot", oom, *tiny]) == 0
    assert main(["plot", oom, *tiny, "--chart", "exposed"]) == 0
    said = capsys.readouterr()
    assert not said.out and "Traceback" not in said.err
    first, second = said.err.splitlines()
    assert first.startswith(f"fsdpsim: {oom}: out of memory at") and "before anything ran" in first
    assert "before any communication" in second
    assert main(["compare", oom, *tiny, "-o", "both.png"]) == 0
    assert not any(here.iterdir())
    (here / "tiny.toml").write_text(
        '[workload]\nunits = 4\nparameters = 1_000_000_000\nforward = "1 ms"\nbackward = "1 ms"\n'
        '[hardware]\ngpus_per_node = 8\nmemory = "0.1 GiB"\n[fsdp]\nruntime = "fsdp2"\n'
    )
    assert main(["plot", "tiny.toml", fits, "-o", "charts"]) == 0
    assert [path.name for path in (here / "charts").iterdir()] == ["textbook_overlap.png"]


def test_run_leaves_no_chart_of_what_never_ran(here: Path) -> None:
    oom = path_of("llama3_8b_8xh100")
    (here / "out").mkdir()
    (here / "out" / "gantt.png").write_text("of an earlier run")
    assert main(["run", oom, "--set", 'hardware.memory="1 GiB"', "-o", "out"]) == 0
    assert {"summary.json", "ops.csv"} <= {path.name for path in (here / "out").iterdir()}
    assert not (here / "out" / "gantt.png").exists()


# ---- exposed communication


@pytest.mark.parametrize("case", [*TEXTBOOK, "textbook_13b_64gpu", "126 units"])
def test_exposed_seconds_are_those_of_the_summary(case: str) -> None:
    result = result_of(case)
    found = exposed_by_unit(result)
    figure = exposed(result)
    for kind, summary in result.collectives.items():
        assert sum(found[kind].values()) == pytest.approx(summary.exposed_s, abs=1e-12)
        bars = [p for c in figure.axes[0].containers for p in c if p.get_gid() == kind]
        assert len(bars) == len({unit for units in found.values() for unit in units})
        assert {to_hex(bar.get_facecolor()) for bar in bars} == {style.KINDS[kind].colour}


def test_exposed_until_memory_ran_out() -> None:
    """The step that is interrupted counts from its start to the last allocation."""
    result = result_of("oom")
    assert result.memory.oom is not None and not result.step_time
    figure = exposed(result)
    title = figure.texts[0].get_text()
    assert "out of memory at" in title and "until then" in title and "0 s of" not in title
    ran = {op.unit for op in result.ops if op.collective is not None}
    assert {unit for units in exposed_by_unit(result).values() for unit in units} == ran
    assert sum(exposed_by_unit(result)["all_gather"].values()) > 0
    assert figure.axes[0].get_ylim()[0] == 0


def test_comparison_puts_results_on_one_axis() -> None:
    results = [result_of(case) for case in TEXTBOOK]
    figure = comparison(results)
    assert len(figure.axes) == 3
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    bars = [[p.get_extents() for c in a.collections for p in c.get_paths()] for a in figure.axes]
    assert [max(bar.x1 for bar in row) for row in bars] == [40.5, 36.0, 27.0]


def test_unit_numbers_above_the_first_row_are_not_cut() -> None:
    figure = comparison([result_of("126 units"), result_of("oom")])
    figure.canvas.draw()
    axes = figure.axes[0]
    assert len(axes.texts) > 5
    assert all(text.get_window_extent().y1 <= axes.bbox.y1 for text in axes.texts)


def test_the_line_at_the_end_of_an_iteration_is_in_the_legend() -> None:
    def said(figure: Figure) -> bool:
        return "end of an iteration" in [text.get_text() for text in figure.texts]

    assert said(comparison([result_of(case) for case in TEXTBOOK]))  # the shorter ones end inside
    assert said(figure_of("126 units", "all"))
    assert not said(figure_of("textbook_overlap"))
    interrupted = result_of("oom")  # within its first iteration: there is no end
    assert not said(timeline(interrupted, iteration="all"))


# ---- what the user asks to see


def test_time_zooms_and_keeps_the_level_before() -> None:
    result = result_of("textbook_13b_64gpu")
    view = make_view(result, time=(1.0, 1.5))
    low, high = view.limits
    assert low < view.x(1.0) < view.x(1.5) < high
    assert view.time_unit == ("ms", 1e-3)
    curve = memory_curve(view)
    assert curve.time[0] <= 1.0 and curve.time[-1] <= 1.5
    assert make_view(result, time=(None, 0.5)).start == 0.0


def test_time_counts_from_the_start_of_the_shown_step() -> None:
    result = result_of("fsdp1__equal4__full_bwdpre__ws2")
    view = make_view(result, time=(0.0, 10.0))
    assert view.start == result.window[0]
    assert view.x(result.window[0]) == 0


def test_units_outside_the_focus_are_grey_and_keep_their_place() -> None:
    result = result_of(TEXTBOOK[1])
    whole = drawn_bars(timeline(result), "compute")
    chosen = drawn_bars(timeline(result, units="1:3"), "compute")
    ops = [op for op in result.ops if op.stream == "compute"]
    assert [bar[:2] for bar in chosen] == [bar[:2] for bar in whole]
    for op, before, after in zip(ops, whole, chosen, strict=True):
        inside = op.unit in ("unit.1", "unit.2")
        assert after[2] == (before[2] if inside else style.OUT_OF_FOCUS)
    assert timeline(result, units="unit.[12]").axes
    assert make_view(result, units="unit.3, unit.0").units == {"unit.0", "unit.3"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"iteration": 2}, "iterations 1 to 1"),
        ({"iteration": 0}, "iterations 1 to 1"),
        ({"units": "7:"}, "none of the 5 units"),
        ({"units": "layers.*"}, "none of the 5 units"),
        ({"time": (3.0, 2.0)}, "ends before it begins"),
        ({"time": (50.0, None)}, "the axis goes from 0 s to 36 s"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(
    options: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        timeline(result_of(TEXTBOOK[1]), **options)


def test_short_names_stay_unique() -> None:
    assert short_names(["layers.0", "layers.11", "root"]) == {
        "layers.0": "0",
        "layers.11": "11",
        "root": "root",
    }
    assert short_names(["encoder.0", "decoder.0"])["encoder.0"] == "encoder.0"


# ---- looks


def test_the_palette_knows_every_kind_cause_and_category() -> None:
    assert set(style.CATEGORIES) == set(CATEGORIES)
    assert set(style.LEVELS) == set(LEVELS)
    for case in CASES:
        assert {op.kind for op in result_of(case).ops} <= set(style.KINDS)
        assert {stall.cause for stall in result_of(case).stalls()} <= set(style.HOST)


PANELS = {
    "gpu": [look.colour for look in style.KINDS.values()],
    "cpu": [look.colour for look in style.HOST.values()],
    "memory": [look.colour for look in style.CATEGORIES.values()],
}

# Machado, Oliveira and Fernandes 2009, table 1 at severity 1.0, for linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# IEC 61966-2-1: linear sRGB to XYZ, and its white.
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(axis=1)


def lab(colour: str, vision: str) -> np.ndarray:
    """CIELAB of an sRGB colour as this vision sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.array(VISIONS[vision]) @ linear, 0, 1) / WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("panel", PANELS)
def test_no_two_colours_of_a_panel_look_alike(panel: str, vision: str) -> None:
    seen = [lab(colour, vision) for colour in PANELS[panel]]
    closest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    assert closest >= 18


def test_text_on_bars_can_be_read() -> None:
    for look in (*style.KINDS.values(), *style.HOST.values()):
        for colour in (look.colour, style.shaded(look.colour, 1)):
            # W3C's minimum for large text is 3.
            assert contrast(colour, style.ink_on(colour)) >= 3.5


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ XYZ[1])


LONG = "A title of so many words that no line of this page could ever hold all of them at once " * 2


@pytest.mark.parametrize(
    ("case", "iteration"),
    [
        ("textbook_no_overlap", None),
        ("textbook_13b_64gpu", None),
        ("13b no limit", None),
        ("126 units", "all"),
        ("oom", None),
        ("long title", None),
        ("fsdp1__equal4__full_bwdpre__ws2", None),
        ("fsdp2__uneven6__hsdp__ws4", "all"),
    ],
)
def test_no_text_is_cut_off_or_covers_another(case: str, iteration: str | None) -> None:
    check_texts(figure_of(case, iteration))


def test_no_text_of_other_charts_is_cut_off_or_covers_another() -> None:
    check_texts(exposed(result_of("126 units")))
    check_texts(comparison([result_of("textbook_13b_64gpu"), result_of("13b no limit")]))


def check_texts(figure: Figure) -> None:
    with style.house_style():
        figure.canvas.draw()
    page = figure.bbox
    texts = texts_in_sight(figure)
    boxes = np.array([text.get_window_extent().extents for text in texts])
    assert len(boxes) > 5
    assert (boxes[:, :2] >= page.min).all() and (boxes[:, 2:] <= page.max).all()
    low, high = boxes[:, None, :2] + 1, boxes[None, :, 2:] - 1
    covers = ((low < high) & (low < high).swapaxes(0, 1)).all(axis=2)
    pairs = [(texts[a].get_text(), texts[b].get_text()) for a, b in np.argwhere(covers) if a < b]
    assert not pairs


def texts_in_sight(figure: Figure) -> list[Text]:
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks()
            found += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("case", ["textbook_overlap", "fsdp2__uneven6__hsdp__ws4", "oom"])
def test_a_text_on_a_bar_fits_it(case: str) -> None:
    figure = figure_of(case)
    axes = figure.axes[0]
    bars = [path.get_extents() for c in axes.collections if c.get_gid() for path in c.get_paths()]
    checked = 0
    for text in axes.texts:
        x, y = text.get_position()
        box = text.get_window_extent().transformed(axes.transData.inverted())
        own = [bar for bar in bars if bar.contains(x, y) and bar.width]
        checked += len(own)
        assert all(bar.x0 < box.x0 and box.x1 < bar.x1 for bar in own), text
    assert checked > 5


def zoomed_llama() -> Figure:
    """Kernels of a few units, whose names lie across several of them."""
    result = simulate(load(SCENARIOS / "llama3_8b_8xh100.toml"))
    return timeline(result, time=(0.3, 0.4), arrows=True)


def test_lines_between_kernels_leave_texts_free() -> None:
    figure = zoomed_llama()
    figure.canvas.draw()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    ends = [
        axes.transData.transform(segment)
        for lines in axes.collections
        if isinstance(lines, LineCollection) and lines.get_gid() is None
        for segment in lines.get_segments()
    ]
    assert len(boxes) > 8 and len(ends) > 20
    for (x, low), (_, high) in ends:
        low, high = sorted((low, high))
        assert not any(b.x0 < x < b.x1 and b.y0 + 1 < high and low < b.y1 - 1 for b in boxes)


def test_a_text_is_where_its_unit_is_not_in_a_gap_of_it() -> None:
    """After a retry of the allocator the unit's kernels go on, tens of milliseconds later."""
    result = result_of("oom of llama")
    assert result.memory.oom is not None
    figure, view = timeline(result), make_view(result)
    ops = [op for op in result.ops if op.stream == "compute" and op.unit == "root"]
    (text,) = [t for t in figure.axes[0].texts if t.get_text() == "F root"]
    box = text.get_window_extent().transformed(figure.axes[0].transData.inverted())
    own = [(view.x(op.start), view.x(op.end)) for op in ops]
    assert any(a <= box.x0 and box.x1 <= b for a, b in own)


def test_the_peaks_text_keeps_clear_of_the_line_out_of_memory() -> None:
    figure = timeline(result_of("oom of llama"))
    figure.canvas.draw()
    axes = figure.axes[1]
    (line,) = [found for found in axes.lines if found.get_gid() == "oom"]
    (text,) = [text for text in axes.texts if text.get_text().startswith("peak")]
    edge = axes.transData.transform((line.get_xdata()[0], 0))[0]
    assert text.get_bbox_patch().get_window_extent().x1 < edge


def test_text_helpers() -> None:
    width = text_width("forward", 8)
    assert text_width("forward forward", 8) > 2 * width
    assert wrapped("forward forward", 8, 1.2 * width) == ["forward", "forward"]
    assert shortened("forward", 8, width) == "forward"
    cut = shortened("a_long_name_of_a_buffer", 8, width)
    assert "…" in cut and text_width(cut, 8) <= width
    assert rows_of([3, 3, 3], 6) == [[0, 1], [2]]


# ---- files


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    """Also in another process, with another hash seed, and whatever a matplotlibrc says."""
    scenario = str(SCENARIOS / "textbook_13b_64gpu.toml")
    paths = [tmp_path / f"a.{ending}" for ending in style.ENDINGS]
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 20, "axes.facecolor": "red"}):
        for path in paths:
            write_figure(timeline(simulate(load(scenario))), path)
    others = [str(tmp_path / f"b.{ending}") for ending in style.ENDINGS]
    code = (
        "import sys; from fsdpsim.cli import main\n"
        f"for path in {others}: assert main(['plot', {scenario!r}, '-o', path]) == 0"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    for path, other in zip(paths, others, strict=True):
        assert path.read_bytes() == Path(other).read_bytes()
        assert path.stat().st_size > 5000


def test_pictures_are_twice_as_wide_as_a_readme(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    write_figure(timeline(result_of(TEXTBOOK[0])), path)
    assert path.read_bytes()[16:20] == (1800).to_bytes(4, "big")


def test_drawing_needs_no_pyplot_and_leaves_the_settings_alone() -> None:
    code = (
        "import sys, matplotlib; from fsdpsim import load, simulate\n"
        "from fsdpsim.plots import timeline\n"
        "before = matplotlib.rcParams.copy()\n"
        f"timeline(simulate(load({path_of(TEXTBOOK[0])!r})))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_figure_of_the_readme_is_drawn(tmp_path: Path) -> None:
    spec = util.spec_from_file_location("render", ROOT / "plots" / "render.py")
    assert spec is not None and spec.loader is not None
    render = util.module_from_spec(spec)
    spec.loader.exec_module(render)
    paths = render.render(tmp_path)
    assert {path.name for path in paths} == set(render.PICTURES)
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert set(render.PICTURES) <= {path.name for path in (ROOT / "plots").iterdir()}


# ---- the command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_default_file_is_the_scenarios_name_here(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", path_of("textbook_overlap")]) == 0
    assert capsys.readouterr().out == "textbook_overlap.png\n"
    assert (here / "textbook_overlap.png").read_bytes().startswith(b"\x89PNG")


def test_several_files_go_into_a_directory(here: Path) -> None:
    files = [path_of(case) for case in TEXTBOOK]
    assert main(["plot", *files, "-o", "charts"]) == 0
    written = {path.name for path in (here / "charts").iterdir()}
    assert written == {f"{case}.png" for case in TEXTBOOK}
    assert main(["plot", files[0], "-o", "charts", "--chart", "exposed"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "x.jpg"], ".png, .svg or .pdf"),
        (["-o", "x"], ".png, .svg or .pdf"),
        (["--iteration", "two"], "a number from 1, or all"),
        (["--iteration", "9"], "iterations 1 to 1"),
        (["--time", "1 s"], "A:B"),
        (["--time", "1 GB:2 GB"], "not seconds"),
        (["--units", "nope"], "none of the 5 units"),
        (["--set", "fsdp.overlap=maybe"], "fsdp.overlap"),
        ([path_of("textbook_no_overlap"), "-o", "x.png"], "directory"),
        ([path_of("textbook_overlap")], "two pictures"),
    ],
)
def test_a_mistake_is_one_message_and_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["plot", path_of("textbook_overlap"), *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert not any(here.iterdir())


def test_options_reach_the_picture(here: Path) -> None:
    scenario = path_of("textbook_overlap")
    arguments = ["--time", "10 s:20 s", "--units", "2:", "--arrows", "--iteration", "1"]
    assert main(["plot", scenario, "-o", "a.svg", *arguments, "--memory-time", "host"]) == 0
    assert main(["plot", scenario, "-o", "b.svg", "--iteration", "all"]) == 0
    assert Path("a.svg").read_bytes() != Path("b.svg").read_bytes()


@pytest.mark.benchmark
def test_speed_of_ten_thousand_bars(benchmark: object, tmp_path: Path) -> None:
    many = simulate(load(units_scenario(1000)))

    def draw() -> None:
        write_figure(timeline(many, iteration="all"), tmp_path / "x.png")

    benchmark(draw)  # type: ignore[operator]
