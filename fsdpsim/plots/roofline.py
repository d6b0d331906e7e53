"""The roofline of the step: what its kernels reach, against the GPU's arithmetic and memory.

Its kernels are known even where memory runs out; how long a whole step takes is not.

Williams et al. 2009: a kernel of F FLOPs that moves B bytes runs at most at the lower of the peak
and F / B times the memory's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdpsim.hardware import Hardware
from fsdpsim.plots.legend import Key
from fsdpsim.plots.sheet import Sheet, legend_room, place_legend
from fsdpsim.plots.style import INK, KINDS, QUIET, SMALL_SIZE, house_style
from fsdpsim.result import Result
from fsdpsim.units import show_seconds
from fsdpsim.workload import Kernel

INCHES = 3.4
"""Height of the panel."""

MAX_LISTED = 8
"""Points that get a number and a line of text: those that take most time."""

GEMM, ATTENTION, WHOLE = "gemm", "attention", "unit"
LOOKS = {
    GEMM: Key("matrix products", KINDS["forward"].colour),
    ATTENTION: Key("attention", KINDS["reduce_scatter"].colour),
    WHOLE: Key("whole passes (granularity = units)", KINDS["backward"].colour),
}
STEP = Key("the whole step, waiting included", INK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Kernels of the same FLOPs and bytes, of one step on one GPU."""

    names: tuple[str, ...]
    kind: str
    flops: float
    nbytes: float
    seconds: float
    """Alone on the GPU, as the cost model has it."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.nbytes

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


class Whole(NamedTuple):
    """What the times of kernels are a share of."""

    name: str
    seconds: float

    def share(self, seconds: float) -> str:
        """``seconds`` as a share, in words."""
        return f"{seconds / self.seconds:.0%} of {self.name}"


def points_of(result: Result) -> list[Point]:
    """The kernels of the step that have FLOPs, those that take most time first."""
    found: dict[tuple[str, float, float], list[Kernel]] = {}
    for kernel in _kernels(result):
        if kernel.flops and kernel.nbytes:
            found.setdefault((kernel.kind, kernel.flops, kernel.nbytes), []).append(kernel)
    points = (_point(kernels, result) for kernels in found.values())
    return sorted(points, key=lambda point: -point.seconds)


def _point(kernels: Sequence[Kernel], result: Result) -> Point:
    return Point(
        names=tuple(dict.fromkeys(kernel.name for kernel in kernels)),
        kind=kernels[0].kind,
        flops=sum(kernel.flops for kernel in kernels),
        nbytes=sum(kernel.nbytes for kernel in kernels),
        seconds=sum(result.costs.kernel(kernel) for kernel in kernels),
    )


def _kernels(result: Result) -> Iterator[Kernel]:
    """Every kernel of the model that one step launches."""
    workload, training = result.workload, result.scenario.training
    parts = {part.name: part for part in workload.parts}
    passes = training.gradient_accumulation_steps * training.forwards_per_backward
    for name in (workload.calls or tuple(parts)) * passes:
        part = parts[name]
        yield from (*part.forward, *part.recompute, *part.backward)


def roofline(result: Result) -> Figure:
    """Points of the kernels below the GPU's roofs, and the step as a whole if it fits in memory.

    Raises ``ValueError`` where no kernel has FLOPs: units of given durations.
    """
    points = points_of(result)
    if not points:
        raise ValueError("a roofline needs kernels with FLOPs and bytes, which a [model] has")
    with house_style():
        return _draw(result, points)


def _draw(result: Result, points: list[Point]) -> Figure:
    hardware = result.scenario.device
    keys = [look for kind, look in LOOKS.items() if any(p.kind == kind for p in points)]
    step = None if result.memory.oom else _step(result, points)
    keys += [STEP] if step else []
    keys += [Key("peaks", INK, line="-"), Key("what large kernels reach", QUIET, line="--")]
    whole = _whole(result)
    sheet = Sheet()
    sheet.title(_title(result, step))
    sheet.note("kernels of one step by FLOPs per byte; the area of a point is its share of time")
    keys_at = sheet.skip(legend_room(keys))
    sheet.skip(0.1)
    panel = sheet.panel(INCHES)
    sheet.skip(0.48)
    for number, point in enumerate(points[:MAX_LISTED], start=1):
        sheet.note(f"{number}  {_line(point, result, whole)}", size=SMALL_SIZE)
    sheet.note(_rest(result, whole), size=SMALL_SIZE)
    figure = sheet.figure()
    axes = panel.axes
    assert axes is not None
    _scale(axes, [*points, step] if step else points, hardware)
    _draw_roofs(axes, hardware)
    _draw_points(axes, points, whole)
    if step:
        place = (step.intensity, step.rate / 1e12)
        axes.scatter(*place, s=40, color=STEP.colour, marker="D", gid="step", zorder=3)
    place_legend(figure, keys, keys_at)
    return figure


def _whole(result: Result) -> Whole:
    if result.memory.oom is None:
        return Whole("the step", result.step_time)
    return Whole("all kernels' time", sum(map(result.costs.kernel, _kernels(result))))


def _step(result: Result, points: Iterable[Point]) -> Point:
    kernels = list(_kernels(result))
    return Point(
        names=("step",),
        kind="step",
        flops=sum(point.flops for point in points),
        nbytes=sum(kernel.nbytes for kernel in kernels),
        seconds=result.step_time,
    )


def _title(result: Result, step: Point | None) -> str:
    name, oom = result.scenario.title.strip() or result.scenario.name, result.memory.oom
    if oom is not None:
        return f"{name}: out of memory at {show_seconds(oom.time)}; what its kernels would reach"
    assert step is not None
    share = step.rate / result.scenario.device.peak_flops
    counted = "recompute counts, masked attention does not"
    return f"{name}: {step.rate / 1e12:.0f} TFLOP/s, {share:.0%} of the peak ({counted})"


def _line(point: Point, result: Result, whole: Whole) -> str:
    first, *others = point.names
    more = f" and {len(others)} more of its size" if others else ""
    time = f"{show_seconds(point.seconds)}, {whole.share(point.seconds)}"
    peak = point.rate / result.scenario.device.peak_flops
    return f"{first}{more}: {time}, {point.rate / 1e12:.0f} TFLOP/s, {peak:.0%} of the peak"


def _rest(result: Result, whole: Whole) -> str:
    """Kernels without a matrix product have no place below the roofs: only bytes."""
    kernels = [kernel for kernel in _kernels(result) if not kernel.flops]
    seconds = sum(result.costs.kernel(kernel) for kernel in kernels)
    if not seconds:
        return "Every kernel has FLOPs."
    rate = sum(kernel.nbytes for kernel in kernels) / seconds / 1e12
    peak = result.scenario.device.memory_bandwidth / 1e12
    return (
        f"Without FLOPs to count, limited by memory: {show_seconds(seconds)}, "
        f"{whole.share(seconds)}, {rate:.2f} of {peak:.2f} TB/s."
    )


def _scale(axes: Axes, points: Iterable[Point], hardware: Hardware) -> None:
    ridge = hardware.peak_flops / hardware.memory_bandwidth
    intensities = [point.intensity for point in points]
    low, high = min(ridge / 8, *intensities), max(ridge * 8, *intensities)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low / 1.5, high * 1.5)
    slowest = min(point.rate for point in points)
    roof = min(hardware.peak_flops, low / 1.5 * hardware.memory_bandwidth)
    axes.set_ylim(min(slowest, roof) / 1.5e12, hardware.peak_flops * 1.5 / 1e12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.6g}")
    axes.set_xlabel("FLOPs per byte of device memory")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True)


def _draw_roofs(axes: Axes, hardware: Hardware) -> None:
    reached = hardware.gemm_efficiency[-1][1] * hardware.efficiency / hardware.slowest_rank
    roofs = (
        (hardware.peak_flops, hardware.memory_bandwidth, INK, "-", "peaks"),
        (
            hardware.peak_flops * reached,
            hardware.memory_bandwidth * hardware.memory_efficiency,
            QUIET,
            "--",
            "reached",
        ),
    )
    low, high = axes.get_xlim()
    for flops, bandwidth, colour, line, name in roofs:
        x = (low, flops / bandwidth, high)
        y = [min(flops, at * bandwidth) / 1e12 for at in x]
        axes.plot(x, y, color=colour, ls=line, lw=1.0, gid=name, zorder=1)


def _draw_points(axes: Axes, points: Sequence[Point], whole: Whole) -> None:
    for number, point in enumerate(points, start=1):
        colour = LOOKS.get(point.kind, LOOKS[WHOLE]).colour
        place = (point.intensity, point.rate / 1e12)
        area = 16 + 900 * point.seconds / whole.seconds
        axes.scatter(*place, s=area, color=colour, alpha=0.6, lw=0, gid=point.names[0], zorder=2)
        if number <= MAX_LISTED:
            beside = (math.sqrt(area) / 2 - 1, math.sqrt(area) / 2 - 1)
            axes.annotate(
                str(number), place, beside, textcoords="offset points", size=SMALL_SIZE, zorder=4
            )
