"""M4: Nexmark Q3, Q4, Q5 and Q8 on two replicas, without moves and with moves of half of each operator's partitions.

Each step of a query is an operator. This driver chains the steps: it sends the outputs of the first step to the second,
and then the watermark. The outputs of every run are compared with an independent computation over the whole stream.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from benchmarks import nexmark_reference as reference
from benchmarks.load import summary
from benchmarks.nexmark_events import Auction, Bid, Event, Person, events
from benchmarks.nexmark_queries import OPERATORS, Q5_EVERY, Q5_SIZE, Q8_SIZE
from benchmarks.record import Correctness, Record, Target, ratio, spread
from stateflow.client import StreamClient
from stateflow.operator.timers import to_datetime, to_us
from stateflow.testing import LocalCluster

QUERIES = ("Q3", "Q4", "Q5", "Q8")
PARTITIONS = 8
BATCH_EVENTS = 1_000
AT_END_US = 10**9  # how far the last watermark is past the last event
Rows = list[dict[str, Any]]

#: (operator, state or tag) of each query that has no entries after the last watermark
EMPTY_AT_END = {
    "Q4": (("Q4Winners", "open_auction"), ("Q4Winners", "best")),
    "Q5": (("Q5Counts", "bids"), ("Q5Hottest", "most"), ("Q5Hottest", "hottest")),
    "Q8": (("Q8", "name"), ("Q8", "opened")),
}

SCHEMAS = {
    "Q3": "person long, name string, city string, state string, auction long, category long",
    "Q4Winners": "auction long, at timestamp, category long, reserve long, expires timestamp, price long",
    "Q4Average": "auction long, category long, price long",
    "Q5Counts": "auction long, at timestamp",
    "Q5Hottest": "auction long, window timestamp, bids long",
    "Q8": "person long, at timestamp, name string",
}


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    queries = [query for query in QUERIES if not only or query in only]
    if unknown := sorted(set(only or ()) - set(QUERIES)):
        raise SystemExit(f"invalid_argument: no query {unknown[0]!r}: choose {', '.join(QUERIES)}")
    count, runs = (20_000, 1) if quick else (1_000_000, 5)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {query: {} for query in queries}
    parts: list[Correctness] = []
    for number in range(runs):
        stream = list(events(count, seed + number))
        for way in ("still", "moving"):
            with LocalCluster(
                *OPERATORS, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS, deploy_to=("cloud",)
            ) as local:
                for query in queries:
                    found, correct = Pipeline(local, query).run(stream, move=way == "moving")
                    results[query].setdefault(way, []).append(found)
                    parts.append(correct)
                    _say(f"  {query} {way}: {found['events_per_s']:,.0f} events/s, {correct.to_json()}")
    whole = Correctness.of_all(parts)
    moved = [move for query in results.values() for found in query["moving"] for move in found["moves"]]
    figures = {
        "events_per_s": _by_way(results, lambda found: found["events_per_s"]),
        "batch_p99_ms": _by_way(results, lambda found: found["batch_ms"]["p99"]),
        "pause_ms": spread([move["pause_ms"] for move in moved if move["state"] == "COMPLETED"]),
        "moving_over_still": {
            query: ratio(
                spread([f["events_per_s"] for f in each["moving"]])["median"],
                spread([f["events_per_s"] for f in each["still"]])["median"],
            )
            for query, each in results.items()
        },
        "runs": results,
    }
    wrong = None if whole.lost is None or whole.duplicated is None else float(whole.lost + whole.duplicated)
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[
            Target("output rows lost or duplicated, with and without moves", wrong, 0, "at_most"),
            Target("moves that did not complete", float(sum(m["state"] != "COMPLETED" for m in moved)), 0, "at_most"),
        ],
        correctness=whole,
        settings={
            "quick": quick,
            "events": count,
            "events_per_batch": BATCH_EVENTS,
            "partitions": PARTITIONS,
            "runs": runs,
            "q5_window": f"{Q5_SIZE} every {Q5_EVERY}",
            "q8_window": str(Q8_SIZE),
            "proportions": "1 person : 3 auctions : 46 bids; hot auctions, bidders and sellers as in Beam's generator",
        },
        seed=seed,
    )


def _by_way(
    results: Mapping[str, Mapping[str, list[dict[str, Any]]]], figure: Callable[[Any], float]
) -> dict[str, Any]:
    return {q: {way: spread([figure(f) for f in each]) for way, each in ways.items()} for q, ways in results.items()}


class Pipeline:
    """One query on a cluster: its operators (two for Q4 and Q5, one for other queries) and all their outputs."""

    STEPS = {"Q3": ("Q3",), "Q4": ("Q4Winners", "Q4Average"), "Q5": ("Q5Counts", "Q5Hottest"), "Q8": ("Q8",)}  # noqa: RUF012

    def __init__(self, local: LocalCluster, query: str) -> None:
        self._local = local
        self.query = query
        self.steps = self.STEPS[query]
        self._streams = [local.cluster.stream(step, "nexmark", schema=SCHEMAS[step]) for step in self.steps]
        self._given: list[Rows] = [[] for _ in self.steps]
        self._late = 0

    def run(self, stream: Sequence[Event], *, move: bool) -> tuple[dict[str, Any], Correctness]:
        batches = [stream[start : start + BATCH_EVENTS] for start in range(0, len(stream), BATCH_EVENTS)]
        inputs = [(rows_of(self.query, batch), batch[-1].at_us) for batch in batches]
        migrations = []
        took_ms = []
        began = time.perf_counter()
        for number, (rows, watermark_us) in enumerate(inputs):
            if move and number == len(inputs) // 2:
                half = list(range(0, PARTITIONS, 2))
                migrations = [self._local.migrate(step, half, "edge") for step in self.steps]
            sent = time.perf_counter()
            self._step(rows, watermark_us)
            took_ms.append((time.perf_counter() - sent) * 1e3)
        self._step([], stream[-1].at_us + AT_END_US)
        seconds = time.perf_counter() - began
        moves = [
            {"state": m.state, "pause_ms": m.pause_ms, "bytes_warm": m.bytes_warm, "bytes_delta": m.bytes_delta}
            for migration in migrations
            for m in migration.wait().moves
        ]
        found = {"events_per_s": len(stream) / seconds, "batch_ms": summary(took_ms), "moves": moves}
        return found, self._correctness(stream)

    def _step(self, rows: Rows, watermark_us: int) -> None:
        """Sends a batch, and then the watermark, through all steps of the query."""
        for number, stream in enumerate(self._streams):
            rows = self._send(stream, rows) + self._advance(stream, watermark_us)
            self._given[number] += rows

    def _send(self, stream: StreamClient, rows: Rows) -> Rows:
        outputs = stream.send(rows) if rows else []
        self._late += len(stream.side_outputs.get("late", ())) if rows else 0
        return outputs

    def _advance(self, stream: StreamClient, watermark_us: int) -> Rows:
        return stream.advance_watermark(watermark_us) if self.query != "Q3" else []

    def _correctness(self, stream: Sequence[Event]) -> Correctness:
        final = self._given[0] if self.query == "Q4" else self._given[-1]
        here, wanted = Counter(tuple(map(_plain, row.values())) for row in final), _expected(self.query, stream)
        if self.query == "Q4":  # the second step's outputs depend on the order of the first step's
            here += Counter(tuple(row.values()) for row in self._given[1])
            wanted += reference.q4_emitted([(row["category"], row["price"]) for row in final])
        lost, more = sum((wanted - here).values()), sum((here - wanted).values())
        return Correctness(lost, more, self._late, self._state_equal(stream))

    def _state_equal(self, stream: Sequence[Event]) -> bool:
        """Tells whether the final state is right.

        Q3 must have the right persons and waiting auctions, and Q4 the right averages. The states of ended auctions in
        Q4 and of ended windows in Q5 and Q8 must be empty.
        """
        read = self._local.cluster.read_state
        if self.query == "Q3":
            local = {e.id: [e.name, e.city, e.state] for e in stream if isinstance(e, Person)}
            local = {id_: who for id_, who in local.items() if who[2] in ("OR", "ID", "CA")}
            waiting = Counter((row["key"], row["value"]) for row in read("Q3", "waiting").to_pylist())
            known = {row["key"]: list(row["value"].values()) for row in read("Q3", "who").to_pylist()}
            return known == local and waiting == reference.q3_waiting(stream)
        if self.query == "Q4":
            found = {row["key"]: tuple(row["value"].values()) for row in read("Q4Average", "closed").to_pylist()}
            if found != reference.q4_averages(stream):
                return False
        return all(read(operator, state).num_rows == 0 for operator, state in EMPTY_AT_END[self.query])


def rows_of(query: str, batch: Sequence[Event]) -> Rows:
    """Returns rows for the events of a batch that a query needs, with the columns that it needs."""
    match query:
        case "Q3":
            return [
                {"person": e.id, "name": e.name, "city": e.city, "state": e.state}
                if isinstance(e, Person)
                else {"person": e.seller, "auction": e.id, "category": e.category}
                for e in batch
                if isinstance(e, Person | Auction)
            ]
        case "Q4":
            return [
                {"auction": e.auction, "at": to_datetime(e.at_us), "price": e.price}
                if isinstance(e, Bid)
                else {
                    "auction": e.id,
                    "at": to_datetime(e.at_us),
                    "category": e.category,
                    "reserve": e.reserve,
                    "expires": to_datetime(e.expires_us),
                }
                for e in batch
                if isinstance(e, Bid | Auction)
            ]
        case "Q5":
            return [{"auction": e.auction, "at": to_datetime(e.at_us)} for e in batch if isinstance(e, Bid)]
        case _:
            return [
                {"person": e.id, "at": to_datetime(e.at_us), "name": e.name}
                if isinstance(e, Person)
                else {"person": e.seller, "at": to_datetime(e.at_us)}
                for e in batch
                if isinstance(e, Person | Auction)
            ]


def _expected(query: str, stream: Sequence[Event]) -> Counter[Any]:
    def us(span: Any) -> int:
        return round(span.total_seconds() * 1e6)

    match query:
        case "Q3":
            return reference.q3(stream)
        case "Q4":
            return reference.q4(stream)
        case "Q5":
            return reference.q5(stream, us(Q5_SIZE), us(Q5_EVERY))
        case _:
            return reference.q8(stream, us(Q8_SIZE))


def _plain(value: Any) -> Any:
    return to_us(value) if isinstance(value, datetime) else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
