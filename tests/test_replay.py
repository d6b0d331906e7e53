"""Replays of snapshots made by the allocator itself, with all that real ones may contain."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from allocator_programs import MIB, PROGRAMS, Op, Program, Runner, run_program
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.replay import COLUMNS, ReplayResult, SnapshotError, parse_snapshot, replay
from fsdpsim.replay.spans import Spans
from fsdpsim.replay.undo import undo


def traced(runner: Runner) -> bool:
    return any(event["action"] == "alloc" for event in runner.events)


@given(PROGRAMS)
def test_whole_traces_are_replayed_exactly(program: Program) -> None:
    runner = run_program(program)
    assume(traced(runner))
    (device,) = replay(runner.snapshot()).devices
    stats = runner.allocator.stats
    assert device.exact, device.mismatches
    assert device.replayed.reserved_peak == device.recorded.reserved_peak
    assert device.recorded.reserved_peak == stats.reserved_bytes.peak
    assert device.recorded.requested_peak == stats.requested_bytes.peak
    assert device.recorded.allocated_peak == stats.allocated_bytes.peak
    assert device.recorded.active_peak == device.replayed.active_peak == stats.active_bytes.peak


@given(PROGRAMS, st.data())
def test_truncated_traces_are_replayed_exactly(program: Program, data: st.DataObject) -> None:
    runner = run_program(program)
    assume(traced(runner))
    skip = data.draw(st.integers(0, len(runner.events) - 1), label="skip")
    snapshot = runner.snapshot(skip=skip)
    (device,) = replay(snapshot).devices
    assert device.exact, device.mismatches
    assert device.replayed.reserved_peak == device.recorded.reserved_peak
    assert device.replayed.active_peak == device.recorded.active_peak
