"""Queries that select the items of calls over many items. An index answers each of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, or_, select

from stateflow.ledger.records import EVERYONE, Kind, RecordState, Who
from stateflow.ledger.schema import ITEM, LEASE, STAGE, VERDICT, now_us


def _instances(who: Who) -> list[str]:
    return ["", who.instance] if who.instance else [""]


def _has(verdict: RecordState, *names: ColumnElement[bool]) -> ColumnElement[bool]:
    mark = VERDICT
    return exists(
        select(mark.c.item_id).where(mark.c.item_id == ITEM.c.item_id, mark.c.verdict == verdict.value, or_(*names))
    )


def _covering(who: Who) -> ColumnElement[bool]:
    return and_(VERDICT.c.app_name == who.name, VERDICT.c.app_instance.in_(_instances(who)))


def _listed() -> Select[Any]:
    return select(ITEM.c.item_id, ITEM.c.blocking_record_id).where(ITEM.c.kind == Kind.ITEM.value, ITEM.c.archived == 0)


def _processed(query: Select[Any], who: Who) -> Select[Any]:
    marked = select(VERDICT.c.item_id).where(VERDICT.c.verdict == RecordState.PROCESSED.value, _covering(who))
    return query.where(ITEM.c.item_id.in_(marked))


def unprocessed(prepared_by: Who | None, requester: Who | None) -> Select[Any]:
    """Selects item ids and their blocking records: items that were prepared, and that the requester has neither
    processed nor must skip."""
    query = _listed()
    if prepared_by is not None:
        query = _processed(query, prepared_by)
    skips = [VERDICT.c.app_name == EVERYONE]
    if requester is not None:
        query = query.where(~_has(RecordState.PROCESSED, _covering(requester)))
        skips.append(_covering(requester))
    return query.where(~_has(RecordState.SKIPPED, *skips)).order_by(ITEM.c.item_id)


def ready(prepared_by: Who | None, requester: Who | None) -> tuple[Select[Any], Select[Any]]:
    """Selects unprocessed items that are usable now: those that no record blocks, and those whose holder's lease has
    ended."""
    query = unprocessed(prepared_by, requester)
    silent = select(LEASE.c.item_id).where(LEASE.c.until_us <= now_us())
    return query.where(ITEM.c.blocking_record_id.is_(None)), query.where(ITEM.c.item_id.in_(silent))


def fetched(processed_by: Who | None, state: RecordState | None) -> Select[Any]:
    query = _listed().order_by(ITEM.c.item_id)
    if processed_by is not None:
        query = _processed(query, processed_by)
    if state is RecordState.SKIPPED:
        marked = select(VERDICT.c.item_id).where(VERDICT.c.verdict == state.value)
        return query.where(ITEM.c.item_id.in_(marked))
    return query if state is None else query.where(ITEM.c.state == state.value)


def archivable(before_us: int, limit: int) -> Select[Any]:
    """Selects items that are done and not blocked, and whose newest record is older. A stage is done at its last
    action."""
    unfinished = exists(
        select(STAGE.c.state_id).where(
            STAGE.c.state_id == ITEM.c.item_id,
            or_(STAGE.c.action.is_(None), STAGE.c.action != "sinking post-push"),
        )
    )
    return (
        select(ITEM.c.item_id)
        .where(
            ITEM.c.archived == 0,
            ITEM.c.state == RecordState.PROCESSED.value,
            ITEM.c.updated_us < before_us,
            ~and_(ITEM.c.kind == Kind.STAGE.value, unfinished),
        )
        .order_by(ITEM.c.updated_us)
        .limit(limit)
    )
