"""What ran and who waited for whom, as columns for the page's timeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpsim.engine import HostWork, Op
from fsdpsim.explain.causes import HOOKS, Segment, partition
from fsdpsim.explain.parts import Cause
from fsdpsim.explain.text import describe_cause
from fsdpsim.explain.timeline import HostTile, Timeline
from fsdpsim.plots.bars import HOST_ROW
from fsdpsim.plots.style import STREAMS
from fsdpsim.plots.view import host_starts, make_view, short_names
from fsdpsim.program import COMPUTE
from fsdpsim.report.encode import Strings, Ticks, scrub
from fsdpsim.result import Result

NOTHING = -1
"""In a column of positions: there is none."""


def timeline_data(result: Result, timeline: Timeline, strings: Strings, ticks: Ticks) -> Any:
    """Lanes, ops in issue order, the CPU thread's tiles, iterations, and idle times explained.

    ``bound`` of an op is the op that its start had to wait for; or, counted down from -2, the tile
    in which the CPU thread issued it; or -1. ``awaited`` of a tile is the op that ended its wait.
    """
    columns = _Columns(result, timeline, strings, ticks)
    names = [scrub(unit.name) for unit in result.workload.units]
    return {
        "host_lane": HOST_ROW,
        "compute": COMPUTE,
        "lanes": lanes(result),
        "units": names,
        "short": [short_names(names)[name] for name in names],
        "ops": columns.ops(),
        "host": columns.host(),
        "idle": columns.idle(),
        "iterations": list(_iterations(result, ticks)),
    }


def lanes(result: Result) -> list[str]:
    """The streams that have ops, from top to bottom as in every picture."""
    used = dict.fromkeys(op.stream for op in result.ops)
    known = [name for name in STREAMS if name in used]
    return known + [name for name in used if name not in STREAMS]


def _iterations(result: Result, ticks: Ticks) -> Iterator[dict[str, Any]]:
    """The window of each iteration that has begun, then of all; ``step``: its length."""
    begun = len(host_starts(result))
    for which in (*range(1, begun + 1), "all"):
        view = make_view(result, iteration=which)
        yield {
            "name": str(which),
            "start": ticks(view.start),
            "end": ticks(view.end),
            "origin": ticks(view.origin),
            "step_end": ticks(result.iteration_ends[-1 if which == "all" else int(which) - 1]),
        }


class _Columns:
    def __init__(self, result: Result, timeline: Timeline, strings: Strings, ticks: Ticks) -> None:
        self.result = result
        self.timeline = timeline
        self.strings = strings
        self.ticks = ticks
        self.index = {id(op): i for i, op in enumerate(result.ops)}
        self.lane = {name: i for i, name in enumerate(lanes(result))}

    def ops(self) -> dict[str, Any]:
        ops, strings = self.result.ops, self.strings
        moved: dict[tuple[Any, ...], int] = {}
        return {
            "name": [strings[op.name] for op in ops],
            "kind": [strings[op.kind] for op in ops],
            "lane": [self.lane[op.stream] for op in ops],
            "unit": [strings[op.unit] for op in ops],
            "phase": [strings[op.phase] for op in ops],
            "iteration": [op.iteration for op in ops],
            "issued": self.ticks.column(op.issued for op in ops),
            "launch": [self.ticks(op.launch_seconds) for op in ops],
            "start": self.ticks.column(op.start for op in ops),
            "end": self.ticks.column(op.end for op in ops),
            "bound": [self._node(self.timeline.binding(op)) for op in ops],
            "deps": [[self.index[id(dep)] for dep in op.deps] for op in ops],
            "moved": [self._moved(op, moved) for op in ops],
            "collectives": [
                [scrub(f) if isinstance(f, str) else f for f in facts] for facts in moved
            ],
        }

    def _node(self, node: Op | HostTile | None) -> int:
        if node is None:
            return NOTHING
        return self.index[id(node)] if isinstance(node, Op) else -2 - node.index

    def _op(self, op: Op | None) -> int:
        return NOTHING if op is None else self.index[id(op)]

    def _moved(self, op: Op, seen: dict[tuple[Any, ...], int]) -> int:
        """Position of what a collective moves; most are alike."""
        info = op.collective
        if info is None:
            return NOTHING
        facts = (
            op.communicator or "",
            info.nbytes,
            info.shard_nbytes or 0,
            info.dtype,
            info.group,
            info.group_size,
            info.trigger or "",
            info.by or "",
        )
        return seen.setdefault(facts, len(seen))

    def host(self) -> dict[str, Any]:
        tiles, strings = self.timeline.host, self.strings
        return {
            "end": self.ticks.column(tile.end for tile in tiles),
            "cause": [strings[tile.cause] for tile in tiles],
            "look": [strings[host_look(tile)] for tile in tiles],
            "unit": [strings[tile.unit] for tile in tiles],
            "iteration": [tile.iteration for tile in tiles],
            "op": [self._op(_launched(tile)) for tile in tiles],
            "awaited": [self._op(self.timeline.awaited(tile)) for tile in tiles],
        }

    def idle(self) -> list[list[int]]:
        """(start, end, cause in words, op that ran meanwhile, op waited for) of each idle stretch.

        Of the last iteration, which is what an explanation is about.
        """
        if self.result.memory.oom is not None:
            return []
        segments, _ = partition(self.timeline)
        return [self._idle(segment) for segment in segments if not segment.busy]

    def _idle(self, segment: Segment) -> list[int]:
        return [
            self.ticks(segment.start),
            self.ticks(segment.end),
            self.strings[describe_cause(_cause(segment))],
            self._op(segment.op),
            self._op(segment.waits_for),
        ]


def _cause(segment: Segment) -> Cause:
    return Cause(
        cause=segment.cause,
        busy=False,
        waits_for=segment.waits_for.kind if segment.waits_for else "",
        behind=segment.behind.kind if segment.behind else "",
    )


def _launched(tile: HostTile) -> Op | None:
    return tile.step if isinstance(tile.step, Op) else None


def host_look(tile: HostTile) -> str:
    """Key of the tile's look: ``launch``, ``hook``, or a wait's cause."""
    if isinstance(tile.step, Op):
        return "launch"
    if isinstance(tile.step, HostWork) or tile.cause in HOOKS:
        return "hook"
    return tile.cause


def host_looks(timeline: Timeline) -> list[str]:
    """Keys of the looks that the CPU thread's tiles have, in order of first use."""
    return list(dict.fromkeys(map(host_look, timeline.host)))
