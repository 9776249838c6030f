"""States that are read by the name of a tag: what the name means, over all partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Namespace, Operator, state
from stateflow.client import Cluster, reading
from stateflow.clock import ManualClock
from stateflow.errors import (
    InvalidArgument,
    LeaseLost,
    NotOwner,
    SchemaMismatch,
    StateflowError,
    Unavailable,
    UnknownState,
)
from stateflow.operator.operator import describe
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.partitioner import partition_of
from stateflow.router import backoff
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to

PARTITIONS = 4
#: keys of different partitions
ONE, OTHER = (next(key for key in "abcdefghijkl" if partition_of(key, PARTITIONS) == number) for number in (1, 3))
SCHEMA = pa.schema({"k": pa.string()})
COUNT: Any = state.counter(name="count")
TEXT, NUMBER = state.value(str, name="last"), state.value(int, name="last")


class Spread(Operator):
    """Uses one tag in all partitions, and two tags of one name in different ones."""

    key, output = "k", "k string"
    n = state.counter()

    def process(self, row: Any, ctx: Any) -> None:
        ctx.state(COUNT, Namespace.window(0, 1_000_000)).value += 1
        if row.k == ONE:
            ctx.state(TEXT).value = "one"
        else:
            ctx.state(NUMBER).value = 7


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of one replica without sockets. Its third partition had no batch."""
    owner = ReplicaInfo("a", "site", "a:1")
    node = ReplicaNode(owner, tmp_path / "a", ReplicaSettings(), clock=ManualClock(10**15))
    node.create(describe(Spread, PARTITIONS), range(PARTITIONS), 1)
    for key in (ONE, OTHER):
        data = pa.RecordBatch.from_pylist([{"k": key}], schema=SCHEMA).serialize().to_pybytes()
        partition = PartitionId("Spread", partition_of(key, PARTITIONS))
        apply_to(node, partition, 1, Batch("s", 0), SCHEMA.serialize().to_pybytes(), data)

    class Called:
        def __init__(self, address: str) -> None: ...

        def scan(self, operator: str, state: str, partitions: list[int], keys: Iterable[bytes]) -> Iterator[bytes]:
            for number in partitions:
                for pages in node.reader.scan_pages(PartitionId(operator, number), state, keys):
                    yield from pages

    monkeypatch.setattr(reading, "ReplicaClient", Called)
    made = Cluster("127.0.0.1:1")
    deployed = SimpleNamespace(spec=SimpleNamespace(partitions=PARTITIONS), owners=[owner] * PARTITIONS)
    made._client = SimpleNamespace(deployment=lambda _: deployed)  # type: ignore[assignment]
    yield made
    node.close()


def values(table: pa.Table) -> dict[str, Any]:
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_a_plain_name_is_read_from_all_partitions(cluster: Cluster) -> None:
    table = cluster.read_state("Spread", "count")
    assert values(table) == {ONE: 1, OTHER: 1}
    assert table["window_end"].to_pylist()[0].second == 1
    assert values(cluster.read_state("Spread", "count", OTHER)) == {OTHER: 1}
    assert values(cluster.read_state("Spread", "count: counter(int64)", ONE)) == {ONE: 1}
    assert cluster.read_state("Spread", "count", "nobody").num_rows == 0
    assert cluster.read_state("Spread", "n").num_rows == 0, "an attribute's, which was not used"


def test_two_tags_of_one_name_are_not_mixed(cluster: Cluster) -> None:
    """Each partition has only one of them, so that no partition alone can tell."""
    with pytest.raises(
        InvalidArgument, match=r"several states are called 'last' .*last: value\(int64\); last: value\("
    ):
        cluster.read_state("Spread", "last")
    assert values(cluster.read_state("Spread", "last: value(utf8)")) == {ONE: "one"}
    assert values(cluster.read_state("Spread", "last: value(int64)")) == {OTHER: 7}
    assert [*cluster.readable_states("Spread").by_name()] == ["n", "count", "last: value(int64)", "last: value(utf8)"]


@pytest.mark.parametrize("name", ["cuont", "cuont: counter(int64)", ""])
def test_an_unknown_name_is_refused_with_those_that_are_there(cluster: Cluster, name: str) -> None:
    with pytest.raises(UnknownState, match="name one of these: n, count, last: value"):
        cluster.read_state("Spread", name)


class Answers:
    """A replica that answers pages of its own. ``pages``: of each scan."""

    pages: tuple[pa.Table, ...] = ()

    def __init__(self, address: str) -> None: ...

    def scan(self, *_: Any) -> Iterator[bytes]:
        for table in self.pages:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield bytes(sink.getvalue().to_pybytes())


ENTRIES = pa.table({"key": ["a"], "map_key": pa.nulls(1), "value": [1], "partition": [0]})


