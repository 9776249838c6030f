"""``stateflow ledger`` and ``stateflow stages``: tables, one JSON object, one line for an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.cli.output import console
from stateflow.errors import ApplicationError
from stateflow.ledger import App, Ledger, StateManager

A = App("shredder", "0.13", "one")


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger(url, run_id="run-1") as ledger:
        ledger.put("volume/[red]1[/]", A, "NEW", payload={"bytes": 7})
        ledger.process_new_item("volume/2", A, lambda _: None)
        with pytest.raises(ApplicationError):
            ledger.process_new_item("volume/3", A, lambda _: 1 / 0)
        manager = StateManager(ledger)
        first = manager.insert_state(job_id="flights", state_id="s1", source_entity="raw", correlation_id_out="c1")
        manager.update_state(first["state_id"], action="sinking post-push", status="success", record_count=7)
        manager.insert_state(job_id="flights", state_id="s2", source_entity="clean")
    return url


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the width was when the console was made."""
    monkeypatch.setattr(console, "width", 200)


def run(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--ledger", url])


def said(url: str, *arguments: str) -> Any:
    done = run(url, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def test_items_are_shown(url: str) -> None:
    done = run(url, "ledger", "show")
    assert done.exit_code == 0
    assert "3 items" in done.stdout
    assert "volume/[red]1[/]" in done.stdout, "markup in a name is text"
    listed = said(url, "ledger", "show", "--state", "FAILED")
    assert (listed["total"], [each["item_id"] for each in listed["items"]]) == (1, ["volume/3"])
    assert said(url, "ledger", "show", "--limit", "1")["total"] == 3
    assert said(url, "ledger", "show", "--processed-by", "shredder")["items"] == []


def test_one_item_is_shown_with_its_records(url: str) -> None:
    done = run(url, "ledger", "show", "volume/3")
    assert "volume/3: FAILED, blocked by record 7" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    item = said(url, "ledger", "show", "volume/3")
    assert [record["state"] for record in item["records"]] == ["NEW", "PROCESSING", "FAILED"]
    assert item["blocking_record_id"] == 7


def test_a_failure_is_resolved_and_an_item_skipped(url: str) -> None:
    assert said(url, "ledger", "resolve", "volume/3", "--note", "seen to")["payload"] == {"note": "seen to"}
    assert said(url, "ledger", "skip", "volume/2", "--app", "printer")["app"]["name"] == "printer"
    assert run(url, "ledger", "skip", "volume/3").exit_code == 0
    with Ledger(url) as ledger:
        assert ledger.query(requester="printer") == ["volume/[red]1[/]"]
        assert "(command line)" in next(reversed(list(ledger.records("volume/3")))).author


def test_faults_are_listed_with_status_1(url: str) -> None:
    assert run(url, "ledger", "verify").stdout == "the ledger is sound\n"
    with Ledger(url) as ledger:
        ledger.database.write(lambda c: c.execute(text("UPDATE ledger_record SET payload = '{' WHERE record_id = 1")))
    done = run(url, "ledger", "verify")
    assert done.exit_code == 1
    assert "invalid_payload" in done.stdout
    done = run(url, "ledger", "verify", "--json")
    assert done.exit_code == 1
    assert [fault["record_id"] for fault in json.loads(done.stdout)["faults"]] == [1]
    assert run(url, "ledger", "show", "volume/[red]1[/]").exit_code == 0
    assert run(url, "ledger", "tail", "-n", "100").stderr.startswith("ledger_corrupt: ")


def test_archive_and_tail(url: str) -> None:
    assert said(url, "ledger", "archive", "--older-than", "90d") == {"archived": 0}
    assert "volume/3" in run(url, "ledger", "tail", "-n", "100").stdout
    done = run(url, "ledger", "tail", "-n", "2", "--json")
    assert [json.loads(line)["record_id"] for line in done.stdout.splitlines()] == [11, 12]


def test_stages(url: str) -> None:
    assert said(url, "stages", "current", "flights")["state_id"] == "s2"
    assert said(url, "stages", "last", "raw")["record_count"] == 7
    assert [each["state_id"] for each in said(url, "stages", "history")["stages"]] == ["s1", "s2"]
    assert [each["state_id"] for each in said(url, "stages", "trace", "c1")["stages"]] == ["s1", "s2"]
    for arguments in (["current", "flights"], ["last", "raw"], ["history", "--job", "flights"], ["trace", "c1"]):
        done = run(url, "stages", *arguments)
        assert done.exit_code == 0
        assert "s1" in done.stdout or "s2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ledger", "show", "nothing"], "illegal_record"),
        (["ledger", "show", "--state", "DONE"], "invalid_argument"),
        (["ledger", "resolve", "volume/2", "--note", "x"], "illegal_record"),
        (["ledger", "resolve", "nothing", "--note", "x"], "illegal_record"),
        (["ledger", "skip", "nothing"], "illegal_record"),
        (["ledger", "archive", "--older-than", "soon"], "invalid_argument"),
        (["ledger", "archive", "--older-than", "9999999999w"], "invalid_argument"),
        (["stages", "current", "nothing"], "illegal_record"),
        (["stages", "last", "nothing"], "illegal_record"),
        (["stages", "trace", "nothing"], "illegal_record"),
    ],
)
def test_errors_are_one_line(url: str, arguments: list[str], code: str) -> None:
    done = run(url, *arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"{code}: ")
    assert done.stderr.count("\n") == 1


def test_a_misspelt_ledger_is_not_made(tmp_path: Path) -> None:
    done = run(f"sqlite:///{tmp_path / 'legder.db'}", "ledger", "show")
    assert done.exit_code == 1
    assert done.stderr.startswith("invalid_argument: there is no ledger")
    assert list(tmp_path.iterdir()) == []
    done = run("postgresql://me:hunter2@127.0.0.1:1/db", "ledger", "verify")
    assert done.stderr.startswith("invalid_argument: the ledger cannot be opened")
    assert "hunter2" not in done.stderr
