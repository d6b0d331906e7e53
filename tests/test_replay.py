"""Replays of snapshots made by the allocator itself, with all that real ones may contain."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from allocator_programs import MIB, PROGRAMS, Op, Program, Runner, run_program
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.replay import COLUMNS, replay
from fsdpsim.replay.spans import Spans

UNLIMITED = 1 << 40


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
    (device,) = replay(runner.snapshot(skip=skip)).devices
    assert device.exact, device.mismatches
    assert device.replayed.reserved_peak == device.recorded.reserved_peak
    assert device.replayed.active_peak == device.recorded.active_peak


@given(PROGRAMS)
def test_the_recorded_settings_and_capacity_repeat_what_happened(program: Program) -> None:
    """Without deferred frees a whole trace says everything but the retries; these must recur."""
    ops = [op for op in program.ops if op.name in ("malloc", "free")]
    runner = run_program(Program(program.settings, program.capacity, tuple(ops)))
    assume(traced(runner))
    result = replay(runner.snapshot(), {}, capacity=program.capacity, total_memory=UNLIMITED)
    (device,) = result.devices
    assert device.what_if is not None
    assert device.what_if.reserved_peak == device.recorded.reserved_peak
    assert device.what_if.num_ooms == device.recorded.num_ooms
    assert device.what_if.num_alloc_retries == runner.allocator.num_alloc_retries


def mallocs(*sizes: int, stream: int = 0) -> list[Op]:
    return [Op("malloc", size * MIB, stream) for size in sizes]


FREE = Op("free", 0, 0)


def program_of(*ops: Op, capacity: int = UNLIMITED, **options: Any) -> Runner:
    return run_program(Program(AllocatorSettings.validated(options), capacity, ops))


def test_expandable_segments_tile_ragged_sizes() -> None:
    """30, 30, free both, 50, 40 MiB: 150 MiB in plain segments, 100 in an expandable range."""
    runner = program_of(*mallocs(30, 30), FREE, FREE, *mallocs(50, 40))
    (device,) = replay(runner.snapshot(), {"expandable_segments": True}).devices
    assert device.what_if is not None
    assert device.fresh is not None
    assert device.recorded.reserved_peak == device.fresh.reserved_peak == 150 * MIB
    assert device.what_if.reserved_peak == 100 * MIB
    assert device.what_if.fragmentation == pytest.approx(0.1)
    assert device.recorded.fragmentation == pytest.approx(0.4)


def test_an_oom_tells_the_capacity() -> None:
    """40, 40, free the first, 50, 30 MiB on 100 MiB fails; pages of a range would have held."""
    runner = program_of(*mallocs(40, 40), FREE, *mallocs(50, 30), capacity=100 * MIB)
    assert runner.allocator.num_ooms == 1
    (device,) = replay(runner.snapshot(), {"expandable_segments": True}).devices
    assert device.exact
    assert device.capacity == device.recorded.oom_capacity == 100 * MIB
    assert device.fresh is not None
    assert (device.fresh.num_ooms, device.fresh.num_alloc_retries) == (1, 2)
    assert any("capacity of 104857600 bytes taken from the last OOM" in n for n in device.notes)


def test_a_smaller_device_runs_out() -> None:
    runner = program_of(*mallocs(40, 40))
    (device,) = replay(runner.snapshot(), {}, capacity=60 * MIB).devices
    assert device.what_if is not None
    assert device.what_if.num_ooms == 1
    assert device.what_if.reserved_peak == 40 * MIB
    events = runner.events
    assert device.what_if.first_oom is not None
    assert events[device.what_if.first_oom] == events[-1]


def test_a_retry_is_left_to_the_allocator_when_the_capacity_is_known() -> None:
    runner = program_of(*mallocs(40, 40), FREE, *mallocs(50), capacity=100 * MIB)
    snapshot = runner.snapshot()
    unknown = replay(snapshot, {}).devices[0].what_if
    known = replay(snapshot, {}, capacity=100 * MIB).devices[0].what_if
    larger = replay(snapshot, {}, capacity=1000 * MIB).devices[0].what_if
    assert unknown is not None
    assert known is not None
    assert larger is not None
    assert (unknown.num_alloc_retries, unknown.reserved_peak) == (0, 90 * MIB)
    assert (known.num_alloc_retries, known.reserved_peak) == (1, 90 * MIB)
    assert (larger.num_alloc_retries, larger.reserved_peak) == (0, 90 * MIB)


def two_devices() -> dict[str, Any]:
    first, second = program_of(*mallocs(30, 5)).snapshot(), program_of(*mallocs(7)).snapshot()
    for segment in second["segments"]:
        segment["device"] = 2
    return first | {
        "segments": first["segments"] + second["segments"],
        "device_traces": [first["device_traces"][0], [], second["device_traces"][0]],
    }


def test_devices_are_replayed_one_by_one() -> None:
    devices = replay(two_devices()).devices
    assert [device.device for device in devices] == [0, 2]
    assert all(device.exact for device in devices)
    assert [device.recorded.reserved_peak for device in devices] == [50 * MIB, 20 * MIB]


def test_private_pools_are_left_out() -> None:
    snapshot = program_of(*mallocs(30, 5)).snapshot()
    base = snapshot["segments"][1]["address"]
    snapshot["segments"][1]["segment_pool_id"] = (0, 7)
    for event in snapshot["device_traces"][0]:
        event["pool_id"] = (0, 7) if event["addr"] == base else (0, 0)
    (device,) = replay(snapshot).devices
    assert device.exact
    assert device.recorded.reserved_peak == 30 * MIB
    assert "private pools" in device.notes[0]


def test_a_trace_that_begins_inside_a_request() -> None:
    """The segment is not the cache's choice: blocks of 20 MiB are oversize here."""
    runner = program_of(*mallocs(2), max_split_size_mb=20)
    (device,) = replay(runner.snapshot(skip=1)).devices
    assert device.exact
    assert any("in the middle of a request" in note for note in device.notes)


