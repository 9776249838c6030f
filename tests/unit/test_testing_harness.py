"""The harness: an operator does on a replica what it does here, on either backend."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow import Context, Operator, state
from stateflow.changes import Mutations
from stateflow.errors import (
    DeclarationError,
    InvalidArgument,
    KeyColumnMissing,
    NullKey,
    OperatorFailed,
    OutputMismatch,
)
from stateflow.partitioner import partition_of
from stateflow.testing import OperatorHarness
from tests.sizes import sized

BACKENDS = ("memory", "rocksdb")


class Basket(Operator):
    """An operator with a value, a map, a set and a mutable value, so that every kind of state takes part."""

    key = "who"
    output = "who string, n long, spent double, kinds array<string>"

    n = state.value(int, default=0)
    spent = state.map(str, float)
    kinds = state.set(str)
    history = state.value(list)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        assert ctx.key == row.who
        self.n.value += 1
        self.spent[row.what] = self.spent.get(row.what, 0.0) + row.price
        self.kinds.add(row.what)
        self.history.value = [*(self.history.value or []), row.what]
        self.history.value.append(row.price)  # changed in place
        if row.price < 0:
            raise ValueError("a negative price")
        if row.what == "odd":
            yield row.who, self.n.value
        yield row.who, self.n.value, sum(self.spent.values()), sorted(self.kinds)


class ByRoute(Operator):
    key = ("origin", "dest")
    output = "origin string, dest long, n long"

    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> list[dict[str, Any]]:
        self.n.value += 1
        return [{"n": self.n.value, "origin": ctx.key[0], "dest": ctx.key[1]}]


class Quiet(Operator):
    key = "k"
    output = "k string"

    last = state.value(int)

    def process(self, row: Any, ctx: Context) -> None:
        self.last.value = row.v


def bought(who: str, what: str, price: float) -> dict[str, Any]:
    return {"who": who, "what": what, "price": price}


FIRST = [bought("Ann", "tea", 2.5), bought("Bob", "milk", 1.0), bought("Ann", "milk", 1.5), bought("Ann", "tea", 2.0)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def basket(backend: str) -> Iterator[OperatorHarness]:
    with OperatorHarness(Basket(), partitions=4, backend=backend) as harness:
        yield harness


def contents(harness: OperatorHarness, who: str) -> tuple[Any, ...]:
    seen = harness.state(who)
    return seen.n.value, dict(seen.spent), set(seen.kinds), seen.history.value


def test_outputs_and_state(basket: OperatorHarness) -> None:
    outputs = basket.send(FIRST)
    assert [row for row in outputs if row["who"] == "Ann"] == [
        {"who": "Ann", "n": 1, "spent": 2.5, "kinds": ["tea"]},
        {"who": "Ann", "n": 2, "spent": 4.0, "kinds": ["milk", "tea"]},
        {"who": "Ann", "n": 3, "spent": 6.0, "kinds": ["milk", "tea"]},
    ]
    assert len(outputs) == 4
    history = ["tea", 2.5, "milk", 1.5, "tea", 2.0]
    assert contents(basket, "Ann") == (3, {"tea": 4.5, "milk": 1.5}, {"milk", "tea"}, history)
    assert contents(basket, "Bob") == (1, {"milk": 1.0}, {"milk"}, ["milk", 1.0])
    assert contents(basket, "nobody") == (0, {}, set(), None)
    assert [row["n"] for row in basket.send([bought("Ann", "tea", 1.0)])] == [4]
    assert basket.send([]) == []


rows = st.builds(
    bought,
    st.sampled_from(["Ann", "Bob", "Zoë", "", "nul\0l", "😀"]),
    st.sampled_from(["tea", "milk", ""]),
    st.integers(0, 40).map(lambda quarters: quarters / 4),
)


@settings(max_examples=sized(60))
@given(st.lists(st.lists(rows, max_size=12), max_size=4), st.integers(1, 5))
def test_both_backends_say_the_same_and_what_dictionaries_say(
    batches: list[list[dict[str, Any]]], partitions: int
) -> None:
    counted: dict[str, int] = defaultdict(int)
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    with (
        OperatorHarness(Basket, partitions, "memory") as memory,
        OperatorHarness(Basket, partitions, "rocksdb") as rocksdb,
    ):
        for batch in batches:
            outputs = memory.send(batch)
            assert outputs == rocksdb.send(batch)
            wanted = defaultdict(list)
            for row in batch:
                who = row["who"]
                counted[who] += 1
                spent[who][row["what"]] = spent[who].get(row["what"], 0.0) + row["price"]
                total = sum(spent[who].values())
                wanted[who].append({"who": who, "n": counted[who], "spent": total, "kinds": sorted(spent[who])})
            came = defaultdict(list)
            for row in outputs:
                came[row["who"]].append(row)
            assert came == wanted
            for who in {row["who"] for row in batch}:
                assert memory.changes(who) == rocksdb.changes(who)
                assert memory.changes(who)
        for who, number in counted.items():
            assert contents(memory, who) == contents(rocksdb, who)
            assert contents(memory, who)[:3] == (number, spent[who], set(spent[who]))


def test_changes_are_those_of_the_last_send_only(basket: OperatorHarness) -> None:
    assert basket.changes("Ann") == Mutations()
    basket.send([bought("Ann", "tea", 2.5)])
    first = basket.changes("Ann")
    cells = [key for key, _ in first.puts if key[:1] != b"m"]
    assert len(cells) >= 4, "value, map entry, set member, list"
    assert not first.deletes
    basket.send([bought("Ann", "tea", 1.0)])
    second = basket.changes("Ann")
    again = [key for key, _ in second.puts if key[:1] != b"m"]
    assert set(again) < set(cells), "the set holds its member already, and no count changed"
    elsewhere = next(f"p{i}" for i in range(99) if partition_of(f"p{i}", 4) != partition_of("Ann", 4))
    basket.send([bought(elsewhere, "tea", 1.0)])
    assert basket.changes("Ann") == Mutations()
    assert basket.changes(elsewhere)


def test_a_checkpoint_is_a_moment_one_can_come_back_to(basket: OperatorHarness, tmp_path: Path) -> None:
    basket.send(FIRST)
    before = contents(basket, "Ann")
    snapshot = basket.checkpoint(tmp_path / "snapshot")
    later = basket.send([bought("Ann", "jam", 4.0), bought("Cid", "jam", 4.0)])
    with pytest.raises(InvalidArgument, match="is not an empty directory"):
        basket.checkpoint(snapshot)
    basket.close()
    for _ in range(2):  # a checkpoint can be restored more than once
        with OperatorHarness.restore(Basket, str(snapshot)) as restored:
            assert contents(restored, "Ann") == before
            assert contents(restored, "Cid") == (0, {}, set(), None)
            assert restored.send([bought("Ann", "jam", 4.0), bought("Cid", "jam", 4.0)]) == later


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (
            bought("Ann", "tea", -1.0),
            OperatorFailed,
            r"operator_failed: process\(\) raised ValueError: a negative price",
        ),
        (bought("Ann", "odd", 1.0), OutputMismatch, "output_mismatch: a row has 2 fields, 4 are declared"),
        (bought("Ann", "tea", None), OperatorFailed, "TypeError"),  # type: ignore[arg-type]
    ],
)
def test_an_error_takes_the_batch_of_its_partition_back(
    basket: OperatorHarness, bad: dict[str, Any], error: type[Exception], said: str
) -> None:
    basket.send(FIRST)
    before = contents(basket, "Ann")
    with pytest.raises(error, match=said) as caught:
        basket.send([bought("Ann", "new", 1.0), bad, bought("Ann", "new", 1.0)])
    if error is OperatorFailed:
        assert caught.value.where["key"] == "'Ann'"  # type: ignore[attr-defined]
        assert "test_testing_harness.py" in caught.value.where["traceback"]  # type: ignore[attr-defined]
    assert contents(basket, "Ann") == before
    assert basket.changes("Ann") == Mutations()
    [row] = basket.send([bought("Ann", "jam", 1.0)])
    assert (row["n"], row["kinds"]) == (4, ["jam", "milk", "tea"])


class Flaky(Operator):
    """Fails at most ``failures`` times, at the key "bad" and in its timers."""

    key = "k"
    output = "k string, n long"

    failures = 0
    n = state.counter()

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self._fail(row.k)
        self.n.value += 1
        ctx.set_timer(10**7)
        ctx.set_timer(10**7 if row.k == "bad" else 15 * 10**6, name="later", domain="processing")
        yield row.k, self.n.value

    def on_timer(self, timestamp: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self._fail(ctx.key)
        self.n.value += 100
        yield ctx.key, self.n.value

    def _fail(self, key: str) -> None:
        if key == "bad" and Flaky.failures:
            Flaky.failures -= 1
            raise ConnectionError("flaky")


KEYS = [*(f"k{number}" for number in range(20)), "bad"]
SENT = [{"k": key} for key in KEYS]


def test_rows_that_failed_are_applied_once_when_they_are_sent_again(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All partitions but the failing one apply the batch, and the same rows are the same batch, as with a client."""
    monkeypatch.setattr(Flaky, "failures", 2)
    with OperatorHarness(Flaky, backend=backend) as harness:
        for _ in range(2):
            with pytest.raises(OperatorFailed, match="flaky"):
                harness.send(SENT)
            applied = {key for key in KEYS if harness.state(key).n.value == 1}
            assert {each for each in KEYS if partition_of((each,), 8) != partition_of(("bad",), 8)} == applied
        assert {row["k"]: row["n"] for row in harness.send(SENT)} == dict.fromkeys(KEYS, 1)
        assert {row["k"]: row["n"] for row in harness.send(SENT)} == dict.fromkeys(KEYS, 2), "a batch of its own"


