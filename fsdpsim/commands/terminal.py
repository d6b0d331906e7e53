"""The console that tables go to: they break between words, never inside a name or a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table

#: More characters than any line has.
UNBOUNDED = 1 << 20


class Terminal(Console):
    """A table whose words need more than the width gets it: the terminal wraps its lines."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, without cutting off what is wider."""
        super().print(*objects, **{"crop": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich renders; a table, wherever it is nested, is narrowed as far as its words let."""
        if isinstance(renderable, Table):
            options = options or self.options
            options = options.update(max_width=self._narrow(renderable, options))
        return super().render(renderable, options)

    def _narrow(self, table: Table, options: ConsoleOptions) -> int:
        """Set the columns' widths if rich would break words; returns the width for the table."""
        free = options.update(max_width=UNBOUNDED)
        excess = Measurement.get(self, free, table).maximum - options.max_width
        if excess <= 0:
            return options.max_width
        ranges = [self._range(column, free) for column in table.columns]
        widths = [most for _, most in ranges]
        while excess:
            wrappable = [i for i, (least, _) in enumerate(ranges) if widths[i] > least]
            if not wrappable:
                break
            widths[max(wrappable, key=widths.__getitem__)] -= 1
            excess -= 1
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        return options.max_width + excess

    def _range(self, column: Column, options: ConsoleOptions) -> Measurement:
        """The width of the column's longest word, and of its longest line."""
        if column.width is not None:
            return Measurement(column.width, column.width)
        cells = [Measurement.get(self, options, cell) for cell in (column.header, *column.cells)]
        most = max(cell.maximum for cell in cells)
        return Measurement(most if column.no_wrap else max(c.minimum for c in cells), most)

    def on_broken_pipe(self) -> None:
        """Let the command line end: rich would exit with 1."""
        raise
