"""Programs of processes that the ledger's suites start: rivals for a lock, and writers that are killed."""

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
    """Tries to acquire items ``round-0``, ``round-1``, …, and puts (name, won rounds, lost rounds) into ``results``.

    All processes wait for each other every ten rounds, so that they compete again.
    """
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
    """Calls a method of each kind that writes to the ledger."""

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
    """Writes a history, and kills this process before statement or commit number ``statement``, counted from 0."""
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
    """Reads lines ``[run, statement]``, forks a writer for each, and prints the writer's exit status."""
    url = sys.argv[1]
    for line in sys.stdin:
        run, statement = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                die_at(url, run, statement)
            except BaseException as error:  # noqa: BLE001 - the test prints it
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
