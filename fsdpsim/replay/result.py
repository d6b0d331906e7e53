"""The answer of a replay, per device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.replay.follow import Follower, Mismatch, first_request, follow
from fsdpsim.replay.recorded import Recorded, recorded
from fsdpsim.replay.recording import (
    BLOCK_STATES,
    RecordedBlock,
    Recording,
    SnapshotError,
    parse_snapshot,
)
from fsdpsim.replay.run import Outcome
from fsdpsim.replay.undo import InitialState
from fsdpsim.replay.whatif import what_if
from fsdpsim.unpickle import read_pickle

#: Columns of :meth:`ReplayResult.rows`; sizes in bytes, fragmentation as a share.
COLUMNS = (
    "device",
    "run",
    "peak_reserved_bytes",
    "peak_active_bytes",
    "peak_allocated_bytes",
    "peak_requested_bytes",
    "fragmentation",
    "inactive_split_bytes",
    "segments_opened",
    "segments_freed",
    "num_alloc_retries",
    "num_ooms",
)

#: Mismatches that are written out; the number of all is always given.
SHOWN_MISMATCHES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of the device, in bytes; None: not known."""

    capacity: int | None = None
    """What could be allocated."""
    total_memory: int | None = None
    """The whole device."""

    def check(self) -> None:
        """Raise ``ValueError`` for a limit that nobody means."""
        for name in ("capacity", "total_memory"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReplay:
    """One device: what happened, the same replayed, and what other settings would have given."""

    device: int
    num_events: int
    num_allocations: int
    recorded: Recorded
    replayed: Outcome
    """With the recorded settings, from the recorded state before the first event."""
    mismatches: tuple[Mismatch, ...]
    final_blocks_equal: bool
    """Whether the replay ends with exactly the segments and blocks of the snapshot."""
    fresh: Outcome | None
    """With the recorded settings, but nothing cached at the start; None if nothing is given that
    it would show."""
    what_if: Outcome | None
    """With the overrides, nothing cached at the start; None without overrides."""
    capacity: int | None
    """Bytes that could be allocated; None: not known, memory never runs out."""
    notes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every decision and the final state equal the recorded ones."""
        return not self.mismatches and self.final_blocks_equal

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; sizes in bytes."""
        runs = {"replayed": self.replayed, "fresh": self.fresh, "what_if": self.what_if}
        return {
            "device": self.device,
            "num_events": self.num_events,
            "num_allocations": self.num_allocations,
            "exact": self.exact,
            "final_blocks_equal": self.final_blocks_equal,
            "num_mismatches": len(self.mismatches),
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches[:SHOWN_MISMATCHES]],
            "capacity_bytes": self.capacity,
            "recorded": _recorded_dict(self.recorded),
            **{name: run and _outcome_dict(run) for name, run in runs.items()},
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run, with the keys of :data:`COLUMNS`; None: not applicable."""
        rows = [{"run": "recorded", **_recorded_dict(self.recorded)}]
        named = {
            "replayed": self.replayed,
            "replayed, nothing cached at the start": self.fresh,
            "with the new settings": self.what_if,
        }
        rows += [{"run": name, **_outcome_dict(run)} for name, run in named.items() if run]
        return [{key: (row | {"device": self.device}).get(key) for key in COLUMNS} for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """All devices of a snapshot that have a trace."""

    devices: tuple[DeviceReplay, ...]

    @property
    def exact(self) -> bool:
        """Whether every device was replayed exactly."""
        return all(device.exact for device in self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; sizes in bytes."""
        return {"exact": self.exact, "devices": [device.to_dict() for device in self.devices]}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table, with the keys of :data:`COLUMNS`."""
        return [row for device in self.devices for row in device.rows()]

    def notes(self) -> list[str]:
        """Return what a reader of the table must know, without repetitions."""
        return list(dict.fromkeys(note for device in self.devices for note in device.notes))


def replay(
    snapshot: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any] | AllocatorSettings | None = None,
    *,
    capacity: int | None = None,
    total_memory: int | None = None,
) -> ReplayResult:
    """Replay a snapshot, and again with other settings or on a device of another capacity.

    ``snapshot`` is a file (``.pickle``, gzipped or not) or its content. ``settings`` are options
    of the allocator that replace recorded ones (a table), or all of them (``AllocatorSettings``).
    ``capacity`` is how many bytes could be allocated on the device, ``total_memory`` the bytes
    of the whole device, which a memory fraction needs; neither is in a snapshot. Raises
    ``ValueError`` with one line for a bad file or setting.
    """
    limits = Limits(capacity=capacity, total_memory=total_memory)
    limits.check()
    try:
        content = snapshot if isinstance(snapshot, Mapping) else read_pickle(snapshot)
        recordings = parse_snapshot(content)
        devices = [_replay_device(recording, settings, limits) for recording in recordings]
    except SnapshotError as error:
        where = "" if isinstance(snapshot, Mapping) else f"{snapshot}: "
        raise SnapshotError(f"{where}{error}") from None
    return ReplayResult(devices=tuple(devices))


def _replay_device(
    recording: Recording,
    overrides: Mapping[str, Any] | AllocatorSettings | None,
    given: Limits,
) -> DeviceReplay:
    chosen = None if overrides is None else _overridden(recording.settings, overrides)
    initial, follower = follow(recording, given.total_memory)
    if initial.extents and follower.failed_first:
        recording = _without_first_request(recording)
        initial, follower = follow(recording, given.total_memory)
    happened = recorded(recording, initial)
    known = given
    if given.capacity is None:
        known = replace(given, capacity=happened.oom_capacity)

    def fresh(settings: AllocatorSettings) -> Outcome:
        return what_if(
            recording,
            initial,
            follower.flushes,
            settings,
            capacity=known.capacity,
            total_memory=known.total_memory,
        )

    return DeviceReplay(
        device=recording.device,
        num_events=len(recording.events),
        num_allocations=follower.num_allocations,
        recorded=happened,
        replayed=follower.replay.outcome(),
        mismatches=tuple(follower.mismatches),
        final_blocks_equal=_same_blocks(recording, follower),
        fresh=None if chosen is None and given.capacity is None else fresh(recording.settings),
        what_if=None if chosen is None else fresh(chosen),
        capacity=known.capacity,
        notes=tuple(_notes(recording, initial, follower, known, given, chosen)),
    )


def _without_first_request(recording: Recording) -> Recording:
    """Start behind the first request: a trace may begin between its driver calls and its end."""
    first = first_request(recording.events)
    note = "the trace begins in the middle of a request, which is left out"
    return replace(recording, events=recording.events[first + 1 :], notes=(*recording.notes, note))


def _overridden(
    settings: AllocatorSettings, overrides: Mapping[str, Any] | AllocatorSettings
) -> AllocatorSettings:
    if isinstance(overrides, AllocatorSettings):
        return overrides
    return AllocatorSettings.validated(settings.model_dump() | dict(overrides))


def _same_blocks(recording: Recording, follower: Follower) -> bool:
    """Compare all segments and blocks: address, size, state, and size asked for if in use."""
    theirs = [
        (segment.address, segment.stream, block.address, block.size, block.state, _asked(block))
        for segment in sorted(recording.segments, key=lambda segment: segment.address)
        for block in segment.blocks
    ]
    return theirs == _final_blocks(follower)


def _asked(block: RecordedBlock) -> int:
    return 0 if block.state == "free" else block.requested_size


def _final_blocks(follower: Follower) -> list[tuple[Any, ...]]:
    return [
        (
            segment["address"],
            segment["stream"],
            block["address"],
            block["size"],
            BLOCK_STATES[block["state"]],
            block["requested_size"],
        )
        for segment in follower.replay.allocator.memory_snapshot()
        for block in segment["blocks"]
    ]


def _recorded_dict(run: Recorded) -> dict[str, Any]:
    return {
        "peak_reserved_bytes": run.reserved_peak,
        "peak_active_bytes": run.active_peak,
        "peak_allocated_bytes": run.allocated_peak,
        "peak_requested_bytes": run.requested_peak,
        "active_at_peak_bytes": run.active_at_peak,
        "fragmentation": run.fragmentation,
        "final_reserved_bytes": run.final_reserved,
        "segments_opened": run.num_device_alloc,
        "segments_freed": run.num_device_free,
        "num_ooms": run.num_ooms,
    }


def _outcome_dict(run: Outcome) -> dict[str, Any]:
    return {
        "settings": run.settings.model_dump(exclude_defaults=True),
        "peak_reserved_bytes": run.reserved_peak,
        "peak_active_bytes": run.active_peak,
        "peak_allocated_bytes": run.allocated_peak,
        "peak_requested_bytes": run.requested_peak,
        "active_at_peak_bytes": run.active_at_peak,
        "fragmentation": run.fragmentation,
        "inactive_split_bytes": run.inactive_split_at_peak,
        "final_reserved_bytes": run.final_reserved,
        "segments_opened": run.num_device_alloc,
        "segments_freed": run.num_device_free,
        "num_alloc_retries": run.num_alloc_retries,
        "num_ooms": run.num_ooms,
        "first_oom_event": run.first_oom,
    }


def _notes(
    recording: Recording,
    initial: InitialState,
    follower: Follower,
    known: Limits,
    given: Limits,
    chosen: AllocatorSettings | None,
) -> Iterator[str]:
    yield from recording.notes
    if initial.extents:
        reserved = sum(extent.size for extent in initial.extents)
        yield (
            f"the trace starts with {reserved} bytes reserved; this state was found by undoing the"
            " trace, and runs marked so start without what was only cached"
        )
    if initial.guessed:
        yield (
            f"{len(initial.guessed)} blocks were older than the trace and freed in it, and nothing"
            " decides their exact size: the smallest possible one is taken"
        )
    yield _capacity_note(known, given, chosen or recording.settings)
    if given.total_memory is None and recording.settings.per_process_memory_fraction is not None:
        yield "the memory fraction needs the total memory of the device, which was not given"
    if recording.settings.garbage_collection_threshold and follower.mismatches:
        yield "garbage collection depends on the total memory and the fraction of it in force"
    yield from _flush_notes(follower, known)


def _capacity_note(known: Limits, given: Limits, settings: AllocatorSettings) -> str:
    if given.capacity is not None:
        return f"{given.capacity} bytes can be allocated in runs with nothing cached at the start"
    if known.capacity is not None:
        return (
            f"capacity of {known.capacity} bytes taken from the last OOM of the trace (reserved"
            " plus free)"
        )
    unknown = "the capacity of the device is not in a snapshot"
    total = given.total_memory
    limit = None if total is None else settings.memory_limit(total)
    if limit is not None:
        return f"{unknown}: the memory fraction is the only limit, {limit} bytes"
    return f"{unknown}: memory never runs out unless given"


def _flush_notes(follower: Follower, known: Limits) -> Iterator[str]:
    possible_retries = sum(flush.needed is not None for flush in follower.flushes)
    if possible_retries and known.capacity is None:
        yield (
            f"{possible_retries} flushes may be retries or empty_cache, the trace does not say:"
            " they are repeated in every run"
        )
    if follower.num_deferred:
        yield (
            f"{follower.num_deferred} frees waited for events: their blocks return where the"
            " trace shows it, under all settings"
        )
