"""The engine equals a plain loop over its recurrence, on scenario files and on random programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import evaluate, simulated, stalls_of
from recordings import program_of, read_recording, scenario_of

from fsdpsim import engine
from fsdpsim.engine import HostWait, HostWork, Op, Step
from fsdpsim.program import Program
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import build_costs, build_memory, build_workload, record

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.toml"))
RECORDINGS = sorted((Path(__file__).parent / "data" / "golden").glob("*.json"))


# ---- scenario files and recorded runs


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_files(path: Path) -> None:
    scenario = load(path)
    program, twin = programs(scenario)
    engine.run(program.steps)
    assert simulated(program.steps) == evaluate(twin.steps)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_files_with_their_allocator(path: Path) -> None:
    """The allocator decides when the host is stopped; that given, the rest follows."""
    scenario = load(path)
    program, twin = programs(scenario)
    memory = build_memory(scenario, program)
    engine.run(program.steps, memory)
    stalls = stalls_of(program, memory.samples)
    assert len(stalls) == len(memory.stalls)
    assert simulated(program.steps) == evaluate(twin.steps, stalls)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    scenario = scenario_of(read_recording(path))
    program, twin = program_of(scenario), program_of(scenario)
    engine.run(program.steps)
    assert simulated(program.steps) == evaluate(twin.steps)


def programs(scenario: Scenario) -> tuple[Program, Program]:
    """The program twice: the oracle must not see what the engine writes into its ops."""
    costs = build_costs(scenario)
    workload = build_workload(scenario, costs)
    return record(scenario, workload, costs), record(scenario, workload, costs)


# ---- random programs


@dataclass(frozen=True)
class Launch:
    stream: str
    communicator: str | None
    seconds: float
    launch_seconds: float
    deps: frozenset[int]
    """Ops, counted backwards from the latest issued one."""


@dataclass(frozen=True)
class Wait:
    ops: frozenset[int]


@dataclass(frozen=True)
class Work:
    seconds: float


#: Few distinct values, so that ends coincide, and some whose sums round.
seconds = st.sampled_from([0.0, 0.0, 1.0, 2.0, 0.1, 0.3, 1 / 3, 1e-6]) | st.floats(0, 1e3)
earlier = st.frozensets(st.integers(0, 12), max_size=4)
launches = st.builds(
    Launch,
    stream=st.sampled_from(["compute", "copy", "communication", "other"]),
    communicator=st.sampled_from([None, None, "shard", "replicate"]),
    seconds=seconds,
    launch_seconds=st.just(0.0) | seconds,
    deps=earlier,
)
steps = st.one_of(
    launches, launches, st.builds(Wait, ops=earlier), st.builds(Work, seconds=seconds)
)
#: Left alone, hypothesis makes lists of about five, too short for two streams to get entangled.
recipes = st.lists(steps, max_size=5) | st.lists(steps, min_size=10, max_size=40)
Recipe = list[Launch | Wait | Work]


def steps_of(recipe: Recipe, stream_names: Callable[[str], str] = str) -> list[Step]:
    ops: list[Op] = []
    steps: list[Step] = []
    for entry in recipe:
        match entry:
            case Launch():
                op = Op(
                    f"op {len(ops)}",
                    stream_names(entry.stream),
                    entry.seconds,
                    deps=tuple(ops[-1 - i] for i in sorted(entry.deps) if i < len(ops)),
                    communicator=entry.communicator,
                    launch_seconds=entry.launch_seconds,
                )
                ops.append(op)
                steps.append(op)
            case Wait():
                waited = tuple(ops[-1 - i] for i in sorted(entry.ops) if i < len(ops))
                steps.append(HostWait(waited, cause="test"))
            case Work():
                steps.append(HostWork(entry.seconds, "test", "", 0))
    return steps


def run(recipe: Recipe) -> list[Step]:
    steps = steps_of(recipe)
    engine.run(steps)
    return steps


def ops_of(steps: Iterable[Step]) -> list[Op]:
    return [step for step in steps if isinstance(step, Op)]


@settings(max_examples=300)
@given(recipes)
def test_random_programs(recipe: Recipe) -> None:
    assert simulated(run(recipe)) == evaluate(steps_of(recipe))


@given(recipes)
def test_streams_and_communicators_run_one_op_at_a_time_in_issue_order(recipe: Recipe) -> None:
    queues = defaultdict(list)
    for op in ops_of(run(recipe)):
        queues["stream", op.stream].append(op)
        if op.communicator is not None:
            queues["communicator", op.communicator].append(op)
    for queue in queues.values():
        for first, second in pairwise(queue):
            assert first.end <= second.start


@given(recipes)
def test_no_op_starts_before_its_issue_or_its_dependencies(recipe: Recipe) -> None:
    for op in ops_of(run(recipe)):
        assert op.issued <= op.start
        assert op.end == op.start + op.seconds
        assert all(dep.end <= op.start for dep in op.deps)


@given(recipes)
def test_the_host_never_runs_backwards(recipe: Recipe) -> None:
    now = 0.0
    for step in run(recipe):
        if isinstance(step, Op):
            assert step.issued == now + step.launch_seconds
            now = step.issued
        else:
            assert now == step.start <= step.end
            now = step.end
        if isinstance(step, HostWait):
            assert step.end == max([step.start, *(op.end for op in step.ops)])


@given(recipes, st.permutations(["compute", "copy", "communication", "other"]))
def test_names_of_streams_change_nothing(recipe: Recipe, names: list[str]) -> None:
    renamed = dict(zip(["compute", "copy", "communication", "other"], names, strict=True))
    steps = steps_of(recipe, renamed.__getitem__)
    engine.run(steps)
    assert simulated(steps) == simulated(run(recipe))


@given(recipes, seconds)
def test_one_more_second_of_work_ends_nothing_earlier(recipe: Recipe, more: float) -> None:
    """Without contention there are no anomalies: a longer op delays others or nobody."""
    before = ops_of(run(recipe))
    launched = [(i, entry) for i, entry in enumerate(recipe) if isinstance(entry, Launch)]
    for index, entry in launched[:3]:
        longer = replace(entry, seconds=entry.seconds + more)
        after = ops_of(run([*recipe[:index], longer, *recipe[index + 1 :]]))
        assert all(a.end >= b.end for a, b in zip(after, before, strict=True))
