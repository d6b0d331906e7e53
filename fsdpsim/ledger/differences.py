"""Why a simulated runtime does not hold and send what the formula says: each reason with its bytes.

A comparison starts from the paper's formula without padding and changes one thing after the other,
until it describes the runtime. What each change adds is a difference; they add up to the simulated
count exactly, unless the scenario's own schedule (a unit called twice, ``no_sync``) adds something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fsdpsim.ledger.model_states import StateBytes, Strategy, bytes_per_parameter, zero
from fsdpsim.ledger.offload import optimal
from fsdpsim.ledger.runs import OffloadRun, Run
from fsdpsim.ledger.sizes import Sizes, bucket_sizes, sent_sizes_of, sizes_of
from fsdpsim.scenario.runtimes import Ddp, Zero
from fsdpsim.simulate import build_optimizer
from fsdpsim.workload import DTYPE_BYTES

#: Every cause, and why torch does it.
WHY = {
    "resharded": "SHARD_GRAD_OP keeps whole parameters from forward to backward only; when the "
    "optimizer steps they are shards again",
    "reduced": "ZeRO-1 keeps whole gradients until backward ends; when the optimizer steps each "
    "rank has its part of the sum",
    "dtypes": "the scenario's dtypes and optimizer state instead of 2 bytes per parameter and per "
    "gradient and the paper's K",
    "flat_parameter": "a flat parameter has one gradient and one optimizer state, also for frozen "
    "parameters in it",
    "padding": "FSDP1 pads each flat parameter to F, FSDP2 each parameter to whole rows per rank; "
    "ZeRO pads each bucket",
    "buckets": "DDP copies gradients into buckets, which live for good, unless "
    "gradient_as_bucket_view",
    "accumulation": "reduced (DDP), gathered (SHARD_GRAD_OP) or copied down and up (ZeRO-Offload) "
    "per micro-batch, not once a step",
    "root": "the root's parameters are kept after forward: backward needs them first",
    "kept": "units with reshard_after_forward = false are not gathered again",
    "post_forward": "an int reshard_after_forward gathers again over a smaller group",
    "quantised": "all-gathers of shards send int8 (all_gather_dtype)",
    "offload": "shards, gradients and optimizer state lie in host memory",
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


# ---- model states when the optimizer steps


def held_comparison(run: Run, paper: StateBytes) -> Comparison:
    """What ``run`` holds when its optimizer steps against the paper's formula with its bytes."""
    sizes = sizes_of(run)
    if isinstance(run.scenario.fsdp, Ddp):
        steps = _ddp_held(run, sizes)
    elif isinstance(run.scenario.fsdp, Zero):
        steps = _zero_held(run, sizes, paper)
    else:
        steps = _fsdp_held(run, sizes, paper)
    return _comparison(_paper(run.strategy, sizes, paper), steps, Fraction(run.held_total))


def _paper(strategy: Strategy, sizes: Sequence[Sizes], paper: StateBytes) -> Fraction:
    """Frozen parameters have no gradient and no optimizer state."""
    parameters = StateBytes(parameters=paper.parameters, gradients=0, optimizer=0)
    rest = replace(paper, parameters=0)
    return bytes_per_parameter(strategy, parameters) * sum(s.numel for s in sizes) + (
        bytes_per_parameter(strategy, rest) * sum(s.trained for s in sizes)
    )


def _ddp_held(run: Run, sizes: Sequence[Sizes]) -> Steps:
    assert isinstance(run.scenario.fsdp, Ddp)
    state = build_optimizer(run.scenario).state_bytes
    low = sum(s.numel * s.gather for s in sizes if s.gather != s.orig)
    gradients = sum(s.trained * s.gather for s in sizes)
    own = sum(s.numel * s.orig + s.trained * state for s in sizes) + low + gradients
    # With views, gradients live in the buckets instead of beside them.
    buckets = 0 if run.scenario.fsdp.gradient_as_bucket_view else gradients
    return [("dtypes", Fraction(own)), ("buckets", Fraction(own + buckets))]


def _zero_held(run: Run, sizes: Sequence[Sizes], paper: StateBytes) -> Steps:
    ranks = run.scenario.shard_factor
    state = build_optimizer(run.scenario).state_bytes
    buckets = bucket_sizes(run)

    def held(trained: str) -> Fraction:
        # An fp32 copy is kept where the parameters are of lower precision.
        parts = (
            getattr(s, trained) * (state + (s.orig if s.orig != s.gather else 0)) for s in sizes
        )
        reduced = (getattr(b, trained) * b.reduce for b in buckets)
        return sum(s.numel * s.gather for s in sizes) + Fraction(sum(parts) + sum(reduced), ranks)

    return [
        ("reduced", _paper(zero(2, ranks), sizes, paper)),
        ("dtypes", held("trained")),
        ("padding", held("padded_trained")),
    ]


