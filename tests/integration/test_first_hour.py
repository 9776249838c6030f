"""The program that every user writes first: an operator and a cluster in one file, without a guard.

It works in a file, a notebook and an interpreter, and leaves no process behind. (With Spark: README, which
test_pages.py runs.)
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.local.process import readable
from tests.integration.support import eventually

pytestmark = pytest.mark.processes

PROGRAM = """\
from dataclasses import dataclass
from stateflow import Operator, state
from stateflow.testing import LocalCluster

UNITS = {}
for n in range(3):
    UNITS[n] = n * 10

@dataclass
class Seen:
    total: int = 0

def scaled(n):
    return UNITS[n]

class Count(Operator):
    key = "k"
    output = "k string, total long"
    seen = state.value(Seen, default=Seen())
    def process(self, row, ctx):
        self.seen.value = Seen(self.seen.value.total + scaled(row.v))
        yield row.k, self.seen.value.total

with LocalCluster(Count, partitions=2) as cluster:
    stream = cluster.stream("Count", source="me")
    print(stream.send([{"k": "a", "v": 1}, {"k": "a", "v": 2}]))
"""
SAYS = "[{'k': 'a', 'total': 10}, {'k': 'a', 'total': 30}]"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of a new user, with nothing set up. Its TMPDIR identifies the processes of this test."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("STATEFLOW_")}
    root = str(Path(__file__).parents[2])
    return found | {"PYTHONPATH": root, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "TERM": "dumb"}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("stateflow-*")), "a cluster's directory"
    mine = f"TMPDIR={tmp_path}\0"
    eventually(lambda: not [pid for pid in _processes() if mine in _environment_of(pid)], "every process ended")


def _processes() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != str(os.getpid())]


def _environment_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def ran(*arguments: str, environment: dict[str, str], directory: Path) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=directory, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_from_a_file(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(PROGRAM)
    assert ran(str(script), environment=environment, directory=Path("/")) == SAYS
    key = tmp_path / ".local/state/stateflow/code.key"
    assert key.stat().st_mode & 0o077 == 0, "made by the first deployment, and nobody else's"


def test_cells_of_a_notebook(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = PROGRAM.split("\n\n")
    cells.insert(2, "%time x = 1")
    cells.insert(3, "class Count(Nothing): ...")  # fails, and is mended below
    driver = f"""
import sys, types
from IPython.core.interactiveshell import InteractiveShell
sys.modules["__main__"] = types.ModuleType("__main__")
shell = InteractiveShell.instance(user_module=sys.modules["__main__"])
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True)
"""
    assert ran("-c", driver, environment=environment, directory=tmp_path).splitlines()[-1] == SAYS


def test_typed_into_an_interpreter(environment: dict[str, str], tmp_path: Path) -> None:
    """A program can be typed into an interpreter whose history has another class of the operator's name."""
    (tmp_path / ".python_history").write_text("class Count:\n    n = open('/no/such')\nimport nothing\nscaled = 1\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-q"], environment)
    said = _answer(terminal)
    for line in PROGRAM.splitlines():
        os.write(terminal, f"{line}\n".encode())
        said = _answer(terminal)
    os.write(terminal, b"\n")
    said = _answer(terminal)
    os.write(terminal, b"exit()\n")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert SAYS in said


def _answer(terminal: int) -> str:
    """Returns what a terminal shows up to the next prompt."""
    said = b""
    while not re.search(rb"(>>>|\.\.\.) $", said):
        assert readable([terminal], 60), said
        said += os.read(terminal, 65536)
    return said.decode()


def test_a_cluster_inside_a_replica_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    """A program without a guard is refused when a replica imports it.

    Otherwise each replica would start a cluster, whose replicas import the program, and so on.
    """
    (tmp_path / "unguarded.py").write_text(PROGRAM)
    deploy = "from unguarded import Count\n"
    done = subprocess.run(
        [sys.executable, "-c", deploy], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "operator_not_importable: InvalidArgument" in said
    assert "a cluster cannot be started inside unguarded:Count" in said
    assert said.count('`if __name__ == "__main__":`') == 1
