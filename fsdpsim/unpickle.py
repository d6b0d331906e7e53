"""Read pickles of plain data: dict, list, tuple, set, str, int, float, bool and None.

A pickle is a program for a stack machine. This one has only the instructions that build plain
data, works within limits and never looks up a name, so a file from a stranger can be opened.
Source of the instruction set: ``Lib/pickletools.py`` of CPython (protocols 0 to 5).
"""

from __future__ import annotations

import gzip
import pickletools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

#: Bytes of a file after decompression.
MAX_BYTES = 1 << 30
#: Instructions; each builds at most one object.
MAX_INSTRUCTIONS = 100_000_000
#: Containers inside containers; torch's snapshots have fewer than 10.
MAX_DEPTH = 64
#: Bytes of one integer.
MAX_INT_BYTES = 64

_CHUNK = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SCALARS = (str, int, float, bool, type(None))
_NAMES = {opcode.code.encode("latin-1")[0]: opcode.name for opcode in pickletools.opcodes}


class PickleFileError(ValueError):
    """The file is not a pickle of plain data, or it exceeds a limit."""


def read_pickle(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the plain data in a pickle file, compressed with gzip or not (seen by content).

    Raises :class:`PickleFileError` with one line that names the file, for a file that cannot be
    read, is truncated or malformed, refers to a class or function (which it names), or holds more
    than ``max_bytes`` bytes after decompression, or too many, too deep or too large values.
    """
    try:
        return load_plain(_read_bytes(Path(path), max_bytes))
    except PickleFileError as error:
        raise PickleFileError(f"{path}: {error}") from None


def load_plain(data: bytes) -> Any:
    """Return the plain data in a pickle; raises :class:`PickleFileError`."""
    value = _Machine(data).run()
    _check_depth(value)
    return value


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not compressed:
                return b"".join(_chunks(raw, max_bytes))
            with gzip.GzipFile(fileobj=raw) as stream:
                return b"".join(_chunks(stream, max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PickleFileError(f"damaged gzip file ({error})") from None
    except OSError as error:
        raise PickleFileError(f"cannot be read ({error.strerror or error})") from None


def _chunks(stream: BinaryIO | gzip.GzipFile, max_bytes: int) -> Iterator[bytes]:
    total = 0
    while chunk := stream.read(_CHUNK):
        total += len(chunk)
        if total > max_bytes:
            raise PickleFileError(f"more than {max_bytes} bytes of pickle")
        yield chunk


def _check_depth(value: Any) -> None:
    """Walk the containers level by level; each is visited once, however often it is referred to."""
    level, seen = [value], {id(value)}
    for _ in range(MAX_DEPTH):
        children = []
        for container in level:
            for child in _contents(container):
                if isinstance(child, _CONTAINERS) and id(child) not in seen:
                    seen.add(id(child))
                    children.append(child)
        if not children:
            return
        level = children
    raise PickleFileError(f"containers nested more than {MAX_DEPTH} deep")


def _contents(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, _CONTAINERS) else ()


class _Machine:
    """The stack machine: a stack of values, a stack of marks, and a memo."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        handlers, data = _HANDLERS, self.data
        start = 0
        try:
            for _ in range(MAX_INSTRUCTIONS):
                start = self.position
                code = data[start]
                self.position = start + 1
                if code == _STOP:
                    return self.result()
                handlers[code](self)
        except PickleFileError as error:
            raise PickleFileError(f"{error} at byte {start}") from None
        except (IndexError, struct.error):
            if self.position >= len(data) or start >= len(data):
                raise PickleFileError("truncated pickle") from None
            raise PickleFileError(f"malformed pickle at byte {start}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise PickleFileError(f"malformed pickle at byte {start}") from None
        raise PickleFileError(f"more than {MAX_INSTRUCTIONS} instructions")

    def result(self) -> Any:
        (value,) = self.stack
        if self.marks:
            raise PickleFileError("malformed pickle: an open mark")
        return value

    # ---------------------------------------------------------------- arguments

    def take(self, count: int) -> bytes:
        start = self.position
        end = self.position = start + count
        if end > len(self.data):
            raise PickleFileError("truncated pickle")
        return self.data[start:end]

    def line_bytes(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise PickleFileError("truncated pickle")
        text = self.data[self.position : end]
        self.position = end + 1
        return text

    def line(self) -> str:
        return self.line_bytes().decode("ascii")

    def number(self, layout: struct.Struct) -> Any:
        position = self.position
        self.position = position + layout.size
        return layout.unpack_from(self.data, position)[0]

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])


_Handler = Callable[[_Machine], None]

_STOP = ord(".")


def _constant(value: object) -> _Handler:
    return lambda machine: machine.stack.append(value)


def _new(kind: Callable[[], object]) -> _Handler:
    return lambda machine: machine.stack.append(kind())


def _binary(layout: str) -> _Handler:
    number = struct.Struct(layout)
    return lambda machine: machine.stack.append(machine.number(number))


def _text(layout: str) -> _Handler:
    length = struct.Struct(layout)
    return lambda machine: machine.stack.append(
        machine.take(machine.number(length)).decode("utf-8", "surrogatepass")
    )


def _text_line(machine: _Machine) -> None:
    machine.stack.append(machine.line_bytes().decode("raw-unicode-escape"))


def _quoted_line(machine: _Machine) -> None:
    text = machine.line()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"" or "\\" in text:
        raise PickleFileError("escaped text of protocol 0 is not supported")
    machine.stack.append(text[1:-1])


def _long(layout: str) -> _Handler:
    length = struct.Struct(layout)

    def handler(machine: _Machine) -> None:
        count = machine.number(length)
        if not 0 <= count <= MAX_INT_BYTES:
            raise PickleFileError(f"an integer of {count} bytes")
        machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))

    return handler


