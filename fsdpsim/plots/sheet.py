"""A page laid out from the top in inches: title, legend, panels, notes. Nothing can overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fsdpsim.plots.legend import Key, draw_legend, legend_inches
from fsdpsim.plots.style import INK, QUIET, TEXT_SIZE, TITLE_SIZE
from fsdpsim.plots.text import wrapped

WIDTH = 10.0
"""Inches; 1800 pixels at our 180 dpi, twice the width of a README's column."""
LEFT, RIGHT = 1.12, 0.15
TOP, BOTTOM = 0.12, 0.10


@dataclass(slots=True)
class Panel:
    """Room for axes of ``inches`` height; ``axes`` exists once the sheet is finished."""

    top: float
    inches: float
    share: Panel | None = None
    axes: Axes | None = None


@dataclass(slots=True)
class Sheet:
    """Collects what comes under what; :meth:`figure` then makes the page as high as all of it."""

    width: float = WIDTH
    used: float = TOP
    texts: list[tuple[float, str, float, str, bool]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    @property
    def plot_points(self) -> float:
        """Width of the panels in points."""
        return (self.width - LEFT - RIGHT) * 72

    def title(self, text: str) -> None:
        """A bold title, in as many lines as it needs."""
        for line in wrapped(text, TITLE_SIZE, (self.width - 0.3) * 72, bold=True):
            self._line(line, TITLE_SIZE, INK, bold=True)

    def note(self, text: str, *, size: float = TEXT_SIZE) -> None:
        """Quiet lines."""
        for line in wrapped(text, size, (self.width - 0.3) * 72):
            self._line(line, size, QUIET, bold=False)

    def skip(self, inches: float) -> float:
        """Leave room; returns where it begins, in inches from the top."""
        at, self.used = self.used, self.used + inches
        return at

    def panel(self, inches: float, *, share: Panel | None = None) -> Panel:
        """Room for axes, whose x axis may be that of another panel."""
        panel = Panel(self.skip(inches), inches, share)
        self.panels.append(panel)
        return panel

    def _line(self, text: str, size: float, colour: str, *, bold: bool) -> None:
        self.texts.append((self.skip(1.38 * size / 72), text, size, colour, bold))

    def figure(self) -> Figure:
        """The page with its texts and empty axes."""
        height = self.used + BOTTOM
        figure = Figure(figsize=(self.width, height))
        FigureCanvasAgg(figure)
        for at, text, size, colour, bold in self.texts:
            weight = "bold" if bold else "normal"
            y = 1 - (at + 0.1 * size / 72) / height
            figure.text(
                0.15 / self.width, y, text, size=size, color=colour, weight=weight, va="top"
            )
        for panel in self.panels:
            bottom = 1 - (panel.top + panel.inches) / height
            box = (
                LEFT / self.width,
                bottom,
                1 - (LEFT + RIGHT) / self.width,
                panel.inches / height,
            )
            panel.axes = figure.add_axes(box, sharex=panel.share.axes if panel.share else None)
        return figure


def legend_room(keys: Sequence[Key], width: float = WIDTH) -> float:
    """Inches that a legend across a sheet needs."""
    return legend_inches(keys, width - 0.3)


def place_legend(figure: Figure, keys: Sequence[Key], at: float) -> None:
    """Draw a legend across the page, ``at`` inches from its top."""
    width, height = (float(side) for side in figure.get_size_inches())
    draw_legend(figure, keys, 0.15, height - at, width - 0.3)
