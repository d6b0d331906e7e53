"""How fast simulations and sweeps are. Prints; never fails on a clock.

Run with ``pytest -m benchmark -s tests/bench_sweep.py``. Seconds are CPU seconds of this process,
so that other work on the machine shows less; the first line says how fast the machine is now.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simpy

from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import build_costs, build_workload, record, simulate
from fsdpsim.summary import summary
from fsdpsim.sweeps import Grid, sweep
from fsdpsim.sweeps.execute import workers
from fsdpsim.sweeps.point import Simulator

pytestmark = pytest.mark.benchmark

SCENARIOS = Path(__file__).parent.parent / "scenarios"

#: What one timeout of SimPy takes on the machine that the targets below were set on.
REFERENCE_TIMEOUT_NS = 409

LECTURE = {
    "workload": {"units": 40, "parameters": 12 * 5120**2, "dtype": "bfloat16", "tokens": 16384},
    "hardware": {"nodes": 8},
}
LLAMA_13B = {
    "model": {"hf_config": str(SCENARIOS / "models" / "llama2_13b.json")},
    "hardware": {"nodes": 8},
}
LLAMA_70B = {
    "model": {"hf_config": str(SCENARIOS / "models" / "llama2_70b.json")},
    "hardware": {"nodes": 64},
}


def tables(base: dict[str, Any], runtime: str, **training: Any) -> dict[str, Any]:
    return {**base, "fsdp": {"runtime": runtime}, "training": training}


#: name -> (scenario, target in milliseconds on the reference machine)
CASES: dict[str, tuple[Callable[[], Scenario], float | None]] = {
    "textbook, 4 units": (lambda: load(SCENARIOS / "textbook_backward_prefetch.toml"), None),
    "textbook, 13B": (lambda: load(SCENARIOS / "textbook_13b_64gpu.toml"), 12),
    "FSDP1, 13B as 40 given units": (lambda: load(tables(LECTURE, "fsdp1")), 12),
    "FSDP2, 13B as 40 given units": (lambda: load(tables(LECTURE, "fsdp2")), 12),
    "FSDP1, 13B/64, op per unit": (
        lambda: load(tables(LLAMA_13B, "fsdp1", granularity="units")),
        12,
    ),
    "FSDP2, 13B/64, op per unit": (
        lambda: load(tables(LLAMA_13B, "fsdp2", granularity="units")),
        12,
    ),
    "FSDP2, 70B/512, op per unit": (
        lambda: load(tables(LLAMA_70B, "fsdp2", granularity="units")),
        25,
    ),
    "FSDP2, 70B/512, op per kernel": (lambda: load(tables(LLAMA_70B, "fsdp2")), 400),
}


def best_of(times: int, run: Callable[[], object]) -> float:
    """Least CPU seconds of ``times`` runs, after one to warm up."""
    run()
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def timeouts(count: int) -> None:
    env = simpy.Environment()

    def process() -> Any:
        for _ in range(count):
            yield env.timeout(1)

    env.process(process())
    env.run()


def beside_simpy(run: Callable[[], object], rounds: int = 9) -> tuple[float, float]:
    """Least CPU seconds of ``run``, and what they were on the reference machine.

    SimPy's timeouts take turns with it: the machine's speed changes within a second.
    """
    run()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        timeouts(5_000)
        middle = time.process_time()
        run()
        found.append((middle - start, time.process_time() - middle))
    per_timeout = statistics.median(simpy_seconds / 5_000 for simpy_seconds, _ in found)
    median = statistics.median(seconds for _, seconds in found)
    return min(s for _, s in found), median * REFERENCE_TIMEOUT_NS * 1e-9 / per_timeout


@pytest.fixture(scope="module")
def slowness() -> float:
    """How many times slower than the reference machine this one is now."""
    nanoseconds = best_of(5, lambda: timeouts(100_000)) * 1e4
    print(
        f"\n\nSimPy: {nanoseconds:.0f} ns per timeout, {nanoseconds / REFERENCE_TIMEOUT_NS:.1f} "
        f"times the {REFERENCE_TIMEOUT_NS} ns that targets are meant for"
    )
    return nanoseconds / REFERENCE_TIMEOUT_NS


def test_simulations_per_second(slowness: float) -> None:
    print("\nOne point of a sweep: validated, simulated, summarised")
    head = f"{'':32}{'ops':>7}{'steps':>7}{'ms':>8}{'1/s':>7}{'us/op':>7}{'us/step':>8}"
    print(f"{head}{'  reference ms (target)':>24}")
    for name, (make, target) in CASES.items():
        scenario = make()
        simulator = Simulator(scenario)
        result = simulator.simulate(scenario)
        ops, steps = len(result.ops), len(result.program.steps)
        settings = {"training.iterations": scenario.iterations}
        point = next(iter(Grid(with_sweep(scenario, settings)).points()))
        seconds, reference = beside_simpy(lambda s=simulator, p=point: s.line(p))  # type: ignore[misc]
        goal = f"({target:g})" if target else ""
        print(
            f"{name:32}{ops:7}{steps:7}{seconds * 1e3:8.1f}{1 / seconds:7.1f}"
            f"{seconds * 1e6 / ops:7.1f}{seconds * 1e6 / steps:8.2f}"
            f"{reference * 1e3:15.1f} {goal:>8}"
        )


def with_sweep(scenario: Scenario, settings: dict[str, Any]) -> Scenario:
    """``scenario`` with a sweep of one point."""
    from fsdpsim.scenario.loading import validate

    varied = {key: [value] for key, value in settings.items()}
    return validate({**scenario.tables, "sweep": varied}, scenario.source, scenario.base)


#: Where a profile's seconds belong, by file; the first that matches counts.
ROOMS = {
    "SimPy and engine": ("simpy", "fsdpsim/engine", "fsdpsim/ranks"),
    "allocator and memory": ("fsdpsim/allocator", "fsdpsim/memory"),
    "schedule": ("fsdpsim/schedules", "fsdpsim/program", "fsdpsim/sharding"),
    "analysis": ("fsdpsim/result", "fsdpsim/summary", "fsdpsim/intervals"),
    "set-up": ("fsdpsim", "pydantic", "json"),
}


def room_of(path: str) -> str:
    return next((room for room, parts in ROOMS.items() if any(p in path for p in parts)), "")


def shares(run: Callable[[], object]) -> dict[str, float]:
    """Share of the time spent in each room; built-in functions belong to their callers."""
    profile = cProfile.Profile()
    gc.disable()  # as in a sweep: else whoever allocates most pays for the collector
    profile.runcall(run)
    gc.enable()
    found: Counter[str] = Counter()
    for (path, _, _), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if room_of(path):
            found[room_of(path)] += own
        else:
            for (caller, _, _), (_, _, seconds, _) in callers.items():
                found[room_of(caller) or "set-up"] += seconds
    return {room: found[room] / found.total() for room in ROOMS}


def test_where_the_time_goes(slowness: float) -> None:
    print("\nShare of the time (under a profiler, which favours no one)")
    print(" " * 32 + "".join(f"{room:>22}" for room in ROOMS))
    for name, (make, _) in CASES.items():
        scenario = make()
        simulator = Simulator(scenario)
        simulator.simulate(scenario)
        found = shares(lambda s=simulator, c=scenario: summary(s.simulate(c)))  # type: ignore[misc]
        print(f"{name:32}" + "".join(f"{share:22.0%}" for share in found.values()))


def test_growth(slowness: float) -> None:
    print("\nGrowth: ms, and us per step of the program")
    for runtime in ("fsdp1", "fsdp2"):
        base = tables(LECTURE, runtime)
        given = {"units": (40, 80, 160, 320), "iterations": (2, 4, 8, 16), "nodes": (1, 8, 64, 512)}
        for what, values in given.items():
            shown = []
            for value in values:
                varied = _vary(base, what, value)
                scenario = load(varied)
                steps = len(simulate(scenario).program.steps)
                seconds = best_of(3, lambda s=scenario: summary(simulate(s)))  # type: ignore[misc]
                shown.append(f"{value}: {seconds * 1e3:.0f} ms, {seconds * 1e6 / steps:.1f} us")
            print(f"{runtime} {what:11}" + "   ".join(shown))


def _vary(base: dict[str, Any], what: str, value: int) -> dict[str, Any]:
    table, key = {
        "units": ("workload", "units"),
        "iterations": ("training", "iterations"),
        "nodes": ("hardware", "nodes"),
    }[what]
    return {**base, table: {**base[table], key: value}}


def test_set_up_of_a_point(slowness: float) -> None:
    """Validation and workload building, with what points share and without."""
    base = tables(LLAMA_13B, "fsdp2", granularity="units")
    base["sweep"] = {
        "fsdp.sharding_factor": [8, 64],
        "fsdp.forward_prefetch": {"first": 0, "last": 9, "step": 1},
    }
    scenario = load(base)
    points = list(Grid(scenario).points())
    shared = Simulator(scenario)

    def together() -> None:
        for point in points:
            found = shared.variations.at(point.settings)
            shared.workload(found, build_costs(found))

    def alone() -> None:
        for point in points:
            overrides = [f"{key}={value}" for key, value in point.settings.items()]
            found = load({k: v for k, v in base.items() if k != "sweep"}, overrides)
            build_workload(found, build_costs(found))

    for name, run in {"shared": together, "alone": alone}.items():
        print(
            f"\nset-up of a 13B point, {name}: {best_of(3, run) * 1e3 / len(points):.2f} ms", end=""
        )
    found = shared.variations.at(points[0].settings)
    costs = build_costs(found)
    workload = shared.workload(found, costs)
    seconds = best_of(3, lambda: record(found, workload, costs))
    print(f"\nrecording its program: {seconds * 1e3:.1f} ms")
    seconds = best_of(3, lambda: shared.bounds(found))
    print(f"its lower bounds: {seconds * 1e3:.2f} ms")


def test_two_processes(slowness: float) -> None:
    """Wall-clock, so it means something on an idle machine only; CPU seconds say what is lost."""
    base = tables(LECTURE, "fsdp2")
    base["sweep"] = {"workload.tokens": {"first": 100, "last": 20_000, "step": 100}}
    grid = Grid(load(base))
    print()
    for jobs in (1, 2):
        used = _cpu_seconds()
        with workers(None, jobs) as staff:
            for _ in staff.lines(grid.scenario, [next(grid.points())] * 8):
                pass  # the processes are up and warm
            start = time.perf_counter()
            count = sum(1 for _ in staff.lines(grid.scenario, grid.points()))
            seconds = time.perf_counter() - start
        used = _cpu_seconds() - used
        rate = count / seconds
        print(
            f"{count} points of 13B on {jobs}: {rate:.0f}/s, {seconds:.1f} s, {used:.1f} s of CPU"
        )


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, both))


def test_memory_of_a_long_sweep(slowness: float) -> None:
    points = 1_000
    base = tables(LECTURE, "fsdp2", iterations=1)
    base["sweep"] = {"workload.tokens": {"first": 1, "last": points, "step": 1}}
    grid, peaks = Grid(load(base)), []
    with workers(None, 1) as here:
        for done, _ in enumerate(here.lines(grid.scenario, grid.points()), start=1):
            if done in (points // 10, points):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
    shown = " and ".join(f"{mib:.0f} MiB" for mib in peaks)
    print(f"\npeak memory after {points // 10} and {points} points: {shown}")
    assert peaks[1] < 1.1 * peaks[0]


def test_a_thousand_points_end_to_end(slowness: float, tmp_path: Path) -> None:
    base = tables(LECTURE, "textbook")
    base["sweep"] = {"workload.tokens": {"first": 1, "last": 1000, "step": 1}}
    start = time.process_time()
    rows = sweep(load(base), directory=tmp_path)
    seconds = time.process_time() - start
    size = (tmp_path / "results.jsonl").stat().st_size
    print(f"\n{len(rows)} points of the lecture's 13B with files: {seconds:.1f} s, {size:,} bytes")
