"""``stateflow ledger`` and ``stateflow stages``: tables, one JSON object, one line for an error."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.cli.output import console
from stateflow.errors import ApplicationError
from stateflow.ledger import App, Board, Ledger, StateManager

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
    """Widens the console, which took its width when it was made."""
    monkeypatch.setattr(console, "width", 200)


def run(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--ledger", url])


def said(url: str, *arguments: str) -> Any:
    done = run(url, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def test_a_user_without_a_name_is_his_number(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert said(url, "ledger", "skip", "volume/2")["author"] == f"uid {os.getuid()} (command line)"


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


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_ledger_that_would_end_with_its_process_is_refused(url: str) -> None:
    """A variable of a script that is not set leaves such a URL."""
    for command in (["ledger", "init"], ["controller", "--listen", "127.0.0.1:0"]):
        done = run(url, *command)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "invalid_argument: the ledger would be in memory, and end with this process" in done.stderr


@pytest.mark.parametrize("app", ["reconfig.controller", "reconfig.controller.optional"])
def test_an_item_of_the_controller_is_not_skipped_by_it(app: str, url: str) -> None:
    """The begin of a move that is skipped, and of all moves that begin with it, would fail again and again."""
    with Ledger(url) as ledger:
        ledger.put("move/r/1", App(app, "1"), "NEW")
    for options in ([], ["--app", app]):
        done = run(url, "ledger", "skip", "move/r/1", *options)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("invalid_argument: the item is the controller's own"), done.stderr
    assert said(url, "ledger", "skip", "move/r/1", "--app", "printer")["state"] == "SKIPPED"


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


def test_a_stage_says_what_it_does_and_why_it_failed(url: str) -> None:
    with Ledger(url) as ledger:
        StateManager(ledger).update_state("s2", action="sinking pre-push", status="failure", error=OSError("no room"))
    current = said(url, "stages", "current", "flights")
    assert (current["action"], current["status"]) == ("sinking pre-push", "failure")
    assert (current["error"]["type"], current["error"]["message"]) == ("OSError", "no room")
    shown = run(url, "stages", "current", "flights").stdout
    for word in ("sinking pre-push", "failure", "OSError: no room"):
        assert word in shown
    assert said(url, "stages", "last", "raw")["action"] == "sinking post-push"
    assert [each["state_id"] for each in said(url, "stages", "failed")["stages"]] == ["s2"]
    assert said(url, "stages", "failed", "--job", "other")["stages"] == []
    assert "OSError: no room" in run(url, "stages", "failed", "--job", "flights").stdout
    run(url, "ledger", "resolve", "s2", "--note", "made room")
    assert "resolved: OSError: no room" in run(url, "stages", "failed").stdout


def test_batches_and_jobs(url: str) -> None:
    with Ledger(url) as ledger:
        board = Board(ledger)
        bid = board.create_batch("drain edge-1", "drain", bid="b1", owner="me")
        board.create_batch("later", "move", bid="b2")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0", "p1", "p2"])
        board.move_batch(bid, "IN_PROGRESS")
        board.end_entity(bid, "p0", "COMPLETED", ms=5)
        board.end_entity(bid, "p1", "FAILED", ms=50, result={"error": "no room"})
        job = board.create_job("nightly", bid=bid, schedule="cron 0 3 * * *", fire_us=10**15)
        board.claim_job(job, "w1")
        board.create_job("hourly")
    assert [each["bid"] for each in said(url, "batch", "list")["batches"]] == ["b2", "b1"]
    assert [each["bid"] for each in said(url, "batch", "list", "--status", "NEW")["batches"]] == ["b2"]
    info = said(url, "batch", "info", "b1")
    assert (info["total_entities"], info["succeeded"], info["failed"]) == (3, 1, 1)
    shown = run(url, "batch", "info", "b1").stdout
    for word in ("drain edge-1", "IN_PROGRESS", "entities/s", "slowest entities", "no room"):
        assert word in shown
    assert [each["entity"] for each in said(url, "batch", "entities", "b1")["entities"]] == ["p0", "p1", "p2"]
    assert [each["entity"] for each in said(url, "batch", "entities", "b1", "--status", "WAITING")["entities"]] == [
        "p2"
    ]
    assert [each["name"] for each in said(url, "batch", "jobs")["jobs"]] == ["hourly", "nightly"]
    assert [each["worker"] for each in said(url, "batch", "jobs", "--status", "IN_PROCESS")["jobs"]] == ["w1"]
    for arguments in (["list"], ["entities", "b1"], ["jobs"]):
        done = run(url, "batch", *arguments)
        assert (done.exit_code, done.stderr) == (0, "")


HOSTILE = "a\x1b[31m\x1b]0;x\x07[bold]b[/]\x9b2J\u202ec"


def test_what_others_wrote_moves_no_cursor(url: str) -> None:
    with Ledger(url) as ledger:
        ledger.put(HOSTILE, App("a"), "NEW", payload=HOSTILE)
        with pytest.raises(ApplicationError):
            ledger.process_item(HOSTILE, App("a"), lambda _: [][len(HOSTILE)])
        manager, board = StateManager(ledger), Board(ledger)
        manager.insert_state(state_id=f"s{HOSTILE}", job_id="j", sink_name=HOSTILE, status="failure", error=HOSTILE)
        board.create_batch(HOSTILE, HOSTILE, bid=f"b{HOSTILE}")
        record = ledger.newest(1)[0].record_id
        ledger.database.write(
            lambda c: c.execute(text(f"UPDATE ledger_record SET payload = '{{\x1b[2J' WHERE record_id = {record - 4}"))
        )
    commands = [["ledger", "show"], ["ledger", "show", HOSTILE], ["ledger", "verify"], ["stages", "failed"]]
    commands += [["stages", "current", "j"], ["batch", "list"], ["batch", "info", f"b{HOSTILE}"]]
    for arguments in commands:
        shown = run(url, *arguments).stdout
        assert shown
        assert not set("\x1b\x07\x9b\u202e") & set(shown), arguments
    assert "[bold]b[/]" in run(url, "ledger", "show").stdout


def test_ids_are_whole_in_a_pipe(tmp_path: Path) -> None:
    url, item = f"sqlite:///{tmp_path / 'ledger.db'}", "bucket/" + "key-" * 200
    with Ledger(url) as ledger:
        ledger.put(item, A, "NEW")
    done = subprocess.run(
        [sys.executable, "-m", "stateflow", "ledger", "show", "--ledger", url],
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert item in done.stdout


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
        (["stages", "failed", "--job", "j "], "invalid_argument"),
        (["batch", "info", "nothing"], "illegal_record"),
        (["batch", "entities", "nothing"], "illegal_record"),
        (["batch", "list", "--status", "OVER"], "invalid_argument"),
        (["batch", "jobs", "--status", "OVER"], "invalid_argument"),
        (["ledger", "show", "--processed-by", "a\t"], "illegal_record"),
    ],
)
def test_errors_are_one_line(url: str, arguments: list[str], code: str) -> None:
    done = run(url, *arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"{code}: ")
    assert done.stderr.count("\n") == 1


EVERY_COMMAND = [
    ("ledger", "show"),
    ("ledger", "resolve", "x", "--note", "x"),
    ("ledger", "skip", "x"),
    ("ledger", "verify"),
    ("ledger", "archive", "--older-than", "1d"),
    ("ledger", "tail"),
    ("stages", "current", "x"),
    ("stages", "history"),
    ("stages", "last", "x"),
    ("stages", "trace", "x"),
    ("stages", "failed"),
    ("batch", "list"),
    ("batch", "info", "x"),
    ("batch", "entities", "x"),
    ("batch", "jobs"),
]


@pytest.mark.parametrize("arguments", EVERY_COMMAND, ids=" ".join)
def test_a_database_that_is_something_elses_stays_as_it_is(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Commands leave a foreign database unchanged.

    They used to make 11 tables in it and to switch SQLite's journal mode.
    """
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE theirs (n INTEGER)")
    before = file.read_bytes()
    done = run(f"sqlite:///{file}", *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("invalid_argument: there is no ledger in this database")
    assert "stateflow ledger init" in done.stderr
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["other.db"]


def test_a_ledger_is_made_once_and_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    made = run(url, "ledger", "init")
    assert made.stdout.startswith("a new ledger was created: ")
    assert (tmp_path / "ledger.db").stat().st_mode & 0o777 == 0o600
    again = said(url, "ledger", "init")
    assert (again["done"], again["ledger"] in made.stdout) == ("ready", True)
    assert run(url, "ledger", "show").exit_code == 0
    with Ledger(url) as ledger:
        ledger.database.write(lambda c: c.execute(text("UPDATE ledger_version SET version_num = '0001'")))
        ledger.database.write(lambda c: [c.execute(text(f"DROP TABLE ledger_{each}")) for each in ("hold", "identity")])
    older = run(url, "ledger", "show")
    assert older.stderr.startswith("ledger_too_old: the ledger's schema is '0001'")
    assert run(url, "ledger", "init").stdout.startswith("the ledger was upgraded: ")
    assert run(url, "ledger", "show").exit_code == 0


def test_a_misspelt_ledger_is_not_made(tmp_path: Path) -> None:
    done = run(f"sqlite:///{tmp_path / 'legder.db'}", "ledger", "show")
    assert done.exit_code == 1
    assert done.stderr.startswith("invalid_argument: there is no ledger")
    assert list(tmp_path.iterdir()) == []
    done = run("postgresql://me:hunter2@127.0.0.1:1/db", "ledger", "verify")
    assert done.stderr.startswith("invalid_argument: the ledger cannot be opened")
    assert "hunter2" not in done.stderr
