"""Operators that raise unexpected exceptions, or never come back."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.client import StreamClient
from stateflow.errors import OperatorCrashed, OperatorFailed, OperatorStuck, StateflowError
from stateflow.partition.running import ENDS_MAX
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from tests.integration.operators import Rogue, Tally, Unclosable, Unopenable
from tests.integration.support import eventually, read

pytestmark = pytest.mark.processes
#: time from SIGTERM to the end, in seconds
STOP_S = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATEFLOW_REPLICA_BATCH_TIMEOUT_S", "1")
        with LocalCluster(
            Rogue, Tally, Unclosable, Unopenable, sites={"cloud": 1, "edge": 1}, partitions=2, deploy_to=("cloud",)
        ) as running:
            yield running


def rogue(key: str, do: str = "") -> dict[str, Any]:
    return {"k": key, "do": do}


def keys_of(partition: int, count: int = 1) -> list[str]:
    found = (f"k{n}" for n in range(1000) if partition_of(f"k{n}", 2) == partition)
    return [next(found) for _ in range(count)]


def n_of(cluster: LocalCluster, key: str) -> int:
    return read(cluster.cluster, "Rogue", "n").get((key, None), 0)


def log_of(cluster: LocalCluster, name: str) -> str:
    return (cluster.data_dir / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("do", "what"),
    [
        ("cancelled", r"process\(\) raised CancelledError"),
        ("generator", r"process\(\) raised GeneratorExit"),
        ("keyboard", r"process\(\) raised KeyboardInterrupt"),
        ("own", r"process\(\) raised Own: mine"),
        ("stop", r"process\(\) raised RuntimeError: generator raised StopIteration"),
        ("unspeakable", r"process\(\) raised Unspeakable: \(its message cannot be read: Own\)"),
        ("endless", r"did not return in time and was interrupted"),
        ("long", r"process\(\) raised ValueError: x{1000}… \(20000000 characters\)"),
        ("deep", r"process\(\) raised RecursionError"),
        ("memory", r"process\(\) raised MemoryError"),
        ("exit", r"process\(\) raised SystemExit: 3"),
        ("spin", r"process\(\) did not return in time and was interrupted"),
        ("state", r"process\(\) did not return in time and was interrupted"),
    ],
)
def test_whatever_an_operator_does_fails_its_batch_and_nothing_else(cluster: LocalCluster, do: str, what: str) -> None:
    stream = cluster.stream("Rogue", f"does-{do}")
    with pytest.raises(OperatorFailed, match=what) as caught:
        stream.send([rogue(f"key-{do}", do)])
    assert len(str(caught.value)) < 4000
    assert "in do" in caught.value.where["traceback"] or do in ("generator", "stop", "endless")
    stream.send([rogue(f"key-{do}")])
    assert n_of(cluster, f"key-{do}") == 1, "nothing of the batch that failed is there"


@pytest.mark.parametrize(("do", "where"), [("waits", "with open("), ("deaf", "os.path.exists(until)")])
def test_an_operator_that_cannot_be_interrupted_costs_its_partition_and_nothing_else(
    cluster: LocalCluster, tmp_path: Path, do: str, where: str
) -> None:
    """One waits in the system; the other one catches whatever interrupts it. Both return when the test says so."""
    returns = tmp_path / "returns"
    if do == "waits":
        os.mkfifo(returns)
    (stuck,), (other,) = keys_of(0), keys_of(1)
    before = n_of(cluster, stuck)
    beside, again = cluster.stream("Rogue", f"beside {do}"), cluster.stream("Rogue", f"again {do}")
    for stream in (beside, again):
        stream.send([rogue(other)])
    with pytest.raises(OperatorStuck, match="waits where it cannot be interrupted") as caught:
        cluster.stream("Rogue", f"stuck {do}").send([rogue(stuck, f"{do} {returns}")])
    assert where in caught.value.where["traceback"]
    beside.send([rogue(other)])
    cluster.stream("Tally", f"beside {do}").send([{"k": "a", "v": 1}])
    with pytest.raises(OperatorStuck):
        cluster.stream("Rogue", f"same {do}").send([rogue(stuck)])
    returns.write_bytes(b"")

    def served() -> bool:
        try:
            again.send([rogue(stuck)])
        except OperatorStuck:
            return False
        return True

    eventually(served, "it came back, and its partition is served")
    assert n_of(cluster, stuck) == before + 1, "the batch that was taken away never committed"


def test_an_operator_that_takes_all_memory_fails_its_batch_and_nothing_else(cluster: LocalCluster) -> None:
    """The process may have 256 MiB more than now, as under ``ulimit -v``, and the operator asks for more."""
    pid, limit = cluster.processes["cloud-0"].pid, resource.RLIMIT_AS
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    unlimited = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (pages * resource.getpagesize() + (256 << 20), unlimited[1]))
    try:
        with pytest.raises(OperatorFailed, match=r"process\(\) raised MemoryError"):
            cluster.stream("Rogue", "hungry").send([rogue("hungry", "hungry")])
        cluster.stream("Tally", "beside hungry").send([{"k": "a", "v": 1}])
    finally:
        resource.prlimit(pid, limit, unlimited)
    cluster.stream("Rogue", "fed").send([rogue("hungry")])
    assert n_of(cluster, "hungry") == 1, "nothing of the batch that failed is there"


def test_a_partition_whose_operator_is_stuck_moves_away_as_it_was(cluster: LocalCluster) -> None:
    key = keys_of(0)[0]
    before = n_of(cluster, key)
    with pytest.raises(OperatorStuck):
        cluster.stream("Rogue", "before-move").send([rogue(key, "sleep30")])
    report = cluster.migrate("Rogue", [0], to="edge-0").wait()
    assert report.state == "COMPLETED", report.moves[0].error
    cluster.stream("Rogue", "after-move").send([rogue(key)])
    assert n_of(cluster, key) == before + 1


def test_a_fence_waits_for_a_stuck_batch_no_longer_than_the_batch_may_take(cluster: LocalCluster) -> None:
    key = keys_of(1)[0]
    errors: list[StateflowError] = []

    def send() -> None:
        try:
            cluster.stream("Rogue", "fenced").send([rogue(key, "sleep20")])
        except StateflowError as error:
            errors.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    report = cluster.migrate("Rogue", [1], to="edge-0", strategy="pause-and-copy").wait()
    sending.join(30)
    assert report.state == "COMPLETED", report.moves[0].error
    assert isinstance(errors[0], OperatorStuck)


def test_sigterm_ends_a_replica_whose_operators_never_come_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends a replica whose operators come back neither from a batch nor from `close`, within its setting.

    The replica measures that itself, so that a busy machine changes nothing.
    """
    monkeypatch.setenv("STATEFLOW_REPLICA_STOP_TIMEOUT_S", f"{STOP_S}")
    with LocalCluster(Rogue, Unclosable, partitions=2, data_dir=tmp_path) as cluster:
        cluster.stream("Unclosable", "s").send([rogue("a")])
        cluster.stream("Rogue", "s").send([rogue("a")])
        in_hand = tmp_path / "in-hand"
        stream = cluster.stream("Rogue", "s2")
        sending = threading.Thread(target=stream.send, args=([rogue("a", str(in_hand))],), daemon=True)
        sending.start()
        eventually(in_hand.exists, "the batch is in hand")
        process = cluster.processes["local-0"]
        process.ask_to_stop()
        eventually(lambda: not process.running, "it ended", timeout_s=60)
        told = re.search(rf"shutdown (?:took (\S+) s of at most|exceeded) {STOP_S} s", log_of(cluster, "local-0"))
        assert told is not None, "it was not killed, and says how long it took"
        assert float(told[1] or STOP_S) <= STOP_S
        cluster.restart("local-0")
        sending.join(60)
        assert n_of(cluster, "a") == 2, "what was given up then is applied when it is asked for again"


