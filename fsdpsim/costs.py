"""Seconds for what a schedule launches: given durations, or the hardware's cost models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdpsim.collectives import Group, collective_seconds
from fsdpsim.hardware import Hardware
from fsdpsim.roofline import copy_seconds, kernel_seconds
from fsdpsim.workload import DTYPE_BYTES, Kernel


class Costs:
    """The cost model of one scenario.

    ``groups`` maps the group names of :class:`fsdpsim.program.Collective` to their ranks. ``given``
    maps (kind, unit) to seconds that replace the model's; with ``free_copies`` FSDP's own copies,
    casts and hooks take no time, as in scenarios of given durations.
    """

    def __init__(
        self,
        hardware: Hardware,
        groups: Mapping[str, Group],
        *,
        given: Mapping[tuple[str, str], float] | None = None,
        kernel_launch: float | None = None,
        free_copies: bool = False,
    ) -> None:
        self.hardware = hardware
        self.groups = groups
        self.given = given or {}
        self.launch_seconds = (
            hardware.host.kernel_launch if kernel_launch is None else kernel_launch
        )
        self.free_copies = free_copies
        # Blocks share their kernels, so identity is the right (and a cheap) key. The kernel is kept
        # with its seconds: an id is unique only among living objects.
        self._kernels: dict[int, tuple[Kernel, float]] = {}
        self._collectives: dict[tuple[str, int, str, str], float] = {}

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of a kernel of the model."""
        found = self._kernels.get(id(kernel))
        if found is None:
            found = (kernel, kernel_seconds(kernel, self.hardware))
            self._kernels[id(kernel)] = found
        return found[1]

    def copy(self, nbytes: int, *, cast: bool = False) -> float:
        """Seconds of a copy (``cast``: to another dtype); ``nbytes``: read plus written."""
        return 0.0 if self.free_copies else copy_seconds(nbytes, self.hardware, cast=cast)

    def transfer(self, nbytes: int, *, pinned: bool) -> float:
        """Seconds of a copy between host memory and this GPU while all GPUs of the node copy."""
        hardware = self.hardware
        sharing = min(hardware.gpus_per_pcie_switch, hardware.gpus_per_node)
        share = 1.0 if pinned else hardware.pageable_efficiency
        return nbytes / (hardware.host_to_device_bandwidth / sharing * share)

    def on_cpu(self, kernels: Iterable[Kernel], *, fused: bool) -> float:
        """Seconds of an optimizer's ``kernels`` on the node's CPUs, which all its ranks share."""
        host, ranks = self.hardware.host, self.hardware.gpus_per_node
        rate = host.optimizer_bandwidth if fused else host.foreach_optimizer_bandwidth
        return sum(
            ranks * kernel.nbytes / rate if kernel.seconds is None else kernel.seconds
            for kernel in kernels
        )

    def adding_on_cpu(self, nbytes: int) -> float:
        """Seconds in which the CPUs add one tensor of ``nbytes`` to another: 3 passes."""
        addition = Kernel(name="add_", nbytes=3 * nbytes)
        return self.on_cpu([addition], fused=True)

    def collective(self, kind: str, nbytes: int, dtype: str, group: str, unit: str) -> float:
        """Seconds of a collective; ``nbytes`` is the full size."""
        given = self.given.get((kind, unit))
        if given is not None:
            return given
        key = (kind, nbytes, dtype, group)
        if key not in self._collectives:
            self._collectives[key] = collective_seconds(
                kind, nbytes, self.groups[group], self.hardware, DTYPE_BYTES[dtype]
            )
        return self._collectives[key]

    def hook(self, params: int) -> float:
        """Host seconds of one FSDP hook of a unit with ``params`` parameters."""
        return 0.0 if self.free_copies else self.hardware.host.hook(params)
