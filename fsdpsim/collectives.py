"""Seconds and bytes of a collective.

``nbytes`` is always the full size, NCCL's convention: what an all-gather has gathered, what a
reduce-scatter or all-reduce starts from. Two models, chosen by ``Hardware.collective_model``:

``alpha_beta``, as textbooks write it (Thakur et al. 2005, ring algorithms): steps x latency +
bytes sent / bandwidth, with the latency and bandwidth of the slowest link.

``nccl``: as NCCL does it. For each collective its tuner picks a protocol by NCCL's own table
(``src/graph/tuning.cc``, commit 5067397), right or wrong; the pick then costs what nccl-tests
measured for it (``Hardware.nccl``):

* Ring: base + (steps inside nodes) x step + (steps between nodes) x network step + W / rate, where
  W is the bytes a rank sends; Simple has W / rate x (1 + tail / steps), since the last chunk of a
  pass is copied when nothing else moves.
* A ring over nodes crosses each node boundary through all NICs, so its rate is the lower of the
  NVLink's and the NICs' (those of this group's ranks; groups side by side share a node's).
* NVLS (all-reduce in one node): every GPU receives P and sends P / n, in the switch's rate.
* Tree and NVLS tree (all-reduce over nodes): latency grows with log2(nodes). A node sends P on two
  nodes and 2 P on more (it is inner node in one of two trees, leaf in the other).
* While kernels compute, a byte costs (1 / share - 1) / NVLink rate more, ``share`` being
  ``intra_node_in_training`` or ``inter_node_in_training``. It is a cost of the GPU, so a slow
  network hides most of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdpsim.hardware import Hardware, ProtocolCost

#: Passes over the ring: an all-reduce is a reduce-scatter and an all-gather.
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one communicator and how they lie on nodes."""

    ranks: int
    """Size of the group."""
    nodes: int = 1
    """Nodes that it spans, the same number of ranks on each."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(
                f"a group of {self.ranks} ranks cannot lie evenly on {self.nodes} nodes"
            )

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the group on one node, so also the GPUs whose NICs it uses."""
        return self.ranks // self.nodes


def shard_group(hardware: Hardware, sharding_factor: int) -> Group:
    """The group that one parameter is sharded over: ``sharding_factor`` neighbouring ranks."""
    _check_factor(hardware, sharding_factor)
    nodes = math.ceil(sharding_factor / hardware.gpus_per_node)
    return Group(ranks=sharding_factor, nodes=nodes)


def replicate_group(hardware: Hardware, sharding_factor: int) -> Group:
    """The group of ranks that hold the same shard (HSDP): every ``sharding_factor``-th rank.

    One such group per shard runs at the same time; together they use all NICs of a node.
    """
    _check_factor(hardware, sharding_factor)
    ranks = hardware.world_size // sharding_factor
    return Group(ranks=ranks, nodes=min(ranks, hardware.nodes))


def bytes_sent_per_rank(kind: str, nbytes: int, group: Group) -> float:
    """Bytes that each rank sends in a ring: (n - 1) / n of ``nbytes``, twice for an all-reduce."""
    return _passes(kind) * (group.ranks - 1) / group.ranks * nbytes


def bytes_sent_by_link(kind: str, nbytes: int, group: Group) -> tuple[float, float]:
    """Bytes that a rank sends (inside its node, to another node), the mean over the ranks.

    NCCL's rings enter and leave each node once, so of a node's ranks one sends over the network;
    parallel rings take turns as to which.
    """
    sent = bytes_sent_per_rank(kind, nbytes, group)
    between = sent / group.ranks_per_node if group.nodes > 1 else 0.0
    return sent - between, between


