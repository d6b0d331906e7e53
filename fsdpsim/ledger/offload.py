"""ZeRO-Offload: every way to place a training step's data on GPU and CPU.

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840,
section 3 (the data-flow graph of figure 2, its edges in bytes per parameter, and table 1). Forward
and backward do work that grows with the batch, so they stay on the GPU; the other seven nodes may
lie on either side, and every edge that is cut crosses PCIe once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

#: The forward-backward super-node.
FIXED = "forward_backward"

#: Data nodes -> bytes per parameter.
DATA = {"p16": 2, "g16": 2, "p32": 4, "m32": 4, "v32": 4}

#: The nodes that may be placed: data, the update, and the cast of the new parameters to 16 bit.
NODES = (*DATA, "update", "float2half")

#: (from, to, bytes per parameter and step). Forward and backward each read p16.
EDGES = (
    ("p16", FIXED, 4),
    (FIXED, "g16", 2),
    ("g16", "update", 2),
    ("p32", "update", 4),
    ("m32", "update", 4),
    ("v32", "update", 4),
    ("update", "p32", 4),
    ("update", "m32", 4),
    ("update", "v32", 4),
    ("p32", "float2half", 4),
    ("float2half", "p16", 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which nodes lie on the CPU; the rest is on the GPU. Volumes in bytes per parameter."""

    on_cpu: tuple[str, ...]
    communication: int
    """What crosses PCIe in a step."""
    gpu_memory: int
    cpu_memory: int


def placement(on_cpu: tuple[str, ...]) -> Placement:
    """One placement. Raises ``ValueError`` for a node that cannot be moved."""
    unknown = set(on_cpu) - set(NODES)
    if unknown:
        raise ValueError(f"{sorted(unknown)} cannot be placed; only {', '.join(NODES)} can")
    return Placement(
        on_cpu=on_cpu,
        communication=sum(size for a, b, size in EDGES if (a in on_cpu) != (b in on_cpu)),
        gpu_memory=sum(size for node, size in DATA.items() if node not in on_cpu),
        cpu_memory=sum(size for node, size in DATA.items() if node in on_cpu),
    )


def placements() -> tuple[Placement, ...]:
    """All 128, those that communicate least first, then those with least GPU memory."""
    return tuple(sorted(_all(), key=lambda p: (p.communication, p.gpu_memory, p.on_cpu)))


def _all() -> Iterator[Placement]:
    for chosen in product((False, True), repeat=len(NODES)):
        yield placement(tuple(n for n, cpu in zip(NODES, chosen, strict=True) if cpu))


#: The least that any offloading can communicate: two edges of 2 bytes (section 3.2).
LEAST_COMMUNICATION = 4


def optimal() -> Placement:
    """ZeRO-Offload's own: of those that communicate least, the one with least GPU memory."""
    offloaded = [p for p in placements() if p.communication == LEAST_COMMUNICATION]
    return min(offloaded, key=lambda p: p.gpu_memory)
