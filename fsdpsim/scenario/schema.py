"""The whole scenario, and the rules that tie its tables together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationInfo, field_validator, model_validator

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.faults import Fault, FaultsError
from fsdpsim.hardware import Hardware
from fsdpsim.model import ModelConfig, read_model_config
from fsdpsim.scenario.keys import join_key
from fsdpsim.scenario.noise_table import Noise
from fsdpsim.scenario.runtimes import (
    Ddp,
    Fsdp1,
    Fsdp2,
    FsdpTable,
    Table,
    Textbook,
    Zero,
    ZeroOffload,
)
from fsdpsim.scenario.sweep_table import SweepTable, check_keys
from fsdpsim.scenario.workload_tables import ROOT, Training, Workload
from fsdpsim.units import Label, shown

HYBRID_STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

#: What no one waits for: ranks that are simulated one by one, and forwards of all iterations.
MAX_RANKS = 10_000
MAX_PASSES = 100_000


class Scenario(Table):
    """One training job on one cluster: what runs, how FSDP shards it, and on what hardware."""

    title: Label = ""
    """One line for charts and tables."""
    workload: Workload | None = None
    model: ModelConfig | None = None
    training: Training = Training()
    fsdp: FsdpTable
    hardware: Hardware | None = None
    """Left out, a [workload] runs on a device of unlimited memory."""
    allocator: AllocatorSettings = AllocatorSettings()
    noise: Noise | None = None
    """Left out, one rank stands for all."""
    sweep: SweepTable | None = None
    """Keys to vary; used by ``fsdpsim sweep`` and ``tune`` only."""
    _source: str = PrivateAttr(default="scenario")
    _tables: dict[str, Any] = PrivateAttr(default_factory=dict)
    _base: Path = PrivateAttr(default_factory=Path)

    @field_validator("model", mode="before")
    @classmethod
    def _read_model(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        return read_model_config(value, Path((info.context or {}).get("base", ".")))

    @field_validator("sweep")
    @classmethod
    def _sweeps_known_keys(cls, value: SweepTable | None, info: ValidationInfo) -> Any:
        if value is not None:
            check_keys(value, cls, type(info.data["fsdp"]) if "fsdp" in info.data else None)
        return value

    @model_validator(mode="after")
    def _tables_fit_together(self) -> Scenario:
        faults = [
            *self._kind_of_work(),
            *self._sharding(),
            *self._textbook(),
            *self._units(),
            *self._offloading(),
            *self._ranks(),
            *self._passes(),
        ]
        if faults:
            raise FaultsError(*faults)
        return self

    def _kind_of_work(self) -> Iterator[Fault]:
        if self.workload is not None and self.model is not None:
            yield Fault("", "has both [workload] and [model]; give the one or the other")
        if self.workload is None and self.model is None:
            text = "has neither [workload] (units with durations) nor [model]; give one of them"
            yield Fault("", text, ("workload", "model"))
        if self.workload is not None and (unit := self.workload.untimed) is not None:
            text = f"is missing, and unit {shown(unit)} has not both parameters and tokens"
            keys = ("units", "parameters", "tokens")
            yield Fault("workload.forward", text, tuple(f"workload.{key}" for key in keys))

    def _sharding(self) -> Iterator[Fault]:
        fsdp, factor, world = self.fsdp, self.shard_factor, self.world_size
        cluster = ("hardware.nodes", "hardware.gpus_per_node", "fsdp.sharding_strategy")
        if text := _misfit(factor, self.device):
            yield Fault("fsdp.sharding_factor", text, cluster)
        elif isinstance(fsdp, Fsdp1) and (text := _contradiction(fsdp, factor, world)):
            yield Fault("fsdp.sharding_strategy", text, ("fsdp.sharding_factor", *cluster))
        elif isinstance(fsdp, Fsdp2):
            for key, text in _post_forward_misfits(fsdp, factor, self.device):
                yield Fault(key, text, ("fsdp.sharding_factor", *cluster))

    def _textbook(self) -> Iterator[Fault]:
        if not isinstance(self.fsdp, Textbook):
            return
        if self.model is not None:
            yield Fault(
                "fsdp.runtime",
                '"textbook" takes a [workload] of units with durations; for a [model] use "fsdp1", '
                '"fsdp2" or "ddp"',
                ("model",),
            )
        for key in ("gradient_accumulation_steps", "forwards_per_backward"):
            if (value := getattr(self.training, key)) > 1:
                text = (
                    f"{value} is not allowed under the textbook runtime, which has one forward and "
                    'backward per step; use fsdp.runtime = "fsdp1" or "fsdp2"'
                )
                yield Fault(f"training.{key}", text, ("fsdp.runtime",))

    def _units(self) -> Iterator[Fault]:
        """A model's units are known only once they are formed: see ``build_workload``."""
        if isinstance(self.fsdp, Fsdp2) and self.workload is not None:
            names = dict.fromkeys([*(unit.name for unit in self.workload.tables), ROOT])
            yield from self.fsdp.unknown_units(tuple(names))

    def _offloading(self) -> Iterator[Fault]:
        fsdp, steps = self.fsdp, self.training.gradient_accumulation_steps
        if isinstance(fsdp, Fsdp1) and fsdp.cpu_offload and steps > 1 and not fsdp.no_sync:
            text = (
                "true is not allowed with gradient accumulation outside no_sync(): FSDP1 would "
                "overwrite the gradients in host memory; add fsdp.no_sync = true"
            )
            keys = ("fsdp.no_sync", "training.gradient_accumulation_steps")
            yield Fault("fsdp.cpu_offload", text, keys)
        if isinstance(fsdp, Fsdp2) and not fsdp.pin_memory and fsdp.offload_policy is None:
            text = 'false needs fsdp.offload_policy = "cpu", which is what would pin memory'
            yield Fault("fsdp.pin_memory", text, ("fsdp.offload_policy",))

    def _ranks(self) -> Iterator[Fault]:
        if self.noise is None:
            return
        cluster = ("hardware.nodes", "hardware.gpus_per_node")
        if self.world_size > MAX_RANKS:
            text = f"simulates each of {self.world_size:,} ranks; at most {MAX_RANKS:,} can be"
            yield Fault("noise", text, cluster)
        for rank in self.noise.stragglers:
            if rank >= self.world_size:
                text = f"there is no rank {rank}; the ranks are 0 to {self.world_size - 1}"
                yield Fault("noise.stragglers", text, cluster)

    def _passes(self) -> Iterator[Fault]:
        t = self.training
        passes = self.iterations * t.gradient_accumulation_steps * t.forwards_per_backward
        if passes > MAX_PASSES:
            text = f"asks for {passes:,} forward passes in all; at most {MAX_PASSES:,} can be"
            yield Fault("training", text)

    @property
    def source(self) -> str:
        """The file that it was read from, as given."""
        return self._source

    @property
    def tables(self) -> Mapping[str, Any]:
        """What the file says, overrides included, before defaults and units."""
        return self._tables or self.model_dump(exclude_unset=True)

    @property
    def base(self) -> Path:
        """The directory that relative paths in :attr:`tables` start from."""
        return self._base

    @property
    def name(self) -> str:
        """The file's stem, for charts and tables."""
        return Path(self._source).stem

    @property
    def device(self) -> Hardware:
        """The hardware, or the default one if the file has none."""
        return self.hardware or _default_hardware()

    @property
    def world_size(self) -> int:
        """Ranks: nodes x GPUs per node."""
        return self.device.world_size

    @property
    def shard_factor(self) -> int:
        """F: ranks that one parameter is sharded over."""
        fsdp = self.fsdp
        if isinstance(fsdp, Ddp):
            return 1
        if isinstance(fsdp, Zero):
            return self.world_size
        if isinstance(fsdp, Fsdp1) and fsdp.sharding_factor is None:
            if fsdp.sharding_strategy in HYBRID_STRATEGIES:
                return self.device.gpus_per_node
            if fsdp.sharding_strategy == "NO_SHARD":
                return 1
        return fsdp.sharding_factor or self.world_size

    @property
    def replicas(self) -> int:
        """Copies of the model: world size / F."""
        return self.world_size // self.shard_factor

    @property
    def param_dtype(self) -> str | None:
        """Mixed precision: dtype of gathered parameters; None keeps the original."""
        default = "bfloat16" if self.model is not None else None
        return self.training.param_dtype or default

    @property
    def reduce_dtype(self) -> str | None:
        """Mixed precision: dtype of gradient reduction; None follows ``param_dtype``."""
        default = "float32" if self.model is not None else None
        return self.training.reduce_dtype or default

    @property
    def offloads(self) -> bool:
        """Whether gradients and optimizer state live in host memory, and the CPUs update."""
        fsdp = self.fsdp
        return (
            isinstance(fsdp, ZeroOffload)
            or (isinstance(fsdp, Fsdp1) and fsdp.cpu_offload)
            or (isinstance(fsdp, Fsdp2) and fsdp.offload_policy is not None)
        )

    @property
    def iterations(self) -> int:
        """Simulated iterations; by default as many as it takes to settle.

        The second finds the optimizer's state, the third the allocator's segments of a whole step.
        FSDP1's rate limiter needs one more with ``forward_prefetch``.
        """
        if self.training.iterations is not None:
            return self.training.iterations
        if isinstance(self.fsdp, Textbook):
            return 1
        return 4 if isinstance(self.fsdp, Fsdp1) and self.fsdp.forward_prefetch else 3


