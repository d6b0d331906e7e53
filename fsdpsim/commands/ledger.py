"""``fsdpsim ledger``: the closed formulas beside the simulator's counts."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from fsdpsim.commands import common

HELP = "closed formulas for every strategy, with the simulator's counts beside them"

#: Flag -> what its view shows; each is a module of :mod:`fsdpsim.ledger.views`.
VIEWS = {
    "layout": "which rank holds which elements of which parameter",
    "residual": "ZeRO-R: activations, buffers, working memory, fragmentation",
    "offload": "ZeRO-Offload: all placements of the training step's data",
    "infinity": "ZeRO-Infinity: bandwidth that offloading needs, largest models",
}

#: Sizes of one node that only ``--infinity`` reads.
SIZES = {"cpu_memory": "CPU memory", "nvme": "NVMe"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    common.add_scenario(parser)
    common.add_json(parser)
    views = parser.add_mutually_exclusive_group()
    for name, text in VIEWS.items():
        views.add_argument(f"--{name}", action="store_const", dest="view", const=name, help=text)
    for name, what in SIZES.items():
        text = f"with --infinity: {what} of one node; default: a DGX-2's"
        parser.add_argument(_flag(name), dest=name, metavar="SIZE", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the chosen view of the scenario; without a flag, model states and communication."""
    scenario = common.load_scenario(args)
    view = import_module(f"fsdpsim.ledger.views.{args.view or 'states'}")
    report = view.report(scenario, **_sizes(args))
    if args.json:
        common.print_json(report)
        return 0
    console = common.console()
    for shown in view.tables(report):
        console.print(shown, markup=False)
        console.print()
    return 0


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of the node's memories for ``--infinity``; they mean nothing to the other views."""
    from fsdpsim.ledger.infinity import DGX2_CPU_MEMORY, DGX2_NVME

    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.view != "infinity":
        if given:
            raise common.UsageError(f"{_flag(next(iter(given)))} goes with --infinity")
        return {}
    sizes = {name: common.parse_size(text, _flag(name), zero=True) for name, text in given.items()}
    return {"cpu_memory": DGX2_CPU_MEMORY, "nvme": DGX2_NVME} | sizes


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
