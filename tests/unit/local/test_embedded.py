"""The cluster of one program: which directory it may have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.local.embedded import FILE, LOCK, Embedded, embedded, running_in, said_in
from stateflow.partition.environment import claim


def test_an_empty_text_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="the directory is empty text"):
        embedded("", create=False)


def say(place: Path) -> None:
    (place / FILE).write_text(json.dumps({"replicas": 2, "pid": os.getpid(), "address": "h:1"}))


def test_the_address_counts_while_the_directory_is_locked(tmp_path: Path) -> None:
    say(tmp_path)
    assert running_in(tmp_path) is None, "the program runs, and has no cluster"
    with claim(tmp_path, LOCK):
        assert running_in(tmp_path) == "h:1"
    assert running_in(tmp_path) is None


def test_a_cluster_that_was_stopped_has_no_address(tmp_path: Path) -> None:
    lock = claim(tmp_path, LOCK)
    say(tmp_path)
    with os.fdopen(os.dup(lock.fileno())):  # as in a process that the program has forked
        Embedded(tmp_path, 2, lock).stop()
        assert running_in(tmp_path) is None
    assert said_in(tmp_path) == {"replicas": 2, "pid": os.getpid()}
