"""Contract of the ledger's stages, batches, entities and jobs on every database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, event, insert, update

from stateflow.clock import ManualClock
from stateflow.errors import IllegalRecord, InvalidArgument, InvalidTransition, LeaseLost, Locked
from stateflow.ledger import App, Board, Entry, Ledger, StateManager
from stateflow.ledger.manager import APP
from stateflow.ledger.records import BATCH, ENTITY, JOB, RECORD, STAGE
from stateflow.ledger.rules import ANSWER, COLUMNS, BatchStatus
from stateflow.ledger.statements import CHUNK

FIELDS = ("first_record_pulled", "last_record_pulled")
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


class ViewsContract:
    # -- stages -------------------------------------------------------------------------------------------

    def test_a_stage_from_source_to_sink(self, fresh: Ledger, fresh_url: str) -> None:
        manager = StateManager(fresh)
        begun = manager.insert_state(
            job_id="flights",
            source_name="gw",
            source_type="kafka",
            source_entity="raw",
            source_filter="year=2013",
            sink_name="lake",
            sink_type="parquet",
            sink_entity="clean",
            sourcing_start_time=NOON,
            manifest_name="m",
        )
        assert tuple(begun) == ANSWER
        assert (begun["sourcing_start_time"], begun["run_id"], begun["source_name"]) == (NOON, fresh.run_id, "gw")
        assert begun["correlation_id_in"] is None
        assert begun["correlation_id_out"]
        at = begun["state_id"]
        assert manager.get_last_record("raw") is None
        manager.update_state(at, action="sourcing post-pull", status="success", record_count=7)
        assert manager.get_last_record("raw") is None, "pulled is not pushed"
        manager.update_state(
            at, sourcing_end_time=(NOON + timedelta(seconds=3)).isoformat(), last_record_pulled="r-7", sink_name=None
        )
        manager.update_state(at, action="sinking pre-push", status="in_progress")
        ended = manager.update_state(at, action="sinking post-push", status="success", sinking_end_time=NOON)
        assert (ended["record_count"], ended["last_record_pulled"], ended["sink_name"]) == (7, "r-7", "lake")
        assert ended["sourcing_end_time"] == NOON + timedelta(seconds=3)
        with Ledger(fresh_url) as other:
            again = StateManager(other)
            assert again.get_current_state("flights") == ended == again.get_last_stage("raw")
            assert again.get_last_record("raw") == "r-7"
            [row] = again.get_processing_history()
        assert tuple(row) == COLUMNS
        assert len(COLUMNS) == 26
        assert (row["row_count"], row["action"], row["status"]) == (7, "sinking post-push", "success")
        assert row["created_on"] <= row["updated_on"]
        assert fresh.verify() == []

    def test_which_stage_is_current(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        assert manager.get_current_state("j") is None
        one = manager.insert_state(job_id="j", source_entity="a", source_filter="x=1")
        two = manager.insert_state(job_id="j", source_entity="a", source_filter="x=2")
        three = manager.insert_state(job_id="j", source_entity="b", sink_entity="c")
        manager.insert_state(job_id="other", source_entity="a")

        def current(*arguments: str) -> Any:
            found = manager.get_current_state(*arguments)
            return found and found["state_id"]

        assert current("j") == three["state_id"] == current("j", "b") == current("j", "c")
        assert current("j", "a") == two["state_id"]
        assert current("j", "a", "x=1") == one["state_id"]
        assert current("j", "a", "x=3") is None
        assert current("j", "a", "X=1") is current("j", "a", "x=1 ") is None, "as on every other database"

    def test_last_records_and_history_leave_failures_out(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        done = {"action": "sinking post-push", "status": "success"}
        good = manager.insert_state(job_id="j", source_entity="a", last_record_pulled="5", **done)
        failed = manager.insert_state(job_id="j", source_entity="a", action="sinking post-push", status="failure")
        running = manager.insert_state(job_id="j", source_entity="a")
        assert manager.get_last_record("a") == "5"
        assert manager.get_last_stage("a") == manager.update_state(good["state_id"])
        listed = [row["state_id"] for row in manager.get_processing_history()]
        assert listed == [good["state_id"], running["state_id"]]
        assert [row["state_id"] for row in manager.get_processing_history("j", limit=1)] == [running["state_id"]]
        manager.update_state(failed["state_id"], **done)
        last = manager.get_last_stage("a")
        assert last is not None
        assert last["state_id"] == failed["state_id"], "tried again, and done"
        assert fresh.verify() == []

    def test_correlation_ids_chain_the_stages_of_a_run(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        first = manager.insert_state(job_id="j")
        second = manager.insert_state(job_id="j")
        third = manager.insert_state(job_id="k", correlation_id_in=second["correlation_id_out"])
        apart = manager.insert_state(job_id="j2", run_id="another run")
        assert second["correlation_id_in"] == first["correlation_id_out"]
        assert apart["correlation_id_in"] is None
        traced = [row["state_id"] for row in manager.trace(second["correlation_id_out"])]
        assert traced == [each["state_id"] for each in (first, second, third)]
        assert manager.trace("nothing") == []

    def test_a_stage_that_very_many_continue_is_traced(self, fresh: Ledger) -> None:
        """A trace asks in statements whose number of parameters every database allows."""
        count = 2 * CHUNK + 1
        columns = {"correlation_id_in": "first", "created_on": 1, "updated_on": 1}
        rows = [
            columns | {"state_id": f"s{n}", "correlation_id_out": f"o{n}", "first_record_id": n} for n in range(count)
        ]
        fresh.database.write(lambda connection: connection.execute(insert(STAGE), rows))
        asked: list[int] = []
        event.listen(fresh.database.engine, "before_cursor_execute", lambda *arguments: asked.append(len(arguments[3])))
        traced = StateManager(fresh).trace("o7")
        assert [row["state_id"] for row in traced] == [f"s{n}" for n in range(count)]
        assert max(asked) <= CHUNK

    def test_a_stage_goes_on_from_the_one_before_it(self, fresh: Ledger, fresh_url: str) -> None:
        """A stage is linked to the stage before it.

        That is the last one of its job before a restart, of the previous job in the same run, or of the pipeline whose
        sink the stage reads.
        """
        manager = StateManager(fresh)
        done = {"action": "sinking post-push", "status": "success"}
        first = manager.insert_state(job_id="load", source_entity="raw", sink_name="lake", sink_entity="clean", **done)
        second = manager.insert_state(job_id="index", source_entity="other")
        assert second["correlation_id_in"] == first["correlation_id_out"], "another job of the run"
        with Ledger(fresh_url) as later:
            again = StateManager(later)
            third = again.insert_state(job_id="load", source_entity="raw")
            assert third["correlation_id_in"] == first["correlation_id_out"], "the same job, restarted"
            filtered = again.insert_state(job_id="x", sink_name="lake", sink_entity="clean", sink_filter="m=2", **done)
            again.insert_state(job_id="x", sink_name="lake", sink_entity="clean", status="in_progress")
            attic = again.insert_state(job_id="x", sink_name="attic", sink_entity="clean", **done)

            def preceding(**fields: str) -> str:
                return str(again.insert_state(job_id="report", source_entity="clean", **fields)["correlation_id_in"])

            assert preceding() == attic["correlation_id_out"], "the newest that pushed it"
            assert preceding(source_name="lake") == filtered["correlation_id_out"]
            assert preceding(source_name="lake", source_filter="m=1") == first["correlation_id_out"]
            other = again.insert_state(job_id="x", sink_name="LAKE", sink_entity="clean", sink_filter="M=2", **done)
            assert preceding(source_name="lake", source_filter="m=2") == filtered["correlation_id_out"]
            assert preceding(source_name="LAKE") == other["correlation_id_out"]
        assert fresh.verify() == []

    def test_the_original_calls(self, fresh: Ledger) -> None:
        """The original calls still work: positional arguments have their order, and a sink's actions may say "pull"."""
        manager = StateManager(fresh)
        ids = ("raw", "y=1", "sourcing pre-pull", "s", "in_progress", "in", "out", "clean", "z=1")
        begun = manager.insert_state(*ids, NOON, NOON, NOON, NOON, 3, "1", "9")
        row = manager.get_processing_history()[0]
        assert (row["source_entity"], row["source_filter"]) == ("raw", "y=1")
        assert (row["sink_entity"], row["sink_filter"]) == ("clean", "z=1")
        assert (begun["state_id"], begun["correlation_id_in"], begun["correlation_id_out"]) == ("s", "in", "out")
        assert (begun["record_count"], begun["first_record_pulled"], begun["last_record_pulled"]) == (3, "1", "9")
        assert manager.get_last_record("raw") is None
        manager.update_state(None, None, "sinking pre-pull", "s")
        manager.update_state("raw", None, "sinking post-pull", "s", "success")
        assert manager.get_last_record("raw") == "9"
        [row] = manager.get_processing_history()
        assert (row["action"], row["status"]) == ("sinking post-push", "success")
        with pytest.raises(InvalidArgument, match="source_entity is given twice"):
            manager.insert_state("raw", source_entity="raw")
        with pytest.raises(InvalidArgument, match="takes 16 positional arguments"):
            manager.insert_state(*range(17))
        with pytest.raises(IllegalRecord, match="no such stage"):
            manager.update_state("raw", "s")

    def test_a_stage_is_of_the_run_that_finished_it(self, fresh: Ledger, fresh_url: str) -> None:
        StateManager(fresh).insert_state(state_id="made up")
        StateManager(fresh).insert_state(state_id="given", run_id="nightly-7")
        with Ledger(fresh_url, run_id="later") as later:
            manager = StateManager(later)
            assert manager.update_state("made up", status="success")["run_id"] == "later"
            assert manager.update_state("given", status="success")["run_id"] == "nightly-7"

    def test_two_update_one_stage_at_once(self, fresh: Ledger, fresh_url: str) -> None:
        """Two processes update one stage at the same time: both changes are kept, and neither call fails."""
        StateManager(fresh).insert_state(state_id="s")

        def update_often(name: str) -> None:
            with Ledger(fresh_url, busy_timeout_s=60) as ledger:
                for number in range(20):
                    StateManager(ledger).update_state("s", **{name: str(number)})

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(update_often, FIELDS))
        ended = StateManager(fresh).get_state("s")
        assert ended is not None
        assert [ended[name] for name in FIELDS] == ["19", "19"]
        assert fresh.verify() == []

    def test_failed_stages_and_why_they_failed(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        manager.insert_state(state_id="good", job_id="j")
        manager.insert_state(state_id="bad", job_id="j", manifest_name="p.yml", status="failure", error="no room")
        manager.update_state("good", status="failure", error=ValueError("x" * 5000))
        first, second = manager.get_failures("j")
        assert (first["state_id"], first["error"]["type"]) == ("good", "ValueError")
        assert len(first["error"]["message"]) == 2048
        assert (second["manifest_name"], second["error"]["message"]) == ("p.yml", "no room")
        assert [each["state_id"] for each in manager.get_failures(limit=1)] == ["bad"]
        assert manager.get_failures("k") == []
        manager.update_state("good", status="in_progress")
        assert [each["state_id"] for each in manager.get_failures()] == ["bad"]

    def test_a_failed_stage_keeps_its_error_when_it_is_resolved_or_changed(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)

        def said(state_id: str) -> Any:
            [found] = [each for each in manager.get_failures() if each["state_id"] == state_id]
            assert manager.get_columns(state_id)["error"] == found["error"]
            return found["error"] and found["error"]["message"], found["resolved"]

        for name in ("one", "two"):
            manager.insert_state(state_id=name, status="failure", error=f"no room for {name}")
        fresh.resolve("one", "made room")
        manager.update_state("two", record_count=3)
        assert (said("one"), said("two")) == (("no room for one", True), ("no room for two", False))
        manager.update_state("one", status="in_progress")
        assert manager.get_columns("one")["error"] is None
        manager.update_state("one", status="failure")
        assert said("one") == (None, False), "nobody said why it failed again"
        assert fresh.verify() == []

    def test_stages_that_are_refused(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        for fields, said in (
            ({"colour": "red"}, "no column 'colour'"),
            ({"row_count": 1}, "no column 'row_count'"),
            ({"status": "fine"}, "status cannot be 'fine'.*success | failure | in_progress"),
            ({"action": "push"}, "action cannot be"),
            ({"sourcing_start_time": datetime(2026, 1, 1)}, "with a time zone"),
            ({"sourcing_start_time": "yesterday"}, "with a time zone"),
            ({"sinking_end_time": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)}, "years 2 to 9998"),
            ({"sinking_end_time": "9999-12-31T23:59:59-12:00"}, "years 2 to 9998"),
            ({"sinking_end_time": 1_790_000_000_000_000_000}, "years 2 to 9998.*microseconds since 1970"),
            ({"sinking_end_time": 10**5000}, "years 2 to 9998"),
            ({"sinking_end_time": True}, "with a time zone"),
            ({"record_count": -1}, "record_count cannot be"),
            ({"record_count": 1.5}, "record_count cannot be"),
            *(({"job_id": each}, "1 to 255 characters") for each in ("x" * 256, "j ", "j\t", "j\x7f", "\ud800", "")),
            ({"source_entity": "x" * 1025}, "1 to 1,024 bytes"),
            ({"source_filter": "\ud800"}, "lone surrogates"),
            ({"sink_name": "\0"}, "without NUL"),
            ({"source_name": {"a": 1}}, "source_name cannot be"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                manager.insert_state(**fields)
        for state_id in ("nothing", "", None):
            with pytest.raises(IllegalRecord, match="no such stage"):
                manager.update_state(state_id, status="success")  # type: ignore[arg-type]
        fresh.put("item", App("a"), "NEW")
        with pytest.raises(IllegalRecord, match="no such stage"):
            manager.update_state("item", status="success")
        begun = manager.insert_state(state_id="mine")
        with pytest.raises(IllegalRecord, match="already exists"):
            manager.insert_state(state_id="mine")
        with pytest.raises(IllegalRecord, match="the item is of kind stage"):
            fresh.put("mine", App("a"), "SKIPPED")
        assert len(list(fresh.records())) == 3
        assert begun["state_id"] == "mine"
        assert fresh.fetch() == ["item"], "stages are not among the items"

    def test_a_time_out_of_range_that_is_stored_hides_nothing(self, fresh: Ledger) -> None:
        """A stored time in nanoseconds, which an earlier version accepted, hides no row, and ``verify`` reports it."""
        manager = StateManager(fresh)
        manager.insert_state(job_id="j", state_id="good", sinking_end_time=NOON)
        bad = 1_790_000_000_000_000_000
        entry = Entry("bad", APP, "NEW", payload={"set": {"status": "success", "sinking_end_time": bad}})
        [record] = fresh.append([replace(entry, payload_schema="stateflow.stage")])
        times = [row["sinking_end_time"] for row in manager.get_processing_history()]
        assert times == [NOON, bad]
        found = fresh.verify()
        assert [(fault.code, fault.record_id) for fault in found] == [("bad_time", record.record_id)]
        fresh.database.write(lambda connection: connection.execute(update(RECORD).values(timestamp_us=bad)))
        assert {fault.item_id for fault in fresh.verify() if fault.code == "bad_time"} == {"good", "bad"}
        fresh.rebuild()
        assert [row["created_on"] for row in manager.get_processing_history()] == [bad, bad]

    def test_unfinished_stages_are_not_archived(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        manager.insert_state(state_id="pulled", action="sourcing post-pull", status="success")
        manager.insert_state(state_id="done", action="sinking post-push", status="success")
        manager.insert_state(state_id="failed", action="sinking post-push", status="failure")
        assert fresh.archive(timedelta(seconds=-60)) == 1
        assert fresh.item("done").archived  # type: ignore[union-attr]
        manager.update_state("pulled", action="sinking pre-push", status="in_progress")
        assert len(manager.get_processing_history()) == 2
        assert fresh.verify() == []

    # -- batches ------------------------------------------------------------------------------------------

    def test_a_batch_runs_to_its_end(self, fresh: Ledger) -> None:
        board = Board(fresh)
        bid = board.create_batch("drain edge-1", "drain", owner="me", affinity="edge:2-4 soft 30", waits_for_job=True)
        for status in (BatchStatus.NEW, BatchStatus.GENERATE_IID):
            board.move_batch(bid, status)
        board.list_entities(bid, ["p0", "p1", "p2", "p1"])
        board.move_batch(bid, "IN_PROGRESS")
        assert board.end_entity(bid, "p0", "COMPLETED", ms=5, result={"bytes": 1})
        assert not board.end_entity(bid, "p0", "COMPLETED"), "a late duplicate is counted once"
        assert not board.end_entity(bid, "p0", "FAILED"), "what is completed stays so"
        assert board.end_entity(bid, "p1", "FAILED", ms=50)
        seen = board.batch(bid)
        assert (seen["total_entities"], seen["succeeded"], seen["failed"]) == (3, 1, 1)
        assert [each["id"] for each in seen["extra_stats"]["slowest"]] == ["p1", "p0"]
        assert seen["pace"] > 0
        assert seen["eta"] > seen["started_us"]
        board.end_entity(bid, "p2", "COMPLETED", ms=7)
        board.move_batch(bid, "DONE")
        assert [each["bid"] for each in board.batches("DONE")] == [bid] == [each["bid"] for each in board.batches()]
        plan, again = board.retry_batch(bid)
        assert (plan.relist, again) == (False, ["p1"])
        assert [each["entity"] for each in board.entities(bid, "WAITING")] == ["p1"]
        board.end_entity(bid, "p1", "COMPLETED")
        board.move_batch(bid, "DONE")
        assert board.batch(bid)["succeeded"] == 3
        assert fresh.verify() == []
        assert fresh.query() == [], "the parts of a batch are not among the items"

    def test_batches_that_are_taken_up_again(self, fresh: Ledger) -> None:
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"], complete=False)
        board.move_batch(bid, "PAUSED")
        plan, again = board.retry_batch(bid)
        assert (plan.relist, again) == (True, ["p0"])
        assert board.batch(bid)["status"] == "GENERATE_IID"
        board.list_entities(bid, ["p0", "p1"])
        board.move_batch(bid, "IN_PROGRESS")
        board.end_entity(bid, "p0", "COMPLETED")
        board.move_batch(bid, "FAILED")
        plan, again = board.retry_batch(bid)
        assert (plan.relist, again) == (False, ["p1"])
        with pytest.raises(InvalidTransition, match="IN_PROGRESS cannot be retried"):
            board.retry_batch(bid)
        board.move_batch(bid, "CANCELLED")
        with pytest.raises(InvalidTransition, match="pass allow_cancelled"):
            board.retry_batch(bid)
        assert board.retry_batch(bid, allow_cancelled=True)[1] == ["p1"]
        assert fresh.verify() == []

    def test_pace_counts_the_time_of_work_alone(self, fresh: Ledger) -> None:
        """A batch's pace counts only the time in which it works: not listing, pauses, or the wait for a retry."""
        clock = ManualClock(10**15)
        fresh._clock = clock
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        clock.advance(1000)
        board.list_entities(bid, ["p0", "p1", "p2", "p3"])
        assert (board.batch(bid)["pace"], board.batch(bid)["eta"]) == (None, None)
        board.move_batch(bid, "IN_PROGRESS")
        clock.advance(10)
        board.end_entity(bid, "p0", "COMPLETED")
        board.move_batch(bid, "PAUSED")
        clock.advance(5000)
        assert (board.batch(bid)["pace"], board.batch(bid)["eta"]) == (0.1, None)
        board.retry_batch(bid)
        clock.advance(10)
        board.end_entity(bid, "p1", "COMPLETED")
        seen = board.batch(bid)
        assert (seen["pace"], seen["eta"]) == (0.1, clock.now_us() + 20_000_000)
        board.move_batch(bid, "FAILED")
        clock.advance(7000)
        board.retry_batch(bid)
        board.end_entity(bid, "p2", "COMPLETED")
        board.end_entity(bid, "p3", "FAILED")
        board.move_batch(bid, "DONE")
        clock.advance(9000)
        assert (board.batch(bid)["pace"], board.batch(bid)["eta"]) == (0.2, None)
        assert fresh.verify() == []

    def test_a_batch_is_whole_when_it_begins_and_when_it_ends(self, fresh: Ledger) -> None:
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        with pytest.raises(InvalidTransition, match="list of entities is incomplete"):
            board.move_batch(bid, "IN_PROGRESS")
        board.list_entities(bid, ["p0"], complete=False)
        board.move_batch(bid, "PAUSED")
        with pytest.raises(InvalidTransition, match="is incomplete"):
            board.move_batch(bid, "IN_PROGRESS")
        board.retry_batch(bid)
        board.list_entities(bid, ["p1"])
        board.move_batch(bid, "IN_PROGRESS")
        board.end_entity(bid, "p0", "FAILED")
        with pytest.raises(InvalidTransition, match="1 entities of the batch have not ended"):
            board.move_batch(bid, "DONE")
        board.end_entity(bid, "p1", "COMPLETED")
        board.move_batch(bid, "DONE")

    def test_entities_of_two_batches_are_never_one(self, fresh: Ledger) -> None:
        board = Board(fresh)
        pairs = [("site", "7/x"), ("site/7", "x"), ("site%2F7", "x"), ("site%252F7", "x")]
        for bid, entity in pairs:
            board.create_batch("b", "move", bid=bid)
            board.move_batch(bid, "GENERATE_IID")
            board.list_entities(bid, [entity])
        board.end_entity("site", "7/x", "COMPLETED")
        assert [each["status"] for bid, _ in pairs for each in board.entities(bid)] == ["COMPLETED", *["WAITING"] * 3]

    def test_batches_that_are_refused(self, fresh: Ledger) -> None:
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        for to in ("DONE", "IN_PROGRESS", "WAITING_FOR_JOB"):
            with pytest.raises(InvalidTransition, match=f"a batch that is NEW cannot become {to}"):
                board.move_batch(bid, to)
        with pytest.raises(InvalidTransition, match="listed in GENERATE_IID"):
            board.list_entities(bid, ["p0"])
        with pytest.raises(IllegalRecord, match="no such batch"):
            board.batch("nothing")
        with pytest.raises(IllegalRecord, match="no such entity"):
            board.end_entity(bid, "p9", "COMPLETED")
        with pytest.raises(InvalidArgument, match="not a valid affinity"):
            board.create_batch("b", "move", affinity="gpu:4-2")
        for call, said in (
            (lambda: board.create_batch("b\0", "move"), "name cannot be"),
            (lambda: board.create_batch("b", "\ud800"), "command cannot be"),
            (lambda: board.create_job("j\t"), "no control character and no trailing space"),
            (lambda: board.create_job("j", fire_us=2**70), "fire_us cannot be"),
            (lambda: board.end_entity(bid, "p", "COMPLETED", ms=2**70), "ms cannot be"),
            (lambda: board.move_batch(bid, "OVER"), "unknown status 'OVER'.*: use WAITING_FOR_JOB, NEW"),
            (lambda: board.batches("OVER"), "unknown status"),
            (lambda: board.jobs("OVER"), "unknown status"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                call()
        assert len(list(fresh.records())) == 1

    # -- jobs ---------------------------------------------------------------------------------------------

    def test_a_job_is_claimed_once_and_taken_over(self, fresh: Ledger) -> None:
        board = Board(fresh)
        job = board.create_job("nightly", schedule="cron 0 3 * * 1-5", affinity="cloud")
        assert board.claim_job(job, "w1")["tries"] == 1
        with pytest.raises(InvalidTransition, match="IN_PROCESS cannot become IN_PROCESS"):
            board.claim_job(job, "w2")
        board.move_job(job, "WAITING")
        taken = board.claim_job(job, "w2")
        assert (taken["tries"], taken["worker"]) == (2, "w2")
        assert [each["job_id"] for each in board.jobs("IN_PROCESS")] == [job]
        for late in ("PROCESSED", "FAILED"):
            with pytest.raises(LeaseLost, match=r"another worker now .*worker=w1 holder=w2"):
                board.move_job(job, late, worker="w1")
        with pytest.raises(InvalidArgument, match="only the worker of a job may report it PROCESSED"):
            board.move_job(job, "PROCESSED")
        board.move_job(job, "PROCESSED", worker="w2")
        with pytest.raises(InvalidTransition, match="it may become no other status"):
            board.move_job(job, "WAITING")
        assert fresh.verify() == []

    def test_each_fire_time_runs_once(self, fresh: Ledger) -> None:
        board = Board(fresh)
        board.create_job("nightly", fire_us=1000)
        with pytest.raises(IllegalRecord, match="already exists"):
            board.create_job("nightly", fire_us=1000)
        board.create_job("nightly", fire_us=2000)
        assert [each["fire_us"] for each in board.jobs("WAITING")] == [1000, 2000]

    def test_of_two_that_saw_the_same_the_second_is_refused(self, fresh: Ledger) -> None:
        """A worker's claim is refused if another worker has done the whole job since the first one read its status."""
        board = Board(fresh)
        job = board.create_job("j")
        seen, board._seen = board._seen, lambda kind, item_id: old  # type: ignore[method-assign,assignment]
        old = seen(next(iter([fresh.item(job)])).kind, job)  # type: ignore[union-attr]
        other = Board(fresh)
        other.claim_job(job, "quick")
        other.move_job(job, "PROCESSED", worker="quick")
        with pytest.raises(Locked, match="another writer changed the item first"):
            board.claim_job(job, "slow")

    @pytest.mark.parametrize("quicker", ["COMPLETED", "FAILED"])
    def test_of_two_ends_of_an_entity_the_second_hears_of_the_first(self, fresh: Ledger, quicker: str) -> None:
        """Two callers report the end of one entity: the first report counts, and the second caller learns of it.

        The second call returns False if the entity is already COMPLETED, and raises InvalidTransition if it is FAILED.
        """
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"])
        board.move_batch(bid, "IN_PROGRESS")
        append = board._append

        def late(changes: Any) -> None:
            board._append = append  # type: ignore[method-assign]
            assert Board(fresh).end_entity(bid, "p0", quicker)
            append(changes)

        board._append = late  # type: ignore[method-assign,assignment]
        if quicker == "COMPLETED":
            assert not board.end_entity(bid, "p0", "COMPLETED")
        else:
            with pytest.raises(InvalidTransition):
                board.end_entity(bid, "p0", "COMPLETED")
        assert [each["status"] for each in board.entities(bid)] == [quicker]

    def test_an_entity_that_is_taken_up_again_meanwhile_ends(self, fresh: Ledger) -> None:
        board = Board(fresh)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"])
        board.move_batch(bid, "IN_PROGRESS")
        append = board._append

        def late(changes: Any) -> None:
            board._append = append  # type: ignore[method-assign]
            other = Board(fresh)
            other.end_entity(bid, "p0", "FAILED")
            other.move_batch(bid, "DONE")
            other.retry_batch(bid)
            append(changes)

        board._append = late  # type: ignore[method-assign,assignment]
        assert board.end_entity(bid, "p0", "COMPLETED")
        assert [each["status"] for each in board.entities(bid)] == ["COMPLETED"]

    # -- derived ------------------------------------------------------------------------------------------

    def test_views_are_derived_from_records(self, fresh: Ledger) -> None:
        manager, board = StateManager(fresh), Board(fresh)
        manager.insert_state(job_id="j", state_id="s")
        manager.update_state("s", status="success", record_count=3)
        bid = board.create_batch("b", "move")
        board.move_batch(bid, "GENERATE_IID")
        board.list_entities(bid, ["p0"])
        board.create_job("j")
        before = manager.get_processing_history(), board.batches(), board.entities(bid), board.jobs("WAITING")
        fresh.database.write(lambda c: c.execute(update(STAGE).values(status="failure")))
        fresh.database.write(lambda c: [c.execute(delete(table)) for table in (BATCH, ENTITY, JOB)])
        assert {fault.code for fault in fresh.verify()} == {"view_differs"}
        fresh.rebuild()
        assert fresh.verify() == []
        after = manager.get_processing_history(), board.batches(), board.entities(bid), board.jobs("WAITING")
        assert after == before
