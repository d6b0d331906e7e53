"""What a torch memory snapshot records: the final segments, and the events that led to them.

Schema: ``torch/csrc/cuda/Module.cpp`` and ``torch/cuda/memory.py`` of pytorch 2.13; entries that
older versions leave out have defaults. Sizes and addresses are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpsim.allocator.settings import AllocatorSettings

#: Actions that a replay needs; all others are left out.
ACTIONS = frozenset(
    {
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
    }
)
#: Actions that give memory back to the driver, and that take it.
FLUSHES = frozenset({"segment_free", "segment_unmap"})
GROWTHS = frozenset({"segment_alloc", "segment_map"})

#: State of a block in a snapshot -> its state here.
BLOCK_STATES = {
    "active_allocated": "live",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "free",
}
_DEFAULT_POOL = (0, 0)


class SnapshotError(ValueError):
    """The file is not a memory snapshot, or its trace contradicts its segments."""


class Event(NamedTuple):
    """One entry of a device trace; for "oom", ``address`` is the free memory of the device."""

    action: str
    address: int
    size: int
    stream: int


class RecordedBlock(NamedTuple):
    """One block of a final segment; ``state`` is "live", "pending" or "free"."""

    address: int
    size: int
    requested_size: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSegment:
    """One final segment: a cudaMalloc, or a contiguous mapped run of an expandable range."""

    address: int
    size: int
    stream: int
    is_small: bool
    expandable: bool
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One device of a snapshot."""

    device: int
    settings: AllocatorSettings
    segments: tuple[RecordedSegment, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()


def parse_snapshot(snapshot: object) -> list[Recording]:
    """Check a snapshot that was unpickled; return a recording for each device with a trace."""
    if not isinstance(snapshot, Mapping) or "segments" not in snapshot:
        raise SnapshotError("not a torch memory snapshot: no 'segments'")
    traces = snapshot.get("device_traces")
    if not isinstance(traces, (list, tuple)) or not any(traces):
        raise SnapshotError(
            "no trace to replay: record it with torch.cuda.memory._record_memory_history()"
        )
    settings = _settings(snapshot.get("allocator_settings") or {})
    records = _list(snapshot["segments"], "segments")
    return [
        _recording(device, settings, records, _list(trace, f"device_traces[{device}]"))
        for device, trace in enumerate(traces)
        if trace
    ]


def _settings(recorded: object) -> AllocatorSettings:
    if not isinstance(recorded, Mapping):
        raise SnapshotError("'allocator_settings' is not a dict")
    try:
        return AllocatorSettings.from_snapshot(recorded)
    except ValueError as error:
        raise SnapshotError(f"allocator_settings: {error}") from None


def _recording(
    device: int, settings: AllocatorSettings, records: list[Any], trace: list[Any]
) -> Recording:
    mine = [
        (_segment(record, f"segments[{index}]"), _pool(record, "segment_pool_id"))
        for index, record in enumerate(records)
        if _mapping(record, f"segments[{index}]").get("device", 0) == device
    ]
    private = _PrivatePools([segment for segment, pool in mine if pool != _DEFAULT_POOL])
    events = []
    for index, entry in enumerate(trace):
        where = f"device_traces[{device}][{index}]"
        action = _mapping(entry, where).get("action")
        if not isinstance(action, str):
            raise SnapshotError(f"{where}: 'action' is {action!r}")
        if action not in ACTIONS:
            continue
        event = _event(entry, where)
        if not private.owns(event, _pool(entry, "pool_id") if "pool_id" in entry else None):
            events.append(event)
    return Recording(
        device=device,
        settings=settings,
        segments=tuple(segment for segment, pool in mine if pool == _DEFAULT_POOL),
        events=tuple(events),
        notes=private.notes(),
    )


class _PrivatePools:
    """Segments of CUDA graphs and user pools, which are left out of a replay."""

    def __init__(self, segments: list[RecordedSegment]) -> None:
        self.spans = [(segment.address, segment.address + segment.size) for segment in segments]
        self.reserved = sum(segment.size for segment in segments)
        self.skipped = 0

    def owns(self, event: Event, pool: tuple[int, ...] | None) -> bool:
        """Whether to leave the event out; ``pool`` is None where the trace does not tell it."""
        if pool is not None:
            mine = pool != _DEFAULT_POOL
        else:
            mine = event.action != "oom" and any(a <= event.address < b for a, b in self.spans)
        self.skipped += mine
        return mine

    def notes(self) -> tuple[str, ...]:
        if not self.spans and not self.skipped:
            return ()
        return (
            f"private pools (CUDA graphs, MemPool) are left out: {len(self.spans)} segments,"
            f" {self.reserved} bytes, {self.skipped} events",
        )


def _segment(record: Any, where: str) -> RecordedSegment:
    record = _mapping(record, where)
    address = _int(record, "address", where)
    stream = _stream(record, where)
    size = _int(record, "total_size", where)
    blocks = _blocks(_list(record.get("blocks"), f"{where}.blocks"), address, where)
    if sum(block.size for block in blocks) != size:
        raise SnapshotError(f"{where}: its blocks do not add up to its total_size")
    kind = record.get("segment_type")
    if kind not in ("small", "large"):
        raise SnapshotError(f"{where}: segment_type is {kind!r}, not 'small' or 'large'")
    return RecordedSegment(
        address=address,
        size=size,
        stream=stream,
        is_small=kind == "small",
        expandable=bool(record.get("is_expandable", False)),
        blocks=blocks,
    )


def _blocks(records: list[Any], address: int, where: str) -> tuple[RecordedBlock, ...]:
    blocks = []
    for index, entry in enumerate(records):
        here = f"{where}.blocks[{index}]"
        record = _mapping(entry, here)
        size = _int(record, "size", here)
        state = BLOCK_STATES.get(str(record.get("state")))
        if state is None:
            raise SnapshotError(f"{here}: unknown state {record.get('state')!r}")
        if _int(record, "address", here, address) != address:
            raise SnapshotError(f"{here}: blocks leave a gap or overlap")
        requested = _int(record, "requested_size", here, size)
        blocks.append(RecordedBlock(address, size, requested, state))
        address += size
    return tuple(blocks)


def _event(entry: Any, where: str) -> Event:
    action = entry["action"]
    address = _int(entry, "device_free" if action == "oom" else "addr", where)
    return Event(action, address, _int(entry, "size", where), _stream(entry, where))


def _pool(record: Mapping[str, Any], key: str) -> tuple[int, ...]:
    pool = record.get(key, _DEFAULT_POOL)
    return tuple(pool) if isinstance(pool, (list, tuple)) else _DEFAULT_POOL


def _int(record: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = record.get(key, default)
    if not isinstance(value, int) or value < 0:
        raise SnapshotError(f"{where}: {key!r} is {value!r}, not an address or a number of bytes")
    return value


def _stream(record: Mapping[str, Any], where: str) -> int:
    stream = record.get("stream", 0)
    if not isinstance(stream, int):
        raise SnapshotError(f"{where}: 'stream' is {stream!r}, not a handle")
    return stream


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise SnapshotError(f"{where} is not a list")
    return list(value)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SnapshotError(f"{where} is not a dict")
    return value
