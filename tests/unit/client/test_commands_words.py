"""Partitions, keys, policies and batches of a request, as users write them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import UTC
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stateflow.client import commands
from stateflow.client.commands import (
    Spawning,
    call_off,
    entries_under,
    keys_meant,
    partition_numbers,
    redistribute,
    runner_of,
    would_redistribute,
)
from stateflow.errors import EncodeError, InvalidArgument, Unavailable, UnknownPartition, UnsupportedKeyType
from stateflow.fleet import Spawned
from stateflow.reports import ChildReport
from stateflow.state import encode_row_key
from stateflow.types import MoveOptions


class Asked:
    """A cluster that remembers the calls it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            return SimpleNamespace(cancel=lambda: SimpleNamespace(state="CANCELLED"))

        return call


@pytest.fixture
def cluster() -> Any:
    return Asked()


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "sleep", lambda _: None)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("0", [0]),
        ("5-9", [5, 6, 7, 8, 9]),
        ("5-5", [5]),
        ("1 4-5", [1, 4, 5]),
        ("1,4-5", [1, 4, 5]),
        (" 4-5 ,  1\t11 ", [1, 4, 5, 11]),
        ("5-7 3, 6 3", [3, 5, 6, 7]),
        ("all", list(range(12))),
        ("3 all", list(range(12))),
        ("007", [7]),
    ],
)
def test_partitions(text: str, numbers: list[int]) -> None:
    assert partition_numbers(text, 12) == numbers


