"""Small expressions over scenario keys, for ``where`` in ``[sweep]``.

``fsdp.sharding_factor <= hardware.nodes * hardware.gpus_per_node`` is read with Python's own
grammar and evaluated here over a short list of allowed nodes: arithmetic, comparisons, ``and``,
``or``, ``not``, ``in``, ``min`` and ``max``. Nothing else can be written, so a scenario file cannot
run code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdpsim.units import SYMBOLS, parse

#: Longer ones are refused before Python's parser sees them.
MAX_LENGTH = 1000

Lookup = Callable[[str], Any]

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISON: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A checked expression; calling it with a look-up of keys gives its value."""

    text: str
    names: tuple[str, ...]
    """Dotted keys that it reads."""
    body: ast.expr

    def __call__(self, lookup: Lookup) -> Any:
        """The value, with ``lookup(name)`` for each key. Raises ``ValueError``."""
        try:
            return _value(self.body, lookup)
        except (TypeError, ArithmeticError) as error:
            raise ValueError(f"{self.text!r}: {error}") from None


def parse_expression(text: str) -> Expression:
    """Read ``text``. Raises ``ValueError`` that names what is not allowed in it."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression of {len(text)} characters is too long ({MAX_LENGTH})")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        names = tuple(dict.fromkeys(_names(body)))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"{text!r} is not an expression; write for example "
            '"fsdp.sharding_factor <= hardware.gpus_per_node"'
        ) from None
    except _NotAllowedError as error:
        raise ValueError(
            f"{text!r}: {error} is not allowed; use keys, numbers, strings, + - * / // %, "
            "comparisons, and, or, not, in, min, max"
        ) from None
    return Expression(text=text, names=names, body=body)


class _NotAllowedError(Exception):
    """Names the part of an expression that is not on the list."""


def _names(node: ast.expr) -> Iterator[str]:
    """The keys that ``node`` reads; raises :class:`_NotAllowedError` for a node not listed."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            if name not in _WORDS:
                yield name
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            yield from _names_of(parts)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            yield from _names(part)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield from _names_of([left, right])
        case ast.Compare(left=left, ops=ops, comparators=rest) if _known(ops):
            yield from _names_of([left, *rest])
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            yield from _names_of(parts)
        case _:
            raise _NotAllowedError(ast.unparse(node))


def _names_of(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        yield from _names(node)


def _known(ops: list[ast.cmpop]) -> bool:
    return all(type(op) in _COMPARISON for op in ops)


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner)}.{name}"
    raise _NotAllowedError(ast.unparse(node))


def _value(node: ast.expr, lookup: Lookup) -> Any:
    match node:
        case ast.Constant(value=value):
            return _number(value)
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            return _WORDS[name] if name in _WORDS else _number(lookup(name))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, lookup) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, lookup) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _value(part, lookup)
        case ast.UnaryOp(operand=part):
            return -_value(part, lookup)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _value(left, lookup), _value(right, lookup))
        case ast.Compare():
            return _compare(node, lookup)
        case ast.Call(func=ast.Name(id=name), args=parts):
            return _FUNCTIONS[name](*(_value(part, lookup) for part in parts))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, lookup) for part in parts]
    raise AssertionError(f"{ast.unparse(node)} was let through by parse_expression")


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    for value in (left, right):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{value!r} is not a number")
    return _ARITHMETIC[type(op)](left, right)


def _compare(node: ast.Compare, lookup: Lookup) -> bool:
    left = _value(node.left, lookup)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _value(comparator, lookup)
        if not _COMPARISON[type(op)](left, right):
            return False
        left = right
    return True


def _number(value: Any) -> Any:
    """A quantity such as "40 GiB" as a number in SI base units; anything else as it is."""
    if not isinstance(value, str):
        return value
    for dimension in SYMBOLS:
        try:
            return parse(value, dimension)
        except ValueError:
            continue
    return value
