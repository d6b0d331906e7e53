"""The legends of the timeline and of the memory chart: the looks that the page uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from fsdpsim.plots.style import (
    CATEGORIES,
    HOST,
    KINDS,
    LEVELS,
    PENDING,
    ROUNDING,
    Look,
    look_of_wait,
)
from fsdpsim.report.html import element
from fsdpsim.result import Result


def timeline_looks(result: Result, host_looks: list[str]) -> dict[str, Look]:
    """Looks of the timeline's bars, in the palette's order: the GPU's work, then the CPU's."""
    kinds = {op.kind for op in result.ops}
    known = [name for name in HOST if name in host_looks]
    others = [name for name in host_looks if name not in HOST]
    return {name: look for name, look in KINDS.items() if name in kinds} | {
        f"host-{i}": look_of_wait(name) for i, name in enumerate((*known, *others))
    }


def memory_looks(result: Result) -> dict[str, Look]:
    """Looks of the memory chart's bands, those that some buffer has; none without bytes."""
    samples = result.memory.samples
    used = {sample.buffer.category for sample in samples if sample.buffer.nbytes}
    looks = {f"memory-{name}": look for name, look in CATEGORIES.items() if name in used}
    if any(sample.allocated > sample.requested for sample in samples):
        looks["memory-rounding"] = ROUNDING
    if used and any(sample.buffer.pending for sample in samples):
        looks["memory-pending"] = PENDING
    return looks


def timeline_legend(looks: Mapping[str, Look]) -> Element:
    """Swatches with labels; a letter is what bars of the look begin with."""
    return element("ul", *_swatches(looks), css="legend")


def memory_legend(looks: Mapping[str, Look]) -> Element:
    """Swatches, and the allocator's levels, whose peaks the page fills in."""
    levels = LEVELS if looks else {}
    lines = (
        element(
            "li",
            element("i", css=f"line {line_style(name)}"),
            name,
            element("span", id=f"peak-{name}"),
        )
        for name in levels
    )
    return element("ul", *_swatches(looks), *lines, css="legend")


def _swatches(looks: Mapping[str, Look]) -> Iterator[Element]:
    for name, look in looks.items():
        swatch = element("i", css=f"swatch swatch-{name}{' hatched' if look.hatch else ''}")
        letter = [element("b", look.letter)] if look.letter else []
        yield element("li", swatch, *letter, look.label, data_look=name)


def line_style(level: str) -> str:
    """``solid``, ``thin``, ``dashed`` or ``dotted``: the class of the level's line."""
    _, dashes, width = LEVELS[level]
    if dashes == "-":
        return "solid" if width > 1 else "thin"
    return "dotted" if dashes[1][0] <= 1 else "dashed"
