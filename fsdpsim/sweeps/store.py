"""The directory of a sweep: rows appended as they come, so that a killed sweep can go on.

``sweep.json`` says what was swept: fsdpsim's version and the resolved scenario. ``results.jsonl``
has a row per line in the order of the points, so whatever is there when a sweep is killed is the
beginning of what the whole sweep would have written. ``results.csv`` is made from it at the end.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from fsdpsim import __version__
from fsdpsim.files import OutputError, make_directory, write_text, write_with
from fsdpsim.sweeps.grid import Grid
from fsdpsim.sweeps.row import Row, flatten

MANIFEST, ROWS, TABLE, LOCK = "sweep.json", "results.jsonl", "results.csv", ".lock"


class OtherSweepError(OutputError):
    """The directory holds the results of another scenario, or of another version."""


class Store:
    """The results of one sweep in ``directory``. A context manager: the file stays open inside."""

    def __init__(self, directory: Path, grid: Grid, *, restart: bool = False) -> None:
        self.directory = directory
        self.manifest = manifest(grid)
        self.restart = restart
        self.next_index = 0
        """Index of the first point that is not stored yet."""
        self._file: BinaryIO | None = None
        self._lock: BinaryIO | None = None

    @property
    def rows_path(self) -> Path:
        """The rows, one JSON object a line."""
        return self.directory / ROWS

    def __enter__(self) -> Self:
        """Open for appending. Raises :class:`OtherSweepError` and :class:`OutputError`."""
        make_directory(self.directory)
        try:
            self._lock = _locked(self.directory)
            self._file = self._open()
        except OSError as error:
            self._close()
            raise OutputError(f"{self.rows_path}: cannot be written: {error.strerror}") from None
        except OutputError:
            self._close()
            raise
        return self

    def _open(self) -> BinaryIO:
        if not self.restart:
            self._check_manifest()
        file = self.rows_path.open("a+b")
        if self.restart:
            file.truncate(0)
        write_text(self.directory / MANIFEST, json.dumps(self.manifest, indent=2) + "\n")
        self.next_index = _complete_rows(file)
        return file

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()

    def append(self, line: str) -> None:
        """Add one row; it is in the file when this returns. Raises :class:`OutputError`."""
        assert self._file is not None
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.rows_path}: cannot be written: {error.strerror}") from None

    def read_rows(self) -> Iterator[Row]:
        """All stored rows, in the order of the points."""
        with self.rows_path.open(encoding="utf-8") as file:
            for line in file:
                yield Row.of_json(line)

    def write_csv(self) -> Path:
        """Write ``results.csv``: a column for every setting and every figure of any row."""
        columns = list(dict.fromkeys(name for row in self.read_rows() for name in row.flat()))
        path = self.directory / TABLE
        write_with(path, lambda temporary: _write_csv(temporary, columns, self.read_rows()))
        return path

    def _check_manifest(self) -> None:
        path = self.directory / MANIFEST
        if not path.exists():
            if self.rows_path.exists():
                raise OtherSweepError(self._refusal(f"{ROWS} without {MANIFEST}"))
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if not isinstance(known, dict):
            raise OtherSweepError(self._refusal(f"an unreadable {MANIFEST}"))
        if known.get("digest") != self.manifest["digest"]:
            raise OtherSweepError(self._refusal(_difference(known, self.manifest)))

    def _refusal(self, what: str) -> str:
        return (
            f"{self.directory} holds {what}; take another directory, or --restart to discard what "
            "is there"
        )


def manifest(grid: Grid) -> dict[str, Any]:
    """What identifies a sweep: two with the same digest have the same results."""
    scenario = grid.scenario
    facts = {
        "fsdpsim": __version__,
        "scenario": scenario.name,
        "resolved": scenario.model_dump(mode="json", exclude_none=True, exclude={"title"}),
        "axes": [{"keys": axis.keys, "rows": axis.rows} for axis in grid.axes],
        "model_files": dict(_model_files(grid)),
    }
    text = json.dumps(facts, default=str)
    return {"digest": hashlib.sha256(text.encode()).hexdigest(), **json.loads(text)}


def _model_files(grid: Grid) -> Iterator[tuple[str, str]]:
    """Digests of the config files that points will read."""
    for axis in grid.axes:
        for index, key in enumerate(axis.keys):
            if key == "model.hf_config":
                for row in axis.rows:
                    path = grid.scenario.base / str(row[index])
                    if path.is_file():
                        yield str(row[index]), hashlib.sha256(path.read_bytes()).hexdigest()


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    before, after = dict(flatten(old)), dict(flatten(new))
    names = [n for n in {**before, **after} if before.get(n) != after.get(n) and n != "digest"]
    shown = [f"{_plain(n)}: {before.get(n)} then, {after.get(n)} now" for n in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"another sweep ({'; '.join(shown)}{more})"


def _plain(name: str) -> str:
    return name.removeprefix("resolved.")


def _complete_rows(file: BinaryIO) -> int:
    """Cut off a last line that was torn; return the index after that of the last whole row."""
    file.seek(0)
    end = next_index = 0
    for line in file:
        if not line.endswith(b"\n"):
            break  # also a whole row: the next one would be put on its line
        try:
            next_index = Row.of_json(line.decode()).point + 1
        except ValueError:
            break
        end += len(line)
    file.truncate(end)
    return next_index


def _locked(directory: Path) -> BinaryIO | None:
    """A lock that ends with this process: two sweeps that append to one file would spoil it.

    Of POSIX's kind, which workers do not inherit, and on a file of its own, since such a lock ends
    as soon as its file is closed anywhere in the process.
    """
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        return None
    file = (directory / LOCK).open("wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OutputError(f"{directory}: another sweep is writing there now") from None
    return file


def _write_csv(path: Path, columns: list[str], rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            flat = row.flat()
            writer.writerow([_cell(flat.get(column)) for column in columns])


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)
