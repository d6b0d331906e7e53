"""``fsdpsim order``: the host order of one iteration, to compare with a profiler."""

from __future__ import annotations

import argparse

from fsdpsim.commands import common

HELP = "print what the CPU thread issues in one iteration, in order"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    common.add_json(parser)
    parser.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="which one, from 1; default: the last simulated one",
    )


def run(args: argparse.Namespace) -> int:
    """Record the program (nothing is simulated) and print it."""
    from fsdpsim.order import describe, host_order
    from fsdpsim.simulate import build_costs, build_workload, record

    scenario = common.load_scenario(args)
    iteration = scenario.iterations if args.iteration is None else args.iteration
    if not 1 <= iteration <= scenario.iterations:
        raise common.UsageError(
            f"--iteration {iteration}: the scenario has iterations 1 to {scenario.iterations}"
        )
    workload = build_workload(scenario)
    program = record(scenario, workload, build_costs(scenario))
    events = host_order(program, iteration - 1)
    if args.json:
        common.print_json(events)
    else:
        for event in events:
            print(describe(event))
    return 0
