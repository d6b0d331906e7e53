"""Laws that hold for every program, whatever the settings."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from allocator_programs import CAPACITIES, MIB, OPS, PROGRAMS, Op, Program, Runner, run_program
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpsim.allocator import AllocatorSettings, CachingAllocator, IdleDevice, OutOfMemoryError
from fsdpsim.allocator.blocks import FREE, LIVE, PENDING, UNMAPPED, Block

STATISTICS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "active",
    "active_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "reserved_bytes",
    "segment",
)


def recount(allocator: CachingAllocator) -> dict[str, int]:
    """Every current statistic, from the blocks alone."""
    counts: dict[str, int] = defaultdict(int)
    for segment in allocator.segments:
        pool = "small_pool" if segment.free_list.pool.is_small else "large_pool"
        values: dict[str, int] = defaultdict(int)
        values["segment"] = not segment.expandable
        for block in segment.blocks():
            values["reserved_bytes"] += block.size * (block.state != UNMAPPED)
            if block.state in (LIVE, PENDING):
                values["active"] += 1
                values["active_bytes"] += block.size
                values["requested_bytes"] += block.requested_size
            if block.state == LIVE:
                values["allocation"] += 1
                values["allocated_bytes"] += block.size
            if block.state == FREE and block.is_split and not segment.expandable:
                values["inactive_split"] += 1
                values["inactive_split_bytes"] += block.size
        for name, value in values.items():
            counts[f"{name}.{pool}.current"] += value
            counts[f"{name}.all.current"] += value
    return counts


def check_statistics(allocator: CachingAllocator) -> None:
    stats, counts = allocator.memory_stats(), recount(allocator)
    for name in STATISTICS:
        for pool in ("all", "small_pool", "large_pool"):
            key = f"{name}.{pool}"
            assert stats[f"{key}.current"] == counts[f"{key}.current"], key
            assert stats[f"{key}.peak"] >= stats[f"{key}.current"]
            assert stats[f"{key}.allocated"] - stats[f"{key}.freed"] == stats[f"{key}.current"]
    current = {name: stats[f"{name}.all.current"] for name in STATISTICS}
    assert current["requested_bytes"] <= current["active_bytes"] <= current["reserved_bytes"]
    assert current["allocated_bytes"] <= current["active_bytes"]
    levels = allocator.stats.levels
    assert levels.requested == current["requested_bytes"]
    assert levels.allocated == current["allocated_bytes"]
    assert levels.allocated + levels.pending == current["active_bytes"]
    assert levels.reserved == current["reserved_bytes"]


def check_tiling(allocator: CachingAllocator) -> None:
    """Blocks cover each segment exactly once; free neighbours are merged."""
    end = 0
    for segment in allocator.segments:
        assert segment.address >= end
        position, previous = segment.address, None
        for block in segment.blocks():
            assert block.address == position
            assert block.size > 0
            assert block.size % 512 == 0
            assert block.prev is previous
            if previous is not None:
                assert not (block.state == previous.state and block.state in (FREE, UNMAPPED))
            position, previous = block.address + block.size, block
        assert position == segment.address + segment.size
        end = position


def check_free_lists(allocator: CachingAllocator) -> None:
    """Each free block is in the list of its pool and stream, in order; nothing else is."""
    listed: list[Block] = []
    for pool in (allocator.small, allocator.large):
        for free_list in pool.free_lists.values():
            order = [(block.size, block.address) for block in free_list.blocks]
            assert order == sorted(order)
            holes = [block.address for block in free_list.unmapped]
            assert holes == sorted(holes)
            assert all(block.segment.free_list is free_list for block in free_list.blocks)
            listed += free_list.blocks + free_list.unmapped
    states = (FREE, UNMAPPED)
    expected = [b for s in allocator.segments for b in s.blocks() if b.state in states]
    assert {id(block) for block in listed} == {id(block) for block in expected}
    assert len(listed) == len(expected)


def check(runner: Runner) -> None:
    check_statistics(runner.allocator)
    check_tiling(runner.allocator)
    check_free_lists(runner.allocator)
    spans = sorted((block.address, block.address + block.size) for block in runner.live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert runner.allocator.reserved.memory.used <= runner.program.capacity


@settings(max_examples=50)
@given(PROGRAMS)
def test_laws_hold_after_every_operation(program: Program) -> None:
    runner = Runner(program)
    for op in program.ops:
        runner.apply(op)
        check(runner)


@settings(max_examples=50)
@given(PROGRAMS)
def test_peaks_are_the_highest_values(program: Program) -> None:
    runner = Runner(program)
    names = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
    peaks = dict.fromkeys(names, 0)
    for op in program.ops:
        runner.apply(op)
        for name in names:
            peaks[name] = max(peaks[name], getattr(runner.allocator.stats, name).current)
    stats = runner.allocator.stats
    assert peaks["requested_bytes"] == stats.requested_bytes.peak
    assert peaks["allocated_bytes"] == stats.allocated_bytes.peak
    assert peaks["active_bytes"] <= stats.active_bytes.peak
    assert peaks["reserved_bytes"] <= stats.reserved_bytes.peak


@settings(max_examples=50)
@given(PROGRAMS)
def test_freeing_everything_and_the_cache_leaves_nothing(program: Program) -> None:
    runner = run_program(program)
    while runner.live:
        runner.free(Op("free", 0, 0))
    runner.empty_cache(Op("empty_cache", 0, 0))
    check(runner)
    stats = runner.allocator.memory_stats()
    assert not any(stats[f"{name}.all.current"] for name in STATISTICS)
    assert runner.allocator.memory_snapshot() == []
    assert runner.allocator.reserved.memory.used == 0


@settings(max_examples=50)
@given(PROGRAMS)
def test_reading_statistics_changes_nothing(program: Program) -> None:
    watched, unwatched = Runner(program), Runner(program)
    for op in program.ops:
        watched.apply(op)
        watched.allocator.memory_stats()
        watched.allocator.is_cached(max(op.number, 1), op.stream)
        unwatched.apply(op)
    assert watched.allocator.memory_stats() == unwatched.allocator.memory_stats()
    assert watched.events == unwatched.events


@settings(max_examples=50)
@given(PROGRAMS)
def test_is_cached_foretells_the_search(program: Program) -> None:
    runner = Runner(program)
    for op in program.ops:
        if op.name == "malloc":
            runner.allocator.process_events()
            cached = runner.allocator.is_cached(op.number, op.stream)
            before = runner.allocator.reserved.num_device_alloc
            runner.apply(op)
            if cached:
                assert runner.allocator.reserved.num_device_alloc == before
        else:
            runner.apply(op)


LIMITED = st.builds(
    lambda gc, fraction, capacity, ops: Program(
        AllocatorSettings(garbage_collection_threshold=gc, per_process_memory_fraction=fraction),
        capacity,
        tuple(ops),
    ),
    st.sampled_from([None, 0.3, 0.8]),
    st.sampled_from([0.5, 0.9]),
    CAPACITIES,
    st.lists(OPS, min_size=1, max_size=40),
)


@settings(max_examples=50)
@given(LIMITED)
def test_reserved_stays_within_the_memory_fraction(program: Program) -> None:
    runner = Runner(program, total_memory=program.capacity)
    limit = program.settings.memory_limit(program.capacity)
    assert limit is not None
    for op in program.ops:
        runner.apply(op)
        check(runner)
        assert runner.allocator.stats.reserved_bytes.current <= limit


@settings(max_examples=50)
@given(PROGRAMS, st.sampled_from([True, False]), st.sampled_from([None, 20, 30]))
def test_laws_survive_a_change_of_settings(
    program: Program, expandable: bool, max_split: int | None
) -> None:
    runner = run_program(program)
    runner.allocator.configure(
        AllocatorSettings(expandable_segments=expandable, max_split_size_mb=max_split)
    )
    for op in program.ops:
        runner.apply(op)
        check(runner)


def idle_allocator(capacity: int = 1 << 40, **settings: object) -> CachingAllocator:
    return CachingAllocator(
        capacity=capacity,
        total_memory=capacity,
        settings=AllocatorSettings.validated(settings),
        device=IdleDevice(),
    )


def test_zero_bytes_never_reach_the_allocator() -> None:
    allocator = idle_allocator()
    block = allocator.malloc(0, 0)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.free(block)
    assert (block.address, block.size) == (0, 0)
    assert not any(allocator.memory_stats()[key] for key in ("num_device_alloc", "num_ooms"))


@pytest.mark.parametrize("nbytes", [-1, 1 << 60])
def test_impossible_sizes(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        idle_allocator().malloc(nbytes, 0)


def test_a_block_is_freed_once() -> None:
    allocator = idle_allocator()
    block = allocator.malloc(1, 0)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.record_stream(block, 1)


def test_the_report_of_an_oom_accounts_for_every_reserved_byte() -> None:
    allocator = idle_allocator(59 * MIB)
    kept = [allocator.malloc(5 * MIB, stream) for stream in (0, 1)]
    allocator.malloc(1, 0)
    with pytest.raises(OutOfMemoryError, match=r"18\.00 MiB .* on stream 0") as caught:
        allocator.malloc(16 * MIB + 1, 0)
    report = caught.value.report
    assert len(kept) == 2
    assert (report.requested, report.rounded) == (16 * MIB + 1, 16 * MIB + 512)
    assert report.segment_size == 18 * MIB
    assert report.this_stream == 15 * MIB
    assert report.other_streams == 15 * MIB
    assert report.other_pool == 2 * MIB - 512
    assert report.pending == 0
    assert report.inactive_split == 32 * MIB - 512
    assert report.reserved == 42 * MIB


def test_throw_on_cudamalloc_oom_rejects_without_a_retry() -> None:
    allocator = idle_allocator(
        100 * MIB, per_process_memory_fraction=0.5, throw_on_cudamalloc_oom=True
    )
    allocator.free(allocator.malloc(40 * MIB, 0))
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(45 * MIB, 0)
    stats = allocator.memory_stats()
    assert caught.value.report.rejected
    assert stats["num_oom_rejections"] == 1
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (0, 0)
    assert stats["reserved_bytes.all.current"] == 40 * MIB


def test_splitting_a_cached_oversize_segment_is_refused() -> None:
    allocator = idle_allocator(max_split_size_mb=20)
    allocator.free(allocator.malloc(40 * MIB, 0))
    allocator.configure(AllocatorSettings(max_split_size_mb=20, expandable_segments=True))
    with pytest.raises(ValueError, match="expandable_segments was turned on together"):
        allocator.malloc(30 * MIB, 0)
    check_tiling(allocator)
    check_free_lists(allocator)


def test_accumulated_statistics_restart() -> None:
    allocator = idle_allocator()
    allocator.free(allocator.malloc(MIB, 0))
    kept = allocator.malloc(2 * MIB, 0)
    allocator.reset_accumulated_memory_stats()
    allocator.free(kept)
    stats = allocator.memory_stats()
    assert stats["allocation.all.allocated"] == 0
    assert stats["active_bytes.all.freed"] == 2 * MIB
    assert stats["num_device_alloc"] == 0
