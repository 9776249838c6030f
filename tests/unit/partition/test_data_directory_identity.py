"""Identity of a data directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.partition.data_directory import FILE, Identity, identify
from stateflow.partition.environment import Environment
from stateflow.settings import ReplicaSettings

ENVIRONMENT = Environment(ReplicaSettings())


def opened(root: Path, name: str = "a") -> Identity:
    claim = ENVIRONMENT.claim(root)
    try:
        return identify(ENVIRONMENT, root, name)
    finally:
        claim.close()


def test_it_is_made_once(tmp_path: Path) -> None:
    first = opened(tmp_path / "one")
    assert first.name == "a"
    assert opened(tmp_path / "one") == first
    assert opened(tmp_path / "two").id != first.id
    assert json.loads((tmp_path / "one" / FILE).read_text()) == {"id": first.id, "name": "a"}


def test_a_copy_has_the_id_and_another_place(tmp_path: Path) -> None:
    first = opened(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copy = opened(tmp_path / "two")
    assert copy.id == first.id
    assert copy.place != first.place
    (tmp_path / "one").rename(tmp_path / "three")
    assert opened(tmp_path / "three") == first


def test_a_bare_name_is_upgraded_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / FILE).write_text("a")
    first = opened(tmp_path)
    assert first.id
    assert opened(tmp_path) == first


def test_with_state_it_keeps_its_name_without_it_may_have_another(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path, "b").id != first.id
    (tmp_path / "operators").mkdir()
    with pytest.raises(InvalidArgument, match=r"belongs to replica 'b' .*start the replica with --name b"):
        opened(tmp_path, "a")


@pytest.mark.parametrize("text", ["", "{", '{"id": "x"}', "[]", "a\nb"])
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidArgument, match="write only the replica's name into it"):
        opened(tmp_path)
    assert (tmp_path / FILE).read_text() == text
