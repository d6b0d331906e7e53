"""Options that say where the data sets are, so that other sets can be checked; shared results."""

from __future__ import annotations

from pathlib import Path

import pytest
import reports

from fsdpsim.result import Result

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


@pytest.fixture(scope="session")
def textbook() -> Result:
    return reports.run("textbook_backward_prefetch")


@pytest.fixture(scope="session")
def large() -> Result:
    """At least ten thousand kernels and collectives."""
    result = reports.run("rate_limiter_hurts", "training.iterations=5")
    assert len(result.ops) > 10_000
    return result


@pytest.fixture(scope="session")
def small() -> Result:
    """A real FSDP1 step with bytes, streams, and frees that wait for events."""
    return reports.run("fsdp1_13b_64gpu")
