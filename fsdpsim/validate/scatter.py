"""The picture of a validation: predicted over measured, step time and reserved memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Title, measured and predicted column of :func:`fsdpsim.validate.report.row_figures`, divisor.
PANELS = (
    ("Step time, s", "measured_step_time_s", "predicted_step_time_s", 1.0),
    (
        "Peak reserved memory, GiB",
        "measured_peak_reserved_bytes",
        "predicted_peak_reserved_bytes",
        float(2**30),
    ),
)


def scatter_png(rows: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of both panels; each point is one row, the dashed lines are 10 % off."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2), PANELS, strict=True):
        _draw(axes, rows, *panel)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _draw(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    title: str,
    measured: str,
    predicted: str,
    divisor: float,
) -> None:
    axes.set(title=title, xlabel="measured", ylabel="predicted", xscale="log", yscale="log")
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[measured] and row[predicted]:
            point = row[measured] / divisor, row[predicted] / divisor
            points.setdefault(row["hardware"], []).append(point)
    if not points:
        return
    for marker, (hardware, own) in zip("osD^vPX<>*" * 3, sorted(points.items()), strict=False):
        x, y = zip(*own, strict=True)
        axes.scatter(x, y, s=16, alpha=0.7, marker=marker, label=hardware)
    ends = [min(x for own in points.values() for x, _ in own) / 1.3]
    ends.append(max(x for own in points.values() for x, _ in own) * 1.3)
    axes.plot(ends, ends, color="black", linewidth=1)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * x for x in ends], color="black", linewidth=0.6, linestyle="--")
    axes.legend(fontsize=7, loc="upper left")
