"""Runs of cells: a cluster of real processes behind proxies, a continuous stream, one move per cell."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.clients import ControllerClient
from stateflow.testing import LocalCluster
from tests.crash_matrix.proxy import Proxy, Trap
from tests.crash_matrix.proxy import signal as send_signal
from tests.crash_matrix.steps import Cell, Fault, Moment, Participant
from tests.integration.operators import Tally
from tests.integration.support import Streaming, check_owners, eventually, settled, wait_alive

PARTITIONS = 4
REPLICAS = ("cloud-0", "edge-0")
#: takes no part in moves; with ``acknowledge=standby`` it has a standby of each partition
SPARE = "spare-0"
#: ways in which replicas acknowledge batches, see ``STATEFLOW_REPLICA_ACKNOWLEDGE``
ACKNOWLEDGE = ("wal", "fsync", "standby")
AWAY_S = 1.0  # how long a paused or cut participant is
OUTAGE_S = 12.0  # longer than a hold
STEP_TIMEOUT_S = 20.0


class ProxiedCluster(LocalCluster):
    """A cluster whose every process is behind a proxy of its own.

    Args:
        standbys: adds the replica SPARE, and lets it have a standby of each partition.
    """

    def __init__(self, *, standbys: bool = False) -> None:
        sites, spare = {"cloud": 1, "edge": 1}, {"spare": 1} if standbys else {}
        first = tuple(sites) if standbys else ()
        super().__init__(Tally, sites=sites | spare, partitions=PARTITIONS, deploy_to=first, checkpoint_interval_s=0)
        names = ("controller", *(f"{site}-0" for site in sites | spare))
        self.standbys = standbys
        self._lock: sqlite3.Connection | None = None
        self.proxies = {name: Proxy(lambda name=name: self.processes[name].address) for name in names}

    def _replica_arguments(self, name: str) -> list[str]:
        self.address = self.proxies["controller"].address
        # standbys go to the replica with the fewest for its weight, and stay where a partition has data
        weight = ["--weight", "100"] if name == SPARE else []
        return [*super()._replica_arguments(name), "--advertise", self.proxies[name].address, *weight]

    def stop(self) -> None:
        super().stop()
        for proxy in self.proxies.values():
            proxy.close()

    def cut(self, name: str) -> None:
        """Cuts a process off: all connections to it and from it are held."""
        for other, proxy in self.proxies.items():
            proxy.hold(None if other == name else frozenset({self.processes[name].pid}))

    def lock_ledger(self) -> None:
        """Locks the ledger, so that no other process can write to it."""
        ledger = self.data_dir / "ledger.db"
        self._lock = sqlite3.connect(ledger, isolation_level=None, timeout=STEP_TIMEOUT_S, check_same_thread=False)
        self._lock.execute("BEGIN EXCLUSIVE")

    def heal(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        for proxy in self.proxies.values():
            proxy.heal()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a cell.

    ``move``: COMPLETED or ABORTED, "?" when unknown. ``longest_s``: the longest time of a batch. ``problem``: empty
    if all is well.
    """

    cell: Cell
    move: str
    longest_s: float
    problem: str = ""


@contextmanager
def matrix(acknowledge: str = "wal") -> Iterator[ProxiedCluster]:
    """Runs a cluster. ``acknowledge``: one of ACKNOWLEDGE."""
    mode = patch.dict(os.environ, {"STATEFLOW_REPLICA_ACKNOWLEDGE": acknowledge})
    standbys = acknowledge == "standby"
    with mode, ProxiedCluster(standbys=standbys) as local:
        if standbys:
            local.cluster.standby("Tally", 1)
        yield local


def run_cell(local: ProxiedCluster, cell: Cell, number: int) -> Outcome:
    """Runs a cell. Failures are reported in the outcome, not raised."""
    try:
        return _run(local, cell, number)
    except (AssertionError, StateflowError) as error:
        return Outcome(cell, "?", 0.0, f"{type(error).__name__}: {error}"[:500])
    finally:
        _mend(local)


