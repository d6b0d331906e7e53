"""Pictures of sweeps: bars are the figures of the rows, the front is the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import util
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from fsdpsim.plots.pareto import pareto_figure
from fsdpsim.plots.style import write_figure
from fsdpsim.plots.sweep import bar_of, choice_figure, sweep_figures
from fsdpsim.scenario import load
from fsdpsim.sweeps import Grid, Row, sweep
from fsdpsim.sweeps.row import value_text

ROOT = Path(__file__).parent.parent

TABLES: dict[str, Any] = {
    "title": "F",
    "workload": {"units": 4, "parameters": 3_000_000, "forward": "2 ms", "backward": "4 ms"},
    "training": {"iterations": 2},
    "fsdp": {"runtime": "fsdp2"},
    "hardware": {"nodes": 2, "gpus_per_node": 4, "memory": "2.27 GB"},
    "sweep": {"fsdp.sharding_factor": [1, 2, 3, 4, 8]},
}


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid(load(TABLES))


@pytest.fixture(scope="module")
def rows(grid: Grid) -> list[Row]:
    return [row for row in sweep(grid.scenario) if row.status in ("ok", "oom")]


def heights(axes: Any) -> dict[int, float]:
    """Top of the highest bar at each position."""
    found: dict[int, float] = {}
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        x = round(patch.get_x() + patch.get_width() / 2)
        found[x] = max(found.get(x, 0.0), patch.get_y() + patch.get_height())
    return found


def test_bars_are_step_times_and_peaks(grid: Grid, rows: list[Row]) -> None:
    figure = choice_figure(grid, rows)
    assert figure is not None
    time, memory, calls = figure.axes
    assert [row.status for row in rows] == ["ok", "oom", "ok", "ok"]
    for x, row in enumerate(rows):
        assert heights(memory)[x] == row.figures["peak_reserved_bytes"] / 2**30
        if row.status == "ok":
            assert heights(time)[x] == pytest.approx(row.figures["step_time_s"] * 1e3)
            count = sum(c["count"] for c in row.figures["collectives"].values())
            assert heights(calls)[x] == count
    assert time.get_ylabel() == "step time (ms)"
    texts = [text.get_text() for text in time.texts]
    assert texts.count("does not fit") == 1


def test_a_bar_has_the_three_parts_of_the_step(grid: Grid, rows: list[Row]) -> None:
    for row in rows:
        bar = bar_of(grid, row)
        if bar.fits:
            assert sum(bar.parts) == pytest.approx(row.figures["step_time_s"])
            assert min(bar.parts) >= 0
            assert bar.floor is not None
            assert 0 < bar.floor <= bar.allocated


def test_the_front_is_drawn_over_the_others(grid: Grid, rows: list[Row]) -> None:
    figure = pareto_figure(grid, rows)
    assert figure is not None
    (axes,) = figure.axes
    others, front = (collection.get_offsets() for collection in axes.collections)
    assert len(others) + len(front) == 3
    memory = sorted(
        row.figures["peak_reserved_bytes"] / 2**30 for row in rows if row.status == "ok"
    )
    assert min(y for _, y in front) == memory[0]


def named(grid: Grid, rows: list[Row], times: Sequence[float]) -> list[Row]:
    """Points that fit, named ``units n``, with these step times in seconds."""
    base = next(row for row in rows if row.status == "ok")
    return [
        replace(
            base,
            point=n,
            settings={grid.keys[0]: f"units {n}"},
            figures={**base.figures, "step_time_s": seconds},
        )
        for n, seconds in enumerate(times)
    ]


def test_names_of_near_points_do_not_overlap(grid: Grid, rows: list[Row]) -> None:
    figure = pareto_figure(grid, named(grid, rows, [1.0, 1.005, 1.4]))
    assert figure is not None
    names = [text for text in figure.axes[0].texts if text.get_text().startswith("units")]
    assert len(names) == 3
    boxes = [name.get_window_extent() for name in names]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_no_picture_where_there_is_nothing_to_show(rows: list[Row]) -> None:
    two = {**TABLES, "sweep": {"fsdp.sharding_factor": [4, 8], "fsdp.forward_prefetch": [0, 1]}}
    grid = Grid(load(two))
    assert choice_figure(grid, rows) is None
    assert pareto_figure(grid, rows[:1]) is None
    durations = {
        "workload": {"units": 2, "forward": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0},
        "fsdp": {"runtime": "textbook"},
        "sweep": {"fsdp.limit_all_gathers": [1, 2]},
    }
    assert set(sweep_figures(load(durations))) == {"sweep"}


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ({"blocks": 8}, "8 blocks"),
        ({"runtime": "zero1"}, "zero1"),
        ({"runtime": "fsdp1", "x": True}, "fsdp1, x = true"),
        (1_048_576, "1048576"),
        (True, "true"),
        ("block", "block"),
        (["layers.*.mlp"], '["layers.*.mlp"]'),
    ],
)
def test_labels_say_values_in_words(value: Any, label: str) -> None:
    assert value_text(value) == label


def test_names_say_which_keys_they_are_of_and_hold_no_ambiguous_comma() -> None:
    lengths = {"training.iterations": [3000, 4000], "fsdp.sharding_factor": [4, 8]}
    grid = Grid(load(TABLES | {"sweep": lengths}))
    rows = [row for row in sweep(load(TABLES)) if row.status == "ok"][:1] * 2
    settings = ((3000, 4), (4000, 8))
    placed = [
        replace(
            row,
            point=n,
            settings=dict(zip(lengths, own, strict=True)),
            figures={**row.figures, "step_time_s": 1.0 + n},
        )
        for n, (row, own) in enumerate(zip(rows, settings, strict=True))
    ]
    figure = pareto_figure(grid, placed)
    assert figure is not None
    assert {text.get_text() for text in figure.axes[0].texts} == {"3000 | 4", "4000 | 8"}
    notes = [text.get_text() for text in figure.texts]
    assert "beside a point: training.iterations | fsdp.sharding_factor" in notes


def test_a_name_without_room_is_left_out(grid: Grid, rows: list[Row]) -> None:
    near = named(grid, rows, [1 + n / 1000 for n in range(9)])
    far = replace(near[0], point=9, figures={**near[0].figures, "step_time_s": 2.0})
    figure = pareto_figure(grid, [*near, far])
    assert figure is not None
    axes = figure.axes[0]
    boxes = [name.get_window_extent() for name in axes.texts]
    assert 3 <= len(boxes) < 10
    assert all(axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1 for box in boxes)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_labels_below_bars_do_not_meet() -> None:
    """A line per word of a swept table, its middle left out where it is wider than its share."""
    long = {"runtime": "fsdp2", "reshard_after_forward": False}
    data = TABLES | {"sweep": {"fsdp": [{"runtime": "fsdp1"}, long, *[{"runtime": "ddp"}] * 8]}}
    figure = sweep_figures(load(data))["sweep"]
    texts = figure.axes[-1].get_xticklabels()
    assert texts[0].get_text() == "fsdp1"
    first, second = texts[1].get_text().split("\n")
    assert first == "fsdp2" and "…" in second
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts]
    assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))


def test_the_same_sweep_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path in paths:
        write_figure(sweep_figures(load(TABLES))["sweep"], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_figures_of_the_shipped_sweeps_are_there() -> None:
    spec = util.spec_from_file_location("render", ROOT / "plots" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = util.module_from_spec(spec)
    spec.loader.exec_module(render)
    assert set(render.SWEEPS) <= {path.name for path in (ROOT / "plots").iterdir()}


@pytest.mark.slow
def test_figures_of_the_shipped_sweeps_are_drawn(tmp_path: Path) -> None:
    spec = util.spec_from_file_location("render", ROOT / "plots" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = util.module_from_spec(spec)
    spec.loader.exec_module(render)
    paths = render.render_sweeps(tmp_path)
    assert [path.name for path in paths] == list(render.SWEEPS)
    assert all(path.stat().st_size > 10_000 for path in paths)
