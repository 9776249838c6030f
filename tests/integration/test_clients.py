"""Clients of one source: partitions that lost different things, threads, two clients, clients that start again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.cli.output import console
from stateflow.client import StreamClient
from stateflow.errors import InvalidArgument, PositionGap, SourceRetired, SourceTaken, StateflowError
from stateflow.partitioner import partition_of
from stateflow.settings import RouterSettings
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import command, one_line, read, told

pytestmark = pytest.mark.processes
PARTITIONS = 4


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("clients")
    with LocalCluster(
        Tally, sites={"cloud": 1}, partitions=PARTITIONS, data_dir=directory / "c", checkpoint_interval_s=0
    ) as cluster:
        yield cluster


def key_in(partition: int, prefix: str) -> str:
    return next(k for n in range(1000) if partition_of((k := f"{prefix}{n}",), PARTITIONS) == partition)


def total(local: LocalCluster, prefix: str) -> int:
    return sum(read(local.cluster, "Tally", "n", prefix).values())


class Lost:
    """A source whose partitions lost different suffixes: partition 1 all behind batch 1, 0 all behind batch 3.

    Each batch has a row for partition 0, and every second batch one for partition 1, too; batch 5 has no rows and moves
    the watermark.
    """

    def __init__(self, local: LocalCluster, name: str, buffer_bytes: int) -> None:
        self.local, self.name, self.prefix = local, name, f"{name}-"
        self.settings = RouterSettings(rewind_buffer_bytes=buffer_bytes)
        self.zero, self.one = key_in(0, self.prefix), key_in(1, self.prefix)
        self.stream = self.client()
        for number in range(8):
            assert self.send(number) is not None
            if number in (1, 3):
                local.cluster.savepoint(f"{name}-{number}")
        local.cluster.restore("Tally", [0], savepoint=f"{name}-3")
        local.cluster.restore("Tally", [1], savepoint=f"{name}-1")

    def client(self, **options: Any) -> StreamClient:
        return StreamClient(self.local.cluster.address, "Tally", self.name, settings=self.settings, **options)

    def send(self, number: int, **options: Any) -> Any:
        if number == 5:
            return self.stream.advance_watermark(5_000_000, sequence=5, **options)
        rows = [{"k": self.zero, "v": number}]
        if number % 2 == 0:
            rows.append({"k": self.one, "v": number})
        return self.stream.send(rows, sequence=number, **options)

    def whole(self, batches: int = 8) -> None:
        """Checks that the state is what the batches make, each applied once."""
        evens = sum(1 for n in range(batches) if n % 2 == 0)
        rows = sum(1 for n in range(batches) if n != 5)
        found = read(self.local.cluster, "Tally", "n", self.prefix)
        assert found == {(self.zero, None): rows, (self.one, None): evens}


def test_what_partitions_lost_is_sent_again_by_the_client(local: LocalCluster) -> None:
    lost = Lost(local, "itself", 1 << 20)
    lost.send(8)
    lost.whole(9)


# -- threads and clients ------------------------------------------------------------------------------------


def test_threads_share_a_client(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="threads")
    threads, sends = 8, 20
    wrong: list[Any] = []

    def work(mine: int) -> None:
        for n in range(sends):
            key = f"threads-{mine}"
            outputs = stream.send([{"k": key, "v": n}])
            if [(o["k"], o["n"]) for o in outputs] != [(key, n + 1)]:
                wrong.append((mine, n, outputs))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    print(f"{total(local, 'threads-')} of {threads * sends} rows; outputs of others: {len(wrong)}")
    assert wrong == []
    assert total(local, "threads-") == threads * sends


def test_a_source_belongs_to_its_newest_client(local: LocalCluster) -> None:
    one = local.stream("Tally", source="two")
    acknowledged = 0
    for n in range(5):
        one.send([{"k": f"two-{n}", "v": n}])
        acknowledged += 1
    other = local.stream("Tally", source="two")
    refused: list[StateflowError] = []
    for n in range(10):
        for stream, key in ((one, "two-a"), (other, "two-b")):
            try:
                assert {o["k"] for o in stream.send([{"k": f"{key}{n}", "v": n}])} == {f"{key}{n}"}
                acknowledged += 1
            except SourceTaken as error:
                refused.append(error)
    print(f"{acknowledged} acknowledged, {total(local, 'two-')} counted")
    assert total(local, "two-") == acknowledged == 15
    assert len(refused) == 10
    with pytest.raises(SourceTaken):
        one.verify()
    print(one_line(refused[0]))


def test_that_a_source_changed_hands_may_be_lost_and_lets_nobody_in(local: LocalCluster) -> None:
    """A former client stays refused by a restored partition that has forgotten the newer client."""
    key = key_in(0, "hands-")
    one = local.stream("Tally", source="hands")
    for number in range(4):
        one.send([{"k": key, "v": 1}], sequence=number)
    local.cluster.savepoint("hands")
    other = local.stream("Tally", source="hands")
    other.send([{"k": key, "v": 100}], sequence=4)
    local.cluster.restore("Tally", [0], savepoint="hands")
    for _ in range(2):
        with pytest.raises(SourceTaken):
            one.send([{"k": key, "v": 1}], sequence=5)
    other.send([{"k": key, "v": 100}], sequence=5)
    assert read(local.cluster, "Tally", "n", "hands-") == {(key, None): 6}
    assert read(local.cluster, "Tally", "total", "hands-") == {(key, None): 204}


def test_a_former_client_that_every_partition_let_in_again_is_told_of(local: LocalCluster) -> None:
    """A newer client is told when every partition forgot it and let the former client in again."""
    key = key_in(0, "former-")
    one = local.stream("Tally", source="former")
    one.send([{"k": key, "v": 1}])
    local.cluster.savepoint("former")
    other = local.stream("Tally", source="former")
    other.send([{"k": key, "v": 100}])
    local.cluster.restore("Tally", savepoint="former")
    for _ in range(2):
        one.send([{"k": key, "v": 1}])
    for _ in range(2):
        with pytest.raises(PositionGap, match="an earlier client") as caught:
            other.send([{"k": key, "v": 100}])
    print(one_line(caught.value))
    with pytest.raises(SourceTaken):
        one.send([{"k": key, "v": 1}])
    other.accept_loss()
    other.send([{"k": key, "v": 100}])
    assert read(local.cluster, "Tally", "total", "former-") == {(key, None): 103}


# -- sources that send no more ------------------------------------------------------------------------------


def test_sources_are_seen_and_retired_by_command(local: LocalCluster) -> None:
    keys = [f"seen-{n}" for n in range(20)]
    stream = local.stream("Tally", source="seen")
    for v in range(2):
        stream.send([{"k": key, "v": v} for key in keys])
    there = ("Tally", "--controller", local.cluster.address)

    def seen() -> Any:
        listed = told("source", "list", *there, "--limit", "0")["sources"]
        return next(each for each in listed if each["source"] == "seen")

    before = seen()
    assert (before["batch"], before["partitions"], before["retired"]) == (1, PARTITIONS, False)
    assert "seen" in command("source", "list", *there, "--limit", "0").stdout
    assert told("source", "retire", "Tally", "seen", *there[1:])["partitions"] == PARTITIONS
    assert told("source", "retire", "Tally", "seen", *there[1:])["partitions"] == 0
    after = seen()
    assert (after["batch"], after["retired"]) == (1, True)
    assert after["bytes"] < before["bytes"] / 2
    assert "no partition knows" in told("source", "retire", "Tally", "nobody", *there[1:], status=1)["error"]["what"]
    with pytest.raises(SourceRetired) as caught:
        stream.send([{"k": key, "v": 1} for key in keys], sequence=1)
    print(one_line(caught.value))
    again = local.stream("Tally", source="seen")
    assert again.position == 1
    with pytest.raises(SourceTaken):
        stream.send([{"k": keys[0], "v": 2}], sequence=2)
    again.send([{"k": key, "v": 2} for key in keys])
    assert total(local, "seen-") == 60
    assert seen()["retired"] is False
    with pytest.raises(InvalidArgument):
        local.cluster.retire_source("Tally", "nobody")


def test_an_output_that_nobody_can_read_is_dropped_by_command(local: LocalCluster) -> None:
    keys = [f"dropped-{i}" for i in range(20)]
    rows = [{"k": key, "v": 1} for key in keys]
    stream = local.stream("Tally", source="it's stuck")
    stream.send(rows)
    assert len(stream.send(rows, sequence=0)) == 20
    words = ["source", "drop-output", "Tally", "it's stuck", "--batch", "0", "--controller", local.address]
    dry = command(*words).output
    assert "would be dropped" in dry
    assert "dry run" in dry
    assert len(stream.send(rows, sequence=0)) == 20, "nothing is done yet"
    assert "was dropped" in command(*words, "--apply").output
    assert stream.send(rows, sequence=0) == []
    assert total(local, "dropped-") == 20
    with pytest.raises(InvalidArgument, match="no partition keeps output of batch 0"):
        local.cluster.drop_output("Tally", "it's stuck", 0, apply=True)
    with pytest.raises(InvalidArgument, match="no partition knows a source"):
        local.cluster.drop_output("Tally", "nobody", 0)
    assert len(stream.send(rows)) == 20


def test_what_is_kept_of_sources_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that were silent for long are retired in the next batch of any other; one that comes back goes on."""
    monkeypatch.setenv("STATEFLOW_REPLICA_SOURCE_IDLE_S", "0.001")
    with LocalCluster(
        Tally, sites={"cloud": 1}, partitions=1, data_dir=tmp_path / "c", checkpoint_interval_s=0
    ) as cluster:
        streams = []
        for n in range(8):
            streams.append(cluster.stream("Tally", source=f"run-{n}"))
            streams[n].send([{"k": f"bounded-{i}", "v": n} for i in range(100)])
        found = {each.source: each for each in cluster.cluster.sources("Tally")}
        assert [source for source, each in found.items() if not each.retired] == ["run-7"]
        assert sum(each.bytes for each in found.values() if each.retired) < 7 * 100
        assert [found[f"run-{n}"].batch for n in range(8)] == [0] * 8
        with pytest.raises(SourceRetired):
            streams[0].send([{"k": f"bounded-{i}", "v": 0} for i in range(100)], sequence=0)
        streams[0].send([{"k": "bounded-0", "v": 9}])
        cluster.kill("cloud-0")
        cluster.restart("cloud-0")
        streams[1].send([{"k": "bounded-0", "v": 9}])
        assert total(cluster, "bounded-") == 802


