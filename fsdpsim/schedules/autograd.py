"""The part of torch's autograd that decides in which order FSDP's hooks run.

[Note: Backward order] A backward node is ready when all nodes that feed it have run. Among the
ready ones the node created last in forward runs first; gradient accumulation runs before anything
else. A tensor's hooks run just before the node that produced it. FSDP1's ``forward_prefetch``
delays post-backward by one unit through this rule alone: it creates the views of unit i+1 before
the compute nodes of unit i.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable


class Node:
    """One backward function. ``inputs`` are the nodes that its backward feeds with gradients."""

    __slots__ = ("hooks", "inputs", "run", "sequence")

    def __init__(
        self, run: Callable[[], object], inputs: tuple[Node, ...], sequence: float
    ) -> None:
        self.run = run
        self.inputs = inputs
        self.sequence = sequence
        self.hooks: list[Callable[[], object]] = []
        """Tensor hooks on this node's output, in order of registration."""


class Autograd:
    """Creates nodes with increasing sequence numbers and runs backward over them."""

    def __init__(self) -> None:
        self._sequence = itertools.count()

    def node(self, run: Callable[[], object], inputs: Iterable[Node | None]) -> Node:
        """A node of the forward that is running; inputs that need no gradient are None."""
        return Node(run, tuple(n for n in inputs if n is not None), next(self._sequence))

    def accumulate_grad(self, run: Callable[[], object]) -> Node:
        """The node of a leaf parameter: runs as soon as it is ready."""
        return Node(run, (), math.inf)

    def backward(self, *roots: Node) -> None:
        """Run backward from ``roots`` until no node is ready."""
        missing = _gradients_awaited(roots)
        order = itertools.count()
        ready = [(-root.sequence, next(order), root) for root in roots if not missing[root]]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[2]
            for hook in node.hooks:
                hook()
            node.run()
            for fed in node.inputs:
                missing[fed] -= 1
                if missing[fed] == 0:
                    heapq.heappush(ready, (-fed.sequence, next(order), fed))


def _gradients_awaited(roots: Iterable[Node]) -> dict[Node, int]:
    counts = dict.fromkeys(roots, 0)
    stack = list(counts)
    while stack:
        for fed in stack.pop().inputs:
            if fed not in counts:
                counts[fed] = 0
                stack.append(fed)
            counts[fed] += 1
    return counts
