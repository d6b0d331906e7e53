"""The textbook runtime gives the lectures' numbers, down to the start of every op.

The charts' spans were worked out by hand from start = max(issued, stream free, communicator free,
dependencies done) and agree with the drawings in the lecture, where half a second is a character.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpsim.result import Result
from fsdpsim.scenario import load
from fsdpsim.simulate import simulate

SCENARIOS = Path(__file__).parents[1] / "scenarios"
LETTERS = {"forward": "F", "backward": "B", "all_gather": "A", "reduce_scatter": "R"}

Span = tuple[str, float, float]


def spans(result: Result, kinds: str = "FBAR") -> list[Span]:
    """("B2", start, end) of each op in issue order, with the letters of the lecture."""
    return [
        (LETTERS[op.kind] + op.unit.removeprefix("unit."), op.start, op.end)
        for op in result.ops
        if LETTERS[op.kind] in kinds
    ]


def starts(result: Result, kinds: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, start, _ in spans(result, kinds):
        found.setdefault(name, []).append(start)
    return found


def run_file(name: str, *overrides: str) -> Result:
    return simulate(load(SCENARIOS / f"{name}.toml", overrides))


def run_units(units: int, workload: dict[str, Any], **fsdp: Any) -> Result:
    tables = {"workload": {"units": units, **workload}, "fsdp": {"runtime": "textbook", **fsdp}}
    return simulate(load(tables))


# ---- four units: forward 2, backward 4, collectives 1.5


FORWARD = [("F0", 1.5, 3.5), ("F1", 3.5, 5.5), ("F2", 5.5, 7.5), ("F3", 7.5, 9.5)]
GATHERS = [("A0", 0.0, 1.5), ("A1", 1.5, 3.0), ("A2", 3.5, 5.0), ("A3", 5.5, 7.0)]


def test_no_overlap() -> None:
    result = run_file("textbook_no_overlap")
    assert spans(result) == [
        ("A0", 0.0, 1.5),
        ("F0", 1.5, 3.5),
        ("A1", 3.5, 5.0),
        ("F1", 5.0, 7.0),
        ("A2", 7.0, 8.5),
        ("F2", 8.5, 10.5),
        ("A3", 10.5, 12.0),
        ("F3", 12.0, 14.0),
        ("B3", 14.0, 18.0),
        ("R3", 18.0, 19.5),
        ("A2", 19.5, 21.0),
        ("B2", 21.0, 25.0),
        ("R2", 25.0, 26.5),
        ("A1", 26.5, 28.0),
        ("B1", 28.0, 32.0),
        ("R1", 32.0, 33.5),
        ("A0", 33.5, 35.0),
        ("B0", 35.0, 39.0),
        ("R0", 39.0, 40.5),
    ]
    assert result.step_time == 40.5
    assert result.compute_time == 24.0
    assert result.exposed_communication == 16.5


def test_overlap() -> None:
    result = run_file("textbook_overlap")
    assert spans(result, "F") == FORWARD
    assert spans(result, "B") == [
        ("B3", 9.5, 13.5),
        ("B2", 16.5, 20.5),
        ("B1", 23.5, 27.5),
        ("B0", 30.5, 34.5),
    ]
    assert spans(result, "AR") == [
        *GATHERS,
        ("R3", 13.5, 15.0),
        ("A2", 15.0, 16.5),
        ("R2", 20.5, 22.0),
        ("A1", 22.0, 23.5),
        ("R1", 27.5, 29.0),
        ("A0", 29.0, 30.5),
        ("R0", 34.5, 36.0),
    ]
    assert result.step_time == 36.0
    assert result.compute_time == 24.0
    assert result.exposed_communication == 12.0


BACKWARD_BACK_TO_BACK = [
    ("B3", 9.5, 13.5),
    ("B2", 13.5, 17.5),
    ("B1", 17.5, 21.5),
    ("B0", 21.5, 25.5),
]
AFTER_B3 = [
    ("R3", 13.5, 15.0),
    ("A1", 15.0, 16.5),
    ("R2", 17.5, 19.0),
    ("A0", 19.0, 20.5),
    ("R1", 21.5, 23.0),
    ("R0", 25.5, 27.0),
]


def test_overlap_and_backward_prefetch() -> None:
    result = run_file("textbook_backward_prefetch")
    assert spans(result, "F") == FORWARD
    assert spans(result, "B") == BACKWARD_BACK_TO_BACK
    assert spans(result, "AR") == [*GATHERS, ("A2", 7.5, 9.0), *AFTER_B3]
    assert result.step_time == 27.0
    assert result.compute_time == 24.0
    assert result.exposed_communication == 3.0


def test_the_limiter_holds_back_the_host() -> None:
    """A2 for backward is issued when F2 has ended; A1 when B3 has, and queues behind R3."""
    result = run_file("textbook_backward_prefetch")
    gathers = [op for op in result.ops if op.phase == "backward" and op.kind == "all_gather"]
    assert [(op.unit, op.issued, op.start) for op in gathers] == [
        ("unit.2", 7.5, 7.5),
        ("unit.1", 13.5, 15.0),
        ("unit.0", 17.5, 19.0),
    ]


@pytest.mark.parametrize(
    ("limit", "step_time", "most"),
    [("false", 27.0, 7), ("3", 27.0, 3), ("2", 27.0, 2), ("1", 40.5, 1)],
)
def test_limits_with_prefetch(limit: str, step_time: float, most: int) -> None:
    """Without a limit all seven gathers are alive at once: four for forward, three for backward."""
    result = run_file("textbook_backward_prefetch", f"fsdp.limit_all_gathers={limit}")
    assert result.step_time == step_time
    assert result.max_unsharded_units == most


def test_without_a_limit_everything_is_issued_at_once() -> None:
    result = run_file("textbook_backward_prefetch", "fsdp.limit_all_gathers=false")
    assert {op.issued for op in result.ops} == {0.0}
    assert spans(result, "FB") == [*FORWARD, *BACKWARD_BACK_TO_BACK]
    assert spans(result, "AR") == [
        ("A0", 0.0, 1.5),
        ("A1", 1.5, 3.0),
        ("A2", 3.0, 4.5),
        ("A3", 4.5, 6.0),
        ("A2", 6.0, 7.5),
        *AFTER_B3,
    ]


def test_a_limit_of_three() -> None:
    """A3 waits for F0 and a turn behind A2; A2 for backward for F1, and a turn behind A3."""
    result = run_file("textbook_backward_prefetch", "fsdp.limit_all_gathers=3")
    assert spans(result, "FB") == [*FORWARD, *BACKWARD_BACK_TO_BACK]
    assert spans(result, "AR") == [
        ("A0", 0.0, 1.5),
        ("A1", 1.5, 3.0),
        ("A2", 3.0, 4.5),
        ("A3", 4.5, 6.0),
        ("A2", 6.0, 7.5),
        *AFTER_B3,
    ]
    assert [op.issued for op in result.ops if op.kind == "all_gather"][:5] == [0, 0, 0, 3.5, 5.5]


def test_a_limit_of_one_forbids_all_overlap_of_gathers() -> None:
    """Each gather waits for the end of the compute before it: the no-overlap times, one by one."""
    limited = run_file("textbook_backward_prefetch", "fsdp.limit_all_gathers=1")
    assert spans(limited) == spans(run_file("textbook_no_overlap"))


def test_last_unit_resharded_is_gathered_again() -> None:
    """A3 for backward starts when F2 frees its place; A2 when F3 frees unit 3's first gathering."""
    result = run_file("textbook_backward_prefetch", "fsdp.reshard_last_unit=true")
    assert spans(result, "FB") == [*FORWARD, *BACKWARD_BACK_TO_BACK]
    assert spans(result, "AR") == [*GATHERS, ("A3", 7.5, 9.0), ("A2", 9.5, 11.0), *AFTER_B3]
    assert result.step_time == 27.0


