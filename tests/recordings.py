"""Recordings of real FSDP runs as scenarios: each recorded setting in the scenario language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpsim.order import host_order
from fsdpsim.program import COMPUTE, Program
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import build_costs, build_workload, record

Recording = dict[str, Any]
Event = dict[str, Any]


def read_recording(path: Path) -> Recording:
    return json.loads(path.read_text(encoding="utf-8"))


def scenario_of(
    recording: Recording, seconds: dict[tuple[str, str], float] | None = None
) -> Scenario:
    """The recorded run as a scenario; ``seconds`` gives durations by (kind, unit)."""
    settings, world = recording["settings"], recording["world_size"]
    order = _call_order(recording)
    tables = {
        "title": f"{recording['api']} {recording['model']} {recording['config']}",
        "workload": _workload(recording, order, seconds or {}),
        "training": _training(recording, settings),
        "hardware": {"gpus_per_node": world},
        "fsdp": _fsdp1(settings, world) if recording["api"] == "fsdp1" else _fsdp2(recording),
    }
    return load(tables)


def _call_order(recording: Recording) -> list[str]:
    """Parts in call order: embed, the blocks as scheduled, head."""
    settings = recording["settings"]
    root = settings["root_params"]
    blocks = settings["schedule"] or range(len(_block_names(recording)))
    order = ["embed"] if root == "embed_head" else []
    order += [f"blocks.{i}" for i in blocks]
    return order + (["head"] if root != "none" else [])


def _block_names(recording: Recording) -> list[str]:
    """The model's blocks: units of their own, or parts of the root."""
    units = [u["name"] for u in recording["units"] if u["name"].startswith("blocks.")]
    params = [p["name"].split(".") for u in recording["units"] for p in u["params"]]
    return units or list(dict.fromkeys(f"blocks.{n[1]}" for n in params if n[0] == "blocks"))


def _workload(
    recording: Recording, order: list[str], durations: dict[tuple[str, str], float]
) -> dict[str, Any]:
    names = {unit["name"] for unit in recording["units"]}
    every_part = dict.fromkeys([*order, *_block_names(recording)])
    units = []
    for unit in recording["units"]:
        parts = [p for p in every_part if (p if p in names else "root") == unit["name"]]
        params = [
            {key: p[key] for key in ("name", "shape", "dtype", "requires_grad")}
            for p in unit["params"]
        ]
        own = {
            kind: value
            for (kind, name), value in durations.items()
            if name == unit["name"] and kind != "recompute"
        }
        units.append({"name": unit["name"], "params": params, "parts": parts, **own})
    seconds = {"forward": "2 s", "backward": "4 s"}
    collectives = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "1.5 s")
    blocks = {"checkpointed": ["blocks.*"]}
    return {"units": units, "calls": order, **blocks, **seconds, **collectives}


def _training(recording: Recording, settings: dict[str, Any]) -> dict[str, Any]:
    checkpointing = settings["activation_checkpointing"]
    table = {
        "iterations": len(recording["iterations"]),
        "gradient_accumulation_steps": settings["microbatches"],
        "forwards_per_backward": settings["forwards_per_backward"],
        "activation_checkpointing": "full" if checkpointing else "none",
        "checkpoint_placement": "outside" if checkpointing == "outside_fsdp" else "inside",
        "checkpoint_reentrant": settings.get("checkpoint_reentrant", False),
        "optimizer": "sgd",
    }
    dtypes = {key: settings[key] for key in ("param_dtype", "reduce_dtype") if settings[key]}
    return table | dtypes


def _fsdp1(settings: dict[str, Any], world: int) -> dict[str, Any]:
    factor = settings["mesh"][1] if settings["mesh"] else world
    if settings["sharding_strategy"] == "NO_SHARD":
        factor = 1
    keys = ("sharding_strategy", "forward_prefetch", "limit_all_gathers", "use_orig_params")
    return {
        "runtime": "fsdp1",
        "sharding_factor": factor,
        "backward_prefetch": settings["backward_prefetch"] or "NO_PREFETCH",
        "no_sync": settings["accumulation"] == "no_sync",
        **{key: settings[key] for key in keys},
    }


def _fsdp2(recording: Recording) -> dict[str, Any]:
    settings, world = recording["settings"], recording["world_size"]
    accumulation = settings["accumulation"] or ""
    table = {
        "runtime": "fsdp2",
        "sharding_factor": settings["mesh"][1] if settings["mesh"] else world,
        "requires_gradient_sync": not accumulation.startswith("no_sync"),
        "requires_all_reduce": accumulation != "no_all_reduce",
        "reshard_after_backward": accumulation != "no_sync_keep_params",
        "is_last_backward": accumulation != "no_sync_last_backward_flag",
        "unshard_early": ["root"] if settings["unshard_root_early"] else [],
        "overrides": _overrides(recording),
    }
    if settings["reshard_after_forward"] is not None:
        table["reshard_after_forward"] = settings["reshard_after_forward"]
    return table


def _overrides(recording: Recording) -> dict[str, dict[str, Any]]:
    """The loops of the recorder over the blocks, and its lists for the first and last unit."""
    settings = recording["settings"]
    names = [u["name"] for u in recording["units"]]
    blocks = [name for name in names if name.startswith("blocks.")]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    ahead, behind = settings["forward_prefetch_modules"], settings["backward_prefetch_modules"]
    for i, block in enumerate(blocks):
        if ahead and i + ahead < len(blocks):
            found[block]["forward_prefetch"] = blocks[i + 1 : i + 1 + ahead]
        if behind and i >= behind:
            found[block]["backward_prefetch"] = blocks[i - behind : i][::-1]
    if settings["prefetch_from_ends"]:
        first = "embed" if "embed" in names else "root"
        last = "head" if "head" in names else "root"
        found[first]["forward_prefetch"] = [blocks[0]]
        found[last]["backward_prefetch"] = [blocks[-1]]
        if last == "head":
            found[blocks[-1]]["forward_prefetch"] = ["head"]
            found[blocks[0]]["backward_prefetch"] = [first]
    if settings["keep_last_block"]:
        found[blocks[-1]]["reshard_after_forward"] = False
    if "head" in names:
        found["head"]["reshard_after_forward"] = False
    return {name: override for name, override in found.items() if override}


def program_of(scenario: Scenario) -> Program:
    workload = build_workload(scenario)
    return record(scenario, workload, build_costs(scenario))


def simulated_order(program: Program, iteration: int) -> list[Event]:
    """The simulated host order with torch's name of the compute stream."""
    return [
        event | ({"stream": "default"} if event.get("stream") == COMPUTE else {})
        for event in host_order(program, iteration)
    ]


def recorded_order(recording: Recording, iteration: int) -> list[Event]:
    """The recorded host order, without what numbers or places it, and without stream events."""
    left_out = ("event_record", "stream_wait_event", "stream_wait_stream", "cpu_wait_event")
    events = recording["iterations"][iteration]
    return [_comparable(event) for event in events if event["event"] not in left_out]


def _comparable(event: Event) -> Event:
    kept = {key: value for key, value in event.items() if key not in ("seq", "phase")}
    return kept | ({"group": len(event["group"])} if "group" in event else {})
