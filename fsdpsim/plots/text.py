"""How wide a text is, and how it breaks into lines: in points, so that it holds at any dpi."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

FAMILY = "DejaVu Sans"


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Points that ``text`` is wide at ``size`` points."""
    font = FontProperties(family=FAMILY, size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def wrapped(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """``text`` in lines of at most ``width`` points; a word that is wider stands alone."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def shortened(text: str, size: float, width: float) -> str:
    """``text``, its middle left out if it is wider than ``width`` points."""
    if text_width(text, size) <= width:
        return text
    for kept in range(len(text) - 2, 1, -1):
        cut = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if text_width(cut, size) <= width:
            return cut
    return text[:1]


def rows_of(widths: Sequence[float], available: float) -> list[list[int]]:
    """Indices of things of ``widths`` laid out left to right in rows of ``available`` points."""
    rows: list[list[int]] = []
    used = available
    for index, width in enumerate(widths):
        if not rows or used + width > available:
            rows.append([])
            used = 0.0
        rows[-1].append(index)
        used += width
    return rows