def _int_line(machine: _Machine) -> None:
    text = machine.line().removesuffix("L")
    if len(text) > 2 * MAX_INT_BYTES:
        raise PickleFileError(f"an integer of {len(text)} digits")
    machine.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _last(machine.stack, list).append(value)


def _appends(machine: _Machine) -> None:
    items = machine.pop_mark()
    _last(machine.stack, list).extend(items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(_last(machine.stack, dict), [key, value])


def _set_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    _update(_last(machine.stack, dict), items)


def _add_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    _last(machine.stack, set).update(map(_hashable, items))


def _last(stack: list[Any], kind: type) -> Any:
    if not isinstance(stack[-1], kind):
        raise PickleFileError(
            f"malformed pickle: {type(stack[-1]).__name__} used as {kind.__name__}"
        )
    return stack[-1]


def _update(mapping: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleFileError("malformed pickle: a key without a value")
    keys = items[::2]
    for key in keys:
        if type(key) is not str:
            _hashable(key)
    mapping.update(zip(keys, items[1::2], strict=True))


def _hashable(key: Any) -> Any:
    """Allow scalars and flat tuples: hashing a deep tuple overflows the interpreter's stack."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, _SCALARS) for part in parts):
        raise PickleFileError("a key that is neither a scalar nor a flat tuple")
    return key


def _from_mark(build: Callable[[list[Any]], Any]) -> _Handler:
    def handler(machine: _Machine) -> None:
        items = machine.pop_mark()
        machine.stack.append(build(items))

    return handler


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    _update(mapping, items)
    return mapping


def _tuple(count: int) -> _Handler:
    def handler(machine: _Machine) -> None:
        items = machine.stack[-count:]
        if len(items) < count:
            raise IndexError
        machine.stack[-count:] = [tuple(items)]

    return handler


def _mark(machine: _Machine) -> None:
    if len(machine.marks) > 2 * MAX_DEPTH:
        raise PickleFileError(f"containers nested more than {MAX_DEPTH} deep")
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _pop_mark(machine: _Machine) -> None:
    machine.pop_mark()


def _dup(machine: _Machine) -> None:
    machine.stack.append(machine.stack[-1])


def _get(layout: str) -> _Handler:
    index = struct.Struct(layout)
    return lambda machine: machine.recall(machine.number(index))


def _put(layout: str) -> _Handler:
    index = struct.Struct(layout)

    def handler(machine: _Machine) -> None:
        machine.memo[machine.number(index)] = machine.stack[-1]

    return handler


def _get_line(machine: _Machine) -> None:
    machine.recall(int(machine.line()))


def _put_line(machine: _Machine) -> None:
    machine.memo[int(machine.line())] = machine.stack[-1]


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _proto(machine: _Machine) -> None:
    version = machine.take(1)[0]
    if version > 5:
        raise PickleFileError(f"pickle protocol {version} is not known")


def _frame(machine: _Machine) -> None:
    machine.take(8)


def _refuse_global(machine: _Machine) -> None:
    raise PickleFileError(f"refers to {machine.line()}.{machine.line()}; only plain data is read")


def _refuse_stack_global(machine: _Machine) -> None:
    module, name = machine.stack[-2:]
    raise PickleFileError(f"refers to {module}.{name}; only plain data is read")


def _refuse_other(machine: _Machine) -> None:
    code = machine.data[machine.position - 1]
    name = _NAMES.get(code)
    if name is None:
        raise PickleFileError(f"not a pickle: unknown instruction {code:#04x}")
    raise PickleFileError(f"holds {name}; only plain data is read")


_BY_NAME: dict[str, _Handler] = {
    "PROTO": _proto,
    "FRAME": _frame,
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _dup,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "INT": _int_line,
    "LONG": _int_line,
    "BININT": _binary("<i"),
    "BININT1": _binary("<B"),
    "BININT2": _binary("<H"),
    "LONG1": _long("<B"),
    "LONG4": _long("<i"),
    "FLOAT": lambda machine: machine.stack.append(float(machine.line())),
    "BINFLOAT": _binary(">d"),
    "STRING": _quoted_line,
    "BINSTRING": _text("<I"),
    "SHORT_BINSTRING": _text("<B"),
    "UNICODE": _text_line,
    "SHORT_BINUNICODE": _text("<B"),
    "BINUNICODE": _text("<I"),
    "BINUNICODE8": _text("<Q"),
    "EMPTY_LIST": _new(list),
    "APPEND": _append,
    "APPENDS": _appends,
    "LIST": _from_mark(list),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": _from_mark(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "EMPTY_DICT": _new(dict),
    "DICT": _from_mark(_dict_of),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "EMPTY_SET": _new(set),
    "ADDITEMS": _add_items,
    "FROZENSET": _from_mark(lambda items: frozenset(map(_hashable, items))),
    "GET": _get_line,
    "BINGET": _get("<B"),
    "LONG_BINGET": _get("<I"),
    "PUT": _put_line,
    "BINPUT": _put("<B"),
    "LONG_BINPUT": _put("<I"),
    "MEMOIZE": _memoize,
    "GLOBAL": _refuse_global,
    "INST": _refuse_global,
    "STACK_GLOBAL": _refuse_stack_global,
}

#: Handler by instruction byte; whatever is not plain data is refused by name.
_HANDLERS = [_BY_NAME.get(_NAMES.get(code, ""), _refuse_other) for code in range(256)]
