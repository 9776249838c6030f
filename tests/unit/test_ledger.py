"""The record: append-only, one writer per item at a time, nothing illegal ever written."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateflow.clock import ManualClock
from stateflow.errors import IllegalRecord, InvalidArgument, Locked, StateflowError
from stateflow.ledger import App, Ledger, Record, RecordState

APP = App("tests", "1", "i-7")
NEW, PROCESSING, PROCESSED, FAILED = RecordState


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger(url: str) -> Any:
    opened = Ledger(url, author="me", run_id="run-1", clock=ManualClock(123))
    yield opened
    opened.close()


def chain_to(ledger: Ledger, item: str, *states: RecordState) -> Record | None:
    record = None
    for state in states:
        record = ledger.put(item, APP, state, record)
    return record


def test_a_record_is_what_was_said(ledger: Ledger) -> None:
    new = ledger.put("item", APP, NEW, payload={"b": [1, None], "a": "ü"})
    assert new == Record(1, "item", 0, APP, NEW, None, "me", 123, "run-1", {"b": [1, None], "a": "ü"})
    taken = ledger.put("item", APP, PROCESSING, new)
    assert (taken.seq, taken.previous_record_id, taken.payload) == (1, new.record_id, None)
    assert list(ledger.records("item")) == [new, taken]


def test_records_come_in_the_order_they_were_written(ledger: Ledger) -> None:
    written = [ledger.put(f"item-{n % 3}-{n}", APP, NEW) for n in range(7)]
    assert list(ledger.records()) == written
    assert list(ledger.records("item-0-3")) == [written[3]]
    assert list(ledger.records("unknown")) == []


def test_it_survives_being_opened_again(ledger: Ledger, url: str) -> None:
    written = [chain_to(ledger, "a", NEW, PROCESSING), ledger.put("b", App("x", "2"), NEW, payload=[1])]
    ledger.close()
    again = Ledger(url)
    records = list(again.records())
    assert records[1:] == written
    assert records[2].app == App("x", "2", None)
    assert again.put("c", APP, NEW).record_id == 4
    again.close()


ENDS: list[tuple[RecordState, ...]] = [
    (),
    (NEW,),
    (NEW, PROCESSING),
    (NEW, PROCESSING, PROCESSED),
    (NEW, PROCESSING, FAILED),
    (PROCESSING,),
    (PROCESSING, PROCESSED),
    (PROCESSING, FAILED),
]
LEGAL = {
    ((), NEW),
    ((), PROCESSING),
    ((NEW,), PROCESSING),
    ((NEW, PROCESSING), PROCESSED),
    ((NEW, PROCESSING), FAILED),
    ((PROCESSING,), PROCESSED),
    ((PROCESSING,), FAILED),
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: "-".join(end) or "nothing")
@pytest.mark.parametrize("state", list(RecordState))
def test_what_may_follow_what(ledger: Ledger, end: tuple[RecordState, ...], state: RecordState) -> None:
    newest = chain_to(ledger, "item", *end)
    before = list(ledger.records())
    if (end, state) in LEGAL:
        assert ledger.put("item", APP, state, newest).state is state
    else:
        with pytest.raises((IllegalRecord, Locked)):
            ledger.put("item", APP, state, newest)
        assert list(ledger.records()) == before, "nothing was written"


def test_an_item_is_new_only_once(ledger: Ledger) -> None:
    chain_to(ledger, "item", NEW)
    with pytest.raises(IllegalRecord, match="there already"):
        ledger.put("item", APP, NEW)


def test_a_record_of_another_item_cannot_be_the_previous(ledger: Ledger) -> None:
    other = ledger.put("other", APP, NEW)
    with pytest.raises(IllegalRecord, match="another item"):
        ledger.put("item", APP, PROCESSING, other)
    assert list(ledger.records("item")) == []


@pytest.mark.parametrize("item", ["", "x" * 256])
def test_item_ids_are_bounded(ledger: Ledger, item: str) -> None:
    with pytest.raises(IllegalRecord):
        ledger.put(item, APP, NEW)
    assert ledger.put("x" * 255, APP, NEW).item_id == "x" * 255


# -- one writer at a time -----------------------------------------------------------------------------------


def test_of_two_who_acquire_the_second_is_locked_out(ledger: Ledger) -> None:
    new = ledger.put("item", APP, NEW)
    ledger.put("item", APP, PROCESSING, new)
    with pytest.raises(Locked) as caught:
        ledger.put("item", App("other", "1"), PROCESSING, new)
    assert caught.value.where["item"] == "item"
    assert len(list(ledger.records())) == 2


@pytest.mark.parametrize("end", [(PROCESSING,), (NEW, PROCESSING), (PROCESSING, FAILED)])
def test_a_blocked_item_cannot_be_acquired_without_naming_its_records(
    ledger: Ledger, end: tuple[RecordState, ...]
) -> None:
    chain_to(ledger, "item", *end)
    before = list(ledger.records())
    with pytest.raises(Locked):
        ledger.put("item", App("other", "1"), PROCESSING)
    assert list(ledger.records()) == before


def test_a_finished_item_may_be_processed_again(ledger: Ledger) -> None:
    chain_to(ledger, "item", PROCESSING, PROCESSED)
    assert ledger.put("item", App("other", "1"), PROCESSING).seq == 2


def test_a_result_can_be_told_once(ledger: Ledger) -> None:
    taken = chain_to(ledger, "item", NEW, PROCESSING)
    ledger.put("item", APP, PROCESSED, taken)
    for state in (PROCESSED, FAILED):
        with pytest.raises(Locked):
            ledger.put("item", APP, state, taken)


@pytest.mark.parametrize("start", [(), (NEW,)], ids=["first record", "acquire"])
def test_many_writers_exactly_one_wins(url: str, start: tuple[RecordState, ...]) -> None:
    writers = 8
    first = Ledger(url)
    previous = chain_to(first, "item", *start)
    state = PROCESSING if start else NEW
    ledgers = [Ledger(url) for _ in range(writers)]
    barrier = threading.Barrier(writers)
    outcomes: list[Any] = []

    def write(ledger: Ledger, name: str) -> None:
        barrier.wait()
        try:
            outcomes.append(ledger.put("item", App(name, "1"), state, previous))
        except StateflowError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(each, f"w{n}")) for n, each in enumerate(ledgers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [each for each in outcomes if isinstance(each, Record)]
    lost = [each for each in outcomes if not isinstance(each, Record)]
    assert len(won) == 1
    assert len(lost) == writers - 1
    assert {type(each) for each in lost} <= {Locked, IllegalRecord}
    assert list(first.records("item"))[len(start) :] == won
    for each in [first, *ledgers]:
        each.close()


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(list(RecordState)), st.integers(-1, 3))))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_history_leaves_an_illegal_one(script: list[tuple[str, RecordState, int]]) -> None:
    ledger = Ledger("sqlite://")
    for item, state, at in script:
        known = list(ledger.records(item))
        previous = known[at] if 0 <= at < len(known) else None
        try:
            ledger.put(item, APP, state, previous)
        except StateflowError:
            assert list(ledger.records(item)) == known
    for item in ("a", "b"):
        records = list(ledger.records(item))
        assert [record.seq for record in records] == list(range(len(records)))
        working = None
        for record in records:
            if record.state is PROCESSING:
                assert working is None, "two hold it at once"
                working = record.record_id
            elif record.state is not NEW:
                assert record.previous_record_id == working
                working = None if record.state is PROCESSED else -1
    ledger.close()


# -- opening ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "sqlite:////no/such/directory/ledger.db",
        "unknown-dialect://user:hunter2@host/db",
        "postgresql://user:hunter2@host:notaport/db",
        "user:hunter2@host/db",
        "mysql+nodriver://user:hunter2@host/db",
        "postgresql://user:hunter2@127.0.0.1:1/db?password=hunter2",
        "postgresql:///db?password=hunter2",
    ],
)
def test_a_url_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Ledger(url)
    line = str(caught.value)
    assert line.startswith("invalid_argument: the ledger cannot be opened: ")
    assert "sqlite:///path/ledger.db" in line
    assert "hunter2" not in line
    assert "hunter2" not in repr(caught.value.to_wire())
    assert len(line.splitlines()) == 1


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_text("this is text, and more of it than a header has\n" * 100)
    with pytest.raises(InvalidArgument, match="not a database"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")


def test_records_are_durable_the_moment_they_are_reported(ledger: Ledger, url: str) -> None:
    """Another connection, without the writer's help, sees them; sqlite is told to sync."""
    ledger.put("item", APP, NEW)
    reader = sqlite3.connect(url.removeprefix("sqlite:///"))
    assert reader.execute("SELECT count(*) FROM ledger_record").fetchone() == (1,)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    with ledger._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_a_lock_held_by_someone_elses_transaction_is_said_in_our_words(ledger: Ledger, url: str) -> None:
    with ledger._engine.connect() as connection:  # the pool's only connection: the pragma stays
        connection.exec_driver_sql("PRAGMA busy_timeout=50")
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StateflowError):
        ledger.put("item", APP, NEW)
    other.execute("ROLLBACK")
    other.close()
    assert ledger.put("item", APP, NEW).seq == 0
