"""``fsdpsim ledger --offload``: ZeRO-Offload's placements, for the scenario's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from fsdpsim.ledger.differences import copied_comparison, kept_comparison
from fsdpsim.ledger.offload import LEAST_COMMUNICATION, NODES, optimal, placements
from fsdpsim.ledger.runs import offload_run
from fsdpsim.ledger.views.common import (
    Report,
    Shown,
    causes,
    compared,
    head,
    show_decimal,
    show_differences,
    show_head,
    table,
)
from fsdpsim.scenario import Scenario

#: What is compared -> what the table calls it.
SIMULATED = {"crosses_pcie": "crosses PCIe in a step", "on_gpu": "on the GPU between steps"}


def report(scenario: Scenario) -> Report:
    """All placements; their volumes are bytes per parameter."""
    run = offload_run(scenario)
    found = head(scenario, run.workload)
    found["placements"] = [asdict(placement) for placement in placements()]
    found["optimal"] = asdict(optimal())
    simulated = {
        "crosses_pcie": compared(copied_comparison(run)),
        "on_gpu": compared(kept_comparison(run)),
    }
    found["simulated"] = {"runtime": run.scenario.fsdp.runtime} | simulated
    found["causes"] = causes(simulated.values())
    return found


def tables(found: Report) -> Shown:
    """The placements worth a look, and how many there are of each volume."""
    yield show_head(found)
    everything = found["placements"]
    shown = [p for p in everything if p["communication"] <= LEAST_COMMUNICATION]
    shown += [p for p in everything if not p["gpu_memory"]][:1]
    yield table(
        f"Forward and backward on the GPU, the other {len(NODES)} nodes anywhere (M = parameters)",
        "on the CPU",
        "crosses PCIe",
        "on the GPU",
        "crosses PCIe",
        "on the GPU",
        rows=(_cells(found, placement) for placement in shown),
    )
    counts = Counter(p["communication"] for p in everything)
    volumes = ", ".join(f"{volume} M: {number}" for volume, number in sorted(counts.items()))
    yield (
        f"All {len(everything)} placements by what crosses PCIe in a step: {volumes}. Least "
        "communication with least memory is unique: only p16 stays on the GPU. 2 M more over PCIe "
        "empty the GPU, which is ZeRO-Infinity's choice."
    )
    yield table(
        f"ZeRO-Offload as a runtime ({found['simulated']['runtime']}), each GPU",
        *("", "formula", "simulated", "differs by"),
        rows=(_simulated(what, found["simulated"][key]) for key, what in SIMULATED.items()),
        texts=(0, 3),
    )
    if found["causes"]:
        yield "\n".join(f"{cause}: {why}" for cause, why in found["causes"].items())


def _simulated(what: str, figure: Report) -> Iterator[str]:
    yield what
    yield show_decimal(figure["formula_bytes"])
    yield show_decimal(figure["simulated_bytes"])
    yield show_differences(figure)


def _cells(found: Report, placement: Report) -> Iterator[str]:
    chosen = " (ZeRO-Offload)" if placement == found["optimal"] else ""
    yield (", ".join(placement["on_cpu"]) or "nothing") + chosen
    for key in ("communication", "gpu_memory"):
        yield f"{placement[key]} M"
    for key in ("communication", "gpu_memory"):
        yield show_decimal(placement[key] * found["parameters"])
