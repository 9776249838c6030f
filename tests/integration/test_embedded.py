"""The cluster of a program that names none: it keeps its state, belongs to one program at a time, and ends with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stateflow.errors import DataDirLocked, InvalidArgument, Unavailable
from stateflow.local.embedded import FILE, embedded, running_in
from stateflow.node.workers import claim_node
from tests.integration.support import ending, eventually

pytestmark = pytest.mark.processes
ROOT = str(Path(__file__).parents[2])
SEEN = """
class Seen(Operator):
    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row, ctx):
        self.n.value += 1
        yield row.k, self.n.value


if __name__ == "__main__":
"""
#: counts, prints what it counted, and goes on until its stdin ends
PROGRAM = f"""
import sys
from stateflow import Operator, state
from stateflow.local.embedded import embedded
{SEEN}
    own = embedded(sys.argv[1], replicas=2)
    own.cluster.deploy(Seen, 4)
    with own.cluster.stream("Seen", source="s") as stream:
        rows = stream.send([{{"k": f"k{{n}}"}} for n in range(20)])
    print(sorted({{row["n"] for row in rows}}), flush=True)
    sys.stdin.read()
"""
UNDER_SPARK = f"""
import sys
from stateflow import Operator, state
from stateflow.spark import apply_operator, embedded, local_session, read_state
{SEEN}
    spark = local_session("embedded", "local[2]")
    rows = spark.createDataFrame([("a",), ("b",), ("a",)], "k string")
    print("OUT", sorted(tuple(row) for row in apply_operator(rows, Seen).collect()))
    assert embedded().cluster.migrate("Seen", range(64), sys.argv[1]).wait().state == "COMPLETED"
    found = read_state(spark, operator="Seen", state="n").collect()
    print("STATE", sorted((row.key, row.value) for row in found))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


def started(program: Path, place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ROOT},
        cwd=program.parent,
    )


@pytest.fixture
def running(program: Path, place: Path) -> Iterator[subprocess.Popen[str]]:
    with ending(started(program, place)) as process:
        yield process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise AssertionError(process.communicate()[1][-3000:])
    return line


def end(process: subprocess.Popen[str]) -> str:
    """Ends a program and returns its stderr."""
    return process.communicate("", timeout=600)[1]


def test_the_next_run_goes_on_with_its_state(program: Path, place: Path) -> None:
    for run in range(1, 3):
        with ending(started(program, place)) as process:
            assert said(process) == f"[{run}]"
            address = running_in(place)
            assert address is not None
            told = end(process)
        assert f"2 replicas and a controller at {address}, until this program ends" in told
        assert process.returncode == 0
        assert running_in(place) is None


def test_another_program_is_refused_and_may_use_it_by_its_address(
    running: subprocess.Popen[str], program: Path, place: Path
) -> None:
    assert said(running) == "[1]"
    address = running_in(place)
    with pytest.raises(DataDirLocked) as refused:
        embedded(place)
    text = str(refused.value)
    assert f"another program's cluster uses this directory: {program}" in text
    assert f'pass cluster="{address}" to use its cluster' in text
    assert f"pid={running.pid}" in text
    status = [sys.executable, "-m", "stateflow", "status", "--json"]
    environment = os.environ | {"PYTHONPATH": ROOT, "STATEFLOW_EMBEDDED_DIRECTORY": str(place)}
    environment.pop("STATEFLOW_CONTROLLER", None)
    shown = subprocess.run(status, capture_output=True, text=True, env=environment, cwd=program.parent, check=True)
    assert [each["name"] for each in json.loads(shown.stdout)["replicas"]] == ["local-0", "local-1"]


def test_what_was_killed_is_gone_on_with_at_once(program: Path, place: Path) -> None:
    with ending(started(program, place)) as process:
        assert said(process) == "[1]"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with ending(started(program, place)) as again:  # while the processes of the first one are still ending
        assert said(again) == "[2]"
        eventually(lambda: not any(child.is_running() for child in children), "they have ended")
        end(again)


def test_a_program_has_one_in_a_directory(place: Path) -> None:
    own = embedded(place, replicas=1)
    try:
        assert embedded(place) is embedded(str(place), replicas=1) is own
        with pytest.raises(InvalidArgument, match="created with 1 replicas, which hold its state, not with 3"):
            embedded(place, replicas=3)
        assert (place / FILE).stat().st_mode & 0o077 == 0 or place.stat().st_mode & 0o077 == 0
    finally:
        own.stop()
    with pytest.raises(InvalidArgument, match="the cluster was created with 1 replicas"):
        embedded(place, replicas=3)


def test_its_processes_end_where_it_cannot_be_written_down(place: Path) -> None:
    (place / f".{FILE}.new").mkdir(parents=True)
    (place / "EMBEDDED").touch()
    with pytest.raises(Unavailable, match="the file with the cluster's address cannot be written"):
        embedded(place, replicas=1)
    assert not [each for each in psutil.Process().children(recursive=True) if str(place) in each.cmdline()]
    (place / f".{FILE}.new").rmdir()
    embedded(place, replicas=1).stop()


def test_replicas_of_a_program_that_was_killed_are_waited_for(place: Path) -> None:
    embedded(place, replicas=1).stop()
    still = claim_node(place / "local-0")
    threading.Timer(2.0, still.close).start()
    began = time.monotonic()
    own = embedded(place)
    try:
        assert time.monotonic() - began > 1.5
        assert [each.alive for each in own.cluster.status().replicas] == [True]
    finally:
        own.stop()


def test_nothing_is_written_into_what_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="the directory contains other files"):
        embedded(tmp_path)
    with pytest.raises(InvalidArgument, match="cannot be used"):
        embedded(tmp_path / "thesis.txt" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STATEFLOW_EMBEDDED_REPLICAS", "-1")
        with pytest.raises(InvalidArgument, match="STATEFLOW_EMBEDDED_REPLICAS cannot be '-1'"):
            embedded(tmp_path / "new")


def test_a_file_that_lies_is_no_way_in(place: Path) -> None:
    place.mkdir()
    for lie in (
        "",
        "[]",
        "{",
        '{"pid": "x", "address": 7}',
        '{"pid": 99999999, "address": "h:1"}',
        '{"replicas": "9"}',
    ):
        (place / FILE).write_text(lie)
        assert running_in(place) is None
    (place / FILE).write_text('{"replicas": 2}')
    with pytest.raises(InvalidArgument, match="contains other files"):
        embedded(place)
    (place / "EMBEDDED").touch()
    with pytest.raises(InvalidArgument, match="the cluster was created with 2 replicas"):
        embedded(place, replicas=1)


@pytest.mark.spark
def test_under_spark(tmp_path: Path) -> None:
    """A Spark program that names no cluster has rows and state, and its next run goes on with both."""
    program = tmp_path / "job.py"
    program.write_text(UNDER_SPARK)
    environment = os.environ | {"PYTHONPATH": ROOT, "STATEFLOW_EMBEDDED_REPLICAS": "2"}
    for run, (out, state) in enumerate(
        [
            ("[('a', 1), ('a', 2), ('b', 1)]", "[('a', 2), ('b', 1)]"),
            ("[('a', 3), ('a', 4), ('b', 2)]", "[('a', 4), ('b', 2)]"),
        ]
    ):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(program), f"local-{1 - run}"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"OUT {out}\nSTATE {state}\n" in done.stdout, run
        assert re.search(r"state is kept in .*/stateflow-data", done.stderr)
        assert time.monotonic() - began < 300
