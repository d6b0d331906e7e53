"""Writing output files so that none is ever half-written."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class OutputError(Exception):
    """A file that cannot be written; the message names it."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, or leave what was there. Raises :class:`OutputError`."""
    write_with(path, lambda temporary: _write(temporary, data))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, or leave what was there. Raises :class:`OutputError`."""
    write_bytes(path, text.encode("utf-8"))


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there in one step.

    Missing directories on the way are made; where ``path`` is a link, the file that it leads to is
    written. The temporary file has the suffix of ``path`` and is removed whatever happens, Ctrl-C
    included.
    """
    if not path.parent.exists():
        make_directory(path.parent)
    try:
        target = _target(path)
        handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=".", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents. Raises :class:`OutputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be made a directory: {error.strerror}") from None


def _target(path: Path) -> Path:
    """The file that ``path`` names, through links. Raises :class:`OutputError` for a device."""
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OutputError(f"{path}: cannot be written: it is a device or pipe, not a file")
    return Path(os.path.realpath(path))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
