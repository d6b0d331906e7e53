"""How fast the engine is, beside what SimPy can do at best, and how fast ``fsdpsim --help`` is.

Prints; never fails on a clock. Run with ``pytest -m benchmark -s tests/bench_engine.py``.
Contenders take turns in one process, a few milliseconds each, and are compared by the median of
their ratios, so that what else the machine does touches them alike.
"""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import simpy
from oracle import evaluate

from fsdpsim import engine
from fsdpsim.engine import Op, Process, Step

pytestmark = pytest.mark.benchmark

UNITS = 500
OPS = 4 * UNITS
ROUNDS = 101

#: Share of the ceiling that the engine should reach where launches cost nothing.
TARGET = 0.6


def program(launch_seconds: float) -> list[Step]:
    """Gather, compute, reduce and a copy per unit, on three streams that wait for each other."""
    steps: list[Step] = []
    for _ in range(UNITS):
        gather = Op("A", "unshard", 1.5, communicator="shard", launch_seconds=launch_seconds)
        copy = Op("C", "compute", 0.1, deps=(gather,), launch_seconds=launch_seconds)
        compute = Op("B", "compute", 4.0, launch_seconds=launch_seconds)
        reduce = Op(
            "R",
            "post_backward",
            1.5,
            deps=(compute,),
            communicator="shard",
            launch_seconds=launch_seconds,
        )
        steps += [gather, copy, compute, reduce]
    return steps


def ceiling(timeouts: int) -> Callable[[], object]:
    """SimPy with nothing around it: one process, one timeout after another."""
    env = simpy.Environment()

    def process() -> Process:
        for _ in range(timeouts):
            yield env.timeout(1.0)

    env.process(process())
    return env.run


def seconds(action: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    action()
    return time.process_time() - start


def measured(contenders: dict[str, Callable[[], Callable[[], object]]]) -> dict[str, list[float]]:
    """CPU seconds of each contender in each round; all take turns."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, prepare in contenders.items():
            found[name].append(seconds(prepare()))
    return found


@pytest.mark.parametrize("launch_seconds", [0.0, 1e-5])
def test_ops_per_second(launch_seconds: float) -> None:
    found = measured(
        {
            "SimPy, one timeout per op": lambda: ceiling(OPS),
            "engine": lambda: partial(engine.run, program(launch_seconds)),
            "oracle loop": lambda: partial(evaluate, program(launch_seconds)),
        }
    )
    best = found["SimPy, one timeout per op"]
    print(f"\n{OPS:,} ops, launch cost {launch_seconds * 1e6:g} us, median of {ROUNDS} rounds")
    for name, times in found.items():
        share = statistics.median(b / t for b, t in zip(best, times, strict=True))
        rate = OPS / statistics.median(times)
        goal = f", target {TARGET:.0%}" if name == "engine" and not launch_seconds else ""
        print(f"  {name:26s} {rate:12,.0f} ops/s  {share:6.0%} of the ceiling{goal}")


def test_help_cpu_seconds() -> None:
    """CPU time of ``fsdpsim --help`` and of an empty Python; target 150 ms."""
    contenders = {"python -c pass": ["-c", "pass"], "fsdpsim --help": ["-m", "fsdpsim", "--help"]}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(9):
        for name, arguments in contenders.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            found[name].append(user + system)
    print()
    for name, times in found.items():
        print(f"  {name:16s} {statistics.median(times) * 1e3:4.0f} ms CPU")
