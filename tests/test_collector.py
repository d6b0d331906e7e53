"""A simulation keeps Python's collector away, and leaves it nothing to do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from fsdp_scenarios import tables

import fsdpsim
from fsdpsim.collector import paused_collector


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    with paused_collector():
        yield


@pytest.mark.parametrize("runtime", ["textbook", "ddp", "fsdp1", "fsdp2", "zero2"])
@pytest.mark.usefixtures("without_collector")
def test_a_dropped_result_frees_its_program_at_once(runtime: str) -> None:
    result = fsdpsim.simulate(fsdpsim.load(tables(runtime, 3, root=False, world=4)))
    assert result.step_time > 0 and result.memory.samples
    left = weakref.ref(result.program)
    del result
    assert left() is None


def test_the_collector_is_as_it_was_before() -> None:
    assert gc.isenabled()
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_inside_turns_the_collector_on_again() -> None:
    with pytest.raises(ValueError), paused_collector():
        raise ValueError
    assert gc.isenabled()
