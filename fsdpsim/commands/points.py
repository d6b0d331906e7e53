"""How points of a sweep are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fsdpsim.sweeps import Row

#: Characters between two columns.
GAP = 2

#: Figures that give way first on a narrow terminal.
LEAST_IMPORTANT = ("over nodes", "calls", "allocated", "exposed", "tok/s/GPU", "reserved")


def table(
    rows: Sequence[Row], keys: Sequence[str], *, front: Iterable[Row] = (), width: int
) -> Table:
    """Rows as a table; ``*`` marks those of ``front``, which no other beats in time and memory.

    Where ``width`` characters do not do for whole words, the less important figures are left out.
    """
    from rich.table import Table
    from rich.text import Text

    names = short_names(keys)
    columns = [
        (names[key].replace("_", " "), *(setting(row.settings[key]) for row in rows))
        for key in keys
    ]
    words = ([word for text in texts for word in text.split()] for texts in columns)
    least = sum(GAP + max(map(len, column), default=0) for column in words)
    figures = [_figures(row) for row in rows]
    labels = _fitting(figures, width - len("*") - least)
    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    shown.add_column("")
    for texts in columns:
        shown.add_column(texts[0])
    for label in labels:
        shown.add_column(label, justify="right", no_wrap=True)
    marked = {row.point for row in front}
    for i, row in enumerate(rows):
        star = "*" if row.point in marked else ""
        cells = [texts[1 + i] for texts in columns] + [figures[i][label] for label in labels]
        shown.add_row(star, *map(Text, cells))
    return shown


def _fitting(figures: Sequence[dict[str, str]], width: int) -> list[str]:
    """The figures to show in ``width`` characters, in order."""
    labels = [label for label in figures[0] if any(f[label] != "-" for f in figures)]
    wide = {label: GAP + max(len(label), *(len(f[label]) for f in figures)) for label in labels}
    for label in LEAST_IMPORTANT:
        if label in labels and sum(map(wide.__getitem__, labels)) > width:
            labels.remove(label)
    return labels


def _figures(row: Row) -> dict[str, str]:
    from fsdpsim.units import show_bytes, show_seconds

    figures, oom = row.figures, row.status == "oom"
    tokens, reserved = figures["tokens_per_s_per_gpu"], figures["peak_reserved_bytes"]
    collectives = figures["collectives"].values()
    between = sum(c["bytes_sent_between_nodes_per_rank"] for c in collectives)
    return {
        "step": "out of memory" if oom else show_seconds(figures["step_time_s"]),
        "exposed": "" if oom else show_seconds(figures["exposed_communication_s"]),
        "tok/s/GPU": "" if oom else f"{tokens:,.0f}" if tokens else "-",
        "reserved": show_bytes(reserved) if reserved else "-",
        "allocated": show_bytes(figures["peak_allocated_bytes"]) if reserved else "-",
        "calls": "" if oom else str(sum(c["count"] for c in collectives)),
        "over nodes": "" if oom else f"{between / 1e9:.2f} GB" if between else "-",
    }


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or the whole where two would look the same."""
    from fsdpsim.scenario.keys import split_key

    last = {key: split_key(key)[-1] for key in keys}
    return {k: name if list(last.values()).count(name) == 1 else k for k, name in last.items()}


def settings_text(row: Row, keys: Iterable[str] | None = None) -> str:
    """The settings of ``row``, or those of ``keys``, in one line."""
    chosen = row.settings if keys is None else keys
    return ", ".join(f"{key} = {setting(row.settings[key])}" for key in chosen)


def setting(value: Any) -> str:
    """A value of a swept key as people say it, cut if long."""
    from fsdpsim.sweeps.row import value_text

    text = value_text(value)
    return text if len(text) <= 50 else text[:47] + "..."
