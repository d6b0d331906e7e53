"""Memory as columns for the page: buffers, the order of their changes, and when each happens.

The page adds the buffers up itself: so it can show the owners of every byte at every moment, and
the curve on either clock, from one small table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fsdpsim.memory import CATEGORIES, Buffer, Sample
from fsdpsim.plots.curve import default_clock, first_sample, memory_curve
from fsdpsim.plots.view import host_starts, make_view
from fsdpsim.report.encode import Strings, Ticks, changes, scrub
from fsdpsim.result import Result


def memory_data(result: Result, strings: Strings, ticks: Ticks) -> Any:
    """Buffers in order of allocation, and memory samples: +n allocates buffer n-1, -n frees it.

    ``allocated`` is a sum over live buffers. ``requested`` says by how much more is requested than
    they hold (a freed block counts until the GPU has passed its events), ``active`` by how much
    more is active than allocated; both and ``reserved`` at the samples where that changes.
    ``first``: the number of each iteration's first sample.
    """
    samples = result.memory.samples
    sizes = block_sizes(samples)
    number = {id(buffer): i for i, buffer in enumerate(sizes)}
    return {
        "categories": list(CATEGORIES),
        "buffers": _buffers(sizes, strings, ticks),
        "events": [(1 if s.is_malloc else -1) * (number[id(s.buffer)] + 1) for s in samples],
        "host": ticks.column(s.time for s in samples),
        "gpu": ticks.column(gpu_times(result)),
        "clock": default_clock(make_view(result)),
        "first": [first_sample(result, i) for i in range(len(host_starts(result)))],
        "requested": changes(_requested_beside(samples)),
        "active": changes(s.active - s.allocated for s in samples),
        "reserved": changes(s.reserved for s in samples),
        "capacity": capacity(result),
        "oom": _oom(result, ticks),
    }


def block_sizes(samples: Sequence[Sample]) -> dict[Buffer, int]:
    """Each buffer's block (bytes): by how much its allocation raised the allocated level."""
    sizes: dict[Buffer, int] = {}
    allocated = 0
    for sample in samples:
        if sample.is_malloc:
            sizes[sample.buffer] = sample.allocated - allocated
        allocated = sample.allocated
    return sizes


def _requested_beside(samples: Sequence[Sample]) -> Iterator[int]:
    alive = 0
    for sample in samples:
        alive += sample.buffer.nbytes if sample.is_malloc else -sample.buffer.nbytes
        yield sample.requested - alive


def _buffers(sizes: dict[Buffer, int], strings: Strings, ticks: Ticks) -> dict[str, Any]:
    return {
        "name": [strings[buffer.name] for buffer in sizes],
        "unit": [strings[buffer.unit] for buffer in sizes],
        "phase": [strings[buffer.phase] for buffer in sizes],
        "category": [CATEGORIES.index(buffer.category) for buffer in sizes],
        "iteration": [buffer.iteration for buffer in sizes],
        "nbytes": [buffer.nbytes for buffer in sizes],
        "rounding": [size - buffer.nbytes for buffer, size in sizes.items()],
        "pending": _sparse(_pending(buffer, ticks) for buffer in sizes),
        "gather": _sparse(buffer.unsharded for buffer in sizes),
    }


def _sparse(values: Any) -> list[list[int]]:
    """(position, value) of those that are not None."""
    return [[i, value] for i, value in enumerate(values) if value is not None]


def _pending(buffer: Buffer, ticks: Ticks) -> int | None:
    """When the GPU passes what a freed buffer waits for."""
    ends = [op.end for op in buffer.pending if op.end is not None]
    return ticks(max(ends)) if ends else None


def gpu_times(result: Result) -> list[float]:
    """For each sample the time (seconds) at which the GPU runs the kernel that was issued next."""
    times = [sample.time for sample in result.memory.samples]
    if times:
        curve = memory_curve(make_view(result, iteration="all"), "gpu")
        numbers, first = np.unique(curve.sample, return_index=True)
        for number, entry in zip(numbers, first, strict=True):
            times[number] = float(curve.time[entry])
        times[len(numbers) :] = [times[len(numbers) - 1]] * (len(times) - len(numbers))
    return times


def capacity(result: Result) -> int | None:
    """Bytes that the allocator may take, where the scenario says what the device has."""
    if result.scenario.hardware is None:
        return None
    return result.memory.allocator.reserved.memory.capacity


def _oom(result: Result, ticks: Ticks) -> dict[str, Any] | None:
    oom = result.memory.oom
    if oom is None:
        return None
    return {
        "time": ticks(oom.time),
        "nbytes": oom.buffer.nbytes,
        "buffer": scrub(oom.buffer.name),
        "unit": scrub(oom.buffer.unit),
    }
