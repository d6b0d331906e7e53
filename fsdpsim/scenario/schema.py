"""The whole scenario, and the rules that tie its tables together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationInfo, field_validator, model_validator

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.hardware import Hardware
from fsdpsim.model import ModelConfig, read_model_config
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, FsdpTable, Table, Textbook
from fsdpsim.scenario.sweep_table import SweepTable, check_keys
from fsdpsim.scenario.workload_tables import Training, Workload

HYBRID_STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Scenario(Table):
    """One training job on one cluster: what runs, how FSDP shards it, and on what hardware."""

    title: str = ""
    """One line for charts and tables."""
    workload: Workload | None = None
    model: ModelConfig | None = None
    training: Training = Training()
    fsdp: FsdpTable
    hardware: Hardware | None = None
    """Left out, a [workload] runs on a device of unlimited memory."""
    allocator: AllocatorSettings = AllocatorSettings()
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
    def _one_kind_of_work(self) -> Scenario:
        if (self.workload is None) == (self.model is None):
            raise ValueError("give either [workload] with durations or [model], not both or none")
        return self

    @model_validator(mode="after")
    def _factor_fits(self) -> Scenario:
        fsdp = self.fsdp
        if isinstance(fsdp, Ddp):
            return self
        world, factor = self.world_size, self.shard_factor
        if world % factor:
            raise ValueError(
                f"fsdp.sharding_factor = {factor} does not divide the world size {world} "
                f"(hardware.nodes x hardware.gpus_per_node)"
            )
        if isinstance(fsdp, Fsdp1):
            _check_strategy(fsdp, factor, world)
        if isinstance(fsdp, Fsdp2):
            _check_post_forward(fsdp, factor)
        return self

    @model_validator(mode="after")
    def _textbook_is_plain(self) -> Scenario:
        t = self.training
        if isinstance(self.fsdp, Textbook) and self.model is not None:
            raise ValueError(
                "the textbook runtime takes a [workload] of units with durations; for a [model] "
                'use fsdp.runtime = "fsdp1", "fsdp2" or "ddp"'
            )
        if isinstance(self.fsdp, Textbook) and (
            t.gradient_accumulation_steps > 1 or t.forwards_per_backward > 1
        ):
            raise ValueError(
                "the textbook runtime has one forward and backward per step; for "
                'training.gradient_accumulation_steps use fsdp.runtime = "fsdp1" or "fsdp2"'
            )
        return self

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
        return self.hardware or Hardware.model_validate({})

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
    def iterations(self) -> int:
        """Simulated iterations."""
        return self.training.iterations or (1 if isinstance(self.fsdp, Textbook) else 4)


def strategy_of(fsdp: Fsdp1, factor: int, world: int) -> str:
    """FSDP1's strategy; by default the one that the sharding factor asks for."""
    if fsdp.sharding_strategy is not None:
        return fsdp.sharding_strategy
    if factor == 1:
        return "NO_SHARD"
    return "FULL_SHARD" if factor == world else "HYBRID_SHARD"


def _check_strategy(fsdp: Fsdp1, factor: int, world: int) -> None:
    strategy = strategy_of(fsdp, factor, world)
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and factor != world:
        raise ValueError(
            f"fsdp.sharding_strategy = {strategy} shards over all {world} ranks; with "
            f"fsdp.sharding_factor = {factor} use HYBRID_SHARD or _HYBRID_SHARD_ZERO2"
        )
    if strategy == "NO_SHARD" and factor != 1:
        raise ValueError(
            f"fsdp.sharding_strategy = NO_SHARD shards nothing; fsdp.sharding_factor = {factor} "
            "contradicts it"
        )


def _check_post_forward(fsdp: Fsdp2, factor: int) -> None:
    wanted = {"fsdp.reshard_after_forward": fsdp.reshard_after_forward}
    for name, override in fsdp.overrides.items():
        wanted[f'fsdp.overrides."{name}".reshard_after_forward'] = override.reshard_after_forward
    for key, value in wanted.items():
        if isinstance(value, int) and not isinstance(value, bool) and factor % value:
            raise ValueError(f"{key} = {value} does not divide fsdp.sharding_factor = {factor}")
