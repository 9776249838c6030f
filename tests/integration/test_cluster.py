"""Real processes: streaming, moves, deaths and mistakes, always against a plain model of the operator."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow import Context, Operator
from stateflow.checkpoint import CheckpointStore
from stateflow.client import StreamClient
from stateflow.errors import (
    AlreadyDeployed,
    AlreadyThere,
    DeclarationError,
    EncodeError,
    InvalidArgument,
    KeyColumnMissing,
    MoveConflict,
    MoveUnknown,
    NullKey,
    OperatorFailed,
    OperatorNotDeployed,
    OperatorNotImportable,
    OutputMismatch,
    SourceTaken,
    StaleBatch,
    StateflowError,
    Unavailable,
    UnknownPartition,
    UnknownSite,
    UnknownState,
)
from stateflow.ledger import Board, Ledger
from stateflow.partition import layout
from stateflow.partitioner import partition_of
from stateflow.settings import RouterSettings
from stateflow.state import scan_state
from stateflow.storage import RocksEngine
from stateflow.testing import LocalCluster
from stateflow.types import STRATEGIES, PartitionId
from tests.integration.operators import EXITS, RAISES, UNENCODABLE, WRONG_OUTPUT, Blob, Reading, Tally
from tests.integration.support import (
    Model,
    Streaming,
    check_owners,
    eventually,
    manifests,
    one_line,
    outputs,
    read,
    rows_of,
    settled,
    wait_alive,
)

pytestmark = pytest.mark.processes
PARTITIONS = 8
ALL = list(range(PARTITIONS))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One cluster for all: each test streams under a source and a key prefix of its own."""
    with LocalCluster(
        Tally,
        Blob,
        Reading,
        sites={"cloud": 1, "edge": 1},
        partitions=PARTITIONS,
        data_dir=tmp_path_factory.mktemp("cluster"),
        deploy_to=("cloud",),
        checkpoint_interval_s=0,
    ) as cluster:
        yield cluster


@pytest.fixture
def stream(local: LocalCluster, request: pytest.FixtureRequest) -> StreamClient:
    return local.stream("Tally", source=request.node.name[:60])


def move_all(local: LocalCluster, to: str, **options: Any) -> None:
    try:
        report = local.migrate("Tally", ALL, to, **options).wait()
    except AlreadyThere:
        return
    assert report.state == "COMPLETED", [move.error for move in report.moves]


# -- streaming and reading ----------------------------------------------------------------------------------


def test_outputs_and_state_are_those_of_the_plain_model(local: LocalCluster, stream: StreamClient) -> None:
    model = Model()
    for batch in range(10):
        rows = rows_of("plain-", batch)
        assert outputs(stream.send(rows)) == model.apply(rows)
    assert stream.send([]) == []
    model.check(local.cluster, keys="plain-")
    check_owners(local)


def test_what_is_read_says_its_partition(local: LocalCluster, stream: StreamClient) -> None:
    stream.send(rows_of("read-", 0))
    table = local.cluster.read_state("Tally", "n")
    assert table.column_names == ["key", "map_key", "value", "partition"]
    assert all(partition_of(row["key"], PARTITIONS) == row["partition"] for row in table.to_pylist())
    assert local.cluster.read_state("Reading", "n").column_names == table.column_names, "an empty state too"


def test_large_states_are_read_whole(local: LocalCluster) -> None:
    """States that exceed one message are read whole."""
    stream = local.stream("Blob", source="large")
    rows = [*({"k": f"b{n}", "size": 1_000_000} for n in range(40)), {"k": "one entry", "size": 9 << 20}]
    stream.send(rows)
    assert {key: len(value) for (key, _), value in read(local.cluster, "Blob", "blob").items()} == {
        row["k"]: row["size"] for row in rows
    }
    (row,) = local.cluster.read_state("Blob", "blob", key="one entry").to_pylist()
    assert len(row["value"]) == 9 << 20


def test_a_row_larger_than_a_message(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="wide")
    (row,) = stream.send([{"k": "wide-1", "v": 1, "text": "x" * 6_000_000}])
    assert row == {"k": "wide-1", "n": 1, "total": 1}


# -- resending ----------------------------------------------------------------------------------------------


