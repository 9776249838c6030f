"""``Board`` records batches, entities and jobs in the ledger. Callers do the recorded work themselves, except that
``Board.run`` processes a batch.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import RowMapping, Select, func, select

from stateflow.errors import IllegalRecord, InvalidArgument, InvalidPayload, InvalidTransition, LeaseLost, Locked
from stateflow.ledger import rules
from stateflow.ledger.ledger import MESSAGE_MAX, Ledger
from stateflow.ledger.records import BATCH, ENTITY, JOB, App, Entry, Item, Kind, RecordState, encode, is_time
from stateflow.ledger.rules import VIEWS, BatchStatus, EntityStatus, JobStatus, RetryPlan
from stateflow.ledger.statements import newest_first, unchanged
from stateflow.schedule import Schedule, pace_per_s, remaining
from stateflow.types import shown

APP = App("stateflow.board")
SLOWEST = 10
S = TypeVar("S", bound=StrEnum)


class Board:
    """Batches, entities and jobs in a ledger. Raises InvalidTransition for a step that a state machine forbids,
    IllegalRecord for an unknown item."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    # -- batches ------------------------------------------------------------------------------------------

    def create_batch(
        self,
        name: str,
        command: str,
        *,
        owner: str | None = None,
        affinity: str | None = None,
        job_affinity: str | None = None,
        waits_for_job: bool = False,
        bid: str | None = None,
    ) -> str:
        """Creates a batch and returns its id."""
        _check_texts(name=name, command=command, owner=owner)
        for given in (affinity, job_affinity):
            if given is not None:
                rules.check_affinity(given)
        bid = bid or uuid.uuid4().hex
        status = BatchStatus.WAITING_FOR_JOB if waits_for_job else BatchStatus.NEW
        columns = {"name": name, "command": command, "owner": owner, "affinity": affinity, "job_affinity": job_affinity}
        self.ledger.append([_new(Kind.BATCH, bid, columns | {"status": status.value})])
        return bid

    def batch(self, bid: str) -> dict[str, Any]:
        """Returns a batch's columns, the counts of its entities, its pace in entities per second, its expected end
        (``eta``, and with 95 % confidence between ``eta_sooner`` and ``eta_later``, all in microseconds), and its
        slowest entities."""
        with self.ledger.database.reading() as connection:
            found = select(BATCH).where(BATCH.c.bid == bid)
            row = connection.execute(found).mappings().first() if rules.is_item_id(bid) else None
            if row is None:
                raise IllegalRecord("there is no such batch", remedy="list them with `stateflow batch list`", batch=bid)
            counts: dict[str, int] = {row[0]: row[1] for row in connection.execute(counted(bid))}
            slow = connection.execute(slowest(bid)).mappings().all()
        ended = sum(count for status, count in counts.items() if EntityStatus(status).over)
        total, now = sum(counts.values()), self.ledger.clock.now_us()
        worked_s = rules.worked_us(row["worked_us"], row["resumed_us"], now) / 1e6
        left = None if row["resumed_us"] is None else remaining(total, ended, worked_s)
        eta, sooner, later = rules.eta_us(now, left) or (None, None, None)
        return dict(row) | {
            "total_entities": total,
            "waiting": counts.get(EntityStatus.WAITING, 0),
            "in_progress": counts.get(EntityStatus.IN_PROGRESS, 0),
            "succeeded": counts.get(EntityStatus.COMPLETED, 0),
            "failed": counts.get(EntityStatus.FAILED, 0),
            "cancelled": counts.get(EntityStatus.CANCELLED, 0),
            "pace": pace_per_s(ended, worked_s),
            "eta": eta,
            "eta_sooner": sooner,
            "eta_later": later,
            "extra_stats": {
                "slowest": [_slow(each) for each in slow],
            },
        }

    def batches(self, status: BatchStatus | str | None = None, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns the columns of all batches, or of those in ``status``, newest first; with ``limit`` only the newest
        ones."""
        query = (
            select(BATCH)
            if status is None
            else select(BATCH).where(BATCH.c.status == _status(BatchStatus, status).value)
        )
        with self.ledger.database.reading() as connection:
            return list(newest_first(connection, query, BATCH.c.first_record_id, limit))

    def move_batch(self, bid: str, to: BatchStatus | str, author: str = "") -> None:
        """Moves a batch to its next status. A batch cannot become IN_PROGRESS before its list of entities is complete,
        nor DONE before all its entities have ended.

        Args:
            author: author of the record; empty: the ledger's.
        """
        to, seen = _status(BatchStatus, to), self._seen(Kind.BATCH, bid)
        row = seen.row
        rules.check_transition("batch", bid, rules.BATCH_NEXT, BatchStatus(row["status"]), to)
        with self.ledger.database.reading() as connection:
            counts: dict[str, int] = {row[0]: row[1] for row in connection.execute(counted(bid))}
        left = sum(count for status, count in counts.items() if not EntityStatus(status).over)
        rules.check_ready(bid, to, listed=bool(row["listed"]), open=left)
        now = self.ledger.clock.now_us()
        columns: dict[str, Any] = {"status": to.value} | _worked(row, to, now)
        if to in (BatchStatus.GENERATE_IID, BatchStatus.IN_PROGRESS):
            columns |= {"started_us": row["started_us"] or now, "ended_us": None}
        elif to in (BatchStatus.DONE, BatchStatus.FAILED, BatchStatus.CANCELLED):
            columns |= {"ended_us": now}
        self._append([seen.to(rules.BATCH_RECORD_STATE[to], columns)], author=author)

    def list_entities(self, bid: str, entities: Iterable[str], *, complete: bool = True) -> None:
        """Stores entities that the batch must process. Entities that are already listed stay unchanged. ``complete``:
        no more entities follow.
        """
        seen = self._seen(Kind.BATCH, bid)
        if seen.row["status"] != BatchStatus.GENERATE_IID:
            raise InvalidTransition(
                "entities can only be listed in GENERATE_IID", remedy="move the batch to that status", batch=bid
            )
        names = list(dict.fromkeys(entities))
        with self.ledger.database.reading() as connection:
            known = set(connection.execute(select(ENTITY.c.entity).where(ENTITY.c.bid == bid)).scalars())
        fresh = [
            _new(Kind.ENTITY, entity_id(bid, name), {"bid": bid, "entity": name, "status": EntityStatus.WAITING.value})
            for name in names
            if name not in known
        ]
        self._append([seen.to(RecordState.PROCESSING, {"listed": int(complete)})], fresh)

    def end_entity(
        self, bid: str, entity: str, status: EntityStatus | str, *, ms: int | None = None, result: Any = None
    ) -> bool:
        """Moves an entity to IN_PROGRESS, COMPLETED, FAILED or CANCELLED. Returns False when the entity is already
        COMPLETED or in that status, so that a repeated report counts once.

        Raises InvalidTransition if the entity has failed and no retry was requested, Locked if another process holds
        it, and InvalidPayload for a result that is not JSON or is too large.
        """
        to, item_id = _status(EntityStatus, status), entity_id(bid, entity)
        if ms is not None and not 0 <= ms < 2**63:
            raise InvalidArgument(f"ms cannot be {shown(ms)}", remedy="use milliseconds, 0 or more", entity=entity)
        seen = self._seen(Kind.ENTITY, item_id)
        while True:
            now = EntityStatus(seen.row["status"])
            if now in (EntityStatus.COMPLETED, to):
                return False
            rules.check_transition("entity", entity, rules.ENTITY_NEXT, now, to)
            columns = {"status": to.value, "ms": ms, "result": encode(result, item_id)}
            try:
                self._append([seen.to(rules.ENTITY_RECORD_STATE[to], columns)])
            except Locked:  # another process was first, and may have reported another status
                before, seen = seen, self._seen(Kind.ENTITY, item_id)
                if seen.item.records[-1].seq == before.item.records[-1].seq:
                    raise
            else:
                return True

    def begin_entity(self, bid: str, entity: str) -> bool:
        """Moves an entity to IN_PROGRESS. Returns False when it is already IN_PROGRESS or COMPLETED. Raises the errors
        of :meth:`end_entity`."""
        return self.end_entity(bid, entity, EntityStatus.IN_PROGRESS)

    def run(self, bid: str, work: Callable[[str], Any]) -> dict[str, Any]:
        """Processes a listed batch, one entity after the other in the order of listing, and ends it. Returns the same
        as :meth:`batch`.

        The value that ``work(entity)`` returns, which must be JSON, becomes the entity's result. When ``work`` raises,
        or its value cannot be recorded, the entity becomes FAILED, and the run continues with the next one.

        After a crash, or to continue a paused batch, run it again: entities that have ended are skipped, and the one
        that was IN_PROGRESS is processed again. Only one process at a time may run a batch. When another process pauses
        or cancels the batch, the run stops after the present entity. Raises InvalidTransition for a batch that cannot
        become IN_PROGRESS, for example without a complete list.
        """
        if self._seen(Kind.BATCH, bid).row["status"] != BatchStatus.IN_PROGRESS:
            self.move_batch(bid, BatchStatus.IN_PROGRESS)
        for each in self.entities(bid):
            if EntityStatus(each["status"]).over:
                continue
            if self._seen(Kind.BATCH, bid).row["status"] != BatchStatus.IN_PROGRESS:
                return self.batch(bid)
            entity, began = each["entity"], self.ledger.clock.monotonic()
            self.begin_entity(bid, entity)
            try:
                result, status = work(entity), EntityStatus.COMPLETED
            except Exception as error:  # noqa: BLE001 - the error becomes the entity's result
                result, status = _failure(f"{type(error).__name__}: {error}"), EntityStatus.FAILED
            ms = round(1e3 * (self.ledger.clock.monotonic() - began))
            try:
                self.end_entity(bid, entity, status, ms=ms, result=result)
            except InvalidPayload as error:
                self.end_entity(bid, entity, EntityStatus.FAILED, ms=ms, result=_failure(str(error)))
        if self._seen(Kind.BATCH, bid).row["status"] == BatchStatus.IN_PROGRESS:
            self.move_batch(bid, BatchStatus.DONE)
        return self.batch(bid)

    def entities(self, bid: str, status: EntityStatus | str | None = None) -> list[dict[str, Any]]:
        """Returns the entities of a batch, in the order of listing."""
        with self.ledger.database.reading() as connection:
            rows = connection.execute(listed_entities(bid, None if status is None else _status(EntityStatus, status)))
            return [dict(row) for row in rows.mappings()]

    def retry_batch(self, bid: str, *, allow_cancelled: bool = False) -> tuple[RetryPlan, list[str]]:
        """Retries a batch: failed entities wait again, and with ``allow_cancelled`` cancelled ones too. Returns the
        plan and the entities to process. Raises InvalidTransition for a batch that is neither paused nor has ended, and
        without ``allow_cancelled`` for a cancelled one."""
        seen = self._seen(Kind.BATCH, bid)
        plan = rules.plan_retry(
            bid, BatchStatus(seen.row["status"]), listed=bool(seen.row["listed"]), allow_cancelled=allow_cancelled
        )
        found = {status: self.entities(bid, status) for status in plan.entities}
        waiting = found.pop(EntityStatus.WAITING, [])
        stopped = [each for several in found.values() for each in several]  # under way, failed or cancelled
        items = {item.item_id: item for item in self.ledger.items(each["item_id"] for each in stopped)}
        # read again, as in _seen: the rows above may be older than the items
        rows = {each["item_id"]: each for status in found for each in self.entities(bid, status)}
        stopped = [rows[item_id] for item_id in items if item_id in rows]
        waits = {"status": EntityStatus.WAITING.value}
        again = [_Seen(items[each["item_id"]], each).to(RecordState.RESOLVED, waits) for each in stopped]
        to = BatchStatus.GENERATE_IID if plan.relist else BatchStatus.IN_PROGRESS
        columns = {"status": to.value, "ended_us": None} | _worked(seen.row, to, self.ledger.clock.now_us())
        self._append([*again, seen.to(rules.BATCH_RECORD_STATE[to], columns)])
        ordered = sorted([*stopped, *waiting], key=lambda each: int(each["first_record_id"]))
        return plan, [each["entity"] for each in ordered]

    # -- jobs ---------------------------------------------------------------------------------------------

    def create_job(
        self,
        name: str,
        *,
        bid: str | None = None,
        affinity: str | None = None,
        schedule: str | None = None,
        fire_us: int | None = None,
    ) -> str:
        """Creates a job and returns its id. With ``fire_us``, the new job is a run of a scheduled job: at most one job
        ever exists for a name and a fire time.

        Raises IllegalRecord if another controller created the same run first.
        """
        check_names(255, name=name)
        if fire_us is not None and not is_time(fire_us):
            raise InvalidArgument(
                f"fire_us cannot be {shown(fire_us)}", remedy="use microseconds since 1970-01-01 UTC", job=name
            )
        if affinity is not None:
            rules.check_affinity(affinity)
        if schedule is not None:
            Schedule.parse(schedule)
        job_id = f"job/{name}/{uuid.uuid4().hex if fire_us is None else fire_us}"
        columns = {"name": name, "bid": bid, "affinity": affinity, "schedule": schedule, "fire_us": fire_us}
        self.ledger.append([_new(Kind.JOB, job_id, columns | {"status": JobStatus.WAITING.value})])
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self._seen(Kind.JOB, job_id).row)

    def jobs(self, status: JobStatus | str) -> list[dict[str, Any]]:
        """Returns the jobs in a status, in the order of their creation."""
        with self.ledger.database.reading() as connection:
            return [dict(row) for row in connection.execute(listed_jobs(_status(JobStatus, status))).mappings()]

    def claim_job(self, job_id: str, worker: str) -> dict[str, Any]:
        """Moves a job to IN_PROCESS for this worker, and counts one more try. Raises Locked if another worker was
        first.
        """
        check_names(255, worker=worker)
        seen = self._seen(Kind.JOB, job_id)
        columns = {"worker": worker, "tries": seen.row["tries"] + 1, "started_us": self.ledger.clock.now_us()}
        self._move_job(seen, JobStatus.IN_PROCESS, columns | {"ended_us": None})
        return self.job(job_id)

    def move_job(self, job_id: str, to: JobStatus | str, worker: str | None = None) -> None:
        """Ends a job, or moves it back to WAITING, so that another worker can claim it.

        Args:
            worker: worker that has done the job, or failed to; only the job's present worker may report this. None: the
                caller is not the worker, and may only move the job to WAITING or TERMINATED.

        Raises LeaseLost if the job belongs to another worker by now.
        """
        to, seen = _status(JobStatus, to), self._seen(Kind.JOB, job_id)
        if to in (JobStatus.PROCESSED, JobStatus.FAILED) and worker is None:
            raise InvalidArgument(f"only the worker of a job may report it {to}", remedy="pass worker=", job=job_id)
        ended = None if to is JobStatus.WAITING else self.ledger.clock.now_us()
        self._move_job(seen, to, {"ended_us": ended}, worker)

    def _move_job(self, seen: _Seen, to: JobStatus, columns: dict[str, Any], worker: str | None = None) -> None:
        if worker is not None and worker != seen.row["worker"]:
            raise LeaseLost(
                "the job belongs to another worker now",
                remedy="stop working on it",
                job=seen.item.item_id,
                worker=worker,
                holder=seen.row["worker"],
            )
        rules.check_transition("job", seen.item.item_id, rules.JOB_NEXT, JobStatus(seen.row["status"]), to)
        self._append([seen.to(rules.JOB_RECORD_STATE[to], columns | {"status": to.value})])

    # -- parts --------------------------------------------------------------------------------------------

    def _seen(self, kind: Kind, item_id: str) -> _Seen:
        """Reads the item, then its row. In the other order, an outdated row could pass the check of ``_append``."""
        item = next(iter(self.ledger.items([item_id])), None)
        table, key = VIEWS[kind].table, VIEWS[kind].key
        row = None
        if item is not None:
            with self.ledger.database.reading() as connection:
                row = connection.execute(select(table).where(table.c[key] == item_id)).mappings().first()
        if row is None or item is None:
            raise IllegalRecord(f"there is no such {kind}", remedy="create it first", **{kind.value: item_id})
        return _Seen(item, dict(row))

    def _append(self, changes: Sequence[_Change], fresh: Sequence[Entry] = (), author: str = "") -> None:
        """Appends all of these entries, or raises Locked if one of their items has changed since it was read."""
        for change in changes:
            theirs = change.item.records[0].app.name
            if theirs != APP.name:
                raise IllegalRecord(
                    f"the item belongs to {theirs}, which decides its status",
                    remedy="use `stateflow batch cancel`, or `stateflow reconfig` for a reconfiguration",
                    item=change.item.item_id,
                )
        seen = {change.item.item_id: change.item.records[-1].seq for change in changes}
        entries = [*fresh, *(entry for change in changes for entry in change.entries)]
        self.ledger.append(entries, unchanged(seen), author=author)


@dataclass(frozen=True, slots=True)
class _Change:
    item: Item
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class _Seen:
    item: Item
    row: dict[str, Any]

    def to(self, state: RecordState, columns: dict[str, Any]) -> _Change:
        """Returns the shortest legal sequence of records that brings the item to this state; the last one sets the
        columns."""
        steps = rules.path(self.item.state, state)
        entries: list[Entry] = []
        previous: Any = self.item.blocking
        for place, step in enumerate(steps):
            payload = {"set": columns if place == len(steps) - 1 else {}}
            named = None if step is RecordState.PROCESSING else previous
            previous = Entry(self.item.item_id, APP, step, named, payload, self.item.kind.payload_schema, math.inf)
            entries.append(previous)
        return _Change(self.item, entries)


def _new(kind: Kind, item_id: str, columns: dict[str, Any]) -> Entry:
    return Entry(item_id, APP, RecordState.NEW, None, {"set": columns}, kind.payload_schema)


def _failure(message: str) -> dict[str, str]:
    """Returns the result of an entity that has failed."""
    return {"error": message[:MESSAGE_MAX]}


def _slow(row: RowMapping) -> dict[str, Any]:
    return {"id": row["entity"], "ms": row["ms"], "status": row["status"], "result": row["result"]}


def entity_id(bid: str, entity: str) -> str:
    """Returns the item id of an entity, unique across batches: the first slash after ``batch/`` ends the batch's id."""
    return f"batch/{bid.replace('%', '%25').replace('/', '%2F')}/{entity}"


def _worked(row: Mapping[str, Any], to: BatchStatus, now_us: int) -> dict[str, Any]:
    """Returns the columns that say how long the batch was worked on, after it moves to ``to``."""
    worked = rules.worked_us(row["worked_us"], row["resumed_us"], now_us)
    return {"worked_us": worked, "resumed_us": now_us if to is BatchStatus.IN_PROGRESS else None}


def _status(kind: type[S], status: S | str) -> S:
    try:
        return kind(status)
    except ValueError:
        raise InvalidArgument(f"unknown status {shown(status)}", remedy=f"use {', '.join(kind)}") from None


def _check_texts(**given: str | None) -> None:
    for name, text in given.items():
        if text is not None and not (isinstance(text, str) and rules.is_text(text)):
            raise InvalidArgument(f"{name} cannot be {shown(text)}", remedy="use text without NUL and lone surrogates")


def check_names(at_most: int, **given: str | None) -> None:
    """Checks names before they are looked up: some databases would find ``j`` for ``j ``. Raises InvalidArgument."""
    for name, text in given.items():
        if text is not None and not rules.is_id(text, at_most):
            raise InvalidArgument(
                f"{name} must have 1 to {at_most} characters, no control character and no trailing space",
                remedy="choose another",
                given=shown(text),
            )


# -- statements -----------------------------------------------------------------------------------------------


def counted(bid: str) -> Select[Any]:
    return select(ENTITY.c.status, func.count()).where(ENTITY.c.bid == bid).group_by(ENTITY.c.status)


def slowest(bid: str) -> Select[Any]:
    return (
        select(ENTITY).where(ENTITY.c.bid == bid, ENTITY.c.ms.is_not(None)).order_by(ENTITY.c.ms.desc()).limit(SLOWEST)
    )


def listed_entities(bid: str, status: StrEnum | None) -> Select[Any]:
    query = select(ENTITY).where(ENTITY.c.bid == bid).order_by(ENTITY.c.first_record_id)
    return query if status is None else query.where(ENTITY.c.status == status.value)


def listed_jobs(status: StrEnum) -> Select[Any]:
    return select(JOB).where(JOB.c.status == status.value).order_by(JOB.c.first_record_id)
