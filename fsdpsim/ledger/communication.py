"""Bytes that a GPU sends in one step, by ring, and how long the links need for them.

Sources: ZeRO, arXiv 1910.02054, section 7: data parallelism and stages 1 and 2 move 2 P elements,
stage 3 moves 3 P. A ring over N ranks sends (N - 1) / N of a collective's size (Thakur et al.
2005). PyTorch FSDP, arXiv 2304.11277, equation 1: hybrid sharding reduces inside the shard group,
then all-reduces the shard over the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdpsim.collectives import (
    Group,
    bytes_sent_by_link,
    bytes_sent_per_rank,
    replicate_group,
    shard_group,
)
from fsdpsim.hardware import Hardware
from fsdpsim.ledger.model_states import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective over all units, ``times`` in a step. ``nbytes`` is the full size of one."""

    what: str
    kind: str
    nbytes: int
    group: Group
    times: int = 1

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step."""
        return self.times * bytes_sent_per_rank(self.kind, self.nbytes, self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one GPU sends per step."""

    in_node: float
    """In rings that stay in a node."""
    across_nodes: float
    """In rings that span nodes: the whole ring, as textbooks count, who let it run at the network's
    speed."""
    on_network: float
    """What of it leaves the node, the mean over ranks: a ring enters and leaves each node once."""

    @property
    def total(self) -> float:
        """Bytes in rings of both kinds."""
        return self.in_node + self.across_nodes


def transfers(
    strategy: Strategy,
    units: Sequence[int],
    hardware: Hardware,
    *,
    trained: Sequence[int] | None = None,
    gather_bytes: int = 2,
    reduce_bytes: int = 2,
    micro_batches: int = 1,
) -> tuple[Transfer, ...]:
    """The collectives of one step over units of so many parameters, padding included.

    ``trained`` counts those of each unit that have gradients; default: all. ``gather_bytes`` and
    ``reduce_bytes`` are bytes per element. Where parameters are whole they are gathered once, after
    the update; where gradients are whole they add up over the micro-batches and are reduced once.
    Raises ``ValueError`` for a factor that the nodes cannot hold.
    """
    group = _shard_group(strategy, hardware)
    gather = ("all_gather", _padded(units, strategy.factor) * gather_bytes, group)
    found = []
    if "parameters" in strategy.sharded:
        found.append(_transfer("parameters for forward", *gather, micro_batches))
        found.append(_transfer("parameters for backward", *gather, micro_batches))
    reductions = micro_batches if "gradients" in strategy.sharded else 1
    nbytes = _padded(units if trained is None else trained, strategy.factor) * reduce_bytes
    found.append(_transfer("gradients", strategy.reduces_by, nbytes, group, reductions))
    if "parameters" in strategy.sharded and strategy.factor < hardware.world_size:
        shard = nbytes // strategy.factor
        replicas = replicate_group(hardware, strategy.factor)
        found.append(_transfer("gradient shards", "all_reduce", shard, replicas, reductions))
    elif strategy.sharded and "parameters" not in strategy.sharded:
        found.append(_transfer("updated parameters", *gather))
    return tuple(found)


def _padded(units: Sequence[int], factor: int) -> int:
    return sum(math.ceil(numel / factor) * factor for numel in units)


def _shard_group(strategy: Strategy, hardware: Hardware) -> Group:
    """The ranks of a strategy's main collectives: DDP's all-reduce runs over all of them."""
    return shard_group(hardware, strategy.factor if strategy.sharded else hardware.world_size)


def _transfer(what: str, kind: str, nbytes: int, group: Group, times: int = 1) -> Transfer:
    return Transfer(what=what, kind=kind, nbytes=nbytes, group=group, times=times)


def traffic(found: Iterable[Transfer]) -> Traffic:
    """What the transfers add up to for one GPU."""
    found = tuple(found)
    return Traffic(
        in_node=sum(t.sent for t in found if t.group.nodes == 1),
        across_nodes=sum(t.sent for t in found if t.group.nodes > 1),
        on_network=sum(t.times * bytes_sent_by_link(t.kind, t.nbytes, t.group)[1] for t in found),
    )


def bare_seconds(sent: Traffic, hardware: Hardware) -> float:
    """Seconds of the transfers at full bandwidth, one after the other: no latency, no overlap.

    A ring that spans nodes runs at ``inter_node_bandwidth``, the bandwidth of one GPU's NIC.
    """
    return (
        sent.in_node / hardware.intra_node_bandwidth
        + sent.across_nodes / hardware.inter_node_bandwidth
    )


def hybrid_factors(hardware: Hardware) -> list[int]:
    """Every F between 1 and the world size that whole nodes, or even shares of one, can hold."""
    world, local = hardware.world_size, hardware.gpus_per_node
    return [
        factor
        for factor in range(2, world)
        if world % factor == 0 and (local % factor == 0 or factor % local == 0)
    ]
