"""From a model to the kernels of one micro-batch, with their FLOPs, bytes and buffers."""

from fsdpsim.kernels.build import build_workload
from fsdpsim.kernels.coarse import coarsen, merge
from fsdpsim.kernels.optimizer import (
    OPTIMIZERS,
    clip_kernels,
    optimizer_kernels,
    optimizer_state_bytes,
    optimizer_states,
)

__all__ = [
    "OPTIMIZERS",
    "build_workload",
    "clip_kernels",
    "coarsen",
    "merge",
    "optimizer_kernels",
    "optimizer_state_bytes",
    "optimizer_states",
]
