"""The table of a sweep's points fits its terminal and breaks no word."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fsdp_scenarios import tables

from fsdpsim.commands.points import LEAST_IMPORTANT, table
from fsdpsim.commands.terminal import Terminal
from fsdpsim.scenario import load
from fsdpsim.sweeps import sweep

VARIED = {
    "fsdp.limit_all_gathers": [True, False],
    "training.gradient_accumulation_steps": [1, 2],
    "hardware.inter_node_bandwidth": ["100 GB/s"],
}


def shown(width: int) -> list[str]:
    rows = sweep(load({**tables("fsdp1"), "sweep": VARIED}))
    console = Terminal(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table(rows, tuple(VARIED), width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_words_stay_whole(width: int) -> None:
    lines = shown(width)
    words = {word for line in lines for word in line.split()}
    assert words >= {"limit", "accumulation", "bandwidth", "GB/s", "true", "step"}
    assert max(map(len, lines)) <= width
    assert sum("100" in line for line in lines) == 4


def test_figures_give_way_in_order() -> None:
    def labels(width: int) -> set[str]:
        text = "\n".join(shown(width))
        return {label for label in LEAST_IMPORTANT if label in text}

    found = [labels(width) for width in (60, 80, 100, 160)]
    for narrow, wide in pairwise(found):
        assert narrow <= wide
    assert found[0] < found[-1]
    assert "allocated" in found[-1]
