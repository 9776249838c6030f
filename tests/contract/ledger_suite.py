"""Contract of the ledger's items and records. The test class of each database inherits it and sets ``kind``."""

from __future__ import annotations

import json
import multiprocessing
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, insert, text, update

from stateflow.clock import ManualClock
from stateflow.errors import (
    ApplicationError,
    IllegalRecord,
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    LedgerCorrupt,
    Locked,
    StateflowError,
    Unavailable,
)
from stateflow.ledger import App, Board, Entry, Item, Ledger, Record, RecordState, StateManager, rules, statements
from stateflow.ledger.records import LEASE, RECORD, SCHEMA, Who
from stateflow.ledger.statements import load_heads
from tests.contract import ledger_oracle as oracle
from tests.contract.databases import fresh_database
from tests.contract.ledger_oracle import Step
from tests.contract.ledger_support import PATIENCE_S, A, B, done, item_id, sound
from tests.contract.ledger_worker import acquire
from tests.sizes import sized

RIVALS, ROUNDS = 8, sized(1000)


def _state(step: Step) -> str:
    return step.state


class LedgerContract:
    kind: ClassVar[str]

    # -- records ------------------------------------------------------------------------------------------

    def test_a_record_is_what_was_said(self, ledger: Ledger, url: str) -> None:
        item = item_id()
        payload = {"b": [1, None, 2.5, True], "a": "ü \x00 \U0001f600 \ud800", "": {}}
        new = ledger.put(item, App("tests", "1", "i-7"), "NEW", payload=payload)
        wanted = Record(
            new.record_id, item, 0, App("tests", "1", "i-7"), RecordState.NEW, None, "me", 123, "run-1", payload
        )
        assert new == wanted
        taken = ledger.put(item, A, RecordState.PROCESSING, new.record_id)
        assert (taken.seq, taken.previous_record_id, taken.payload) == (1, new.record_id, None)
        with Ledger(url) as again:
            assert list(again.records(item)) == [new, taken]
            assert again.item(item) == Item(item, (new, taken), RecordState.PROCESSING, taken)

    @pytest.mark.parametrize("pair", [("case", "CASE"), ("straße", "strasse"), ("é", "e"), ("a", " a"), ("1", "01")])
    def test_ids_are_compared_byte_by_byte(self, ledger: Ledger, pair: tuple[str, str]) -> None:
        stem = item_id()
        for name in pair:
            ledger.put(stem + name, A, "NEW", payload=name)
            ledger.skip(stem + name, App(name.strip()))
        assert [ledger.item(stem + name).records[0].payload for name in pair] == list(pair)  # type: ignore[union-attr]

    @pytest.mark.parametrize("bad", ["", "x" * 1025, "ü" * 513, "nul\0", "trailing ", "\ud800", None, 7])
    def test_item_ids_that_are_refused(self, ledger: Ledger, bad: Any) -> None:
        before = list(ledger.records())
        with pytest.raises(IllegalRecord, match="an item id must be text of 1 to 1,024 bytes"):
            ledger.put(bad, A, "NEW")
        assert list(ledger.records()) == before

    def test_the_longest_ids(self, ledger: Ledger) -> None:
        app = App("ñ" * 128, "v" * 64, "\U0001f600" * 128)
        items = [item_id() + "x" * (1024 - 32), item_id() + "ü" * ((1024 - 32) // 2), item_id() + "\U0001f600" * 248]
        for item in items:
            assert ledger.process_new_item(item, app, lambda _: None).seq == 2
            ledger.skip(item, App("ñ" * 128, "v", "\U0001f601" * 128))
            assert ledger.resolve_expired() == []
        assert ledger.fetch(processed_by=app) == sorted(items)
        assert ledger.put(items[0][:-1] + "y", A, "NEW").seq == 0, "all of it counts"

    def test_ids_are_keys_of_object_stores(self, fresh: Ledger) -> None:
        """Item ids may contain anything, and sort by their bytes on every database."""
        items = ["a", "a\t", "a\x01/b", "a !", "a/b c", "a%2F\\'\"`;--", "ä", "\U0001f600", "\uffff", "B"]
        for item in items:
            done(fresh, item)
        assert fresh.fetch() == sorted(items)
        assert fresh.archive(timedelta(seconds=-PATIENCE_S)) == len(items)
        sound(fresh)

    @pytest.mark.parametrize(
        "app",
        [
            App(""),
            App("x" * 129),
            App("a", "v" * 65),
            App("a", "1", ""),
            App("a", "1", "x" * 129),
            App("*"),
            App("a\t"),
        ],
    )
    def test_applications_that_are_refused(self, ledger: Ledger, app: App) -> None:
        with pytest.raises(IllegalRecord):
            ledger.put(item_id(), app, "NEW")

    @pytest.mark.parametrize(
        "payload", [{1, 2}, float("nan"), {"x": b"bytes"}, object(), {"a": {1: 2, "1": 3, None: 4}}]
    )
    def test_payloads_that_are_no_json(self, ledger: Ledger, payload: Any) -> None:
        item = item_id()
        with pytest.raises(InvalidPayload, match=r"^invalid_payload: the payload is not JSON"):
            ledger.put(item, A, "NEW", payload=payload)
        assert ledger.item(item) is None

    def test_a_large_payload(self, ledger: Ledger) -> None:
        item = item_id()
        ledger.put(item, A, "NEW", payload="x" * 200_000)
        assert [len(record.payload) for record in ledger.records(item)] == [200_000]

    @pytest.mark.parametrize("character", ["ü", '"'])
    def test_payloads_of_many_megabytes(self, ledger: Ledger, character: str) -> None:
        """Large payloads are stored unescaped. One that is too large for some database is refused on all of them."""
        item, million = item_id(), 1_000_000
        payload = character * (5 * million if character == "ü" else 3 * million)  # 10 MB
        ledger.put(item, A, "NEW", payload=payload)
        assert next(ledger.records(item)).payload == payload
        with ledger.database.reading() as connection:
            kept = connection.execute(RECORD.select().where(RECORD.c.item_id == item)).one().payload
        assert len(kept.encode()) < 10.1 * million
        with pytest.raises(InvalidPayload, match=r"the limit is 15,728,640.*: store it elsewhere"):
            ledger.put(item, A, "PROCESSING", payload=payload + payload)
        entries = [Entry(f"{item}-{n}", A, "NEW", payload=payload) for n in range(2)]
        assert [record.payload == payload for record in ledger.put_many(entries)] == [True, True]

    @pytest.mark.parametrize("bad", ["nul\0", "\ud800"])
    def test_what_cannot_be_there_is_not_there(self, fresh: Ledger, bad: str) -> None:
        """Names that no database can store give the same answer on each database, never the driver's own message."""
        assert fresh.item(bad) is None
        assert fresh.items([bad, "x"]) == []
        assert list(fresh.records(bad)) == []
        manager, board = StateManager(fresh), Board(fresh)
        for app_call in (lambda: fresh.query(bad), lambda: fresh.query(None, bad), lambda: fresh.fetch(bad)):
            with pytest.raises(IllegalRecord, match="an application's name must have 1 to 128 characters"):
                app_call()
        assert manager.get_current_state("j", bad) is None
        assert manager.get_last_record(bad) is None
        for job_call in (
            lambda: manager.get_current_state(bad),
            lambda: manager.get_current_state("j", None, bad),
            lambda: manager.get_current_state("j "),
            lambda: manager.get_processing_history(bad),
            lambda: manager.get_failures(bad),
            lambda: manager.trace(bad),
        ):
            with pytest.raises(InvalidArgument, match=r"(job|correlation)_id must have|cannot be stored in a ledger"):
                job_call()
        for board_call in (lambda: board.batch(bad), lambda: board.job(bad), lambda: board.move_batch(bad, "NEW")):
            with pytest.raises(IllegalRecord, match="there is no such"):
                board_call()

    def test_numbers_beyond_64_bits(self, fresh: Ledger) -> None:
        fresh.put("x", A, "NEW", payload=2**70)
        assert next(fresh.records()).payload == 2**70
        with pytest.raises(IllegalRecord, match="the previous record does not exist"):
            fresh.put("x", A, "PROCESSING", 2**70)
        try:
            assert list(fresh.records(after=2**70)) == []
        except InvalidArgument as error:
            assert "a number exceeds 64 bits" in str(error)  # noqa: PT017 - MariaDB compares with any number

    @pytest.mark.parametrize(
        "schema",
        [
            {"$ref": "#/$defs/nowhere"},
            {"properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}},
            {"properties": {"a": {"pattern": "("}}},
            {"allOf": [{"$id": "http://x/y", "$ref": "z"}]},
            {"type": "nothing"},
            {"properties": 3},
            {"minProperties": "x"},
        ],
    )
    def test_schemas_that_cannot_be_applied(self, fresh: Ledger, schema: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match="not a JSON schema"):
            fresh.register_schema("broken", schema)
        body = json.dumps(schema)  # as an earlier version accepted it
        fresh.database.write(lambda connection: connection.execute(insert(SCHEMA).values(name="broken", body=body)))
        with pytest.raises(InvalidPayload, match="its schema cannot be applied"):
            fresh.put("item", A, "NEW", payload={"a": "x"}, payload_schema="broken")
        assert fresh.verify() == []

    @pytest.mark.parametrize("body", ["{", "[1]", "null", "true"])
    def test_a_stored_schema_that_is_damaged(self, fresh: Ledger, body: str) -> None:
        fresh.register_schema("s", {"type": "object"})
        fresh.put("item", A, "NEW", payload={}, payload_schema="s")
        fresh.database.write(lambda connection: connection.execute(update(SCHEMA).values(body=body)))
        for write in (
            lambda: fresh.put("other", A, "NEW", payload={}, payload_schema="s"),
            lambda: fresh.register_schema("s", {"type": "object"}),
        ):
            with pytest.raises(LedgerCorrupt, match=r"a stored schema cannot be read \(schema=s\): restore"):
                write()
        item = fresh.item("item")
        assert item is not None
        for faults in (item.faults, fresh.verify()):
            assert [(each.item_id, each.code) for each in faults] == [("item", "unreadable_schema")]

    def test_a_schema_may_refer_to_itself(self, fresh: Ledger) -> None:
        tree = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
        fresh.register_schema("tree", tree)
        fresh.register_schema("own", {"$ref": "https://json-schema.org/draft/2020-12/schema"})
        fresh.put("item", A, "NEW", payload={"n": {"n": {}}}, payload_schema="tree")
        with pytest.raises(InvalidPayload, match="the payload violates its schema"):
            fresh.put("bad", A, "NEW", payload={"n": 1}, payload_schema="tree")
        fresh.register_schema("endless", {"$ref": "#"})
        with pytest.raises(InvalidPayload, match="refers to itself endlessly"):
            fresh.put("bad", A, "NEW", payload={}, payload_schema="endless")

    def test_a_payload_schema(self, fresh: Ledger, fresh_url: str) -> None:
        schema = {"type": "object", "required": ["rows"], "properties": {"rows": {"type": "integer"}}}
        with pytest.raises(InvalidPayload, match="unknown payload schema 'counts'"):
            fresh.put("early", A, "NEW", payload={"rows": 1}, payload_schema="counts")
        fresh.register_schema("counts", schema)
        fresh.register_schema("counts", dict(schema))
        with pytest.raises(InvalidArgument, match="already registered with another schema"):
            fresh.register_schema("counts", {"type": "object"})
        with pytest.raises(InvalidArgument, match="not a JSON schema"):
            fresh.register_schema("broken", True)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="reserved"):
            fresh.register_schema("stateflow.stage", schema)
        with Ledger(fresh_url) as other:
            assert other.put("good", A, "NEW", payload={"rows": 1}, payload_schema="counts").payload_schema == "counts"
            for payload in (None, {}, {"rows": "many"}, []):
                with pytest.raises(InvalidPayload, match="the payload violates its schema"):
                    other.put("bad", A, "NEW", payload=payload, payload_schema="counts")
            with pytest.raises(InvalidPayload, match="reserved for the ledger"):
                other.put("bad", A, "NEW", payload={"set": {}}, payload_schema="stateflow.stage")
        assert [record.item_id for record in fresh.records()] == ["good"]

    def test_states_that_are_none(self, ledger: Ledger) -> None:
        with pytest.raises(IllegalRecord, match=r"unknown state 'new' .*: use NEW, PROCESSING"):
            ledger.put(item_id(), A, "new")
        with pytest.raises(InvalidArgument, match="unknown state 'DONE'"):
            ledger.fetch(state="DONE")

    # -- what may follow what -----------------------------------------------------------------------------

    @pytest.mark.thorough
    def test_every_sequence_of_up_to_four_records(self, fresh: Ledger) -> None:
        """The ledger accepts exactly the records that the oracle allows.

        A refused record leaves no trace, so only allowed sequences are continued.
        """
        longest = 4
        elsewhere = fresh.put("elsewhere", A, "NEW")
        apps = {"A": A, "B": B, "*": App("*")}
        tried = allowed = 0
        beginnings: list[list[Step]] = [[]]
        for length in range(longest):
            following = []
            for history in beginnings:
                item = self._written(fresh, history, apps)
                for step in oracle.choices(length):
                    if length == 3 and step.app != "A":
                        continue  # three records already tell the applications apart
                    tried += 1
                    known = list(fresh.records(item))
                    previous: Any = known[step.previous] if isinstance(step.previous, int) else None
                    if step.previous == "elsewhere":
                        previous = elsewhere
                    if oracle.allows(history, step):
                        allowed += 1
                        record = fresh.put(item, apps[step.app], step.state, previous)
                        assert list(fresh.records(item)) == [*known, record]
                        after = [*history, step]
                        self._agrees(fresh, item, after)
                        following.append(after)
                        item = self._written(fresh, history, apps)
                    else:
                        with pytest.raises((IllegalRecord, Locked, LeaseLost)):
                            fresh.put(item, apps[step.app], step.state, previous)
                        assert list(fresh.records(item)) == known
            beginnings = following if length < 2 else [each for each in following if "SKIPPED" not in map(_state, each)]
        assert allowed > 12 * longest
        assert tried > 3 * allowed
        sound(fresh)

    @staticmethod
    def _written(ledger: Ledger, history: list[Step], apps: dict[str, App]) -> str:
        item = item_id()
        entries: list[Entry] = []
        for step in history:
            previous = entries[step.previous] if isinstance(step.previous, int) else None
            entries.append(Entry(item, apps[step.app], step.state, previous))
        ledger.put_many(entries)
        return item

    @staticmethod
    def _agrees(ledger: Ledger, name: str, history: list[Step]) -> None:
        item = ledger.item(name)
        assert item is not None
        assert item.consistent
        assert item.state == oracle.state(history)
        blocked = oracle.blocked_at(history)
        assert (item.blocking.seq if item.blocking else None) == blocked

    def test_an_item_that_is_not_there(self, ledger: Ledger) -> None:
        assert ledger.item(item_id()) is None
        assert list(ledger.records(item_id())) == []
        for call in (lambda: ledger.resolve(item_id(), "x"), lambda: ledger.skip(item_id())):
            with pytest.raises(IllegalRecord, match="no such item"):
                call()

    def test_a_previous_record_that_is_not_there(self, ledger: Ledger) -> None:
        item = item_id()
        ledger.put(item, A, "NEW")
        with pytest.raises(IllegalRecord, match="the previous record does not exist"):
            ledger.put(item, A, "PROCESSING", 10**12)

    # -- several records at once --------------------------------------------------------------------------

    def test_many_records_in_one_transaction(self, ledger: Ledger) -> None:
        stem = item_id()
        entries = []
        for n in range(30):
            new = Entry(f"{stem}-{n}", A, "NEW", payload=n)
            lock = Entry(new.item_id, A, "PROCESSING", new)
            entries += [new, lock, Entry(new.item_id, A, "PROCESSED", lock)]
        written = ledger.put_many(entries)
        assert [(record.item_id, record.state) for record in written] == [(e.item_id, e.state) for e in entries]
        assert [record.record_id for record in written] == sorted(record.record_id for record in written)
        assert list(ledger.records(f"{stem}-7")) == written[21:24]
        assert ledger.put_many([]) == []

    def test_one_refused_record_refuses_all(self, ledger: Ledger) -> None:
        stem = item_id()
        before = list(ledger.records())
        entries = [Entry(f"{stem}-{n}", A, "NEW") for n in range(1200)]
        with pytest.raises(IllegalRecord, match="already exists"):
            ledger.put_many([*entries, entries[7]])
        with pytest.raises(IllegalRecord, match="comes later"):
            ledger.put_many([Entry(stem, A, "PROCESSING", entries[0]), entries[0]])
        assert list(ledger.records()) == before

    def test_records_are_streamed_over_many_pages(self, fresh: Ledger) -> None:
        written = fresh.put_many(Entry(f"item-{n:05}", A, "NEW") for n in range(2500))
        assert list(fresh.records()) == written
        assert list(fresh.records(after=written[1998].record_id)) == written[1999:]
        fresh.put_many(Entry("item-00000", App(f"x{n}"), "SKIPPED") for n in range(1500))
        assert [record.seq for record in fresh.records("item-00000")] == list(range(1501))

    def test_a_reader_sees_what_is_committed_late(self, fresh: Ledger, fresh_url: str) -> None:
        """A reader that reads on from the newest id that it has seen misses no record that was committed late.

        A second writer writes, or waits, while the first one has not yet committed.
        """
        arrived, done = threading.Event(), threading.Event()

        def waits(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement == "BEGIN IMMEDIATE" or "ledger_identity" in statement:
                arrived.set()

        def put_second() -> None:
            with Ledger(fresh_url, busy_timeout_s=PATIENCE_S) as second:
                event.listen(second.database.engine, "before_cursor_execute", waits)
                second.put("second", A, "NEW")
            done.set()
            arrived.set()

        def put_first(connection: Any) -> None:
            stamp = statements.Stamp("me", "run", 1, 1.0)
            statements.append(connection, [Entry("first", A, "NEW")], stamp)
            thread.start()
            assert arrived.wait(PATIENCE_S)
            seen.extend(fresh.records())

        thread, seen = threading.Thread(target=put_second), list[Record]()
        fresh.database.write(put_first)
        thread.join()
        assert done.is_set()
        while more := list(fresh.records(after=seen[-1].record_id if seen else 0)):
            seen += more
        assert sorted(record.item_id for record in seen) == ["first", "second"]

    def test_the_newest_records_are_as_many_as_there_are(self, fresh: Ledger) -> None:
        """Ids that a rolled-back transaction used up do not count as records."""
        assert fresh.newest(3) == []
        written = [fresh.put("kept-0", A, "NEW")]

        def give_up(connection: Any) -> None:
            statements.append(connection, [Entry("given up", A, "NEW")], statements.Stamp("me", "run", 1, 1.0))
            raise ValueError

        for number in range(1, 4):
            with pytest.raises(ValueError, match=r"^$"):
                fresh.database.write(give_up)
            written.append(fresh.put(f"kept-{number}", A, "NEW"))
        assert fresh.newest(3) == written[1:]
        assert fresh.newest(9) == written

    # -- rivals -------------------------------------------------------------------------------------------

    @pytest.mark.thorough
    def test_of_rival_processes_exactly_one_acquires(self, fresh: Ledger, fresh_url: str) -> None:
        fresh.put_many(Entry(f"round-{n}", A, "NEW") for n in range(ROUNDS))
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(RIVALS), context.Queue()
        rivals = [
            context.Process(target=acquire, args=(fresh_url, f"rival-{n}", ROUNDS, barrier, results), daemon=True)
            for n in range(RIVALS)
        ]
        for rival in rivals:
            rival.start()
        told = [results.get(timeout=280) for _ in rivals]
        for rival in rivals:
            rival.join()
        winners = {number: record for _, won, _ in told for number, record in won}
        assert sum(len(won) for _, won, _ in told) == ROUNDS == len(winners), "each round has one winner"
        for _, _, lost in told:
            assert dict(lost) == {number: winners[number] for number, _ in lost}
        locks = {record.item_id: record.record_id for record in fresh.records() if record.state == "PROCESSING"}
        assert locks == {f"round-{number}": record for number, record in winners.items()}
        sound(fresh)

    def test_threads_that_write_to_the_same_items(self, fresh: Ledger) -> None:
        """No record is lost when threads write to the same items in different orders: deadlocks are retried."""
        items = [f"item-{n}" for n in range(6)]
        fresh.put_many(Entry(item, A, "NEW") for item in items)

        def write(offset: int) -> None:
            order = items[offset:] + items[:offset]
            for n in range(5):
                fresh.put_many(Entry(item, App(f"t{offset}-{n}"), "SKIPPED") for item in order)

        threads = [threading.Thread(target=write, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(list(fresh.records(item))) for item in items] == [21] * 6
        sound(fresh)

    # -- leases -------------------------------------------------------------------------------------------

    @staticmethod
    def _lapse(ledger: Ledger, item: str) -> None:
        def lapse(connection: Any) -> int:
            return int(connection.execute(update(LEASE).where(LEASE.c.item_id == item).values(until_us=0)).rowcount)

        assert ledger.database.write(lapse) == 1

    def test_a_dead_holders_lock_is_resolved_by_the_next(self, ledger: Ledger) -> None:
        item = item_id()
        new = ledger.put(item, A, "NEW")
        lock = ledger.put(item, A, "PROCESSING", new)
        with pytest.raises(Locked) as caught:
            ledger.process_item(item, B, lambda _: None)
        assert caught.value.blocking_record == lock
        assert item not in ledger.query(requester=B)
        self._lapse(ledger, item)
        assert item in ledger.query(requester=B)
        assert item in [each.item_id for each in ledger.unprocessed(None, B, on_blocked="skip")]
        ledger.process_item(item, B, lambda _: None)
        states = [record.state for record in ledger.records(item)]
        assert states == ["NEW", "PROCESSING", "RESOLVED", "PROCESSING", "PROCESSED"]
        for state in ("PROCESSED", "FAILED"):
            with pytest.raises(LeaseLost, match="resolved before its holder released it"):
                ledger.put(item, A, state, lock)

    @pytest.mark.parametrize("ended", [False, True])
    @pytest.mark.parametrize("all_items", [False, True])
    def test_work_on_an_item_that_another_took_over(self, fresh: Ledger, all_items: bool, ended: bool) -> None:
        """The first worker gets LeaseLost, whether the second one still holds the item or has finished it.

        The first worker still processes its other items.
        """
        fresh.put("item", A, "NEW")
        if all_items:
            fresh.put("other", A, "NEW")

        def work(item: Item) -> None:
            if item.item_id == "item":
                self._lapse(fresh, "item")
                lock = fresh.put("item", B, "PROCESSING")
                if ended:
                    fresh.put("item", B, "PROCESSED", lock)

        with pytest.raises(LeaseLost, match="item=item"):
            fresh.process_all(A, None, work) if all_items else fresh.process_item("item", A, work)
        assert fresh.fetch(processed_by=A) == (["other"] if all_items else [])

    def test_a_lock_that_was_released_by_a_namesake(self, fresh: Ledger) -> None:
        fresh.put("item", A, "NEW")
        with pytest.raises(LeaseLost, match="another process released the lock"):
            fresh.process_all(A, None, lambda item: fresh.put("item", A, "PROCESSED", item.blocking) and None)
        lock = fresh.put("again", A, "PROCESSING", fresh.put("again", A, "NEW"))
        fresh.put("again", A, "PROCESSED", lock)
        with pytest.raises(Locked, match="already answered"):
            fresh.put("again", A, "PROCESSED", lock)

    def test_a_holder_whose_lock_was_resolved_hears_of_it(self, ledger: Ledger) -> None:
        item = item_id()
        lock = ledger.put(item, A, "PROCESSING", ledger.put(item, A, "NEW"))
        self._lapse(ledger, item)
        assert [record.item_id for record in ledger.resolve_expired()] == [item]
        assert ledger.resolve_expired() == []
        assert not ledger.renew(lock)
        with pytest.raises(LeaseLost):
            ledger.put(item, A, "PROCESSED", lock)

    def test_a_renewed_lease_holds(self, ledger: Ledger) -> None:
        item = item_id()
        lock = ledger.put(item, A, "PROCESSING", ledger.put(item, A, "NEW"))
        self._lapse(ledger, item)
        assert ledger.renew(lock)
        with pytest.raises(Locked):
            ledger.put(item, B, "PROCESSING")

    def test_a_failure_has_no_lease(self, ledger: Ledger) -> None:
        item = item_id()
        lock = ledger.put(item, A, "PROCESSING", ledger.put(item, A, "NEW"))
        self._lapse(ledger, item)
        ledger.put(item, A, "FAILED", lock)
        assert ledger.resolve_expired() == []
        with pytest.raises(Locked, match="the item is FAILED"):
            ledger.put(item, B, "PROCESSING")

    def test_a_lock_without_a_lease_stays(self, ledger: Ledger) -> None:
        item = item_id()
        lock = ledger.put(item, A, "PROCESSING", ledger.put(item, A, "NEW"), lease_s=float("inf"))
        assert not ledger.renew(lock)
        with ledger.database.reading() as connection:
            assert connection.execute(LEASE.select().where(LEASE.c.item_id == item)).all() == []

    @pytest.mark.parametrize("lease_s", [0, -1, float("nan"), 1e300])
    def test_leases_that_are_none(self, ledger: Ledger, lease_s: float) -> None:
        with pytest.raises(InvalidArgument, match="a lease cannot last"):
            ledger.put(item_id(), A, "NEW", lease_s=lease_s)

    def test_leases_go_by_the_databases_clock(self, url: str) -> None:
        item = item_id()
        with Ledger(url, clock=ManualClock(1)) as past, Ledger(url, clock=ManualClock(4 * 10**15)) as future:
            past.put(item, A, "PROCESSING", past.put(item, A, "NEW"), lease_s=1000)
            with pytest.raises(Locked):
                future.put(item, B, "PROCESSING")
            with past.database.reading() as connection:
                until_us = connection.execute(LEASE.select().where(LEASE.c.item_id == item)).one().until_us
        left_s = until_us / 1e6 - datetime.now(UTC).timestamp()
        assert 1000 - PATIENCE_S < left_s <= 1001

    # -- work ---------------------------------------------------------------------------------------------

    def test_work_on_a_new_item(self, ledger: Ledger) -> None:
        item = item_id()
        seen: list[Item] = []

        def work(it: Item) -> dict[str, int]:
            seen.append(it)
            return {"rows": 3}

        last = ledger.process_new_item(item, A, work, acquire_payload={"why": "test"})
        assert [record.state for record in ledger.records(item)] == ["NEW", "PROCESSING", "PROCESSED"]
        assert (last.payload, seen[0].state, seen[0].records[-1].payload) == (
            {"rows": 3},
            "PROCESSING",
            {"why": "test"},
        )
        with pytest.raises(IllegalRecord, match="already exists"):
            ledger.process_new_item(item, A, work)
        assert len(seen) == 1
        assert ledger.process_item(item, A, work).seq == 4

    def test_work_that_raises(self, ledger: Ledger) -> None:
        item = item_id()

        def work(_: Item) -> None:
            raise ValueError("x" * 5000)

        with pytest.raises(ApplicationError) as caught:
            ledger.process_new_item(item, A, work)
        assert caught.value.where["run"] == "run-1"
        assert isinstance(caught.value.__cause__, ValueError)
        failed = list(ledger.records(item))[-1]
        error = failed.payload["error"]
        assert (failed.state, error["type"], error["message"]) == ("FAILED", "ValueError", "x" * 2048)
        assert len(error["stack"]) <= 8192
        with pytest.raises(Locked, match="FAILED"):
            ledger.process_item(item, A, work)
        ledger.resolve(item, "mended")
        with pytest.raises(IllegalRecord, match="nothing blocks"):
            ledger.resolve(item, "again")
        ledger.process_item(item, A, lambda _: None)
        assert ledger.item(item).state == "PROCESSED"  # type: ignore[union-attr]

    def test_work_that_is_interrupted(self, ledger: Ledger) -> None:
        item = item_id()

        def work(_: Item) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ledger.process_new_item(item, A, work)
        assert ledger.item(item).state == "FAILED"  # type: ignore[union-attr]

    def test_work_whose_result_is_no_json_has_failed(self, ledger: Ledger) -> None:
        item = item_id()
        with pytest.raises(ApplicationError):
            ledger.process_new_item(item, A, lambda _: object())
        assert ledger.item(item).state == "FAILED"  # type: ignore[union-attr]

    def test_work_whose_lock_is_taken_away(self, ledger: Ledger) -> None:
        item = item_id()
        with pytest.raises(LeaseLost):
            ledger.process_new_item(item, A, lambda it: ledger.resolve(it.item_id, "no patience") and None)
        assert ledger.item(item).state == "RESOLVED"  # type: ignore[union-attr]

    def test_all_items_are_worked_on_though_one_fails_and_one_is_held(self, fresh: Ledger) -> None:
        for n in range(5):
            fresh.put(f"item-{n}", A, "NEW")
        fresh.put("item-1", B, "PROCESSING")
        worked = []

        def work(item: Item) -> None:
            worked.append(item.item_id)
            if item.item_id == "item-2":
                raise ValueError("no")

        with pytest.raises(ApplicationError, match="item-2"):
            fresh.process_all(A, lambda item: item.item_id != "item-4", work)
        assert worked == ["item-0", "item-2", "item-3"]
        assert fresh.fetch(processed_by=A) == ["item-0", "item-3"]
        assert fresh.process_all(A, lambda item: item.item_id != "item-4", work) == [], "once each"
        with pytest.raises(Locked):
            fresh.process_all(A, None, work, on_blocked="raise")
        with pytest.raises(InvalidArgument, match="on_blocked"):
            fresh.process_all(A, None, work, on_blocked="wait")  # type: ignore[arg-type]
        assert [record.item_id for record in fresh.process_all(A, None, work)] == ["item-4"]
        sound(fresh)

    def test_an_item_is_worked_on_once_by_two_that_listed_it_both(self, fresh: Ledger) -> None:
        fresh.put("item", A, "NEW")
        worked = []

        def other_was_first(item: Item) -> bool:
            fresh.process_item("item", App("a", "9"), lambda _: worked.append("other"))
            return True

        assert fresh.process_all(A, other_was_first, lambda _: worked.append("me")) == []
        assert worked == ["other"]

    # -- queries ------------------------------------------------------------------------------------------

    def test_who_may_process_what(self, fresh: Ledger) -> None:
        fresh.put("new", A, "NEW")
        done(fresh, "by-a")
        done(fresh, "by-a-one", App("a", "7", "one"))
        done(fresh, "by-b", B)
        lock = fresh.put("held", A, "PROCESSING", fresh.put("held", A, "NEW"))
        fresh.put("failed", A, "FAILED", fresh.put("failed", A, "PROCESSING", fresh.put("failed", A, "NEW")))
        done(fresh, "skip-all")
        fresh.skip("skip-all")
        done(fresh, "skip-b")
        fresh.skip("skip-b", "b")
        done(fresh, "skip-b-one")
        fresh.skip("skip-b-one", App("b", "1", "one"))
        listed = ["by-a", "by-a-one", "by-b", "new", "skip-b", "skip-b-one"]
        assert fresh.query() == listed
        assert fresh.query(prepared_by="a") == ["by-a", "skip-b", "skip-b-one"]
        assert fresh.query(prepared_by=App("a", "other version", "one")) == ["by-a", "by-a-one", "skip-b", "skip-b-one"]
        assert fresh.query(prepared_by=App("a", "1", "two")) == ["by-a", "skip-b", "skip-b-one"]
        assert fresh.query(requester="a") == ["by-a-one", "by-b", "new"], "a record of an instance is only its own"
        assert fresh.query(requester=App("a", "1", "one")) == ["by-b", "new"]
        assert fresh.query("a", "b") == ["by-a", "skip-b-one"]
        assert fresh.query("a", App("b", "1", "one")) == ["by-a"]
        assert fresh.query("a", App("b", "1", "two")) == ["by-a", "skip-b-one"]
        assert fresh.query("nobody") == []
        assert fresh.fetch() == sorted([*listed, "failed", "held", "skip-all"])
        assert fresh.fetch(processed_by="a") == ["by-a", "skip-all", "skip-b", "skip-b-one"]
        assert fresh.fetch(state="FAILED") == ["failed"]
        assert fresh.fetch(state="PROCESSING") == ["held"]
        assert fresh.fetch(state="SKIPPED") == ["skip-all", "skip-b", "skip-b-one"]
        assert fresh.fetch("b", "PROCESSED") == ["by-b"]
        for app in (B, App("b", "1", "any")):
            with pytest.raises(IllegalRecord, match="must skip the item"):
                fresh.put("skip-b", app, "PROCESSING")
        with pytest.raises(IllegalRecord, match="must skip the item"):
            fresh.process_item("skip-all", A, lambda _: None)
        assert [item.item_id for item in fresh.unprocessed("a", "b")] == ["by-a", "skip-b-one"]
        with pytest.raises(Locked) as caught:
            fresh.unprocessed(None, "z", lambda item: item.item_id == "held", on_blocked="raise")
        assert caught.value.blocking_record == lock
        assert fresh.unprocessed(None, "z", lambda item: item.item_id == "held") == []

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_random_histories(self, ledger: Ledger, data: st.DataObject) -> None:
        """After random calls, each item's head equals the fold of its records, and queries list the right items."""
        stem = item_id()[:8]
        names = [f"{stem}-{n}" for n in range(3)]
        apps = [A, B, App("a", "1", "one"), App("*")]
        for _ in range(data.draw(st.integers(1, 12))):
            item, app = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(apps))
            known = list(ledger.records(item))
            previous = data.draw(st.sampled_from([None, *known]))
            try:
                ledger.put(item, app, data.draw(st.sampled_from(list(RecordState))), previous)
            except StateflowError:
                assert list(ledger.records(item)) == known, "a refused record leaves nothing"
        items = {name: item for name in names if (item := ledger.item(name)) is not None}
        with ledger.database.reading() as connection:
            heads = load_heads(connection, items)
        assert heads == {name: rules.fold(item.records) for name, item in items.items()}
        assert all(item.consistent for item in items.values())
        asked = data.draw(st.sampled_from(apps[:3]))
        wanted = [
            name
            for name, item in items.items()
            if item.blocking is None and not any(_concludes(record, Who.of(asked)) for record in item.records)
        ]
        assert [name for name in ledger.query(None, asked) if name.startswith(stem)] == wanted

    # -- no database --------------------------------------------------------------------------------------

    def test_a_database_that_goes_away(self, tmp_path: Path) -> None:
        with fresh_database(self.kind, tmp_path) as url:
            ledger = Ledger(url)
            ledger.put("item", A, "NEW")
        if self.kind == "sqlite":
            ledger.database.write(lambda connection: connection.execute(text("DROP TABLE ledger_record")))
        for call in (
            lambda: ledger.put("other", A, "NEW"),
            lambda: ledger.item("item"),
            lambda: list(ledger.records()),
        ):
            with pytest.raises(Unavailable, match=r"^unavailable: the ledger cannot be (read|written): "):
                call()
        ledger.close()


def _concludes(record: Record, asked: Who) -> bool:
    """Tells whether a record says that ``asked`` has processed the record's item, or must skip it."""
    recorded = Who.of(record.app)
    if record.state == RecordState.PROCESSED:
        return rules.covers(recorded, asked)
    return record.state == RecordState.SKIPPED and rules.skips(recorded, asked)
