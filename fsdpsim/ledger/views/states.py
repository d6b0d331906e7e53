"""``fsdpsim ledger FILE``: model states, communication, fits; the simulator beside each formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rich.console import Group

from fsdpsim.ledger import quantised
from fsdpsim.ledger.communication import bare_seconds, hybrid_factors, traffic, transfers
from fsdpsim.ledger.differences import held_comparison, sent_comparison
from fsdpsim.ledger.model_states import (
    StateBytes,
    Strategy,
    backward_peak,
    ddp,
    hybrid_shard,
    largest_model,
    model_states,
    padding_elements,
    zero,
    zero_1_by_all_reduce,
)
from fsdpsim.ledger.runs import Run, runs
from fsdpsim.ledger.views.common import (
    Report,
    Shown,
    causes,
    compared,
    head,
    number_of,
    show_count,
    show_decimal,
    show_differences,
    show_head,
    table,
)
from fsdpsim.scenario import Scenario
from fsdpsim.simulate import build_optimizer, build_workload
from fsdpsim.units import show_seconds

#: Bytes per parameter of the fp32 copy that ZeRO's K counts with the optimizer's own state.
FP32_COPY = 4


def report(scenario: Scenario) -> Report:
    """Formulas for every strategy; counts of the simulated runtimes with each difference named."""
    workload = build_workload(scenario)
    found = head(scenario, workload)
    rules = paper_rules(scenario)
    units = [unit for unit in workload.units if unit.params]
    sizes = [unit.numel for unit in units]
    trained = [sum(p.numel for p in unit.params if p.requires_grad) for unit in units]
    found["bytes_per_parameter"] = [asdict(rule) | {"total": rule.total} for rule in rules]
    found["strategies"] = [
        _strategy(scenario, strategy, rules, sizes, trained) for strategy in strategies(scenario)
    ]
    peak = backward_peak(sizes, scenario.world_size, rules[0])
    found["sharded_peak"] = asdict(peak) | {"unit": units[peak.unit].name}
    volumes = quantised.volumes(found["parameters"], scenario.device)
    found["quantised"] = [asdict(volume) for volume in volumes]
    found["simulated"] = [_simulated(run, rules[0]) for run in runs(scenario)]
    compared_figures = [row[k] for row in found["simulated"] for k in ("model_states", "sent")]
    found["causes"] = causes(compared_figures)
    return found


def paper_rules(scenario: Scenario) -> tuple[StateBytes, StateBytes]:
    """ZeRO's 16 bytes per parameter and ZeRO-Infinity's 20, with K of the scenario's optimizer."""
    optimizer = FP32_COPY + build_optimizer(scenario).state_bytes
    return StateBytes(optimizer=optimizer), StateBytes(optimizer=optimizer, fp32_gradients=4)


def strategies(scenario: Scenario) -> list[Strategy]:
    """DDP, the stages of ZeRO, and hybrid sharding with every F that fits the nodes."""
    world = scenario.world_size
    stages = [zero(1, world), zero_1_by_all_reduce(world), zero(2, world), zero(3, world)]
    return [ddp(), *stages, *map(hybrid_shard, hybrid_factors(scenario.device))]


def _strategy(
    scenario: Scenario,
    strategy: Strategy,
    rules: Iterable[StateBytes],
    sizes: list[int],
    trained: list[int],
) -> Report:
    hardware, micro = scenario.device, scenario.training.gradient_accumulation_steps
    states = [model_states(strategy, sizes, rule, trained) for rule in rules]
    sent = traffic(transfers(strategy, sizes, hardware, trained=trained, micro_batches=micro))
    return {
        "strategy": strategy.name,
        "factor": strategy.factor,
        "model_states_bytes": [asdict(s) | {"total": s.total} for s in states],
        "padding_elements": padding_elements(strategy, sizes),
        "fits": [s.total <= hardware.memory for s in states],
        "largest_model_parameters": [
            largest_model(hardware.memory, strategy, rule) for rule in rules
        ],
        "sent_in_node_bytes": sent.in_node,
        "sent_across_nodes_bytes": sent.across_nodes,
        "sent_on_network_bytes": sent.on_network,
        "bare_communication_s": bare_seconds(sent, hardware),
    }


