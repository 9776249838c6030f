"""Claims on a node's data directory, restarts of its workers, and the moves between them that it asks for."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

import pytest

from stateflow.clock import Clock, ManualClock
from stateflow.errors import DataDirLocked, InvalidArgument, Unavailable
from stateflow.fleet import Listening, NotReady
from stateflow.node import supervising, workers
from stateflow.node.workers import Node, Workers, claim_node, claim_workers, nobody_in
from stateflow.reports import PartitionReport
from stateflow.types import worker_name


@pytest.mark.parametrize("claim", [claim_node, claim_workers])
def test_whoever_wipes_waits_for_who_is_there(
    claim: Callable[[Path], TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "KILL_AFTER_S", 0.0)
    held = claim(tmp_path)
    with pytest.raises(DataDirLocked), nobody_in(tmp_path, 0.1):
        pytest.fail("somebody is there")
    threading.Timer(0.2, held.close).start()
    with nobody_in(tmp_path, 10.0):
        with pytest.raises(DataDirLocked):
            claim(tmp_path)
        shutil.rmtree(tmp_path)
    assert not tmp_path.exists()


def test_a_worker_holds_what_it_was_handed_when_nobody_else_does_any_more(tmp_path: Path) -> None:
    with claim_workers(tmp_path) as held:
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held.fileno(),)
        )  # fmt: skip
    with pytest.raises(DataDirLocked, match="kill those that hang") as caught:
        claim_workers(tmp_path)
    assert caught.value.where == {"path": tmp_path}, "it has not claimed its own directory"
    process.communicate(b"\n")
    claim_workers(tmp_path).close()


def test_there_is_no_port_for_the_last_worker(tmp_path: Path) -> None:
    node = Node("n", tmp_path, "ctl:1", "127.0.0.1:65534", None, "", lambda *_: [], 0.0)
    Workers(node, 2)
    with pytest.raises(InvalidArgument, match="no port is left for worker 2"):
        Workers(node, 3)


def test_a_worker_that_says_what_nobody_understands_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose output cannot be read is restarted.

    A line without an end used to raise ValueError, and the worker was no longer supervised.
    """

    async def run() -> None:
        node = Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0)
        some = Workers(node, 1)

        async def says_too_much(number: int) -> int:
            raise ValueError("Separator is not found, and chunk exceed the limit")

        monkeypatch.setattr(some, "_run_process", says_too_much)
        some._supervision.started(0, 0.0)
        await some._live(0)
        assert some._changed.is_set()
        assert some._supervision.due(float("inf")) == [0]

    asyncio.run(run())


def test_a_node_without_a_worker_that_starts_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0)
    some = Workers(node, 2)
    monkeypatch.setattr(supervising, "BACKOFF_S", 0.01)

    async def dies(number: int) -> int:
        error = InvalidArgument("the data directory cannot be used", remedy="choose a writable directory")
        some._hear(number, json.dumps({"error": error.to_wire()}).encode())
        return 1

    monkeypatch.setattr(some, "_run_process", dies)
    with pytest.raises(Unavailable, match="no worker of n starts: invalid_argument: the data directory cannot be used"):
        asyncio.run(some.run(asyncio.Event(), lambda _: pytest.fail("none listens"), lambda _: None))
    assert "worker n~1 cannot start: invalid_argument: the data" in caplog.text, "who said what"
    assert "worker n~1 fails at every start (status 1)" in caplog.text


def test_a_node_whose_first_worker_does_not_start_says_why_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's address is that of its first worker. While there is none, the node says why, after each death."""
    some = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 2)
    monkeypatch.setattr(supervising, "BACKOFF_S", 0.001)
    said: list[Listening | NotReady] = []
    stop = asyncio.Event()

    async def lives(number: int) -> int:
        if number == 0 and len(said) < 2:
            error = InvalidArgument("the data directory cannot be used", remedy="choose a writable directory")
            some._hear(0, json.dumps({"error": error.to_wire()}).encode())
            return 1
        some._hear(number, json.dumps({"address": f"host:{number}"}).encode())
        await stop.wait()
        return 0

    def ready(listening: Listening) -> None:
        said.append(listening)
        stop.set()

    monkeypatch.setattr(some, "_run_process", lives)
    asyncio.run(asyncio.wait_for(some.run(stop, ready, said.append), 60.0))
    first, second, last = said
    assert isinstance(first, NotReady)
    assert isinstance(second, NotReady)
    assert (first.deaths, second.deaths, last) == (supervising.HOPELESS, supervising.HOPELESS + 1, Listening("host:0"))
    assert str(first.fault).startswith(
        "unavailable: the first worker of n has died at 5 starts in a row (status 1): "
        "invalid_argument: the data directory cannot be used"
    )