def test_a_batch_that_ends_every_process_is_refused_and_the_rest_is_served(tmp_path: Any) -> None:
    with LocalCluster(Rogue, Tally, partitions=2, data_dir=tmp_path) as cluster:
        (deadly,), (other,) = keys_of(0), keys_of(1)
        stream, errors = cluster.stream("Rogue", "s"), list[StateflowError]()

        def send() -> None:
            try:
                stream.send([rogue(deadly, "die"), rogue(other)])
            except StateflowError as error:
                errors.append(error)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        for _ in range(ENDS_MAX):
            process = cluster.processes["local-0"]
            eventually(lambda process=process: not process.running, "the batch has ended the process")
            cluster.restart("local-0")
        sending.join(60)
        (error,) = errors
        assert isinstance(error, OperatorCrashed)
        assert (error.where["operator"], error.where["partition"]) == ("Rogue", "0")
        assert "the last process ended while it ran batch 0 of source s" in log_of(cluster, "local-0")
        cluster.stream("Tally", "s").send([{"k": "a", "v": 1}])
        cluster.stream("Rogue", "another").send([rogue(deadly), rogue(other)])
        assert n_of(cluster, deadly) == 1, "nothing of the batch that ends the process is there"


def test_an_operator_that_does_not_open_says_so(cluster: LocalCluster) -> None:
    with pytest.raises(OperatorStuck, match=r"open\(\) did not return in time") as caught:
        cluster.stream("Unopenable", "s").send([rogue("a")])
    assert "in open" in caught.value.where["traceback"]


def test_an_operator_that_does_not_close_holds_up_no_move(cluster: LocalCluster) -> None:
    cluster.stream("Unclosable", "s").send([rogue(key) for key in (*keys_of(0), *keys_of(1))])
    assert cluster.migrate("Unclosable", [0, 1], to="edge-0").wait().state == "COMPLETED"
    assert cluster.migrate("Unclosable", [0, 1], to="cloud-0").wait().state == "COMPLETED"


def test_a_child_of_an_operator_that_forks_writes_nothing(cluster: LocalCluster) -> None:
    def opened() -> StreamClient | None:
        try:
            return cluster.stream("Rogue", "forks")
        except OperatorStuck:  # what hung before is not over yet
            return None

    stream = eventually(opened, "every partition is served again")
    assert stream is not None
    stream.send([rogue("forks", "fork")])
    stream.send([rogue("forks")])
    assert n_of(cluster, "forks") == 2
