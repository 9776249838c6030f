"""Positions on disk as older versions wrote them; which client may send under a source's name, and which rows."""

from __future__ import annotations

import msgpack
import pyarrow as pa
import pytest

from stateflow.changes import Mutations
from stateflow.errors import BatchChanged, PositionGap, SourceTaken, StaleBatch
from stateflow.partition import layout
from stateflow.partition.layout import Attempt, Position, Session
from stateflow.partition.positions import Batch, Positions
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId
from tests.unit.operators import Count
from tests.unit.partition.test_processor_batches import SCHEMA, P, message

SCHEMA_BYTES = SCHEMA.serialize().to_pybytes()
OLD, NEW = Session(1_000_000, "b"), Session(1_000_000, "c")
#: as versions 1 and 2 wrote them
VERSION_1 = bytes.fromhex("980107ce004c4b4003a372756ea3757365a47461736ba463616c6c")
VERSION_2 = bytes.fromhex("9a0207ce004c4b40030403a372756ea3757365a47461736ba463616c6c")


def test_positions_of_older_versions_are_read() -> None:
    attempt = Attempt("run", "use", "task", "call")
    assert Position.decode(VERSION_1) == Position(7, 5_000_000, 3, attempt)
    assert Position.decode(VERSION_2) == Position(7, 5_000_000, 3, attempt, 4, 3)
    now = Position(7, 5_000_000, 3, attempt, 4, 3, 8, 1 << 63, b"known")
    assert Position.decode(now.encode()) == now
    assert Position.decode(msgpack.packb(msgpack.unpackb(now.encode())[:-1])) == now, "without a client"


