"""Environment variables that programs read."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.settings import ConnectionSettings, ReplicaSettings, base
from stateflow.settings.base import is_strict, known_variables, unknown_variables

REPOSITORY = Path(__file__).parents[3]


def test_every_variable_that_the_code_names_is_known() -> None:
    named = set()
    for place in ("stateflow", "reconfig", "benchmarks"):
        for path in (REPOSITORY / place).rglob("*.py"):
            named |= set(re.findall(r"(?<!_)STATEFLOW_[A-Z][A-Z_]*[A-Z]\b(?!_)", path.read_text()))
    tests = {name for name in named if name.startswith("STATEFLOW_TEST_")}
    assert named - tests - known_variables() - {"STATEFLOW_TLS", "STATEFLOW_TEST"} == set()


def test_what_nobody_reads_has_the_name_that_may_be_meant() -> None:
    environment = {
        "STATEFLOW_REPLICA_ACKNOWLEGDE": "fsync",
        "STATEFLOW_ZZZZ": "1",
        "STATEFLOW_REPLICA_SITE": "edge",
        "STATEFLOW_TEST_TIER": "gate",
        "HOME": "/",
    }
    assert unknown_variables(environment) == {
        "STATEFLOW_REPLICA_ACKNOWLEGDE": "STATEFLOW_REPLICA_ACKNOWLEDGE",
        "STATEFLOW_ZZZZ": None,
    }


def test_a_program_says_it_once_with_its_first_settings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_looked", set[int]())
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEGE", "fsync")
    monkeypatch.setenv("stateflow_replica_sitte", "edge")
    with caplog.at_level(logging.WARNING):
        for kind in (ReplicaSettings, ConnectionSettings):
            kind()
    assert caplog.messages == [
        "nothing reads STATEFLOW_REPLICA_ACKNOWLEGE, which is set: did you mean STATEFLOW_REPLICA_ACKNOWLEDGE?",
        "nothing reads stateflow_replica_sitte, which is set: did you mean STATEFLOW_REPLICA_SITE?",
    ]


def test_a_program_that_is_strict_has_no_settings_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_looked", set[int]())
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEGE", "fsync")
    monkeypatch.setenv("STATEFLOW_STRICT", "1")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="nothing reads STATEFLOW_REPLICA_ACKNOWLEGE"):
            ReplicaSettings()


@pytest.mark.parametrize(
    ("text", "strict"),
    [("", False), ("0", False), ("false", False), ("No", False), ("OFF", False), ("1", True), ("true", True)],
)
def test_strictness_is_read_as_other_switches_are(text: str, strict: bool) -> None:
    assert is_strict({"STATEFLOW_STRICT": text}) is strict


def test_what_kubernetes_sets_for_a_service_is_passed_over() -> None:
    names = "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR"
    assert unknown_variables({f"STATEFLOW_CONTROLLER_{name}": "" for name in names}) == {}
    assert list(unknown_variables({"STATEFLOW_CONTROLLER_PORTS": ""})) == ["STATEFLOW_CONTROLLER_PORTS"]
