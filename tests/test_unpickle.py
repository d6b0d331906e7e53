"""The reader of plain pickles: equal to pickle.load on plain data, one clear error on the rest."""

from __future__ import annotations

import collections
import enum
import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpsim.unpickle import MAX_DEPTH, PickleFileError, load_plain, read_pickle

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | st.text()
)
KEYS = SCALARS | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)
PLAIN_OLD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50)
@given(PLAIN, st.sampled_from([4, 5]))
def test_reads_what_pickle_wrote(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


@settings(max_examples=50)
@given(PLAIN_OLD, st.sampled_from([0, 1, 2, 3]))
def test_reads_old_protocols(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


@settings(max_examples=50)
@given(PLAIN, st.data())
def test_every_truncation_is_reported(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, 4)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PickleFileError, match=r"truncated|malformed"):
        load_plain(whole[:cut])


@given(st.binary(max_size=200))
def test_garbage_gives_one_error(data: bytes) -> None:
    try:
        load_plain(b"\x80\x04" + data)
    except PickleFileError as error:
        assert "\n" not in str(error)


def test_shared_values_stay_shared() -> None:
    inner: list[int] = [1]
    first, second = load_plain(pickle.dumps([inner, inner], 4))
    assert first is second


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (Colour.RED, "test_unpickle.Colour"),
        (struct.Struct, "struct.Struct"),
        (print, "builtins.print"),
    ],
)
def test_names_what_it_refuses(value: Any, name: str, protocol: int) -> None:
    shown = name.replace("builtins", "__builtin__") if protocol < 3 else name
    shown = shown.replace("struct", "_struct")
    with pytest.raises(PickleFileError, match=shown.replace("test_unpickle", ".*test_unpickle")):
        load_plain(pickle.dumps([value], protocol))


def test_a_call_is_refused_before_it_runs(tmp_path: Path) -> None:
    target = tmp_path / "made"
    program = b"cos\nmkdir\n(V" + str(target).encode() + b"\ntR."
    with pytest.raises(PickleFileError, match=r"os\.mkdir"):
        load_plain(program)
    assert not target.exists()


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc")])
def test_bytes_are_not_plain_data(data: Any) -> None:
    with pytest.raises(PickleFileError, match=r"BYTES|BYTEARRAY"):
        load_plain(pickle.dumps(data, 5))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"", "truncated"),
        (b"hello", "malformed"),
        (b"\xff\xd8\xff", "not a pickle"),
        (b'{"segments": []}', "malformed|not a pickle|truncated"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x04Q.", "BINPERSID"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x04]K\x01s.", "malformed"),
        (b"\x80\x04N(u.", "NoneType used as dict"),
        (b"\x80\x04h\x05.", "malformed"),
        (b"\x80\x04(((t.", "truncated|malformed"),
    ],
)
def test_malformed(program: bytes, message: str) -> None:
    with pytest.raises(PickleFileError, match=message):
        load_plain(program)


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x04" + b"(" * 5000 + b"t" * 5000 + b".",
        b"\x80\x04)" + b"\x85" * 5000 + b".",
    ],
    ids=["lists", "marks", "tuples"],
)
def test_deep_nesting_is_refused(program: bytes) -> None:
    with pytest.raises(PickleFileError, match=f"more than {MAX_DEPTH} deep"):
        load_plain(program)


def test_a_deep_key_is_never_hashed() -> None:
    program = b"\x80\x04})" + b"\x85" * 100_000 + b"Ns."
    with pytest.raises(PickleFileError, match="flat tuple"):
        load_plain(program)


def test_a_huge_memo_index_costs_nothing() -> None:
    assert load_plain(b"\x80\x04Nr\xff\xff\xff\xff.") is None


def test_a_huge_length_costs_nothing() -> None:
    with pytest.raises(PickleFileError, match="truncated"):
        load_plain(b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.")


def test_a_huge_integer_is_refused() -> None:
    with pytest.raises(PickleFileError, match="integer of 100000 bytes"):
        load_plain(b"\x80\x04\x8b" + struct.pack("<i", 100_000) + b"\x01" * 100_000 + b".")


def test_many_references_are_walked_once() -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value] * 10
    assert len(load_plain(pickle.dumps(value, 4))) == 10


def test_gzip_is_seen_by_content(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.pickle.gz", tmp_path / "b.pickle"
    plain.write_bytes(pickle.dumps({"a": 1}))
    packed.write_bytes(gzip.compress(pickle.dumps({"a": 1})))
    assert read_pickle(plain) == read_pickle(packed) == {"a": 1}


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pickle"
    bomb.write_bytes(gzip.compress(b"\x80\x04" + b"N0" * 2_000_000 + b"N.", mtime=0))
    with pytest.raises(PickleFileError, match="more than 1000000 bytes"):
        read_pickle(bomb, max_bytes=1_000_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(pickle.dumps(list(range(1000))), mtime=0)[:50], "damaged gzip"),
        (b"\x1f\x8b garbage", "damaged gzip"),
        (b"", "truncated"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(PickleFileError, match=rf"snapshot\.pickle: .*{message}"):
        read_pickle(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PickleFileError, match=r"none\.pickle: cannot be read"):
        read_pickle(tmp_path / "none.pickle")
