"""Opening a ledger and its errors; behaviour specific to SQLite; the rules without a database."""

from __future__ import annotations

import math
import os
import pickle
import random
import sqlite3
import traceback
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, make_url
from sqlalchemy.exc import OperationalError

from stateflow.cli.output import default_ledger
from stateflow.errors import (
    IllegalRecord,
    InvalidArgument,
    LedgerReadOnly,
    LedgerReplaced,
    Locked,
    Unavailable,
    WriteUncertain,
)
from stateflow.ledger import App, Entry, Ledger, Record, RecordState, database, rules
from stateflow.ledger.database import _read_only_url, file_of, sqlite_url
from stateflow.ledger.statements import PAGE
from stateflow.local.cluster import LocalCluster
from tests.contract.databases import SERVERS, fresh_database
from tests.sizes import sized

APP = App("tests", "1", "i-7")
NEW, PROCESSING, PROCESSED, FAILED, RESOLVED, SKIPPED = RecordState


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


# -- opening ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "sqlite:////no/such/directory/ledger.db",
        "unknown-dialect://user:hunter2@host/db",
        "oracle://user:hunter2@host/db",
        "postgresql://user:hunter2@host:notaport/db",
        "postgresql://user:/hunter2@host/db",
        "postgresql://user:hunter2@host/db?no_such_option=1",
        "user:hunter2@host/db",
        "mysql+nodriver://user:hunter2@host/db",
        "postgresql://user:hunter2@127.0.0.1:1/db?password=hunter2",
        "mariadb://user:hunter2@127.0.0.1:1/db",
        "mssql://user:hunter2@127.0.0.1:1/db",
        "postgresql:///db?password=hunter2&host=127.0.0.1&port=1",
    ],
)
def test_a_url_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Ledger(url)
    line = str(caught.value)
    assert line.startswith("invalid_argument: the ledger cannot be opened: ")
    assert "sqlite:///path/ledger.db" in line
    assert len(line.splitlines()) == 1
    assert "hunter2" not in repr(caught.value.to_wire())
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)).replace(f"Ledger({url!r})", "")


@pytest.mark.parametrize("kind", list(SERVERS))
def test_a_wrong_password_is_never_printed(kind: str) -> None:
    given = os.environ.get(SERVERS[kind])
    if not given:
        pytest.skip(f"{SERVERS[kind]} names no {kind} server")
    wrong = make_url(given).set(username="nobody-of-this-name", password="hunter2")
    with pytest.raises(InvalidArgument) as caught:
        Ledger(wrong.render_as_string(hide_password=False))
    said = "".join(traceback.format_exception(caught.value)) + repr(caught.value.to_wire())
    assert "nobody-of-this-name" in said
    assert "hunter2" not in said


