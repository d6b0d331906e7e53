"""``fsdpsim ledger --residual``: ZeRO-R, with the fragmentation run on the scenario's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Group

from fsdpsim.ledger import residual
from fsdpsim.ledger.fragmentation import EXAMPLE, run_story
from fsdpsim.ledger.residual import Shape
from fsdpsim.ledger.runs import held_at
from fsdpsim.ledger.views.common import Report, Shown, head, show_decimal, show_head, table
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp
from fsdpsim.simulate import build_costs, build_workload, record
from fsdpsim.workload import DTYPE_BYTES, Workload

#: Degrees of model parallelism, and numbers of tiles, that the tables show.
DEGREES = (1, 2, 4, 8, 16)


def report(scenario: Scenario) -> Report:
    """Activations (of a [model]), buffers, working memory and fragmentation."""
    workload = build_workload(scenario)
    found = head(scenario, workload)
    found["activations"] = _activations(scenario) if scenario.model is not None else None
    found["fused_buffer_bytes"] = residual.fused_buffer_bytes(found["parameters"])
    found["ddp_bucket_bytes"] = int(_bucket_cap(scenario) * 2**20)
    found["largest_operator"] = _largest_operator(scenario, workload)
    found["fragmentation"] = {
        "story": asdict(EXAMPLE),
        "expandable_segments": scenario.allocator.expandable_segments,
        "outcomes": [
            asdict(run_story(EXAMPLE, scenario.allocator, contiguous=contiguous))
            for contiguous in (False, True)
        ],
    }
    return found


def _bucket_cap(scenario: Scenario) -> float:
    fsdp = scenario.fsdp
    return fsdp.bucket_cap_mb if isinstance(fsdp, Ddp) else Ddp(runtime="ddp").bucket_cap_mb


def shape_of(scenario: Scenario) -> Shape:
    """The sizes of a [model] scenario."""
    model, training = scenario.model, scenario.training
    assert model is not None
    return Shape(
        batch=training.micro_batch_size,
        seq_len=training.seq_len,
        hidden=model.hidden_size,
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
    )


def _activations(scenario: Scenario) -> Report:
    shape = shape_of(scenario)
    size = DTYPE_BYTES[scenario.param_dtype or scenario.training.dtype]
    return {
        "formula_bytes": size * residual.activation_elements(shape),
        "checkpoint_bytes": residual.checkpoint_bytes(shape, dtype_bytes=size),
        "simulated_bytes": _simulated_activations(scenario),
        "activation_checkpointing": str(scenario.training.activation_checkpointing),
        "partitioned_checkpoint_bytes": {
            ranks: residual.partitioned_checkpoint_bytes(shape, ranks, dtype_bytes=size)
            for ranks in DEGREES
        },
        "partitioning_overhead": residual.partitioning_overhead(),
        "working_memory_bytes": residual.activation_working_memory_bytes(shape),
    }


def _simulated_activations(scenario: Scenario) -> int:
    """Bytes of activations when backward begins, as the scenario's own runtime allocates them."""
    costs = build_costs(scenario)
    program = record(scenario, build_workload(scenario, costs), costs)
    return held_at(program, "backward_call").get("activations", 0)


def _largest_operator(scenario: Scenario, workload: Workload) -> Report:
    params = [param for unit in workload.units for param in unit.params]
    largest = max(params, key=lambda param: param.numel)
    size = DTYPE_BYTES[scenario.param_dtype or largest.dtype]
    return {
        "name": largest.name,
        "shape": largest.shape,
        "working_memory_bytes": {
            tiles: residual.working_memory_bytes(largest.numel, tiles=tiles, dtype_bytes=size)
            for tiles in DEGREES
        },
    }


# ---- the terminal


def tables(found: Report) -> Shown:
    """Activations, buffers, working memory, and the two outcomes of the story."""
    yield show_head(found)
    if found["activations"] is None:
        yield "Activations follow from hidden size and layers: only a [model] has them."
    else:
        yield table("Activations per GPU", "what", "bytes", rows=_activation_rows(found))
    yield table("Buffers (C_B)", "what", "bytes", rows=_buffer_rows(found))
    yield _tiles_table(found)
    yield from _fragmentation(found["fragmentation"])


def _activation_rows(found: Report) -> Iterator[tuple[str, str]]:
    activations = found["activations"]
    yield "all of them: 12 hd batch seq layers elements", show_decimal(activations["formula_bytes"])
    yield "checkpoints, one per block", show_decimal(activations["checkpoint_bytes"])
    mode = activations["activation_checkpointing"]
    label = f"simulated when backward begins, activation_checkpointing = {mode}"
    yield label, show_decimal(activations["simulated_bytes"])
    overhead = activations["partitioning_overhead"]
    for ranks, nbytes in activations["partitioned_checkpoint_bytes"].items():
        if ranks > 1:
            label = f"checkpoints cut over {ranks} model-parallel ranks (P_a)"
            yield f"{label}, +{overhead:.1%} of MP's traffic", show_decimal(nbytes)
    label = "working memory between two checkpoints, attention scores kept (AWM)"
    yield label, show_decimal(activations["working_memory_bytes"])


def _buffer_rows(found: Report) -> Iterator[tuple[str, str]]:
    yield (
        "one fp32 buffer for all gradients: 4 B per parameter",
        show_decimal(found["fused_buffer_bytes"]),
    )
    yield "constant size: one DDP bucket", show_decimal(found["ddp_bucket_bytes"])


def _tiles_table(found: Report) -> Group:
    operator = found["largest_operator"]
    shape = " x ".join(map(str, operator["shape"]))
    return table(
        f"Working memory of the largest operator, {operator['name']} ({shape}): "
        "parameters + gradients",
        "tiles",
        *map(str, operator["working_memory_bytes"]),
        rows=[["bytes", *map(show_decimal, operator["working_memory_bytes"].values())]],
    )


def _fragmentation(found: Report) -> Shown:
    story = found["story"]
    yield table(
        f"Fragmentation (M_D), expandable_segments = {str(found['expandable_segments']).lower()}: "
        f"{len(story['activations'])} blocks allocate and drop activations and keep "
        f"{show_decimal(story['checkpoint'])} of checkpoint each; then backward asks for "
        f"{show_decimal(story['request'])}",
        "checkpoints",
        "free of the device",
        "reserved",
        "free in pieces",
        "the request",
        rows=map(_outcome, found["outcomes"]),
    )


def _outcome(outcome: Report) -> Iterator[str]:
    yield "in one buffer" if outcome["contiguous"] else "between activations"
    yield f"{show_decimal(outcome['free'])}, {outcome['free'] / EXAMPLE.capacity:.0%}"
    yield show_decimal(outcome["reserved"])
    yield show_decimal(outcome["in_pieces"]) if outcome["in_pieces"] else "-"
    yield "served" if outcome["served"] else "out of memory"
