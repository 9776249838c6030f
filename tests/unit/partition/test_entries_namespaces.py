"""States addressed at run time are read with their windows and namespaces, from replicas and checkpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Namespace, Operator, SessionWindows, TumblingWindows, state
from stateflow.checkpoint import CheckpointStore
from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument, SchemaMismatch, UnknownState
from stateflow.operator.arrow import read_table
from stateflow.operator.operator import describe
from stateflow.partition.checkpoints import manifests_of, read_checkpoint
from stateflow.partition.entries import At, ReadableStates, StateColumns, exact_name, joined, listed
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.state import Coder, encode_row_key
from stateflow.state.cells import CELL
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to

COUNT: Any = state.counter(name="count")
NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
NOWHERE = At(0, None)


@dataclass
class Position:
    x: int
    label: str


class Letters(Coder[str]):
    name = "letters"

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


class Windowed(Operator):
    key, event_time, output = "k", "at", "k string"
    hourly = TumblingWindows(HOUR)
    visits = SessionWindows(timedelta(minutes=30), merge=lambda into, other: None)
    seen = state.value(int)

    def process(self, row: Any, ctx: Any) -> None:
        self.seen.value = 1
        for window in (*self.hourly.of(ctx), *self.visits.of(ctx)):
            window.state(COUNT).value += 1

    def on_timer(self, timer: Any, ctx: Any) -> None:
        for helper in (self.hourly, self.visits):
            for _ in helper.ended(timer, ctx):
                pass


@pytest.fixture
def harness() -> Iterator[OperatorHarness]:
    with OperatorHarness(Windowed, partitions=1) as made:
        yield made


def row(key: str, minutes: float) -> dict[str, Any]:
    return {"k": key, "at": NOON + timedelta(minutes=minutes)}


def minute(number: float) -> datetime:
    return NOON + timedelta(minutes=number)


def read(cls: type[Operator], store: Any, name: str, *keys: Any, at: At = NOWHERE) -> pa.Table:
    columns = StateColumns(cls, name, cls.__name__, store)
    entries = columns.entries(store, at, [encode_row_key(key) for key in keys])
    return joined([read_table(page) for pages in columns.pages(entries, 0) for page in pages])


COUNTED = "count: counter(int64)"


def test_windows_and_sessions_have_their_bounds(harness: OperatorHarness) -> None:
    """A session's bounds are those that it has now, though its namespace names its first row."""
    harness.send([row("a", 50), row("a", 70), row("b", 200)])
    table = read(Windowed, harness._stores[0], COUNTED)
    assert table.column_names == ["key", "window_start", "window_end", "namespace", "map_key", "value", "partition"]
    assert table.schema.field("window_start").type == pa.timestamp("us", tz="UTC")
    assert table.schema.field("value").type == pa.int64()
    found = {tuple(each.values())[:4]: each["value"] for each in table.to_pylist()}
    assert found == {
        ("a", minute(0), minute(60), "hourly"): 1,
        ("a", minute(60), minute(120), "hourly"): 1,
        ("a", minute(50), minute(100), "visits"): 2,
        ("b", minute(180), minute(240), "hourly"): 1,
        ("b", minute(200), minute(230), "visits"): 1,
    }
    assert set(read(Windowed, harness._stores[0], COUNTED, "b")["key"].to_pylist()) == {"b"}
    assert read(Windowed, harness._stores[0], "seen").column_names == ["key", "map_key", "value", "partition"]


def test_a_window_that_has_ended_is_gone(harness: OperatorHarness) -> None:
    harness.send([row("a", 10), row("a", 100)])
    harness.advance_watermark(minute(60))
    left = read(Windowed, harness._stores[0], COUNTED)
    assert set(left["window_end"].to_pylist()) == {minute(120), minute(130)}
    harness.advance_watermark(minute(500))
    left = read(Windowed, harness._stores[0], COUNTED)
    assert (left.num_rows, left.schema.field("value").type) == (0, pa.int64()), "the types stay"


@pytest.mark.parametrize("keys", [300, 2])
def test_many_sessions_of_many_keys(harness: OperatorHarness, keys: int) -> None:
    """Keys of different lengths, and several sessions for each, are found in one pass."""
    names = ["k" * (1 + number % 150) + str(number) for number in range(keys)]
    harness.send([row(name, start) for name in names for start in (0, 60, 125)])
    found = [
        (each["key"], each["window_start"], each["window_end"])
        for each in read(Windowed, harness._stores[0], COUNTED).to_pylist()
        if each["namespace"] == "visits"
    ]
    assert sorted(found) == sorted(
        (name, minute(start), minute(start + 30)) for name in names for start in (0, 60, 125)
    )