def collective_seconds(
    kind: str, nbytes: int, group: Group, hardware: Hardware, dtype_bytes: int = 2
) -> float:
    """Seconds from the first rank's start to the end, all ranks starting together.

    ``kind`` is ``all_gather``, ``reduce_scatter`` or ``all_reduce``. ``dtype_bytes`` decides only
    whether NVLS can reduce the type (it cannot reduce 8-bit ones).
    """
    wire = bytes_sent_per_rank(kind, nbytes, group)
    if not wire:
        return 0.0
    steps = _passes(kind) * (group.ranks - 1)
    if hardware.collective_model == "alpha_beta":
        return _alpha_beta(steps, wire, group, hardware)
    ring = _ring(steps, _passes(kind) * (group.nodes - 1), wire, group, hardware)
    if kind != "all_reduce":
        return ring
    return min(ring, _tree(nbytes, group, hardware), _nvls(nbytes, group, hardware, dtype_bytes))


def _passes(kind: str) -> int:
    if kind not in PASSES:
        raise ValueError(f"{kind!r} is not a collective; write one of {', '.join(PASSES)}")
    return PASSES[kind]


def _check_factor(hardware: Hardware, factor: int) -> None:
    world, local = hardware.world_size, hardware.gpus_per_node
    if factor < 1 or world % factor:
        raise ValueError(f"sharding factor {factor} does not divide the world size {world}")
    if local % factor and factor % local:
        raise ValueError(
            f"sharding factor {factor} neither divides {local} GPUs per node nor is a multiple"
        )


def _alpha_beta(steps: int, wire: float, group: Group, hardware: Hardware) -> float:
    if group.nodes > 1:
        return steps * hardware.inter_node_latency + wire / hardware.inter_node_bandwidth
    return steps * hardware.intra_node_latency + wire / hardware.intra_node_bandwidth


# ---- NCCL. Constants of its tuner: src/graph/tuning.cc, commit 5067397, Intel hosts with NVLink.


@dataclass(frozen=True, slots=True)
class _Belief:
    """What the tuner takes a protocol for: seconds, and its share of the links' bandwidth."""

    base: float
    step: float
    network_step: float
    share: float


_RING = {
    "ll": _Belief(6.6e-6, 0.6e-6, 2.7e-6, 0.5),
    "ll128": _Belief(14e-6, 1.9e-6, 4e-6, 0.92),
    "simple": _Belief(8.4e-6, 3.4e-6, 14e-6, 1.0),
}
_TREE = {
    "ll": _Belief(6.8e-6, 0.6e-6, 5e-6, 0.92 / 3.8),
    "ll128": _Belief(14e-6, 1.25e-6, 8.5e-6, 0.92 * 120 / 128),
    "simple": _Belief(8.4e-6, 4e-6, 14e-6, 0.92),
}
_NVLS_TREE_NETWORK_STEP = 20.9e-6
#: The network step that `Hardware.inter_node_latency` stands for; the others keep proportion to it.
_SIMPLE_NETWORK_STEP = _RING["simple"].network_step
#: LL's ceiling on 4 and more nodes, bytes/s.
_LL_MAX_NETWORK = 20.4e9
#: A ring that leaves the node pays this much host time at every step.
_NETWORK_OVERHEAD = {"ll": 1e-6, "ll128": 1e-6, "simple": 3e-6}


def _ring(steps: int, crossings: int, wire: float, group: Group, hardware: Hardware) -> float:
    name = _pick_protocol(steps, crossings, wire, group, hardware)
    cost: ProtocolCost = getattr(hardware.nccl, name)
    rate = _protocol_rate(name, cost.bandwidth * hardware.intra_node_bandwidth, group, hardware)
    seconds = cost.base + _ring_latency(name, cost.step, steps, crossings, group, hardware)
    if name == "simple":
        seconds += hardware.nccl.tail * wire / steps / hardware.intra_node_bandwidth
    return seconds + wire / rate + wire * _compute_toll(group, hardware)


