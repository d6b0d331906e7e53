"""What a scenario file may say. ``load`` reads one; all faults of a file are reported together."""

from fsdpsim.scenario.loading import ScenarioError, apply_overrides, load, read_scenario
from fsdpsim.scenario.problems import Problem
from fsdpsim.scenario.schema import Scenario

__all__ = ["Problem", "Scenario", "ScenarioError", "apply_overrides", "load", "read_scenario"]
