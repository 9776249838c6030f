"""Precedence of settings, and the errors for invalid values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from stateflow.errors import InvalidArgument
from stateflow.settings import (
    CheckpointSettings,
    ConnectionSettings,
    ControllerSettings,
    EmbeddedSettings,
    LedgerSettings,
    LogSettings,
    ReplicaProcess,
    ReplicaSettings,
    Settings,
)
from tests.unit.settings.conftest import Configure

#: a model, a field, its value in the file, its value in the environment, and the value a program gives
CASES: list[tuple[type[Settings], str, str, Any, str, Any, Any]] = [
    (ReplicaSettings, "cached_keys", "7", 7, "8", 8, 9),
    (ReplicaSettings, "checkpoint_interval_s", "7", 7.0, "8.5", 8.5, 9.0),
    (ReplicaSettings, "debug_validate", "true", True, "false", False, True),
    (ReplicaProcess, "site", '"edge"', "edge", "cloud", "cloud", "here"),
    (ControllerSettings, "labels", '{ rack = "7" }', {"rack": "7"}, '{"a": "b"}', {"a": "b"}, {"c": "d"}),
    (LedgerSettings, "url", '"sqlite:///a"', "sqlite:///a", "sqlite:///b", "sqlite:///b", "sqlite:///c"),
    (CheckpointSettings, "key", '"a"', SecretStr("a"), "b", SecretStr("b"), SecretStr("c")),
    (LogSettings, "format", '"json"', "json", "text", "text", "json"),
]


@pytest.mark.parametrize(("kind", "name", "text", "filed", "variable", "set_", "given"), CASES)
def test_flag_before_environment_before_file_before_default(
    kind: type[Settings],
    name: str,
    text: str,
    filed: Any,
    variable: str,
    set_: Any,
    given: Any,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kind.variable(name), raising=False)
    default = getattr(kind(), name)
    assert kind.origin(name, {}) == "default"

    file = configure(f"[{kind.section}]\n{name} = {text}\n")
    assert getattr(kind(), name) == filed != default
    assert kind.origin(name, {}) == f"{file}: {kind.section}.{name}"

    monkeypatch.setenv(kind.variable(name), "")  # counts as not set
    assert getattr(kind(), name) == filed

    monkeypatch.setenv(kind.variable(name), variable)
    assert getattr(kind(), name) == set_ != filed
    assert kind.origin(name, {}) == kind.variable(name)

    assert getattr(kind(**{name: given}), name) == given != set_
    assert kind.origin(name, {name: given}) == (kind.flag(name) or name)


def test_models_of_one_section_have_each_what_is_theirs(configure: Configure) -> None:
    configure("[replica]\nsite = 'edge'\nacknowledge = 'fsync'\n")
    assert (ReplicaProcess().site, ReplicaSettings().acknowledge) == ("edge", "fsync")


def test_a_file_is_read_once(configure: Configure) -> None:
    file = configure("[replica]\nsite = 'edge'\n")
    assert ReplicaProcess().site == "edge"
    file.write_text("[replica]\nsite = 'cloud'\n")
    assert ReplicaProcess().site == "edge"


def test_a_file_that_is_wrong_is_refused_by_whoever_asks(configure: Configure) -> None:
    configure("[agent]\nsight = 'edge'\n")
    with pytest.raises(InvalidArgument, match=r"no key agent\.sight .*: did you mean site\?"):
        EmbeddedSettings()


@pytest.mark.parametrize("value", ["inf", "1e400", "1e30", "1000000001.0"])
def test_durations_that_no_message_can_carry(value: str, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica served under an infinite lease, and no controller led with an infinite leader lease."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", value)
    with pytest.raises(InvalidArgument, match=r"STATEFLOW_CONTROLLER_LEASE_S cannot be .*: .* up to 1000000000"):
        ControllerSettings()
    with pytest.raises(InvalidArgument, match=r"CONTROLLER_HOLD_S cannot be .*: .* up to 1000000000"):
        ControllerSettings(lease_s=1.0, hold_s=float(value))
    monkeypatch.delenv("STATEFLOW_CONTROLLER_LEASE_S")
    if value != "1e400":
        configure(f"[controller]\nlease_s = {value}\n")
        with pytest.raises(InvalidArgument, match=r"controller.lease_s cannot be .*: .* up to 1000000000 \(.*line=2\)"):
            ControllerSettings()


def test_wrong_values_are_named_by_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: --workers cannot be 0: .*: correct it there"):
        ReplicaProcess(workers=0)
    with pytest.raises(InvalidArgument, match=r"STATEFLOW_REPLICA_CACHED_KEYS cannot be 0: .*"):
        ReplicaSettings(cached_keys=0)
    monkeypatch.setenv("STATEFLOW_REPLICA_WORKERS", "two")
    with pytest.raises(InvalidArgument, match=r"STATEFLOW_REPLICA_WORKERS cannot be 'two': .*in the environment"):
        ReplicaProcess()
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LABELS", "rack=7")
    with pytest.raises(InvalidArgument, match="STATEFLOW_CONTROLLER_LABELS cannot be 'rack=7': write it as JSON"):
        ControllerSettings()
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LABELS", '{"rack": 7}')
    with pytest.raises(InvalidArgument, match="STATEFLOW_CONTROLLER_LABELS cannot be"):
        ControllerSettings()


def test_it_is_said_where_this_process_is_named_twice(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    file = configure("[connection]\ntls_ca = 'ca'\ntls_cert = 'cert'\ntls_key = 'key'\n")
    assert ConnectionSettings().tls_cert == "cert"
    monkeypatch.setenv("STATEFLOW_TOKEN_FILE", "token")
    with pytest.raises(InvalidArgument) as caught:
        ConnectionSettings()
    assert f"STATEFLOW_TOKEN_FILE and {file}: connection.tls_cert are set" in str(caught.value)
