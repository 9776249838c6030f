"""The command line as a user meets it: exit status, one line per mistake, JSON for machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import command, told

pytestmark = pytest.mark.processes
ROOT = Path.cwd()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        Tally,
        sites={"cloud": 1, "edge": 1},
        partitions=4,
        data_dir=tmp_path_factory.mktemp("cli"),
        deploy_to=("cloud",),
        checkpoint_interval_s=0,
    ) as cluster:
        yield cluster


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **environment}
    command = [sys.executable, "-m", "stateflow", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def at(local: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(*arguments, "--controller", local.address)


def owners(local: LocalCluster) -> list[str]:
    return next(list(o.owners) for o in local.cluster.status().operators if o.name == "Tally")


def refused(done: subprocess.CompletedProcess[str], code: str, said: str = "") -> None:
    """Checks for exit status 1 and one line on stderr, ``code: what happened: what to do next``."""
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]  # processes log what they made
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{code}: ")
    assert said in lines[0]


# -- what works ---------------------------------------------------------------------------------------------


def test_status(local: LocalCluster) -> None:
    done = at(local, "status")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("cloud-0", "edge-0", "alive", "Tally"):
        assert word in done.stdout
    done = at(local, "status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert {r["name"]: r["alive"] for r in status["replicas"]} == {"cloud-0": True, "edge-0": True}
    assert [o["partitions"] for o in status["operators"]] == [4]


def test_the_tab_key_asks_the_cluster(local: LocalCluster) -> None:
    words = f"stateflow migrate --controller {local.address} Tally 0 --to e"
    asked = {"_STATEFLOW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = Path(sys.executable).with_name("stateflow")  # shells ask by its name
    env = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["edge", "edge-0"]


def test_migrate(local: LocalCluster) -> None:
    done = at(local, "migrate", "Tally", "0", "2-3", "--to", "edge", "--max-pause", "5s", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["state"] == "COMPLETED"
    assert [(m["partition"], m["state"], m["target"]) for m in report["moves"]] == [
        (p, "COMPLETED", "edge-0") for p in (0, 2, 3)
    ]
    assert owners(local) == ["edge-0", "cloud-0", "edge-0", "edge-0"]
    done = at(local, "migrate", "Tally", "all", "--to", "cloud-0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "COMPLETED" in done.stdout
    assert owners(local) == ["cloud-0"] * 4
    done = at(local, "migrate", "Tally", "all", "--to", "cloud")
    assert done.returncode == 1
    assert "already_there: " in done.stderr


def test_what_is_where_and_what_moved(local: LocalCluster) -> None:
    there = ("--controller", local.address)
    nodes = told("nodes", *there)["nodes"]
    assert [(n["name"], n["alive"], n["partitions"]) for n in nodes] == [("cloud-0", True, 4), ("edge-0", True, 0)]
    parts = told("partitions", "Tally", *there)["partitions"]
    assert [(p["partition"], p["owner"], p["standbys"]) for p in parts] == [(n, "cloud-0", []) for n in range(4)]
    (balanced,) = told("rebalance", *there)["reconfigurations"]
    assert sorted(owners(local)) == ["cloud-0", "cloud-0", "edge-0", "edge-0"]
    told("drain", "edge-0", *there)
    assert owners(local) == ["cloud-0"] * 4
    assert "already_there: " in command("drain", "edge-0", *there).stderr
    listed = told("reconfig", "list", *there)["reconfigurations"]
    assert [(r["kind"], r["state"]) for r in listed[:2]] == [("drain", "COMPLETED"), ("rebalance", "COMPLETED")]
    info = told("reconfig", "info", balanced["id"], *there)
    assert (info["moves"], info["completed"], info["failed"]) == (2, 2, 0)
    assert told("reconfig", "details", balanced["id"], *there)["id"] == balanced["id"]
    slowest = told("reconfig", "slowest", "2", *there)["moves"]
    assert len(slowest) == 2
    assert slowest[0]["pause_ms"] >= slowest[1]["pause_ms"] > 0
    for control in ("pause", "resume", "retry"):
        refused = command("reconfig", control, balanced["id"], *there)
        assert (refused.exit_code, refused.stderr.partition(":")[0]) == (1, "move_conflict")
    assert "move_unknown: " in command("reconfig", "info", "nothing", *there).stderr
    for shown in ("nodes", "partitions"):
        assert "cloud-0" in command(shown, *there).stdout
    assert balanced["id"] in command("reconfig", "list", *there).stdout


def test_deploy(local: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text(
        "from stateflow import Operator\n"
        "class Mine(Operator):\n"
        "    key = 'k'\n"
        "    output = 'k string'\n"
        "    def process(self, row, ctx):\n"
        "        yield (row.k,)\n"
    )
    arguments = ("deploy", "my_ops.py:Mine", "--partitions", "2", "--controller", local.address, "--json")
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["partitions"] == 2
    assert run(*arguments, cwd=tmp_path).returncode == 0, "twice is no error"
    assert local.stream("Mine", "s").send([{"k": "a"}]) == [{"k": "a"}]


# -- mistakes -----------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "site": (("migrate", "Tally", "0", "--to", "moon"), "unknown_site", "'moon'"),
    "operator": (("migrate", "Tully", "0", "--to", "edge"), "operator_not_deployed", "'Tully'"),
    "partition": (("migrate", "Tally", "4", "--to", "edge"), "unknown_partition", "0 to 3"),
    "other partitions": (
        ("deploy", "tests.integration.operators:Tally", "--partitions", "8"),
        "already_deployed",
        "another name",
    ),
    "no partitions": (
        ("deploy", "tests.integration.operators:Blob", "--partitions", "0"),
        "invalid_argument",
        "128 is the default",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(local: LocalCluster, what: str) -> None:
    arguments, code, said = MISTAKES[what]
    refused(at(local, *arguments), code, said)
    assert owners(local) == ["cloud-0"] * 4


def test_a_controller_that_is_started_late_is_waited_for(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "STATEFLOW_CLIENT_CONNECT_TIMEOUT_S": "60"}
    early = subprocess.Popen(
        [sys.executable, "-m", "stateflow", "status", "--controller", address],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert early.stderr is not None
    assert early.stderr.readline() == f"waiting for the controller at {address}\n"
    controller = subprocess.Popen(
        [sys.executable, "-m", "stateflow", "controller", "--listen", address, "--stop-with-parent"],
        env=env | {"STATEFLOW_LEDGER": f"sqlite:///{tmp_path}/ledger.db"},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _, errors = early.communicate(timeout=600)
        assert early.returncode == 0, errors
    finally:
        controller.communicate(timeout=600)


def test_processes_that_cannot_start(local: LocalCluster, tmp_path: Path) -> None:
    ledger, file = f"sqlite:///{tmp_path / 'l.db'}", tmp_path / "file"
    file.write_text("")
    refused(run("controller", "--listen", local.address, "--ledger", ledger), "port_in_use", local.address)
    refused(run("controller", "--listen", "nonsense", "--ledger", ledger), "invalid_argument", "'nonsense'")
    done = run("controller", "--listen", "127.0.0.1:0", "--ledger", "postgresql://me:hunter2@127.0.0.1:1/db")
    refused(done, "invalid_argument", "postgresql://…")
    assert "hunter2" not in done.stderr + done.stdout
    refused(run("replica", "--site", "x", "--data-dir", str(file)), "invalid_argument", "data directory")
    locked = str(local.data_dir / "edge-0")
    refused(run("replica", "--site", "edge", "--name", "edge-0", "--data-dir", locked), "data_dir_locked", locked)
