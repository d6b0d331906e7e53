"""What Inductor, the compiler of ``torch.compile``, makes of steps and of their buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from fsdpsim.kernels.lifetimes import BACKWARD, RECOMPUTE, At, Edges, Plan, Segment
from fsdpsim.kernels.tape import Step, Tape


def fuse(
    segments: Sequence[Segment], gradient_of: Mapping[str, str], edges: Edges
) -> tuple[Segment, ...]:
    """Merge runs of pointwise steps and row reductions into one kernel each, as Inductor does.

    A buffer that only the steps of one kernel use is never written to memory.
    """
    uses = Counter(n for g in segments for s in g.steps for n in set(s.touches))
    for name in (edges.x, edges.y, gradient_of.get(edges.x), gradient_of.get(edges.y)):
        if name:
            uses[name] += 1
    return tuple(replace(g, steps=tuple(_fused(g.steps, uses))) for g in segments)


def _fused(steps: Sequence[Step], uses: Counter[str]) -> Iterator[Step]:
    run: list[Step] = []
    for step in steps:
        if step.fusible:
            run.append(step)
            continue
        yield from _merged(run, uses)
        run = []
        yield step
    yield from _merged(run, uses)


def _merged(run: Sequence[Step], uses: Counter[str]) -> Iterator[Step]:
    if len(run) < 2:
        yield from run
        return
    here = Counter(name for step in run for name in set(step.touches))
    inside = {name for name, count in here.items() if count == uses[name]}
    written: set[str] = set()
    reads: list[str] = []
    for step in run:
        reads += [n for n in step.reads if n not in written and n not in inside]
        written.update(step.writes)
    yield Step(
        name="fused: " + ", ".join(step.name for step in run),
        kind="reduction" if any(s.kind == "reduction" for s in run) else "elementwise",
        reads=tuple(dict.fromkeys(reads)),
        writes=tuple(n for n in dict.fromkeys(w for s in run for w in s.writes) if n not in inside),
        keeps=tuple(n for n in dict.fromkeys(k for s in run for k in s.keeps) if n not in inside),
        extra=sum(step.extra for step in run),
        flops=sum(step.flops for step in run),
    )


# ---- buffers


def reuse(plan: Plan, segments: Sequence[Segment], tape: Tape) -> None:
    """Change ``plan`` so that a buffer which dies in a graph serves as a later one of its size.

    A pointwise kernel may write into what it reads for the last time. Between death and reuse a
    buffer is not freed. What attention returns is allocated by its own code, so it neither takes a
    buffer nor leaves one. Source: ``torch/_inductor/codegen/wrapper.py``, ``AllocateLine.plan`` and
    ``FreeIfNotReusedLine.plan``; ``torch/_inductor/scheduler.py``, ``decide_inplace_update``.
    """
    for graph in _graphs(segments):
        _Reuse(plan, tape).run([(at, segments[at[0]].steps[at[1]]) for at in graph])


def _graphs(segments: Sequence[Segment]) -> Iterator[list[At]]:
    """The steps of each graph: a segment, or the recompute of a part with its backward."""
    graph: list[At] = []
    for index, (segment, following) in enumerate(pairwise((*segments, None))):
        assert segment is not None
        graph += [(index, number) for number in range(len(segment.steps))]
        if following is None or not _is_one_graph(segment, following):
            yield graph
            graph = []


def _is_one_graph(segment: Segment, following: Segment) -> bool:
    phases = segment.phase, following.phase
    return phases == (RECOMPUTE, BACKWARD) and segment.part == following.part


class _Reuse:
    """One graph's buffers: where those that it made itself start, and which of them are dead."""

    def __init__(self, plan: Plan, tape: Tape) -> None:
        self.plan = plan
        self.tape = tape
        self.starts: dict[str, At] = {}
        self.dead: dict[int, list[tuple[str, At]]] = {}

    def run(self, graph: Sequence[tuple[At, Step]]) -> None:
        """Walk through the graph's steps."""
        for at, step in graph:
            dying = [*self.plan.free.get(at, ())]
            in_place = [name for name in dying if step.fusible and name in step.reads]
            self._bury(at, in_place)
            if step.attention is None:
                self._make(at, step)
            self._bury(at, (name for name in dying if name not in in_place))

    def _bury(self, at: At, names: Iterable[str]) -> None:
        for name in names:
            if name in self.starts:
                self.dead.setdefault(self.tape.nbytes(name), []).append((name, at))

    def _make(self, at: At, step: Step) -> None:
        """Let what the step writes live in dead buffers, where there are any."""
        for name in [n for n in self.plan.allocate.get(at, ()) if n in step.writes]:
            found = self.dead.get(self.tape.nbytes(name))
            self.starts[name] = self._take(name, at, *found.pop()) if found else at

    def _take(self, name: str, at: At, taken: str, end: At) -> At:
        """Allocate ``name`` where ``taken`` was, which then is not freed; returns where that is."""
        start = self.starts.pop(taken)
        self.plan.free[end].remove(taken)
        self.plan.allocate[at].remove(name)
        names = self.plan.allocate[start]
        names[names.index(taken)] = name
        return start
