"""The engine's rules one at a time, on programs small enough to work out by hand. Seconds."""

from __future__ import annotations

import pytest

from fsdpsim import engine
from fsdpsim.engine import Host, HostWait, HostWork, Op, Process, Step
from fsdpsim.program import Mark


def spans(*steps: Step) -> list[tuple[float | None, float | None]]:
    """(start, end) of each op."""
    engine.run(steps)
    return [(step.start, step.end) for step in steps if isinstance(step, Op)]


def test_an_empty_program_is_over_at_once() -> None:
    assert spans() == []


def test_a_stream_runs_its_ops_one_after_another() -> None:
    assert spans(Op("a", "compute", 2.0), Op("b", "compute", 3.0)) == [(0.0, 2.0), (2.0, 5.0)]


def test_streams_run_side_by_side() -> None:
    assert spans(Op("a", "compute", 2.0), Op("b", "copy", 3.0)) == [(0.0, 2.0), (0.0, 3.0)]


def test_an_op_waits_for_all_its_dependencies() -> None:
    a, b = Op("a", "compute", 2.0), Op("b", "copy", 3.0)
    c = Op("c", "other", 1.0, deps=(a, b))
    assert spans(a, b, c)[2] == (3.0, 4.0)


def test_a_blocked_head_blocks_its_stream() -> None:
    """Streams are FIFOs: what could run waits behind what cannot."""
    a = Op("a", "compute", 2.0)
    blocked = Op("blocked", "copy", 1.0, deps=(a,))
    assert spans(a, blocked, Op("ready", "copy", 1.0))[2] == (3.0, 4.0)


def test_a_communicator_is_a_fifo_across_streams() -> None:
    """Both streams are idle, but one communicator does one thing at a time, in issue order."""
    gather = Op("all_gather", "unshard", 2.0, communicator="shard")
    scatter = Op("reduce_scatter", "post_backward", 1.0, communicator="shard")
    assert spans(gather, scatter) == [(0.0, 2.0), (2.0, 3.0)]


def test_a_communicator_keeps_issue_order_even_if_a_later_collective_is_ready_first() -> None:
    slow = Op("slow", "compute", 5.0)
    first = Op("first", "unshard", 1.0, communicator="shard", deps=(slow,))
    second = Op("second", "post_backward", 1.0, communicator="shard")
    assert spans(slow, first, second)[1:] == [(5.0, 6.0), (6.0, 7.0)]


def test_communicators_are_independent() -> None:
    a = Op("a", "unshard", 2.0, communicator="shard")
    b = Op("b", "all_reduce", 2.0, communicator="replicate")
    assert spans(a, b) == [(0.0, 2.0), (0.0, 2.0)]


def test_launch_costs_are_paid_before_each_op_and_the_host_runs_ahead() -> None:
    ops = [Op(name, "compute", 4.0, launch_seconds=1.0) for name in "abc"]
    assert spans(*ops) == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]
    assert [op.issued for op in ops] == [1.0, 2.0, 3.0]


def test_a_slow_host_starves_the_stream() -> None:
    assert spans(*(Op(n, "compute", 1.0, launch_seconds=3.0) for n in "ab")) == [(3, 4), (6, 7)]


def test_a_host_wait_stops_the_issue_until_its_ops_have_ended() -> None:
    a, b = Op("a", "compute", 5.0), Op("b", "copy", 2.0)
    wait = HostWait((a, b), cause="rate_limiter")
    c = Op("c", "other", 1.0)
    assert spans(a, b, wait, c)[2] == (5.0, 6.0)
    assert (wait.start, wait.end) == (0.0, 5.0)
    assert c.issued == 5.0


def test_a_wait_for_what_has_ended_takes_no_time() -> None:
    a = Op("a", "compute", 1.0)
    work, wait = HostWork(3.0, "hook", "", 0), HostWait((a,), cause="rate_limiter")
    engine.run([a, work, wait])
    assert (work.start, work.end) == (0.0, 3.0)
    assert (wait.start, wait.end) == (3.0, 3.0)


def test_an_op_of_no_duration_still_keeps_its_place() -> None:
    a, b = Op("a", "compute", 2.0), Op("b", "compute", 0.0)
    c = Op("c", "copy", 1.0, deps=(b,))
    assert spans(a, b, c)[1:] == [(2.0, 2.0), (2.0, 3.0)]


def test_actions_see_the_host_time() -> None:
    mark = Mark("pre_forward", "unit.0", "forward", 0, {})
    engine.run([Op("a", "compute", 9.0, launch_seconds=2.0), mark])
    assert mark.time == 2.0


def test_the_host_waits_for_the_process_of_an_action() -> None:
    class Sleep:
        def act(self, host: Host) -> Process:
            host.arm(1.5)
            yield

    after = Op("after", "compute", 1.0)
    assert spans(Sleep(), after) == [(1.5, 2.5)]


def test_a_dependency_that_is_never_issued_is_an_error_that_names_the_op() -> None:
    never = Op("never", "copy", 1.0)
    with pytest.raises(RuntimeError, match=r"Op\('stuck' on compute.*never issued"):
        engine.run([Op("stuck", "compute", 1.0, deps=(never,))])


def test_a_host_that_waits_for_what_is_never_issued_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the host waits for an op that was never issued"):
        engine.run([HostWait((Op("never", "copy", 1.0),), cause="rate_limiter")])
