"""The ``[noise]`` table: what makes ranks differ."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt

from fsdpsim.scenario.runtimes import Table


class Noise(Table):
    """With this table every rank is simulated, and a collective starts with its last member."""

    seed: StrictInt = 0
    """Of the random numbers; each rank draws its own."""
    jitter: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    """Relative standard deviation of each kernel's duration (log-normal, mean as without)."""
    stragglers: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1, strict=True)]] = (
        Field(default_factory=dict)
    )
    """Rank -> how many times longer its kernels take."""
