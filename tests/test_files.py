"""Output files are written whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fsdpsim.files import OutputError, make_directory, write_bytes, write_text, write_with


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_utf8_and_lines_end_as_given(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "α\r\nβ\n")
    assert (tmp_path / "a.txt").read_bytes() == "α\r\nβ\n".encode()


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert names_in(tmp_path) == ["a.bin"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_what_interrupts_the_writing_leaves_the_old_file(
    tmp_path: Path, fault: type[BaseException]
) -> None:
    path = tmp_path / "chart.png"
    path.write_bytes(b"old")

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        raise fault

    with pytest.raises(fault):
        write_with(path, write)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["chart.png"]


def test_the_temporary_file_has_the_suffix_that_decides_the_format(tmp_path: Path) -> None:
    seen = []
    write_with(tmp_path / "chart.svg", lambda temporary: seen.append(temporary.suffix))
    assert seen == [".svg"]


def test_folders_that_do_not_exist_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "inner" / "a.txt", "text")
    assert (tmp_path / "new" / "inner" / "a.txt").read_text() == "text"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match=r"file.new: cannot be made a directory: Not a directory"):
        write_text(tmp_path / "file" / "new" / "a.txt", "")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    if exists:
        target.write_text("old")
    link.symlink_to(Path("elsewhere") / "real.txt")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names_in(tmp_path) == ["elsewhere", "link.txt"]
    assert names_in(target.parent) == ["real.txt"]


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, linked: bool) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with pytest.raises(OutputError, match="cannot be written: it is a device or pipe, not a file"):
        write_text(link if linked else pipe, "")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names_in(tmp_path) == ["link", "pipe"]


def test_a_path_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="folder: cannot be written: "):
        write_text(tmp_path / "folder", "")
    assert names_in(tmp_path) == ["folder"]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    def write(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"a\.txt: cannot be written: No space left on device"):
        write_with(tmp_path / "a.txt", write)
    assert names_in(tmp_path) == []


def test_directories_are_made_with_their_parents(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: cannot be made a directory: File exists"):
        make_directory(tmp_path / "file")
    with pytest.raises(OutputError, match="cannot be made a directory: Not a directory"):
        make_directory(tmp_path / "file" / "inner")
