"""Ranks in one simulation: a collective starts when the last member of its group arrives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

import simpy

from fsdpsim.engine import Clock, Contention, Op, start
from fsdpsim.memory import GpuMemory
from fsdpsim.program import Program

#: (collective, rank) -> (the communicator that it runs on, number of its members).
Membership = Callable[[Op, int], tuple[Hashable, int]]

ContentionFactory = Callable[[simpy.Environment], Contention]


class Meeting:
    """One collective's rendezvous: all ``members`` start together."""

    __slots__ = ("missing", "waiting")

    def __init__(self, members: int) -> None:
        self.missing = members
        self.waiting: list[Callable[[float], object]] = []

    def arrive(self, begin: Callable[[float], object], now: float) -> bool:
        """Whether all members are here now; if so, those that waited begin too."""
        self.missing -= 1
        if self.missing:
            self.waiting.append(begin)
            return False
        for other in self.waiting:
            other(now)
        return True


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank runs, and its GPU's memory."""

    program: Program
    memory: GpuMemory


def run_ranks(
    ranks: Sequence[Rank], membership: Membership, contention: ContentionFactory | None = None
) -> None:
    """Run all ranks to the end; with ``contention``, one for each rank's GPU.

    The ranks must issue the same collectives in the same order. Raises ``RuntimeError`` if an op
    never ran, and the allocator's ``OutOfMemoryError`` of the first rank that runs out of memory.
    """
    if len(ranks) > 1:
        _arrange_meetings(ranks, membership)
    env = Clock()
    hosts = []
    for rank in ranks:
        gpu = contention(env) if contention is not None else None
        hosts.append(start(env, rank.program.steps, rank.memory, gpu))
    env.run()
    for host in hosts:
        host.check_finished()


def _arrange_meetings(ranks: Sequence[Rank], membership: Membership) -> None:
    """Give the k-th op of a communicator the same meeting on all its members."""
    meetings: dict[tuple[Hashable, int], Meeting] = {}
    for number, rank in enumerate(ranks):
        turns: defaultdict[str, count[int]] = defaultdict(count)
        for op in rank.program.steps:
            if type(op) is not Op or op.communicator is None:
                continue
            communicator, members = membership(op, number)
            key = (communicator, next(turns[op.communicator]))
            if key not in meetings:
                meetings[key] = Meeting(members)
            op.rendezvous = meetings[key]
