"""Memory snapshots: plain, consistent forwards and backwards, and read back by the replay."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import read_recording, scenario_of

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.cli import main
from fsdpsim.replay import replay
from fsdpsim.scenario import Scenario, load
from fsdpsim.simulate import simulate
from fsdpsim.snapshot import configuration, encode, recorded_settings, snapshot, write_snapshot

ROOT = Path(__file__).parents[1]
RECORDINGS = sorted((Path(__file__).parent / "data" / "golden").glob("*.json"))
TEXTBOOK = ROOT / "scenarios" / "textbook_13b_64gpu.toml"
LLAMA = ROOT / "scenarios" / "llama3_8b_8xh100.toml"
SMALL = (
    'model.hf_config="models/llama3.2_1b.json"',
    "model.num_hidden_layers=2",
    "training.seq_len=2048",
    "training.iterations=2",
)
PLAIN = (dict, list, tuple, str, int, float, bool)

Snapshot = dict[str, Any]


def small(*overrides: str) -> Scenario:
    return load(LLAMA, [*SMALL, *overrides])


def recorded(path: Path, **allocator: Any) -> Scenario:
    scenario = scenario_of(read_recording(path))
    return scenario.model_copy(update={"allocator": AllocatorSettings(**allocator)})


def named(name: str) -> Path:
    return next(path for path in RECORDINGS if path.stem.startswith(name))


# ---- an independent reader


class Memory:
    """Segments and blocks, changed by events forwards (``do``) or backwards (``undo``).

    Blocks are address -> (bytes asked for, state); segments are merged ranges of mapped bytes.
    """

    def __init__(self) -> None:
        self.mapped: list[tuple[int, int]] = []
        self.blocks: dict[int, tuple[int, str]] = {}

    @classmethod
    def final(cls, data: Snapshot) -> Memory:
        memory = cls()
        for segment in data["segments"]:
            memory.map(segment["address"], segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    memory.add(block["address"], block["requested_size"], block["state"])
        return memory

    def do(self, event: dict[str, Any]) -> None:
        action = event["action"]
        address, size = event.get("addr", 0), event["size"]
        if action in ("segment_alloc", "segment_map"):
            self.map(address, size)
        elif action in ("segment_free", "segment_unmap"):
            self.unmap(address, size)
        elif action == "alloc":
            self.add(address, size, "active_allocated")
        elif action == "free_requested":
            self.change(address, size, "active_allocated", "active_pending_free")
        elif action == "free_completed":
            self.remove(address, size, "active_pending_free")
        else:
            assert action == "oom"

    def undo(self, event: dict[str, Any]) -> None:
        action = event["action"]
        address, size = event.get("addr", 0), event["size"]
        if action in ("segment_alloc", "segment_map"):
            self.unmap(address, size)
        elif action in ("segment_free", "segment_unmap"):
            self.map(address, size)
        elif action == "alloc":
            self.remove(address, size, "active_allocated")
        elif action == "free_requested":
            self.change(address, size, "active_pending_free", "active_allocated")
        elif action == "free_completed":
            self.add(address, size, "active_pending_free")
        else:
            assert action == "oom"

    def map(self, address: int, size: int) -> None:
        assert all(address + size <= a or b <= address for a, b in self.mapped), "mapped twice"
        self.mapped.append((address, address + size))
        self.mapped.sort()
        merged: list[tuple[int, int]] = []
        for start, end in self.mapped:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self.mapped = merged

    def unmap(self, address: int, size: int) -> None:
        end = address + size
        inside = [(a, b) for a, b in self.mapped if a <= address and end <= b]
        assert len(inside) == 1, "not mapped"
        assert not any(a < end and address < a + n for a, (n, _) in self.blocks.items()), "in use"
        self.mapped.remove(inside[0])
        rest = [(inside[0][0], address), (end, inside[0][1])]
        self.mapped += [(a, b) for a, b in rest if a < b]
        self.mapped.sort()

    def add(self, address: int, size: int, state: str) -> None:
        end = address + size
        assert any(a <= address and end <= b for a, b in self.mapped), "outside all segments"
        for other, (nbytes, _) in self.blocks.items():
            assert end <= other or other + nbytes <= address, "overlaps another block"
        self.blocks[address] = (size, state)

    def change(self, address: int, size: int, before: str, after: str) -> None:
        assert self.blocks.get(address) == (size, before)
        self.blocks[address] = (size, after)

    def remove(self, address: int, size: int, state: str) -> None:
        assert self.blocks.pop(address) == (size, state)


def check(data: Snapshot) -> None:
    (trace,) = data["device_traces"]
    final = Memory.final(data)
    forwards = Memory()
    for event in trace:
        forwards.do(event)
    assert (forwards.mapped, forwards.blocks) == (final.mapped, final.blocks)
    for event in reversed(trace):
        final.undo(event)
    assert (final.mapped, final.blocks) == ([], {})
    _check_segments(data["segments"])
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)


def _check_segments(segments: list[dict[str, Any]]) -> None:
    assert [s["address"] for s in segments] == sorted(s["address"] for s in segments)
    for segment in segments:
        assert segment["device"] == 0
        assert segment["address"] + segment["total_size"] < 2**53
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        in_use = [b for b in segment["blocks"] if b["state"] != "inactive"]
        live = [b for b in in_use if b["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(b["size"] for b in live)
        assert segment["active_size"] == sum(b["size"] for b in in_use)
        assert segment["requested_size"] == sum(b["requested_size"] for b in in_use)
        assert all(b["frames"] for b in in_use)


def values(data: Any) -> Iterator[Any]:
    yield data
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from values(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from values(value)


# ---- consistency


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(RECORDINGS), expandable=st.booleans())
def test_recorded_runs_are_consistent(path: Path, expandable: bool) -> None:
    check(snapshot(recorded(path, expandable_segments=expandable)))


@pytest.mark.parametrize("memory", ["80 GB", "7 GB", "5 GB"])
@pytest.mark.parametrize("expandable", ["false", "true"])
def test_a_model_is_consistent(memory: str, expandable: str) -> None:
    """Plenty of memory, retries, and out of memory."""
    data = snapshot(
        small(f'hardware.memory="{memory}"', f"allocator.expandable_segments={expandable}")
    )
    check(data)
    actions = {event["action"] for event in data["device_traces"][0]}
    if expandable == "false":
        assert ("segment_free" in actions) is (memory != "80 GB")
        assert ("oom" in actions) is (memory == "5 GB")
    else:
        assert {"segment_map"} <= actions and "segment_alloc" not in actions


def test_frees_that_wait_are_pending_at_the_end() -> None:
    """FSDP1 frees the last gradient with record_stream, and no allocation follows that polls."""
    data = snapshot(recorded(named("fsdp1__equal4__full_bwdpre__ws2")))
    states = {b["state"] for s in data["segments"] for b in s["blocks"]}
    assert "active_pending_free" in states


def test_the_events_reach_the_simulated_peak() -> None:
    scenario = small()
    requested = most = 0
    for event in snapshot(scenario)["device_traces"][0]:
        change = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        requested += change * event["size"]
        most = max(most, requested)
    assert most == max(s.requested for s in simulate(scenario).memory.samples) > 0


def test_addresses_stay_small_on_a_device_without_limit() -> None:
    data = snapshot(recorded(named("fsdp2__uneven6__hsdp__"), expandable_segments=True))
    assert max(s["address"] + s["total_size"] for s in data["segments"]) < 2**53


def _drop(data: Snapshot, action: str) -> None:
    trace = data["device_traces"][0]
    trace.remove(next(event for event in trace if event["action"] == action))


def _move(data: Snapshot) -> None:
    events = [e for e in data["device_traces"][0] if e["action"] == "alloc"]
    events[-1]["addr"] += 512


def _forget(data: Snapshot) -> None:
    data["segments"][0]["blocks"][0]["state"] = "inactive"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: _drop(data, "segment_alloc"),
        lambda data: _drop(data, "free_requested"),
        lambda data: _drop(data, "free_completed"),
        _move,
        _forget,
    ],
)
def test_the_reader_finds_damage(damage: Callable[[Snapshot], None]) -> None:
    data = snapshot(small())
    damage(data)
    with pytest.raises((AssertionError, KeyError)):
        check(data)


# ---- what viewers need


def test_only_plain_types() -> None:
    data = snapshot(small('hardware.memory="5 GB"'))
    assert {type(value) for value in values(data)} <= set(PLAIN)


def test_protocol_4() -> None:
    packed = encode(snapshot(recorded(RECORDINGS[0])))
    opcode, protocol, _ = next(pickletools.genops(packed))
    assert (opcode.name, protocol) == ("PROTO", 4)
    names = {opcode.name for opcode, _, _ in pickletools.genops(packed)}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ"}


def test_out_of_memory_says_what_the_device_had() -> None:
    data = snapshot(small('hardware.memory="5 GB"'))
    event = data["device_traces"][0][-1]
    assert event["action"] == "oom"
    assert "addr" not in event
    assert 0 <= event["device_free"] < event["size"]


def test_frames_say_what_a_block_holds() -> None:
    data = snapshot(small())
    gather = next(
        event
        for event in data["device_traces"][0]
        if event["action"] == "alloc" and "all_gather_output" in event["frames"][0]["name"]
    )
    assert gather["frames"] == [
        {
            "filename": "fsdpsim/all_gather",
            "line": 0,
            "name": "all_gather_output of root (all_gather)",
        },
        {"filename": "fsdpsim/forward", "line": 0, "name": "forward of root"},
        {"filename": "fsdpsim/training", "line": 0, "name": "iteration 0"},
    ]


def test_a_free_has_the_frames_of_its_allocation() -> None:
    live: dict[int, Any] = {}
    for event in snapshot(small())["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["frames"]
        elif event["action"].startswith("free"):
            assert event["frames"] == live[event["addr"]]


def test_streams_are_numbers_and_compute_is_the_default_stream() -> None:
    data = snapshot(small())
    named_streams = {
        event["frames"][0]["name"].split(" ")[0]: event["stream"]
        for event in data["device_traces"][0]
        if event["action"] == "alloc"
    }
    assert named_streams["self_attn.q_proj"] == 0
    assert named_streams["all_gather_output"] == 20
    assert named_streams["reduce_scatter_output"] == 28


def test_iterations_are_annotated() -> None:
    scenario = small()
    marks = [(a["name"], a["stage"]) for a in snapshot(scenario)["external_annotations"]]
    assert marks == [
        ("ProfilerStep#0", "START"),
        ("ProfilerStep#0", "END"),
        ("ProfilerStep#1", "START"),
        ("ProfilerStep#1", "END"),
    ]


# ---- settings


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expandable_segments": True},
        {"max_split_size_mb": 128, "max_non_split_rounding_mb": 256},
        {"roundup_power2_divisions": "[256:1,512:2,1024:4,>:8]"},
        {"garbage_collection_threshold": 0.8, "per_process_memory_fraction": 0.9},
        {"large_segment_size_mb": 32, "throw_on_cudamalloc_oom": True},
    ],
)
def test_settings_are_read_back(options: dict[str, Any]) -> None:
    chosen = AllocatorSettings(**options)
    assert AllocatorSettings.from_snapshot(recorded_settings(chosen)) == chosen
    assert AllocatorSettings.parse_conf(configuration(chosen)) == chosen


def test_default_settings_need_no_configuration() -> None:
    assert configuration(AllocatorSettings()) == ""


# ---- reading back


@pytest.mark.parametrize("expandable", ["false", "true"])
def test_the_replay_repeats_every_decision(tmp_path: Path, expandable: str) -> None:
    path = tmp_path / "snap.pickle"
    write_snapshot(small(f"allocator.expandable_segments={expandable}"), path)
    (device,) = replay(path, total_memory=80 * 10**9).devices
    assert device.mismatches == ()
    assert device.final_blocks_equal


def test_the_replay_repeats_recorded_runs() -> None:
    for path in RECORDINGS[::30]:
        assert replay(snapshot(recorded(path))).exact, path.stem


def test_the_same_scenario_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_snapshot(load(TEXTBOOK), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["snapshot", str(TEXTBOOK)]) == 0
    assert capsys.readouterr().out == "textbook_13b_64gpu.pickle\n"
    check(pickle.loads(Path("textbook_13b_64gpu.pickle").read_bytes()))
    assert main(["snapshot", str(TEXTBOOK), "-o", "other.pickle"]) == 0
    assert Path("other.pickle").read_bytes() == Path("textbook_13b_64gpu.pickle").read_bytes()


def test_command_names_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["snapshot", str(TEXTBOOK), "-o", str(tmp_path / "file" / "s.pickle")]) == 2
    message = capsys.readouterr().err
    assert "s.pickle: cannot be written" in message
    assert "Traceback" not in message
