"""Contract of the ledger's maintenance on every database: verify, rebuild, archive, crashes, upgrades and indexes."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, ClassVar

import pytest
from sqlalchemy import column, delete, event, insert, literal, select, text, update
from sqlalchemy import table as sql_table

from stateflow.clock import ManualClock
from stateflow.errors import (
    IllegalRecord,
    InvalidArgument,
    LedgerCorrupt,
    LedgerTooNew,
    LedgerTooOld,
)
from stateflow.ledger import App, Board, Entry, Ledger, Record, RecordState, StateManager
from stateflow.ledger.database import Database
from stateflow.ledger.records import BATCH, ENTITY, ITEM, JOB, LEASE, METADATA, RECORD, STAGE, VERDICT
from stateflow.ledger.rules import VIEWS
from stateflow.ledger.schema import migrate
from tests.contract.ledger_support import PATIENCE_S, A, done, sound

V2_RECORD = {"item_id": "ü/1", "app_name": "a", "app_version": "1", "author": "me", "timestamp_us": 5, "run_id": "r"}
V2_BATCH = {"item_id": "b", "payload": '{"set": {"name": "n", "status": "NEW"}}', "payload_schema": "stateflow.batch"}
V2_ITEM = {"item_id": "ü/1", "kind": "item", "state": "PROCESSING", "created_us": 5, "updated_us": 5, "archived": 0}


@contextmanager
def after_statement(ledger: Ledger, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Calls ``act`` once, after that many more statements of a ledger were executed; not at all if there are fewer."""
    left = [act]
    executed = itertools.count()

    def count(*_: Any) -> None:
        if next(executed) >= number and left:
            left.pop()()

    event.listen(ledger.database.engine, "after_cursor_execute", count)
    try:
        yield
    finally:
        event.remove(ledger.database.engine, "after_cursor_execute", count)


