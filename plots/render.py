"""Draws every figure of the README from the scenario files: ``python plots/render.py [DIR]``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from fsdpsim.files import make_directory, write_with
from fsdpsim.plots import comparison, exposed, roofline, timeline, write_figure
from fsdpsim.plots.sweep import sweep_figures
from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

HERE = Path(__file__).parent
SCENARIOS = HERE.parent / "scenarios"

TEXTBOOK = ("textbook_no_overlap", "textbook_overlap", "textbook_backward_prefetch")
NO_LIMIT = "fsdp.limit_all_gathers=false"


class Picture(NamedTuple):
    """One figure: how it is drawn, from which scenarios, with which ``--set`` overrides."""

    draw: Callable[..., Figure]
    scenarios: Sequence[str]
    overrides: Sequence[str] = ()


def side_by_side(*results: Result) -> Figure:
    return comparison(results)


#: One line per figure.
PICTURES = {
    "textbook.png": Picture(side_by_side, TEXTBOOK),
    **{f"{name}.png": Picture(partial(timeline, arrows=True), [name]) for name in TEXTBOOK},
    "textbook_overlap_exposed.png": Picture(exposed, ["textbook_overlap"]),
    "textbook_13b_64gpu.png": Picture(timeline, ["textbook_13b_64gpu"]),
    "textbook_13b_64gpu_no_limit.png": Picture(timeline, ["textbook_13b_64gpu"], [NO_LIMIT]),
    "llama3_8b_8xh100.png": Picture(timeline, ["llama3_8b_8xh100"]),
    "llama3_8b_8xh100_roofline.png": Picture(roofline, ["llama3_8b_8xh100"]),
}


#: Sweeps: file -> (scenario, which of its pictures). They take longer than all others together.
SWEEPS = {
    "sweep_unit_size_13b.png": ("sweep_unit_size_13b", "sweep"),
    "sweep_unit_size_13b_pareto.png": ("sweep_unit_size_13b", "pareto"),
    "sweep_message_size.png": ("sweep_message_size", "sweep"),
    "sweep_hybrid_8x8.png": ("sweep_hybrid_8x8", "sweep"),
}


def render(folder: Path) -> list[Path]:
    """Draw all figures into ``folder``; returns their paths."""
    make_directory(folder)
    return [_render(folder / name, picture) for name, picture in PICTURES.items()]


def _render(path: Path, picture: Picture) -> Path:
    paths = [SCENARIOS / f"{name}.toml" for name in picture.scenarios]
    results = [simulate(load(scenario, list(picture.overrides))) for scenario in paths]
    write_with(path, partial(write_figure, picture.draw(*results)))
    return path


def render_sweeps(folder: Path) -> list[Path]:
    """Run the sweeps and draw their figures into ``folder``; returns their paths."""
    make_directory(folder)
    names = dict.fromkeys(name for name, _ in SWEEPS.values())
    figures = {name: sweep_figures(load(SCENARIOS / f"{name}.toml")) for name in names}
    for file, (name, kind) in SWEEPS.items():
        write_with(folder / file, partial(write_figure, figures[name][kind]))
    return [folder / file for file in SWEEPS]


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for drawn in (*render(place), *render_sweeps(place)):
        print(drawn)
