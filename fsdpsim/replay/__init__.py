"""Replay a real memory snapshot: check the allocator against it, and try other settings.

    result = replay("snapshot.pickle", {"expandable_segments": True})
    result.to_dict()    # for --json
    result.rows()       # for a table

``fsdpsim replay`` is a thin shell around this.
"""

from __future__ import annotations

from fsdpsim.replay.recording import SnapshotError, parse_snapshot
from fsdpsim.replay.result import COLUMNS, DeviceReplay, ReplayResult, replay

__all__ = [
    "COLUMNS",
    "DeviceReplay",
    "ReplayResult",
    "SnapshotError",
    "parse_snapshot",
    "replay",
]