class KeepingContract:
    kind: ClassVar[str]

    # -- verify, rebuild, archive -------------------------------------------------------------------------

    def test_every_kind_of_corruption_is_found(self, fresh: Ledger) -> None:
        fresh.register_schema("counts", {"type": "object"})
        ids: dict[str, list[int]] = {}
        for name in ("prev", "mixed", "json", "schema", "noschema", "state", "gap", "order", "head", "nohead", "twice"):
            new = fresh.put(name, A, "NEW", payload={}, payload_schema="counts")
            lock = fresh.put(name, A, "PROCESSING", new)
            ids[name] = [new.record_id, lock.record_id, fresh.put(name, A, "PROCESSED", lock).record_id]
        fresh.put("verdict", A, "NEW")
        fresh.put("lease", A, "NEW")
        assert fresh.verify() == []

        def record(name: str, place: int, **values: Any) -> Any:
            return update(RECORD).where(RECORD.c.record_id == ids[name][place]).values(**values)

        damage = [
            record("prev", 1, previous_record_id=10**9),
            record("mixed", 1, previous_record_id=ids["json"][0]),
            record("json", 0, payload="{"),
            record("schema", 0, payload="[]"),
            record("noschema", 0, payload_schema="unheard-of"),
            record("state", 1, state="DREAMING"),
            record("gap", 2, seq=7),
            record("order", 1, previous_record_id=ids["order"][2]),
            record("twice", 2, state="PROCESSING", previous_record_id=None),
            update(ITEM).where(ITEM.c.item_id == "head").values(state="FAILED", blocking_record_id=1),
            delete(ITEM).where(ITEM.c.item_id == "nohead"),
            delete(VERDICT).where(VERDICT.c.item_id == "head"),
            insert(VERDICT).values(item_id="ghost", verdict="PROCESSED", app_name="a", app_instance=""),
            insert(ITEM).from_select(
                ITEM.columns.keys(),
                ITEM.select()
                .where(ITEM.c.item_id == "verdict")
                .with_only_columns(text("'phantom'"), *[column for column in ITEM.columns if column.name != "item_id"]),
            ),
            insert(LEASE).values(item_id="lease", record_id=1, until_us=5),
            insert(VERDICT).values(item_id="verdict", verdict="SKIPPED", app_name="*", app_instance=""),
        ]
        fresh.database.write(lambda connection: [connection.execute(statement) for statement in damage])
        found = {(fault.item_id, fault.code) for fault in fresh.verify()}
        assert found >= {
            ("prev", "unknown_previous"),
            ("mixed", "unknown_previous"),
            ("mixed", "previous_of_another_item"),
            ("json", "invalid_payload"),
            ("schema", "invalid_payload"),
            ("noschema", "unknown_schema"),
            ("state", "unknown_state"),
            ("state", "illegal_record"),
            ("gap", "sequence_broken"),
            ("gap", "head_differs"),
            ("order", "previous_is_later"),
            ("twice", "illegal_record"),
            ("head", "head_differs"),
            ("head", "verdicts_differ"),
            ("nohead", "head_missing"),
            ("ghost", "verdict_without_records"),
            ("phantom", "head_without_records"),
            ("lease", "stray_lease"),
            ("verdict", "verdicts_differ"),
        }
        broken = fresh.item("state")
        assert broken is not None
        assert not broken.consistent
        with pytest.raises(LedgerCorrupt, match="verify"):
            list(fresh.records("json"))

    @pytest.mark.parametrize("payload", [None, "x", "[1]", '{"set": [1]}', "{}"])
    def test_a_damaged_payload_of_a_batch_is_a_fault(self, fresh: Ledger, payload: str | None) -> None:
        bid = Board(fresh).create_batch("b", "move")
        StateManager(fresh).insert_state(state_id="s")
        fresh.database.write(lambda connection: connection.execute(update(RECORD).values(payload=payload)))
        found = fresh.verify()
        assert {(fault.item_id, fault.code) for fault in found} == {(bid, "invalid_payload"), ("s", "invalid_payload")}
        with pytest.raises(LedgerCorrupt, match="ledger verify"):
            fresh.rebuild()

    @pytest.mark.parametrize(
        ("payload", "said"),
        [
            ('{"set": {}}', "status cannot be None"),
            ('{"set": {"status": "CREATED", "name": {"a": 1}}}', "name cannot be {'a': 1}"),
            ('{"set": {"status": "CREATED", "started_us": "now"}}', "started_us cannot be 'now'"),
            ('{"set": {"status": "CREATED", "bid": "other"}}', "bid cannot be 'other'"),
        ],
    )
    def test_a_payload_whose_columns_no_table_holds_is_a_fault(self, fresh: Ledger, payload: str, said: str) -> None:
        """``rebuild`` repeated such a row like a conflict of two writers, and ended in ``unavailable``."""
        bid = Board(fresh).create_batch("b", "move")
        fresh.database.write(lambda connection: connection.execute(update(RECORD).values(payload=payload)))
        found = [(fault.item_id, fault.code, fault.what) for fault in fresh.verify()]
        assert found == [(bid, "invalid_payload", f"its columns cannot be stored: {said}")]
        with pytest.raises(LedgerCorrupt, match=re.escape(said)):
            fresh.rebuild()

    def test_a_row_of_a_view_that_no_record_explains_is_a_fault(self, fresh: Ledger) -> None:
        board, manager = Board(fresh), StateManager(fresh)
        bid = board.create_batch("b", "move", bid="done")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"])
        board.create_job("j")
        manager.insert_state(state_id="s", action="sinking post-push", status="success")
        fresh.archive(timedelta(seconds=-PATIENCE_S))
        done(fresh, "item")
        assert fresh.verify() == []

        def add(connection: Any) -> None:
            for view in VIEWS.values():
                others = [each for each in view.table.columns if each.name != view.key]
                for ghost in ("ghost", "item"):
                    row = select(literal(ghost), *others).limit(1)
                    connection.execute(insert(view.table).from_select([view.key, *others], row))

        fresh.database.write(add)
        found = [(fault.item_id, fault.code, fault.what.split()[3]) for fault in fresh.verify()]
        assert sorted(found) == sorted(
            (ghost, "row_without_records", kind.value) for kind in VIEWS for ghost in ("ghost", "item")
        )
        fresh.rebuild()
        sound(fresh)

    def test_an_item_whose_first_record_is_gone(self, fresh: Ledger) -> None:
        done(fresh, "item")
        done(fresh, "other")
        fresh.database.write(lambda connection: connection.execute(delete(RECORD).where(RECORD.c.state == "NEW")))
        codes = {fault.code for fault in fresh.verify() if fault.item_id == "item"}
        assert codes >= {"sequence_broken", "unknown_previous"}

    def test_rebuilding_mends_what_is_derived(self, fresh: Ledger) -> None:
        for n in range(20):
            done(fresh, f"item-{n}")
        fresh.skip("item-3", "b")
        lock = fresh.put("held", A, "PROCESSING", fresh.put("held", A, "NEW"))
        fresh.archive(timedelta(seconds=-PATIENCE_S))
        before = fresh.fetch(processed_by=A), fresh.item("item-3")
        fresh.database.write(lambda connection: [connection.execute(delete(table)) for table in (ITEM, VERDICT)])
        assert fresh.verify() != []
        assert fresh.rebuild() == 21
        sound(fresh)
        assert (fresh.fetch(processed_by=A), fresh.item("item-3")) == before
        fresh.put("held", A, "PROCESSED", lock)
        sound(fresh)

    def test_a_writer_that_waits_for_a_rebuild_finds_what_was_rebuilt(self, fresh: Ledger, fresh_url: str) -> None:
        """A writer waits while heads are rebuilt, and then appends to the item as if nothing had happened."""
        lock = fresh.put("item", A, "PROCESSING", fresh.put("item", A, "NEW"))
        asked, written = threading.Event(), list[Future[Record]]()
        with Ledger(fresh_url, busy_timeout_s=PATIENCE_S) as other, ThreadPoolExecutor(1) as pool:
            event.listen(other.database.engine, "before_cursor_execute", lambda *_: asked.set())

            def write() -> None:
                written.append(pool.submit(other.put, "item", A, "PROCESSED", lock))
                assert asked.wait(PATIENCE_S)

            with after_statement(fresh, 4, write):  # the heads are deleted, and not rebuilt yet
                assert fresh.rebuild() == 1
            assert [done.result(PATIENCE_S).seq for done in written] == [2]
        sound(fresh)

    def test_archive_keeps_what_is_open(self, fresh: Ledger) -> None:
        clock = ManualClock(10**15)
        fresh._clock = clock
        done(fresh, "done")
        fresh.put("new", A, "NEW")
        fresh.put("held", A, "PROCESSING", fresh.put("held", A, "NEW"))
        fresh.put("failed", A, "FAILED", fresh.put("failed", A, "PROCESSING", fresh.put("failed", A, "NEW")))
        fresh.put("resolved", A, "PROCESSING", fresh.put("resolved", A, "NEW"))
        fresh.resolve("resolved", "by hand")
        clock.advance(100)
        done(fresh, "young")
        records = list(fresh.records())
        assert fresh.archive(timedelta(seconds=100)) == 0
        assert fresh.archive(datetime.fromtimestamp(10**9 + 1, UTC)) == 1
        assert fresh.archive(timedelta(seconds=99)) == 0
        assert list(fresh.records(archived=True)) == records
        assert list(fresh.records()) == [record for record in records if record.item_id != "done"]
        assert fresh.fetch() == ["failed", "held", "new", "resolved", "young"]
        archived = fresh.item("done")
        assert archived is not None
        assert (archived.archived, archived.state, len(archived.records)) == (True, "PROCESSED", 3)
        assert list(fresh.records("done")) == list(archived.records)
        for state in ("NEW", "PROCESSING", "SKIPPED"):
            with pytest.raises(IllegalRecord, match="the item is archived"):
                fresh.put("done", A, state)
        with pytest.raises(InvalidArgument, match="with a time zone"):
            fresh.archive(datetime(2026, 1, 1))
        sound(fresh)

    def test_an_item_that_is_archived_while_it_is_read_is_read_once(self, fresh: Ledger, fresh_url: str) -> None:
        states = ["NEW", "PROCESSING", "PROCESSED"]
        with Ledger(fresh_url) as other:

            def archive() -> None:
                other.archive(timedelta(seconds=-PATIENCE_S))

            for number in range(2):  # SQLite's BEGIN is a statement, too
                one, two = f"one-{number}", f"two-{number}"
                done(fresh, one)
                with after_statement(fresh, number, archive):
                    [item] = fresh.items([one])
                assert ([record.state for record in item.records], item.faults) == (states, ())
                done(fresh, two)
                with after_statement(fresh, number, archive):
                    assert [record.state for record in fresh.records(two)] == states

    def test_a_ledger_that_is_written_while_it_is_verified_has_no_faults(self, fresh: Ledger, fresh_url: str) -> None:
        with Ledger(fresh_url) as other:
            for number in range(8):
                lock = fresh.put(f"item-{number}", A, "PROCESSING", fresh.put(f"item-{number}", A, "NEW"))

                def write(lock: Record = lock) -> None:
                    other.put(lock.item_id, A, "PROCESSED", lock)
                    done(other, f"new-{lock.item_id}")

                with after_statement(fresh, number, write):
                    assert fresh.verify() == [], f"written after statement {number}"
        sound(fresh)

    @pytest.mark.thorough
    def test_archive_of_many(self, fresh: Ledger) -> None:
        for n in range(450):
            new = Entry(f"item-{n}", A, "NEW")
            lock = Entry(f"item-{n}", A, "PROCESSING", new)
            fresh.put_many([new, lock, Entry(f"item-{n}", A, "PROCESSED", lock)])
        everything = list(fresh.records())
        assert fresh.archive(timedelta(seconds=-PATIENCE_S)) == 450
        assert list(fresh.records()) == []
        assert list(fresh.records(archived=True)) == everything
        sound(fresh)

    # -- crashes ------------------------------------------------------------------------------------------

    @pytest.mark.thorough
    def test_a_kill_between_any_two_statements(self, fresh: Ledger, fresh_url: str) -> None:
        """A writer that is killed before any one statement or commit leaves no half-done change.

        Later calls to the ledger succeed.
        """
        command = [sys.executable, "-m", "tests.contract.ledger_worker", fresh_url]
        whole = None
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            for statement in range(500):
                run = f"run{statement}"
                server.stdin.write(json.dumps([run, statement]) + "\n")
                server.stdin.flush()
                status = int(server.stdout.readline())
                assert fresh.verify() == [], f"killed at {statement}"
                many = [record for record in fresh.records(archived=True) if record.item_id.startswith(f"{run}-many")]
                assert len(many) in (0, 10), "a batch is whole or not there"
                if status == 0:
                    whole = statement
                    break
                assert status == -9
        assert whole is not None
        assert whole > 40
        sound(fresh)
        for item in fresh.unprocessed(None, "heir"):
            fresh.process_item(item.item_id, App("heir"), lambda _: None)
        sound(fresh)

    # -- schema -------------------------------------------------------------------------------------------

    def test_a_fresh_database_gets_what_the_tables_say(self, fresh: Ledger) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        with fresh.database.reading() as connection:
            context = MigrationContext.configure(
                connection, opts={"version_table": "ledger_version", "compare_type": False}
            )
            assert compare_metadata(context, METADATA) == []

    def test_a_schema_newer_than_the_program(self, fresh: Ledger, fresh_url: str) -> None:
        done(fresh, "item")
        fresh.database.write(
            lambda connection: connection.execute(text("UPDATE ledger_version SET version_num = '0999'"))
        )
        with pytest.raises(LedgerTooNew, match=r"^ledger_too_new: .*'0999'.*: use the newer stateflow"):
            Ledger(fresh_url)
        with fresh.database.reading() as connection:
            assert connection.execute(text("SELECT version_num FROM ledger_version")).scalar() == "0999"

    def test_who_only_looks_makes_nothing(self, fresh_url: str) -> None:
        with pytest.raises(InvalidArgument, match=r"there is no ledger .*`stateflow ledger init`"):
            Ledger(fresh_url, create=False)
        with Ledger(fresh_url) as made:
            assert made.opened == "made"
            done(made, "item")
            with Ledger(fresh_url, create=False) as again:
                assert (again.opened, again.fetch()) == ("ready", ["item"])
            made.database.write(lambda c: c.execute(text("UPDATE ledger_version SET version_num = '0001'")))
            with pytest.raises(LedgerTooOld, match=r"schema is '0001'.*`stateflow ledger init`"):
                Ledger(fresh_url, create=False)

    def test_many_open_a_fresh_ledger_at_once(self, fresh_url: str) -> None:
        errors: list[Exception] = []
        barrier = threading.Barrier(6)

        def open_it(name: str) -> None:
            barrier.wait()
            try:
                with Ledger(fresh_url, busy_timeout_s=60) as ledger:
                    ledger.put(name, A, "NEW")
            except Exception as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=open_it, args=(f"item-{n}",)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, "\n".join(f"{error!r} after {error.__cause__!r}" for error in errors)
        with Ledger(fresh_url) as ledger:
            assert ledger.fetch() == [f"item-{n}" for n in range(6)]

    def test_an_upgrade_that_was_killed_is_done_again(self, fresh: Ledger, fresh_url: str) -> None:
        fresh.database.write(lambda connection: connection.execute(text("DELETE FROM ledger_version")))
        if self.kind == "mariadb":  # MariaDB commits each statement of a schema change by itself
            with Ledger(fresh_url) as again:
                done(again, "item")
                sound(again)
                again.database.write(lambda connection: connection.execute(text("DELETE FROM ledger_version")))
            with pytest.raises(LedgerCorrupt, match="no schema version"):
                Ledger(fresh_url)

    def test_a_ledger_of_the_version_before(self, fresh_url: str) -> None:
        """An upgraded ledger still has all its records, and accepts what only the new version does.

        On MariaDB, the upgrade is done again after it was killed half-way.
        """
        database = Database(fresh_url, rng=Random(0))
        migrate_to = migrate
        database.use_write_ahead_log()
        database.write(lambda connection: migrate_to(connection, "0002"))
        rows: dict[str, list[dict[str, Any]]] = {
            "ledger_record": [
                V2_RECORD | {"record_id": 1, "seq": 0, "state": "NEW"},
                V2_RECORD | {"record_id": 2, "seq": 1, "state": "PROCESSING", "previous_record_id": 1},
                V2_RECORD | V2_BATCH | {"record_id": 3, "seq": 0, "state": "NEW"},
            ],
            "ledger_item": [
                V2_ITEM | {"seq": 1, "newest_record_id": 2, "blocking_record_id": 2, "blocking_state": "PROCESSING"},
                V2_ITEM | {"item_id": "b", "kind": "batch", "seq": 0, "state": "NEW", "newest_record_id": 3},
            ],
            "ledger_lease": [{"item_id": "ü/1", "record_id": 2, "until_us": 5}],
            "ledger_batch": [
                {"bid": "b", "name": "n", "status": "NEW", "created_us": 5, "listed": 0, "first_record_id": 3}
            ],
        }

        def fill(connection: Any) -> None:
            for table, each in rows.items():
                for row in each:
                    columns = [column(name) for name in row]
                    connection.execute(insert(sql_table(table, *columns)).values(**row))
            if self.kind == "postgresql":  # the rows were given their ids by hand, so the sequence is set to follow
                connection.execute(text("SELECT setval('ledger_record_record_id_seq', 3)"))

        database.write(fill)
        if self.kind == "mariadb":  # as if the upgrade had been killed after its first step
            database.write(lambda c: c.execute(text("ALTER TABLE ledger_batch ADD worked_us BIGINT")))
        database.close()
        with Ledger(fresh_url) as ledger:
            assert ledger.opened == "upgraded"
            assert ledger.verify() == []
            assert [record.record_id for record in ledger.records()] == [1, 2, 3]
            [released] = ledger.resolve_expired()
            assert (released.item_id, released.record_id) == ("ü/1", 4)
            assert Board(ledger).batch("b")["name"] == "n"
            done(ledger, "x" * 1024)
            sound(ledger)

    # -- indexes ------------------------------------------------------------------------------------------

    def full_scans(self, connection: Any, statement: str, parameters: Any) -> list[str]:
        """Returns the lines of this database's EXPLAIN that say that the statement reads a whole table."""
        raise NotImplementedError

    def analyse(self, connection: Any) -> None:
        """Updates the planner's statistics, so that it knows how many rows the tables have."""
        for table in METADATA.sorted_tables:
            verb = "ANALYZE TABLE" if self.kind == "mariadb" else "ANALYZE"
            connection.execute(text(f"{verb} {table.name}"))

    @pytest.mark.thorough
    def test_no_query_reads_a_whole_table(self, fresh: Ledger) -> None:
        new = [Entry(f"item-{n:05}", App(f"app-{n % 7}"), "NEW") for n in range(3000)]
        locks = [Entry(each.item_id, each.app, "PROCESSING", each) for each in new[:2400]]
        ends = [Entry(each.item_id, each.app, "PROCESSED", each) for each in locks[:1200]]
        skips = [Entry(each.item_id, App("nobody" if n % 2 else "*"), "SKIPPED") for n, each in enumerate(new[::9])]
        fresh.put_many([*new, *locks, *ends, *skips])
        fresh.database.write(self.fill_views)
        fresh.database.write(self.analyse)
        asked: list[tuple[str, Any]] = []

        def remember(_c: Any, _cursor: Any, statement: str, parameters: Any, _x: Any, many: bool) -> None:
            asked.append((statement, parameters[0] if many and isinstance(parameters, list) else parameters))

        event.listen(fresh.database.engine, "before_cursor_execute", remember)
        self.everything(fresh)
        event.remove(fresh.database.engine, "before_cursor_execute", remember)
        questions = {
            statement: parameters
            for statement, parameters in asked
            if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE"))
        }
        assert len(questions) > 20
        with fresh.database.reading() as connection:
            scans = {each: self.full_scans(connection, each, values) for each, values in questions.items()}
        found = [f"{scan} in {statement}" for statement, each in scans.items() for scan in each]
        assert not found, "\n\n".join(found)

    @staticmethod
    def fill_views(connection: Any) -> None:
        """Writes so many rows that no planner prefers to read a whole table."""
        for table in (STAGE, BATCH, ENTITY, JOB):
            fixed = {"created_on": 1, "updated_on": 1, "status": "success", "created_us": 1, "listed": 1, "tries": 0}
            columns = {name: value for name, value in fixed.items() if name in table.columns}
            named = [column.name for column in table.columns if column.name.endswith("_id") or column.name == "bid"]
            rows = [
                columns
                | {name: f"{name}-{n:05}" for name in named}
                | {"first_record_id": n}
                | {name: f"{name}-{n}" for name in ("correlation_id_in", "correlation_id_out") if name in table.columns}
                | {name: f"e{n % 50}" for name in ("source_entity", "entity") if name in table.columns}
                for n in range(1, 5000)
            ]
            connection.execute(insert(table), rows)

    @staticmethod
    def everything(ledger: Ledger) -> None:
        """Makes every call of the public API that asks the database about items."""
        ledger.item("item-00005")
        list(ledger.records("item-00005"))
        next(ledger.records(after=17))
        next(ledger.records(after=17, archived=True))
        for app in ("app-1", App("app-1", "", "one")):
            ledger.query(app, app)
            ledger.query(app, "nobody")
            ledger.query(requester=app)
            ledger.fetch(app)
            ledger.fetch(app, "PROCESSED")
        for state in RecordState:
            ledger.fetch(state=state)
        ledger.unprocessed("app-1", "nobody", lambda item: False, on_blocked="raise")
        ledger.process_new_item("fresh", A, lambda _: None)
        ledger.process_item("item-00003", A, lambda _: None)
        ledger.process_all(A, lambda item: item.item_id < "item-00010", lambda _: None, prepared_by="app-1")
        lock = ledger.put("item-02999", A, "PROCESSING")
        ledger.renew(lock)
        ledger.resolve("item-02999", "by hand")
        ledger.skip("item-02998", "someone")
        ledger.resolve_expired()
        ledger.register_schema("new", {"type": "object"})
        manager, board = StateManager(ledger), Board(ledger)
        manager.insert_state(job_id="j", state_id="s", source_entity="a", source_name="n")
        manager.update_state("s", status="success", action="sinking post-push")
        manager.get_current_state("j", "a", "b")
        manager.get_last_record("a")
        manager.get_failures()
        manager.get_failures("j")
        manager.get_processing_history()
        manager.get_processing_history("j")
        manager.trace("x")
        bid = board.create_batch("b", "move", bid="b")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"])
        board.end_entity(bid, "p0", "FAILED", ms=3)
        board.move_batch(bid, "PAUSED")
        board.retry_batch(bid)
        board.batch(bid)
        board.batches()
        board.batches("DONE")
        board.claim_job(board.create_job("j", bid=bid, fire_us=1), "w")
        board.jobs("WAITING")
        ledger.archive(timedelta(days=1))
        ledger.archive(timedelta(seconds=-PATIENCE_S))