def _pick_protocol(
    steps: int, crossings: int, wire: float, group: Group, hardware: Hardware
) -> str:
    """The protocol that the tuner expects to be fastest."""

    def expected(name: str) -> float:
        belief = _RING[name]
        inside = belief.share * hardware.intra_node_bandwidth
        if name == "ll":
            inside = min(inside, hardware.nccl.ll_max_bandwidth)
        latency = _ring_latency(name, belief.step, steps, crossings, group, hardware)
        return belief.base + latency + wire / _protocol_rate(name, inside, group, hardware)

    return min(_RING, key=expected)


def _protocol_rate(name: str, inside: float, group: Group, hardware: Hardware) -> float:
    """Bytes/s of a ring whose protocol moves ``inside`` bytes/s between GPUs of a node."""
    if group.nodes == 1:
        return inside
    network = _RING[name].share * _network_rate(group, hardware)
    if name == "ll":
        network = min(network, _LL_MAX_NETWORK)
    return network if group.ranks_per_node == 1 else min(inside, network)


def _ring_latency(
    name: str, step: float, steps: int, crossings: int, group: Group, hardware: Hardware
) -> float:
    if group.nodes == 1:
        return steps * step
    # With one rank per node nothing hides the network: the tuner takes the tree's latency.
    beliefs = _TREE if group.ranks_per_node == 1 else _RING
    inside = (steps - crossings) * max(step, _NETWORK_OVERHEAD[name])
    return inside + crossings * _network_step(beliefs[name].network_step, hardware)


def _network_step(belief: float, hardware: Hardware) -> float:
    return hardware.inter_node_latency * belief / _SIMPLE_NETWORK_STEP


def _network_rate(group: Group, hardware: Hardware) -> float:
    """Bytes/s out of one node through the NICs of the group's ranks."""
    nics = group.ranks_per_node * hardware.inter_node_bandwidth * hardware.inter_node_efficiency
    doublings = max(math.log2(group.nodes / 4), 0.0)
    return float(nics * hardware.scale_out**doublings)


def _compute_toll(group: Group, hardware: Hardware) -> float:
    """Seconds per byte that a collective loses to the kernels beside it."""
    inside, between = hardware.intra_node_in_training, hardware.inter_node_in_training
    return (1 / (inside if group.nodes == 1 else between) - 1) / hardware.intra_node_bandwidth


def _tree(nbytes: int, group: Group, hardware: Hardware) -> float:
    """Seconds of an all-reduce over a double binary tree of nodes, chains inside them."""
    if group.nodes == 1:
        return math.inf
    hops = group.ranks_per_node - 1
    levels = int(math.log2(group.nodes))
    rate = _tree_network_rate(group, hardware)
    if hops:
        # A chain carries the data up and down: half of the ring's bandwidth.
        rate = min(rate, hardware.intra_node_bandwidth / 2)
    fastest = min(
        belief.base
        + 2 * (hops * belief.step + levels * _network_step(belief.network_step, hardware))
        + nbytes / (rate * belief.share)
        for belief in _TREE.values()
    )
    return fastest + 2 * nbytes * _compute_toll(group, hardware)


def _tree_network_rate(group: Group, hardware: Hardware) -> float:
    """All-reduced bytes/s that the NICs allow: of two nodes one sends up, the other down."""
    return _network_rate(group, hardware) / (1 if group.nodes == 2 else 2)


def _nvls(nbytes: int, group: Group, hardware: Hardware, dtype_bytes: int) -> float:
    """Seconds of an all-reduce in the NVSwitches, with a tree between nodes."""
    nccl, local = hardware.nccl, group.ranks_per_node
    if not nccl.nvls or local == 1 or dtype_bytes < 2:
        return math.inf
    moved = nbytes * (1 + 1 / local)
    switch = moved / (nccl.nvls_bandwidth * hardware.intra_node_bandwidth)
    seconds = nccl.nvls_latency + moved * _compute_toll(group, hardware)
    if group.nodes == 1:
        return seconds + switch
    levels = int(math.log2(group.nodes))
    seconds += 2 * levels * _network_step(_NVLS_TREE_NETWORK_STEP, hardware)
    return seconds + max(switch, nbytes / _tree_network_rate(group, hardware))
