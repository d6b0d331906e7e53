"""Turns a result's columns into JSON that is small, and that nothing in it can break out of.

Names come from scenario files and model configurations, so they are untrusted: here they lose their
control characters, and the JSON loses every character that HTML could read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

#: Clock ticks that the longest simulated time has at least: 11 significant digits.
RESOLUTION = 10**11


class Strings:
    """A table in which each string stands once; columns hold its position."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))

    def table(self) -> list[str]:
        """The strings in order of their positions, as a person may see them."""
        return [scrub(text) for text in self._index]


class Ticks:
    """Seconds as integers: a power of ten of them to the second, so that decimal times stay exact.

    ``longest`` is the longest time in seconds. Equal times give equal integers, so that ops that
    touch still do.
    """

    def __init__(self, longest: float) -> None:
        self.per_second = 1
        while longest and longest * self.per_second < RESOLUTION:
            self.per_second *= 10

    def __call__(self, seconds: float | None) -> int:
        """The time of something that has happened, in ticks."""
        assert seconds is not None
        return round(seconds * self.per_second)

    def column(self, seconds: Iterable[float | None]) -> list[int]:
        """Times as differences, each from the one before it: small where they ascend."""
        return deltas(map(self, seconds))


def deltas(values: Iterable[int]) -> list[int]:
    """Each value as its difference from the one before it, the first from zero."""
    return [after - before for before, after in pairwise([0, *values])]


def changes(values: Iterable[int]) -> list[list[int]]:
    """(position, value) wherever a column that seldom changes does; it begins with zero."""
    return [
        [position, after]
        for position, (before, after) in enumerate(pairwise([0, *values]))
        if before != after
    ]


def scrub(text: str) -> str:
    """``text`` without control, format and other invisible characters, which might mislead."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def script_json(data: Any) -> str:
    """``data`` as JSON for a script element: ASCII, and without ``<``, ``>`` and ``&``.

    No ``</script>`` or ``<!--`` can end or open anything, and no U+2028 a line.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