def test_a_node_whose_first_worker_comes_back_at_another_port_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent that runs the node reports its address; without ``--metrics`` nothing else changes."""
    some = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 1)
    said: list[Listening] = []
    lives, stop = iter(("host:7", "host:7", "host:9")), asyncio.Event()

    async def live(number: int) -> int:
        address = next(lives)
        some._hear(number, json.dumps({"address": address}).encode())
        for _ in range(20):  # the node hears it meanwhile
            await asyncio.sleep(0)
        if address == "host:9":
            stop.set()
        return 1

    monkeypatch.setattr(supervising, "BACKOFF_S", 0.001)
    monkeypatch.setattr(some, "_run_process", live)
    asyncio.run(asyncio.wait_for(some.run(stop, said.append, lambda _: None), 60.0))
    assert said == [Listening("host:7"), Listening("host:9")]


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_worker_that_hangs_as_it_starts_is_named_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: int
) -> None:
    clock = ManualClock()
    some = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 2, clock)
    said: list[Listening | NotReady] = []
    stop = asyncio.Event()

    async def lives(number: int) -> int:
        if number != hangs:
            clock.advance(supervising.SLOW_S)
            some._hear(number, json.dumps({"address": f"host:{number}"}).encode())
        await stop.wait()
        return 0

    def says(what: Listening | NotReady) -> None:
        said.append(what)
        stop.set()

    monkeypatch.setattr(some, "_run_process", lives)
    asyncio.run(asyncio.wait_for(some.run(stop, says, says), 60.0))
    assert f"worker {worker_name('n', hangs)} has not been ready for 60 s since its start" in caplog.text
    (one,) = said
    if hangs:
        assert one == Listening("host:0")
        return
    assert isinstance(one, NotReady)
    assert (one.deaths, one.fault.code) == (0, "unavailable")
    assert "the first worker of n has not been ready for 60 s since its start" in str(one.fault)


def test_the_error_with_which_a_worker_ends_after_it_listened_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InvalidArgument("the name belongs to another directory", remedy="choose another name")

    async def run() -> None:
        some = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 1)
        some._lock = cast(Any, SimpleNamespace(fileno=lambda: 0))
        some._supervision.started(0, 0.0)
        stdout = asyncio.StreamReader()
        for line in ({"address": "host:7"}, {"error": error.to_wire()}):
            stdout.feed_data(json.dumps(line).encode() + b"\n")
        stdout.feed_eof()

        async def begun(*_: Any, **__: Any) -> Any:
            async def wait() -> int:
                return 1

            return SimpleNamespace(stdout=stdout, wait=wait, returncode=1)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", begun)
        assert await some._run_process(0) == 1
        assert (some._addresses, str(some._errors[0])) == ({0: "host:7"}, str(error))

    asyncio.run(run())


def test_of_a_removal_that_is_cut_short_no_worker_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is killed while it removes the directory of a surplus worker: the next start finds no worker in the rest,
    which may lack the worker's identity."""
    directory = workers.directory_of(tmp_path, 1)
    (directory / "partitions").mkdir(parents=True)
    (directory / "REPLICA").write_text("{}")
    some = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 1)
    some._supervision.started(1, 0.0)
    nothing = SimpleNamespace(statistics=lambda _: SimpleNamespace(partitions=[]))
    monkeypatch.setattr(workers, "ReplicaClient", lambda address: nothing)
    worker: Any = SimpleNamespace(name="n~1", address="n~1", partitions=0)
    status: Any = SimpleNamespace(operators=[], reconfigurations=[])

    async def leaves() -> None:
        some._lives[1] = asyncio.create_task(asyncio.sleep(0))
        await some._leave(cast(Any, None), worker, status)

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path, **_: (path / "REPLICA").unlink())
        asyncio.run(leaves())
    assert workers.left_behind(tmp_path, 1) == []
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["1.gone"]

    async def starts() -> None:
        stop = asyncio.Event()
        again = Workers(Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 1)
        monkeypatch.setattr(again, "_begin", lambda number: stop.set())
        await again.run(stop, lambda _: None, lambda _: None)

    asyncio.run(starts())
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["LOCK"]


