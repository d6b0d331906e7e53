"""Ops that run at the same time on one GPU slow each other down.

A collective occupies a share of the GPU's multiprocessors, and the kernels that run beside it have
the rest, in equal shares when they are several (on several streams). A collective is slower while
a kernel runs, and collectives on one link share its bandwidth equally. The factors come from
:class:`fsdpsim.hardware.Hardware`, with their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from fsdpsim.engine import Op
from fsdpsim.program import is_kernel


@dataclass(slots=True)
class _Running:
    """An op under way: what is left of it (seconds at full speed) as of ``since``."""

    op: Op
    finish: Callable[[], object]
    left: float
    since: float
    slowdown: float = 1.0
    version: int = 0
    """Grows with each change of speed, so that the end foreseen before is recognised as void."""


class SharedGpu:
    """The contention of one rank's GPU and links."""

    def __init__(
        self,
        env: simpy.Environment,
        link_of: Mapping[str, str],
        *,
        taken_by: Callable[[Sequence[str]], float],
        communication_slowdown: Callable[[Op], float],
    ) -> None:
        """``link_of`` maps a collective's group to the link that it is bound by.

        ``taken_by`` tells which share of the GPU the collectives take that run on these links.
        ``communication_slowdown`` tells how many times longer a collective takes beside a kernel.
        """
        self.env = env
        self.link_of = link_of
        self.taken_by = taken_by
        self.communication_slowdown = communication_slowdown
        self.running: dict[Op, _Running] = {}

    def begin(self, op: Op, finish: Callable[[], object]) -> None:
        """Run ``op``; ``finish`` is called at its end."""
        self.running[op] = _Running(op, finish, op.seconds, self.env.now)
        self._change_speeds(begun=op)

    def _change_speeds(self, begun: Op | None = None) -> None:
        links = [self._link(op) for op in self.running if op.collective is not None]
        kernels = sum(is_kernel(op) for op in self.running)
        of_kernels = kernels / (1 - self.taken_by(links)) if kernels else 1.0
        for entry in self.running.values():
            slowdown = of_kernels
            if not is_kernel(entry.op):
                slowdown = self._slowdown(entry.op, links, kernels)
            if slowdown == entry.slowdown and entry.op is not begun:
                continue
            now = self.env.now
            entry.left -= (now - entry.since) / entry.slowdown
            entry.since, entry.slowdown = now, slowdown
            entry.version += 1
            self._foresee_end(entry)

    def _slowdown(self, op: Op, links: list[str], kernels: int) -> float:
        if op.collective is None:
            return 1.0  # a copy engine or the CPUs
        shared = links.count(self._link(op))
        return shared * (self.communication_slowdown(op) if kernels else 1.0)

    def _link(self, op: Op) -> str:
        return self.link_of.get(op.collective.group, op.collective.group)

    def _foresee_end(self, entry: _Running) -> None:
        version = entry.version

        def end(_: simpy.Event) -> None:
            if entry.version == version:
                del self.running[entry.op]
                entry.finish()
                self._change_speeds()

        timeout = self.env.timeout(max(entry.left, 0.0) * entry.slowdown)
        timeout.callbacks.append(end)