def test_resending_a_sequence_changes_nothing(local: LocalCluster, stream: StreamClient) -> None:
    model = Model()
    rows = rows_of("again-", 0)
    first = stream.send(rows)
    model.apply(rows)
    assert stream.send(rows, sequence=0) == first
    assert stream.position == 0
    other = local.stream("Tally", source=stream.source)
    assert other.position == 0, "a client that starts again knows where it was"
    assert other.send(rows, sequence=0) == first
    rows = rows_of("again-", 1)
    assert outputs(other.send(rows)) == model.apply(rows)
    with pytest.raises(StaleBatch) as caught:
        other.send(rows_of("again-", 0), sequence=0)
    one_line(caught.value)
    with pytest.raises(SourceTaken) as taken:
        stream.send(rows, sequence=1)
    one_line(taken.value)
    model.check(local.cluster, keys="again-")


# -- mistakes -----------------------------------------------------------------------------------------------

BAD_ROWS: dict[str, tuple[Any, type[StateflowError]]] = {
    "process raises": ({"k": "bad-1", "v": RAISES}, OperatorFailed),
    "process exits": ({"k": "bad-1", "v": EXITS}, OperatorFailed),
    "value does not fit its state": ({"k": "bad-1", "v": UNENCODABLE}, EncodeError),
    "output does not fit its schema": ({"k": "bad-1", "v": WRONG_OUTPUT}, OutputMismatch),
    "null key": ({"k": None, "v": 1}, NullKey),
    "no key": ({"v": 1}, KeyColumnMissing),
    "columns that do not fit together": ({"k": "bad-1", "v": "one"}, InvalidArgument),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_mistake_is_named_in_one_line_and_nothing_is_lost(local: LocalCluster, what: str) -> None:
    bad, error = BAD_ROWS[what]
    model = Model()
    prefix = f"bad{list(BAD_ROWS).index(what)}-"
    good = [{"k": f"{prefix}{n}", "v": n} for n in range(20)]
    stream = local.stream("Tally", source=prefix)
    model.apply(good)
    stream.send(good)
    home = partition_of(f"{prefix}1", PARTITIONS)
    near = [row for row in good if partition_of(row["k"], PARTITIONS) == home]
    if bad.get("k") == "bad-1":
        bad = {**bad, "k": f"{prefix}1"}
    for _ in range(2):
        with pytest.raises(StateflowError) as caught:
            stream.send([*near, bad])
        assert type(caught.value) is error
        one_line(caught.value)
        model.check(local.cluster, keys=prefix)
    assert outputs(stream.send(near)) == model.apply(near)
    model.check(local.cluster, keys=prefix)


class Ghost(Operator):
    """An operator whose module is renamed below to one that no replica can import."""

    key = "k"
    output = "k string"

    def process(self, row: Any, ctx: Context) -> None:
        return None


class Other(Tally):
    pass


def test_mistakes_of_control(local: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = local.cluster
    monkeypatch.setattr(Ghost, "__module__", "module_that_only_the_client_has")
    calls: dict[str, tuple[Any, type[StateflowError], str]] = {
        "site": (lambda: cluster.migrate("Tally", [0], "moon"), UnknownSite, "cloud, edge"),
        "partition": (lambda: cluster.migrate("Tally", [99], "edge"), UnknownPartition, "0 to 7"),
        "operator": (lambda: cluster.migrate("Tully", [0], "edge"), OperatorNotDeployed, "Tally"),
        "stream": (lambda: local.stream("Tully", "s"), OperatorNotDeployed, "stateflow deploy"),
        "state": (lambda: cluster.read_state("Tally", "m"), UnknownState, "by_tag"),
        "no partition": (lambda: cluster.migrate("Tally", [], "edge"), InvalidArgument, "at least one"),
        "a number": (lambda: cluster.migrate("Tally", 20, "edge"), InvalidArgument, "pass partitions=[20]"),  # type: ignore[arg-type]
        "text": (lambda: cluster.restore("Tally", "3"), InvalidArgument, "is not a list of partitions"),  # type: ignore[arg-type]
        "below 0": (lambda: cluster.migrate("Tally", [-1], "edge"), UnknownPartition, "count from 0"),
        "an instance": (lambda: cluster.deploy(Tally(), 4), DeclarationError, "pass the class itself: Tally"),  # type: ignore[arg-type]
        "budget of a copy behind the fence": (
            lambda: cluster.migrate("Tally", [0], "edge", max_pause_ms=50, strategy="fluid"),
            InvalidArgument,
            "warm-up",
        ),
        "replica": (lambda: cluster.drain("edge-9"), UnknownSite, "edge-0"),
        "too many standbys": (lambda: cluster.standby("Tally", 2), InvalidArgument, "3 replicas"),
        "checkpoint": (lambda: cluster.checkpoint("Tully"), OperatorNotDeployed, "Tully"),
        "no such reconfiguration": (lambda: cluster.retry("nothing"), MoveUnknown, "reconfig list"),
        "import": (lambda: cluster.deploy(Ghost, 4), OperatorNotImportable, "module_that_only_the_client_has"),
        "other version": (lambda: cluster.deploy(Other, 4, name="Tally"), AlreadyDeployed, "another name"),
        "other partitions": (lambda: cluster.deploy(Tally, 4), AlreadyDeployed, "same partitions"),
        "deploy to a site": (lambda: cluster.deploy(Other, 4, sites=["moon"]), UnknownSite, "moon"),
    }
    for what, (call, error, said) in calls.items():
        with pytest.raises(StateflowError) as caught:
            call()
        assert type(caught.value) is error, what
        assert said in one_line(caught.value), what
    assert {operator.name for operator in cluster.status().operators} == {"Tally", "Blob", "Reading"}
    cluster.deploy(Tally, PARTITIONS)  # the same once more is no error
    check_owners(local)


# -- moving -------------------------------------------------------------------------------------------------


def test_to_and_fro_while_it_streams(local: LocalCluster, stream: StreamClient) -> None:
    move_all(local, "cloud")
    with Streaming(stream, "fro-") as streaming:
        streaming.more(2)
        for to in ("edge", "cloud", "edge", "cloud"):
            report = local.migrate("Tally", ALL, to).wait()
            assert report.state == "COMPLETED", [move.error for move in report.moves]
            assert {move.state for move in report.moves} == {"COMPLETED"}
            assert all(move.digest and move.pause_ms > 0 for move in report.moves)
            streaming.more(2)
        reused = sum(move.bytes_reused for move in report.moves)
    assert reused > 0, "the files of an earlier stay are not sent again"
    streaming.model.check(local.cluster, keys="fro-")
    check_owners(local)
    (tally,) = [o for o in local.cluster.status().operators if o.name == "Tally"]
    assert set(tally.owners) == {"cloud-0"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_moves_state_under_load(local: LocalCluster, strategy: str) -> None:
    stream = local.stream("Tally", source=f"by-{strategy}")
    move_all(local, "cloud")
    with Streaming(stream, f"by-{strategy}-") as streaming:
        streaming.more(2)
        for to, order in (("edge", "hot-first"), ("cloud", "hot-last")):
            report = local.migrate("Tally", ALL, to, strategy=strategy, order=order, max_bandwidth=50e6).wait()
            assert report.state == "COMPLETED", [move.error for move in report.moves]
            assert strategy in (report.strategy, "auto")
            assert all(move.pause_ms > 0 for move in report.moves)
            streaming.more(1)
    streaming.model.check(local.cluster, keys=f"by-{strategy}-")
    check_owners(local)


def test_pause_resume_cancel_and_retry(local: LocalCluster) -> None:
    move_all(local, "cloud")
    move = stalled(local, [0], "edge")
    with pytest.raises(MoveConflict, match=move.id):
        local.migrate("Tally", [0], "edge")
    assert local.cluster.pause(move.id).report.state == "PAUSED"
    assert local.cluster.resume(move.id).report.state == "RUNNING"
    with pytest.raises(MoveConflict):
        local.cluster.retry(move.id)
    local.cluster.cancel(move.id)
    assert move.wait().state == "CANCELLED"
    with pytest.raises(MoveConflict, match="--cancelled"):
        local.cluster.retry(move.id)
    again = local.cluster.retry(move.id, cancelled=True)
    assert again.id != move.id
    assert [(m.partition, m.target) for m in again.report.moves] == [(0, "edge-0")]
    local.cluster.cancel(again.id)
    again.wait()
    assert [r.id for r in local.cluster.reconfigurations(2)] == [again.id, move.id]
    local.kill("controller")
    local.restart("controller")
    with pytest.raises(MoveConflict, match="is CANCELLED"):
        local.cluster.resume(move.id)
    wait_alive(local, "cloud-0", "edge-0")
    after = local.cluster.retry(move.id, cancelled=True)
    assert [(m.partition, m.target) for m in after.report.moves] == [(0, "edge-0")]
    local.cluster.cancel(after.id)
    after.wait()
    check_owners(local)


def test_a_batch_is_limited_edited_paused_and_cancelled_whoever_leads(local: LocalCluster) -> None:
    move_all(local, "cloud")
    move = local.migrate("Tally", ALL, "edge", max_pause_ms=1e-6, patience_s=600.0, limit=1)

    def stand(**counts: int) -> bool:
        found = local.cluster.reconfiguration(move.id).counts()
        return {name: count for name, count in found.items() if count} == counts

    eventually(lambda: stand(waiting=7, in_progress=1), "one at a time")
    assert local.cluster.edit(move.id, limit=3).report.limit == 3
    eventually(lambda: stand(waiting=5, in_progress=3), "three at a time")
    local.cluster.pause(move.id)
    local.kill("controller")
    local.restart("controller")
    wait_alive(local, "cloud-0", "edge-0")
    report = local.cluster.reconfiguration(move.id)
    assert (report.state, report.limit) == ("PAUSED", 3)
    assert stand(waiting=8), "nothing of it goes on"
    local.cluster.resume(move.id)
    eventually(lambda: stand(waiting=5, in_progress=3), "it goes on, three at a time")
    local.cluster.cancel(move.id)
    assert move.wait().state == "CANCELLED"
    assert stand(cancelled=8)
    with Ledger(local.ledger) as ledger:
        found = Board(ledger).batch(f"reconfiguration/{move.id}")
        assert (found["status"], found["total_entities"], found["cancelled"]) == ("CANCELLED", 8, 8)
        assert ledger.verify() == []
    again = local.cluster.retry(move.id, cancelled=True)
    assert local.cluster.edit(again.id, limit=0, per_node=2).report.per_node == 2
    local.cluster.cancel(again.id)
    again.wait()
    check_owners(local)


def test_clients_may_start_and_states_be_read_while_partitions_move(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="starting")
    rows = rows_of("starting-", 0)
    stream.send(rows)
    model = Model()
    model.apply(rows)
    stop = threading.Event()
    failed: list[BaseException] = []

    def keep_moving() -> None:
        try:
            while not stop.is_set():
                for to in ("edge", "cloud"):
                    move_all(local, to)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    mover = threading.Thread(target=keep_moving, daemon=True)
    mover.start()
    try:
        for _ in range(20):
            assert local.stream("Tally", source="starting").position == 0
            model.check(local.cluster, keys="starting-")
    finally:
        stop.set()
        mover.join(60)
    assert not failed, failed


def test_a_budget_that_cannot_be_met_aborts_and_the_source_serves(local: LocalCluster, stream: StreamClient) -> None:
    move_all(local, "cloud")
    with Streaming(stream, "budget-") as streaming:
        report = local.migrate("Tally", [0, 1], "edge", max_pause_ms=0.0001, patience_s=0.5).wait()
        streaming.more(2)
    assert report.state == "FAILED"
    assert {move.state for move in report.moves} == {"ABORTED"}
    assert all(move.error.startswith("budget_unreachable: ") for move in report.moves)
    streaming.model.check(local.cluster, keys="budget-")
    check_owners(local)
    move_all(local, "edge")
    move_all(local, "cloud")


def stalled(local: LocalCluster, partitions: list[int], to: str) -> Any:
    """Begins a move whose pause budget is out of reach, and returns it once every target follows its source."""
    move = local.migrate("Tally", partitions, to, max_pause_ms=0.0001)
    for report in move.progress():
        if all(each.state == "CATCHING_UP" for each in report.moves):
            return move
    raise AssertionError(report)


def test_a_cancel_that_comes_at_once_leaves_nothing_behind(local: LocalCluster) -> None:
    """Prepare and Cancel race to the target; whichever wins, the partition can move then and no log has a traceback."""
    logs = [local.data_dir / f"{name}.log" for name in ("edge-0", "cloud-0", "controller")]
    read = [len(log.read_text()) for log in logs]
    move_all(local, "cloud")
    for _ in range(15):
        move = local.migrate("Tally", ALL, "edge", max_pause_ms=0.0001)
        local.cluster.cancel(move.id)
        assert {each.state for each in move.wait().moves} == {"ABORTED"}
    address = next(r.address for r in local.cluster.status().replicas if r.name == "edge-0")

    def nothing_warms() -> bool:
        return not [v for v in local.cluster.replica_stats(address).partitions if v.state == "WARMING"]

    eventually(nothing_warms, "nothing warms at the target")
    for log, before in zip(logs, read, strict=True):
        said = log.read_text()[before:]
        assert "Traceback" not in said, said
    move_all(local, "edge")
    move_all(local, "cloud")


def test_of_two_moves_of_one_partition_at_once_one_is_refused(local: LocalCluster) -> None:
    move_all(local, "cloud")
    outcomes: list[Any] = []
    barrier = threading.Barrier(4)

    def migrate() -> None:
        barrier.wait()
        try:
            outcomes.append(local.migrate("Tally", ALL, "edge").wait())
        except StateflowError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=migrate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    refused = [each for each in outcomes if isinstance(each, MoveConflict | AlreadyThere)]
    reports = [each for each in outcomes if not isinstance(each, StateflowError)]
    assert len(refused) + len(reports) == 4, outcomes
    assert {each.state for each in reports} == {"COMPLETED"}
    assert sum(len(each.moves) for each in reports) == PARTITIONS, "each partition moved once"
    check_owners(local)
    move_all(local, "cloud")


def test_the_same_deployment_twice_at_once(local: LocalCluster) -> None:
    errors: list[StateflowError] = []

    def deploy() -> None:
        try:
            local.cluster.deploy(Tally, 4, name="Twice")
        except StateflowError as error:
            errors.append(error)

    threads = [threading.Thread(target=deploy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    check_owners(local, "Twice")


# -- deaths -------------------------------------------------------------------------------------------------


def test_the_target_is_killed_while_it_warms(local: LocalCluster, stream: StreamClient) -> None:
    move_all(local, "cloud")
    with Streaming(stream, "warm-") as streaming:
        move = stalled(local, [0, 4], "edge")
        local.kill("edge-0")
        report = move.wait()
        assert {each.state for each in report.moves} == {"ABORTED"}
        assert all(each.error.startswith("unavailable: ") for each in report.moves)
        streaming.more(2)
        local.restart("edge-0")
        wait_alive(local, "edge-0")
        move_all(local, "edge")
        streaming.more(2)
    streaming.model.check(local.cluster, keys="warm-")
    check_owners(local)
    move_all(local, "cloud")


def test_the_source_is_killed_while_the_target_follows(local: LocalCluster, stream: StreamClient) -> None:
    move_all(local, "cloud")
    with Streaming(stream, "source-") as streaming:
        move = stalled(local, [0, 4], "edge")
        local.kill("cloud-0")
        report = move.wait()
        assert {each.state for each in report.moves} == {"ABORTED"}
        local.restart("cloud-0")
        streaming.more(2)
    wait_alive(local, "cloud-0")
    streaming.model.check(local.cluster, keys="source-")
    check_owners(local)
    move_all(local, "edge")
    move_all(local, "cloud")


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_the_controller_is_killed_during_moves(local: LocalCluster, after: int) -> None:
    """Moves end and the stream goes on when the controller dies before they begin, at their seal, or after some ended.

    Args:
        after: reports of progress before the kill.
    """
    stream = local.stream("Tally", source=f"controller-{after}")
    to = "edge" if after % 2 else "cloud"
    move_all(local, "cloud" if to == "edge" else "edge")
    with Streaming(stream, f"c{after}-") as streaming:
        streaming.more(1)
        move = local.migrate("Tally", ALL, to)
        reports = move.progress()
        try:
            for _ in range(after):
                next(reports)
        except StopIteration:
            pass
        local.kill("controller")
        before = streaming.batches
        streaming.more(2)
        assert streaming.batches > before, "the stream goes on without a controller"
        local.restart("controller")
        eventually(lambda: settled(local), "every move has ended")
        wait_alive(local, "cloud-0", "edge-0")
        check_owners(local)
        streaming.more(2)
    streaming.model.check(local.cluster, keys=f"c{after}-")
    move_all(local, "edge")
    move_all(local, "cloud")


def test_everything_is_killed_during_moves(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="all")
    model = Model()
    rows = rows_of("all-", 0)
    stream.send(rows)
    model.apply(rows)
    for round_ in range(3):
        to = "edge" if round_ % 2 == 0 else "cloud"
        with contextlib.suppress(AlreadyThere):  # the last one was rolled back
            local.migrate("Tally", ALL, to)
        for name in ("cloud-0", "edge-0", "controller"):
            os.kill(local.processes[name].pid, signal.SIGKILL)
        for name in ("controller", "cloud-0", "edge-0"):
            local.kill(name)
            local.restart(name)
        wait_alive(local, "cloud-0", "edge-0")
        eventually(lambda: settled(local), "every move has ended")
        check_owners(local)
        rows = rows_of("all-", round_ + 1)
        assert outputs(stream.send(rows)) == model.apply(rows)
    model.check(local.cluster, keys="all-")
    move_all(local, "cloud")


def test_a_dead_owner_is_told_after_the_time_out_and_the_batch_can_be_sent_again(local: LocalCluster) -> None:
    stream = StreamClient(
        local.address, "Tally", "dead", settings=RouterSettings(unavailable_timeout_s=0.3, backoff_max_s=0.1)
    )
    move_all(local, "cloud")
    local.kill("cloud-0")
    with pytest.raises(Unavailable) as caught:
        stream.send([{"k": "dead", "v": 1}])
    assert "Tally/" in one_line(caught.value)
    assert "cloud-0" in one_line(caught.value)
    local.restart("cloud-0")
    sent = eventually(lambda: stream.send([{"k": "dead", "v": 1}]), "its owner serves again")
    assert sent == [{"k": "dead", "n": 1, "total": 1}]
    wait_alive(local, "cloud-0")


# -- checkpoints --------------------------------------------------------------------------------------------


def test_a_checkpoint_on_demand_restores_to_the_same_state(local: LocalCluster, tmp_path: Path) -> None:
    stream = local.stream("Tally", source="checkpoint")
    stream.send(rows_of("check-", 0))
    first = local.cluster.checkpoint("Tally")
    assert first.partitions == PARTITIONS
    assert first.bytes_new > 0
    again = local.cluster.checkpoint("Tally")
    assert (again.partitions, again.bytes_new) == (PARTITIONS, 0), "nothing changed, nothing is sent"
    expected = read(local.cluster, "Tally", "n")
    stream.send(rows_of("check-", 1))
    store = CheckpointStore(str(local.data_dir / "checkpoints"))
    restored: dict[Any, Any] = {}
    for partition in ALL:
        manifest = next(store.newest(PartitionId("Tally", partition)))
        store.restore(manifest, tmp_path / str(partition))
        db = RocksEngine(8 << 20, 8 << 20).open(tmp_path / str(partition))
        restored |= {(key, entry): value for key, entry, value in scan_state(vars(Tally)["n"], db)}
        for source, position in manifest.positions.items():
            stored = db.get(layout.POSITION + source.encode())
            assert stored is not None
            assert layout.Position.decode(stored).batch == position
        db.close()
    assert restored == expected


def test_checkpoints_at_once_do_not_disturb_each_other(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="checkpoints")
    errors: list[StateflowError] = []

    def checkpoint() -> None:
        try:
            local.cluster.checkpoint("Tally")
        except StateflowError as error:
            errors.append(error)

    for batch in range(3):
        stream.send(rows_of("checks-", batch))
        threads = [threading.Thread(target=checkpoint) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert errors == []


def test_checkpoints_while_partitions_move(local: LocalCluster) -> None:
    for to in ("edge", "cloud"):
        move = local.migrate("Tally", ALL, to)
        for _ in range(3):
            local.cluster.checkpoint("Tally")
        assert move.wait().state == "COMPLETED"


def test_checkpoints_appear_by_themselves_and_a_cluster_starts_and_stops(tmp_path: Path) -> None:
    with LocalCluster(
        Tally, sites={"solo": 1}, partitions=2, data_dir=tmp_path / "c", checkpoint_interval_s=0.2
    ) as cluster:
        pids = [process.pid for process in cluster.processes.values()]
        stream = cluster.stream("Tally", source="s")
        model = Model()
        rows = rows_of("p-", 0)
        assert outputs(stream.send(rows)) == model.apply(rows)
        before = len(eventually(lambda: manifests(cluster.data_dir, "Tally"), "a checkpoint"))
        stream.send(rows_of("p-", 1))
        model.apply(rows_of("p-", 1))
        eventually(lambda: len(manifests(cluster.data_dir, "Tally")) > before, "one more checkpoint")
    assert not any(_is_running(pid) for pid in pids)
    with LocalCluster(Tally, sites={"solo": 1}, partitions=2, data_dir=tmp_path / "c") as cluster:
        model.check(cluster.cluster)
        assert cluster.stream("Tally", source="s").position == 1


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_site_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        LocalCluster(sites={"no/site": 1})
    with pytest.raises(InvalidArgument):
        LocalCluster(sites={"empty": 0})