def test_workers_of_other_nodes_need_no_port_here(tmp_path: Path) -> None:
    some = Workers(Node("n", tmp_path, "ctl:1", "0.0.0.0:0", "host:65534", "", lambda *_: [], 0.0), 2)
    some._addresses = {0: "0.0.0.0:7000", 1: "0.0.0.0:7001"}
    mine = {
        name: some._is_mine(cast(Any, SimpleNamespace(name=name, address=address, alive=alive)))
        for name, address, alive in [
            ("n", "host:65534", True),
            ("n~1", "host:65535", True),
            ("n~2", "host:65535", False),  # of an earlier run
            ("other~9", "host:65535", True),
        ]
    }
    assert mine == {"n": True, "n~1": True, "n~2": False, "other~9": False}


# -- partitions go to who is less busy ------------------------------------------------------------------------------


class Busy:
    """A node of three workers, seen through a controller. The first worker owns the partition that takes all the time.

    ``used_s``: CPU seconds of each worker. ``migrated``: the moves that the node asked for.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = [worker_name("n", number) for number in range(3)]
        self.owners = [self.names[number // 4] for number in range(12)]
        self.reconfigurations: list[Any] = []
        self.used_s, self.sequence, self.now = [0.0] * 3, 1, 0.0
        self.migrated: list[tuple[str, list[int], str]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.workers = Workers(
            Node("n", tmp_path, "ctl:1", "127.0.0.1:0", None, "", lambda *_: [], 0.0), 3, cast(Clock, clock)
        )
        self.workers._processes = {number: cast(Any, SimpleNamespace(pid=number)) for number in range(3)}
        monkeypatch.setattr(workers, "processor_s", lambda pid: self.used_s[pid])
        monkeypatch.setattr(workers, "ReplicaClient", self._replica)

    def migrate(self, operator: str, partitions: list[int], to: str) -> None:
        self.migrated.append((operator, partitions, to))

    def _replica(self, address: str) -> Any:
        """Every worker reports all partitions, those of others as the copies that they left."""
        reports = [PartitionReport("Op", n, "OWNED", 1, self.sequence, "", 0.0) for n in range(12)]
        return SimpleNamespace(statistics=lambda _: SimpleNamespace(partitions=reports))

    def looks(self, there: int = 3) -> list[tuple[str, list[int], str]]:
        """Returns the moves that a look asks for, after a time in which the first worker was busy."""
        self.now, self.sequence, self.migrated = self.now + supervising.COMPARE_S, self.sequence + 10, []
        self.used_s[0] += supervising.COMPARE_S
        operator = SimpleNamespace(name="Op", owners=self.owners)
        status = SimpleNamespace(operators=[operator], reconfigurations=self.reconfigurations)
        some = [SimpleNamespace(name=name, address=name) for name in self.names[:there]]
        self.workers._spread(cast(Any, self), cast(Any, some), cast(Any, status))
        return self.migrated


def test_partitions_leave_a_busy_worker_by_its_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All partitions have as many batches; only the workers' processor time says which one is busy."""
    node = Busy(tmp_path, monkeypatch)
    assert node.looks() == [], "there is nothing to compare with"
    moves = node.looks()
    assert {(operator, to) for operator, _, to in moves} == {("Op", "n~1"), ("Op", "n~2")}
    assert {number for _, numbers, _ in moves for number in numbers} < {0, 1, 2, 3}


def test_what_goes_to_the_first_worker_names_it_and_not_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Busy(tmp_path, monkeypatch)
    node.owners = [node.names[2 - number // 4] for number in range(12)]
    node.used_s = [0.0, 0.0, 1e3]
    monkeypatch.setattr(workers, "processor_s", lambda pid: node.used_s[2 - pid])
    node.looks()
    assert {to for _, _, to in node.looks()} == {"n~0", "n~1"}


def test_a_node_does_not_spread_while_a_worker_is_away_or_a_partition_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Busy(tmp_path, monkeypatch)
    node.looks()
    assert node.looks(there=2) == []
    move = SimpleNamespace(source="n~1", target="elsewhere", state="WARMING")
    node.reconfigurations = [SimpleNamespace(over=False, moves=[move])]
    assert node.looks() == []
    move.state = "COMPLETED"
    assert node.looks()
