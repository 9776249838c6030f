"""Settings files that are refused, and their errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.settings.base import BYTES_MAX, SECTIONS, ConfigurationFile, line_of, read


def said_of(tmp_path: Path, text: str | bytes) -> str:
    """Returns the error for a settings file, without its path."""
    file = tmp_path / "fleet.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(0o600)
    with pytest.raises(InvalidArgument) as caught:
        read(file, SECTIONS)
    assert caught.value.where["file"] == file
    return str(caught.value).replace(str(file), "FILE")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[replica]\nsite = 'edge'\nacknowlege = 'wal'\n",
            "there is no key replica.acknowlege (file=FILE line=3): did you mean acknowledge?",
        ),
        ("# of all\n[replicas]\n", "there is no section [replicas] (file=FILE line=2): did you mean [replica]?"),
        ("[replica]\nlease_s = 1\n", "there is no key replica.lease_s (file=FILE line=2): it belongs to [controller]"),
        (
            "[agent]\nleese_s = 1\n",
            "there is no key agent.leese_s (file=FILE line=2): did you mean lease_s of [controller]?",
        ),
        (
            "[agent]\nxyzzy = 1\n",
            "there is no key agent.xyzzy (file=FILE line=2): keys of [agent] are in docs/settings.md",
        ),
        (
            "[xyzzy]\n",
            f"there is no section [xyzzy] (file=FILE line=1): sections are {', '.join(SECTIONS)}",
        ),
        (
            "replica = 3\n",
            "replica is a section, not a key (file=FILE line=1): write [replica], and its keys on the lines below",
        ),
        (
            "[[replica]]\nsite = 'edge'\n",
            "replica is a section, not a key (file=FILE): write [replica], and its keys on the lines below",
        ),
        (
            "[replica]\nworkers = '2'\n",
            "replica.workers cannot be '2': Input should be a valid integer",
        ),
        ("replica.workers = 0\n", "replica.workers cannot be 0: Input should be greater than"),
        ("[replica]\nworkers = true\n", "replica.workers cannot be True: Input should be a valid"),
        ("[log]\nformat = 'xml'\n", "log.format cannot be 'xml': Input should be 'text' or 'json'"),
        (
            "[controller.labels]\nrack = 7\n",
            "controller.labels cannot be {'rack': 7}: Input should be a valid string",
        ),
        ("[replica\n", "the settings file is not TOML: "),
        ("[replica]\nsite = 'a'\nsite = 'b'\n", "the settings file is not TOML: "),
        ("a = " + "[" * 5000, "the settings file is not TOML: "),
        (b"[replica]\nsite = '\xff'\n", "the settings file is not UTF-8 (file=FILE line=2): save it as UTF-8"),
        (
            b"#" * (BYTES_MAX + 1),
            "the settings file is larger than 1 MiB (file=FILE): check whether the path names another file",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    assert said_of(tmp_path, text).startswith(f"invalid_argument: {said}")


def test_a_wrong_value_has_its_line(tmp_path: Path) -> None:
    said = said_of(tmp_path, "[replica]\nworkers = 0\n")
    assert said.endswith(" (file=FILE line=2): correct it in the file, or leave it out for the default")


def test_where_toml_breaks_off(tmp_path: Path) -> None:
    assert "line 3" in said_of(tmp_path, "[replica]\nsite = 'a'\nname = \n")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in {
        tmp_path: "a directory is not a settings file",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "nothing": "the settings file cannot be read: No such file or directory",
    }.items():
        with pytest.raises(InvalidArgument, match=said):
            read(path, SECTIONS)


@pytest.mark.parametrize(
    "text",
    [
        '[connection]\ntoken = "abc"\n',
        '[code]\nkey = "abc"\n',
        '[ledger]\nurl = "postgresql://me:secret@host/db"\n',
    ],
)
def test_secrets_that_everybody_can_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    file.chmod(0o644)
    with pytest.raises(
        InvalidArgument, match=r"is a secret, and other users can read the file .*: chmod 600"
    ) as caught:
        read(file, SECTIONS)
    assert "abc" not in str(caught.value)
    file.chmod(0o640)
    assert read(file, SECTIONS).values


def test_others_may_read_what_is_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[ledger]\nurl = "@/run/secrets/ledger"\n[connection]\ntoken = ""\n')
    file.chmod(0o644)
    expected = {"ledger": {"url": "@/run/secrets/ledger"}, "connection": {"token": ""}}
    assert read(file, SECTIONS) == ConfigurationFile(file, expected)


def test_a_secret_of_another_type_is_not_repeated(tmp_path: Path) -> None:
    assert "4711" not in said_of(tmp_path, "[connection]\ntoken = 4711\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[a]\nb = 1\n", 2),
        ("\n[ 'a' ]\n  \"b\" =1\n", 3),
        ("b = 2\n[c]\nb = 3\n[a] # it\nb = 1\n", 5),
        ("a.b = 1\n", 1),
        ("[c]\na.b = 2\n", None),
        ("[a.b]\nc = 1\n", 1),
        ("a = { b = 1 }\n", None),
    ],
)
def test_where_a_key_is(text: str, line: int | None) -> None:
    assert line_of(text, "a", "b") == line
