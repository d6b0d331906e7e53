"""Collectives as Kineto describes them: process groups, message sizes, kernel names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpsim.engine import Op, Step
from fsdpsim.scenario import Scenario
from fsdpsim.workload import DTYPE_BYTES

#: ``c10::toString`` of torch's dtypes.
SCALAR_TYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8_e4m3fn",
    "int8": "Char",
}
#: How NCCL's kernels spell them (``src/device/generate.py``; signed bytes run the unsigned kernel).
NCCL_TYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "int8": "u8",
}
#: Ranks that torch writes out before it puts an ellipsis (``kTruncatLength`` of ParamCommsUtils).
SHOWN_RANKS = 30


class Names(NamedTuple):
    """What one kind of collective is called on its way from torch to the GPU."""

    op: str
    annotation: str
    collective: str
    kernel: str


#: NCCL builds one kernel per function and type, named after ring and LL, which runs every other
#: algorithm and protocol too (``best_kernel`` of ``src/device/generate.py``).
NAMES = {
    "all_gather": Names(
        "c10d::_allgather_base_",
        "nccl:_all_gather_base",
        "_allgather_base",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "reduce_scatter": Names(
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        "_reduce_scatter_base",
        "ncclDevKernel_ReduceScatter_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "all_reduce": Names(
        "c10d::allreduce_",
        "nccl:all_reduce",
        "allreduce",
        "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """One communicator as torch names it."""

    name: str
    description: str
    ranks: range


def process_groups(scenario: Scenario, steps: Iterable[Step], rank: int) -> dict[str, ProcessGroup]:
    """The process group that ``rank`` is in, for each communicator, in order of first use."""
    groups: dict[str, ProcessGroup] = {}
    for op in steps:
        if type(op) is not Op or op.communicator is None or op.communicator in groups:
            continue
        ranks = _ranks(scenario, op, rank)
        whole = len(ranks) == scenario.world_size and op.communicator in ("shard", "replicate")
        groups[op.communicator] = ProcessGroup(
            name=str(len(groups)),
            description="default_pg" if whole else op.communicator,
            ranks=ranks,
        )
    return groups


def _ranks(scenario: Scenario, op: Op, rank: int) -> range:
    """Neighbours share a shard group; every F-th rank holds the same shard."""
    size, factor = op.collective.group_size, scenario.shard_factor
    if op.collective.group == "replicate":
        return range(rank % factor, rank % factor + factor * size, factor)
    first = rank - rank % size
    return range(first, first + size)


def kernel_name(op: Op) -> str:
    """The name of the NCCL kernel."""
    name = NAMES[op.collective.kind].kernel
    return name.replace("{dtype}", NCCL_TYPES[op.collective.dtype])


def collective_args(op: Op, group: ProcessGroup) -> dict[str, Any]:
    """What Kineto adds to the kernel of a collective; message sizes in elements."""
    info = op.collective
    whole = info.nbytes // DTYPE_BYTES[info.dtype]
    part = whole if info.shard_nbytes is None else info.shard_nbytes // DTYPE_BYTES[info.dtype]
    return {
        "Collective name": NAMES[info.kind].collective,
        "In msg nelems": part if info.kind == "all_gather" else whole,
        "Out msg nelems": part if info.kind == "reduce_scatter" else whole,
        "Group size": info.group_size,
        "dtype": SCALAR_TYPES[info.dtype],
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": _shown(group.ranks),
    }


def _shown(ranks: range) -> str:
    shown = [str(r) for r in ranks[:SHOWN_RANKS]]
    return f"[{', '.join(shown)}{', ...' if len(ranks) > SHOWN_RANKS else ''}]"
