"""Small FSDP scenarios of given durations: layers 1 to L, a root with embedding and head."""

from __future__ import annotations

from typing import Any

from fsdpsim.engine import Op
from fsdpsim.result import Result
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import simulate


def tables(
    runtime: str,
    layers: int = 4,
    *,
    root: bool = True,
    parameters: int = 1024,
    world: int = 8,
    seconds: dict[str, float] | None = None,
    fsdp: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
) -> dict[str, Any]:
    units: list[dict[str, Any]] = [
        {"name": str(i), "params": [{"name": f"{i}.weight", "shape": [parameters // 16, 16]}]}
        for i in range(1, layers + 1)
    ]
    shape = [parameters // 16, 16]
    parts = ["embed", "head"] if root else []
    params = [{"name": f"{part}.weight", "shape": shape} for part in parts]
    units.append({"name": "root", "params": params, "parts": parts})
    order = [str(i) for i in range(1, layers + 1)]
    calls = ["embed", *order, "head"] if root else order
    times = {"forward": 2.0, "backward": 4.0, "all_gather": 1.5, "reduce_scatter": 1.5}
    times |= {"all_reduce": 1.0} | (seconds or {})
    return {
        "workload": {"units": units, "calls": calls, **times, **(workload or {})},
        "training": {"iterations": 4, "optimizer": "sgd", **(training or {})},
        "hardware": {"gpus_per_node": world},
        "fsdp": {"runtime": runtime, **(fsdp or {})},
    }


def scenario(runtime: str, layers: int = 4, **options: Any) -> Scenario:
    return load(tables(runtime, layers, **options))


def run(runtime: str, layers: int = 4, **options: Any) -> Result:
    return simulate(scenario(runtime, layers, **options))


class Timeline:
    """Ops of one iteration by kind, unit and phase."""

    def __init__(self, result: Result, iteration: int = -1) -> None:
        wanted = iteration % result.scenario.iterations
        self.ops = [op for op in result.ops if op.iteration == wanted]

    def all(self, kind: str, unit: str | int | None = None, phase: str | None = None) -> list[Op]:
        return [
            op
            for op in self.ops
            if kind in (op.kind, op.name)
            and unit in (None, op.unit, _int(op.unit))
            and phase in (None, op.phase)
        ]

    def one(self, kind: str, unit: str | int, phase: str | None = None) -> Op:
        (op,) = self.all(kind, unit, phase)
        return op


def _int(unit: str) -> int | None:
    return int(unit) if unit.isdigit() else None
