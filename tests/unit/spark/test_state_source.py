"""State as a data source of Spark: whose token its reads use, without Spark."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from stateflow.security.authority import Authority, write_private
from stateflow.security.plain import own_token, use_token
from stateflow.security.roles import Identity
from stateflow.spark import register_state
from stateflow.spark.session import PUSH_DOWN


class Session:
    """A session as far as registering a source looks at it."""

    def __init__(self) -> None:
        self.dataSource = self.conf = self
        self.registered = b""
        self.settings: dict[str, str] = {}

    def register(self, source: Any) -> None:
        self.registered = cloudpickle.dumps(source)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The token of this process, in a file that its environment names."""
    text, _ = Authority.init(tmp_path / "authority", "test").token(Identity.of("data", "me"), timedelta(hours=1))
    write_private(tmp_path / "token", text.encode())
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{name}", raising=False)
    monkeypatch.setenv("STATEFLOW_TOKEN_FILE", str(tmp_path / "token"))
    return text


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one that plans reads for Spark: it has no token of its own."""
    yield lambda: monkeypatch.delenv("STATEFLOW_TOKEN_FILE", raising=False)
    use_token("")


def test_reads_have_the_token_of_the_process_that_registered_the_source(token: str, worker: Any) -> None:
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    assert session.settings == {PUSH_DOWN: "true"}
    worker()
    assert own_token() == ""
    source = pickle.loads(session.registered)({"operator": "Tally", "state": "n", "cluster": "ctl:7070"})
    reader = pickle.loads(cloudpickle.dumps(source)).reader(None)
    assert reader.token == token
    assert own_token() == token, "the worker asks the controller with it"
    shown = f"{source!r} {reader!r} {type(source)!r} {source.name()}"
    assert not any(token[at : at + 32] in shown for at in range(0, len(token) - 32, 32))


def test_a_source_without_a_token_does_not_use_that_of_another_source(token: str, worker: Any) -> None:
    worker()
    session = Session()
    register_state(session)  # type: ignore[arg-type]
    use_token(token)  # of a source that the worker has planned a read of before
    source = pickle.loads(session.registered)({"operator": "Tally", "state": "n", "cluster": "ctl:7070"})
    assert source.reader(None).token == ""