def _fsdp_held(run: Run, sizes: Sequence[Sizes], paper: StateBytes) -> Steps:
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
        *([("offload", Fraction(0))] if run.scenario.offloads else []),
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
    all_reduced: bool
    """Each rank receives the whole gradient."""
    shard_bytes: int | None = None
    """Bytes per element of all-gathers over all ranks of a shard, if not ``gather_bytes``."""

    def nbytes(self, factor: int, replicas: int) -> Fraction:
        """Bytes that a rank sends in rings: gathers, reduce-scatters, all-reduces of the shards."""
        gather = sum(
            (Fraction(n - 1, n) * self._gather_bytes(n, factor) for n in self.gathers), Fraction(0)
        )
        passes = 2 if self.all_reduced else 1
        reduce = passes * Fraction(factor - 1, factor)
        reduce += 2 * Fraction(replicas - 1, replicas * factor)
        return gather * self.gathered + self.reductions * reduce * self.reduced * self.reduce_bytes

    def _gather_bytes(self, ranks: int, factor: int) -> int:
        if self.shard_bytes is None or ranks != factor:
            return self.gather_bytes
        return self.shard_bytes


def sent_comparison(run: Run) -> Comparison:
    """What ``run`` sends in a step against the paper's formula with 2 bytes per element."""
    sizes = sent_sizes_of(run)
    factor, replicas = run.scenario.shard_factor, run.scenario.replicas

    def total(sent: Sequence[_Sent]) -> Fraction:
        return sum((s.nbytes(factor, replicas) for s in sent), Fraction(0))

    now = [_paper_sent(run, s) for s in sizes]
    formula, steps = total(now), []
    for cause in _SENT_CAUSES:
        now = [_changed(cause, run, s, sent) for s, sent in zip(sizes, now, strict=True)]
        steps.append((cause, total(now)))
    return _comparison(formula, steps, run.sent_total)


def _micro_batches(run: Run) -> int:
    return run.scenario.training.gradient_accumulation_steps


def _paper_sent(run: Run, sizes: Sizes) -> _Sent:
    micro, factor = _micro_batches(run), run.scenario.shard_factor
    gathers = 2 * micro if "parameters" in run.strategy.sharded else 1
    return _Sent(
        gathered=sizes.numel,
        reduced=sizes.trained,
        gather_bytes=2,
        reduce_bytes=2,
        gathers=(factor,) * gathers if run.strategy.sharded else (),
        reductions=micro if "gradients" in run.strategy.sharded else 1,
        # DDP's formula says so through its replicas.
        all_reduced=run.strategy.reduces_by == "all_reduce" and bool(run.strategy.sharded),
    )


_GATHER_CAUSES = ("root", "kept", "post_forward")
_SENT_CAUSES = ("dtypes", "flat_parameter", "padding", "accumulation", *_GATHER_CAUSES, "quantised")


def _changed(cause: str, run: Run, sizes: Sizes, sent: _Sent) -> _Sent:
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
    if cause == "quantised":
        dtype = getattr(run.scenario.fsdp, "all_gather_dtype", None)
        return sent if dtype is None else replace(sent, shard_bytes=DTYPE_BYTES[dtype])
    if sizes.gathers and _gather_cause(sizes) == cause:
        return replace(sent, gathers=sizes.gathers * micro)
    return sent


def _accumulating(run: Run, sent: _Sent, micro: int) -> _Sent:
    fsdp = run.scenario.fsdp
    if isinstance(fsdp, Ddp):
        return sent if fsdp.no_sync else replace(sent, reductions=micro)
    if isinstance(fsdp, Zero):
        return sent  # parameters are gathered once, after the update
    return replace(sent, gathers=sent.gathers * micro) if len(sent.gathers) == 1 else sent


def _gather_cause(sizes: Sizes) -> str:
    if len(sizes.gathers) == 2:
        return "post_forward"
    return "root" if sizes.is_root else "kept"


def copied_comparison(run: OffloadRun) -> Comparison:
    """What crosses PCIe against ZeRO-Offload's 4 bytes of each parameter; ranks share it."""
    best, buckets = optimal(), bucket_sizes(run)
    ranks = run.scenario.shard_factor
    trained = Fraction(sum(b.trained for b in buckets), ranks)
    padded = Fraction(sum(b.padded_trained for b in buckets), ranks)
    low, reduced = (buckets[0].gather, buckets[0].reduce) if buckets else (2, 2)
    again = run.scenario.training.gradient_accumulation_steps - 1
    changes = {
        "dtypes": (low + reduced - best.communication) * trained,
        "padding": (low + reduced) * (padded - trained),
        "accumulation": again * 2 * reduced * padded,
    }
    return _explained(best.communication * trained, changes, run.copied)


def kept_comparison(run: OffloadRun) -> Comparison:
    """What stays on the GPU against ZeRO-Offload's 2 bytes of each parameter."""
    formula = Fraction(optimal().gpu_memory * sum(unit.numel for unit in run.workload.units))
    low = DTYPE_BYTES[run.scenario.param_dtype or _original(run)]
    return _explained(formula, {"dtypes": formula * low / 2 - formula}, run.held)


def _original(run: OffloadRun) -> str:
    return next(p.dtype for unit in run.workload.units for p in unit.params)


def _explained(formula: Fraction, changes: dict[str, Fraction], simulated: int) -> Comparison:
    changes = changes | {"schedule": simulated - formula - sum(changes.values(), Fraction(0))}
    found = (Difference(cause=c, nbytes=n) for c, n in changes.items() if n)
    return Comparison(formula=formula, differences=tuple(found), simulated=Fraction(simulated))


def unexplained(comparison: Comparison) -> Fraction:
    """Bytes that only the scenario's own schedule accounts for."""
    own = (d.nbytes for d in comparison.differences if d.cause == "schedule")
    return sum(own, Fraction(0))
