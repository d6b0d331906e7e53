"""Sweeps on a real dask cluster: the same bytes as in one process, whoever dies."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdpsim.cli import main
from fsdpsim.resolved import as_toml
from fsdpsim.scenario import Scenario, load
from fsdpsim.sweeps import sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # dask's own, of which its versions have different ones
]

distributed = pytest.importorskip("distributed", reason="pip install 'fsdpsim[dask]'")

TABLES: dict[str, Any] = {
    "workload": {"units": 4, "parameters": 1000, "forward": 1.0, "all_gather": 1.5},
    "fsdp": {"runtime": "fsdp2"},
    "hardware": {"nodes": 2, "gpus_per_node": 2},
    "sweep": {
        "fsdp.sharding_factor": [1, 2, 3, 4],
        "training.iterations": {"first": 1, "last": 25, "step": 1},
    },
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load(TABLES)


@pytest.fixture(scope="module")
def serial(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serial")
    sweep(scenario, directory=directory)
    return directory


@pytest.fixture
def cluster() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None
        ) as cluster:
            yield cluster


def same(one: Path, other: Path) -> bool:
    names = ("results.jsonl", "results.csv", "sweep.json")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_cluster_gives_the_same_bytes(
    cluster: Any, scenario: Scenario, serial: Path, tmp_path: Path
) -> None:
    with distributed.Client(cluster) as client:
        sweep(scenario, client.get_executor(), directory=tmp_path)
    assert same(tmp_path, serial)


def test_a_worker_that_dies_loses_nothing(
    cluster: Any, scenario: Scenario, serial: Path, tmp_path: Path
) -> None:
    with distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        executor = client.get_executor()

        class KillsOne:
            """Kills a worker when half of the tasks are submitted."""

            tasks = 0

            def submit(self, fn: Any, *args: Any) -> Any:
                self.tasks += 1
                if self.tasks == 13:
                    os.kill(pids[0], signal.SIGKILL)
                return executor.submit(fn, *args)

        sweep(scenario, KillsOne(), directory=tmp_path)
        assert pids[0] not in client.run(os.getpid).values()
    assert same(tmp_path, serial)


def test_the_command_runs_on_an_address(cluster: Any, serial: Path, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(as_toml(TABLES))
    output = tmp_path / "out"
    address = cluster.scheduler_address
    assert main(["sweep", str(file), "--dask", address, "-o", str(output)]) == 0
    assert (output / "results.jsonl").read_bytes() == (serial / "results.jsonl").read_bytes()


def test_an_address_where_no_cluster_is_gives_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(as_toml(TABLES))
    assert main(["sweep", str(file), "--dask", "tcp://127.0.0.1:1"]) == 2
    assert "--dask tcp://127.0.0.1:1: cannot connect" in capsys.readouterr().err
