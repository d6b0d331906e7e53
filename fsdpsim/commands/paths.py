"""Where a command's output goes: to a file whose ending says what it is, never onto its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpsim.commands import common

if TYPE_CHECKING:
    from fsdpsim.scenario import Scenario


def output_file(output: Path | None, name: str, endings: Sequence[str], what: str) -> Path:
    """``output``; ``name`` in it if it is a directory, or here if it is None.

    Raises :class:`UsageError` for an ending that is not among ``endings``, those of ``what``.
    """
    if output is None:
        return Path(name)
    if output.is_dir():
        return output / name
    if not output.name.lower().endswith(tuple(endings)):
        shown = f"the ending {output.suffix!r}" if output.suffix else "no ending"
        raise common.UsageError(f"-o {output}: {shown}; {what} ends in {' or '.join(endings)}")
    return output


def spare_inputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Raise :class:`UsageError` if one of ``outputs`` would be written over one of ``inputs``."""
    read = tuple(inputs)
    for output in outputs:
        if any(_same_file(output, path) for path in read):
            raise common.UsageError(
                f"{output}: is read as input, and would be overwritten; give another path with -o"
            )


def files_of(scenarios: Iterable[Scenario]) -> Iterator[Path]:
    """The files that ``scenarios`` were read from: their own and their model's."""
    for scenario in scenarios:
        yield Path(scenario.source)
        config = scenario.tables.get("model", {}).get("hf_config")
        if config is not None:
            yield scenario.base / config


def _same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:  # one of them does not exist
        return False