def test_last_unit_resharded_without_overlap_costs_one_more_gather() -> None:
    result = run_file("textbook_no_overlap", "fsdp.reshard_last_unit=true")
    assert result.step_time == 42.0
    assert starts(result, "AB")["A3"] == [10.5, 14.0]
    assert starts(result, "AB")["B3"] == [15.5]


# ---- other durations, worked out by hand


def test_a_duration_for_each_unit() -> None:
    result = run_units(
        2,
        {
            "forward": ["1 s", "2 s"],
            "backward": ["2 s", "3 s"],
            "all_gather": ["500 ms", "1 s"],
            "reduce_scatter": ["250 ms", "750 ms"],
        },
    )
    assert spans(result) == [
        ("A0", 0.0, 0.5),
        ("F0", 0.5, 1.5),
        ("A1", 0.5, 1.5),
        ("F1", 1.5, 3.5),
        ("A0", 1.5, 2.0),
        ("B1", 3.5, 6.5),
        ("R1", 6.5, 7.25),
        ("B0", 6.5, 8.5),
        ("R0", 8.5, 8.75),
    ]
    assert result.step_time == 8.75


SLOW_HOST = {
    "forward": "2 s",
    "backward": "4 s",
    "all_gather": "1.5 s",
    "reduce_scatter": "1.5 s",
    "kernel_launch": "1 s",
}


