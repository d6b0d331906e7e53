"""ZeRO++: what a smaller all-gather payload and a second copy per node save on the network.

Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
Training", arXiv 2306.10209, section 3 and its table of cross-node volume: ZeRO-3 moves 3 M (forward
gather, backward gather, reduce-scatter); qwZ gathers int8 weights (M to 0.5 M), hpZ keeps a
secondary partition inside each node so that backward gathers over NVLink only (M to 0), qgZ sends
int4 gradients in two all-to-all hops (M to 0.25 M). Together 0.75 M.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from fsdpsim.hardware import Hardware

#: Bits of an unquantised element: 16-bit parameters and gradients.
WHOLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Bits per element of ZeRO-3's three transfers, and whether each node keeps a second copy."""

    name: str
    forward_bits: int = WHOLE
    backward_bits: int = WHOLE
    reduce_bits: int = WHOLE
    secondary_partition: bool = False


VARIANTS = (
    Quantisation(name="ZeRO-3"),
    Quantisation(name="int8 forward gather (qwZ)", forward_bits=8),
    Quantisation(name="int8 gathers, both", forward_bits=8, backward_bits=8),
    Quantisation(name="qwZ + copy in node (hpZ)", forward_bits=8, secondary_partition=True),
    Quantisation(
        name="qwZ + hpZ + int4 gradients (qgZ)",
        forward_bits=8,
        reduce_bits=4,
        secondary_partition=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """One variant. Scales of the quantised blocks are not counted, as in the paper."""

    name: str
    volume: float
    """The paper's cross-node volume in units of the model's 16-bit size: 3 for ZeRO-3."""
    network_bytes: float
    """Bytes that a node sends over the network per step."""
    in_node_bytes: float
    """Bytes that a GPU sends per step in collectives which stay in its node."""
    secondary_bytes: int
    """Bytes of memory per GPU for the secondary partition."""


def volume(variant: Quantisation, numel: int, hardware: Hardware) -> Volume:
    """The volume of ``variant`` for ``numel`` parameters over all GPUs of ``hardware``.

    A ring over N ranks passes each node boundary with (N - 1) / N of its size. qgZ's second hop
    exchanges what is reduced inside the node with the other nodes: (n - 1) / n of it per node.
    """
    world, nodes, local = hardware.world_size, hardware.nodes, hardware.gpus_per_node
    ring, between = Fraction(world - 1, world), Fraction(nodes - 1, nodes)
    inside = Fraction(local - 1, local)
    forward = _nbytes(numel, variant.forward_bits)
    backward = _nbytes(numel, variant.backward_bits)
    reduced = _nbytes(numel, variant.reduce_bits)
    two_hops = variant.reduce_bits != WHOLE
    network = ring * forward + (between if two_hops else ring) * reduced
    in_node = inside * reduced if two_hops else Fraction(0)
    if variant.secondary_partition:
        in_node += inside * backward
    else:
        network += ring * backward
    if nodes == 1:
        network, in_node = Fraction(0), network + in_node
    return Volume(
        name=variant.name,
        volume=_units(variant),
        network_bytes=float(network),
        in_node_bytes=float(in_node),
        secondary_bytes=-(-numel // local) * 2 if variant.secondary_partition else 0,
    )


def _nbytes(numel: int, bits: int) -> Fraction:
    return Fraction(numel * bits, 8)


def _units(variant: Quantisation) -> float:
    backward = 0 if variant.secondary_partition else variant.backward_bits
    return (variant.forward_bits + backward + variant.reduce_bits) / WHOLE


def volumes(numel: int, hardware: Hardware) -> tuple[Volume, ...]:
    """All variants, from 3 M down."""
    return tuple(volume(variant, numel, hardware) for variant in VARIANTS)
