"""Stream waits of real runs, replayed with durations, give the simulated start of every op."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from recordings import Recording, read_recording, scenario_of

from fsdpsim.simulate import simulate

SYNC = Path(__file__).parent / "data" / "golden_sync"
SHOWN = ("forward", "backward", "recompute", "all_gather", "reduce_scatter", "all_reduce")

Span = tuple[str, str, float, float]


class Replay:
    """Times of the recorded collectives and compute, from the recorded waits alone.

    Streams and communicators run their work in the order in which it was issued; the CPU stops at
    recorded ``cpu_wait_event``s. Copies, which the recordings do not show, take no time.
    """

    def __init__(self, recording: Recording, seconds: dict[tuple[str, str], float]) -> None:
        self.recording = recording
        self.seconds = seconds
        self.host = 0.0
        self.streams: dict[str, float] = {}
        self.communicators: dict[Any, float] = {}
        self.events: dict[tuple[int, str], float] = {}
        self.spans: list[Span] = []
        self.iteration = 0

    def run(self) -> list[Span]:
        for iteration, events in enumerate(self.recording["iterations"]):
            self.iteration = iteration
            for event in events:
                handler = getattr(self, f"on_{event['event']}", None)
                if handler is not None:
                    handler(event)
        return self.spans

    def _launch(self, kind: str, unit: str, stream: str, communicator: Any = None) -> None:
        start = max(self.host, self.streams.get(stream, 0.0))
        if communicator is not None:
            start = max(start, self.communicators.get(communicator, 0.0))
        end = start + self.seconds[kind, unit]
        self.streams[stream] = end
        if communicator is not None:
            self.communicators[communicator] = end
        self.spans.append((kind, unit, start, end))

    def _collective(self, event: dict[str, Any]) -> None:
        smaller = self.recording["settings"].get("reshard_after_forward")
        private = event["unit"] if len(event["group"]) == smaller else ""
        communicator = (tuple(event["group"]), private)
        self._launch(event["event"], event["unit"], event["stream"], communicator)

    on_all_gather = on_reduce_scatter = on_all_reduce = _collective

    def on_forward_begin(self, event: dict[str, Any]) -> None:
        kind = "recompute" if event.get("recompute") else "forward"
        self._launch(kind, event["unit"], "default")

    def on_backward_end(self, event: dict[str, Any]) -> None:
        self._launch("backward", event["unit"], "default")

    def on_event_record(self, event: dict[str, Any]) -> None:
        done = max(self.host, self.streams.get(event["stream"], 0.0))
        self.events[self.iteration, event["label"]] = done

    def _time_of(self, label: str) -> float:
        age = label.count("prev.")
        return self.events[self.iteration - age, label.rpartition(".")[2]]

    def _wait(self, stream: str, until: float) -> None:
        self.streams[stream] = max(self.streams.get(stream, 0.0), until)

    def on_stream_wait_event(self, event: dict[str, Any]) -> None:
        self._wait(event["stream"], self._time_of(event["label"]))

    def on_stream_wait_stream(self, event: dict[str, Any]) -> None:
        self._wait(event["stream"], self.streams.get(event["waits_for"], 0.0))

    def on_cpu_wait_event(self, event: dict[str, Any]) -> None:
        self.host = max(self.host, self._time_of(event["label"]))


def _seconds(recording: Recording, seed: int) -> dict[tuple[str, str], float]:
    """Random durations per kind and unit; multiples of 1/16 s, so that sums are exact."""
    rng = random.Random(seed)
    units = [unit["name"] for unit in recording["units"]]
    found = {(kind, unit): rng.randint(1, 64) / 16 for kind in SHOWN for unit in units}
    return found | {("recompute", unit): found["forward", unit] for unit in units}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("path", sorted(SYNC.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_waits_give_the_simulated_times(path: Path, seed: int) -> None:
    recording = read_recording(path)
    seconds = _seconds(recording, seed)
    result = simulate(scenario_of(recording, seconds))
    simulated = [(op.kind, op.unit, op.start, op.end) for op in result.ops if op.kind in SHOWN]
    assert simulated == Replay(recording, seconds).run()