def test_launch_costs() -> None:
    """The host needs a second for each op; forward waits for it now and then."""
    result = run_units(3, SLOW_HOST, limit_all_gathers=False)
    assert [(op.kind, op.issued) for op in result.ops][:3] == [
        ("all_gather", 1.0),
        ("forward", 2.0),
        ("all_gather", 3.0),
    ]
    assert spans(result, "FA")[:6] == [
        ("A0", 1.0, 2.5),
        ("F0", 2.5, 4.5),
        ("A1", 3.0, 4.5),
        ("F1", 4.5, 6.5),
        ("A2", 5.0, 6.5),
        ("F2", 6.5, 8.5),
    ]


def test_forward_prefetch_gathers_the_next_unit_before_this_one_computes() -> None:
    """With a slow host the order of launches matters: A1 comes a second earlier, F0 one later."""
    result = run_units(3, SLOW_HOST, limit_all_gathers=False, forward_prefetch=True)
    assert spans(result, "FA")[:6] == [
        ("A0", 1.0, 2.5),
        ("A1", 2.5, 4.0),
        ("F0", 3.0, 5.0),
        ("A2", 4.0, 5.5),
        ("F1", 5.0, 7.0),
        ("F2", 7.0, 9.0),
    ]


def test_forward_prefetch_helps_where_launching_the_compute_takes_long() -> None:
    """F0 occupies the host for 3 s: prefetched, A1 runs meanwhile instead of afterwards.

    Without: A0 3-7, F0 issued at 6, 7-8; A1 issued at 9, 9-13; F1 issued at 12, 13-14.
    With: A0 3-7, A1 issued at 6, 7-11; F0 issued at 9, 9-10; F1 issued at 12, 12-13.
    """
    durations = {
        "forward": "1 s",
        "backward": "1 s",
        "all_gather": "4 s",
        "reduce_scatter": "1 s",
        "kernel_launch": "3 s",
    }
    plain = run_units(2, durations)
    prefetched = run_units(2, durations, forward_prefetch=True)
    assert starts(plain, "F") == {"F0": [7.0], "F1": [13.0]}
    assert starts(prefetched, "F") == {"F0": [9.0], "F1": [12.0]}


# ---- 13B on 64 GPUs


def test_13b_durations() -> None:
    ops = run_file("textbook_13b_64gpu").ops
    seconds = {kind: {op.seconds for op in ops if op.kind == kind} for kind in LETTERS}
    rate, parameters = 0.5 * 989.5e12, 12 * 5120**2
    (forward,), (backward,) = seconds["forward"], seconds["backward"]
    (gather,), (scatter,) = seconds["all_gather"], seconds["reduce_scatter"]
    assert forward == pytest.approx(2 * parameters * 16384 / rate, rel=1e-12)
    assert backward == 2 * forward
    assert gather == pytest.approx(63 * 10e-6 + 63 / 64 * 2 * parameters / 50e9, rel=1e-12)
    assert scatter == gather
    assert f"{forward * 1e3:.2f} {backward * 1e3:.2f} {gather * 1e3:.2f}" == "20.83 41.67 13.02"


