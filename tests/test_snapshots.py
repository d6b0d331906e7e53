"""Real CUDA memory snapshots, replayed from their initial state: every decision must agree."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsdpsim.replay import DeviceReplay, replay
from fsdpsim.unpickle import read_pickle

ROOT = Path(__file__).parents[1]
#: Where the snapshots lie beside the project; they may not be copied into it.
BESIDE = ROOT.parent / "shared" / "data" / "snapshots"


def snapshot_files(directory: Path | None) -> list[Path]:
    where = BESIDE if directory is None else directory
    if directory is not None and not where.is_dir():
        raise pytest.UsageError(f"--snapshot-dir {directory} is not a directory")
    return sorted([*where.glob("*.pickle"), *where.glob("*.pickle.gz")])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "snapshot" not in metafunc.fixturenames:
        return
    files = snapshot_files(metafunc.config.getoption("--snapshot-dir"))
    skip = pytest.mark.skip(reason=f"no snapshots in {BESIDE} or --snapshot-dir")
    params = [pytest.param(path, id=path.name) for path in files]
    metafunc.parametrize("snapshot", params or [pytest.param(None, marks=skip, id="none")])


@cache
def content(path: Path) -> dict[str, Any]:
    return read_pickle(path)


def check_exact(device: DeviceReplay) -> None:
    assert device.mismatches == ()
    assert device.final_blocks_equal
    for name in ("requested", "allocated", "active", "reserved"):
        peak = f"{name}_peak"
        assert getattr(device.replayed, peak) == getattr(device.recorded, peak), name
    assert device.replayed.final_reserved == device.recorded.final_reserved
    assert device.replayed.num_device_alloc == device.recorded.num_device_alloc
    assert device.replayed.num_device_free == device.recorded.num_device_free


def test_every_decision_agrees(snapshot: Path) -> None:
    result = replay(content(snapshot))
    for device in result.devices:
        check_exact(device)
        assert device.num_allocations > 0


@pytest.mark.parametrize("skipped", [0.2, 0.7])
def test_a_trace_that_lost_its_beginning_is_replayed_too(snapshot: Path, skipped: float) -> None:
    whole = content(snapshot)["device_traces"]
    shortened = [trace[int(skipped * len(trace)) :] for trace in whole]
    for device in replay(content(snapshot) | {"device_traces": shortened}).devices:
        check_exact(device)


def test_reserved_never_falls_below_what_was_asked_for(snapshot: Path) -> None:
    result = replay(content(snapshot), {"expandable_segments": True})
    for device in result.devices:
        assert device.what_if is not None
        if device.what_if.num_ooms == device.recorded.num_ooms == 0:
            assert device.what_if.requested_peak == device.recorded.requested_peak
        assert device.what_if.reserved_peak >= device.what_if.requested_peak
