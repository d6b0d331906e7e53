"""Host memory behind a runtime: copies over PCIe, and the optimizer on the CPUs.

A copy runs on whatever stream is current, on the GPU's copy engine of its direction. Each runtime
copies in one direction from one stream, so copies of a direction never run at the same time.
"""

from __future__ import annotations

from fsdpsim.costs import Costs
from fsdpsim.engine import CPU, Op
from fsdpsim.program import Program


class Offload:
    """What one rank keeps in host memory and copies to and from it."""

    def __init__(self, program: Program, costs: Costs, *, pin_memory: bool = True) -> None:
        self.program = program
        self.costs = costs
        self.pin_memory = pin_memory

    def keep(self, category: str, nbytes: int) -> None:
        """Host memory of ``category`` for good: the GPU's allocator knows nothing of it."""
        held = self.program.host_memory
        held[category] = held.get(category, 0) + nbytes

    def h2d(self, nbytes: int) -> Op:
        """Copy from the host; from memory that is not pinned the CPU thread waits for its end.

        The driver copies such memory through a pinned buffer of its own (CUDA Runtime API, "API
        synchronization behavior").
        """
        return self._copy("h2d", nbytes, blocking=not self.pin_memory)

    def d2h(self, nbytes: int, *, non_blocking: bool = True) -> Op:
        """Copy to the host; the CPU thread waits, unless ``non_blocking`` and to pinned memory."""
        return self._copy("d2h", nbytes, blocking=not (non_blocking and self.pin_memory))

    def _copy(self, kind: str, nbytes: int, *, blocking: bool) -> Op:
        op = self.program.launch(
            _kineto_name(kind, pinned=self.pin_memory),
            self.costs.transfer(nbytes, pinned=self.pin_memory),
            kind=kind,
            launch_seconds=self.costs.launch_seconds,
            nbytes=nbytes,
        )
        if blocking:
            self.program.synchronize((op,), cause="blocking_copy")
        return op

    def run(self, name: str, seconds: float) -> Op:
        """Work of the CPUs, beside the CPU thread that launches."""
        with self.program.on_stream(CPU):
            return self.program.launch(name, seconds, kind="optimizer")

    def run_and_wait(self, name: str, seconds: float) -> None:
        """Work of the CPUs that the training loop does itself."""
        self.program.synchronize((self.run(name, seconds),), cause="cpu_optimizer")


def _kineto_name(kind: str, *, pinned: bool) -> str:
    memory = "Pinned" if pinned else "Pageable"
    return {
        "h2d": f"Memcpy HtoD ({memory} -> Device)",
        "d2h": f"Memcpy DtoH (Device -> {memory})",
    }[kind]
