"""Replay a trace with the settings it was recorded with, and compare every decision.

Taken from the recording: requests, their order and streams, base addresses of new segments,
when deferred frees complete, when the cache was flushed without need, and whether a request to
the driver succeeded. Predicted: every placement, every decision to ask the driver, and which
segments a flush frees.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fsdpsim.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from fsdpsim.allocator.blocks import FREE
from fsdpsim.allocator.restore import restore
from fsdpsim.allocator.sizes import MIN_BLOCK_SIZE, SMALL_SIZE
from fsdpsim.replay.ranges import PoolOf, RangeBases
from fsdpsim.replay.recording import FLUSHES, GROWTHS, Event, Recording
from fsdpsim.replay.run import Addresses, Completions, Pass, segment_states
from fsdpsim.replay.undo import InitialState, undo

#: More than any device has: the recording says which requests succeeded.
ENDLESS = 1 << 50


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A decision that the replay took otherwise than the recording."""

    event: int
    what: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Segments freed together, before event ``before`` of the trace.

    ``needed`` is the reserved memory (bytes) that the request behind it would have led to
    without the flush; None if no request that asks the driver follows. Then, or if the device
    is larger than that, the flush was an ``empty_cache``, otherwise it may have been a retry.
    """

    before: int
    needed: int | None


class _RecordedMemory(Addresses):
    """Grants memory when the recording shows it granted, at the recorded address."""

    def __init__(self, above: int) -> None:
        super().__init__(ENDLESS, above)
        self.expected: list[tuple[int, Event]] = []
        self.emitted: list[tuple[str, int, int]] = []
        self.refuse_unexpected = False
        self.range_base: int | None = None

    def expect(self, events: list[tuple[int, Event]], *, refuse_unexpected: bool = False) -> None:
        self.expected = events
        self.emitted = []
        self.refuse_unexpected = refuse_unexpected

    def _next(self) -> tuple[int, Event] | None:
        done = len(self.emitted)
        return self.expected[done] if done < len(self.expected) else None

    def take(self, size: int) -> bool:
        following = self._next()
        if following is None:
            return not self.refuse_unexpected
        return following[1].action in GROWTHS

    def give_back(self, size: int) -> None:
        pass

    def place(self, size: int) -> int:
        following = self._next()
        if following is None or following[1].action not in GROWTHS:
            return super().place(size)
        return following[1].address

    def place_range(self, size: int) -> int:
        return super().place(size) if self.range_base is None else self.range_base


class Follower:
    """The replay with recorded settings; ``mismatches`` is empty when every decision agreed."""

    def __init__(
        self, recording: Recording, initial: InitialState, total_memory: int | None
    ) -> None:
        pool_of = PoolOf(recording)
        runs = [
            (extent.stream, extent.is_small, extent.address, extent.size)
            for extent in initial.extents
            if extent.expandable
        ]
        bases = RangeBases(recording, pool_of, runs)
        total = total_memory or max(ENDLESS >> 10, bases.extent)
        self.recording = recording
        self.bases = bases
        self.memory = _RecordedMemory(highest_address(recording))
        completions = Completions()
        allocator = CachingAllocator(
            capacity=ENDLESS,
            total_memory=total,
            settings=followed_settings(recording.settings, total_memory),
            device=completions,
            on_event=self._emit,
            memory=self.memory,
        )
        live = restore(allocator, segment_states(initial, bases, recording.settings, total))
        self.replay = Pass(allocator, completions)
        self.replay.blocks.update(live)
        self.guessed = set(initial.guessed)
        self.correction: tuple[int, int] | None = None
        self.mismatches: list[Mismatch] = []
        self.flushes: list[Flush] = []
        self.num_allocations = 0
        self.num_deferred = 0
        self._group: list[tuple[int, Event]] = []
        self._completed: list[int] = []
        self.replay.free_pending(initial)

    @property
    def failed_first(self) -> bool:
        """Whether the very first request already went otherwise."""
        first = first_request(self.recording.events)
        return any(mismatch.event <= first for mismatch in self.mismatches)

    def run(self) -> None:
        """Go through the trace, until a ``correction`` (address, smallest size) is found."""
        events = self.recording.events
        for index, event in enumerate(events):
            if self.correction is not None:
                return
            if event.action in GROWTHS or event.action in FLUSHES:
                self._group.append((index, event))
            elif event.action == "free_completed":
                if not is_immediate(events, index - 1):
                    self._completed.append(event.address)
            elif event.action == "free_requested":
                self._settle_group(index)
                deferred = not is_immediate(events, index)
                self.num_deferred += deferred
                self.guessed.discard(event.address)
                self.replay.free(event.address, deferred=deferred)
            else:
                self._request(index, event)
        self._settle_group(len(events))

    def _emit(self, action: str, address: int, size: int, stream: Hashable) -> None:
        if action in GROWTHS or action in FLUSHES:
            self.memory.emitted.append((action, address, size))

    def _settle_group(self, index: int) -> None:
        """What was flushed or completed without a request was flushed or waited for by hand."""
        if any(event.action in FLUSHES for _, event in self._group):
            self._empty_cache(index)
        self._complete()
        self.replay.allocator.process_events()
        if self._group:
            self._mismatch(index, "memory was reserved without a request")
            self._group = []

    def _complete(self) -> None:
        for address in self._completed:
            self.replay.complete(address)
        self._completed = []

    def _empty_cache(self, index: int) -> None:
        flushed = [entry for entry in self._group if entry[1].action in FLUSHES]
        self._group = [entry for entry in self._group if entry[1].action in GROWTHS]
        self.flushes.append(Flush(index, None))
        self.memory.expect(flushed)
        self.replay.allocator.empty_cache()
        self._compare(index)

    def _request(self, index: int, event: Event) -> None:
        """An alloc or oom event, with the driver calls before it."""
        allocator, failed = self.replay.allocator, event.action == "oom"
        flushed = any(entry.action in FLUSHES for _, entry in self._group)
        grown = failed or any(entry.action in GROWTHS for _, entry in self._group)
        if flushed and (not grown or allocator.is_cached(event.size, event.stream)):
            self._empty_cache(index)
        elif flushed:
            self._note_needed(index, event)
        else:
            self._complete()
        first = self._group[0][0] if self._group else index
        small = allocator.rounded(event.size) <= SMALL_SIZE
        self.memory.range_base = self.bases.next_base(event.stream, small, first)
        self.memory.expect(self._group, refuse_unexpected=failed)
        self._group = []
        self._malloc(index, event, failed)
        self.replay.note_peak()
        self._compare(index)
        self._complete()

    def _note_needed(self, index: int, event: Event) -> None:
        allocator = self.replay.allocator
        reserved = allocator.stats.reserved_bytes.current
        self.flushes.append(Flush(index, reserved + allocator.segment_size(event.size)))

    def _malloc(self, index: int, event: Event, failed: bool) -> None:
        try:
            block = self.replay.allocator.malloc(event.size, event.stream)
        except OutOfMemoryError:
            if not failed:
                self._mismatch(index, f"no memory for {event.size} bytes")
            return
        if failed:
            self._mismatch(index, f"{event.size} bytes were allocated that ran out of memory")
            self.replay.allocator.free(block)
            return
        self.num_allocations += 1
        self.replay.blocks[event.address] = block
        if block.address != event.address:
            self._correct_guess(block)
            self._mismatch(
                index, f"{event.size} bytes went to {block.address:#x}, not {event.address:#x}"
            )

    def _correct_guess(self, block: Block) -> None:
        """Find out that a guessed size is too small.

        If a request went behind a block of guessed size, and not so in the recording, the gap
        there must have been too small for it.
        """
        below, above = block.prev, block.next
        if below is None or below.address not in self.guessed:
            return
        gap = block.size + (above.size if above is not None and above.state == FREE else 0)
        rounded = self.replay.allocator.rounded
        size = below.size + gap - rounded(block.requested_size) + MIN_BLOCK_SIZE
        if size <= rounded(below.requested_size) + SMALL_SIZE:
            self.correction = below.address, size

    def _compare(self, index: int) -> None:
        """Compare the driver calls just made with the recorded ones."""
        recorded = [(event.action, event.address, event.size) for _, event in self.memory.expected]
        made = self.memory.emitted
        self.memory.expect([])
        if made == recorded:
            return
        for kind, word in ((GROWTHS, "reserved"), (FLUSHES, "released")):
            ours = {call[1:] for call in made if call[0] in kind}
            theirs = {call[1:] for call in recorded if call[0] in kind}
            if ours != theirs:
                self._mismatch(
                    index,
                    f"{word} {_listed(ours - theirs)} instead of {_listed(theirs - ours)}",
                )

    def _mismatch(self, index: int, what: str) -> None:
        self.mismatches.append(Mismatch(index, what))


def _listed(calls: set[tuple[int, int]]) -> str:
    shown = [f"{size} bytes at {address:#x}" for address, size in sorted(calls)[:3]]
    more = f" and {len(calls) - 3} more" if len(calls) > 3 else ""
    return ", ".join(shown) + more if shown else "nothing"


def is_immediate(events: tuple[Event, ...], index: int) -> bool:
    """Whether the free requested at ``index`` completed at once.

    A free that waited, but only for the poll of the very next request, looks and is the same.
    """
    if not 0 <= index < len(events) - 1:
        return False
    requested, completed = events[index], events[index + 1]
    return (
        requested.action == "free_requested"
        and completed.action == "free_completed"
        and requested.address == completed.address
    )


def first_request(events: tuple[Event, ...]) -> int:
    """Return the index of the first request; -1 if there is none."""
    requests = (index for index, event in enumerate(events) if event.action in ("alloc", "oom"))
    return next(requests, -1)


def highest_address(recording: Recording) -> int:
    """Return an address above every segment that the recording mentions."""
    ends = [segment.address + segment.size for segment in recording.segments]
    ends += [event.address + event.size for event in recording.events if event.action != "oom"]
    return max(ends, default=0)


def followed_settings(settings: AllocatorSettings, total_memory: int | None) -> AllocatorSettings:
    """Drop a memory fraction whose base, the total memory, is not known."""
    if total_memory is not None:
        return settings
    return settings.model_copy(update={"per_process_memory_fraction": None})


def follow(recording: Recording, total_memory: int | None) -> tuple[InitialState, Follower]:
    """Undo and replay a trace; guessed sizes are corrected as long as the trace disproves them."""
    at_least: dict[int, int] = {}
    while True:
        initial = undo(recording, at_least)
        follower = Follower(recording, initial, total_memory)
        follower.run()
        if follower.correction is None:
            return initial, follower
        address, size = follower.correction
        at_least[address] = size
