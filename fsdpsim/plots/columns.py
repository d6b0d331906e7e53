"""Bars narrower than a pixel, as what share of each pixel column is busy.

Drawn as they are, most would fall between two pixels and vanish, in a pattern that is not there;
widened to a pixel each, a row of them would look busy where it is idle nearly all the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

WIDTH = 0.4
"""Points of a column: a pixel at our 180 dpi."""

FAINTEST = 0.4
"""Ink of a column in which hardly anything runs: enough to be seen."""


class Spans(NamedTuple):
    """Bars of one row in order of start: from where to where, and the number of its colour."""

    left: Floats
    right: Floats
    colour: Indices

    def take(self, which: NDArray[np.bool_]) -> Spans:
        """Those of ``which``."""
        return Spans(self.left[which], self.right[which], self.colour[which])


class Columns(NamedTuple):
    """Runs of pixel columns that look alike; the opacity is the share that is busy."""

    left: Floats
    right: Floats
    rgba: Floats


def columns(
    bars: Spans, thin: NDArray[np.bool_], palette: Floats, low: float, width: float
) -> Columns:
    """The columns, ``width`` wide from ``low`` on, that bars of ``thin`` touch: at least one.

    Each has the colour (RGB, a row of ``palette``) of those that take most of it, mixed with that
    of the wide bar that it shares.
    """
    time = _time_by_colour(bars.take(thin), low, width)
    used = np.flatnonzero(time.any(axis=1))
    edges: Floats = low + width * np.arange(len(time) + 1, dtype=np.float64)
    middles = (bars.left + bars.right)[thin] / 2
    least = np.zeros(len(time))
    least[np.clip((middles - low) // width, 0, len(time) - 1).astype(np.int64)] = FAINTEST
    busy = np.maximum(np.diff(_covered(bars, edges)) / width, least)[used]
    own = np.maximum(time.sum(axis=1) / width, least)[used]
    part = np.minimum(own / busy, 1)[:, None]
    behind = palette[_wide_at(bars, thin, edges[used + 1])]
    mixed = part * palette[time[used].argmax(axis=1)] + (1 - part) * behind
    return _runs(used, np.column_stack((mixed, busy)).round(2), edges)


def _wide_at(bars: Spans, thin: NDArray[np.bool_], at: Floats) -> Indices:
    """The colour of the last wide bar that begins before each of ``at``."""
    wide = bars if thin.all() else bars.take(~thin)
    return wide.colour.take(np.searchsorted(wide.left, at).clip(1) - 1)


def _time_by_colour(thin: Spans, low: float, width: float) -> Floats:
    """How long bars of each colour take of each column; none is wider than a column."""
    left = np.maximum(thin.left, low)
    right = np.maximum(thin.right, left)
    first = ((left - low) // width).astype(np.int64)
    inside = np.minimum(right, low + width * (first + 1))
    time = np.zeros((first.max() + 2, thin.colour.max() + 1))
    np.add.at(time, (first, thin.colour), inside - left)
    np.add.at(time, (first + 1, thin.colour), right - inside)
    return time


def _covered(bars: Spans, at: Floats) -> Floats:
    """How much of the axis before each of ``at`` the union of ``bars`` covers."""
    ends = np.maximum.accumulate(bars.right)
    starts = np.minimum(np.maximum(bars.left, np.append(bars.left[:1], ends[:-1])), ends)
    places = np.column_stack((starts, ends)).ravel()
    covered = np.column_stack((np.zeros(len(ends)), ends - starts)).ravel().cumsum()
    before: Floats = np.interp(at, places, covered)
    return before


def _runs(used: Indices, rgba: Floats, edges: Floats) -> Columns:
    """Neighbours that look alike as one."""
    new = np.diff(used, prepend=-2) != 1
    new[1:] |= (np.diff(rgba, axis=0) != 0).any(axis=1)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(used))[: len(starts)] - 1
    return Columns(edges[used[starts]], edges[used[ends] + 1], rgba[starts])
