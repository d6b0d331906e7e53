"""What one simulated runtime makes of the parameters: padding, dtypes, and who gathers them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import repeat

from fsdpsim.ledger.runs import OffloadRun, Run
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, UnitOverride, Zero
from fsdpsim.schedules.buckets import cut
from fsdpsim.sharding import ShardedSize, flat_parameter, per_parameter
from fsdpsim.workload import DTYPE_BYTES, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements and bytes per element of one unit (DDP: of one parameter, ZeRO: of one bucket)."""

    numel: int
    trained: int
    flat_trained: int
    """With the frozen parameters of a flat parameter that is trained."""
    padded: int
    padded_trained: int
    orig: int
    gather: int
    reduce: int
    is_root: bool
    gathers: tuple[int, ...]
    """Ranks of each all-gather of one micro-batch."""


def sizes_of(run: Run) -> list[Sizes]:
    """What is held: the sizes of each unit (DDP: of each parameter)."""
    fsdp, units = run.scenario.fsdp, [unit for unit in run.workload.units if unit.params]
    if isinstance(fsdp, Ddp):
        return [s for unit in units for s in _ddp_sizes(run.scenario, unit)]
    if isinstance(fsdp, Zero):
        return [_zero_sizes(run.scenario, unit) for unit in units]
    return [_fsdp_sizes(run, unit) for unit in units]


def sent_sizes_of(run: Run) -> list[Sizes]:
    """What is sent: the same, but under ZeRO the sizes of each bucket."""
    return bucket_sizes(run) if isinstance(run.scenario.fsdp, Zero) else sizes_of(run)


def _ddp_sizes(scenario: Scenario, unit: Unit) -> Iterator[Sizes]:
    for param in unit.params:
        trained = param.numel if param.requires_grad else 0
        low = DTYPE_BYTES[scenario.param_dtype or param.dtype]
        yield Sizes(
            numel=param.numel,
            trained=trained,
            flat_trained=trained,
            padded=param.numel,
            padded_trained=trained,
            orig=DTYPE_BYTES[param.dtype],
            gather=low,
            reduce=low,
            is_root=unit.is_root,
            gathers=(),
        )


def _zero_sizes(scenario: Scenario, unit: Unit) -> Sizes:
    trained = sum(p.numel for p in unit.params if p.requires_grad)
    dtype = scenario.param_dtype or unit.params[0].dtype
    return _cut(scenario, unit.numel, trained, unit.params[0].dtype, dtype)


def bucket_sizes(run: Run | OffloadRun) -> list[Sizes]:
    """ZeRO's buckets: trained parameters only."""
    scenario, units = run.scenario, run.workload.units
    assert isinstance(scenario.fsdp, Zero)
    orig = next(p.dtype for unit in units for p in unit.params)
    dtype = scenario.param_dtype or orig
    caps = repeat(scenario.fsdp.reduce_bucket_size * DTYPE_BYTES[dtype])
    buckets = cut(units, caps, dtype)
    return [_cut(scenario, b.numel, b.numel, orig, dtype) for b in buckets]


def _cut(scenario: Scenario, numel: int, trained: int, orig: str, dtype: str) -> Sizes:
    """``trained`` elements, of which each rank updates one part."""
    ranks = scenario.shard_factor
    padding = -trained % ranks
    return Sizes(
        numel=numel,
        trained=trained,
        flat_trained=trained,
        padded=numel + padding,
        padded_trained=trained + padding,
        orig=DTYPE_BYTES[orig],
        gather=DTYPE_BYTES[dtype],
        reduce=DTYPE_BYTES[scenario.reduce_dtype or dtype],
        is_root=False,
        gathers=(),
    )


def _fsdp_sizes(run: Run, unit: Unit) -> Sizes:
    scenario = run.scenario
    orig = unit.params[0].dtype
    gather = scenario.param_dtype or orig
    trained = sum(p.numel for p in unit.params if p.requires_grad)
    size, reduced = _sharded(scenario, unit, gather)
    flat = isinstance(scenario.fsdp, Fsdp1)
    return Sizes(
        numel=unit.numel,
        trained=trained,
        flat_trained=unit.numel if flat and trained else trained,
        padded=size.padded,
        padded_trained=reduced.padded if trained else 0,
        orig=DTYPE_BYTES[orig],
        gather=DTYPE_BYTES[gather],
        reduce=DTYPE_BYTES[scenario.reduce_dtype or gather],
        is_root=unit.is_root,
        gathers=_gathers(run, unit),
    )


def _sharded(scenario: Scenario, unit: Unit, gather: str) -> tuple[ShardedSize, ShardedSize]:
    """(gathered, reduced) sizes of a unit."""
    factor, fsdp = scenario.shard_factor, scenario.fsdp
    if isinstance(fsdp, Fsdp1):
        size = flat_parameter(
            unit.params, factor, compute_dtype=gather, use_orig_params=fsdp.use_orig_params
        )
        return size, size
    trained = [p for p in unit.params if p.requires_grad]
    return per_parameter(unit.params, factor), per_parameter(trained, factor)


def _gathers(run: Run, unit: Unit) -> tuple[int, ...]:
    """FSDP gathers for forward, and again for backward what it freed in between."""
    factor, fsdp = run.scenario.shard_factor, run.scenario.fsdp
    if "parameters" not in run.strategy.sharded:
        return (factor,)
    if isinstance(fsdp, Fsdp1):
        return (factor,) if unit.is_root else (factor, factor)
    again = _post_forward_factor(fsdp, unit, factor)
    return (factor,) if again is None else (factor, again)


def _post_forward_factor(fsdp: object, unit: Unit, factor: int) -> int | None:
    """Ranks of the second all-gather; None where the unit is kept after forward."""
    assert isinstance(fsdp, Fsdp2)
    value = _override(fsdp, unit).reshard_after_forward
    if value is None:
        value = fsdp.reshard_after_forward
    if value is None:
        value = not unit.is_root
    if isinstance(value, bool):
        return factor if value else None
    return None if value == 1 else value


def _override(fsdp: Fsdp2, unit: Unit) -> UnitOverride:
    """The setters for ``unit``; of several matching names the last one counts."""
    matching = (o for name, o in fsdp.overrides.items() if fnmatchcase(unit.name, name))
    return [UnitOverride(), *matching][-1]
