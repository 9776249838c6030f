"""Asks a cluster how it is, once for all who look, and hands what it says to each of them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stateflow.client import Cluster, ClusterStatus, ReplicaStatistics, ReplicaStatus
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.dashboard.rates import Rates
from stateflow.dashboard.records import Records
from stateflow.dashboard.view import Seen, error_view, lines, snapshot
from stateflow.errors import NotAllowed, StateflowError
from stateflow.rpc.wire import unexpected

log = logging.getLogger(__name__)
#: between two looks while somebody looks on, and while nobody does
LOOK_S, IDLE_S = 1.0, 5.0
#: two looks that are closer say nothing of rates
APART_S = 0.5
#: what changes seldom is asked for each so many seconds
HISTORY_S, JOBS_S, BATCHES_S, MEASURED_S, SIZES_S = 10.0, 3.0, 3.0, 15.0, 15.0
#: replicas that are asked in one look, at a time, and the requests that each tells of
ASKED, AT_ONCE, REQUESTS = 40, 8, 500
#: one that is slower than this is asked again later
ANSWER_S = 2.0
HISTORY_MAX = 60


class Seldom:
    """What is asked for now and then, and kept meanwhile. ``value``: as it was last; ``refused``: why there is
    none that is newer."""

    def __init__(self, every_s: float, value: Any) -> None:
        self._every_s, self._at_s, self.value, self.refused = every_s, float("-inf"), value, ""

    def due(self, now_s: float, *, sooner: bool = False) -> bool:
        return sooner or now_s - self._at_s >= self._every_s

    def told(self, now_s: float, value: Any) -> None:
        self._at_s, self.value, self.refused = now_s, value, ""

    def ask(self, now_s: float, call: Callable[[], Any]) -> None:
        """What is refused is as it was, and asked for again when it is due."""
        self._at_s = now_s
        try:
            self.told(now_s, call())
        except NotAllowed:  # who only reads is not told
            pass
        except StateflowError as error:
            self.refused = str(error)


class Looking:
    """One look after another, each a snapshot. Used by one thread."""

    def __init__(self, cluster: Cluster, records: Records | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._cluster, self._records, self._clock = cluster, records, clock
        self.rates = Rates()
        self._history, self._jobs = Seldom(HISTORY_S, ()), Seldom(JOBS_S, ())
        self._batches, self._orders = Seldom(BATCHES_S, None), Seldom(HISTORY_S, None)
        self._measured = Seldom(MEASURED_S, {})
        self._sized_at_s: dict[str, float] = {}  # by replica
        self._under_way: frozenset[str] = frozenset()
        self._turn, self._asked_at_s = 0, float("-inf")
        self._askers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dashboard-asks")

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)

    def look(self) -> dict[str, Any]:
        """Raises what the cluster cannot be asked with."""
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
        # while it is refused, what has ended is still to be told
        self._under_way = self._under_way | under_way if self._history.refused else under_way
        if self._jobs.due(now_s):
            self._jobs.ask(now_s, self._cluster.jobs)
        if self._orders.due(now_s):
            self._orders.ask(now_s, self._cluster.autopilot_orders)
        if self._records is not None and self._batches.due(now_s):
            self._batches.ask(now_s, self._records.batches)
        return Seen(status, self._history.value, self._jobs.value, self._batches.value, self._orders.value)

    def _ask(self, replicas: Sequence[ReplicaStatus]) -> None:
        """So many of them, those that were not asked for longest first."""
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
        except StateflowError as error:  # it is away, or moving; the controller says so in its own time
            log.debug("%s did not say what it did: %s", replica.name, error)
            return None


class Watching:
    """A thread that looks on, from ``start`` to ``close``, and hands each snapshot to whoever waits for it.

    ``changes`` is used by the event loop that ``start`` is called from."""

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
        """Somebody changed something: they are not to wait for the next look."""
        self._wanted.set()

    async def changes(self) -> AsyncIterator[tuple[str, str]]:
        """(event, JSON): the time lines as they are, then each snapshot. Ends when this is closed."""
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
            log.exception("the cluster could not be looked at")
            return _json({**said, "error": error_view(unexpected(error))})

    def _publish(self, text: str) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # it is closed: nobody looks any more
            self._loop.call_soon_threadsafe(self._tell, text)

    def _tell(self, text: str) -> None:
        self._newest = self._newest[0] + 1, text
        news, self._news = self._news, asyncio.Event()
        news.set()


def _rounded(value: Any) -> Any:
    """Nobody sees the tenth digit, and each look has thousands of numbers. JSON has no word for what has no bound, such
    as a pause of which nobody knows the end."""
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"), default=str, allow_nan=False)
