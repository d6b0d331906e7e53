"""Seeded differences between ranks: jitter of kernels, and stragglers."""

from __future__ import annotations

import math
import random

from fsdpsim.engine import Op
from fsdpsim.program import Program, is_kernel
from fsdpsim.scenario.noise_table import Noise


def disturb(program: Program, noise: Noise, rank: int) -> None:
    """Change the durations of ``rank``'s kernels; all else keeps its own.

    A log-normal factor exp(sigma g - sigma^2 / 2) has mean 1 and, with sigma^2 = ln(1 + jitter^2),
    relative standard deviation ``jitter``.
    """
    slow = noise.stragglers.get(rank, 1.0)
    sigma = math.sqrt(math.log1p(noise.jitter**2))
    # A string seed, so that ranks of one seed do not repeat those of the next.
    gauss = random.Random(f"{noise.seed}/{rank}").gauss
    for op in program.steps:
        if type(op) is Op and is_kernel(op):
            factor = math.exp(sigma * gauss(0.0, 1.0) - sigma**2 / 2) if sigma else 1.0
            op.seconds *= slow * factor
