"""Options that say where the data sets are, so that other sets can be checked."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=DATA / "golden",
        metavar="DIR",
        help="recorded issue orders of real FSDP runs (*.json)",
    )
    parser.addoption(
        "--allocator-cases",
        type=Path,
        default=DATA / "allocator_cases.json",
        metavar="FILE",
        help="operation sequences of the caching allocator with the expected statistics",
    )
    parser.addoption(
        "--snapshot-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="real CUDA snapshots (*.pickle, *.pickle.gz); default: ../shared/data/snapshots",
    )
