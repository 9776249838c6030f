"""Forwarding on real processes and disks: rows for unreachable partitions are stored and sent on once, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stateflow.client import Cluster, ForwardingClient
from stateflow.errors import (
    DataDirLocked,
    InvalidArgument,
    OperatorFailed,
    OutboxForeign,
    OutboxFull,
    SourceTaken,
    Unavailable,
)
from stateflow.testing import LocalCluster
from tests.integration.operators import RAISES, Tally
from tests.integration.support import Model, ending, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
PARTITIONS = 8


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    """Half of the partitions at the edge, half in the cloud; neither replica takes over from the other."""
    with LocalCluster(sites={"edge": 1, "cloud": 1}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        local.cluster.deploy(Tally, PARTITIONS, failover="manual")
        yield local


def client(
    local: LocalCluster, directory: Path, source: str = "gateway", patience_s: float = 0.5, **options: object
) -> ForwardingClient:
    return local.cluster.forwarding("Tally", source, directory / "outbox", patience_s=patience_s, **options)


def cloud_partitions(local: LocalCluster) -> set[int]:
    (operator,) = local.cluster.status().operators
    return {number for number, owner in enumerate(operator.owners) if owner == "cloud-0"}


def test_what_cannot_be_reached_is_stored_and_goes_on_in_order(local: LocalCluster, tmp_path: Path) -> None:
    model, came = Model(), []
    wanted = []
    away = cloud_partitions(local)
    with client(local, tmp_path) as stream:
        wanted += model.apply(rows_of("k", 0))
        came += outputs(stream.send(rows_of("k", 0)))
        assert came == wanted
        assert not stream.waiting()
        local.freeze("cloud-0")
        for batch in range(1, 6):
            wanted += model.apply(rows_of("k", batch))
            at_once = outputs(stream.send(rows_of("k", batch)))
            assert at_once, "the edge waits for nobody"
            came += at_once
        waiting = stream.waiting()
        assert set(waiting.parts) == away
        assert set(waiting.parts.values()) == {5}
        assert waiting.bytes > 0
        assert set(waiting.errors) <= away
        assert any(isinstance(each, Unavailable) for each in waiting.errors.values())
        assert stream.forwarded() == []
        with pytest.raises(Unavailable):
            stream.flush(0.2)
        with ThreadPoolExecutor(1) as aside:
            other = client(local, tmp_path / "other", "other")
            other.send(rows_of("o", 0))
            waits = aside.submit(other.flush)
            other.close()
            with pytest.raises((InvalidArgument, Unavailable)):
                waits.result(30)  # its batches are not forwarded any more
        local.thaw("cloud-0")
        stream.flush(60)
        came += outputs(stream.forwarded())
        assert sorted(came) == sorted(wanted), "each output once"
        assert stream.forwarded() == []
        assert not stream.waiting()
        assert stream.waiting().bytes > 0, "what was sent last is forgotten with the next batch"
    model.check(local.cluster, keys="k")


def test_a_client_begins_where_nobody_answers(local: LocalCluster, tmp_path: Path) -> None:
    """A restarted gateway at a site that is cut off begins a client without a controller and without the cloud."""
    model, away = Model(), cloud_partitions(local)
    with client(local, tmp_path) as stream:
        model.apply(rows_of("k", 0))
        stream.send(rows_of("k", 0))
    local.kill("controller")
    local.freeze("cloud-0")
    for batch in (1, 2):
        with client(local, tmp_path) as stream:
            model.apply(rows_of("k", batch))
            stream.send(rows_of("k", batch))
            eventually(lambda: set(stream.waiting().parts) == away, "the edge serves alone")
            assert set(stream.waiting().parts.values()) == {batch}
    local.thaw("cloud-0")
    local.restart("controller")
    with client(local, tmp_path) as stream:
        model.apply(rows_of("k", 3))
        stream.send(rows_of("k", 3))
        stream.flush(60)
    model.check(local.cluster)


KILLED = """
import sys
from stateflow.client import Cluster
from tests.integration.support import rows_of

stream = Cluster(sys.argv[1]).forwarding("Tally", "gateway", sys.argv[2], patience_s=0.3)
print(stream._outbox.newest, flush=True)
for batch in range(stream._outbox.newest + 1, 10_000):
    stream.send(rows_of("k", batch))
    print(batch, flush=True)
