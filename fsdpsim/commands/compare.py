"""``fsdpsim compare``: two scenarios side by side, with the cause of each difference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpsim.commands import common
from fsdpsim.commands.paths import files_of, spare_inputs

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdpsim.compare import Comparison, Setting
    from fsdpsim.result import Result
    from fsdpsim.scenario import Scenario

HELP = "compare two scenarios: settings, figures, and the cause of each difference"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("a", type=Path, metavar="A", help="scenario file")
    parser.add_argument(
        "b",
        type=Path,
        nargs="?",
        metavar="B",
        help="scenario file; left out, B is A with the overrides of --set",
    )
    common.add_set(parser)
    common.add_json(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="draw both timelines on one time axis"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate both and print what differs."""
    from fsdpsim.compare import compare
    from fsdpsim.simulate import simulate

    if args.output is not None:
        _check_ending(args.output)
    scenarios = _scenarios(args)
    if args.output is not None:
        spare_inputs([args.output], files_of(scenarios))
    results = [simulate(scenario) for scenario in scenarios]
    found = compare(*results)
    drawn = args.output is not None and _draw(results, args.output)
    if args.json:
        common.print_json(found.as_json())
    else:
        console = common.console()
        for renderable in _tables(found):
            console.print(renderable)
        if drawn:
            console.print(f"wrote {args.output}", markup=False, soft_wrap=True)
    return 0


def _scenarios(args: argparse.Namespace) -> tuple[Scenario, Scenario]:
    """With two files the overrides are for both; with one they make the second."""
    from fsdpsim.scenario import load

    if args.b is not None:
        return load(args.a, args.overrides), load(args.b, args.overrides)
    if not args.overrides:
        raise common.UsageError(
            "compare: give a second file, or --set key=value to change the first"
        )
    return load(args.a), load(args.a, args.overrides)


def _check_ending(path: Path) -> None:
    from fsdpsim.plots.style import ending_of

    try:
        ending_of(path)
    except ValueError as error:
        raise common.UsageError(str(error)) from None


def _draw(results: list[Result], path: Path) -> bool:
    """Whether there was anything to draw."""
    from fsdpsim.files import write_with
    from fsdpsim.plots import NothingRanError, comparison, write_figure

    try:
        figure = comparison(results)
    except NothingRanError as error:
        print(f"fsdpsim: {error}", file=sys.stderr)
        return False
    write_with(path, lambda temporary: write_figure(figure, temporary))
    return True


# ---- tables


def _tables(found: Comparison) -> Iterator[RenderableType]:
    from fsdpsim.explain.tables import Section, plain
    from fsdpsim.explain.text import describe_cause
    from fsdpsim.units import show_seconds

    yield plain(f"A  {found.a}\nB  {found.b}", style="bold")
    yield plain(_headline(found))
    settings = [s for s in found.settings if s.given or _matters(s)]
    if settings:
        section = Section("Settings that differ", "key", "A", "B")
        for setting in settings:
            section.row(setting.key, *_values(setting))
        yield section
    yield _figures(found)
    if found.causes:
        section = Section(
            "What the compute stream does with the time", "", "A", "B", "change", right=(1, 2, 3)
        )
        for cause in found.causes:
            section.row(
                describe_cause(cause),
                show_seconds(cause.a),
                show_seconds(cause.b),
                _signed(show_seconds, cause.change),
                style=None if cause.change else "dim",
            )
        yield section


def _values(setting: Setting) -> tuple[str, str]:
    """Both values: quantities with a unit, unless that makes them look alike."""
    from fsdpsim.explain.text import as_value

    shown = [_quantity(value, setting.dimension) for value in (setting.a, setting.b)]
    if shown[0] == shown[1]:
        shown = [_shown(as_value, value) for value in (setting.a, setting.b)]
    return shown[0], shown[1]


def _quantity(value: Any, dimension: str | None) -> str:
    from fsdpsim.explain.text import as_value
    from fsdpsim.units import show_quantity

    if dimension is None or not isinstance(value, (int, float, list)):
        return _shown(as_value, value)
    if isinstance(value, list):
        return ", ".join(_quantity(item, dimension) for item in value)
    return show_quantity(value, dimension)


def _matters(setting: Setting) -> bool:
    """Not merely another preset's number, or a default that the other runtime does not have."""
    both = setting.a is not None and setting.b is not None
    return both and not setting.key.startswith("hardware.")


def _headline(found: Comparison) -> str:
    from fsdpsim.units import show_seconds

    for name, oom in (("A", found.oom_a), ("B", found.oom_b)):
        if oom is not None:
            where = f"{oom['what']} of {oom['unit'] or 'the training loop'} in {oom['phase']}"
            return f"{name} runs out of memory at {show_seconds(oom['when_s'])}: {where}."
    step = next((f for f in found.figures if f.name == "step_time_s"), None)
    if step is None or not step.a or step.b is None:
        return "Neither takes any time."
    if step.a == step.b:
        return f"Both take {show_seconds(step.a)}."
    change = step.b / step.a - 1
    words = f"{abs(change):.1%} {'less' if change < 0 else 'more'} than A's {show_seconds(step.a)}"
    return f"B takes {show_seconds(step.b)}, {words}."


def _figures(found: Comparison) -> RenderableType:
    from fsdpsim.explain.tables import Section

    section = Section("Figures of the step", "", "A", "B", "change", right=(1, 2, 3))
    for figure in found.figures:
        label, show = _format(figure.name)
        change = None if figure.a is None or figure.b is None else figure.b - figure.a
        section.row(
            label,
            _shown(show, figure.a),
            _shown(show, figure.b),
            "" if change is None else _signed(show, change),
            style=None if change else "dim",
        )
    return section


def _format(name: str) -> tuple[str, Callable[[Any], str]]:
    """A figure's label, and how its values are written."""
    from fsdpsim.units import show_bytes, show_seconds

    if name.endswith("_bytes"):
        return name.removesuffix("_bytes").replace("_", " "), show_bytes
    if name == "tokens_per_s_per_gpu":
        return "tokens per second and GPU", "{:,.0f}".format
    if name.endswith("_s"):
        return name.removesuffix("_s").replace("_", " "), show_seconds
    if name == "mfu":
        return "MFU", "{:.2%}".format
    return name.replace("num_", "").replace("_", " "), str


def _shown(show: Callable[[Any], str], value: Any) -> str:
    return "-" if value is None else show(value)


def _signed(show: Callable[[Any], str], change: Any) -> str:
    return "=" if not change else ("+" if change > 0 else "-") + show(abs(change))