class Changing:
    """A store into which a batch is written after each scan of a state, up to a number of times."""

    def __init__(self, harness: OperatorHarness, times: int) -> None:
        self._harness, self._store = harness, harness._stores[0]
        self._minutes = iter(range(10, 10 * times + 1, 10))

    def get(self, key: bytes) -> Any:
        return self._store.get(key)

    def scan(self, prefix: bytes) -> Any:
        found = self._store.scan(prefix)
        if prefix[:1] == CELL:
            for number in itertools.islice(self._minutes, 1):
                self._harness.send([row("a", number)])
        return found


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_states_and_bounds_are_of_one_moment(harness: OperatorHarness, times: int) -> None:
    harness.send([row("a", 0)])
    found = read(Windowed, Changing(harness, times), COUNTED).to_pylist()
    (visit,) = [each for each in found if each["namespace"] == "visits"]
    assert (visit["value"], visit["window_end"]) == (times + 1, minute(10 * times + 30))


NAMED: Any = state.map(str, Position, name="named")
MEMBERS: Any = state.set(int, name="members")
RECENT: Any = state.list(tuple[str, list[Position]], name="recent", ttl=10)
LATEST: Any = state.value(dict[str, set[int]], name="latest")
CUSTOM: Any = state.value(str, coder=Letters(), name="custom")
AS_ATTRIBUTE: Any = state.counter(name="n")
SAME_NAME: Any = state.value(str, name="n")
TWO, TOO = state.value(int, name="two"), state.value(float, name="two")


class Everywhere(Operator):
    key, output = ("k", "g"), "k string"
    n = state.counter()
    other = state.value(str, coder=Letters())

    def process(self, row: Any, ctx: Any) -> None:
        self.n.value += 1
        position = Position(row.n, "here")
        for namespace in (Namespace(), Namespace.named("mon"), Namespace.window(0, 60_000_000), Namespace(b"raw")):
            ctx.state(NAMED, namespace)["p"] = position
        there = Namespace.named("mon")
        ctx.state(MEMBERS, there).add(row.n)
        ctx.state(RECENT, there).append(("t", [position]))
        ctx.state(LATEST, there).value = {"a": {row.n}}
        ctx.state(CUSTOM, there).value = "x"
        ctx.state(AS_ATTRIBUTE, there).value = 5
        ctx.state(SAME_NAME, there).value = "five"
        ctx.state(TWO if row.k == "two" else TOO, there).value = row.n


@pytest.fixture
def everywhere() -> Iterator[OperatorHarness]:
    with OperatorHarness(Everywhere, partitions=1) as made:
        made.send([{"k": "a", "g": 1, "n": 7}])
        yield made


def states_of(harness: OperatorHarness) -> ReadableStates:
    rows = read_table(listed(harness._cls, harness._stores[0])).to_pylist()
    described = [(each["attribute"], json.loads(each["declared"])) for each in rows]
    return ReadableStates.of(
        {name: each for name, each in described if name}, [each for name, each in described if not name]
    )


def test_namespaces_are_given_as_users_name_them(everywhere: OperatorHarness) -> None:
    table = read(Everywhere, everywhere._stores[0], states_of(everywhere).exact("named", "Everywhere"))
    rows = [(each["window_start"], each["window_end"], each["namespace"]) for each in table.to_pylist()]
    start, end = datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
    assert sorted(rows, key=str) == sorted(
        [(None, None, None), (None, None, "mon"), (start, end, None), (None, None, "Namespace(b'raw')")], key=str
    )
    assert table["key"].to_pylist()[0] == {"k": "a", "g": 1}
    assert table["map_key"].to_pylist() == ["p"] * 4


@pytest.mark.parametrize(
    ("name", "map_key", "value", "type_"),
    [
        ("named", "p", {"x": 7, "label": "here"}, pa.struct([("x", pa.int64()), ("label", pa.string())])),
        ("members", 7, None, pa.null()),
        (
            "recent",
            0,
            {"_0": "t", "_1": [{"x": 7, "label": "here"}]},
            pa.struct([("_0", pa.string()), ("_1", pa.list_(pa.struct([("x", pa.int64()), ("label", pa.string())])))]),
        ),
        ("latest", None, [("a", [7])], pa.map_(pa.string(), pa.list_(pa.int64()))),
        ("custom", None, '"x"', pa.string()),
    ],
)
def test_types_are_those_of_the_declaration(
    everywhere: OperatorHarness, name: str, map_key: Any, value: Any, type_: pa.DataType
) -> None:
    """The process that reads needs no declaration: types and values come from what is stored."""
    table = read(Everywhere, everywhere._stores[0], states_of(everywhere).exact(name, "Everywhere"))
    found = table.to_pylist()[-1]
    assert (found["map_key"], found["value"]) == (map_key, value)
    assert table.schema.field("value").type == type_


def test_expired_entries_are_not_read(everywhere: OperatorHarness) -> None:
    exact = states_of(everywhere).exact("recent", "Everywhere")
    counts = [read(Everywhere, everywhere._stores[0], exact, at=At(s * 1_000_000, None)).num_rows for s in (9, 10)]
    assert counts == [1, 0]


