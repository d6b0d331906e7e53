"""Quantities as people write them: "80 GiB", "400 Gb/s", "5 us", "989 TFLOP/s".

Every quantity inside the program is a number in SI base units: bytes, bytes per second,
seconds, FLOP per second. Case matters for B (byte) against b (bit) and for M (mega) against m
(milli). A bare number is already in the base unit.
"""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

#: Decimal and binary prefixes of the SI brochure and IEC 80000-13.
PREFIXES = {
    "": Fraction(1),
    **{p: Fraction(1, 10**e) for p, e in (("n", 9), ("u", 6), ("µ", 6), ("μ", 6), ("m", 3))},
    **{
        p: Fraction(10**e)
        for p, e in (("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15))
    },
    **{p: Fraction(2**e) for p, e in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40))},
}

#: dimension -> unit symbol -> how many base units it is.
SYMBOLS = {
    "bytes": {"B": Fraction(1)},
    "bytes/s": {
        **dict.fromkeys(("B/s", "Bps"), Fraction(1)),
        **dict.fromkeys(("b/s", "bps", "bit/s"), Fraction(1, 8)),
    },
    "seconds": {"s": Fraction(1)},
    "FLOP/s": dict.fromkeys(("FLOP/s", "FLOPS", "FLOPs/s"), Fraction(1)),
}

EXAMPLES = {
    "bytes": '"80 GiB", "25 MB", "512 B"',
    "bytes/s": '"450 GB/s", "400 Gb/s", "1.6 Tb/s"',
    "seconds": '"5 us", "12.5 ms", "2 s"',
    "FLOP/s": '"989 TFLOP/s", "312 TFLOPS", "1.5 PFLOP/s"',
}

#: Quantities beyond this (in base units), or below its inverse, are slips; sums of them overflow.
LARGEST = 1e30

_QUANTITY = re.compile(
    r"\s*([+-]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*"
)


def parse(value: object, dimension: str) -> float:
    """Return ``value`` in the base unit of ``dimension`` (a key of :data:`SYMBOLS`).

    ``value`` is a number in base units or a string with a unit. Raises ``ValueError`` that shows
    three valid examples when the unit is unknown, of another dimension, or the number not finite.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _finite(value, value, dimension)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{shown(value)} is not a quantity in {dimension}; {_hint(dimension)}")
    digits, unit = match.groups()
    scale = _scale(value, unit, dimension) if unit else 1
    # The float first: the Fraction of "1e-999999999" would fill the memory.
    if not _finite(float(digits), value, dimension):
        return 0.0
    # Fractions, so that "5 us" is exactly the float 5e-6.
    return _finite(float(Fraction(digits) * scale), value, dimension)


def _scale(value: object, unit: str, dimension: str) -> Fraction:
    found = _lookup(unit, SYMBOLS[dimension])
    if found is not None:
        return found
    for other, symbols in SYMBOLS.items():
        if _lookup(unit, symbols) is not None:
            raise ValueError(f"{shown(value)} is in {other}, not {dimension}; {_hint(dimension)}")
    raise ValueError(f"{shown(value)} has an unknown unit {shown(unit)}; {_hint(dimension)}")


def _lookup(unit: str, symbols: dict[str, Fraction]) -> Fraction | None:
    for symbol, factor in symbols.items():
        if unit.endswith(symbol) and unit[: -len(symbol)] in PREFIXES:
            return PREFIXES[unit[: -len(symbol)]] * factor
    return None


def _finite(number: float, value: object, dimension: str) -> float:
    size = abs(number)
    if not size < math.inf:
        raise ValueError(f"{shown(value)} is not a finite number; {_hint(dimension)}")
    if size and not 1 / LARGEST <= size <= LARGEST:
        raise ValueError(f"{shown(value)} is out of range; {_hint(dimension)}")
    return number


def shown(value: object) -> str:
    """``value`` much as TOML writes it, for messages: ``true``, ``"2 s"``; cut if long."""
    if isinstance(value, dict):
        pairs = (f"{_shown_key(key)} = {shown(inner)}" for key, inner in value.items())
        text = "{ " + ", ".join(pairs) + " }"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, float):
        text = repr(value)
    elif isinstance(value, int) and value.bit_length() > 1000:
        text = "a huge integer"  # Python refuses to write thousands of digits
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _shown_key(key: object) -> str:
    text = str(key)
    return text if text.replace("-", "_").isidentifier() else shown(text)


def _hint(dimension: str) -> str:
    return f"write for example {EXAMPLES[dimension]}"


def _quantity(dimension: str, value: object, *, zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise PydanticCustomError("quantity_type", f"a quantity such as {EXAMPLES[dimension]}")
    number = parse(value, dimension)
    if number < 0 or (number == 0 and not zero):
        least = "zero or more" if zero else "more than zero"
        raise ValueError(f"{shown(value)} is not allowed; it must be {least}")
    return round(number) if dimension == "bytes" else number


def _field(dimension: str, *, zero: bool = False) -> BeforeValidator:
    return BeforeValidator(partial(_quantity, dimension, zero=zero))


# Field types of the scenario schema. Those named ...OrZero accept 0; none accepts less.
Bytes = Annotated[int, _field("bytes")]
BytesOrZero = Annotated[int, _field("bytes", zero=True)]
BytesPerSecond = Annotated[float, _field("bytes/s")]
Seconds = Annotated[float, _field("seconds")]
SecondsOrZero = Annotated[float, _field("seconds", zero=True)]
FlopPerSecond = Annotated[float, _field("FLOP/s")]


def dimension_of(field: Any) -> str | None:
    """Dimension of a quantity, from its type or its pydantic field; None for anything else."""
    for validator in getattr(field, "__metadata__", getattr(field, "metadata", ())):
        made = getattr(validator, "func", None)
        if isinstance(made, partial) and made.func is _quantity:
            return str(made.args[0])
    inner = (field.annotation,) if hasattr(field, "annotation") else get_args(field)
    return next(filter(None, map(dimension_of, inner)), None)


def _label(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{shown(text)} holds characters that cannot be printed")
    return text


#: Text that is shown to people: it must not control their terminal.
Label = Annotated[str, AfterValidator(_label)]

# Plain numbers. Strict: true is not 1, and "8" in quotes is not 8.
Count = Annotated[int, Field(ge=1, le=10**15, strict=True)]
Few = Annotated[int, Field(ge=1, le=10_000, strict=True)]  # of what the simulator repeats
CountOrZero = Annotated[int, Field(ge=0, le=10**15, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]


def show_seconds(seconds: float) -> str:
    """A duration with the unit that keeps one to three digits before the point: ``12.3 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if seconds else "0 s"


def show_bytes(nbytes: float) -> str:
    """A memory size in binary units, as torch prints it: ``1.50 GiB``."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def show_quantity(value: float, dimension: str) -> str:
    """A value in the base unit of ``dimension`` with the unit that keeps it short: ``50 GB/s``."""
    if dimension in ("bytes", "seconds"):
        return show_bytes(value) if dimension == "bytes" else show_seconds(value)
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{_symbol(dimension)}"
    return f"{value:.4g} {_symbol(dimension)}"


def _symbol(dimension: str) -> str:
    return next(iter(SYMBOLS[dimension]))
