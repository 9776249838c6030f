"""Runs work on an item under its lock, which is renewed while the work runs and released however the work ends."""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from stateflow.errors import ApplicationError, LeaseLost, Locked, StateflowError
from stateflow.ledger import records
from stateflow.ledger.records import App, Item, Record, RecordState

log = logging.getLogger(__name__)
MESSAGE_MAX, STACK_MAX = 2048, 8192


class Ledger(Protocol):
    """The part of :class:`stateflow.ledger.Ledger` that work needs."""

    run_id: str
    lease_s: float

    def item(self, item_id: str) -> Item | None: ...

    def put(
        self, item_id: str, app: App, state: RecordState, previous: Record | None = None, payload: Any = None
    ) -> Record: ...

    def renew(self, lock: Record) -> bool: ...


def held(ledger: Ledger, lock: Record, work: Callable[[Item], Any]) -> Record:
    """Calls ``work(item)``, then releases the lock. Returns the PROCESSED record. Raises ApplicationError, LeaseLost.

    However the lock was lost, another application may do the work again.
    """
    item = ledger.item(lock.item_id)
    assert item is not None
    try:
        with renewed(ledger, lock):
            payload = work(item)
        records.encode(payload, lock.item_id)  # work whose result cannot be recorded has failed
    except BaseException as error:
        failure = ApplicationError(
            f"work on the item raised {type(error).__name__}: {_message(error)[:300]}",
            remedy="fix the cause, then resolve the item",
            item=lock.item_id,
            app=lock.app.name,
            run=ledger.run_id,
        )
        _record_failure(ledger, lock, error, failure)
        if not isinstance(error, Exception):  # Ctrl-C and exit stay what they are
            raise
        raise failure from error
    try:
        return ledger.put(lock.item_id, lock.app, RecordState.PROCESSED, lock, payload)
    except Locked as error:
        raise LeaseLost(
            "another process released the lock while its holder worked", remedy="read the item again", **error.where
        ) from error


def error_payload(error: BaseException | str) -> dict[str, Any]:
    if isinstance(error, str):  # as another process reported it
        return {"error": {"type": "", "message": error[:MESSAGE_MAX], "stack": error[-STACK_MAX:]}}
    stack = "".join(traceback.format_exception(error))
    return {"error": {"type": type(error).__name__, "message": _message(error), "stack": stack[-STACK_MAX:]}}


def _message(error: BaseException) -> str:
    return str(error)[:MESSAGE_MAX]


def _record_failure(ledger: Ledger, lock: Record, error: BaseException, failure: ApplicationError) -> None:
    try:
        ledger.put(lock.item_id, lock.app, RecordState.FAILED, lock, error_payload(error))
    except StateflowError as second:
        failure.add_note(f"and FAILED could not be recorded: {second}")


@contextmanager
def renewed(ledger: Ledger, lock: Record) -> Iterator[None]:
    """Renews the lock's lease three times per lease, in a thread, until the block is left."""
    if math.isinf(ledger.lease_s):
        yield
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(ledger.lease_s / 3):
            try:
                if not ledger.renew(lock):
                    log.warning("lock on %s lost, the result of its work will be refused", lock.item_id)
                    return
            except StateflowError as error:  # if the lease ends, the release reports it
                log.warning("lock on %s could not be renewed: %s", lock.item_id, error)

    thread = threading.Thread(target=renew, name=f"lease of {lock.item_id[:40]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
