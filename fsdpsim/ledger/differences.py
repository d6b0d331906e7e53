"""Why a simulated runtime does not hold and send what the formula says: each reason with its bytes.

A comparison starts from the paper's formula without padding and changes one thing after the other,
until it describes the runtime. What each change adds is a difference; they add up to the simulated
count exactly, unless the scenario's own schedule (a unit called twice, ``no_sync``) adds something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction

from fsdpsim.ledger.model_states import StateBytes, Strategy, bytes_per_parameter, zero
from fsdpsim.ledger.runs import Run
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, UnitOverride
from fsdpsim.sharding import ShardedSize, flat_parameter, per_parameter
from fsdpsim.simulate import build_optimizer
from fsdpsim.workload import DTYPE_BYTES, Unit

#: Every cause, and why torch does it.
WHY = {
    "resharded": "SHARD_GRAD_OP keeps whole parameters from forward to backward only; when the "
    "optimizer steps they are shards again",
    "dtypes": "the scenario's dtypes and optimizer state instead of 2 bytes per parameter and per "
    "gradient and the paper's K",
    "flat_parameter": "a flat parameter has one gradient and one optimizer state, also for frozen "
    "parameters in it",
    "padding": "FSDP1 pads each flat parameter to F, FSDP2 each parameter to whole rows per rank",
    "buckets": "DDP copies gradients into buckets, which live for good, unless "
    "gradient_as_bucket_view",
    "accumulation": "reduced (DDP) or gathered (SHARD_GRAD_OP) per micro-batch, not once a step",
    "root": "the root's parameters are kept after forward: backward needs them first",
    "kept": "units with reshard_after_forward = false are not gathered again",
    "post_forward": "an int reshard_after_forward gathers again over a smaller group",
    "schedule": "the scenario's own schedule: units called twice or never, or not reached by "
    "backward; no_sync",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One cause (a key of :data:`WHY`) and the bytes by which it raises or lowers the figure."""

    cause: str
    nbytes: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A formula, what the simulator counted, and all that lies between. Bytes on one GPU."""

    formula: Fraction
    differences: tuple[Difference, ...]
    simulated: Fraction


#: Figures in the order in which a comparison changes its assumptions: (cause, bytes after it).
Steps = list[tuple[str, Fraction]]


def _comparison(formula: Fraction, steps: Steps, simulated: Fraction) -> Comparison:
    found, before = [], formula
    for cause, after in [*steps, ("schedule", simulated)]:
        if after != before:
            found.append(Difference(cause=cause, nbytes=after - before))
        before = after
    return Comparison(formula=formula, differences=tuple(found), simulated=simulated)


# ---- sizes of one unit, as the runtime of a run sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Elements and bytes per element of one unit (DDP: of one parameter)."""

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


def _sizes(run: Run) -> list[_Sizes]:
    if isinstance(run.scenario.fsdp, Ddp):
        return [s for unit in run.workload.units for s in _ddp_sizes(run.scenario, unit)]
    return [_fsdp_sizes(run, unit) for unit in run.workload.units if unit.params]


