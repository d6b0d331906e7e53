"""Published and hand-worked operation sequences: every statistic after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from allocator_programs import ManualDevice

from fsdpsim.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryError,
)

#: key of ``expect`` -> key of ``memory_stats``
STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "active": "active_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "segments": "segment.all.current",
    "n_allocation": "allocation.all.current",
    "n_active": "active.all.current",
    "n_inactive_split": "inactive_split.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_active": "active_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "oversize_allocations": "oversize_allocations.current",
    "oversize_segments": "oversize_segments.current",
    "active_bytes_freed": "active_bytes.all.freed",
    "small_pool_reserved": "reserved_bytes.small_pool.current",
    "large_pool_reserved": "reserved_bytes.large_pool.current",
}


class CaseRunner:
    """Applies the operations of one case."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.device = ManualDevice()
        self.allocator = CachingAllocator(
            capacity=case["capacity"],
            total_memory=case["total_memory"],
            settings=settings_of(case["config"]),
            device=self.device,
        )
        self.blocks: dict[str, Block] = {}

    def apply(self, op: dict[str, Any]) -> None:
        getattr(self, op["op"])(op)

    def alloc(self, op: dict[str, Any]) -> None:
        block = self.allocator.malloc_cached(op["size"], op["stream"])
        try:
            if block is None:
                block = self.device.run(self.allocator.grow(op["size"], op["stream"]))
        except OutOfMemoryError as error:
            assert op["result"] == "oom"
            check_report(error, op, self.allocator)
            return
        assert op["result"] == "ok"
        assert block is not None
        self.blocks[op["id"]] = block
        assert placement(block) == op["placement"]

    def free(self, op: dict[str, Any]) -> None:
        self.allocator.free(self.blocks.pop(op["id"]))

    def record_stream(self, op: dict[str, Any]) -> None:
        self.allocator.record_stream(self.blocks[op["id"]], op["stream"])

    def work(self, op: dict[str, Any]) -> None:
        self.device.enqueued[op["stream"]] += 1

    def stream_done(self, op: dict[str, Any]) -> None:
        self.device.finish(op["stream"], self.device.enqueued[op["stream"]])

    def empty_cache(self, op: dict[str, Any]) -> None:
        self.device.run(self.allocator.empty_cache_steps())

    def set_config(self, op: dict[str, Any]) -> None:
        self.allocator.configure(settings_of(op["config"]))

    def reset_peak(self, op: dict[str, Any]) -> None:
        self.allocator.reset_peak_memory_stats()


def settings_of(config: dict[str, Any]) -> AllocatorSettings:
    config = dict(config)
    if "memory_fraction" in config:
        config["per_process_memory_fraction"] = config.pop("memory_fraction")
    return AllocatorSettings.validated(config)


def placement(block: Block) -> dict[str, int] | None:
    if block.size == 0:
        return None
    segment = block.segment
    return {
        "segment": segment.index,
        "offset": block.address - segment.address,
        "block_size": block.size,
    }


def check_report(error: OutOfMemoryError, op: dict[str, Any], allocator: CachingAllocator) -> None:
    report = error.report
    assert report.requested == op["size"]
    useless = report.this_stream + report.other_streams + report.other_pool
    assert report.allocated + report.pending + useless == report.reserved
    assert report.reserved == allocator.stats.reserved_bytes.current


def check_statistics(allocator: CachingAllocator, expect: dict[str, Any], where: str) -> None:
    stats = allocator.memory_stats()
    actual = {key: stats[STATISTICS.get(key, key)] for key in expect}
    wanted = {key: actual[key] if value is None else value for key, value in expect.items()}
    assert actual == wanted, where


def read_cases(path: Path) -> list[dict[str, Any]]:
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert cases, f"{path} holds no cases"
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = read_cases(metafunc.config.getoption("--allocator-cases"))
    metafunc.parametrize("case", [pytest.param(case, id=case["id"]) for case in cases])


def test_case(case: dict[str, Any]) -> None:
    runner = CaseRunner(case)
    for number, op in enumerate(case["ops"]):
        runner.apply(op)
        if op.get("expect"):
            check_statistics(runner.allocator, op["expect"], f"after op {number}: {op}")
    check_statistics(runner.allocator, case.get("final") or {}, "at the end")
