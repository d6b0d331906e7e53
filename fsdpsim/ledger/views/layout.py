"""``fsdpsim ledger --layout``: which rank holds which elements, under FSDP1 and under FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

from rich.console import Group

from fsdpsim.ledger.layout import Holding, flat_layout, per_parameter_holding
from fsdpsim.ledger.views.common import Report, Shown, counted, head, show_head, table
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp, Fsdp1
from fsdpsim.simulate import build_workload
from fsdpsim.workload import Param, Unit

#: Ranks that the terminal shows from either end; ``--json`` has all.
SHOWN_RANKS = 4


def report(scenario: Scenario) -> Report:
    """Every rank's elements of every unit; units of equal shapes are listed once."""
    workload = build_workload(scenario)
    found = head(scenario, workload)
    factor = scenario.world_size if isinstance(scenario.fsdp, Ddp) else scenario.shard_factor
    found["factor"] = factor
    found["units"] = [
        _unit_layout(scenario, names, params, factor) for names, params in _distinct(workload.units)
    ]
    return found


def _distinct(units: Sequence[Unit]) -> Iterator[tuple[list[str], tuple[Param, ...]]]:
    """Units by the shapes and local names of their parameters, in module order."""
    found: dict[tuple[Any, ...], tuple[list[str], tuple[Param, ...]]] = {}
    for unit in units:
        if unit.params:
            params = tuple(_local(unit))
            key = tuple((p.name, p.shape, p.dtype) for p in params)
            found.setdefault(key, ([], params))[0].append(unit.name)
    yield from found.values()


def _local(unit: Unit) -> Iterator[Param]:
    """The unit's parameters, named within the unit."""
    prefix = _common_prefix([p.name for p in unit.params])
    for param in unit.params:
        name = "parameters" if param.name == unit.name else param.name.removeprefix(prefix)
        yield replace(param, name=name)


def _common_prefix(names: Sequence[str]) -> str:
    """The longest common prefix that ends in a dot; empty if there is none."""
    modules = (name.split(".")[:-1] for name in names)
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return "".join(f"{parts[0]}." for parts in common)


def _unit_layout(
    scenario: Scenario, names: list[str], params: tuple[Param, ...], factor: int
) -> Report:
    fsdp = scenario.fsdp
    flat = flat_layout(
        params,
        factor,
        compute_dtype=scenario.param_dtype or params[0].dtype,
        use_orig_params=isinstance(fsdp, Fsdp1) and fsdp.use_orig_params,
    )
    pieces = [asdict(piece) for piece in flat.pieces]
    rows = [per_parameter_holding(params, factor, rank) for rank in range(factor)]
    return {
        "units": names,
        "params": [{"name": p.name, "shape": p.shape, "numel": p.numel} for p in params],
        "numel": sum(p.numel for p in params),
        "fsdp1": _ranks([flat.holding(rank) for rank in range(factor)]) | {"pieces": pieces},
        "fsdp2": _ranks(rows),
    }


def _ranks(holdings: list[Holding]) -> Report:
    first = holdings[0]
    return {
        "shard_numel": first.padding + sum(h.numel for h in first.held),
        "padding_numel": sum(holding.padding for holding in holdings),
        "ranks": [asdict(holding) for holding in holdings],
    }


# ---- the terminal


def tables(found: Report) -> Shown:
    """One table per kind of unit; of many ranks the first and the last."""
    yield show_head(found)
    yield (
        f"Elements of each flattened parameter on {counted(found['factor'], 'rank')}. FSDP1 cuts "
        "the concatenated unit, FSDP2 each parameter by rows."
    )
    for unit in found["units"]:
        yield _unit_table(unit)


def _unit_table(unit: Report) -> Group:
    names = unit["units"]
    title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
    return table(
        f"{title}: {unit['numel']:,} elements",
        "rank",
        f"FSDP1 elements: {_padding(unit['fsdp1'])}",
        f"FSDP2 rows: {_padding(unit['fsdp2'])}",
        rows=_shown_rows(unit),
        texts=(0, 1, 2),
    )


def _padding(layout: Report) -> str:
    return f"{layout['shard_numel']:,} per rank, {layout['padding_numel']:,} padding in all"


def _shown_rows(unit: Report) -> Iterator[tuple[str, str, str]]:
    flats, rows = unit["fsdp1"]["ranks"], unit["fsdp2"]["ranks"]
    row_numel = {p["name"]: math.prod(p["shape"][1:]) for p in unit["params"]}
    hidden = range(SHOWN_RANKS, len(flats) - SHOWN_RANKS)
    for rank, (flat, own) in enumerate(zip(flats, rows, strict=True)):
        if rank not in hidden or len(hidden) == 1:
            yield (str(rank), _holding(flat, {}), _holding(own, row_numel))
        elif rank == hidden.start:
            yield ("...", "", "")


def _holding(holding: Report, per_row: Mapping[str, int]) -> str:
    """Ranges of elements; of rows where ``per_row`` says how many elements a row has."""
    words = []
    for held in holding["held"]:
        step = per_row.get(held["param"], 1)
        words.append(f"{held['param']}[{held['start'] // step:,}:{held['stop'] // step:,}]")
    if holding["padding"]:
        words.append(f"{holding['padding']:,} padding")
    return ", ".join(words)
