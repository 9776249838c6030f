"""``state_manager:`` in YAML: five types, profiles, and secrets that come from the environment alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateflow import ledger
from stateflow.errors import InvalidArgument
from stateflow.ledger import SqLiteStateManager, state_manager_from_yaml
from stateflow.ledger.manager import TYPES, ledger_url
from stateflow.ledger.rules import check_affinity

SECRET = {"LEDGER_PASSWORD": "hunter2"}


def document(kind: str = "PostgreSQLStateManager", **profile: Any) -> dict[str, Any]:
    fields = {"host": "db", "database": "ledger", "username": "me", "password": "${LEDGER_PASSWORD}"} | profile
    return {
        "state_manager": {"name": "state_manager", "type": kind, "conf": {"connection": "state_manager"}},
        "connections": {"state_manager": {key: value for key, value in fields.items() if value is not None}},
    }


def test_a_file_declares_a_state_manager(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yml"
    file.write_text(
        """
state_manager:
  name: state_manager
  type: SqLiteStateManager
  conf:
    connection: state_manager
connections:
  state_manager:
    database: ${WHERE}/ledger.db
"""
    )
    manager = state_manager_from_yaml(file, {"WHERE": str(tmp_path)})
    manager.insert_state(job_id="j")
    manager.ledger.close()
    assert (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("PostgreSQLStateManager", "postgresql://me:hunter2@db:1234/ledger"),
        ("MySQLStateManager", "mysql://me:hunter2@db:1234/ledger"),
        ("SQLServerStateManager", "mssql://me:hunter2@db:1234/ledger?driver=ODBC+Driver+18+for+SQL+Server"),
        (
            "AzureSQLServerStateManager",
            "mssql://me:hunter2@db:1234/ledger?Encrypt=yes&driver=ODBC+Driver+18+for+SQL+Server",
        ),
        ("SqLiteStateManager", "sqlite:///ledger"),
    ],
)
def test_each_type_has_its_database(kind: str, url: str) -> None:
    assert getattr(ledger, kind) is TYPES[kind]
    made = ledger_url(document(kind, port="1234"), SECRET).render_as_string(hide_password=False)
    assert sorted(made.split("?")[-1].split("&")) == sorted(url.rsplit("?", maxsplit=1)[-1].split("&"))
    assert made.split("?")[0] == url.split("?", maxsplit=1)[0]


def test_a_type_opens_its_profile_or_url(tmp_path: Path) -> None:
    profile = {"database": "${WHERE}/ledger.db"}
    with pytest.raises(InvalidArgument, match="there is no ledger"):
        SqLiteStateManager(profile, environment={"WHERE": str(tmp_path)}, create=False)
    assert list(tmp_path.iterdir()) == []
    made = SqLiteStateManager(profile, environment={"WHERE": str(tmp_path)})
    made.insert_state(job_id="j")
    made.ledger.close()
    again = SqLiteStateManager(f"sqlite:///{tmp_path}/ledger.db", create=False)
    assert again.get_current_state("j") is not None
    again.ledger.close()
    with pytest.raises(InvalidArgument, match="the url names a postgresql database, but SqLiteStateManager"):
        SqLiteStateManager("postgresql://me:hunter2@db/x")


def test_a_url_may_stand_for_all() -> None:
    url = ledger_url(document(url="postgresql://me:${LEDGER_PASSWORD}@db/x"), SECRET)
    assert url.password == "hunter2"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({}, "state_manager is missing"),
        ({"state_manager": {"type": "OracleStateManager"}}, "cannot be 'OracleStateManager'"),
        ({"state_manager": {"type": "MySQLStateManager"}}, "state_manager.conf is missing"),
        (document() | {"connections": {"other": {}}}, "no connection profile 'state_manager'.*other"),
        (document(colour="red"), "unknown field 'colour'"),
        (document(password="hunter2"), "contains a plain-text password"),
        (document(password="x${LEDGER_PASSWORD}"), "contains a plain-text password"),
        (document(host="${NOWHERE}"), "NOWHERE is not set"),
        (document(database=None), "must name a database"),
        (document(port="many"), "'many' is not a port"),
        (document(url="nonsense ${LEDGER_PASSWORD}"), "not a database URL"),
    ],
)
def test_what_is_refused(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        ledger_url(broken, SECRET)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_files_that_declare_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"is not valid YAML|declares no ledger"):
        state_manager_from_yaml(file)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        state_manager_from_yaml(tmp_path / "missing.yml")


def test_affinities() -> None:
    for text in ("edge-1", "gpu:2", "gpu:2-4 hard", "gpu:2-4 soft 30"):
        check_affinity(text)
    for text in ("", "gpu:", "gpu:0", "gpu:4-2", "gpu soft", "gpu hard 3", "gpu soft x", "a b c"):
        with pytest.raises(InvalidArgument, match="is not a valid affinity"):
            check_affinity(text)
