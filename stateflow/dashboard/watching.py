"""Watches a cluster for the page: asks the cluster once for all viewers, and hands the answers to each of them.

This module also reads batches and searched records from the ledger, and checkpoints from the checkpoint store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from typing import Any

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster, ClusterStatus, ReplicaStatistics, ReplicaStatus
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.dashboard.view import Rates, Seen, error_view, lines, snapshot
from stateflow.errors import NotAllowed, StateflowError, Unavailable
from stateflow.ledger import Board, Ledger, Record
from stateflow.rpc.faults import unexpected

# -- Checkpoint store ------------------------------------------------------------------------------------------------

#: limit of savepoints shown
SAVEPOINTS_MAX = 100


def checkpoints(store: CheckpointStore) -> dict[str, Any]:
    """Returns counts and times of checkpoints by operator, and the names of savepoints.

    ``oldest_us`` is the time of the oldest checkpoint that a restore would use. It is found by taking the newest
    checkpoint of each partition.
    """
    newest: dict[str, dict[int, int]] = defaultdict(dict)
    counts: dict[str, int] = defaultdict(int)
    for found in store.catalog.checkpoints():
        operator, number = found.partition.operator, found.partition.partition
        counts[operator] += 1
        newest[operator][number] = max(newest[operator].get(number, 0), found.modified_us)
    return {
        "operators": [
            {
                "operator": operator,
                "checkpoints": counts[operator],
                "partitions": len(times),
                "oldest_us": min(times.values()),
                "newest_us": max(times.values()),
            }
            for operator, times in sorted(newest.items())
        ],
        "savepoints": sorted(store.savepoints())[:SAVEPOINTS_MAX],
    }


# -- Ledger ----------------------------------------------------------------------------------------------------------

#: number of newest batches shown, and of others that have not ended; and number of newest batches read; most of these
#: are reconfigurations, which the page shows elsewhere
BATCHES_MAX, LOOKED_AT = 30, 300
#: number of newest records that a search reads, and number of matching records that it shows
SEARCHED, FOUND_MAX = 5000, 200
#: characters shown of a record's payload
PAYLOAD_MAX = 2000
OVER = ("DONE", "FAILED", "CANCELLED")
#: the other statuses, in the order in which batches are chosen if not all are shown
OPEN = ("IN_PROGRESS", "PAUSED", "GENERATE_IID", "NEW", "WAITING_FOR_JOB")
RECONFIGURATIONS = "reconfiguration/"


class Records:
    """Reads the ledger for the page. Several threads may share an object.

    Args:
        url: URL of an existing ledger, which is opened at once. Raises InvalidArgument if it cannot be.
    """

    def __init__(self, url: str, author: str) -> None:
        self._ledger = Ledger(url, author=author, create=False)
        self.board = Board(self._ledger)
        self._over: dict[str, dict[str, Any]] = {}  # batches that have ended, by bid

    def close(self) -> None:
        self._ledger.close()

    def batches(self) -> list[dict[str, Any]]:
        """Returns the newest batches, and those that have not ended, with all their counts, newest first.
        Reconfigurations are left out.

        This takes a query for each status, one more, and three more for each batch that has not ended.
        """
        rows = {row["bid"]: row for row in self._rows()[:BATCHES_MAX]}
        unended = (row for status in OPEN for row in self._rows(status) if row["bid"] not in rows)
        rows |= {row["bid"]: row for row in islice(unended, BATCHES_MAX)}
        newest = sorted(rows.values(), key=lambda row: row["first_record_id"], reverse=True)
        found = [self._known(row) or self.board.batch(row["bid"]) for row in newest]
        self._over = {batch["bid"]: batch for batch in found if batch["status"] in OVER}
        return found

    def _rows(self, status: str | None = None) -> list[dict[str, Any]]:
        newest = self.board.batches(status, limit=LOOKED_AT)
        return [row for row in newest if not row["bid"].startswith(RECONFIGURATIONS)]

    def _known(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Returns an ended batch as an earlier call has read it; None: the batch is not known, or has changed.

        A batch changes after its end if it is retried.
        """
        batch = self._over.get(row["bid"])
        return batch if batch is not None and all(batch[each] == row[each] for each in ("status", "ended_us")) else None

    def search(self, words: str) -> dict[str, Any]:
        """Returns the item with this name and its newest records; without such an item, the newest matching records.

        A record matches if each of the words is in its item, state, application, author or payload. At most
        ``FOUND_MAX`` records are returned. ``searched`` is the number of newest records that were read; 0 for an item.
        """
        item = self._ledger.item(words) if words else None
        if item is not None:
            records: Sequence[Record] = item.records[-FOUND_MAX:]
            return {"item": item.item_id, "state": str(item.state), "searched": 0, "records": _shown(records)}
        newest = self._ledger.newest(SEARCHED)
        wanted = [word for word in words.lower().split() if word]
        found = [record for record in reversed(newest) if all(word in _text(record) for word in wanted)]
        return {"item": "", "state": "", "searched": len(newest), "records": _shown(found[:FOUND_MAX])}


