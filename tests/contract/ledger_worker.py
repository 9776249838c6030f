"""Processes that the ledger's suite starts: rivals for a lock, and writers that die between two statements."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from sqlalchemy import event

from stateflow.errors import ApplicationError, Locked
from stateflow.ledger import App, Entry, Ledger

KILL_APP = App("dying", "1")


def acquire(url: str, name: str, rounds: int, barrier: Any, results: Any) -> None:
    """Tries to acquire ``round-0``, ``round-1``, …; every ten rounds all processes start again at the same moment."""
    with Ledger(url, busy_timeout_s=60) as ledger:
        won, lost = [], []
        for number in range(rounds):
            if number % 10 == 0:
                barrier.wait(120)
            try:
                won.append((number, ledger.put(f"round-{number}", App(name), "PROCESSING").record_id))
            except Locked as error:
                lost.append((number, error.blocking_record.record_id))
        results.put((name, won, lost))


def history(ledger: Ledger, run: str) -> None:
    """Makes one call of each kind that writes."""

    def fails(_: Any) -> None:
        raise ValueError("no")

    ledger.process_new_item(f"{run}-good", KILL_APP, lambda item: {"rows": len(item.records)})
    try:
        ledger.process_new_item(f"{run}-bad", KILL_APP, fails)
    except ApplicationError:
        ledger.resolve(f"{run}-bad", "seen to")
    new = [Entry(f"{run}-many-{n}", KILL_APP, "NEW") for n in range(5)]
    locks = [Entry(each.item_id, KILL_APP, "PROCESSING", each, lease_s=math.inf) for each in new]
    ledger.put_many([*new, *locks])
    ledger.skip(f"{run}-good", "other")
    ledger.archive(timedelta(seconds=-60))


def die_at(url: str, run: str, statement: int) -> None:
    """Sends SIGKILL to this process before statement or commit number ``statement``, counted from 0."""
    left = statement

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger = Ledger(url)
    event.listen(ledger.database.engine, "before_cursor_execute", count)
    event.listen(ledger.database.engine, "commit", count)
    history(ledger, run)


def main() -> None:
    """Reads ``[run, statement]`` lines, forks a writer for each, and answers with its exit status."""
    url = sys.argv[1]
    for line in sys.stdin:
        run, statement = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                die_at(url, run, statement)
            except BaseException as error:  # noqa: BLE001 - said to the test
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
