"""Bytes of model states per GPU, and the largest model that fits.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 3.1 (what the states are) and section 5 with figure 1 (the three stages).
With P parameters over N ranks and K bytes of optimizer state, a GPU holds

    DDP     (2 + 2 + K) P            ZeRO-2  2 P + (2 + K) P / N
    ZeRO-1  (2 + 2) P + K P / N      ZeRO-3  (2 + 2 + K) P / N
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

#: What a step keeps; fp32 gradients are made shard by shard, so they follow the optimizer's cut.
STATES = ("parameters", "gradients", "optimizer", "fp32_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of each state. The default is mixed-precision Adam: 16 bytes.

    ZeRO, section 3.1: 16-bit parameters and gradients, K = 12 for fp32 parameters, momentum and
    variance. ZeRO-Infinity (arXiv 2104.07857), section 3, counts fp32 gradients too: 20 bytes.
    """

    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12
    """ZeRO's K."""
    fp32_gradients: int = 0

    @property
    def total(self) -> int:
        """Bytes per parameter where nothing is sharded."""
        return sum(getattr(self, state) for state in STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is cut into ``factor`` parts, and how gradients are summed."""

    name: str
    sharded: tuple[str, ...]
    """The members of :data:`STATES` of which a rank holds one part in ``factor``."""
    factor: int
    reduces_by: str = "reduce_scatter"
    """``all_reduce`` where each rank receives the whole gradient."""

    def parts(self, state: str) -> int:
        """Into how many parts ``state`` is cut."""
        return self.factor if state in self.sharded else 1


def ddp() -> Strategy:
    """Everything whole on every rank."""
    return Strategy(name="DDP", sharded=(), factor=1, reduces_by="all_reduce")


def zero(stage: int, ranks: int) -> Strategy:
    """ZeRO stage 1, 2 or 3 over ``ranks`` (the paper's P_os, P_os+g, P_os+g+p)."""
    names = {1: "ZeRO-1", 2: "ZeRO-2/SHARD_GRAD_OP", 3: "ZeRO-3/FULL_SHARD"}
    if stage not in names:
        raise ValueError(f"ZeRO has stages 1, 2 and 3, not {stage!r}")
    cut = ("optimizer", "fp32_gradients", "gradients", "parameters")[: stage + 1]
    return Strategy(name=names[stage], sharded=cut, factor=ranks)


def zero_1_by_all_reduce(ranks: int) -> Strategy:
    """ZeRO-1 as it is often drawn: all-reduce, update, all-gather.

    Half of the all-reduce is wasted: a rank uses only its part of the summed gradient.
    """
    return Strategy(
        name="ZeRO-1 by all-reduce",
        sharded=zero(1, ranks).sharded,
        factor=ranks,
        reduces_by="all_reduce",
    )


def hybrid_shard(factor: int) -> Strategy:
    """FULL_SHARD within groups of ``factor`` ranks, replicated across them.

    Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277, section 3.2.2.
    """
    return Strategy(name=f"HYBRID_SHARD F={factor}", sharded=zero(3, factor).sharded, factor=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes on one GPU, padding included."""

    parameters: int
    gradients: int
    optimizer: int
    fp32_gradients: int

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return self.parameters + self.gradients + self.optimizer + self.fp32_gradients


def model_states(
    strategy: Strategy,
    units: Sequence[int],
    per_parameter: StateBytes,
    trained: Sequence[int] | None = None,
) -> ModelStates:
    """States of units of so many parameters, each unit padded to a multiple of the factor.

    ``trained`` counts those of each unit that have gradients and optimizer state; default: all.
    """
    sizes = dict.fromkeys(STATES, units if trained is None else trained)
    sizes["parameters"] = units
    return ModelStates(
        **{
            state: getattr(per_parameter, state)
            * sum(math.ceil(numel / strategy.parts(state)) for numel in sizes[state])
            for state in STATES
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest level of sharded model states within a step, and where it is reached."""

    unit: int
    """Index of the unit whose backward has just ended."""
    nbytes: int


def backward_peak(units: Sequence[int], factor: int, per_parameter: StateBytes) -> Peak:
    """Peak of fully sharded states when one unit is whole at a time (no prefetch).

    All shards, the gradient shards of the units after it, and the whole parameters and gradient of
    the unit itself, before its reduce-scatter has an output. PyTorch FSDP, arXiv 2304.11277,
    section 3.2.1, writes it as O(sum of shards + largest unit).
    """
    shards = [math.ceil(numel / factor) for numel in units]
    resident = (per_parameter.total - per_parameter.gradients) * sum(shards)
    whole = (per_parameter.parameters + per_parameter.gradients) * factor
    levels = (
        Peak(
            unit=i,
            nbytes=resident + per_parameter.gradients * sum(shards[i + 1 :]) + whole * shard,
        )
        for i, shard in enumerate(shards)
    )
    return max(levels, key=lambda peak: peak.nbytes)


def padding_elements(strategy: Strategy, units: Sequence[int]) -> int:
    """Elements that padding adds to one sharded state of all ranks of a shard group together."""
    factor = strategy.factor
    return sum(-numel % factor for numel in units)


def bytes_per_parameter(strategy: Strategy, per_parameter: StateBytes) -> Fraction:
    """Bytes on one GPU per parameter of the model, exactly; no padding."""
    return sum(
        (Fraction(getattr(per_parameter, state), strategy.parts(state)) for state in STATES),
        Fraction(0),
    )


def largest_model(
    memory: int, strategy: Strategy, per_parameter: StateBytes, *, model_parallel: int = 1
) -> int:
    """Parameters of the largest model whose states alone fill ``memory`` bytes per GPU.

    With ``model_parallel`` ranks a GPU holds one part in so many of the model before ZeRO cuts it
    (ZeRO, section 5.4 and table 2).
    """
    return int(model_parallel * memory / bytes_per_parameter(strategy, per_parameter))