def test_13b_backward_prefetch() -> None:
    """Forward and backward run at the speed of compute; without prefetch all of backward's
    collectives but one are exposed, two for each block."""
    fast = run_file("textbook_13b_64gpu")
    slow = run_file("textbook_13b_64gpu", "fsdp.backward_prefetch=NO_PREFETCH")
    assert f"{slow.step_time:.3f} {fast.step_time:.3f}" == "3.541 2.526"
    assert f"{slow.step_time / fast.step_time:.2f}" == "1.40"
    gather = fast.ops[0].seconds
    assert fast.exposed_communication == pytest.approx(2 * gather)
    assert slow.exposed_communication == pytest.approx(80 * gather)


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "NO_PREFETCH"])
def test_13b_limit_bounds_memory_and_costs_no_time(prefetch: str) -> None:
    override = f"fsdp.backward_prefetch={prefetch}"
    limited = run_file("textbook_13b_64gpu", override)
    unlimited = run_file("textbook_13b_64gpu", override, "fsdp.limit_all_gathers=false")
    assert limited.max_unsharded_units == 2
    assert unlimited.max_unsharded_units == 79
    assert limited.step_time == pytest.approx(unlimited.step_time, rel=1e-12)
    assert unlimited.peak("active") - limited.peak("active") >= 77 * 2 * 12 * 5120**2


# ---- memory, to the byte


UNITS = (3168, 9312, 9312, 9312, 1552)


def no_overlap_memory() -> Result:
    """Five units over four ranks: fp16 parameters and gradients, 12 bytes of optimizer state."""
    return simulate(
        load(
            {
                "workload": {
                    "units": 5,
                    "parameters": list(UNITS),
                    "dtype": "float16",
                    "forward": "2 s",
                    "backward": "4 s",
                    "all_gather": "1.5 s",
                    "reduce_scatter": "1.5 s",
                },
                "training": {"optimizer_state_bytes": 12},
                "fsdp": {
                    "runtime": "textbook",
                    "overlap": False,
                    "backward_prefetch": "NO_PREFETCH",
                },
                "hardware": {"gpus_per_node": 4},
            }
        )
    )


def test_peak_is_in_the_backward_of_unit_1_before_its_reduce_scatter_output_exists() -> None:
    """14/4 bytes of shard per parameter, the gradient shards of units 4, 3 and 2, and unit 1's
    parameters and gradient in full."""
    result = no_overlap_memory()
    shards = sum(UNITS) * 14 // 4
    gradients = sum(UNITS[2:]) * 2 // 4
    assert shards + gradients + 2 * 2 * UNITS[1] == 161_632
    assert result.peak("requested") == 161_632
    at = next(s for s in result.memory.samples if s.requested == 161_632)
    assert (at.buffer.unit, at.buffer.name, at.is_malloc) == ("unit.1", "gradient", True)


def test_end_of_backward_holds_16_bytes_per_parameter_over_the_ranks() -> None:
    samples = no_overlap_memory().memory.samples
    last = max(i for i, s in enumerate(samples) if s.buffer.name == "gradient")
    assert samples[last].requested == sum(UNITS) * 16 // 4 == 130_624


def test_units_that_do_not_divide_are_padded() -> None:
    """Five parameters on four ranks: gathered and sharded as eight, the gradient has five."""
    result = simulate(
        load(
            {
                "workload": {"units": 1, "parameters": 5, "forward": "1 s", "dtype": "float16"},
                "training": {"optimizer": "none"},
                "fsdp": {"runtime": "textbook"},
                "hardware": {"gpus_per_node": 4},
            }
        )
    )
    sizes = {s.buffer.name: s.buffer.nbytes for s in result.memory.samples}
    assert sizes == {"sharded_param": 4, "full_param": 16, "gradient": 10, "sharded_gradient": 4}


# ---- the same durations under the real runtimes


@pytest.mark.parametrize(
    ("runtime", "step_time", "gathers"), [("fsdp1", 27.0, 8), ("fsdp2", 27.0, 8), ("ddp", 24.0, 0)]
)
def test_given_durations_need_no_parameters(runtime: str, step_time: float, gathers: int) -> None:
    """Units whose parameters nobody counted are sharded all the same; only bytes are unknown."""
    tables = load(SCENARIOS / "textbook_backward_prefetch.toml").tables
    result = simulate(load({"workload": tables["workload"], "fsdp": {"runtime": runtime}}))
    found = result.collectives.get("all_gather")
    assert (found.count if found else 0) == gathers
    assert result.peak("reserved") == 0
    reduction = "all_reduce" if runtime == "ddp" else "reduce_scatter"
    assert result.step_time >= step_time
    assert result.collectives[reduction].count >= 1