def _payload(record: Record) -> str:
    return "" if record.payload is None else json.dumps(record.payload, default=str, sort_keys=True)[:PAYLOAD_MAX]


def _text(record: Record) -> str:
    app = record.app
    return " ".join(
        (record.item_id, record.state, app.name, app.instance or "", record.author, _payload(record))
    ).lower()


def _shown(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {
            "record": record.record_id,
            "item": record.item_id,
            "state": str(record.state),
            "application": record.app.name,
            "author": record.author,
            "at_us": record.timestamp_us,
            "payload": _payload(record),
        }
        for record in records
    ]


log = logging.getLogger(__name__)
#: seconds between two looks while the page has viewers, and while it has none
LOOK_S, IDLE_S = 1.0, 5.0
#: minimum number of seconds between two looks from which rates are computed
APART_S = 0.5
#: intervals in seconds of questions whose answers change seldom
HISTORY_S, JOBS_S, BATCHES_S, MEASURED_S, SIZES_S = 10.0, 3.0, 3.0, 15.0, 15.0
#: number of replicas asked in one look, number asked at a time, and number of requests that each of them reports
ASKED, AT_ONCE, REQUESTS = 40, 8, 500
#: seconds to wait for a replica's answer; a slower replica is asked again later
ANSWER_S = 2.0
HISTORY_MAX = 60


class Seldom:
    """A question that is asked at intervals, and its last answer.

    Attributes:
        value: last answer.
        refused: error of the newest attempt; empty: the attempt succeeded.
    """

    def __init__(self, every_s: float, value: Any) -> None:
        self._every_s, self._at_s, self.value, self.refused = every_s, float("-inf"), value, ""

    def due(self, now_s: float, *, sooner: bool = False) -> bool:
        return sooner or now_s - self._at_s >= self._every_s

    def told(self, now_s: float, value: Any) -> None:
        self._at_s, self.value, self.refused = now_s, value, ""

    def ask(self, now_s: float, call: Callable[[], Any]) -> None:
        """Asks the question by ``call``. If that fails, the last answer stays until the question is due again."""
        self._at_s = now_s
        try:
            self.told(now_s, call())
        except NotAllowed:  # this process may not ask: the page shows nothing in its place
            pass
        except StateflowError as error:
            self.refused = str(error)


class SeldomOfLedger(Seldom):
    """A question to the ledger, whose database may be locked for hours.

    It is asked in a thread of its own, which has no time limit. If the answer takes longer than ``ANSWER_S``, the look
    goes on without it, and a later look takes it.
    """

    _answer: Future[Any] | None = None

    def ask(self, now_s: float, call: Callable[[], Any]) -> None:
        answer = self._answer
        if answer is None:
            answer = self._answer = Future()
            threading.Thread(target=_answered, args=(answer, call), name="dashboard-ledger", daemon=True).start()
            wait([answer], ANSWER_S)
        if answer.done():
            self._answer = None
            super().ask(now_s, answer.result)
        else:
            self.refused = str(Unavailable("the ledger has not answered yet", remedy="look at its database"))


