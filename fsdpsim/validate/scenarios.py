"""From a row to the scenario that it describes, or the reason why it cannot be one.

No decision here looks at a measured value.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpsim.hardware import Hardware, preset_names
from fsdpsim.scenario import Scenario, ScenarioError, load
from fsdpsim.validate.rows import GIB, Measurements, Row, measured_step_seconds

DATA = Path(__file__).parents[1] / "data"

Tables = dict[str, Any]


class SkipRow(Exception):  # noqa: N818 - not a fault
    """The row cannot be modelled; the message says why."""


def scenario_of(row: Row, data: Measurements, *, efficiency: float | None = None) -> Scenario:
    """The scenario of ``row``; ``efficiency`` replaces that of its machine.

    Raises :class:`SkipRow` with a reason where there is none.
    """
    _check(row)
    recipe = recipe_of(row)
    hardware = _hardware(row, data)
    if efficiency is not None:
        hardware["efficiency"] = efficiency
    tables = {
        "title": f"{row['id']}: {row['model']} on {row['n_gpus']} x {row['hw']}",
        "model": model_config(row, data),
        "training": _training(row, recipe),
        "fsdp": _fsdp(row, recipe, data),
        "hardware": hardware,
        "allocator": recipe["allocator"],
    }
    try:
        return load(tables)
    except ScenarioError as error:
        raise SkipRow(str(error)) from None


# ---- what is out of reach


def _check(row: Row) -> None:
    for reason in _obstacles(row):
        raise SkipRow(reason)


def _obstacles(row: Row) -> Iterator[str]:
    if not row.get("fsdp_only", True):
        yield "not FSDP alone: tensor, pipeline or context parallelism, or DDP"
    if row.get("float8"):
        yield "8-bit matmuls"
    dtype = str(row.get("param_dtype") or "bf16")
    if "fp8" in dtype:
        yield "8-bit matmuls"
    if _dtype(dtype) is None:
        yield f"param_dtype {dtype!r} is not known"
    impl = str(row.get("impl") or "")
    if not impl.startswith(("FSDP1", "FSDP2")) or "offload" in impl:
        yield f"implementation {impl!r} is not modelled"
    for key in ("n_gpus", "seq_len", "micro_batch"):
        if not isinstance(row.get(key), int):
            yield f"{key} not stated as a number"
    checkpointing = str(row.get("act_ckpt") or "not stated")
    if "offload" in checkpointing:
        yield "activations offloaded to the host"
    if "not stated" in checkpointing and "selective" not in checkpointing:
        yield "activation checkpointing not stated"
    if measured_step_seconds(row) is None:
        yield "no step time or throughput published"


# ---- software


@lru_cache
def _read_toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


def recipe_of(row: Row) -> Mapping[str, Tables]:
    """The settings of the row's training code: tables ``training``, ``fsdp`` and ``allocator``."""
    merged: dict[str, Tables] = {"training": {}, "fsdp": {}, "allocator": {}}
    for recipe in _read_toml("recipes.toml")["recipe"]:
        if _applies(recipe, row):
            for table, settings in merged.items():
                settings.update(recipe.get(table, {}))
    return merged


def _applies(recipe: Mapping[str, Any], row: Row) -> bool:
    source, date = str(row.get("source", "")), str(row.get("date") or "")
    return (
        source.split("_")[0] == recipe["source"]
        and recipe.get("since", "") <= date < recipe.get("until", "9999")
        and row["id"] in recipe.get("rows", (row["id"],))
        and row["n_gpus"] >= recipe.get("n_gpus_from", 0)
        and row["model"] in recipe.get("models", (row["model"],))
        and row["hw"] in recipe.get("hardware", (row["hw"],))
    )


def _training(row: Row, recipe: Mapping[str, Tables]) -> Tables:
    settings = {k: v for k, v in recipe["training"].items() if k not in RECIPE_ONLY}
    reduce_dtype = _dtype(str(row["reduce_dtype"])) if row.get("reduce_dtype") else None
    if reduce_dtype:
        settings["reduce_dtype"] = reduce_dtype
    if "fused" in str(row.get("optimizer") or "").lower():
        settings["optimizer_fused"] = "non-fused" not in str(row["optimizer"]).lower()
    return {
        "micro_batch_size": row["micro_batch"],
        "seq_len": row["seq_len"],
        "gradient_accumulation_steps": row.get("grad_accum") or 1,
        "activation_checkpointing": _checkpointing(row, recipe),
        "compile": bool(row.get("compile")),
        "param_dtype": _dtype(str(row.get("param_dtype") or "bf16")),
        **settings,
    }


RECIPE_ONLY = ("keep_last_block", "checkpoint")


def _dtype(text: str) -> str | None:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return names.get(text.split()[0].split("+")[0])


def _checkpointing(row: Row, recipe: Mapping[str, Tables]) -> Any:
    text = str(row["act_ckpt"])
    if text.startswith("none"):
        return "none"
    if text.startswith("full"):
        return recipe["training"].get("checkpoint", "full")
    every = re.search(r"every (\d+)", text)
    if every:
        return {"every": int(every[1])}
    if "every n-th" in text:
        return {"fraction": _checkpointed_share(row)}
    return {"every": 2} if "layer" in text else "selective"


def _checkpointed_share(row: Row) -> float:
    """Share of the blocks that are checkpointed, from how the source counts their recompute.

    HFU counts one more forward, a third of MFU's FLOPs, for them: HFU / MFU = 1 + share / 3.
    """
    share: float = 3 * (row["hfu_pct"] / row["mfu_pct"] - 1)
    return round(min(max(share, 0.01), 1.0), 2)