@lru_cache
def _default_hardware() -> Hardware:
    return Hardware.model_validate({})


def strategy_of(fsdp: Fsdp1, factor: int, world: int) -> str:
    """FSDP1's strategy; by default the one that the sharding factor asks for."""
    if fsdp.sharding_strategy is not None:
        return fsdp.sharding_strategy
    if factor == 1:
        return "NO_SHARD"
    return "FULL_SHARD" if factor == world else "HYBRID_SHARD"


def _misfit(factor: int, hardware: Hardware) -> str:
    """Why ``factor`` ranks cannot be a group on every node alike, or nothing."""
    world, local = hardware.world_size, hardware.gpus_per_node
    if _fits(factor, world, local):
        return ""
    fits = [f for f in range(1, min(world, 4096) + 1) if _fits(f, world, local)]
    if world % factor:
        text = f"{factor} does not divide the world size {world} (nodes x gpus_per_node)"
    else:
        text = f"{factor} neither divides the {local} GPUs of a node nor is a multiple of them"
    return f"{text}; it may be {', '.join(map(str, fits[:12]))}" + (", ..." if fits[12:] else "")


def _fits(factor: int, world: int, local: int) -> bool:
    return not world % factor and not (local % factor and factor % local)


def _contradiction(fsdp: Fsdp1, factor: int, world: int) -> str:
    strategy = strategy_of(fsdp, factor, world)
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and factor != world:
        return (
            f'"{strategy}" shards over all {world} ranks; with fsdp.sharding_factor = {factor} use '
            '"HYBRID_SHARD" or "_HYBRID_SHARD_ZERO2"'
        )
    if strategy == "NO_SHARD" and factor != 1:
        return f'"NO_SHARD" shards nothing; fsdp.sharding_factor = {factor} contradicts it'
    return ""


def _post_forward_misfits(
    fsdp: Fsdp2, factor: int, hardware: Hardware
) -> Iterator[tuple[str, str]]:
    wanted = {"fsdp.reshard_after_forward": fsdp.reshard_after_forward}
    for name, override in fsdp.overrides.items():
        key = join_key(("fsdp", "overrides", name, "reshard_after_forward"))
        wanted[key] = override.reshard_after_forward
    for key, value in wanted.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if factor % value:
                yield key, f"{value} does not divide fsdp.sharding_factor = {factor}"
            elif text := _misfit(value, hardware):
                yield key, text
