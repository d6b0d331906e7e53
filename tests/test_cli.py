"""The command line: exit status, one message for each mistake, and nothing left half-done."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fsdpsim import __version__
from fsdpsim.cli import COMMANDS, main
from fsdpsim.resolved import as_toml
from fsdpsim.scenario import Scenario, load

SCENARIOS = Path(__file__).parents[1] / "scenarios"
FILES = sorted(SCENARIOS.glob("*.toml"))
PREFETCH = SCENARIOS / "textbook_backward_prefetch.toml"
LLAMA = SCENARIOS / "llama3_8b_8xh100.toml"


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message of a command that ends with exit status 2 and prints nothing else."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fsdpsim: ")
    assert "Traceback" not in err
    return err.removeprefix("fsdpsim: ").rstrip("\n")


def python(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


RUN_MAIN = "import sys; from fsdpsim.cli import main; sys.exit(main(sys.argv[1:]))"


# ---- usage


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: fsdpsim {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["rum"], "invalid choice: 'rum'"),
        (["run"], "the following arguments are required: FILE"),
        (["run", "a.toml", "--jason"], "unrecognized arguments: --jason"),
        (["order", "a.toml", "--iteration", "last"], "invalid int value: 'last'"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert "--help)" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdpsim {__version__}\n"


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "fsdpsim", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == (
        f"fsdpsim {__version__}\n"
    )


# ---- run, check, order


def test_run_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(PREFETCH)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "4 units, overlap and backward prefetch",
        "step time 27 s",
        "compute time 24 s (88.9% of the step)",
        "exposed communication 3 s",
        "host blocked: rate_limiter 17.5 s",
        "unsharded units at once 2",
        "all_gather 7 x, 10.5 s, 1.5 s exposed",
        "reduce_scatter 4 x, 6 s, 1.5 s exposed",
    ]


KEYS = {
    "scenario",
    "step_time_s",
    "iteration_times_s",
    "compute_time_s",
    "exposed_communication_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "num_alloc_retries",
    "num_ooms",
    "oom",
    "max_unsharded_units",
    "collectives",
    "host_blocked_s",
}


def test_run_json_is_one_object_for_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(PREFETCH), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() >= KEYS
    assert figures["scenario"] == "textbook_backward_prefetch"
    assert figures["step_time_s"] == 27.0
    assert figures["iteration_times_s"] == [27.0]
    gathers = {"count": 7, "bytes_sent_per_rank": 0, "time_s": 10.5, "exposed_s": 1.5}
    assert figures["collectives"]["all_gather"].items() >= gathers.items()
    assert figures["host_blocked_s"] == {"rate_limiter": 17.5}


def test_run_json_is_a_list_for_several_files(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(SCENARIOS / f"textbook_{name}.toml") for name in ("no_overlap", "overlap")]
    assert main(["run", *files, "--json", "--set", "workload.backward=2 s"]) == 0
    times = [figures["step_time_s"] for figures in json.loads(capsys.readouterr().out)]
    assert times == [32.5, 28.0]


def test_same_scenario_same_bytes() -> None:
    """Also with another order of hashes."""
    runs = [
        python(RUN_MAIN, "run", PREFETCH, "--json", env={"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout != ""


def test_a_predicted_out_of_memory_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(LLAMA), "--json", "--set", "hardware.memory=30 GiB"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["step_time_s"], figures["num_ooms"]) == (None, 1)
    assert figures["oom"]["what"]
    assert figures["oom"]["when_s"] > 0
    assert main(["run", str(LLAMA), "--set", "hardware.memory=30 GiB"]) == 0
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_check_prints_what_it_can_read_back(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# {path}: ok\n")
    (tmp_path / "resolved.toml").write_text(text, encoding="utf-8")
    assert main(["check", str(tmp_path / "resolved.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tomllib.loads(text)


def test_check_names_keys_that_have_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    """TOML has no word for them: ``offload_policy`` would not be found otherwise."""
    assert main(["check", str(LLAMA)]) == 0
    text = capsys.readouterr().out
    tables = re.split(r"\n\[", text)
    (fsdp,) = [table for table in tables if table.startswith("fsdp]")]
    assert "# not set: all_gather_dtype, offload_policy" in fsdp
    assert "iterations (here 3)" in text
    for table in Scenario.model_fields:
        fields = getattr(type(getattr(load(LLAMA), table)), "model_fields", {})
        assert all(re.search(rf"\b{key}\b", text) for key in fields)


def test_order_of_an_iteration_that_is_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "order", PREFETCH, "--iteration", 2)
    assert message == "--iteration 2: the scenario has iterations 1 to 1"


# ---- bad input


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "run", "absent.toml") == (
        "absent.toml: cannot be read: No such file or directory"
    )


def test_faults_of_several_files_are_reported_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, key in (("a", "units"), ("b", "tokens")):
        table = {"units": 2, "forward": "1 s", key: 0}
        text = as_toml({"workload": table, "fsdp": {"runtime": "textbook"}})
        (tmp_path / f"{name}.toml").write_text(text)
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    assert fails(capsys, "run", a, "absent.toml", PREFETCH, b) == (
        f"{a}: workload.units: 0 is not allowed; it must be at least 1\n"
        "absent.toml: cannot be read: No such file or directory\n"
        f"{b}: workload.tokens: 0 is not allowed; it must be at least 1"
    )


@pytest.mark.parametrize("command", ["run", "check", "order", "plot", "explain", "trace"])
def test_a_bad_override_is_one_message_of_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, command, PREFETCH, "--set", "fsdp.overlapp=true")
    assert message == f"{PREFETCH}: fsdp.overlapp: unknown key; did you mean overlap? (from --set)"


def test_more_memory_than_torch_can_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "run", LLAMA, "--set", "training.micro_batch_size=1_000_000_000_000")
    assert message == (
        f"{LLAMA}: training: with micro_batch_size x seq_len = 1000000000000 x 8192, "
        "model.embed_tokens of root in forward: "
        "tried to allocate 67108864000000000000 bytes: more than 1 EB"
    )


def test_given_activations_of_more_memory_than_torch_can_ask_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = fails(capsys, "run", PREFETCH, "--set", "workload.activations=2e18")
    assert message == (
        f"{PREFETCH}: saved of unit.0 in forward: "
        "tried to allocate 2000000000000000000 bytes: more than 1 EB"
    )


@pytest.mark.parametrize("command", ["run", "check"])
def test_units_that_a_model_does_not_have(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, command, LLAMA, "--set", 'fsdp.unshard_early=["layer.0"]')
    assert '"layer.0" is not a unit; did you mean layers.0?' in message


# ---- output that cannot be written


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("run", "inside"),
        ("plot", "inside.png"),
        ("report", "inside.html"),
        ("trace", "inside.json"),
        ("snapshot", "inside.pickle"),
    ],
)
def test_an_output_inside_a_file(
    command: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    output = tmp_path / "file" / name
    message = fails(capsys, command, PREFETCH, "-o", output)
    assert str(output) in message
    assert "Not a directory" in message
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_an_output_directory_that_is_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    message = fails(capsys, "run", PREFETCH, "-o", tmp_path / "file")
    assert message == f"{tmp_path / 'file'}: cannot be made a directory: File exists"
    assert (tmp_path / "file").read_text() == "precious"


def test_bad_input_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, "run", PREFETCH, "--set", "workload.units=0", "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- signals and pipes


def test_ctrl_c_ends_with_130_one_line_and_no_files(tmp_path: Path) -> None:
    code = (
        "import sys; from fsdpsim.cli import main; import fsdpsim.simulate;"
        "print('ready', flush=True); sys.exit(main(sys.argv[1:]))"
    )
    long = ["--set", "workload.units=2000", "--set", "training.iterations=10000"]
    command = [sys.executable, "-c", code, "run", str(PREFETCH), *long, "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "fsdpsim: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["check", *FILES], ["run", *FILES[-3:]]])
def test_a_reader_that_goes_away_is_no_fault(arguments: list[object]) -> None:
    """As in ``fsdpsim check ... | head -1``."""
    command = [sys.executable, "-c", RUN_MAIN, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("arguments", [["run"], ["run", "--json"], ["check"], ["order"]])
def test_a_full_disk_behind_the_output(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", RUN_MAIN, *arguments, str(PREFETCH)]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr == ("fsdpsim: the output cannot be written: No space left on device\n")


def test_a_title_that_the_output_cannot_encode() -> None:
    ended = python(RUN_MAIN, "run", PREFETCH, "--set", "title=α", env={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("\\u03b1")


def test_a_fault_of_ours_is_a_traceback_and_1() -> None:
    broken = "from fsdpsim.commands import run; run.run = lambda args: 1 / 0;"
    ended = python(broken + RUN_MAIN, "run", PREFETCH)
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


# ---- what is imported


@pytest.mark.parametrize("arguments", [["--help"], ["check", PREFETCH], ["check", LLAMA]])
def test_help_and_check_need_neither_numpy_nor_matplotlib(arguments: list[object]) -> None:
    code = (
        "import sys\n"
        "from fsdpsim.cli import main\n"
        "try:\n"
        "    assert main(sys.argv[1:]) == 0\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "print(sorted({'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)\n"
    )
    assert python(code, *arguments).stderr == "[]\n"


def test_the_function_is_not_hidden_by_the_module_of_its_name() -> None:
    code = (
        "import fsdpsim, fsdpsim.simulate\n"
        "from fsdpsim.simulate import build_workload\n"
        f"result = fsdpsim.simulate(fsdpsim.load({str(PREFETCH)!r}))\n"
        f"result = fsdpsim.simulate(fsdpsim.load({str(PREFETCH)!r}))\n"
        "print(result.step_time)\n"
    )
    assert python(code).stdout == "27.0\n"


def test_unknown_names_of_the_package() -> None:
    import fsdpsim

    with pytest.raises(AttributeError, match="'fsdpsim' has no attribute 'simulator'"):
        _ = fsdpsim.simulator
