"""What is wrong with a key of a table, in words for the person who wrote it.

Validators that look at several keys raise :class:`FaultsError`; the scenario's loader turns each
fault into a line that names file and key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fsdpsim.units import shown

#: Pydantic's name of a value of the wrong type -> what the right type is called.
TYPES = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}

#: Pydantic's name of a constraint -> what it asks for, filled from the fault's context.
CONSTRAINTS = {
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:,}",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length:,}",
    "finite_number": "a finite number",
}


class Fault(NamedTuple):
    """One fault: dotted key (relative to the table that raises; empty for the table) and text."""

    key: str
    text: str
    reads: tuple[str, ...] = ()
    """Other keys that it rests on: where one of these is at fault itself, this says nothing."""


class FaultsError(ValueError):
    """One or more faults of one table, reported together."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(f"{f.key}: {f.text}" if f.key else f.text for f in self.faults)


def expected(kind: str, context: Mapping[str, Any], message: str) -> str:
    """What pydantic's fault ``kind`` asks for: "a number", "at least 1", ``"full" or "none"``."""
    if kind in TYPES:
        return TYPES[kind]
    if kind in CONSTRAINTS:
        return CONSTRAINTS[kind].format(**context)
    if kind == "literal_error":
        choices = str(context["expected"])
        return choices.replace("'", '"').replace("True", "true").replace("False", "false")
    return message.removeprefix("Input should be ").removeprefix("Input ")


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint at the name among ``known`` that is nearest to ``word``; ``otherwise`` if none is."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def not_allowed(given: object, wanted: str) -> str:
    """The sentence that shows what was given and says what is ``wanted``."""
    return f"{shown(given)} is not allowed; it must be {wanted}"
