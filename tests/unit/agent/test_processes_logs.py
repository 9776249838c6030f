"""Logs that are rotated by size, read while that happens."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from stateflow.agent.processes import PIECE_BYTES, Reader, Rotating, last_line, older, rotate_open_log


def test_full_files_are_kept_and_the_oldest_dropped(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "r.log"
    log = Rotating(path, file_bytes=10, kept=2)
    for number in range(8):
        assert log.write(f"line{number}\n".encode())
    assert path.read_text() == "line7\n"
    assert [older(path, n).read_text() for n in (1, 2)] == ["line6\n", "line5\n"]
    assert len(list(path.parent.iterdir())) == 3
    log.close()
    again = Rotating(path, file_bytes=100, kept=2)
    again.write(b"more\n")
    assert path.read_text() == "line7\nmore\n", "a restart goes on where it was"


def test_a_log_that_another_process_holds_open_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "r.log"
    rotate_open_log(path, file_bytes=10, kept=2)
    with path.open("a") as file:
        for number in range(4):
            print(f"a long line {number}", file=file, flush=True)
            rotate_open_log(path, file_bytes=10, kept=2)
        print("short", file=file, flush=True)
        rotate_open_log(path, file_bytes=10, kept=2)
    assert path.read_text() == "short\n"
    assert [older(path, n).read_text() for n in (1, 2)] == ["a long line 3\n", "a long line 2\n"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_log_does_not_keep_a_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(_: Path, to: Path) -> None:
        to.write_bytes(b"a")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copy", copy)
    path = tmp_path / "r.log"
    path.write_bytes(b"a long line\n")
    rotate_open_log(path, file_bytes=10)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("r.log", b"")]


def test_what_a_disk_does_not_take_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.log"
    path.mkdir()
    log = Rotating(path)
    assert not log.write(b"x\n")
    path.rmdir()
    assert log.write(b"y\n")
    assert path.read_text() == "y\n"


@pytest.mark.parametrize(("lines", "found"), [(0, b""), (1, b"c\n"), (2, b"b\nc\n"), (9, b"a\nb\nc\n")])
def test_newest_lines_reach_into_the_file_before(lines: int, found: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.log"
    older(path, 1).write_bytes(b"a\nb\n")
    path.write_bytes(b"c\n")
    assert b"".join(Reader(path).last(lines)) == found


def test_a_reader_misses_nothing_while_files_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "r.log"
    log, reader, found = Rotating(path, file_bytes=20), Reader(path), b""
    assert reader.more() == b"", "there is none yet"
    for number in range(20):
        log.write(f"line{number}\n".encode())
        while data := reader.more():
            found += data
    assert found == b"".join(f"line{number}\n".encode() for number in range(20))


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (b"a\nb\n", "b"),
        (b"\n", ""),
        (b"a\n" * PIECE_BYTES + b"end\n\n", "end"),
        (b"a" * 2 * PIECE_BYTES, "a" * PIECE_BYTES),
    ],
)
def test_the_last_line_is_found_in_the_end_of_a_log(log: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "r.log"
    assert last_line(path) == "", "there is none yet"
    path.write_bytes(log)
    assert last_line(path) == found