def test_rows_that_failed_are_skipped_when_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flaky, "failures", 1)
    with OperatorHarness(Flaky) as harness:
        with pytest.raises(OperatorFailed):
            harness.send(SENT)
        assert harness.send([{"k": "k0"}]) == [{"k": "k0", "n": 2}]
        assert harness.state("bad").n.value == 0


def test_a_watermark_that_failed_may_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with OperatorHarness(Flaky) as harness:
        harness.send(SENT)
        monkeypatch.setattr(Flaky, "failures", 1)
        with pytest.raises(OperatorFailed):
            harness.advance_watermark(10**7)
        rows = harness.advance_watermark(10**7)
        assert {row["k"]: row["n"] for row in rows} == dict.fromkeys(KEYS, 101)
        assert harness.advance_watermark(10**7) == []


def test_time_that_failed_to_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is not the first one again, because the clock shows a later time."""
    with OperatorHarness(Flaky) as harness:
        harness.send(SENT)
        monkeypatch.setattr(Flaky, "failures", 1)
        with pytest.raises(OperatorFailed):
            harness.advance_processing_time(10)
        harness.advance_processing_time(10)
        assert {harness.state(key).n.value for key in KEYS} == {101}


def test_a_null_key_and_a_missing_one(basket: OperatorHarness) -> None:
    basket.send(FIRST)
    before = contents(basket, "Ann")
    with pytest.raises(NullKey, match=r"^null_key: "):
        basket.send([bought("Ann", "tea", 1.0), {"who": None, "what": "tea", "price": 1.0}])
    with pytest.raises(KeyColumnMissing, match=r"^key_column_missing: row 1 has no 'who'"):
        basket.send([bought("Ann", "tea", 1.0), {"what": "tea", "price": 1.0}])
    assert contents(basket, "Ann") == before


def test_rows_with_other_columns_and_of_other_types() -> None:
    class Seen(Operator):
        key, output = "k", "k string, v long"

        def process(self, row: Any, ctx: Context) -> Iterator[Any]:
            yield row.k, row.v

    with OperatorHarness(Seen) as harness:
        out = harness.send([{"k": "a"}, {"k": "a", "v": 2}, {"v": 3, "k": "a"}])
        assert [row["v"] for row in out] == [None, 2, 3], "a column is there that not all rows have"
        for rows in ([{"k": "a", "v": 1}, {"k": "b", "v": "x"}], [{"k": "a", "v": object()}]):
            with pytest.raises(InvalidArgument, match="the rows do not fit one schema"):
                harness.send(rows)


def test_a_key_of_several_columns(backend: str) -> None:
    pairs = [("JFK", 1), ("JFK", 2), ("EWR", 1), ("JFK", 1), ("", 1)]
    with OperatorHarness(ByRoute, partitions=3, backend=backend) as harness:
        outputs = harness.send([{"origin": origin, "dest": dest, "more": "…"} for origin, dest in pairs])
        came = {(row["origin"], row["dest"]): row["n"] for row in outputs}
        assert came == {("JFK", 1): 2, ("JFK", 2): 1, ("EWR", 1): 1, ("", 1): 1}
        assert harness.state("JFK", 1).n.value == 2
        assert harness.state("JFK", 3).n.value == 0
        assert harness.changes("JFK", 1)
        with pytest.raises(KeyColumnMissing, match="'dest'"):
            harness.send([{"origin": "JFK"}])


def test_an_operator_without_output(backend: str) -> None:
    with OperatorHarness(Quiet, backend=backend) as harness:
        assert harness.send([{"k": "a", "v": 1}, {"k": "a", "v": 2}]) == []
        assert harness.state("a").last.value == 2


def test_what_is_stored_is_what_a_replica_would_read_back(backend: str) -> None:
    """State is read back as a replica would read it: an object put into state is not the object that comes out."""
    with OperatorHarness(Basket, backend=backend) as harness:
        harness.send([bought("Ann", "tea", 1.0)])
        harness.state("Ann").history.value.append("written by nobody")
        assert harness.state("Ann").history.value == ["tea", 1.0]
        harness.send([bought("Ann", "tea", 1.0)])
        assert harness.state("Ann").history.value == ["tea", 1.0, "tea", 1.0]


def test_arguments_that_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="there is no backend 'paper'"):
        OperatorHarness(Quiet, backend="paper")
    with pytest.raises(InvalidArgument, match="number of partitions: 0"):
        OperatorHarness(Quiet, partitions=0)


def test_a_key_of_more_or_fewer_columns_than_the_operators(basket: OperatorHarness) -> None:
    """Another key used to be looked up in another partition, where every state is at its default."""
    for key in ((), ("a", "b")):
        with pytest.raises(InvalidArgument, match=f"not {len(key)} values"):
            basket.state(*key)
        with pytest.raises(InvalidArgument, match=f"not {len(key)} values"):
            basket.changes(*key)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e20])
def test_a_time_that_no_clock_shows_changes_nothing(basket: OperatorHarness, seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="the clock cannot advance by"):
        basket.advance_processing_time(seconds)
    assert basket.advance_processing_time(1) == []


def test_what_is_no_operator() -> None:
    with pytest.raises(DeclarationError, match="is not an operator"):
        OperatorHarness(dict)  # type: ignore[arg-type]


def test_close_may_be_called_twice_and_closes_the_operators_once(backend: str) -> None:
    closed: list[int] = []

    class Closing(Quiet):
        def close(self, ctx: Context) -> None:
            closed.append(ctx.partition)

    with OperatorHarness(Closing, partitions=3, backend=backend) as harness:
        harness.close()
    assert closed == [0, 1, 2]


def test_close_removes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OperatorHarness(Quiet, backend=backend) as harness:
        harness.send([{"k": "a", "v": 1}])
    with pytest.raises(InvalidArgument):
        OperatorHarness(Quiet, backend="paper")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_harness_that_nobody_closes_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    harness = OperatorHarness(Basket(), backend="rocksdb")
    harness.send(FIRST)
    assert list(tmp_path.iterdir())
    del harness
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_temporary_checkpoint_ends_with_the_program(tmp_path: Path) -> None:
    program = (
        "from stateflow.testing import OperatorHarness\n"
        "from tests.unit.test_testing_harness import Basket, FIRST\n"
        "harness = OperatorHarness(Basket(), backend='rocksdb')\n"
        "harness.send(FIRST)\n"
        "print((harness.checkpoint() / 'harness').read_text())"
    )
    here = os.environ | {"TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], env=here, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("rocksdb ")
    assert not list(tmp_path.iterdir())


def test_own_figures_can_be_read() -> None:
    class Alarms(Operator):
        key = "k"
        output = "k string"

        def process(self, row: Any, ctx: Context) -> None:
            ctx.metrics.counter("alarms", labels=["site"]).labels(site=row.site).inc()
            ctx.metrics.gauge("level").set(row.v)
            ctx.metrics.histogram("v", buckets=[10]).observe(row.v)
            if row.v < 0:
                raise ValueError("negative")

    with OperatorHarness(Alarms) as h:
        h.send([{"k": str(n), "site": "ab"[n % 2], "v": n} for n in range(20)])
        with pytest.raises(OperatorFailed):
            h.send([{"k": "1", "site": "a", "v": -1}])
        assert h.metric("alarms", site="a") == h.metric("alarms", site="b") == 10
        assert h.metric("level") in range(20)
        observed = h.metric("v")
        assert not isinstance(observed, float)
        assert (observed.count, observed.counts, observed.total) == (20, [11, 9], 190.0)
        with pytest.raises(InvalidArgument, match=r"alarms.*site.*a.*level"):
            h.metric("alarm")


class Limited(Operator):
    """An operator with a constructor."""

    key = "who"
    output = "who string, limit long"

    def __init__(self) -> None:
        self.limit = 3
        self.lock = object()

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield row.who, self.limit


def test_an_instance_with_attributes_of_its_own_is_refused() -> None:
    """A replica makes its own instances, and so does the harness: the attributes would be ignored."""
    changed, extended = Limited(), Basket()
    changed.limit = 5
    extended.currency = "EUR"  # type: ignore[attr-defined]
    with pytest.raises(DeclarationError, match="instance of the operator: limit;"):
        OperatorHarness(changed)
    with pytest.raises(DeclarationError, match="instance of the operator: currency;"):
        OperatorHarness(extended)
    with OperatorHarness(Limited()) as harness:
        assert harness.send([{"who": "a"}]) == [{"who": "a", "limit": 3}]


def test_a_closed_harness_says_so(tmp_path: Path) -> None:
    harness = OperatorHarness(Basket)
    harness.send(FIRST)
    harness.close()
    harness.close()
    for use in (
        lambda: harness.send(FIRST),
        lambda: harness.state("a"),
        lambda: harness.advance_watermark(1),
        lambda: harness.advance_processing_time(1),
        lambda: harness.checkpoint(tmp_path / "new"),
    ):
        with pytest.raises(InvalidArgument, match="the harness is closed"):
            use()
    assert not list(tmp_path.iterdir())
