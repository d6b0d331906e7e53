"""The charts' own palette for the page: as it is on light paper, lifted where dark paper needs it.

Everything comes from :mod:`fsdpsim.plots.style`; nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from fsdpsim.plots.style import (
    CAPACITY,
    CATEGORIES,
    INK,
    KINDS,
    LEVELS,
    OUT_OF_FOCUS,
    PENDING,
    QUIET,
    ROUNDING,
    Look,
    contrast,
    ink_on,
    look_of_wait,
    shaded,
)

DARK_PAPER = "#1a1a1f"
"""Background of the charts in the dark theme."""

LEAST_CONTRAST = 2.0
"""Contrast that a bar has against dark paper at least."""

QUIET_CONTRAST, INK_CONTRAST = 6.5, 14.0
"""The same for quiet text, and for text and thin lines."""

THEMES = ("light", "dark")


def lifted(colour: str, least: float = LEAST_CONTRAST) -> str:
    """``colour``, mixed with white until its contrast with dark paper is ``least``."""
    return _mixed(colour, "#ffffff", lambda mixed: contrast(mixed, DARK_PAPER) >= least)


def _mixed(colour: str, other: str, enough: Callable[[str], bool]) -> str:
    """``colour`` with as little of ``other`` as is enough."""
    pairs = list(zip(to_rgb(colour), to_rgb(other), strict=True))
    shares = (step / 50 for step in range(51))
    mixes = (_between(pairs, share) for share in shares)
    return next(filter(enough, mixes), other)


def _between(pairs: Sequence[tuple[float, float]], share: float) -> str:
    red, green, blue = (a + (b - a) * share for a, b in pairs)
    return to_hex((red, green, blue))


def in_theme(theme: str, colour: str, least: float = LEAST_CONTRAST) -> str:
    """``colour`` as ``theme`` shows it."""
    return colour if theme == "light" else lifted(colour, least)


def of_band(theme: str, colour: str) -> str:
    """``colour`` as a memory band: pale ones darkened, so that the levels' lines show on them."""
    if theme == "light":
        return colour
    ink = lifted(INK, INK_CONTRAST)
    return _mixed(lifted(colour), DARK_PAPER, lambda mixed: contrast(mixed, ink) >= LEAST_CONTRAST)


# ---- for the canvas


def style_data(host_looks: Iterable[str]) -> dict[str, Any]:
    """Labels, letters, colours and lines of everything that the page draws, for both themes."""
    return {
        "kinds": {name: _look(look) for name, look in KINDS.items()},
        "host": {name: _look(look_of_wait(name)) for name in host_looks},
        "categories": {name: _look(look, of_band) for name, look in CATEGORIES.items()},
        "rounding": _look(ROUNDING, of_band),
        "pending": _look(PENDING, of_band),
        "hatch": _look(KINDS["all_gather"]),
        "levels": {name: _line(*line) for name, line in LEVELS.items()},
        "capacity": _line(*CAPACITY),
        "ink": _themes(INK, INK_CONTRAST),
        "quiet": _themes(QUIET, QUIET_CONTRAST),
        "grid": {"light": OUT_OF_FOCUS, "dark": "#34343b"},
        "paper": {"light": "#ffffff", "dark": DARK_PAPER},
    }


def _look(look: Look, shown: Callable[[str, str], str] = in_theme) -> dict[str, Any]:
    """A look; units of odd number have the second of each pair of colours."""
    pairs = {theme: [shown(theme, shaded(look.colour, i)) for i in (0, 1)] for theme in THEMES}
    return {
        "label": look.label,
        "letter": look.letter,
        "colour": pairs,
        "ink": {theme: [ink_on(colour) for colour in pair] for theme, pair in pairs.items()},
    }


def _line(colour: str, dashes: Any, width: float) -> dict[str, Any]:
    """A line: matplotlib counts dashes in line widths, a canvas in pixels."""
    pattern = [] if dashes == "-" else [round(width * dash, 2) for dash in dashes[1]]
    least = INK_CONTRAST if colour == INK else QUIET_CONTRAST
    return {"colour": _themes(colour, least), "dash": pattern, "width": width}


def _themes(colour: str, least: float) -> dict[str, str]:
    return {theme: in_theme(theme, colour, least) for theme in THEMES}


# ---- for the style sheet


def style_sheet(bars: Mapping[str, Look], bands: Mapping[str, Look]) -> str:
    """Variables of the page's inks, and the colour of each look's swatch, in both themes."""
    rules = []
    for theme in THEMES:
        root = f':root[data-theme="{theme}"]'
        ink = in_theme(theme, INK, INK_CONTRAST)
        quiet = in_theme(theme, QUIET, QUIET_CONTRAST)
        hatch = in_theme(theme, KINDS["all_gather"].colour)
        rules.append(f"{root}{{--ink:{ink};--quiet:{quiet};--hatch:{hatch}}}")
        for looks, shown in ((bars, in_theme), (bands, of_band)):
            for name, look in looks.items():
                fill = shown(theme, look.colour)
                rules.append(f"{root} .swatch-{name}{{background-color:{fill}}}")
    return "\n".join(rules)
