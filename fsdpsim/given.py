"""A workload of given durations: the ``[workload]`` table as units, parts and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from fsdpsim.frozen import freeze
from fsdpsim.hardware import Hardware
from fsdpsim.scenario.workload_tables import ROOT, Training
from fsdpsim.scenario.workload_tables import Workload as WorkloadTable
from fsdpsim.workload import Kernel, Param, Part, Tensor, Unit, Workload

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def given_workload(table: WorkloadTable, training: Training, hardware: Hardware) -> Workload:
    """Units and parts of ``table``. Raises ``FaultsError`` for unknown names in ``frozen``."""
    rows = list(_rows(table))
    units = freeze([_unit(row, table) for row in rows], training.frozen)
    parts = tuple(p for row in rows for p in _parts(row, table, training, hardware))
    if not any(unit.is_root for unit in units):
        units = (*units, Unit(name=ROOT, is_root=True))
    return Workload(units=units, parts=parts, calls=table.calls, tokens=table.tokens or 0)


def given_seconds(table: WorkloadTable) -> dict[tuple[str, str], float]:
    """(collective, unit) -> seconds, where the table gives them."""
    return {
        (kind, row["name"]): row[kind]
        for row in _rows(table)
        for kind in COLLECTIVES
        if row[kind] is not None
    }


def _rows(table: WorkloadTable) -> Iterator[dict[str, Any]]:
    """One mapping per unit with the table's per-unit entry wherever the unit leaves a key out."""
    keys = ("forward", "backward", "parameters", "activations", *COLLECTIVES)
    for index, unit in enumerate(table.tables):
        row: dict[str, Any] = {"name": unit.name, "params": unit.params, "parts": unit.part_names}
        row["param_names"] = unit.param_names
        for key in keys:
            own = getattr(unit, key, None)
            row[key] = own if own is not None else _entry(getattr(table, key), index)
        yield row


def _entry(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


def _unit(row: Mapping[str, Any], table: WorkloadTable) -> Unit:
    name = row["name"]
    if row["params"]:
        params = tuple(
            Param(name=own, shape=p.shape, dtype=p.dtype, requires_grad=p.requires_grad)
            for own, p in zip(row["param_names"], row["params"], strict=True)
        )
    elif name != ROOT or (row["parameters"] and row["parts"]):
        # Parameters of no bytes where none are counted: FSDP passes over units that have none.
        shape = (row["parameters"] or 0,)
        params = (Param(name=name, shape=shape, dtype=table.dtype),)
    else:
        params = ()
    return Unit(name=name, params=params, is_root=name == ROOT)


def _parts(
    row: Mapping[str, Any], table: WorkloadTable, training: Training, hardware: Hardware
) -> Iterator[Part]:
    names = row["parts"]
    forward, backward = _durations(row, table, hardware)
    owners = _owners(row, names)
    for name in names:
        again = training.activation_checkpointing != "none" and _covered(table, row["name"], name)
        part = _part(name, row, forward, backward, owners[name], checkpointed=again)
        region = next((f"{i}" for i, r in enumerate(table.checkpoint_regions) if name in r), "")
        yield replace(part, region=region)


def _covered(table: WorkloadTable, unit: str, part: str) -> bool:
    if table.checkpointed is None:
        return unit != ROOT
    return any(fnmatchcase(part, pattern) for pattern in table.checkpointed)


def _owners(row: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, tuple[str, ...] | None]:
    """Which part uses which parameter: the one whose name begins the parameter's, else the last.

    Where a parameter has no name, nothing is known and each part uses all (None).
    """
    if len(parts) <= 1 or not all(param.name for param in row["params"]):
        return dict.fromkeys(parts)
    owners: dict[str, list[str]] = {part: [] for part in parts}
    for param in row["params"]:
        owner = next((p for p in parts if param.name.startswith(f"{p}.")), parts[-1])
        owners[owner].append(param.name)
    return {part: tuple(names) for part, names in owners.items()}


def _durations(
    row: Mapping[str, Any], table: WorkloadTable, hardware: Hardware
) -> tuple[float, float]:
    """(forward, backward) seconds; 2 FLOPs per parameter and token forward, twice that backward."""
    forward = row["forward"]
    if forward is None:
        assert table.tokens is not None  # else the scenario would not have been accepted
        rate = hardware.peak_flops * table.efficiency
        forward = 2 * row["parameters"] * table.tokens / rate
    return forward, row["backward"] if row["backward"] is not None else 2 * forward


def _part(
    name: str,
    row: Mapping[str, Any],
    forward: float,
    backward: float,
    params: tuple[str, ...] | None,
    *,
    checkpointed: bool,
) -> Part:
    saved = (Tensor(name="saved", nbytes=row["activations"]),) if row["activations"] else ()
    kept = () if checkpointed else saved
    drop = tuple(t.name for t in saved)
    forward_kernels = (Kernel(name="forward", kind="unit", seconds=forward, allocates=kept),)
    again = (Kernel(name="recompute", kind="unit", seconds=forward, allocates=saved),)
    return Part(
        name=name,
        unit=row["name"],
        forward=forward_kernels,
        recompute=again if checkpointed else (),
        backward=(Kernel(name="backward", kind="unit", seconds=backward, frees=drop),),
        params=params,
    )
