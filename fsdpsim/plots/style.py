"""One palette, one set of labels and one way to write a file, for every picture.

The colours of forward, backward, all-gather, reduce-scatter, copies and optimizer are petroff6, the
six-colour cycle that Petroff (2021, arXiv:2107.02270) optimised for colour-vision deficiencies; the
others were chosen so that within one panel no two come closer than 18 (CIE76 colour difference) in
normal, protan, deutan or tritan vision, which a test computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one kind of thing looks wherever it appears."""

    colour: str
    label: str
    """Its name in legends."""
    letter: str = ""
    """What its bars begin with: F3 is the forward of unit 3."""
    hatch: str | None = None


#: GPU work by ``Op.kind``.
KINDS = {
    "forward": Look(colour="#5790fc", label="forward", letter="F"),
    "recompute": Look(colour="#b3cffd", label="recompute", letter="F′"),
    "backward": Look(colour="#964a8b", label="backward", letter="B"),
    "all_gather": Look(colour="#f89c20", label="all-gather", letter="A"),
    "reduce_scatter": Look(colour="#e42536", label="reduce-scatter", letter="R"),
    "all_reduce": Look(colour="#660a1a", label="all-reduce", letter="AR"),
    "copy": Look(colour="#9c9ca1", label="copy"),
    "optimizer": Look(colour="#7a21dd", label="optimizer", letter="O"),
    "h2d": Look(colour="#58d68d", label="copy from the host", letter="H"),
    "d2h": Look(colour="#0c2b4a", label="copy to the host", letter="D"),
}

#: What the CPU thread does: launches, FSDP's hooks, and waits by cause.
HOST = {
    "launch": Look(colour="#3e394d", label="launch"),
    "hook": Look(colour="#735c5c", label="FSDP hook"),
    "rate_limiter": Look(colour="#f2e49d", label="wait: rate limiter"),
    "read_loss": Look(colour="#bf9973", label="wait: read loss"),
    "cuda_malloc": Look(colour="#87e0c2", label="wait: cudaMalloc"),
    "alloc_retry": Look(colour="#992600", label="wait: allocation retry"),
    "gradient_buckets": Look(colour="#88aa11", label="wait: gradient buckets"),
    "offload": Look(colour="#0d4a7a", label="wait: offloaded gradients"),
    "blocking_copy": Look(colour="#3f9be0", label="wait: blocking copy"),
    "cpu_optimizer": Look(colour="#7a21dd", label="wait: optimizer on the CPUs"),
}
OTHER_WAIT = Look(colour="#717581", label="wait")

#: Memory by ``memory.CATEGORIES``, from the bottom of the stack to its top: what lives long first.
CATEGORIES = {
    "parameters": Look(colour="#143c8c", label="parameters"),
    "optimizer_state": Look(colour=KINDS["optimizer"].colour, label="optimizer state"),
    "gradients": Look(colour=KINDS["backward"].colour, label="gradients"),
    "activations": Look(colour=KINDS["forward"].colour, label="activations"),
    "temporaries": Look(colour=KINDS["copy"].colour, label="temporaries"),
    "reduce_scatter": Look(colour=KINDS["reduce_scatter"].colour, label="reduce-scatter buffers"),
    "all_gather": Look(colour=KINDS["all_gather"].colour, label="all-gather buffers"),
}
ROUNDING = Look(colour="#d9d9de", label="allocator's rounding")
PENDING = Look(colour="#fde3bd", label="freed, waiting for an event", hatch="////")

#: Allocator levels, as ``torch.cuda.memory_stats`` names them: (colour, line style, points).
LEVELS: dict[str, tuple[str, Any, float]] = {
    "reserved": ("#202024", "-", 1.4),
    "active": ("#202024", (0, (5, 2)), 0.9),
    "allocated": ("#202024", "-", 0.7),
    "requested": ("#202024", (0, (1, 1.5)), 0.9),
}
CAPACITY = ("#e42536", (0, (6, 3)), 1.0)

#: Rows from top to bottom; streams not named here follow in order of first use.
STREAMS = (
    "cpu",
    "compute",
    "pre_unshard",
    "all_gather_copy_in",
    "unshard",
    "all_gather",
    "communication",
    "post_backward",
    "reduce_scatter",
    "all_reduce",
    "h2d",
    "d2h",
)

INK = "#202024"
QUIET = "#6b6b74"
OUT_OF_FOCUS = "#e4e4e8"

ENDINGS = ("png", "svg", "pdf")

#: Points: what a reader sees at 72 per inch of the figure.
TITLE_SIZE = 11.5
TEXT_SIZE = 8.5
SMALL_SIZE = 7.5

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that a picture never depends on fonts
    "font.size": TEXT_SIZE,
    "text.color": INK,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.4,
    "grid.color": "#e4e4e8",
    "grid.linewidth": 0.6,
    "figure.dpi": 180,
    "savefig.dpi": 180,
    "svg.hashsalt": "fsdpsim",  # element ids that are the same in every run
    "svg.fonttype": "path",
}

#: What each format would else stamp with the time or the version of its writer.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@contextmanager
def house_style() -> Iterator[None]:
    """Our settings alone, whatever a matplotlibrc says; the caller's come back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update(_RC)
        yield


def write_figure(figure: Figure, path: Path) -> None:
    """Write ``figure`` in the format of the file's ending: the same figure gives the same bytes.

    Raises ``ValueError`` for an ending other than ``.png``, ``.svg`` and ``.pdf``.
    """
    ending = ending_of(path)
    with house_style():
        figure.savefig(path, format=ending, metadata=_METADATA[ending])


def ending_of(path: Path) -> str:
    """``png``, ``svg`` or ``pdf``; a ``ValueError`` says which endings there are."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in ENDINGS:
        shown = f"the ending {path.suffix!r}" if path.suffix else "no ending"
        raise ValueError(f"{path}: {shown}; a picture ends in .png, .svg or .pdf")
    return ending


@lru_cache
def shaded(colour: str, index: int) -> str:
    """``colour`` as units of even number have it, or a shade darker for odd ones."""
    if index % 2 == 0:
        return colour
    red, green, blue = (0.82 * channel for channel in to_rgb(colour))
    return to_hex((red, green, blue))


@lru_cache
def faded(colour: str) -> str:
    """``colour`` for work of another iteration than the one that is shown."""
    red, green, blue = (1 - 0.30 * (1 - channel) for channel in to_rgb(colour))
    return to_hex((red, green, blue))


@lru_cache
def ink_on(colour: str) -> str:
    """Our ink or white, whichever has the higher contrast on ``colour``."""
    return INK if contrast(colour, INK) > contrast(colour, "#ffffff") else "#ffffff"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, as WCAG 2.2 defines it."""
    light, dark = sorted((_luminance(one) + 0.05, _luminance(other) + 0.05), reverse=True)
    return light / dark


def _luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour, 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def look_of_wait(cause: str) -> Look:
    """The look of a host wait; a cause that this module does not know keeps its own name."""
    return HOST.get(cause) or Look(
        colour=OTHER_WAIT.colour, label=f"wait: {cause.replace('_', ' ')}"
    )
