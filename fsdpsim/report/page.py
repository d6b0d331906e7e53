"""Puts the page together: one file that needs no network and lets nothing in it run but our script.

Its Content-Security-Policy allows the scripts and styles whose SHA-256 it states, and nothing else;
and it forbids scripts to turn texts into markup (Trusted Types).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from fsdpsim import __version__
from fsdpsim.explain import Trial, explain
from fsdpsim.explain.timeline import Timeline
from fsdpsim.report.colours import style_data, style_sheet
from fsdpsim.report.encode import Strings, Ticks, script_json
from fsdpsim.report.html import element, markup
from fsdpsim.report.legend import memory_legend, memory_looks, timeline_legend, timeline_looks
from fsdpsim.report.memory import memory_data
from fsdpsim.report.timeline import host_looks, timeline_data
from fsdpsim.report.words import explanation, figures, heading
from fsdpsim.resolved import as_toml, resolved
from fsdpsim.result import Result

LIBRARY = "vendor/uPlot.iife.min.js"

#: Modules of the page's script: each defines its names; the last one starts it.
SCRIPTS = (
    "js/format.js",
    "js/model.js",
    "js/curve.js",
    "js/span.js",
    "js/paint.js",
    "js/chain.js",
    "js/facts.js",
    "js/axes.js",
    "js/timeline.js",
    "js/memory.js",
    "js/overview.js",
    "js/gestures.js",
    "js/tooltip.js",
    "js/details.js",
    "js/main.js",
    "js/start.js",
)

STYLES = ("vendor/uPlot.min.css", "css/page.css", "css/charts.css", "css/print.css")


def page(
    result: Result, *, rows: Sequence[tuple[str, str]], trials: Sequence[Trial] | None = None
) -> str:
    """The report of ``result`` as HTML.

    ``rows``: the summary as (label, text), as ``fsdpsim run`` prints it; ``trials``: the remedies
    that were tried (:func:`fsdpsim.explain.try_remedies`), None to say nothing of them.
    """
    timeline = Timeline(result)
    looks = timeline_looks(result, host_looks(timeline))
    bands = memory_looks(result)
    style = "\n".join([*map(asset, STYLES), style_sheet(looks, bands)])
    library, script = asset(LIBRARY), "\n".join(map(asset, SCRIPTS))
    scenario = result.scenario
    return Template(asset("page.html")).substitute(
        policy=policy([library, script], [style]),
        version=__version__,
        title=markup(element("title", scenario.title or scenario.name))[7:-8],
        heading=markup(heading(result)),
        figures=markup(figures(rows)),
        timeline_legend=markup(timeline_legend(looks)),
        memory_legend=markup(memory_legend(bands)),
        explanation=markup(*explanation(explain(result), trials)),
        scenario=markup(element("pre", as_toml(resolved(scenario)))),
        data=script_json(_data(result, timeline)),
        style=style,
        library=library,
        script=script,
    )


def _data(result: Result, timeline: Timeline) -> dict[str, object]:
    strings, ticks = Strings(), Ticks(_longest(result))
    content = {
        "timeline": timeline_data(result, timeline, strings, ticks),
        "memory": memory_data(result, strings, ticks),
        "style": style_data(host_looks(timeline)),
    }
    return {"ticks_per_second": ticks.per_second, "strings": strings.table(), **content}


def _longest(result: Result) -> float:
    """The latest time in the simulation (seconds)."""
    ends = [*result.iteration_ends, *(sample.time for sample in result.memory.samples[-1:])]
    oom = result.memory.oom
    return max(ends + ([oom.time] if oom is not None else []))


def asset(name: str) -> str:
    """A text file of this package."""
    return files("fsdpsim.report").joinpath(name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The Content-Security-Policy under which these scripts and styles work and nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
