"""A legend that flows from left to right and wraps, so that it is as high as it must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fsdpsim.plots.style import INK, KINDS, SMALL_SIZE, Look
from fsdpsim.plots.text import rows_of, text_width

ROW_INCHES = 0.19
SWATCH = (12.0, 7.0)
"""Points wide and high."""
GAP, BETWEEN = 4.0, 14.0
"""Points from swatch to text, and to the next swatch."""


class Key(NamedTuple):
    """One entry: a filled swatch, or a line if ``line`` (a matplotlib line style) is given."""

    label: str
    colour: str
    hatch: str | None = None
    line: Any = None
    width: float = 1.0


def key_of(look: Look) -> Key:
    """The entry of a bar's look; with the letter that its bars carry."""
    return Key(f"{look.letter} {look.label}".strip(), look.colour, hatch=look.hatch)


def legend_inches(keys: Sequence[Key], inches: float) -> float:
    """Height of the legend of ``keys`` in a width of ``inches``."""
    return ROW_INCHES * len(_rows(keys, inches))


def draw_legend(
    figure: Figure, keys: Sequence[Key], left: float, top: float, inches: float
) -> None:
    """Draw ``keys`` from (left, top), in inches from the figure's lower left corner."""
    width, height = (float(side) for side in figure.get_size_inches())
    for number, row in enumerate(_rows(keys, inches)):
        x = left * 72
        y = top * 72 - (number + 0.5) * ROW_INCHES * 72
        for index in row:
            _draw_key(figure, keys[index], x, y, width * 72, height * 72)
            x += _width(keys[index])


def _rows(keys: Sequence[Key], inches: float) -> list[list[int]]:
    return rows_of([_width(key) for key in keys], inches * 72 + BETWEEN)


def _width(key: Key) -> float:
    return SWATCH[0] + GAP + text_width(key.label, SMALL_SIZE) + BETWEEN


def _draw_key(figure: Figure, key: Key, x: float, y: float, width: float, height: float) -> None:
    """One entry with the middle of its left side at (x, y) points of ``width`` by ``height``."""
    if key.line is None:
        edge = KINDS["all_gather"].colour if key.hatch else "none"
        figure.add_artist(
            Rectangle(
                (x / width, (y - SWATCH[1] / 2) / height),
                SWATCH[0] / width,
                SWATCH[1] / height,
                facecolor=key.colour,
                edgecolor=edge,
                hatch=key.hatch,
                linewidth=0,
            )
        )
    else:
        ends = (x / width, (x + SWATCH[0]) / width)
        figure.add_artist(
            Line2D(ends, (y / height,) * 2, color=key.colour, ls=key.line, lw=key.width)
        )
    figure.text(
        (x + SWATCH[0] + GAP) / width,
        y / height,
        key.label,
        size=SMALL_SIZE,
        color=INK,
        va="center_baseline",
        gid="legend",
    )
