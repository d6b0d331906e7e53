"""Replay a recorded program with other settings or on a device of another size.

The program is the order of requests and frees. A block that the recording frees with a wait is
given back when the recording shows the wait over. Recorded flushes are repeated, except those
that a given capacity explains as retries: these come by themselves, or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdpsim.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from fsdpsim.replay.follow import ENDLESS, Flush, is_immediate
from fsdpsim.replay.recording import Recording
from fsdpsim.replay.run import Completions, Outcome, Pass
from fsdpsim.replay.undo import InitialState


def what_if(
    recording: Recording,
    initial: InitialState,
    flushes: list[Flush],
    settings: AllocatorSettings,
    *,
    capacity: int | None,
    total_memory: int | None,
) -> Outcome:
    """Run the program from empty memory under ``settings``.

    Blocks in use before the first event are allocated first, by address. ``capacity`` and
    ``total_memory`` are in bytes; without a capacity memory never runs out. A request that
    fails is left out, with its free, and the program goes on.
    """
    total = total_memory or capacity or ENDLESS >> 10
    completions = Completions()
    allocator = CachingAllocator(
        capacity=ENDLESS if capacity is None else capacity,
        total_memory=total,
        settings=settings,
        device=completions,
    )
    program = _Program(Pass(allocator, completions), limited=capacity is not None)
    program.allocate_initial(initial)
    program.run(recording, kept_flushes(flushes, capacity))
    return program.replay.outcome()


def kept_flushes(flushes: Iterable[Flush], capacity: int | None) -> set[int]:
    """Return the events before which the cache is emptied by hand.

    A flush that made room for a request which would not have fitted into ``capacity`` is a retry.
    """
    return {
        flush.before
        for flush in flushes
        if capacity is None or flush.needed is None or flush.needed <= capacity
    }


class _Program:
    """The recorded requests and frees, on an allocator of their own."""

    def __init__(self, replay: Pass, *, limited: bool) -> None:
        self.replay = replay
        self.limited = limited

    def allocate_initial(self, initial: InitialState) -> None:
        """Allocate what was in use before the first event."""
        for extent in initial.extents:
            for block in extent.blocks:
                self._alloc(0, block.address, block.requested_size, extent.stream)
        self.replay.free_pending(initial)

    def run(self, recording: Recording, flushes: set[int]) -> None:
        """Go through the trace; driver calls in it are not repeated."""
        events = recording.events
        for index, event in enumerate(events):
            if index in flushes:
                self.replay.allocator.empty_cache()
            if event.action == "alloc":
                self._alloc(index, event.address, event.size, event.stream)
            elif event.action == "free_requested":
                self.replay.free(event.address, deferred=not is_immediate(events, index))
            elif event.action == "free_completed":
                self.replay.complete(event.address)
            elif event.action == "oom" and self.limited:
                self._retry_oom(index, event.size, event.stream)

    def _alloc(self, index: int, address: int, nbytes: int, stream: int) -> None:
        self.replay.blocks.pop(address, None)
        block = self._malloc(index, nbytes, stream)
        if block is not None:
            self.replay.blocks[address] = block

    def _retry_oom(self, index: int, nbytes: int, stream: int) -> None:
        """What ran out of memory may fit now; what became of it is not recorded."""
        block = self._malloc(index, nbytes, stream)
        if block is not None:
            self.replay.allocator.free(block)

    def _malloc(self, index: int, nbytes: int, stream: int) -> Block | None:
        try:
            return self.replay.allocator.malloc(nbytes, stream)
        except OutOfMemoryError:
            if self.replay.first_oom is None:
                self.replay.first_oom = index
            return None
        finally:
            self.replay.note_peak()
