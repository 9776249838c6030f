"""A controller and a replica of two workers, started with one file; only a flag overrules what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.client import Cluster
from stateflow.local.process import Process
from stateflow.settings import CONFIG, base
from tests.integration.operators import Tally
from tests.integration.support import Model, command, eventually, rows_of

pytestmark = pytest.mark.processes

FILE = """
[log]
format = "json"

[controller]
listen = "127.0.0.1:0"
name = "of-the-file"
heartbeat_interval_s = 0.2

[ledger]
url = "sqlite:///{folder}/ledger.db"

[replica]
site = "edge"
name = "of-the-file"
data_dir = "{folder}/data"
workers = 2
acknowledge = "fsync"
heartbeat_interval_s = 0.2

[checkpoint]
store = "{folder}/checkpoints"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CONFIG, "")
    monkeypatch.setenv("STATEFLOW_REPLICA_WERKERS", "7")
    written = tmp_path / "fleet.toml"
    written.write_text(FILE.format(folder=tmp_path))
    yield written
    base._read.cache_clear()


def test_one_file_begins_a_cluster(file: Path) -> None:
    def start(name: str, *flags: str) -> Process:
        words = [name, "--config", str(file), *flags]
        started = Process(name, words, file.with_name(f"{name}.log"), [str(Path.cwd()), *filter(None, sys.path)])
        started.start()
        started.wait_ready()
        return started

    controller = start("controller")
    replica = start("replica", "--controller", controller.address, "--name", "of-the-flag")
    try:
        with file.open("a") as more:
            more.write(f'[connection]\ncontroller = "{controller.address}"\n')
        said = eventually(lambda: command("status", "--config", str(file), "--workers").stdout, "a status")
        assert "of-the-flag" in said

        cluster = Cluster(controller.address)
        eventually(lambda: len([each for each in cluster.status().replicas if each.alive]) == 2, "two workers")
        assert {each.site for each in cluster.status().replicas} == {"edge"}
        cluster.deploy(Tally, 4)
        model, rows = Model(), rows_of("k", 0)
        with cluster.stream("Tally", source="s") as stream:
            stream.send(rows)
        model.apply(rows)
        model.check(cluster)
        cluster.checkpoint("Tally")
        assert any((file.parent / "checkpoints").iterdir())
    finally:
        replica.stop()
        controller.stop()
    assert (file.parent / "ledger.db").is_file()
    for each in ("controller", "replica"):
        lines = file.with_name(f"{each}.log").read_text().splitlines()
        assert all(line.startswith("{") for line in lines)
        warned = [line for line in lines if "nothing reads STATEFLOW_REPLICA_WERKERS" in line]
        assert len(warned) == 1, "once, and not by each worker"
        assert "did you mean STATEFLOW_REPLICA_WORKERS?" in warned[0]
