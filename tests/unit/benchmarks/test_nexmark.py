"""The Nexmark stream has the public proportions and depends on the seed alone; operators agree with the reference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import nexmark_reference as reference
from benchmarks.nexmark import Pipeline, rows_of
from benchmarks.nexmark_events import BEGIN_US, FIRST_ID, Auction, Bid, Event, Person, events
from benchmarks.nexmark_queries import OPERATORS
from stateflow.operator.timers import to_us
from stateflow.testing import OperatorHarness

COUNT = 6_000
BY_NAME = {operator.__name__: operator for operator in OPERATORS}


def test_of_each_50_events_1_is_a_person_3_are_auctions_46_are_bids() -> None:
    stream = list(events(COUNT, 1))
    for start in range(0, COUNT, 50):
        kinds = Counter(type(event) for event in stream[start : start + 50])
        assert kinds == {Person: 1, Auction: 3, Bid: 46}


def test_the_stream_depends_on_the_seed_alone_and_a_longer_one_begins_the_same() -> None:
    random.seed(99)
    assert list(events(COUNT, 7)) == list(events(COUNT, 7))
    assert list(events(COUNT, 7)) == list(events(2 * COUNT, 7))[:COUNT]
    assert list(events(COUNT, 7)) != list(events(COUNT, 8))


def test_hot_items_and_references() -> None:
    stream = list(events(50_000, 3))
    assert [event.at_us for event in stream[:3]] == [BEGIN_US, BEGIN_US + 100, BEGIN_US + 200]
    persons, auctions = set(), set()
    bids: Counter[int] = Counter()
    bidders: Counter[int] = Counter()
    sellers: Counter[int] = Counter()
    # no person sells or bids before being introduced, and no auction is bid for before it is offered
    for event in stream:
        if isinstance(event, Person):
            persons.add(event.id)
        elif isinstance(event, Auction):
            assert event.seller in persons
            assert event.expires_us > event.at_us
            auctions.add(event.id)
            sellers[(event.seller - FIRST_ID) % 100] += 1
        else:
            assert event.auction in auctions
            assert event.bidder in persons
            bids[(event.auction - FIRST_ID) % 100] += 1
            bidders[(event.bidder - FIRST_ID) % 100] += 1
    assert bids[0] / bids.total() == pytest.approx(0.5, abs=0.03)
    assert bidders[1] / bidders.total() == pytest.approx(0.75, abs=0.03)
    assert sellers[0] / sellers.total() == pytest.approx(0.75, abs=0.03)


class Harnesses:
    """A cluster's stream and state, from a harness in this process."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.by_name = {step: OperatorHarness(BY_NAME[step], partitions=4) for step in steps}
        self.cluster = self

    def stream(self, step: str, source: str, schema: str) -> Any:
        return Filled(self.by_name[step], [column.split()[0] for column in schema.split(",")])


