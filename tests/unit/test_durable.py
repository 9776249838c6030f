"""Files are written whole, and are readable by their owner alone where that is asked for. Listings are whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stateflow.durable import files_below, listed, write_durably


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


@contextmanager
def out_of_files(below: Path) -> Iterator[None]:
    """Makes directories below a path unlistable, as if no more files could be opened. As since Python 3.12, Path.glob
    and Path.rglob find nothing then; Path.exists and others are not affected."""

    def failing(real: Any) -> Any:
        def lists(path: Any = ".") -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(below):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return real(path)

        return lists

    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        for name in ("glob", "rglob"):
            patch.setattr(Path, name, lambda *_, **__: iter(()))
        yield


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", ".c.log", "d.sst"):
        (tmp_path / name).touch()
    assert [path.name for path in listed(tmp_path, "*.log")] == [".c.log", "a.log", "b.log"]
    assert len(listed(tmp_path)) == 4
    assert listed(tmp_path / "none") == files_below(tmp_path / "none") == []
    with out_of_files(tmp_path), pytest.raises(OSError, match="Too many open files"):
        listed(tmp_path)


def test_files_below_are_all_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "loop").symlink_to(tmp_path)
    names = ["x/y/a", "x/b", "c"]
    for name in names:
        (tmp_path / name).touch()
    assert sorted(files_below(tmp_path)) == sorted(tmp_path / name for name in names)
    with out_of_files(tmp_path / "x" / "y"), pytest.raises(OSError, match="Too many open files"):
        files_below(tmp_path)


@pytest.mark.parametrize("package", ["storage", "partition"])
def test_nothing_that_decides_about_state_uses_glob(package: str) -> None:
    """Path.glob has no way to say that it could not look."""
    root = Path(__file__).parents[2] / "stateflow" / package
    modules = [path for path in files_below(root) if path.suffix == ".py"]
    assert modules
    assert not [path.name for path in modules if "glob(" in path.read_text()]
