"""The simulated host order equals recordings of real FSDP1 and FSDP2 runs, event by event."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import program_of, read_recording, recorded_order, scenario_of, simulated_order


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "recording_path" in metafunc.fixturenames:
        directory = Path(metafunc.config.getoption("--golden-dir"))
        paths = sorted(directory.glob("*.json"))
        assert paths, f"--golden-dir {directory} holds no recordings"
        metafunc.parametrize("recording_path", paths, ids=lambda path: path.stem)


def test_simulated_order_equals_the_recording(recording_path: Path) -> None:
    recording = read_recording(recording_path)
    program = program_of(scenario_of(recording))
    for iteration in range(len(recording["iterations"])):
        assert simulated_order(program, iteration) == recorded_order(recording, iteration)