def test_a_changed_placement_is_found() -> None:
    runner = program_of(*mallocs(4, 4, 4), FREE, FREE, *mallocs(4))
    snapshot = runner.snapshot()
    first, second = (block["address"] for block in snapshot["segments"][0]["blocks"][:2])
    final = snapshot["device_traces"][0][-1]
    assert final["addr"] == first
    final["addr"] = second
    blocks = snapshot["segments"][0]["blocks"]
    blocks[0]["state"], blocks[1]["state"] = "inactive", "active_allocated"
    with pytest.raises(ValueError, match="contradicts the memory at that time"):
        replay(snapshot)


def test_a_foreign_decision_is_reported() -> None:
    """A segment was opened although the cache would have served the request."""
    runner = program_of(*mallocs(30), FREE, *mallocs(31))
    snapshot = copy.deepcopy(runner.snapshot())
    for event in snapshot["device_traces"][0][-2:]:
        event["size"] -= event["action"] == "alloc" and 2 * MIB
    snapshot["segments"][1]["blocks"][0]["requested_size"] -= 2 * MIB
    result = replay(snapshot)
    assert not result.exact
    assert result.devices[0].mismatches[0].event == 5
    assert result.to_dict()["devices"][0]["num_mismatches"] > 0


def test_result_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(gzip.compress(pickle.dumps(two_devices())))
    result = replay(path, {"max_split_size_mb": 64})
    rows = result.rows()
    assert json.loads(json.dumps(result.to_dict()))["exact"] is True
    assert all(tuple(row) == COLUMNS for row in rows)
    assert [row["run"] for row in rows[:4]] == [
        "recorded",
        "replayed",
        "replayed, nothing cached at the start",
        "with the new settings",
    ]
    assert len(rows) == 8
    assert any("capacity" in note for note in result.notes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": None}, "segments is not a list"),
        ({"device_traces": []}, "no trace to replay"),
        ({"device_traces": [[], []]}, "no trace to replay"),
        ({"device_traces": [[{"action": "alloc"}]]}, r"device_traces\[0\]\[0\]: 'addr' is None"),
        ({"allocator_settings": {"max_split_size": MIB}}, "max_split_size_mb must be at least"),
        ({"segments": [{"device": 0}]}, r"segments\[0\]: 'address' is None"),
        ({"segments": []}, "does not lead to the final segments"),
    ],
)
def test_bad_snapshots(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(pickle.dumps(program_of(*mallocs(3)).snapshot() | change))
    with pytest.raises(ValueError, match=message) as caught:
        replay(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_split_size": 20}, "did you mean 'max_split_size_mb'"),
        ({"max_split_size_mb": 10}, "must be at least large_segment_size_mb"),
        ({"expandable_segments": "yes"}, "expandable_segments"),
    ],
)
def test_bad_settings(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(program_of(*mallocs(3)).snapshot(), overrides)


def test_not_a_snapshot() -> None:
    with pytest.raises(ValueError, match="not a torch memory snapshot"):
        replay({"traceEvents": []})
    with pytest.raises(ValueError, match="capacity must be positive"):
        replay(program_of(*mallocs(3)).snapshot(), capacity=0)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in inner:
        if isinstance(child, (dict, list)):
            yield from paths(child, (*path, key))
        else:
            yield (*path, key)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(PROGRAMS, st.data())
def test_a_damaged_snapshot_gives_an_answer_or_one_line(
    program: Program, data: st.DataObject
) -> None:
    runner = run_program(program)
    assume(traced(runner))
    snapshot = copy.deepcopy(runner.snapshot())
    *path, last = data.draw(st.sampled_from(list(paths(snapshot))))
    place: Any = snapshot
    for key in path:
        place = place[key]
    junk = st.none() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({})
    place[last] = data.draw(junk)
    try:
        replay(snapshot)
    except ValueError as error:
        assert "\n" not in str(error)


SPAN = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.lists(st.tuples(st.booleans(), SPAN)))
def test_spans_are_sets_of_addresses(changes: list[tuple[bool, tuple[int, int]]]) -> None:
    spans, addresses = Spans(), set[int]()
    for add, (start, end) in changes:
        if add:
            spans.add(start, end)
            addresses |= set(range(start, end))
        elif spans.remove(start, end):
            assert addresses >= set(range(start, end))
            addresses -= set(range(start, end))
        else:
            assert not addresses >= set(range(start, end))
        held = list(spans)
        assert {a for start, end in held for a in range(start, end)} == addresses
        assert all(end < start for (_, end), (start, _) in pairwise(held))
        for address in range(40):
            assert (spans.find(address) is not None) == (address in addresses)