class Filled:
    def __init__(self, harness: OperatorHarness, columns: list[str]) -> None:
        self._harness = harness
        self._columns = columns
        self.advance_watermark = harness.advance_watermark

    @property
    def side_outputs(self) -> Any:
        return self._harness.side_outputs

    def send(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._harness.send([{name: row.get(name) for name in self._columns} for row in rows])


@pytest.mark.parametrize("query", ["Q3", "Q4", "Q5", "Q8"])
def test_each_query_agrees_with_the_reference(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "_state_equal", lambda *_: True)  # only a real cluster's state can be read
    pipeline = Pipeline(Harnesses(Pipeline.STEPS[query]), query)  # type: ignore[arg-type]
    stream = list(events(COUNT, 5))
    found, correct = pipeline.run(stream, move=False)
    assert correct.sound
    assert found["moves"] == []
    planted = pipeline._given[-1]
    assert planted, "the query gives something"
    planted += planted[:2]
    del planted[2]
    wrong = pipeline._correctness(stream)
    assert wrong.duplicated == 2
    assert wrong.lost == 1
    if query == "Q4":
        del pipeline._given[0][0]
        more = pipeline._correctness(stream)
        assert (more.lost or 0) > 1, "the winners are compared, too"


class Stored:
    """A cluster's state: (operator, state) → its entries. There are none for others."""

    def __init__(self, entries: dict[tuple[str, str], dict[Any, Any]]) -> None:
        self._entries = entries
        self.cluster = self

    def stream(self, *_: Any, **__: Any) -> None: ...

    def read_state(self, operator: str, state: str) -> Any:
        rows = [{"key": key, "value": value} for key, value in self._entries.get((operator, state), {}).items()]
        return SimpleNamespace(num_rows=len(rows), to_pylist=lambda: rows)


def final(stream: Sequence[Event]) -> dict[tuple[str, str], dict[Any, Any]]:
    persons = [event for event in stream if isinstance(event, Person) and event.state in ("OR", "ID", "CA")]
    averages = reference.q4_averages(stream)
    return {
        ("Q3", "who"): {e.id: {"_0": e.name, "_1": e.city, "_2": e.state} for e in persons},
        ("Q4Average", "closed"): {key: {"_0": n, "_1": total} for key, (n, total) in averages.items()},
    }


@pytest.mark.parametrize(
    ("query", "operator", "state"),
    [
        ("Q3", "Q3", "who"),
        ("Q3", "Q3", "waiting"),
        ("Q4", "Q4Winners", "open_auction"),
        ("Q4", "Q4Winners", "best"),
        ("Q4", "Q4Average", "closed"),
        ("Q5", "Q5Counts", "bids"),
        ("Q5", "Q5Hottest", "most"),
        ("Q5", "Q5Hottest", "hottest"),
        ("Q8", "Q8", "name"),
        ("Q8", "Q8", "opened"),
    ],
)
def test_every_state_of_a_query_is_compared(query: str, operator: str, state: str) -> None:
    stream = [
        Person(BEGIN_US, 1, "Kate Noris", "Bend", "OR"),
        Auction(BEGIN_US + 1, 10, 1, 10, 500, BEGIN_US + 100),
        Bid(BEGIN_US + 4, 10, 2, 700),
    ]
    entries = final(stream)
    assert Pipeline(Stored(entries), query)._state_equal(stream)  # type: ignore[arg-type]
    entries.setdefault((operator, state), {})[99] = {"_0": 1}
    if state == "waiting":
        entries[operator, state] = {1: 10}
    assert not Pipeline(Stored(entries), query)._state_equal(stream)  # type: ignore[arg-type]


def test_the_reference_by_hand() -> None:
    us = BEGIN_US
    stream: list[Event] = [
        Person(us, 1, "Kate Noris", "Bend", "OR"),
        Person(us, 2, "Paul Smith", "Kent", "WA"),
        Auction(us + 1, 10, 1, 10, 500, us + 100),
        Auction(us + 2, 11, 2, 10, 500, us + 100),
        Auction(us + 3, 12, 1, 11, 500, us + 100),
        Bid(us + 4, 10, 2, 499),  # below the reserve
        Bid(us + 5, 11, 2, 700),
        Bid(us + 6, 11, 2, 600),
        Bid(us + 100, 11, 2, 900),  # too late
    ]
    assert reference.q3(stream) == {(1, "Kate Noris", "Bend", "OR", 10): 1}
    assert reference.q3_waiting(stream) == {(2, 11): 1}
    assert reference.q4(stream) == {(11, 10, 700): 1}
    emitted = reference.q4_emitted([(10, 700), (11, 5), (10, 800), (10, 800)])
    assert emitted == {(10, 1, 700.0): 1, (11, 1, 5.0): 1, (10, 2, 750.0): 1, (10, 3, 2300 / 3): 1}
    assert reference.q4_averages(stream) == {10: (1, 700)}
    assert reference.q5(stream, 50, 50) == {(us + 50, 11, 2): 1, (us + 150, 11, 1): 1}
    assert reference.q8(stream, 1000) == {(1, "Kate Noris", us, 2): 1, (2, "Paul Smith", us, 1): 1}


def test_rows_have_the_columns_of_their_query_alone() -> None:
    stream = list(events(50, 1))
    assert {key for row in rows_of("Q5", stream) for key in row} == {"auction", "at"}
    assert len(rows_of("Q5", stream)) == 46
    assert len(rows_of("Q3", stream)) == 4
    assert to_us(rows_of("Q8", stream)[0]["at"]) == BEGIN_US
