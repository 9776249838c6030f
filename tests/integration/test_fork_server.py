"""Processes of the fork server: they behave as started ones do, however they end and for any caller."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.agent.processes import FILE_BYTES
from stateflow.local import process as fork_servers
from stateflow.local.process import Forked, ForkServer, fork_server
from stateflow.testing import LocalCluster
from tests.integration.support import eventually

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")]


@pytest.fixture(scope="module")
def started() -> Iterator[ForkServer]:
    mine = ForkServer()
    yield mine
    mine.close()


def controller(fork_server: ForkServer, folder: Path) -> Forked:
    arguments = ["controller", "--listen", "127.0.0.1:0", "--ledger", f"sqlite:///{folder / 'l.db'}", "--json"]
    with (folder / "log").open("a") as log:
        child = fork_server.start("controller", [*arguments, "--stop-with-parent"], dict(os.environ), log)
    assert child.stdout is not None
    assert "address" in child.stdout.readline()
    return child


def close(child: Forked) -> None:
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)], ids=str)
def test_its_end_is_told(started: ForkServer, tmp_path: Path, number: int, code: int) -> None:
    child = controller(started, tmp_path)
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    os.kill(child.pid, number)
    assert child.wait() == code
    assert child.poll() == code
    assert not is_there(child.pid), "it is no zombie"
    close(child)


def test_the_log_of_a_running_process_is_rotated(started: ForkServer, tmp_path: Path) -> None:
    child = controller(started, tmp_path)
    with (tmp_path / "log").open("ab") as log:
        log.write(b"x" * FILE_BYTES + b"\n")
    eventually((tmp_path / "log.1").exists, "the full log was kept")
    eventually(lambda: (tmp_path / "log").stat().st_size == 0, "the process goes on in an empty one")
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 0
    close(child)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Opens so many files that new ones have numbers which ``select`` does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4_096, limits[1])), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_files")
def test_in_a_process_with_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "_fork_server", None)  # the test starts its own
    with LocalCluster(sites={"edge": 1}, data_dir=tmp_path) as cluster:
        assert cluster.address
    fork_server().close()


def test_a_stopped_process_has_not_ended(started: ForkServer, tmp_path: Path) -> None:
    child = controller(started, tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdin is not None
    child.stdin.close()  # as when its parent dies
    assert child.wait(20) == 0
    close(child)


def test_a_mistake_is_told_as_by_any_command(started: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        child = started.start("r", ["replica", "--site", "a b", "--data-dir", "d", "--json"], dict(os.environ), log)
    assert child.stdout is not None
    assert "invalid_argument" in child.stdout.read()
    assert child.wait() == 1
    close(child)


def test_several_threads_may_wait_for_it(started: ForkServer, tmp_path: Path) -> None:
    child, codes = controller(started, tmp_path), []
    threads = [threading.Thread(target=lambda: codes.append(child.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    os.kill(child.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert codes == [-signal.SIGKILL] * 8
    close(child)


def test_its_settings_are_those_of_the_environment_it_was_given(started: ForkServer, tmp_path: Path) -> None:
    arguments = ["replica", "--site", "a", "--data-dir", str(tmp_path / "d"), "--json"]
    with (tmp_path / "log").open("a") as log:
        child = started.start("r", arguments, os.environ | {"STATEFLOW_REPLICA_CHUNK_BYTES": "17"}, log)
    assert child.stdout is not None
    said = child.stdout.read() + (tmp_path / "log").read_text()
    assert "chunk_bytes" in said.lower()
    assert "17" in said
    assert child.wait() != 0
    close(child)


def test_its_directory_and_name_are_the_callers(
    started: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = controller(started, tmp_path)
    entries = Path(f"/proc/{child.pid}/cwd").resolve(), Path(f"/proc/{child.pid}/comm").read_text()
    assert entries == (tmp_path, "sf controller\n")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    close(child)


def test_another_one_where_the_environment_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "_fork_server", None)
    first = fork_server()
    monkeypatch.setenv("STATEFLOW_REPLICA_CHUNK_BYTES", "4096")
    assert fork_server() is first, "a process reads its settings when it starts to serve"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    second = fork_server()
    assert second is not first
    second.close()


def test_when_it_is_killed_nothing_is_left_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_servers, "_fork_server", None)
    first = fork_server()
    child = controller(first, tmp_path)
    first._process.kill()
    first._process.wait()
    assert child.wait(10) == -signal.SIGKILL
    eventually(lambda: not is_there(child.pid), "it was killed")
    close(child)
    again = controller(fork_server(), tmp_path)
    os.kill(again.pid, signal.SIGKILL)
    again.wait()
    close(again)
    fork_server().close()


UNGUARDED = """
import sys, time
from stateflow.testing import LocalCluster
cluster = LocalCluster(sites={"a": 1}).start()
from stateflow.local.process import fork_server
print(fork_server()._process.pid, *(process.pid for process in cluster.processes.values()), flush=True)
time.sleep(600)
"""


def test_a_script_without_a_guarded_main_takes_everything_along_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    here = os.environ | {"TMPDIR": str(tmp_path)}  # a killed script leaves its files
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=here) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_there(pid) for pid in pids)
        parent.kill()
    eventually(lambda: not any(is_there(pid) for pid in pids), "all have ended")
