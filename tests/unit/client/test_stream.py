"""A client of rows, without replicas: its router's addresses, and initial state that is loaded in several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stateflow import Context, Operator, state
from stateflow.client import Cluster, stream
from stateflow.errors import BatchChanged, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import INITIAL, Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.partitioner import partition_of
from stateflow.router import Router
from stateflow.rpc.apply import BatchRows
from stateflow.rpc.clients import ControllerClient
from stateflow.status import Deployment
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId, ReplicaInfo

PARTITIONS = 2
#: keys of each partition
KEYS = [[key for key in "abcdefgh" if partition_of(key, PARTITIONS) == number] for number in range(PARTITIONS)]


def test_addresses_reach_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def router(*_: Any, **options: Any) -> Any:
        asked.append(options)
        raise Unavailable("not here")

    monkeypatch.setattr(stream, "Router", router)
    with pytest.raises(Unavailable):
        Cluster("nowhere:1").stream("Op", "s", addresses={"a:1": "nat:2"})
    assert asked == [{"addresses": {"a:1": "nat:2"}}]


class Stock(Operator):
    key = "k"
    output = "k string"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None: ...


class Partitions:
    """Partitions of ``Stock``. ``away``: partitions that do not answer when rows are sent."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hosts = [
            PartitionProcessor(Stock, PartitionId("Stock", number), MemoryStore(), epoch=1)
            for number in range(PARTITIONS)
        ]
        self.away: set[int] = set()
        deployment = Deployment(describe(Stock, PARTITIONS), 1, (ReplicaInfo("a", "edge", "a:1"),) * 2, (1, 1))
        patch.setattr(ControllerClient, "deployment", lambda *_: deployment)
        patch.setattr(Router, "send", lambda _, *sent: self._send(*sent))
        patch.setattr(stream, "open_source", self._open)
        patch.setattr(stream, "look", lambda _, source: self._look(source))
        patch.setattr(stream, "LOADED_ROWS", 2)

    def _open(self, _: Router, source: str, session: Session) -> dict[int, Position]:
        for host in self.hosts:
            host.open_source(source, session)
        return self._look(source)

    def _look(self, source: str) -> dict[int, Position]:
        found = {number: host.reached(source) for number, host in enumerate(self.hosts)}
        return {number: each for number, each in found.items() if each is not None and each.batch >= 0}

    def _send(self, batch: Batch, rows: BatchRows, after: Mapping[int, int]) -> dict[int, bytes]:
        outputs = {}
        for frame in rows.frames(1):
            (partition,) = frame.partitions
            if partition in self.away:
                raise Unavailable("it is away", remedy="-")
            host = self.hosts[partition]
            outputs[partition] = host.apply(batch, rows.schema, frame.message, 0, after.get(partition)).output
        return outputs

    def load(self, *keys: str) -> int:
        return Cluster("nowhere:1").load_state("Stock", [{"k": key, "n": 1} for key in keys])

    def loaded(self) -> str:
        hosts = enumerate(KEYS)
        return "".join(key for number, keys in hosts for key in keys if self.hosts[number].peek(key, 0).n.value)


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Partitions:
    return Partitions(monkeypatch)


def test_initial_state_goes_on_where_it_was_interrupted(partitions: Partitions) -> None:
    (a, b, c, *_), (x, y, *_) = KEYS
    partitions.away = {1}
    with pytest.raises(Unavailable):
        partitions.load(a, b, c, x, y)
    partitions.away = set()
    for _ in range(2):
        assert partitions.load(a, b, c, x, y) == 5
    assert partitions.loaded() == a + b + c + x + y


@pytest.mark.parametrize("first", ["whole", "half"])
def test_rows_sent_last_that_are_fewer_or_more_in_another_partition_are_refused(
    partitions: Partitions, first: str
) -> None:
    """A partition compares its own rows only: one that gets rows for the first time, or no rows any more, cannot."""
    (a, b, c, d, *_), (x, *_) = KEYS
    partitions.away = {1} if first == "half" else set()
    sent = (a, b, c, x)
    try:
        partitions.load(*sent)
    except Unavailable:
        assert first == "half"
    partitions.away = set()
    before = partitions.loaded()
    for other in ((a, b, c), (a, b, c, d), (a, b, x), (a, b, x, x)):
        with pytest.raises(BatchChanged, match=r"the rows sent last .* differ"):
            partitions.load(*other)
        assert partitions.loaded() == before
    assert partitions.load(*sent) == 4
    assert partitions.loaded() == a + b + c + x


def test_more_rows_in_a_partition_that_had_none_of_those_sent_last_are_refused(partitions: Partitions) -> None:
    (a, *_), (x, *_) = KEYS
    partitions.load(a)
    with pytest.raises(BatchChanged, match="differ"):
        partitions.load(a, x)
    assert partitions.loaded() == a
    assert 1 not in partitions._look(INITIAL)