def _answered(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
        answer.set_exception(error)


class Looking:
    """Looks at a cluster again and again, and returns a snapshot each time. Not thread-safe."""

    def __init__(self, cluster: Cluster, records: Records | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._cluster, self._records, self._clock = cluster, records, clock
        self.rates = Rates()
        self._history, self._jobs = Seldom(HISTORY_S, ()), Seldom(JOBS_S, ())
        self._batches, self._orders = SeldomOfLedger(BATCHES_S, None), Seldom(HISTORY_S, None)
        self._measured = Seldom(MEASURED_S, {})
        self._sized_at_s: dict[str, float] = {}  # by replica
        self._under_way: frozenset[str] = frozenset()
        self._turn, self._asked_at_s = 0, float("-inf")
        self._askers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dashboard-asks")

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)

    def look(self) -> dict[str, Any]:
        """Returns a snapshot of the cluster. Raises the cluster's error if the status cannot be read."""
        now_s = self._clock.monotonic()
        measured = self._measured.due(now_s)
        status = self._cluster.status(measured=measured)
        if measured:
            self._measured.told(now_s, {each.name: each.room_bytes for each in status.replicas})
        apart = now_s - self._asked_at_s >= APART_S
        if apart:
            self._asked_at_s = now_s
            self._ask(status.replicas)
        self.rates.keep(
            {each.name for each in status.replicas}, {each.name for each in status.operators}, self._clock.monotonic()
        )
        seen = self._seen(status, now_s)
        points = [self.rates.tick(self._clock.now_us(), self._clock.monotonic())] if apart else []
        found = snapshot(seen, self.rates, self._clock.monotonic())
        for each in found["replicas"]:
            each["room_bytes"] = self._measured.value.get(each["name"])
        asked = {"history": self._history, "jobs": self._jobs, "autopilot": self._orders, "batches": self._batches}
        missing = [{"what": what, "error": each.refused} for what, each in asked.items() if each.refused]
        return {**found, "points": lines(points), "missing": missing}

    def _seen(self, status: ClusterStatus, now_s: float) -> Seen:
        under_way = frozenset(each.id for each in status.reconfigurations)
        if self._history.due(now_s, sooner=not self._under_way <= under_way):  # one has ended
            self._history.ask(now_s, lambda: self._cluster.reconfigurations(HISTORY_MAX))
        # while the history cannot be read, ended reconfigurations are kept, so that the history is asked for again
        self._under_way = self._under_way | under_way if self._history.refused else under_way
        if self._jobs.due(now_s):
            self._jobs.ask(now_s, self._cluster.jobs)
        if self._orders.due(now_s):
            self._orders.ask(now_s, self._cluster.autopilot_orders)
        if self._records is not None and self._batches.due(now_s):
            self._batches.ask(now_s, self._records.batches)
        return Seen(status, self._history.value, self._jobs.value, self._batches.value, self._orders.value)

    def _ask(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Asks up to ``ASKED`` replicas for statistics. All replicas are asked in turn, so the next call asks the next
        ones."""
        there = [each for each in replicas if each.alive is not False and each.address]
        first, self._turn = self._turn % max(1, len(there)), self._turn + ASKED
        asked = (there[first:] + there[:first])[:ASKED]
        now_s = self._clock.monotonic()
        sizes = {each.name for each in asked if now_s - self._sized_at_s.get(each.name, float("-inf")) >= SIZES_S}
        self._sized_at_s |= dict.fromkeys(sizes, now_s)
        said = self._askers.map(lambda each: self._statistics(each, each.name in sizes), asked)
        for each, statistics in zip(asked, said, strict=True):
            if statistics is not None:
                self.rates.add(each.name, self._clock.monotonic(), statistics, sizes=each.name in sizes)

    def _statistics(self, replica: ReplicaStatus, sizes: bool) -> ReplicaStatistics | None:
        try:
            return self._cluster.replica_stats(
                replica.address,
                self.rates.after(replica.name),
                newest=REQUESTS,
                sizes=sizes,
                timeout_s=ANSWER_S,
            )
        except StateflowError as error:  # the replica is unreachable, which the controller reports
            log.debug("no statistics from replica %s: %s", replica.name, error)
            return None


class Watching:
    """A thread that looks at the cluster from ``start`` to ``close``, and hands each snapshot to all waiting viewers.

    ``changes`` must be used in the event loop that calls ``start``.
    """

    def __init__(self, make: Callable[[], Looking], address: str) -> None:
        self._make, self._address = make, address
        self._over, self._wanted = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._newest: tuple[int, str] = 0, ""
        self._news = asyncio.Event()
        self._viewers = 0
        self._lines: Callable[[], dict[str, list[Any]]] = lambda: lines(())

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="dashboard", daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._wanted.set()
        self._news.set()

    def look_now(self) -> None:
        """Makes the thread look at once, so that a viewer who changed something sees the change without delay."""
        self._wanted.set()

    async def changes(self) -> AsyncIterator[tuple[str, str]]:
        """Yields (name of an event, JSON): first the time lines so far, then each snapshot. Ends on ``close``."""
        self._viewers += 1
        self.look_now()
        try:
            yield "lines", _json(self._lines())
            sent = 0
            while not self._over.is_set():
                number, text = self._newest
                news = self._news
                if number > sent:
                    sent = number
                    yield "snapshot", text
                else:
                    await news.wait()
        finally:
            self._viewers -= 1

    def _run(self) -> None:
        looking = self._make()
        self._lines = lambda: lines(list(looking.rates.points))
        try:
            while not self._over.is_set():
                self._wanted.clear()
                self._publish(self._text(looking))
                self._wanted.wait(LOOK_S if self._viewers else IDLE_S)
        finally:
            looking.close()

    def _text(self, looking: Looking) -> str:
        said = {"at_us": SYSTEM_CLOCK.now_us(), "controller": self._address}
        try:
            return _json({**said, "error": None, **looking.look()})
        except StateflowError as error:
            return _json({**said, "error": error_view(error)})
        except Exception as error:
            log.exception("dashboard: the state of the cluster could not be read")
            return _json({**said, "error": error_view(unexpected(error))})

    def _publish(self, text: str) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: there are no viewers
            self._loop.call_soon_threadsafe(self._tell, text)

    def _tell(self, text: str) -> None:
        self._newest = self._newest[0] + 1, text
        news, self._news = self._news, asyncio.Event()
        news.set()


def _rounded(value: Any) -> Any:
    """Returns a value with its floats rounded to three decimal places, and infinite floats and NaN replaced by None.

    Rounding matters because each snapshot has thousands of numbers. JSON cannot express infinity, which stands for a
    pause without a known end.
    """
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"), default=str, allow_nan=False)
