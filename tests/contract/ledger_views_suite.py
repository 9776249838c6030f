"""Stages, batches, entities and jobs on every database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update

from stateflow.errors import IllegalRecord, InvalidArgument, InvalidTransition, Locked
from stateflow.ledger import App, Board, Ledger, StateManager
from stateflow.ledger.batches import BatchStatus
from stateflow.ledger.schema import BATCH, ENTITY, JOB, STAGE
from stateflow.ledger.stages import ANSWER, COLUMNS

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
            assert again.get_current_state("flights") == ended == again.get_last_record("raw")
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

    def test_last_records_and_history_leave_failures_out(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        done = {"action": "sinking post-push", "status": "success"}
        good = manager.insert_state(job_id="j", source_entity="a", last_record_pulled="5", **done)
        failed = manager.insert_state(job_id="j", source_entity="a", action="sinking post-push", status="failure")
        running = manager.insert_state(job_id="j", source_entity="a")
        assert manager.get_last_record("a") == manager.update_state(good["state_id"])
        listed = [row["state_id"] for row in manager.get_processing_history()]
        assert listed == [good["state_id"], running["state_id"]]
        assert [row["state_id"] for row in manager.get_processing_history("j", limit=1)] == [running["state_id"]]
        manager.update_state(failed["state_id"], **done)
        last = manager.get_last_record("a")
        assert last is not None
        assert last["state_id"] == failed["state_id"], "tried again, and done"
        assert fresh.verify() == []

    def test_correlation_ids_chain_the_stages_of_a_run(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        first = manager.insert_state(job_id="j")
        second = manager.insert_state(job_id="j")
        third = manager.insert_state(job_id="k", correlation_id_in=second["correlation_id_out"])
        apart = manager.insert_state(job_id="j", run_id="another run")
        assert second["correlation_id_in"] == first["correlation_id_out"]
        assert apart["correlation_id_in"] is None
        traced = [row["state_id"] for row in manager.trace(second["correlation_id_out"])]
        assert traced == [each["state_id"] for each in (first, second, third)]
        assert manager.trace("nothing") == []

    def test_stages_that_are_refused(self, fresh: Ledger) -> None:
        manager = StateManager(fresh)
        for fields, said in (
            ({"colour": "red"}, "no column 'colour'"),
            ({"row_count": 1}, "no column 'row_count'"),
            ({"status": "fine"}, "status cannot be 'fine'.*success | failure | in_progress"),
            ({"action": "push"}, "action cannot be"),
            ({"sourcing_start_time": datetime(2026, 1, 1)}, "with its zone"),
            ({"sourcing_start_time": "yesterday"}, "with its zone"),
            ({"record_count": -1}, "record_count cannot be"),
            ({"record_count": 1.5}, "record_count cannot be"),
            ({"job_id": "x" * 256}, "1 to 255 characters"),
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
        with pytest.raises(IllegalRecord, match="there already"):
            manager.insert_state(state_id="mine")
        with pytest.raises(IllegalRecord, match="the item is a stage"):
            fresh.put("mine", App("a"), "SKIPPED")
        assert len(list(fresh.records())) == 3
        assert begun["state_id"] == "mine"
        assert fresh.fetch() == ["item"], "stages are not among the items"

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
        with pytest.raises(InvalidTransition, match="IN_PROGRESS is not retried"):
            board.retry_batch(bid)
        board.move_batch(bid, "CANCELLED")
        with pytest.raises(InvalidTransition, match="pass allow_cancelled"):
            board.retry_batch(bid)
        assert board.retry_batch(bid, allow_cancelled=True)[1] == ["p1"]
        assert fresh.verify() == []

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
        with pytest.raises(InvalidArgument, match="no affinity"):
            board.create_batch("b", "move", affinity="gpu:4-2")
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
        board.move_job(job, "PROCESSED")
        with pytest.raises(InvalidTransition, match="it may become nothing"):
            board.move_job(job, "WAITING")
        assert fresh.verify() == []

    def test_each_fire_time_runs_once(self, fresh: Ledger) -> None:
        board = Board(fresh)
        board.create_job("nightly", fire_us=1000)
        with pytest.raises(IllegalRecord, match="there already"):
            board.create_job("nightly", fire_us=1000)
        board.create_job("nightly", fire_us=2000)
        assert [each["fire_us"] for each in board.jobs("WAITING")] == [1000, 2000]

    def test_of_two_that_saw_the_same_the_second_is_refused(self, fresh: Ledger) -> None:
        """Between reading and writing another worker does the whole job: nothing may run twice."""
        board = Board(fresh)
        job = board.create_job("j")
        seen, board._seen = board._seen, lambda kind, item_id: old  # type: ignore[method-assign,assignment]
        old = seen(next(iter([fresh.item(job)])).kind, job)  # type: ignore[union-attr]
        other = Board(fresh)
        other.claim_job(job, "quick")
        other.move_job(job, "PROCESSED")
        with pytest.raises(Locked, match="another writer was first"):
            board.claim_job(job, "slow")

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