class One:
    """A partition, which restarts before every batch if ``restarts``."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.start()

        self.processor.open_source("s", OLD)

    def start(self) -> None:
        self.processor = PartitionProcessor(Count, P, self.store, epoch=1)

    def send(
        self,
        number: int,
        *rows: tuple[str, int],
        session: Session | None = OLD,
        after: int | None = None,
        rewind: bool = False,
        schema: bytes = SCHEMA_BYTES,
    ) -> bytes:
        batch = Batch("s", number, sparse=True, session=session, rewind=rewind)
        return self.processor.apply(batch, schema, message(rows) if rows else b"", 0, after).output


@pytest.mark.parametrize("restarted", [False, True])
def test_an_older_client_is_refused_once_a_newer_one_has_the_source(restarted: bool) -> None:
    one = One()
    first = one.send(0, ("a", 1))
    one.processor.open_source("s", NEW)
    told = one.processor.sequence
    one.processor.open_source("s", NEW)
    assert one.processor.sequence == told, "what is known is not written again"
    if restarted:
        one.start()
    before = dict(one.store.scan(b""))
    for number, rewind in ((0, False), (1, False), (0, True)):
        with pytest.raises(SourceTaken, match="1970-01-01 00:00:01"):
            one.send(number, ("a", 1), rewind=rewind)
    with pytest.raises(SourceTaken):
        one.processor.open_source("s", OLD)
    assert dict(one.store.scan(b"")) == before
    assert one.send(0, ("a", 1), session=NEW) == first, "the same batch again, by the successor"
    assert one.send(1, ("a", 1), session=NEW)


def test_a_client_that_is_not_known_here_has_to_ask_all_partitions_first() -> None:
    """A client that a partition does not know has to ask all partitions first.

    The client was let in, so this copy is from before that, and would take older clients, too.
    """
    one = One()
    one.send(0, ("a", 1))
    for _ in range(2):
        with pytest.raises(PositionGap, match="does not know this client") as caught:
            one.send(1, ("a", 1), session=NEW)
        assert caught.value.where["expected"] == 1
    one.processor.open_source("s", NEW)
    one.send(1, ("a", 1), session=NEW)


def test_whoever_sent_to_a_copy_that_was_lost_has_to_ask_all_partitions_first() -> None:
    """A client of a copy that was lost has to ask all partitions first.

    The copy in its place knows the older client only, which may open the source again like any other.
    """
    one = One()
    one.send(0, ("a", 1))
    one.store.apply(Mutations(puts=layout.lapsing(one.store)))
    one.start()
    for session in (OLD, NEW):
        with pytest.raises(PositionGap):
            one.send(1, ("a", 1), session=session)
    one.processor.open_source("s", OLD)
    for restarted in (False, True):
        if restarted:
            one.start()
        one.send(1 + restarted, ("a", 1))
    assert not list(one.store.scan(layout.LAPSED))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restore_that_stops_sources_refuses_whoever_had_sent_until_then(restarted: bool) -> None:
    """The restore refuses every client that sent before it.

    This includes a client that the checkpoint does not know, an idle one, and one whose clock is ahead.
    """
    one = One()
    one.send(0, ("a", 1))
    ahead, now_us = Session(9_000_000, "c"), 5_000_000
    other = MemoryStore()
    other.apply(Mutations(puts=[(layout.SESSION + b"another", ahead.encode())]))
    assert layout.stopping([one.store], now_us) == [(layout.STOPPED, now_us.to_bytes(8, "big"))]
    one.store.apply(Mutations(puts=[*layout.lapsing(one.store), *layout.stopping([one.store, other], now_us)]))
    again = layout.stopping([one.store], now_us)
    assert again == layout.stopping([other], now_us), "a later stop does not lower an earlier one"
    one.start()
    before = dict(one.store.scan(b""))
    for session in (OLD, NEW, ahead):
        for number, rewind in ((0, False), (1, False), (0, True)):
            with pytest.raises(SourceTaken, match="stopped all clients from before 1970-01-01 00:00:09 UTC") as caught:
                one.send(number, ("a", 1), session=session, rewind=rewind)
        for source in ("s", "unknown"):
            with pytest.raises(SourceTaken):
                one.processor.open_source(source, session)
    assert dict(one.store.scan(b"")) == before
    anew = Session(int(caught.value.where["generation_us"]) + 1, "a")
    one.processor.open_source("s", anew)
    if restarted:
        one.start()
    assert one.send(0, ("a", 1), session=anew), "what is contained is answered"
    assert one.send(1, ("a", 1), session=anew)
    one.processor.apply(Batch("query:q", 0), SCHEMA_BYTES, message([("a", 1)]), 0)  # a batch without a client


def test_the_same_number_with_other_rows_is_refused() -> None:
    one = One()
    first = one.send(0, ("a", 1))
    other_schema = pa.schema([("k", pa.string()), ("w", pa.int64())]).serialize().to_pybytes()
    for rows, schema in (((("a", 2),), SCHEMA_BYTES), ((), b""), ((("a", 1),), other_schema)):
        with pytest.raises(BatchChanged):
            one.send(0, *rows, schema=schema)
    assert one.send(0, ("a", 1)) == first
    one.send(1, schema=b"")  # a watermark alone
    with pytest.raises(BatchChanged):
        one.send(1, ("a", 1))


def test_a_sparse_source_may_skip_numbers_and_no_batches() -> None:
    one = One()
    one.send(3, ("a", 1))
    one.send(7, ("a", 1), after=3)
    for number, after in ((9, 8), (9, 9)):
        with pytest.raises(PositionGap) as caught:
            one.send(number, ("a", 1), after=after)
        assert caught.value.where["expected"] == 8
    with pytest.raises(PositionGap):
        one.send(9, ("a", 1), after=8, rewind=True)
    assert one.send(3, ("a", 1), after=3, rewind=True) == b""
    with pytest.raises(StaleBatch):
        one.send(3, ("a", 1), after=3)


def test_rows_are_encoded_alike_every_time() -> None:
    """Rows are encoded alike every time: otherwise a repeated batch would be taken for another."""
    schema = pa.schema([("k", pa.string()), ("v", pa.int64()), ("b", pa.bool_()), ("d", pa.float64())])
    rows = [
        {"k": f"k{n}", "v": None if n % 3 else n, "b": None if n % 2 else True, "d": None if n % 5 else n / 7}
        for n in range(257)
    ]

    def encoded() -> bytes:
        columns = {name: [row[name] for row in rows] for name in schema.names}
        batch = pa.Table.from_pydict(columns, schema=schema).combine_chunks().to_batches()[0]
        return batch.take(pa.array(range(1, 257, 3))).serialize().to_pybytes()

    assert len({encoded() for _ in range(50)}) == 1


def test_a_replay_across_an_upgrade_is_not_taken_for_other_rows() -> None:
    """A replay across an upgrade is accepted: digests stored before are of messages, and say nothing of values."""
    positions, batch = Positions(PartitionId("Op", 0), {}), Batch("s", 0)
    positions.check_digest(batch, 17, -18)
    positions.check_digest(batch, -18, -18)
    positions.check_digest(batch, None, -18)
    for then, now in ((-17, -18), (17, 18)):
        with pytest.raises(BatchChanged, match="other rows"):
            positions.check_digest(batch, then, now)