"""


def test_a_client_that_is_killed_again_and_again_sends_everything_once(local: LocalCluster, tmp_path: Path) -> None:
    """A client that is killed again and again, while owners come and go, sends everything once.

    What it printed as sent is there, and at most one batch more.
    """
    said = -1
    for round_ in range(6):
        command = [sys.executable, "-c", KILLED, local.address, str(tmp_path / "outbox")]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with ending(subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | path)) as program:
            assert program.stdout is not None
            begun = int(program.stdout.readline())
            assert said <= begun <= said + 1, "what was stored, and no more"
            if round_ % 3 == 1:
                local.freeze("cloud-0")
            elif round_ % 3 == 2:
                local.kill("edge-0")
            for _ in range(3 + round_):
                said = int(program.stdout.readline())
            program.send_signal(signal.SIGKILL)
            rest = program.stdout.read().split()
            said = int(rest[-1]) if rest else said
        if round_ % 3 == 1:
            local.thaw("cloud-0")
        elif round_ % 3 == 2:
            local.restart("edge-0")
    with client(local, tmp_path) as stream:
        stream.flush(60)
        newest = stream._outbox.newest
        assert said <= newest <= said + 1
    model = Model()
    for batch in range(newest + 1):
        model.apply(rows_of("k", batch))
    model.check(local.cluster)


def test_rows_that_are_refused_hold_up_nobody(local: LocalCluster, tmp_path: Path) -> None:
    model = Model()
    with client(local, tmp_path) as stream:
        with pytest.raises(OperatorFailed):
            stream.send([{"k": "a", "v": RAISES}])
        (refused,) = stream.refused()
        assert refused.rows == [{"k": "a", "v": RAISES}]
        assert isinstance(refused.error, OperatorFailed)
        local.freeze("cloud-0")
        local.freeze("edge-0")
        assert stream.send([{"k": "a", "v": RAISES}]) == []
        model.apply([{"k": "a", "v": 5}])
        assert stream.send([{"k": "a", "v": 5}]) == []
        local.thaw("cloud-0")
        local.thaw("edge-0")
        stream.flush(60)
        assert [each.rows for each in stream.refused()] == [[{"k": "a", "v": RAISES}]]
        assert outputs(stream.forwarded()) == [("a", 1, 5)]
    model.check(local.cluster)


def test_a_source_that_was_there_before_goes_on(local: LocalCluster, tmp_path: Path) -> None:
    """A new outbox goes on behind what another client sent under greater numbers, and the other way round."""
    model = Model()
    with local.stream("Tally", "gateway") as plain:
        for batch in range(5):
            assert outputs(plain.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
        with client(local, tmp_path) as stream:
            assert outputs(stream.send(rows_of("k", 5))) == model.apply(rows_of("k", 5))
            with pytest.raises(SourceTaken):
                plain.send(rows_of("k", 6))
            with local.stream("Tally", "gateway") as again:
                assert outputs(again.send(rows_of("k", 7))) == model.apply(rows_of("k", 7))
            with pytest.raises(SourceTaken):
                stream.send(rows_of("k", 8))
    model.check(local.cluster)


def test_what_no_outbox_is_for(local: LocalCluster, tmp_path: Path) -> None:
    with client(local, tmp_path) as stream:
        with pytest.raises(DataDirLocked):
            client(local, tmp_path)
        stream.send(rows_of("k", 0))
    with pytest.raises(OutboxForeign):
        local.cluster.forwarding("Tally", "another", tmp_path / "outbox")
    with pytest.raises(Unavailable):
        Cluster("127.0.0.1:1").forwarding("Tally", "gateway", tmp_path / "new")
    with client(local, tmp_path, outbox_bytes=20_000) as small:
        local.freeze("cloud-0")
        with pytest.raises(OutboxFull):
            for batch in range(1, 1000):
                small.send(rows_of("k", batch))
        local.thaw("cloud-0")
        small.flush(60)
        untaken = small.waiting().bytes
        assert small.forwarded()
        small.send(rows_of("k", batch))
        assert small.waiting().bytes < untaken, "what was taken is gone with the next batch"
    model = Model()
    for each in range(batch + 1):
        model.apply(rows_of("k", each))
    model.check(local.cluster)


def test_after_a_loss_is_accepted_every_partition_takes_rows(local: LocalCluster, tmp_path: Path) -> None:
    """After a loss is accepted, partitions that lost nothing take rows, too.

    They have taken what this client sent since it was made.
    """
    with client(local, tmp_path, patience_s=60) as stream:
        stream.send(rows_of("k", 0))
        local.cluster.savepoint("before", "Tally")
        stream.send(rows_of("k", 1))
    local.cluster.restore("Tally", savepoint="before")
    with client(local, tmp_path, patience_s=60) as stream:  # this client has no rows to send again
        for batch in (2, 3):
            assert stream.send(rows_of("k", batch)) == [], "they are stored: what was acknowledged is gone"
        assert {error.code for error in stream.waiting().errors.values()} == {"position_gap"}
        stream.accept_loss()
        stream.flush(60)
        for batch in (4, 5):
            assert len(stream.send(rows_of("k", batch))) == len(rows_of("k", batch))
        stream.accept_loss()  # nothing was lost
        assert len(stream.send(rows_of("k", 6))) == len(rows_of("k", 6))
    model = Model()
    for batch in (0, 2, 3, 4, 5, 6):
        model.apply(rows_of("k", batch))
    model.check(local.cluster)
