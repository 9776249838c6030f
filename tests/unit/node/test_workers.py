"""Claims on a node's data directory, and restarts of its workers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from stateflow.errors import DataDirLocked, InvalidArgument, Unavailable
from stateflow.node import supervising, workers
from stateflow.node.workers import Node, Workers, claim_node, claim_workers, nobody_in


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
        some._supervision.started(0)
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
        asyncio.run(some.run(asyncio.Event(), lambda _: pytest.fail("none listens")))
    assert "worker n~1 cannot start: invalid_argument: the data" in caplog.text, "who said what"
    assert "worker n~1 fails at every start (status 1)" in caplog.text
