"""From steps to kernels: each buffer is allocated at its first write and freed after its last use.

A stretch of the model may be cut into parts (one per FSDP unit), and a part frees only what it has
allocated itself.

[Note: Cuts] A buffer that a cut crosses is handed over. Within one pass the earlier part frees it
with its last kernel and the later one allocates it with its first. What backward needs stays with
the part that made it until that part's own backward. There it stands in for its gradient, which is
as large and which, in reality, comes to life just when the tensor dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpsim.kernels.tape import Passes, Step, Tape
from fsdpsim.workload import Kernel, Tensor

FORWARD, RECOMPUTE, BACKWARD = range(3)

At = tuple[int, int]
"""A step: (index of the segment, index in it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The steps of one part in one pass."""

    phase: int
    part: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """How a stretch meets its neighbours."""

    x: str = ""
    """Its input; empty for the first stretch, which reads tokens."""
    y: str = ""
    """Its output; empty for the last, which ends in the loss."""
    x_held: bool = False
    """The stretch before keeps x until its backward, because this one needs it in backward."""
    y_held: bool = False
    """The stretch after needs y in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKernels:
    """The kernels of one part; gradients named relative to the block."""

    forward: tuple[Kernel, ...]
    recompute: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


@dataclass(slots=True)
class _Life:
    first: At
    last: At


@dataclass(slots=True)
class Plan:
    """Names to allocate before, and to free after, each step."""

    allocate: dict[At, list[str]] = field(default_factory=dict)
    free: dict[At, list[str]] = field(default_factory=dict)

    def live(self, name: str, start: At, end: At) -> None:
        """Have ``name`` from its first step to its last."""
        self.allocate.setdefault(start, []).append(name)
        self.free.setdefault(end, []).append(name)


def cut(passes: Passes, part_of: Sequence[int]) -> tuple[Segment, ...]:
    """Sort the passes into segments, in the order in which they run; empty ones are left out.

    ``part_of`` gives the part of each op.
    """
    parts = sorted(set(part_of))
    order = (
        *((FORWARD, part, passes.forward) for part in parts),
        *((RECOMPUTE, part, passes.recompute) for part in parts),
        *((BACKWARD, part, passes.backward) for part in reversed(parts)),
    )
    found = (
        Segment(phase=phase, part=part, steps=tuple(s for i, s in steps if part_of[i] == part))
        for phase, part, steps in order
    )
    return tuple(segment for segment in found if segment.steps)


def plan_buffers(segments: Sequence[Segment], gradient_of: Mapping[str, str], edges: Edges) -> Plan:
    """When the segments allocate and free each buffer."""
    return _Planner(segments, gradient_of, edges).plan


def lay_out(tape: Tape, segments: Sequence[Segment], plan: Plan) -> tuple[PartKernels, ...]:
    """The kernels of every part, in order, with the buffers that they allocate and free."""
    freed = {(name, at[0]) for at, names in plan.free.items() for name in names}
    made = {
        (segment.phase, segment.part): tuple(
            _kernel(tape, step, plan, (index, number), freed)
            for number, step in enumerate(segment.steps)
        )
        for index, segment in enumerate(segments)
    }
    return tuple(
        PartKernels(
            forward=made.get((FORWARD, part), ()),
            recompute=made.get((RECOMPUTE, part), ()),
            backward=made.get((BACKWARD, part), ()),
        )
        for part in sorted({segment.part for segment in segments})
    )


def _kernel(tape: Tape, step: Step, plan: Plan, at: At, freed: set[tuple[str, int]]) -> Kernel:
    moved = sum(tape.nbytes(name) for name in (*step.reads, *step.writes))
    return Kernel(
        name=step.name,
        kind=step.kind,
        flops=step.flops,
        nbytes=moved + step.extra,
        gemm=step.gemm,
        attention=step.attention,
        dtype=tape.dtype,
        allocates=tuple(
            Tensor(
                name=name,
                nbytes=tape.nbytes(name),
                category="temporaries" if (name, at[0]) in freed else "activations",
            )
            for name in plan.allocate.get(at, ())
        ),
        frees=tuple(plan.free.get(at, ())),
        gradients=step.gradients,
    )


class _Planner:
    """Works out where every buffer is allocated and freed: see [Note: Cuts]."""

    def __init__(
        self, segments: Sequence[Segment], gradient_of: Mapping[str, str], edges: Edges
    ) -> None:
        self.segments = segments
        self.gradient_of = gradient_of
        self.edges = edges
        self.lives = self._lives()
        self.plan = Plan()
        standing_in = self._hold()
        for name, life in self.lives.items():
            if not self._is_held(life):
                self._hand_over(name, life, standing_in)

    def _lives(self) -> dict[str, _Life]:
        lives: dict[str, _Life] = {}
        for at, step in self._positions():
            for name in step.touches:
                lives.setdefault(name, _Life(at, at)).last = at
        self._meet_neighbours(lives)
        return lives

    def _meet_neighbours(self, lives: dict[str, _Life]) -> None:
        """The input is there from the start, the output to the end; so are, in turn, gradients."""
        x, y = self.edges.x, self.edges.y
        backward = [i for i, g in enumerate(self.segments) if g.phase == BACKWARD]
        if y:
            lives[y].last = (backward[0], 0) if self.edges.y_held else self._end_of_forward()
        if y in self.gradient_of:
            lives[self.gradient_of[y]].first = (backward[0], 0)
        if x in self.gradient_of:
            lives[self.gradient_of[x]].last = self._last_step(backward[-1])
        if self.edges.x_held:
            del lives[x]
        elif x:
            lives[x].first = (0, 0)

    def _positions(self) -> Iterator[tuple[At, Step]]:
        for index, segment in enumerate(self.segments):
            for number, step in enumerate(segment.steps):
                yield (index, number), step

    def _end_of_forward(self) -> At:
        return self._last_step(max(i for i, g in enumerate(self.segments) if g.phase == FORWARD))

    def _last_step(self, segment: int) -> At:
        return segment, len(self.segments[segment].steps) - 1

    def _is_held(self, life: _Life) -> bool:
        """Whether it outlives the pass that made it, and so stays with its part."""
        return self.segments[life.first[0]].phase < self.segments[life.last[0]].phase

    def _hold(self) -> set[tuple[str, int]]:
        """Plan what is held; returns the (gradient, segment) pairs that need no buffer."""
        standing_in: set[tuple[str, int]] = set()
        for name, life in self.lives.items():
            if not self._is_held(life):
                continue
            end = self._home(life)
            if end is None:
                self._adopt(name, life)
                continue
            gradient = self._entering_gradient(name, end[0])
            if gradient is not None and (gradient, end[0]) not in standing_in:
                standing_in.add((gradient, end[0]))
                end = min(self.lives[gradient].last, self._last_step(end[0]))
            self.plan.live(name, life.first, end)
        return standing_in

    def _home(self, life: _Life) -> At | None:
        """The last use, or the step of the part that made it which comes next, or its last one.

        None when the part that made it does not run again.
        """
        home = self.segments[life.first[0]].part
        if self.segments[life.last[0]].part == home:
            return life.last
        ours = [i for i, segment in enumerate(self.segments) if segment.part == home]
        later = [(i, 0) for i in ours if i > life.last[0]]
        if later:
            return later[0]
        return self._last_step(ours[-1]) if self.segments[ours[-1]].phase != FORWARD else None

    def _adopt(self, name: str, life: _Life) -> None:
        """The part that needs it last owns it, when the one that made it has no backward."""
        self.plan.live(name, life.first, self._last_step(life.first[0]))
        user = self.segments[life.last[0]].part
        ours = (i for i, segment in enumerate(self.segments) if segment.part == user)
        self.plan.live(name, (next(ours), 0), life.last)

    def _entering_gradient(self, name: str, segment: int) -> str | None:
        """The gradient of a tensor that comes into ``segment`` as the tensor itself goes."""
        gradient = self.gradient_of.get(name)
        if gradient is None or self.segments[segment].phase != BACKWARD:
            return None
        if any(name in step.touches for step in self.segments[segment].steps):
            return None
        life = self.lives[gradient]
        from_outside = gradient == self.gradient_of.get(self.edges.y) and life.first == (segment, 0)
        return gradient if from_outside or life.first[0] < segment <= life.last[0] else None

    def _hand_over(self, name: str, life: _Life, standing_in: set[tuple[str, int]]) -> None:
        for segment in range(life.first[0], life.last[0] + 1):
            if (name, segment) not in standing_in:
                start = max(life.first, (segment, 0))
                self.plan.live(name, start, min(life.last, self._last_step(segment)))
