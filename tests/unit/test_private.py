"""Files that only their owner may read, and URLs that are read from files."""

from __future__ import annotations

import logging
import pwd
import stat
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.partition.environment import Environment
from stateflow.private import keep_private, masked, names_a_secret, state_directory, url_of
from stateflow.settings import ReplicaSettings


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_others_could_read_is_private_from_now_on_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        keep_private(folder)
        keep_private(folder)
    assert mode(folder) == 0o700
    (said,) = caplog.messages
    assert said == f"path {folder} was readable by other users; now only its owner can read it"


def test_a_claimed_data_directory_is_its_owners(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    old.chmod(0o755)
    for folder in (old, tmp_path / "new"):
        Environment(ReplicaSettings()).claim(folder).close()
        assert mode(folder) == 0o700


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that it does not know."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(InvalidArgument, match="no home directory"):
        state_directory()


def test_a_url_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ledger-url"
    file.write_text("postgresql://me:hush@db/ledger\n")
    file.chmod(0o600)
    assert url_of(f"@{file}") == "postgresql://me:hush@db/ledger"
    assert caplog.messages == []
    file.chmod(0o644)
    assert url_of(f"@{file}") == "postgresql://me:hush@db/ledger"
    assert caplog.messages == [f"file {file} contains a URL and is readable by every user; restrict it with chmod 600"]
    assert url_of("sqlite:///x.db") == "sqlite:///x.db"


@pytest.mark.parametrize("text", ["sqlite:////my data/ledger.db", "\n  sqlite:////my data/ledger.db \r\n\r\n"])
def test_a_path_with_spaces_from_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ledger-url"
    file.write_text(text)
    assert url_of(f"@{file}") == "sqlite:////my data/ledger.db"


@pytest.mark.parametrize("text", [None, "", "postgresql://me:hush@db/ledger\nand more", "\n\n"])
def test_a_file_that_is_no_url(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ledger-url"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        url_of(f"@{file}")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("apikey", True),
        ("api_key", True),
        ("fs.s3a.access.key", True),
        ("kafka.ssl.key.password", True),
        ("passphrase", True),
        ("kafka.sasl.jaas.config", True),
        ("path", False),
        ("key", False),
        ("significant", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert names_a_secret(name) is secret


def test_secrets_of_urls() -> None:
    assert masked("s3://b/p?apikey=hush&x=1") == "s3://b/p?apikey=***&x=1"
    assert masked("nats://me:hush@host:4222") == "nats://me:***@host:4222"