def test_a_retired_source_holds_no_watermark_back(local: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 200)  # else as wide as the terminal of the test run
    slow, fast = local.stream("Tally", source="slow"), local.stream("Tally", source="fast")
    slow.advance_watermark(1_000_000)
    fast.advance_watermark(9_000_000)
    held = {each.source: each.watermark_us for each in local.cluster.sources("Tally")}
    assert (held["slow"], held["fast"]) == (1_000_000, 9_000_000)
    assert [each.source for each in local.cluster.sources("Tally") if each.holds] == ["slow"]
    listed = command("source", "list", "Tally", "--controller", local.address).output
    assert "1970-01-01 00:00:01 holds the watermark back" in " ".join(listed.split())
    local.cluster.retire_source("Tally", "slow")
    held = {each.source: each.watermark_us for each in local.cluster.sources("Tally")}
    assert (held["slow"], held["fast"]) == (None, 9_000_000)
    assert "slow" not in [each.source for each in local.cluster.sources("Tally") if each.holds]


def test_what_a_caller_may_not_give_is_said_in_one_line(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="odd")
    row = {"k": "odd-1", "v": 1}
    wrong: dict[str, tuple[Any, str]] = {
        "one row": (lambda: stream.send(row), "this is one row, not a list of rows: send [row]"),
        "nothing": (lambda: stream.send(None), "None is not a list of rows: send a list of dicts"),
        "text": (lambda: stream.send("rows"), "'rows' is not a list of rows: send a list of dicts"),
        "a row of nothing": (lambda: stream.send([row, None]), "None is not a row (row=1)"),
        "a column's number": (lambda: stream.send([row | {3: 1}]), "3 is not a column name (row=0)"),
        "a great number": (
            lambda: stream.send([row], sequence=2**63 - 1),
            "9223372036854775807 is not a batch number",
        ),
        "a text for one": (lambda: stream.send([row], sequence="1"), "'1' is not a batch number (argument=sequence)"),
        "true": (lambda: stream.advance_watermark(1, sequence=True), "True is not a batch number"),
        "a negative one": (lambda: stream.send([row], sequence=-1), "-1 is not a batch number"),
        "no source": (lambda: local.stream("Tally", None), "None is not a source name"),
        "an empty source": (lambda: local.stream("Tally", ""), "'' is not a valid source name"),
        "ours": (lambda: local.stream("Tally", "stateflow:x"), "is a reserved name"),
        "a fraction": (lambda: local.cluster.stream("Tally", "odd", acknowledged=1.5), "(argument=acknowledged)"),
    }
    for name, (call, what) in wrong.items():
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert what in one_line(caught.value), name
    assert stream.send([row]) == [{"k": "odd-1", "n": 1, "total": 1}]
    assert stream.position == 0, "none of these used a number"
    with stream:
        stream.send([row])
    with pytest.raises(InvalidArgument, match="the client is closed"):
        stream.send([row])