@pytest.mark.parametrize(
    "word", ["", "x", "-1", "3-", "-", "1-2-3", "1.5", "ALL", "1,", ",1", "²", "9-5", "12345678901"]
)
def test_words_that_are_no_partitions(word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: .*: write numbers, ranges like 5-9, or all"):
        partition_numbers(word, 12)


@pytest.mark.parametrize("word", ["12", "0-12", "3 999999999"])
def test_partitions_that_there_are_not(word: str) -> None:
    with pytest.raises(UnknownPartition, match="use 0 to 11"):
        partition_numbers(word, 12)


def test_a_key_is_text_first_and_then_what_else_it_may_be() -> None:
    assert list(keys_meant("N14228")) == ["N14228", b"N14228"]
    assert list(map(repr, keys_meant("7"))) == ["'7'", "7", "7.0", "b'7'"]
    assert list(keys_meant("null")) == ["null", b"null"], "no key is all keys"
    assert list(keys_meant("2013-02-30")) == ["2013-02-30", b"2013-02-30"]
    assert "2013-01-01T05:00:00" in keys_meant("2013-01-01T05:00:00"), "and no moment: it has no zone"
    assert len(list(keys_meant("2013-01-01T05:00:00"))) == 2
    assert [each for each in keys_meant('["a", 1]') if isinstance(each, tuple)] == [
        *(("a", 1), ("a", 1.0), (b"a", 1), (b"a", 1.0)),
    ]


KEYS = st.one_of(
    st.text(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=st.just(UTC)),
)


def row_keys(text: str) -> list[bytes]:
    found = []
    for key in keys_meant(text):
        with contextlib.suppress(UnsupportedKeyType, EncodeError):
            found.append(encode_row_key(key))
    return found


@given(KEYS)
@example(-5)
@example(2.0)
@example(b"\xff")
def test_whatever_scan_shows_is_found_by_get(key: Any) -> None:
    with contextlib.suppress(UnsupportedKeyType, EncodeError):
        wanted = encode_row_key(key)
        assert wanted in row_keys(str(key))


@given(st.integers(-(1 << 53), 1 << 53))
def test_a_whole_number_is_a_double_too(number: int) -> None:
    assert encode_row_key(float(number)) in row_keys(str(number))


def test_bytes_are_hexadecimal() -> None:
    assert encode_row_key(b"\x00\xff") in row_keys("0x00ff")


def test_of_what_a_key_may_mean_the_first_that_is_there_is_shown() -> None:
    asked: list[Any] = []

    def scan(key: Any) -> list[bytes]:
        asked.append(key)
        if isinstance(key, str):
            raise UnsupportedKeyType("no text", remedy="")
        rows = [{"key": key, "map_key": None, "value": 1, "partition": 0}] if isinstance(key, float) else []
        return [table_bytes(pa.Table.from_pylist(rows, schema=PAGE))]

    found = entries_under("2", scan)
    assert found is not None
    assert found.to_pylist()[0]["key"] == 2.0
    assert list(map(repr, asked)) == ["'2'", "2", "2.0"]
    assert entries_under("x", scan) is None


PAGE = pa.schema([("key", pa.float64()), ("map_key", pa.null()), ("value", pa.int64()), ("partition", pa.int32())])


def table_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("policies", [[], ["ring"]])
def test_the_ring_alone_is_a_rebalance(cluster: Any, policies: list[str]) -> None:
    would_redistribute(cluster, policies, "Op")
    redistribute(cluster, policies, "Op", MoveOptions())
    assert cluster.calls == [("would_rebalance", "Op"), ("rebalance", "Op", MoveOptions())]


def test_with_others_it_is_a_placement(cluster: Any) -> None:
    would_redistribute(cluster, ["load", "ring"], "")
    redistribute(cluster, ["load", "ring"], "", MoveOptions())
    assert cluster.calls == [("propose", "load", "ring", ""), ("place", "load", "ring", "", MoveOptions())]


@pytest.mark.parametrize(
    ("batch", "call"),
    [
        ("reconfiguration/r1", ("cancel", "r1")),
        ("restores/x/1", ("cancel_restore", "x/1")),
        ("sweep/s1", ("sweep", "s1")),
        ("roll/s1", ("sweep", "s1")),
    ],
)
def test_a_batch_of_the_controller_is_called_off_there(cluster: Any, batch: str, call: tuple[str, str]) -> None:
    assert call_off(cluster, *runner_of(batch))
    assert cluster.calls == [call]


@pytest.mark.parametrize("batch", ["4b1f", "sweep", "sweep/", "mine/7"])
def test_others_are_of_whoever_works_by_the_board(batch: str) -> None:
    assert runner_of(batch) == ("", batch)


def test_a_replica_that_runs_at_last_is_not_refused_for_its_former_deaths() -> None:
    spawned = Spawned("a-0", "a")
    report = ChildReport("a-0", "running", "WAITS", spawned.generation, spawned.generation, deaths=5, address="host:1")
    report = replace(report, fault=InvalidArgument("the data directory cannot be used", remedy="choose another one"))
    reports = [[report], [replace(report, state="RUNNING")]]
    client: Any = SimpleNamespace(
        agents=lambda: [SimpleNamespace(replicas=reports[0])],
        status=lambda: SimpleNamespace(replicas=[SimpleNamespace(name="a-0", alive=True, address="host:1")]),
    )
    begun = Spawning(client, [spawned])
    with pytest.raises(InvalidArgument, match="the data directory cannot be used"):
        begun.wait()
    del reports[0]  # the cause is removed
    assert begun.wait() == ["a-0"]


@pytest.mark.usefixtures("unpaced")
@pytest.mark.parametrize(("running", "after"), [(False, "STOPPED"), (True, "RUNNING")])
def test_deaths_before_a_stop_or_restart_do_not_fail_the_command(running: bool, after: str) -> None:
    spawned = Spawned("a-0", "a", running, generation=2)
    old = ChildReport("a-0", "running", "WAITS", generation=2, runs=1, deaths=5)
    old = replace(old, fault=Unavailable("its process exited with status 1", remedy="see its log"))
    now = ChildReport("a-0", "running", after, generation=2, runs=2, address="host:1")
    reports = iter([old, now])  # the agent's heartbeat from before the command, and the one after it
    client: Any = SimpleNamespace(
        agents=lambda: [SimpleNamespace(replicas=[next(reports)])],
        status=lambda: SimpleNamespace(replicas=[SimpleNamespace(name="a-0", alive=True, address="host:1")]),
    )
    assert Spawning(client, [spawned]).wait() == ["a-0"]