# ---- sharding


def _fsdp(row: Row, recipe: Mapping[str, Tables], data: Measurements) -> Tables:
    build = _fsdp1 if str(row["impl"]).startswith("FSDP1") else _fsdp2
    return build(row, recipe, data)


def _fsdp1(row: Row, recipe: Mapping[str, Tables], data: Measurements) -> Tables:
    strategies = ("HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "FULL_SHARD")
    strategy = next((s for s in strategies if s in str(row.get("strategy"))), None)
    if strategy is None:
        raise SkipRow(f"sharding strategy {row.get('strategy')!r} is not known")
    prefetch = re.match(
        r"BACKWARD_PRE|BACKWARD_POST|NO_PREFETCH", row.get("backward_prefetch") or ""
    )
    limit = row.get("limit_all_gathers")
    tables = {
        "runtime": "fsdp1",
        "sharding_strategy": strategy,
        "backward_prefetch": prefetch[0] if prefetch else "BACKWARD_PRE",
        "forward_prefetch": row.get("forward_prefetch") is True,
        "limit_all_gathers": limit is not False,
        "no_sync": "no_sync" in str(row.get("notes") or ""),
        **_known(recipe, ("use_orig_params", "wrap_embedding", "wrap_head")),
    }
    factor = row.get("shard_factor")
    return tables | ({"sharding_factor": factor} if factor else {})


def _fsdp2(row: Row, recipe: Mapping[str, Tables], data: Measurements) -> Tables:
    tables: Tables = {
        "runtime": "fsdp2",
        **_known(recipe, ("wrap_embedding", "wrap_head")),
    }
    if row.get("shard_factor"):
        tables["sharding_factor"] = row["shard_factor"]
    for key in ("forward_prefetch", "backward_prefetch"):
        depth = re.match(r"depth (\d+)", str(row.get(key) or ""))
        if depth:
            tables[key] = int(depth[1])
    if "embedding and output wrapped" in str(row.get("notes") or ""):
        tables |= {"wrap_embedding": True, "wrap_head": True}
    if row.get("reshard_after_forward") is False or row.get("strategy") == "SHARD_GRAD_OP":
        tables["reshard_after_forward"] = False
    else:
        kept = _not_resharded(recipe, data.models[row["model"]]["n_layers"])
        tables["overrides"] = {name: {"reshard_after_forward": False} for name in kept}
    return tables


def _not_resharded(recipe: Mapping[str, Tables], n_layers: int) -> Iterator[str]:
    if recipe["training"].get("keep_last_block"):
        yield f"layers.{n_layers - 1}"
    if recipe["fsdp"].get("keep_head"):
        yield "head"


def _known(recipe: Mapping[str, Tables], keys: tuple[str, ...]) -> Tables:
    return {key: recipe["fsdp"][key] for key in keys if key in recipe["fsdp"]}


# ---- model and machine


def model_config(row: Row, data: Measurements) -> Tables:
    """The row's architecture in Hugging Face's spelling. Raises :class:`SkipRow`."""
    if row["model"] not in data.models:
        raise SkipRow(f"model {row['model']!r} is not in the table of models")
    model = data.models[row["model"]]
    family = next((f for text, f in FAMILIES if model["arch"].startswith(text)), None)
    if family is None:
        raise SkipRow(f"model {row['model']!r} is not a decoder-only transformer: {model['arch']}")
    config = {k: model[k] for k in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff")}
    config |= {"model_type": family, "vocab_size": model["vocab"], "max_seq_len": row["seq_len"]}
    if model.get("head_dim"):
        config["head_dim"] = model["head_dim"]
    if model.get("tied_embeddings") is not None:
        config["tie_word_embeddings"] = model["tied_embeddings"]
    return config


#: How ``arch`` begins -> the family whose blocks it has.
FAMILIES = (("MPT", "mpt"), ("GPT", "gpt2"), ("Llama", "llama"), ("Qwen3", "qwen3"))


def _hardware(row: Row, data: Measurements) -> Tables:
    if row["hw"] not in data.hardware:
        raise SkipRow(f"machine {row['hw']!r} is not in the table of hardware")
    facts = data.hardware[row["hw"]]
    machine = _read_toml("machines.toml").get(row["hw"]) or {"gpu": _preset(facts)}
    local = min(facts["gpus_per_node"], row["n_gpus"])
    if row["n_gpus"] % local:
        raise SkipRow(f"{row['n_gpus']} GPUs do not fill nodes of {local}")
    tables = {
        "nodes": row["n_gpus"] // local,
        "gpus_per_node": local,
        "contention": True,
        **machine,
    }
    if facts.get("inter_gbps_per_node"):
        tables["inter_node_bandwidth"] = (
            f"{facts['inter_gbps_per_node'] / facts['gpus_per_node']} Gb/s"
        )
    return tables


def _preset(facts: Mapping[str, Any]) -> str:
    """The preset of a machine's GPU: the one of its family whose memory is nearest."""
    family = [name for name in preset_names() if name.partition("-")[0] in facts["gpu"]]
    if not family:
        raise SkipRow(f"no preset for the GPU {facts['gpu']!r}")
    memory = (facts.get("gpu_mem_gib") or 0) * GIB
    return min(family, key=lambda name: abs(Hardware.model_validate({"gpu": name}).memory - memory))