def test_names_that_clash(everywhere: OperatorHarness) -> None:
    """An attribute's name means the attribute; its states in namespaces, and a tag of its name, have exact names."""
    everywhere.send([{"k": "two", "g": 1, "n": 1}])
    states = states_of(everywhere)
    assert {"n", "n: value(utf8)", "named", "two: value(int64)", "two: value(float64)"} <= set(states.by_name())
    store = everywhere._stores[0]
    assert read(Everywhere, store, states.exact("n", "Everywhere"))["value"].to_pylist() == [1, 1]
    assert set(read(Everywhere, store, "n: value(utf8)")["value"].to_pylist()) == {"five"}
    in_all = read(Everywhere, store, states.exact("n: counter(int64)", "Everywhere")).to_pylist()
    assert sorted((each["namespace"] or "", each["value"]) for each in in_all) == [
        ("", 1),
        ("", 1),
        ("mon", 5),
        ("mon", 5),
    ]
    with pytest.raises(InvalidArgument) as caught:
        states.exact("two", "Everywhere")
    assert str(caught.value) == (
        "invalid_argument: several states are called 'two' (operator=Everywhere): "
        "name one: two: value(float64); two: value(int64)"
    )
    assert states.exact("two: value(int64)", "Everywhere") == "two: value(int64)"
    with pytest.raises(UnknownState, match=r"there is no state 'tow' .*name one of these: n, other, custom, latest"):
        states.exact("tow", "Everywhere")


def test_a_partition_where_a_tag_was_not_used_has_no_entries(everywhere: OperatorHarness) -> None:
    table = read(Everywhere, everywhere._stores[0], "elsewhere: value(int64)")
    assert (table.num_rows, table.column_names[:2]) == (0, ["key", "window_start"])
    known = read(Everywhere, everywhere._stores[0], "n: counter(int64)", ("nobody", 1))
    assert joined([table, known]).schema.field("value").type == pa.int64()
    with pytest.raises(UnknownState, match="n, other"):
        read(Everywhere, everywhere._stores[0], "named")


class Without(Operator):
    key, output = ("k", "g"), "k string"

    def process(self, row: Any, ctx: Any) -> None: ...


def test_a_coder_of_the_users_own_must_be_declared(everywhere: OperatorHarness) -> None:
    with pytest.raises(SchemaMismatch, match="make the state's tag an attribute of the operator class, too"):
        read(Without, everywhere._stores[0], "custom: value(letters)")
    assert read(Without, everywhere._stores[0], "members: set(int64)")["map_key"].to_pylist() == [7]


P = PartitionId("Windowed", 0)
SCHEMA = pa.schema({"k": pa.string(), "at": pa.timestamp("us", tz="UTC")})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    made = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", ReplicaSettings(), clock=ManualClock(10**15))
    made.create(describe(Windowed, 2), [0, 1], 1)
    data = pa.RecordBatch.from_pylist([row("a", 50), row("a", 70)], schema=SCHEMA).serialize().to_pybytes()
    apply_to(made, P, 1, Batch("s", 0), SCHEMA.serialize().to_pybytes(), data)
    yield made
    made.close()


def test_a_replica_lists_and_reads_them(node: ReplicaNode) -> None:
    ((page,),) = node.reader.scan_pages(P, "")
    tags = [each["declared"] for each in read_table(page).to_pylist() if each["attribute"] is None]
    assert len(tags) == 2, "of the count and of the sessions"
    rows = list(node.reader.scan(P, COUNTED, [encode_row_key("a")]))
    assert sorted(str(each[3]) for each in rows) == ["hourly", "hourly", "visits"]
    assert not list(node.reader.scan(PartitionId("Windowed", 1), COUNTED))
    with pytest.raises(UnknownState):
        list(node.reader.scan(P, "count"))


def test_a_checkpoint_names_and_reads_them(node: ReplicaNode, tmp_path: Path) -> None:
    store = CheckpointStore(f"{tmp_path}/checkpoints")
    for number in (1, 0):
        node.checkpointer.take(PartitionId("Windowed", number), store)
    assert [sorted(map(exact_name, each.tags))[:1] for each in manifests_of(store, "Windowed")] == [[COUNTED], []]

    def values(name: str, **options: Any) -> list[int]:
        pages = read_checkpoint(store, "Windowed", name, cls=Windowed, **options)
        table = joined([read_table(page) for page in pages])
        return sorted(table["value"].to_pylist())

    assert values("count") == values(COUNTED) == values("count", partitions=[0]) == [1, 1, 2]
    assert values("count", partitions=[1]) == values(COUNTED, partitions=[1]) == []
    for name in ("cuont", "cuont: counter(int64)"):
        with pytest.raises(UnknownState, match="name one of these: seen, count, sessions of visits"):
            values(name)
