"""An explanation as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fsdpsim.explain.critical import PathSegment
from fsdpsim.explain.explanation import Explanation
from fsdpsim.explain.oom import OomCause
from fsdpsim.explain.owners import Owner, Peak
from fsdpsim.explain.text import (
    HELD_BY,
    describe_cause,
    describe_step,
    longest_waits,
    unit_range,
)
from fsdpsim.explain.trials import Trial
from fsdpsim.units import show_bytes, show_seconds

#: Kinds that the first sentence names, and the share of the step below which waits are one row.
MOST_WAITS = 3
SMALL_WAIT = 1e-3

#: Rows shown of lists that have one row per unit; ``--json`` has all of them.
MOST_ROWS = 8


def explanation_tables(found: Explanation) -> Iterator[RenderableType]:
    """The explanation, section by section."""
    yield plain(found.title or found.scenario, style="bold italic")
    if found.oom is not None:
        yield _oom(found.oom)
    else:
        yield plain(_headline(found))
        yield _parts(found)
        if found.held_by:
            yield _held_by(found)
        yield _path(found)
        yield _bounds(found)
        if any(row.exposed for row in found.exposed):
            yield _exposed(found)
        if found.peak is not None:
            yield _peak(found.peak)


def plain(text: str, style: str = "") -> Text:
    """Text that may hold names from a scenario: neither markup nor control characters."""
    shown = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Text("".join(shown), style=style)


class Section:
    """A heading above a table: headings may be wider than their table."""

    def __init__(self, title: str, *columns: str, right: Sequence[int] = ()) -> None:
        self.title = title
        self.table = Table(box=None, header_style="dim", pad_edge=False)
        for i, column in enumerate(columns):
            if i in right:
                self.table.add_column(column, justify="right", no_wrap=True)
            else:
                self.table.add_column(column, overflow="fold")

    def row(self, *cells: str, style: str | None = None) -> None:
        """Add a row of plain text: names from the scenario are not markup."""
        self.table.add_row(*map(plain, cells), style=style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield plain(f"\n{self.title}", style="bold")
        yield self.table


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else ""


def _headline(found: Explanation) -> str:
    step = found.step_time
    busy = f"{show_seconds(found.busy)} ({_share(found.busy, step)})"
    text = f"The step takes {show_seconds(step)}. The compute stream is busy for {busy}"
    waits = [(kind or "the host", seconds) for kind, seconds in longest_waits(found.parts)]
    if len(waits) > MOST_WAITS:
        rest = sum(seconds for _, seconds in waits[MOST_WAITS:])
        waits = [*waits[:MOST_WAITS], ("others", rest)]
    named = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in waits)
    return f"{text} and waits for {named}." if waits else f"{text}."


def _parts(found: Explanation) -> Section:
    section = Section(
        "Where the time goes", "compute stream", "time", "share", "times", "units", right=(1, 2, 3)
    )
    small = [p for p in found.parts if not p.busy and p.seconds < SMALL_WAIT * found.step_time]
    if len(small) < 2:
        small = []
    for part in found.parts:
        if part not in small:
            section.row(
                describe_cause(part),
                show_seconds(part.seconds),
                _share(part.seconds, found.step_time),
                str(part.count),
                unit_range(part.units),
                style=None if part.busy else "yellow",
            )
    if small:
        rest = sum(part.seconds for part in small)
        share = _share(rest, found.step_time)
        section.row(f"{len(small)} shorter waits", show_seconds(rest), share, style="yellow")
    section.row("step", show_seconds(found.step_time), "100.0%", style="bold")
    return section


def _held_by(found: Explanation) -> Section:
    section = Section("Why what it waited for had not come earlier", "idle", "reason", right=(0,))
    for reason, seconds in found.held_by.items():
        section.row(show_seconds(seconds), HELD_BY.get(reason, reason))
    return section


def _path(found: Explanation) -> Section:
    section = Section(
        "The critical path: what is not on it costs no time",
        "from",
        "takes",
        "what",
        "units",
        right=(0, 1),
    )
    for segment in found.critical_path:
        section.row(
            show_seconds(segment.start - found.window[0]),
            show_seconds(segment.end - segment.start),
            describe_segment(segment),
            unit_range(segment.units),
        )
    return section


def describe_segment(segment: PathSegment) -> str:
    """``3 x (reduce_scatter, all_gather, backward): backward 12 s, all_gather 4.5 s, ...``."""
    steps = ", ".join(describe_step(step, segment.phase) for step in segment.steps)
    text = f"{segment.repeats} x ({steps})" if segment.repeats > 1 else steps
    if len(segment.seconds) > 1:
        by_length = sorted(segment.seconds.items(), key=lambda item: -item[1])
        text += ": " + ", ".join(f"{kind} {show_seconds(s)}" for kind, s in by_length)
    return text


def _bounds(found: Explanation) -> Section:
    section = Section(
        "No schedule is faster than the work of one resource",
        "resource",
        "its work",
        "the step is",
        right=(1, 2),
    )
    for bound in found.lower_bounds:
        ratio = f"{found.step_time / bound.seconds:.2f} x"
        section.row(bound.resource, show_seconds(bound.seconds), ratio)
    return section


def _exposed(found: Explanation) -> Section:
    section = Section(
        "Communication that no compute hides", "kind", "unit", "takes", "exposed", right=(2, 3)
    )
    rows = [row for row in found.exposed if row.exposed]
    for row in rows[:MOST_ROWS]:
        section.row(row.kind, row.unit, show_seconds(row.time), show_seconds(row.exposed))
    if len(rows) > MOST_ROWS:
        rest = sum(row.exposed for row in rows[MOST_ROWS:])
        section.row(f"{len(rows) - MOST_ROWS} more", "", "", show_seconds(rest), style="dim")
    return section


def _peak(peak: Peak) -> RenderableType:
    where = f"{peak.buffer} of {peak.unit or 'the training loop'} in {peak.phase}"
    title = f"The peak: {show_bytes(peak.allocated)} allocated, at the allocation of {where}"
    freed, cached = peak.active - peak.allocated, peak.reserved - peak.active
    levels = (
        f"Beside it {show_bytes(freed)} freed but waiting for events, {show_bytes(cached)} cached: "
        f"{show_bytes(peak.reserved)} reserved then, {show_bytes(peak.peak_reserved)} at most."
    )
    return Group(_owners(title, peak.categories, peak.owners), plain(levels))


def _owners(title: str, categories: Sequence[Owner], owners: Sequence[Owner]) -> Section:
    section = Section(
        title, "category", "allocated", "requested", "buffers", "largest owners", right=(1, 2, 3)
    )
    for category in categories:
        if category.allocated:
            units = [o for o in owners if o.category == category.category]
            section.row(
                category.category,
                show_bytes(category.allocated),
                show_bytes(category.requested),
                str(category.count),
                _largest(units),
            )
    return section


def _largest(owners: Sequence[Owner], most: int = 2) -> str:
    named = [f"{o.unit or 'training loop'} {show_bytes(o.allocated)}" for o in owners[:most]]
    more = len(owners) - most
    return ", ".join(named) + (f", {more} more" if more > 0 else "")


#: Why memory that is reserved and not allocated did not serve a request.
UNUSABLE = {
    "fragmentation": "free on this stream, but in pieces that are too small",
    "other_streams": "free in the pools of other streams, from which memory never moves",
    "other_pool": "free in the pool for requests of another size",
    "pending_events": "freed, but a kernel that uses it has not finished",
}


def _oom(oom: OomCause) -> RenderableType:
    report = oom.report
    op = f", for {oom.next_op} of {oom.next_unit or 'the training loop'}" if oom.next_op else ""
    text = plain(
        f"Out of memory at {show_seconds(oom.time)}, in {oom.phase} of iteration "
        f"{oom.iteration + 1}: {oom.buffer} of {oom.unit or 'the training loop'}{op}.\n"
        f"It asked for {show_bytes(report.requested)} ({oom.category}, stream {report.stream}), so "
        f"the allocator for a segment of {show_bytes(report.segment_size)}: "
        f"{show_bytes(oom.missing)} more than the device had left. "
        f"{show_bytes(report.capacity)} can be allocated beside "
        f"{show_bytes(oom.outside_allocator)} of CUDA context and {oom.communicators} NCCL "
        f"communicator{'' if oom.communicators == 1 else 's'}; "
        f"{show_bytes(report.reserved)} of them were reserved, {show_bytes(report.allocated)} "
        "allocated."
    )
    parts: list[RenderableType] = [text]
    if oom.unusable:
        section = Section("Free, but of no use to the request", "size", "why", right=(0,))
        for reason, size in oom.unusable.items():
            section.row(show_bytes(size), UNUSABLE[reason])
        parts.append(section)
    if oom.categories:
        parts.append(_owners("Who held memory", oom.categories, oom.owners))
    return Group(*parts)


# ---- remedies


def trial_tables(trials: Sequence[Trial], *, after_oom: bool) -> Iterator[RenderableType]:
    """What helps, as a table; the rest in a line each."""
    if after_oom:
        yield from _oom_trials(trials)
        return
    helps = [t for t in trials if t.verdict == "helps"]
    if helps:
        yield _helping(helps)
    else:
        yield plain("\nNone of the remedies tried helps.", style="bold")
    for verdict, words in (
        ("hurts", "Hurts"),
        ("no change", "Changes nothing"),
        ("oom", "Runs out of memory"),
    ):
        rest = [t for t in trials if t.verdict == verdict]
        if rest:
            named = [f"{t.text}{_loss(t)}" for t in rest]
            yield plain(f"{words}: {'; '.join(named)}", style="dim")


def _helping(trials: Sequence[Trial]) -> Section:
    section = Section(
        "What would help (each simulated)",
        "change",
        "step",
        "faster",
        "peak reserved",
        "allocated",
        right=(1, 2, 3, 4),
    )
    for trial in trials:
        section.row(
            trial.text,
            show_seconds(trial.step_time or 0.0),
            _percent(trial.time_gain),
            _saved(trial.reserved_gain),
            _saved(trial.allocated_gain),
        )
    return section


def _percent(gain: float | None) -> str:
    return "=" if gain is None or abs(gain) < 5e-5 else f"{gain:+.2%}"


def _saved(gain: int) -> str:
    return "=" if not gain else ("-" if gain > 0 else "+") + show_bytes(abs(gain))


def _loss(trial: Trial) -> str:
    if trial.verdict != "hurts":
        return ""
    changes = []
    if trial.time_gain is not None and trial.time_gain < -5e-5:
        changes.append(f"{-trial.time_gain:.1%} slower")
    if trial.reserved_gain < 0:
        changes.append(f"{_saved(trial.reserved_gain)} reserved")
    elif trial.allocated_gain < 0:
        changes.append(f"{_saved(trial.allocated_gain)} allocated")
    return f" ({', '.join(changes)})" if changes else ""


def _oom_trials(trials: Sequence[Trial]) -> Iterator[RenderableType]:
    fitting = [t for t in trials if t.fits]
    if fitting:
        section = Section(
            "What would have avoided it (each simulated)",
            "change",
            "step",
            "peak reserved",
            "allocated",
            right=(1, 2, 3),
        )
        for trial in fitting:
            section.row(
                trial.text,
                show_seconds(trial.step_time or 0.0),
                show_bytes(trial.peak_reserved),
                show_bytes(trial.peak_allocated),
            )
        yield section
    else:
        yield plain("\nNone of the remedies tried alone avoids it.", style="bold")
    failing = [f"{t.text} (at {t.oom})" for t in trials if not t.fits]
    if failing:
        yield plain(f"Does not avoid it: {'; '.join(failing)}", style="dim")