def _simulated(run: Run, rule: StateBytes) -> Report:
    return {
        "strategy": run.strategy.name,
        "runtime": run.runtime,
        "collectives_s": run.seconds,
        "model_states": compared(held_comparison(run, rule)) | {"by_category_bytes": run.held},
        "sent": compared(sent_comparison(run))
        | {"by_kind_bytes": {kind: number_of(sent) for kind, sent in run.sent.items()}},
    }


# ---- the terminal


def tables(found: Report) -> Shown:
    """Formulas, ZeRO++, the two comparisons, and why they differ."""
    yield show_head(found)
    yield _strategies_table(found)
    yield (
        "Bytes per parameter, and what a GPU sends per step in rings in its node and over nodes. "
        "A ring over nodes counts as a whole; network is what of it leaves the node, the mean over "
        "GPUs. Bare: rings at full bandwidth, one after the other, those over nodes at one NIC's. "
        "Fits: 16 and 20 bytes, model states only; activations, buffers and the CUDA context come "
        "on top. ZeRO-1 by all-reduce wastes half of the all-reduce."
    )
    yield _peak_line(found)
    if found["world_size"] > 1:
        yield _quantised_table(found)
    yield _states_table(found)
    yield _sent_table(found)
    yield "\n".join(f"{cause}: {why}" for cause, why in found["causes"].items())


def _strategies_table(found: Report) -> Group:
    totals = [rule["total"] for rule in found["bytes_per_parameter"]]
    return table(
        f"Per GPU of {show_decimal(found['gpu_memory_bytes'])}, by formula",
        "strategy",
        *(f"{total} B" for total in totals),
        "fits",
        "largest",
        "in node",
        "over nodes",
        "network",
        "bare",
        rows=map(_strategy_cells, found["strategies"]),
    )


def _strategy_cells(row: Report) -> Iterator[str]:
    yield row["strategy"]
    yield from (show_decimal(states["total"]) for states in row["model_states_bytes"])
    yield "/".join("yes" if fits else "no" for fits in row["fits"])
    yield show_count(row["largest_model_parameters"][0])
    yield show_decimal(row["sent_in_node_bytes"])
    yield show_decimal(row["sent_across_nodes_bytes"])
    yield show_decimal(row["sent_on_network_bytes"])
    yield show_seconds(row["bare_communication_s"])


def _quantised_table(found: Report) -> Group:
    rows = (
        (
            row["name"],
            f"{row['volume']:g} M",
            show_decimal(row["network_bytes"]),
            show_decimal(row["in_node_bytes"]),
            show_decimal(row["secondary_bytes"]),
        )
        for row in found["quantised"]
    )
    return table(
        f"ZeRO++ with M = {show_decimal(2 * found['parameters'])}, one micro-batch",
        "variant",
        "over nodes",
        "a node sends",
        "a GPU, in node",
        "memory for the copy",
        rows=rows,
    )


def _peak_line(found: Report) -> str:
    peak = found["sharded_peak"]
    return (
        f"Fully sharded, the states' peak is {show_decimal(peak['nbytes'])}, in the backward of "
        f"{peak['unit']}: all shards, the gradient shards so far, and this unit's whole parameters "
        "and gradient (no prefetch)."
    )


def _states_table(found: Report) -> Group:
    return table(
        "Model states when the optimizer steps",
        *("strategy", "runtime", "formula", "simulated", "differs by"),
        rows=(_comparison_cells(row, "model_states") for row in found["simulated"]),
        texts=(0, 1, 4),
    )


def _sent_table(found: Report) -> Group:
    rows = (
        [*_comparison_cells(row, "sent"), show_seconds(row["collectives_s"])]
        for row in found["simulated"]
    )
    return table(
        "Bytes sent per GPU and step; the time of these collectives by the cost model, no overlap",
        *("strategy", "runtime", "formula", "simulated", "differs by", "time"),
        rows=rows,
        texts=(0, 1, 4),
    )


def _comparison_cells(row: Report, figure: str) -> Iterator[str]:
    yield row["strategy"]
    yield row["runtime"]
    yield show_decimal(row[figure]["formula_bytes"])
    yield show_decimal(row[figure]["simulated_bytes"])
    yield show_differences(row[figure])