@pytest.mark.parametrize(
    "page",
    [
        pa.table({"attribute": ["n"]}),
        pa.table({"attribute": ["n"], "declared": ["{"]}),
        pa.table({"attribute": ["n"], "declared": ["[]"]}),
        pa.table({"attribute": [["n"]], "declared": ["7"]}),
        pa.table({"attribute": ["n"], "declared": pa.nulls(1)}),
        pa.table({"attribute": ["n"], "declared": ['{"name": "n", "kind": "value", "coders": [1], "tag": "x"}']}),
        pa.table({"attribute": [None], "declared": ['{"name": "n", "kind": [], "coders": [], "tag": {}}']}),
        pa.table({"attribute": ["n"], "declared": [b"\xff"]}),
    ],
    ids=lambda page: str(page.to_pydict()),
)
def test_a_list_of_states_that_no_replica_sends_is_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, page: pa.Table
) -> None:
    monkeypatch.setattr(Answers, "pages", (page,))
    monkeypatch.setattr(reading, "ReplicaClient", Answers)
    with pytest.raises((Unavailable, InvalidArgument), match=r"cannot be read|invalid"):
        cluster.readable_states("Spread")


@pytest.mark.parametrize(
    "pages",
    [
        (pa.table({}),),
        (ENTRIES.drop_columns(["key"]),),
        (ENTRIES.rename_columns(["key"] * 4),),
        (ENTRIES, ENTRIES.set_column(2, "value", pa.array([{"a": 1}]))),
    ],
    ids=["empty", "no key", "four keys", "other types"],
)
def test_entries_that_no_replica_sends_are_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, pages: tuple[pa.Table, ...]
) -> None:
    monkeypatch.setattr(Answers, "pages", pages)
    monkeypatch.setattr(reading, "ReplicaClient", Answers)
    with pytest.raises(SchemaMismatch, match="the entries of a state cannot be joined"):
        cluster.read_state("Spread", "n")


def test_a_partition_without_a_page_has_no_entries(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page was asked for, whatever there was: a RuntimeError."""
    monkeypatch.setattr(reading, "ReplicaClient", Answers)
    assert list(cluster.scan_state("Spread", "n", whole=False)) == []


def test_an_operator_that_is_deployed_anew_meanwhile_is_read_again(cluster: Cluster) -> None:
    counts = iter((PARTITIONS, 2))
    client: Any = cluster._client
    client.deployment = lambda _: SimpleNamespace(spec=SimpleNamespace(partitions=next(counts)), owners=[])
    with pytest.raises(Unavailable, match=r"the operator was deployed anew \(operator=Spread\): read again"):
        cluster.read_state("Spread", "n")


@pytest.mark.parametrize("error", [LeaseLost, NotOwner, Unavailable])
def test_an_owner_that_cannot_serve_yet_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: type[StateflowError]
) -> None:
    """An owner whose lease has lapsed does not evolve states, which reading them needs after a deployment."""
    errors, scan = [error("-", remedy="-")], reading.ReplicaClient.scan

    def once(*asked: Any) -> Iterator[bytes]:
        if errors:
            raise errors.pop()
        return scan(*asked)

    monkeypatch.setattr(reading.ReplicaClient, "scan", once)
    assert values(cluster.read_state("Spread", "count")) == {ONE: 1, OTHER: 1}


class Slow:
    """Takes longer than patience lasts to read partitions other than 1, whose owner serves only after these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.refusals, self.asked = ManualClock(0), 1, list[int]()
        scan = reading.ReplicaClient.scan

        def slowly(client: Any, operator: str, state: str, partitions: list[int], keys: Any) -> Iterator[bytes]:
            self.asked += partitions
            if partitions == [1] and self.refusals:
                self.refusals -= 1
                raise NotOwner("-", remedy="-")
            if partitions != [1]:
                self.now.advance(5)
            return scan(client, operator, state, partitions, keys)

        monkeypatch.setattr(reading.ReplicaClient, "scan", slowly)
        monkeypatch.setattr(reading, "backoff", lambda: backoff(clock=self.now))
        monkeypatch.setattr(reading, "sleep", self.now.advance)


def test_time_in_which_other_partitions_are_read_is_no_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that took longer than 8 s failed at a partition between two owners."""
    slow = Slow(monkeypatch)
    slow.refusals = 3
    assert cluster.read_state("Spread", "n").num_rows == 0
    assert slow.asked == [0, 1, 2, 3, 1, 1, 1]


def test_a_partition_that_nobody_serves_ends_the_scan(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    slow.refusals = 1000
    client: Any = cluster._client
    deployed = client.deployment("Spread")
    deployed.why_unserved = dict
    with pytest.raises(NotOwner):
        cluster.read_state("Spread", "n")
    assert slow.asked[:4] == [0, 1, 2, 3]
    assert set(slow.asked[4:]) == {1}
