"""How fast the allocator is, in CPU time, on the requests of the largest real snapshot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_snapshots import BESIDE, snapshot_files

from fsdpsim.allocator import Block, CachingAllocator, IdleDevice
from fsdpsim.replay import parse_snapshot
from fsdpsim.replay.recording import Event
from fsdpsim.unpickle import read_pickle

REPEATS = 20


def largest_trace(files: list[Path]) -> tuple[Event, ...]:
    traces = [rec.events for path in files for rec in parse_snapshot(read_pickle(path))]
    return max(traces, key=len)


def program(events: tuple[Event, ...]) -> list[tuple[int, int]]:
    """(number of the block, bytes to allocate or 0 to free); frees of older blocks are left out."""
    steps, live, count = [], dict[int, int](), 0
    for event in events:
        if event.action == "alloc":
            live[event.address] = count
            steps.append((count, event.size))
            count += 1
        elif event.action == "free_requested" and event.address in live:
            steps.append((live.pop(event.address), 0))
    return steps


def run(steps: list[tuple[int, int]]) -> float:
    allocator = CachingAllocator(capacity=1 << 40, total_memory=1 << 40, device=IdleDevice())
    malloc, free = allocator.malloc, allocator.free
    blocks: dict[int, Block] = {}
    start = time.process_time()
    for number, nbytes in steps:
        if nbytes:
            blocks[number] = malloc(nbytes, 0)
        else:
            free(blocks.pop(number))
    return time.process_time() - start


@pytest.mark.benchmark
def test_pairs_per_second(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    files = snapshot_files(pytestconfig.getoption("--snapshot-dir"))
    if not files:
        pytest.skip(f"no snapshots in {BESIDE} or --snapshot-dir")
    steps = program(largest_trace(files))
    pairs = sum(nbytes == 0 for _, nbytes in steps)
    seconds = sorted(run(steps) for _ in range(REPEATS))
    with capsys.disabled():
        best, median = pairs / seconds[0], pairs / seconds[REPEATS // 2]
        print(f"\n{pairs} malloc+free pairs: {best:,.0f} pairs/s at best, {median:,.0f} median")
    assert pairs > 0
