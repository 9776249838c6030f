"""Files are written whole, and are readable by their owner alone where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.durable import write_durably


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_it_is_written_over_with_nothing_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    (tmp_path / ".kept.json.new").write_text("of one that was killed")
    for content in ("first", b"second"):
        write_durably(file, content)
        assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """Otherwise root, who may write everywhere, would replace a device such as /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError):
        write_durably(pipe, "content")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_others_of_the_same_stem_stay(tmp_path: Path) -> None:
    (tmp_path / "ca.new").write_text("somebody else's")
    write_durably(tmp_path / "ca.pem", "mine")
    assert (tmp_path / "ca.new").read_text() == "somebody else's"


def test_its_mode_is_what_is_asked_for_or_the_umasks(tmp_path: Path, umask: int) -> None:
    for mode in (0o600, 0o644):
        write_durably(tmp_path / "file", "x", mode)
        assert mode_of(tmp_path / "file") == mode
    write_durably(tmp_path / "file", "x")
    assert mode_of(tmp_path / "file") == 0o666 & ~umask