def _run(local: ProxiedCluster, cell: Cell, number: int) -> Outcome:
    partition = number % PARTITIONS
    if local.standbys:
        eventually(lambda: followed(local), "each partition has a standby that follows")
        # standbys keep their connections: they would begin anew, by the calls that the trap waits for
        moving = frozenset(local.processes[name].pid for name in ("controller", *REPLICAS))
        for name in REPLICAS:
            local.proxies[name].reset(moving)
    else:
        for proxy in local.proxies.values():
            proxy.reset()
    source = _owner_of(local, partition)
    target = next(name for name in REPLICAS if name != source)
    names = {Participant.CONTROLLER: "controller", Participant.SOURCE: source, Participant.TARGET: target}
    victim = names.get(cell.participant, "")
    done = threading.Event()

    def spring() -> None:
        _strike(local, victim, cell.fault)
        done.set()

    prefix = f"c{number}-"
    stream = eventually(lambda: local.stream("Tally", source=f"cell-{number}"), "a client")
    with Streaming(stream, prefix) as streaming:
        streaming.more(1)
        proxy = local.proxies[names[cell.step.server]]
        proxy.trap = Trap(cell.step.method, Moment(cell.step.moment), spring)
        options: dict[str, Any] = {"max_pause_ms": 0.001} if cell.step.cancelled else {}
        migration = local.migrate("Tally", [partition], target, **options)
        if cell.step.cancelled:
            threading.Thread(target=_cancel, args=(local, migration.id), daemon=True).start()
        assert done.wait(STEP_TIMEOUT_S), f"the step was never seen: {cell.step}"
        if cell.fault is Fault.CRASH:
            local.restart(victim)
        else:
            time.sleep(OUTAGE_S if cell.fault is Fault.OUTAGE else AWAY_S)
        _mend(local)
        wait_alive(local, *REPLICAS)
        eventually(lambda: settled(local), "the move ends", 60)
        streaming.more(3)
    check_owners(local)
    streaming.model.check(local.cluster, keys=prefix)
    move = "COMPLETED" if _owner_of(local, partition) == target else "ABORTED"
    return Outcome(cell, move, streaming.longest_s)


def followed(local: ProxiedCluster) -> bool:
    """Tells whether SPARE follows the owner of every partition, so that a move has to copy what it moves."""
    standbys = local.cluster.status().standbys
    following = {each.partition for each in standbys if (each.replica, each.phase) == (SPARE, "CATCHING_UP")}
    return following == set(range(PARTITIONS)) and len(standbys) == PARTITIONS


def _owner_of(local: ProxiedCluster, partition: int) -> str:
    status = eventually(local.cluster.status, "the controller answers")
    (deployed,) = [o for o in status.operators if o.name == "Tally"]
    return deployed.owners[partition]


def _cancel(local: ProxiedCluster, reconfiguration: str) -> None:
    """Cancels a move from a thread of its own: a controller that was struck may not answer before it is mended.

    The move has begun by then: the target of one that waits for its turn is not told of the cancellation.
    """
    with contextlib.suppress(StateflowError):  # it may have been killed; a step seen means the request arrived
        eventually(lambda: _phase(local, reconfiguration) != "WAITING", "the move begins")
        ControllerClient(local.address).call("CancelReconfiguration", cpb.ReconfigurationRequest(id=reconfiguration))


def _phase(local: ProxiedCluster, reconfiguration: str) -> str:
    (move,) = local.cluster.reconfiguration(reconfiguration).moves
    return move.state


def _strike(local: ProxiedCluster, victim: str, fault: Fault) -> None:
    match fault:
        case Fault.CRASH:
            local.processes[victim].kill()
        case Fault.PAUSE:
            send_signal(local.processes[victim].pid, signal.SIGSTOP)
        case Fault.PARTITION:
            local.cut(victim)
        case Fault.OUTAGE:
            local.lock_ledger()


def _mend(local: ProxiedCluster) -> None:
    for proxy in local.proxies.values():
        proxy.trap = None
    local.heal()
    for name, process in local.processes.items():
        if process.running:
            send_signal(process.pid, signal.SIGCONT)
        else:
            local.restart(name)