def _ddp_sizes(scenario: Scenario, unit: Unit) -> Iterator[_Sizes]:
    for param in unit.params:
        trained = param.numel if param.requires_grad else 0
        low = DTYPE_BYTES[scenario.param_dtype or param.dtype]
        yield _Sizes(
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


def _fsdp_sizes(run: Run, unit: Unit) -> _Sizes:
    scenario = run.scenario
    orig = unit.params[0].dtype
    gather = scenario.param_dtype or orig
    trained = sum(p.numel for p in unit.params if p.requires_grad)
    size, reduced = _sharded(scenario, unit, gather)
    flat = isinstance(scenario.fsdp, Fsdp1)
    return _Sizes(
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


# ---- model states when the optimizer steps


def held_comparison(run: Run, paper: StateBytes) -> Comparison:
    """What ``run`` holds when its optimizer steps against the paper's formula with its bytes."""
    sizes = _sizes(run)
    if isinstance(run.scenario.fsdp, Ddp):
        steps = _ddp_held(run, sizes)
    else:
        steps = _fsdp_held(run, sizes, paper)
    return _comparison(_paper(run.strategy, sizes, paper), steps, Fraction(run.held_total))


def _paper(strategy: Strategy, sizes: Sequence[_Sizes], paper: StateBytes) -> Fraction:
    """Frozen parameters have no gradient and no optimizer state."""
    parameters = StateBytes(parameters=paper.parameters, gradients=0, optimizer=0)
    rest = replace(paper, parameters=0)
    return bytes_per_parameter(strategy, parameters) * sum(s.numel for s in sizes) + (
        bytes_per_parameter(strategy, rest) * sum(s.trained for s in sizes)
    )


def _ddp_held(run: Run, sizes: Sequence[_Sizes]) -> Steps:
    assert isinstance(run.scenario.fsdp, Ddp)
    state = build_optimizer(run.scenario).state_bytes
    low = sum(s.numel * s.gather for s in sizes if s.gather != s.orig)
    gradients = sum(s.trained * s.gather for s in sizes)
    own = sum(s.numel * s.orig + s.trained * state for s in sizes) + low + gradients
    # With views, gradients live in the buckets instead of beside them.
    buckets = 0 if run.scenario.fsdp.gradient_as_bucket_view else gradients
    return [("dtypes", Fraction(own)), ("buckets", Fraction(own + buckets))]


def _fsdp_held(run: Run, sizes: Sequence[_Sizes], paper: StateBytes) -> Steps:
    factor = run.scenario.shard_factor
    state = build_optimizer(run.scenario).state_bytes

    def held(numel: str, trained: str) -> Fraction:
        return Fraction(
            sum(getattr(s, numel) * s.orig + getattr(s, trained) * (s.orig + state) for s in sizes),
            factor,
        )

    return [
        ("resharded", _paper(zero(3, factor), sizes, paper)),
        ("dtypes", held("numel", "trained")),
        ("flat_parameter", held("numel", "flat_trained")),
        ("padding", held("padded", "padded_trained")),
    ]


# ---- bytes sent in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The collectives of one unit in one step."""

    gathered: int
    reduced: int
    gather_bytes: int
    reduce_bytes: int
    gathers: tuple[int, ...]
    """Ranks of each all-gather."""
    reductions: int

    def nbytes(self, factor: int, replicas: int) -> Fraction:
        """Bytes that a rank sends in rings: gathers, reduce-scatters, all-reduces of the shards."""
        gather = sum((Fraction(n - 1, n) for n in self.gathers), Fraction(0))
        reduce = Fraction(factor - 1, factor) + 2 * Fraction(replicas - 1, replicas * factor)
        return (
            gather * self.gathered * self.gather_bytes
            + self.reductions * reduce * self.reduced * self.reduce_bytes
        )


def sent_comparison(run: Run) -> Comparison:
    """What ``run`` sends in a step against the paper's formula with 2 bytes per element."""
    sizes = _sizes(run)
    factor, replicas = run.scenario.shard_factor, run.scenario.replicas

    def total(sent: Sequence[_Sent]) -> Fraction:
        return sum((s.nbytes(factor, replicas) for s in sent), Fraction(0))

    now = [_paper_sent(run, s) for s in sizes]
    formula, steps = total(now), []
    for cause in ("dtypes", "flat_parameter", "padding", "accumulation", *_GATHER_CAUSES):
        now = [_changed(cause, run, s, sent) for s, sent in zip(sizes, now, strict=True)]
        steps.append((cause, total(now)))
    return _comparison(formula, steps, run.sent_total)


def _micro_batches(run: Run) -> int:
    return run.scenario.training.gradient_accumulation_steps


def _paper_sent(run: Run, sizes: _Sizes) -> _Sent:
    micro, factor = _micro_batches(run), run.scenario.shard_factor
    gathers = 2 * micro if "parameters" in run.strategy.sharded else 1
    return _Sent(
        gathered=sizes.numel,
        reduced=sizes.trained,
        gather_bytes=2,
        reduce_bytes=2,
        gathers=(factor,) * gathers if run.strategy.sharded else (),
        reductions=micro if "gradients" in run.strategy.sharded else 1,
    )


_GATHER_CAUSES = ("root", "kept", "post_forward")


def _changed(cause: str, run: Run, sizes: _Sizes, sent: _Sent) -> _Sent:
    """``sent`` with one more of the runtime's own habits."""
    micro = _micro_batches(run)
    if cause == "dtypes":
        return replace(sent, gather_bytes=sizes.gather, reduce_bytes=sizes.reduce)
    if cause == "flat_parameter":
        return replace(sent, reduced=sizes.flat_trained)
    if cause == "padding":
        return replace(sent, gathered=sizes.padded, reduced=sizes.padded_trained)
    if cause == "accumulation":
        return _accumulating(run, sent, micro)
    if sizes.gathers and _gather_cause(run, sizes) == cause:
        return replace(sent, gathers=sizes.gathers * micro)
    return sent


def _accumulating(run: Run, sent: _Sent, micro: int) -> _Sent:
    fsdp = run.scenario.fsdp
    if isinstance(fsdp, Ddp):
        return sent if fsdp.no_sync else replace(sent, reductions=micro)
    return replace(sent, gathers=sent.gathers * micro) if len(sent.gathers) == 1 else sent


def _gather_cause(run: Run, sizes: _Sizes) -> str:
    if len(sizes.gathers) == 2:
        return "post_forward"
    return "root" if sizes.is_root else "kept"


def unexplained(comparison: Comparison) -> Fraction:
    """Bytes that only the scenario's own schedule accounts for."""
    own = (d.nbytes for d in comparison.differences if d.cause == "schedule")
    return sum(own, Fraction(0))
