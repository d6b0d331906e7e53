"""fsdpsim predicts how PyTorch FSDP runs, without a GPU: when, with how much memory, and why.

``load`` reads a scenario, ``simulate`` runs it, ``sweep`` runs every combination of its choices.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdpsim.result import Result
    from fsdpsim.scenario import Scenario, ScenarioError, load
    from fsdpsim.simulate import simulate
    from fsdpsim.sweeps import sweep

__version__ = "0.1.0"
__all__ = ["Result", "Scenario", "ScenarioError", "__version__", "load", "simulate", "sweep"]

_HOME = {
    "Result": "fsdpsim.result",
    "Scenario": "fsdpsim.scenario",
    "ScenarioError": "fsdpsim.scenario",
    "load": "fsdpsim.scenario",
    "simulate": "fsdpsim.simulate",
    "sweep": "fsdpsim.sweeps",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``fsdpsim --help`` needs none of it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


class _Package(ModuleType):
    """Keeps ``fsdpsim.simulate`` the function: importing the module of that name would hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