def test_a_driver_that_is_not_installed() -> None:
    try:
        import pyodbc  # noqa: F401
    except ImportError:
        with pytest.raises(InvalidArgument, match="the driver pyodbc is not installed"):
            Ledger("mssql://host/db")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_text("this is text, and more of it than a header has\n" * 100)
    with pytest.raises(InvalidArgument, match="not a database"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")


@pytest.mark.parametrize("options", [{"author": ""}, {"author": "x" * 129}, {"run_id": "x" * 65}])
def test_authors_and_runs_that_are_refused(url: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="an author must have 1 to 128 characters"):
        Ledger(url, **options)  # type: ignore[arg-type]


#: names of directories, each of which means something in a URL
ODD = ["a?b", "a%20b", "a b", "feature%2Fx", "a#b", "a&mode=memory", "mode=memory", "ü", "a:b@c", "100%", "file:x"]


def test_a_ledger_is_where_its_directory_is_and_nowhere_else(tmp_path: Path) -> None:
    """A ledger lies in its directory, also where the name means something in a URL.

    `a?b` used to have its ledger beside it, and `a%20b` that of another cluster, in `a b`.
    """
    few = ("a?b", "a%20b", "a b", "mode=memory")
    for name in few:
        (tmp_path / name).mkdir()
        file = tmp_path / name / "ledger.db"
        with Ledger(sqlite_url(file)) as ledger:
            assert file.is_file()
            assert file_of(make_url(sqlite_url(file))) == file
            assert ledger.database._file == str(file)
            assert list(ledger.records()) == [], "another cluster's"
            ledger.put(f"item/{few.index(name)}", APP, NEW)
        with Ledger(_read_only_url(file)) as reader:  # the URL that a remedy names
            assert [record.item_id for record in reader.records()] == [f"item/{few.index(name)}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(few)


def test_whoever_names_no_ledger_has_one_below_his_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    for name in ODD:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
        assert file_of(make_url(default_ledger())) == tmp_path / name / "stateflow" / "ledger.db"
        assert file_of(make_url(LocalCluster(data_dir=tmp_path / name).ledger)) == tmp_path / name / "ledger.db"


def test_a_path_that_a_url_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as SQLAlchemy did before 2.1
    monkeypatch.setattr(database, "make_url", lambda url: make_url(url.replace("%3F", "?")))
    with pytest.raises(InvalidArgument, match="cannot be written as a URL"):
        sqlite_url(tmp_path / "a?b")


def test_a_file_that_can_only_be_read(url: str) -> None:
    with Ledger(url) as ledger:
        ledger.put("item", APP, NEW)
    with Ledger(f"sqlite:///file:{make_url(url).database}?mode=ro&uri=true") as reader:
        assert [record.item_id for record in reader.records()] == ["item"]
        assert reader.verify() == []
        for write in (lambda: reader.put("other", APP, NEW), lambda: reader.skip("item"), reader.rebuild):
            with pytest.raises(LedgerReadOnly, match=r"^ledger_read_only: the ledger is read-only"):
                write()
        assert reader.fetch() == ["item"]


def test_a_device_is_no_ledger() -> None:
    for special in ("/dev/null", "/dev"):
        with pytest.raises(InvalidArgument, match="cannot be opened: it is not a regular file"):
            Ledger(f"sqlite:///{special}")


def test_a_relative_path_stays_where_it_was_when_the_ledger_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Ledger("sqlite:///ledger.db") as ledger:
        monkeypatch.chdir(tmp_path / "elsewhere")
        ledger.put("item", APP, "NEW")
        assert not ledger.database.is_missing()
        (tmp_path / "here" / "ledger.db").unlink()
        with pytest.raises(LedgerReplaced, match="deleted or moved"):
            ledger.put("other", APP, "NEW")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_empty_file_that_can_only_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(InvalidArgument, match="cannot be opened: attempt to write a readonly database"):
        Ledger(f"sqlite:///file:{tmp_path / 'empty.db'}?mode=ro&uri=true")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody who may not write")
def test_a_file_in_a_directory_that_can_only_be_read(url: str) -> None:
    """A ledger in a read-only directory is refused, as SQLite keeps its log there.

    The error names a URL that can be read all the same.
    """
    file = Path(str(make_url(url).database))
    with Ledger(url) as ledger:
        ledger.put("item", APP, NEW)
    for place in (*file.parents, file):
        place.chmod(place.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        with pytest.raises(
            LedgerReadOnly, match=r"is not writable.*use sqlite:///file(?::|%3A)/.*immutable=1"
        ) as caught:
            Ledger(url, create=False)
        with Ledger(caught.value.remedy.removeprefix("if no process writes it, use "), create=False) as reader:
            assert reader.fetch() == ["item"]
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", list(SERVERS))
def test_a_user_who_may_only_read(kind: str, tmp_path: Path) -> None:
    grants = {
        "mariadb": ["CREATE USER {user}@'%' IDENTIFIED BY 'x'", "GRANT SELECT ON {database}.* TO {user}@'%'"],
        "postgresql": [
            "CREATE ROLE {user} LOGIN PASSWORD 'x'",
            "GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}",
        ],
    }
    ends = {"mariadb": ["DROP USER {user}@'%'"], "postgresql": ["DROP OWNED BY {user}", "DROP ROLE {user}"]}
    with fresh_database(kind, tmp_path) as url, Ledger(url) as ledger:
        ledger.put("item", APP, NEW)
        names = {"user": f"reader_{uuid.uuid4().hex[:16]}", "database": make_url(url).database}

        def execute(statements: list[str]) -> None:
            for each in statements:
                ledger.database.write(lambda c, each=each: c.exec_driver_sql(each.format(**names).replace("%", "%%")))

        execute(grants[kind])
        try:
            as_reader = make_url(url).set(username=names["user"], password="x").render_as_string(hide_password=False)
            with Ledger(as_reader) as reader:
                assert (reader.fetch(), reader.verify()) == (["item"], [])
                for write in (lambda: reader.put("other", APP, NEW), lambda: reader.skip("item"), reader.rebuild):
                    with pytest.raises(LedgerReadOnly, match=r"^ledger_read_only: the ledger is read-only"):
                        write()
        finally:
            execute(ends[kind])


def test_records_are_durable_the_moment_they_are_reported(url: str) -> None:
    """Another connection sees a record without the writer's help, and SQLite is told to sync."""
    with Ledger(url) as ledger:
        ledger.put("item", APP, NEW)
        reader = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert reader.execute("SELECT count(*) FROM ledger_record").fetchone() == (1,)
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.close()
        with ledger.database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_a_lock_held_by_someone_elses_transaction_is_said_in_our_words(url: str) -> None:
    with Ledger(url, busy_timeout_s=0.01, rng=random.Random(0)) as ledger:
        other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unavailable, match="the ledger stayed busy"):
            ledger.put("item", APP, NEW)
        other.execute("ROLLBACK")
        other.close()
        assert ledger.put("item", APP, NEW).seq == 0


def test_a_write_that_contradicts_stored_rows_each_time_is_not_called_a_busy_ledger(url: str) -> None:
    with Ledger(url, rng=random.Random(0)) as ledger:
        ledger.put("item", APP, NEW)
        insert = "INSERT INTO ledger_record SELECT * FROM ledger_record"
        with pytest.raises(Unavailable, match=r"conflicted with stored rows.*ledger verify.*nothing was written"):
            ledger.database.write(lambda connection: connection.exec_driver_sql(insert))


class Refused(Exception):
    """An error of a driver, with its code where each of the drivers has it."""

    def __init__(self, code: int | str | None) -> None:
        super().__init__(code)
        self.sqlstate = self.sqlite_errorcode = code


@pytest.mark.parametrize(
    ("url", "code", "known"),
    [
        ("sqlite://", 13, True),  # the disk is full
        ("sqlite://", 10, False),  # an I/O error: the log may hold the commit
        ("sqlite://", None, False),
        ("postgresql://h/d", "53100", True),  # the disk is full
        ("postgresql://h/d", "25006", True),  # read-only
        ("postgresql://h/d", "08007", False),  # transaction resolution unknown
        ("postgresql://h/d", "40003", False),  # statement completion unknown
        ("postgresql://h/d", "57P01", False),  # the server shuts down
        ("postgresql://h/d", None, False),
        ("mariadb://h/d", 1290, True),  # read-only
        ("mariadb://h/d", 3101, True),  # rolled back by replication
        ("mariadb://h/d", 1053, False),  # the server shuts down
        ("mariadb://h/d", 1317, False),  # interrupted
        ("mariadb://h/d", 1927, False),  # the connection was killed
        ("mariadb://h/d", 1180, False),  # an error during the commit
    ],
)
def test_an_error_at_a_commit_is_a_refusal_only_where_that_is_known(
    url: str, code: int | str | None, known: bool
) -> None:
    """A caller that is told that nothing was written writes again."""
    found = database.Database(url, rng=random.Random(0))
    error = OperationalError("COMMIT", {}, Refused(code))
    assert isinstance(found._not_written(error, committing=True), WriteUncertain) is not known
    assert not isinstance(found._not_written(error, committing=False), WriteUncertain)


def test_what_a_commit_wrote_before_it_failed_is_not_denied(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(url) as ledger:
        dialect = ledger.database.engine.dialect
        commit = dialect.do_commit

        def fails(connection: Any) -> None:
            commit(connection)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(dialect, "do_commit", fails)
            with pytest.raises(WriteUncertain, match=r"disk I/O error.*read the item again"):
                ledger.put("item", APP, NEW)
        assert ledger.item("item") is not None


def test_a_ledger_in_memory_is_one_for_all_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Ledger("sqlite://") as ledger, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: ledger.put(f"item-{n}", APP, NEW), range(40)))
        assert len(ledger.fetch()) == 40


# -- rules --------------------------------------------------------------------------------------------------


def test_an_error_names_the_record_in_the_way_and_crosses_processes() -> None:
    with Ledger("sqlite://") as ledger:
        lock = ledger.process_new_item("item", APP, lambda _: None)
        lock = ledger.put("item", APP, PROCESSING)
        with pytest.raises(Locked) as caught:
            ledger.put("item", APP, PROCESSING)
    assert caught.value.blocking_record == lock
    assert caught.value.where["blocking_record"] == lock.record_id
    there = pickle.loads(pickle.dumps(caught.value))
    assert (there.blocking_record, there.where["blocking_record"]) == (None, str(lock.record_id))


@pytest.mark.parametrize("now", [NEW, PROCESSING, PROCESSED, FAILED, RESOLVED])
@pytest.mark.parametrize("to", [PROCESSING, PROCESSED, FAILED, RESOLVED])
def test_a_path_leads_there_legally(now: RecordState, to: RecordState) -> None:
    with Ledger("sqlite://") as ledger:
        ledger.put("item", APP, NEW)
        for state in (*(() if now is NEW else rules.path(NEW, now)), *rules.path(now, to)):
            blocking = ledger.item("item").blocking  # type: ignore[union-attr]
            ledger.put("item", APP, state, None if state is PROCESSING else blocking, lease_s=math.inf)
        assert ledger.item("item").state is to  # type: ignore[union-attr]
    assert rules.path(now, to).count(PROCESSED) <= (to is PROCESSED), "nothing counts as done on the way"


@given(
    st.lists(
        st.tuples(st.sampled_from(list(RecordState)), st.none() | st.integers(0, 6), st.sampled_from("ab")), max_size=7
    )
)
def test_what_blocks_is_defined_for_any_list(script: list[tuple[RecordState, int | None, str]]) -> None:
    """The earliest PROCESSING or FAILED record without an answer blocks, in corrupt lists too."""
    records = [
        Record(n, "item", n, App(app, "1"), state, previous, "me", n, "", None)
        for n, (state, previous, app) in enumerate(script)
    ]
    open_ones = []
    for record in records:
        answers = {r.state for r in records if r.previous_record_id == record.record_id}
        if record.state == PROCESSING and not answers & {PROCESSED, FAILED, RESOLVED}:
            open_ones.append(record)
        if record.state == FAILED and RESOLVED not in answers:
            open_ones.append(record)
    assert rules.blocking(records) == (open_ones[0] if open_ones else None)


@settings(max_examples=sized(480))
@given(st.text(max_size=260))
def test_an_id_is_taken_or_refused_whole(item: str) -> None:
    with Ledger("sqlite://") as ledger:
        try:
            ledger.put(item, APP, NEW)
        except IllegalRecord:
            assert ledger.fetch() == []
        else:
            assert ledger.fetch() == [item]


# -- large ledgers ------------------------------------------------------------------------------------------


def test_a_verification_finds_its_pages_by_the_index(url: str) -> None:
    """A verification uses the index for every page.

    Sorting the rest for every page would take hours for millions of records, which no small test would notice.
    """
    asked: list[tuple[str, Any]] = []
    with Ledger(url) as ledger:
        ledger.put_many([Entry(f"item-{n:05}", APP, NEW) for n in range(2 * PAGE + 1)])
        event.listen(
            ledger.database.engine,
            "before_cursor_execute",
            lambda _c, _k, text, values, _x, _m: asked.append((text, values)),
        )
        assert ledger.verify() == []
        paged = [(text, values) for text, values in asked if "ledger_record" in text and "UNION" in text]
        assert len(paged) == 3
        with ledger.database.reading() as connection:
            text, values = paged[-1]
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)]
    assert any(line.startswith("SEARCH ledger_record USING") for line in plan), plan
    assert not any(line.startswith("SCAN ledger_record") for line in plan), plan
