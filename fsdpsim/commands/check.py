"""``fsdpsim check``: validate scenarios and print every key, defaults filled in."""

from __future__ import annotations

import argparse

from fsdpsim.commands import common

HELP = "validate and print the resolved scenario"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser, many=True)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print each resolved scenario and its units."""
    from fsdpsim.resolved import as_toml, resolved, unset_keys
    from fsdpsim.simulate import build_workload

    tables = []
    for scenario in common.load_scenarios(args):
        build_workload(scenario)  # finds what only the model can tell, such as unknown units
        tables.append(resolved(scenario))
        if not args.json:
            print(f"# {scenario.source}: ok")
            print(as_toml(tables[-1], unset_keys(scenario)))
    if args.json:
        common.print_json(tables if len(tables) > 1 else tables[0])
    return 0
