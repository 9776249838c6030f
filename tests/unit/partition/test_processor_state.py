"""Operators' view of ttl, tags and namespaces, through the harness on both backends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from stateflow import BatchOperator, Context, Namespace, Operator, state
from stateflow.changes import Mutations
from stateflow.client.delivery import is_hopeless
from stateflow.errors import (
    DeclarationError,
    DecodeError,
    EncodeError,
    InvalidArgument,
    OperatorFailed,
    StateflowError,
    from_wire,
)
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId

T0 = datetime(2013, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["memory", "rocksdb"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Expiring(Operator):
    key = "k"
    output = "k string, n long, pages array<string>, seen array<string>"

    n = state.counter(ttl=60)
    pages = state.map(str, int, ttl=60, ttl_refresh="read_write")
    seen = state.set(str, ttl=timedelta(hours=1), ttl_domain="event")
    kept = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.kept.value += 1
        self.pages[row.page] = self.pages.get(row.page, 0) + 1
        self.seen.add(row.page)
        yield row.k, self.n.value, list(self.pages), list(self.seen)


def stored(harness: OperatorHarness) -> int:
    return sum(1 for store in harness._stores for _ in store.scan(b"c"))


def test_what_expires_is_gone_at_once_and_from_disk_later(backend: str) -> None:
    with OperatorHarness(Expiring, partitions=2, backend=backend) as h:
        h.advance_watermark(T0)
        for number in range(20):
            h.send([{"k": f"k{number}", "page": "p"}])
        assert stored(h) == 20 * 4
        h.advance_processing_time(59)
        assert h.send([{"k": "k0", "page": "p"}])[0]["n"] == 2
        h.advance_processing_time(1)
        (row,) = h.send([{"k": "k1", "page": "q"}])
        assert (row["n"], row["pages"], row["seen"]) == (1, ["q"], ["p", "q"])
        h.advance_watermark(T0 + timedelta(hours=2))
        for _ in range(20):
            h.advance_processing_time(0)
        # k0 and k1 have been written since; a set's member in event time expires with the watermark
        assert stored(h) == 20 + 2 * 2
        assert h.state("k5").n.value == 0
        assert h.state("k5").kept.value == 1


TOTAL = state.counter(name="total")
LAST = state.value(str, name="last")


class Tagged(Operator):
    key = "k"
    output = "k string, total long, day long"

    total = state.map(str, int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        total = ctx.state(TOTAL)
        total.value += 1
        day = ctx.state(TOTAL, Namespace.named(row.day))
        day.value += 1
        ctx.state(LAST).value = row.day
        self.total[row.day] = -1
        if row.day == "forget":
            ctx.clear_state(Namespace.named("mon"))
        if row.day == "fail":
            raise ValueError("no")
        yield row.k, total.value, day.value


def test_tags_and_namespaces(backend: str) -> None:
    with OperatorHarness(Tagged, backend=backend) as h:
        rows = [{"k": "a", "day": day} for day in ("mon", "mon", "tue")]
        assert [(r["total"], r["day"]) for r in h.send(rows)] == [(1, 1), (2, 2), (3, 1)]
        with pytest.raises(Exception, match="ValueError: no"):
            h.send([{"k": "a", "day": "fail"}])
        h.send([{"k": "a", "day": "forget"}])
        assert [(r["total"], r["day"]) for r in h.send([{"k": "a", "day": "mon"}])] == [(5, 1)]
        # keys 1 and "1" share nothing, nor do a map and a counter of one name
        assert h.send([{"k": "b", "day": "mon"}])[0]["total"] == 1
        again = OperatorHarness.restore(Tagged, h.checkpoint())
        assert again.send([{"k": "a", "day": "tue"}])[0] == {"k": "a", "total": 6, "day": 2}
        again.close()


class Misuser(Operator):
    key = "k"
    output = "k string"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None:
        match row.what:
            case "no name":
                ctx.state(state.counter())
            case "value":
                self.n.value = "text"  # type: ignore[assignment]
            case "big":
                ctx.state(LAST).value = "x" * 1000

    def on_watermark(self, watermark: Any, ctx: Context) -> None:
        ctx.state(TOTAL)


def test_misuse_is_refused_and_says_where() -> None:
    with OperatorHarness(Misuser, partitions=1) as h:
        for what, error, text in [
            ("no name", DeclarationError, "operator=Misuser partition=0 key='a'"),
            ("value", EncodeError, "operator=Misuser state=n key=a"),
        ]:
            with pytest.raises(error, match=text):
                h.send([{"k": "a", "what": what}])
        with pytest.raises(InvalidArgument, match="no current key"):
            h.advance_watermark(T0)
        assert stored(h) == 0


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("n", "self.n.value = …"),
        ("m", "self.m[key] = …"),
        ("s", "self.s.add(…)"),
        ("items", "self.items.append(…)"),
        ("c", "self.c.value += …"),
        ("r", "self.r.add(…)"),
    ],
)
def test_what_is_assigned_in_the_place_of_a_state_is_refused(name: str, how: str) -> None:
    """An assignment in place of a state is refused.

    It used to hide the state of one key, was stored nowhere, and was gone with the next key's row.
    """

    class Assigns(Operator):
        key, output = "k", "k string"
        n, m, s, items = state.value(int), state.map(str, int), state.set(int), state.list(int)
        c, r = state.counter(), state.reducing(int, max)

        def open(self, ctx: Context) -> None:
            self.seen_here = 0

        def process(self, row: Any, ctx: Context) -> None:
            self.seen_here += 1
            setattr(self, name, 5)

    with pytest.raises(OperatorFailed, match=re.escape(f"self.{name} is a state and cannot be assigned: use {how}")):
        OperatorHarness(Assigns).send([{"k": "a"}])


def test_operators_that_end_in_an_assignment_change_a_state_in_place() -> None:
    class Gathers(Operator):
        key, output = "k", "k string, n long"
        s, items, m = state.set(int), state.list(int), state.map(str, int)

        def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
            self.s |= {1, 2}
            self.items += [row.v]
            self.m |= {"a": 1}
            yield row.k, len(self.s) + len(self.items) + len(self.m)

    harness = OperatorHarness(Gathers)
    assert [out["n"] for out in harness.send([{"k": "a", "v": 1}, {"k": "a", "v": 2}])] == [4, 5]
    assert harness.state("a").items == [1, 2]


def test_an_operator_may_be_a_dataclass_and_is_told_of_where_it_cannot_be_made() -> None:
    @dataclass
    class Counts(Operator):
        key, output = "k", "k string, n long"
        n: Any = state.value(int, default=0)  # noqa: RUF009 - as a user would write it
        step: int = 2

        def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
            self.n.value += self.step
            yield row.k, self.n.value

    assert OperatorHarness(Counts).send([{"k": "a"}, {"k": "a"}])[-1] == {"k": "a", "n": 4}

    class Wants(Counts):
        def __init__(self, more: int) -> None: ...

    with pytest.raises(OperatorFailed, match=r"__init__\(\) raised TypeError: .*'more'"):
        OperatorHarness(Wants)


def test_an_operator_whose_process_is_misspelled_is_told_of_before_the_first_row() -> None:
    class Misspelled(Operator):
        key, output = "k", "k string"

        def proces(self, row: Any, ctx: Context) -> None: ...

    with pytest.raises(DeclarationError, match=r"the operator has no process\(row, ctx\)"):
        OperatorHarness(Misspelled)


def test_a_value_that_is_too_large_is_refused() -> None:
    processor = PartitionProcessor(Misuser, PartitionId("Misuser", 0), MemoryStore(), 1, max_value_bytes=100)
    rows = pa.RecordBatch.from_pylist([{"k": "a", "what": "big"}])
    with pytest.raises(EncodeError, match=r"takes 1000 bytes, at most 100 .*state=last key=a"):
        processor.apply(Batch("s", 0), rows.schema.serialize().to_pybytes(), rows.serialize().to_pybytes(), 0)
    assert processor.reached("s") is None


class Counter(Operator):
    key = "k"
    output = "n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[int]]:
        self.n.value += 1
        yield (self.n.value,)


class Unmigrated(Counter):
    state_version = 2

    def migrate_state(self, version: int, old: Any) -> None:
        raise ValueError("no such field")


class Unstored(Unmigrated):
    n = state.value(str)

    def migrate_state(self, version: int, old: Any) -> None:
        self.n.value = old.n


class Unopened(Counter):
    def open(self, ctx: Context) -> None:
        raise ConnectionError("the table of prices is away")


class Unmade(Counter):
    def __init__(self) -> None:
        raise ConnectionError("the table of prices is away")


class Refused(Counter):
    def open(self, ctx: Context) -> None:
        raise InvalidArgument("the table of prices is away")


class Unread(Counter):
    pass


@pytest.mark.parametrize("operator", [Unmigrated, Unstored, Unopened, Unmade, Refused, Unread])
def test_what_fails_whatever_the_rows_are_counts_against_no_row(operator: type[Operator]) -> None:
    """A client sees the error and decides, but an outbox would put aside one batch after another."""
    rows = pa.RecordBatch.from_pylist([{"k": "a"}])
    encoded = rows.schema.serialize().to_pybytes(), rows.serialize().to_pybytes()
    store, partition = MemoryStore(), PartitionId("Counter", 0)
    PartitionProcessor(Counter, partition, store, 1).apply(Batch("s", 0), *encoded, 0)
    if operator is Unread:
        (cell,) = [key for key, _ in store.scan(b"c")]
        store.apply(Mutations(puts=[(cell, b"damaged")]))
    with pytest.raises(StateflowError) as caught:
        PartitionProcessor(operator, partition, store, 1).apply(Batch("s", 1), *encoded, 0)
    error = from_wire(caught.value.to_wire())
    assert isinstance(error, DecodeError) or "cause" in error.where
    assert not is_hopeless(error, faults=0)
    assert is_hopeless(error)


class Columns(BatchOperator):
    key = "k"
    output = "k string"
    n = state.value(int)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        ctx.key = "a"
        ctx.state(TOTAL)


def test_a_batch_operator_has_no_tags() -> None:
    with OperatorHarness(Columns) as h, pytest.raises(InvalidArgument, match="batch operator has no keyed state"):
        h.send([{"k": "a"}])
