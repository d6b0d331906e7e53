"""Quantities: what people write, and the message they get for what they should not have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from fsdpsim.units import (
    PREFIXES,
    SYMBOLS,
    Bytes,
    BytesOrZero,
    Seconds,
    SecondsOrZero,
    parse,
    show_bytes,
    show_seconds,
    shown,
)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("25MB", "bytes", 25_000_000),
        ("512 B", "bytes", 512),
        ("1_024 KiB", "bytes", 2**20),
        ("450 GB/s", "bytes/s", 450e9),
        ("400 Gb/s", "bytes/s", 50e9),
        ("400 Gbit/s", "bytes/s", 50e9),
        ("3.2 Tbps", "bytes/s", 400e9),
        ("5 us", "seconds", 5e-6),
        ("5 µs", "seconds", 5e-6),
        ("5 μs", "seconds", 5e-6),
        ("12.5 ms", "seconds", 0.0125),
        ("2 s", "seconds", 2.0),
        ("  2   s ", "seconds", 2.0),
        ("1e-3 s", "seconds", 1e-3),
        (".5 s", "seconds", 0.5),
        ("989.5 TFLOP/s", "FLOP/s", 989.5e12),
        ("1.5 PFLOPS", "FLOP/s", 1.5e15),
        ("7", "seconds", 7.0),
        (7, "bytes", 7),
        (0.1, "seconds", 0.1),
    ],
)
def test_quantities(text: object, dimension: str, value: float) -> None:
    """Exactly the float that the decimal and its unit mean."""
    assert parse(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("2 GB", "seconds", '"2 GB" is in bytes, not seconds; write for example "5 us"'),
        ("400 Gb", "bytes/s", '"400 Gb" has an unknown unit "Gb"; write for example "450 GB/s"'),
        ("400 GB", "bytes/s", '"400 GB" is in bytes, not bytes/s'),
        ("450 GB/s", "bytes", "is in bytes/s, not bytes"),
        ("80 GIB", "bytes", 'unknown unit "GIB"'),
        ("5 sec", "seconds", 'unknown unit "sec"'),
        ("five s", "seconds", "is not a quantity in seconds"),
        ("", "seconds", '"" is not a quantity in seconds'),
        ("1__0 s", "seconds", "is not a quantity"),
        ("٣ s", "seconds", "is not a quantity"),
        ("0x10 s", "seconds", "is not a quantity"),
        (True, "seconds", "true is not a quantity"),
        (None, "seconds", "null is not a quantity"),
        ([1], "seconds", r"\[1\] is not a quantity"),
        (math.nan, "seconds", "nan is not a finite number"),
        (math.inf, "bytes", "inf is not a finite number"),
        ("1e999 s", "seconds", "is not a finite number"),
        (10**400, "bytes", "is out of range"),
        ("1e40 s", "seconds", "is out of range"),
        ("1e-40 s", "seconds", "is out of range"),
        ("1" * 5000 + " s", "seconds", r"\.\.\. is not a finite number"),
    ],
)
def test_messages(text: object, dimension: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text, dimension)


def test_an_integer_that_python_refuses_to_write() -> None:
    with pytest.raises(ValueError, match="a huge integer is out of range"):
        parse(1 << 20_000, "bytes")


def test_absurd_exponents_take_no_time() -> None:
    """As a fraction this would have a billion digits."""
    assert parse("1e-999999999 s", "seconds") == 0.0


@given(
    st.sampled_from([(d, s) for d, symbols in SYMBOLS.items() for s in symbols]),
    st.sampled_from(sorted(PREFIXES)),
    st.integers(1, 10**6),
)
def test_every_prefix_of_every_symbol(unit: tuple[str, str], prefix: str, number: int) -> None:
    dimension, symbol = unit
    value = number * PREFIXES[prefix] * SYMBOLS[dimension][symbol]
    assert parse(f"{number} {prefix}{symbol}", dimension) == float(value)


@given(st.text(max_size=12), st.sampled_from(sorted(SYMBOLS)))
def test_any_text_is_a_finite_number_or_a_value_error(text: str, dimension: str) -> None:
    try:
        assert math.isfinite(parse(text, dimension))
    except ValueError as error:
        assert "write for example" in str(error)


@given(st.floats(1e-12, 1e6))
def test_shown_durations_read_back_to_four_digits(seconds: float) -> None:
    assert parse(show_seconds(seconds), "seconds") == pytest.approx(seconds, rel=1e-3)


@given(st.integers(0, 2**45))
def test_shown_sizes_read_back(nbytes: int) -> None:
    assert parse(show_bytes(nbytes), "bytes") == pytest.approx(nbytes, rel=0.005)


def test_shown_quantities() -> None:
    assert show_seconds(0.0) == "0 s"
    assert show_seconds(2.526) == "2.526 s"
    assert show_seconds(0.0125) == "12.5 ms"
    assert show_seconds(13e-6) == "13 us"
    assert show_seconds(2e-9) == "2 ns"
    assert show_bytes(0) == "0 B"
    assert show_bytes(1536) == "1.50 KiB"
    assert show_bytes(3 * 2**30) == "3.00 GiB"


def test_values_are_shown_as_toml_writes_them() -> None:
    assert shown(True) == "true"
    assert shown("2 s") == '"2 s"'
    assert shown({"every": 2}) == "{ every = 2 }"
    assert shown({"a\n": {}}) == '{ "a\\n" = {  } }'
    assert shown([1, "a", 0.5]) == '[1, "a", 0.5]'
    assert len(shown("x" * 100)) == 60


class Fields(BaseModel):
    seconds: Seconds = 1.0
    seconds_or_zero: SecondsOrZero = 1.0
    nbytes: Bytes = 1
    nbytes_or_zero: BytesOrZero = 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seconds", "0 s", "must be more than zero"),
        ("seconds", "-1 s", "must be more than zero"),
        ("seconds_or_zero", "-1 s", "must be zero or more"),
        ("nbytes", 0, "must be more than zero"),
        ("nbytes", True, "a quantity such as"),
        ("nbytes", {"GiB": 1}, "a quantity such as"),
    ],
)
def test_fields_refuse(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Fields.model_validate({field: value})


def test_fields_accept_zero_where_they_say_so_and_bytes_are_whole() -> None:
    fields = Fields.model_validate(
        {"seconds_or_zero": "0 s", "nbytes_or_zero": 0, "nbytes": "1.5 B"}
    )
    assert (fields.seconds_or_zero, fields.nbytes_or_zero, fields.nbytes) == (0.0, 0, 2)
    assert isinstance(fields.nbytes, int)
