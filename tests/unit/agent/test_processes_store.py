"""The agent's state that survives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.agent.processes import FILE, Store
from stateflow.errors import InvalidArgument
from stateflow.fleet import Spawned


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    store = Store(tmp_path, "a")
    store.keep("ledger", 7, [Spawned("a-0", "a", memory_bytes=5)])
    again = Store(tmp_path, "a").kept
    assert again == store.kept
    assert (again.ledger, again.term, again.wanted[0].replica) == ("ledger", 7, "a-0")
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]


def test_another_name_is_for_a_directory_without_replicas_only(tmp_path: Path) -> None:
    first = Store(tmp_path, "a")
    assert Store(tmp_path, "b").kept.id == first.kept.id
    Store(tmp_path, "b").keep("ledger", 1, [Spawned("b-0", "b")])
    with pytest.raises(InvalidArgument, match="belongs to agent 'b'"):
        Store(tmp_path, "a")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "x"}', '{"id": "x", "name": "a", "wanted": [{"no": 1}]}'])
def test_a_file_that_says_nothing_is_no_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidArgument, match="does not describe the agent's replicas"):
        Store(tmp_path, "a")
