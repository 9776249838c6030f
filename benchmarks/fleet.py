"""TAKEOVER: time until the next decision when the leading controller is killed, at each stage of a move.

Two controllers share one ledger while rows stream. Right after the kill, a second move is requested, and requested
again until a controller has decided it. The experiment runs twice: ``apart``, with controllers that cannot see each
other's process, as on two machines, and ``together``, with controllers that can.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.ballast import OPERATOR, ROWS, rows
from benchmarks.load import Load, Source, correctness_of
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target, spread
from stateflow.client import Cluster, Reconfiguration
from stateflow.errors import StateflowError
from stateflow.ledger import LeaderLease, Ledger
from stateflow.security.plain import environment
from stateflow.settings import ControllerSettings
from stateflow.testing import LocalCluster
from tests.crash_matrix.proxy import Proxy, Trap
from tests.crash_matrix.steps import Moment

PARTITIONS = 8
INTERVAL_S = 0.2
HOLD_S = 3.0
HEARTBEAT_S = 0.3
REPLICAS = ("cloud-0", "edge-0")
STAGE_TIMEOUT_S = 20.0
END_TIMEOUT_S = 60.0
POLL_S = 0.005
WAYS = ("apart", "together")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a move, which is recognised by a call to the move's source or target.

    From the stage ``sealed`` on, the source no longer serves the partition.

    Attributes:
        method: name of the call.
        at_source: the call goes to the source; otherwise to the target.
        moment: moment of the call at which the stage is reached.
    """

    name: str
    method: str
    at_source: bool
    moment: Moment


STAGES = (
    Stage("planned", "Prepare", False, Moment.SENT),
    Stage("warming", "Snapshot", True, Moment.ANSWERED),
    Stage("catching up", "Follow", True, Moment.ANSWERED),
    Stage("granted", "Fence", True, Moment.SENT),
    Stage("sealed", "Fence", True, Moment.ANSWERED),
    Stage("owned, not recorded", "Prepare", False, Moment.ENDED),
)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of the leader, and the seconds from the kill to three later events.

    Attributes:
        stage: stage of the move at which the leader was killed.
        held_s: seconds until another controller held the leader lease.
        decided_s: seconds until the move requested after the kill was decided.
        ended_s: seconds until the move under way had ended.
        move: final state of the move under way.
    """

    stage: str
    held_s: float
    decided_s: float
    ended_s: float
    move: str


class Fleet(LocalCluster):
    """A cluster of two controllers and two replicas. A proxy is in front of each replica."""

    def __init__(self, folder: str) -> None:
        super().__init__(
            Ballast,
            sites={"cloud": 1, "edge": 1},
            partitions=PARTITIONS,
            data_dir=folder,
            checkpoint_interval_s=0,
            controllers=2,
        )
        self.proxies = {name: Proxy(lambda name=name: self.processes[name].address) for name in REPLICAS}  # type: ignore[misc]

    def _replica_arguments(self, name: str) -> list[str]:
        return [*super()._replica_arguments(name), "--advertise", self.proxies[name].address]

    def stop(self) -> None:
        super().stop()
        self._records.close()
        for proxy in self.proxies.values():
            proxy.close()

    def leader(self) -> str:
        """Returns the name of the leading controller's process."""
        address = self.hold().holder.address
        return next(name for name in self.controllers if self.processes[name].address == address)

    def hold(self) -> LeaderLease:
        return self._records.hold()

    @cached_property
    def _records(self) -> Ledger:
        return Ledger(self.ledger)


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if experiment == "FLEET":
        from benchmarks import spawning  # imports this module

        return spawning.run(experiment, quick=quick, seed=seed)
    if experiment == "ALONE":
        from benchmarks import alone

        return alone.run(experiment, quick=quick, seed=seed)
    if experiment == "ROLLING":
        from benchmarks import rolling

        return rolling.run(experiment, quick=quick, seed=seed)
    kills: dict[str, list[Kill]] = {}
    parts: list[Correctness] = []
    failures: list[str] = []
    latencies: dict[str, list[float]] = {}
    for way in only or WAYS:
        kills[way] = []
        try:
            parts.append(_run(way, 6 if quick else 20, seed, kills[way], latencies.setdefault(way, [])))
        except (StateflowError, TimeoutError) as error:
            failures.append(f"{way}: {error}")
    bound_s = HOLD_S + HEARTBEAT_S
    return Record(
        experiment=experiment,
        figures={way: _figures(found, latencies[way]) for way, found in kills.items()},
        targets=[
            Target(
                f"{way}: next decision, s, worst, within hold + heartbeat",
                max((kill.decided_s for kill in found), default=None),
                bound_s,
                "at_most",
            )
            for way, found in kills.items()
        ],
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "hold_s": HOLD_S,
            "heartbeat_interval_s": HEARTBEAT_S,
            "partitions": PARTITIONS,
            "rows_per_batch": ROWS,
            "batch_interval_s": INTERVAL_S,
        },
        seed=seed,
        failures=failures,
    )


def _figures(kills: Sequence[Kill], latencies: Sequence[float]) -> dict[str, Any]:
    stages = {
        stage.name: {
            "decided_s": spread([kill.decided_s for kill in kills if kill.stage == stage.name]),
            "ended_s": spread([kill.ended_s for kill in kills if kill.stage == stage.name]),
            "moves": [kill.move for kill in kills if kill.stage == stage.name],
        }
        for stage in STAGES
    }
    decided = [kill.decided_s for kill in kills]
    return {
        "kills": len(kills),
        "held_s": spread([kill.held_s for kill in kills]),
        "decided_s": spread(decided),
        "decided_s_of_hold_and_heartbeat": {
            "p50": statistics.median(decided) / (HOLD_S + HEARTBEAT_S) if decided else None,
            "max": max(decided) / (HOLD_S + HEARTBEAT_S) if decided else None,
        },
        "longest_batch_s": max(latencies, default=None),
        "stages": stages,
    }


def _settings(way: str) -> AbstractContextManager[None]:
    wanted = {
        "STATEFLOW_CONTROLLER_HOLD_S": str(HOLD_S),
        "STATEFLOW_CONTROLLER_LEASE_S": str(ControllerSettings().lease_s),
        "STATEFLOW_CONTROLLER_NOTICE_GONE": str(way == "together"),
        "STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S": str(HEARTBEAT_S),
        "STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S": str(HEARTBEAT_S),
    }
    return environment(wanted)


def _run(way: str, count: int, seed: int, kills: list[Kill], latencies: list[float]) -> Correctness:
    """Runs ``count`` kills of one way on one cluster, and adds them to ``kills``. Raises StateflowError,
    TimeoutError."""
    with _settings(way), tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder, Fleet(folder) as fleet:
        cluster = Cluster(fleet.address)
        source = Source(cluster.stream(OPERATOR, "s"), rows, INTERVAL_S)
        with Load([source], seed) as load:
            load.wait(1.0)
            for number, stage in zip(range(count), itertools.cycle(STAGES), strict=False):
                kill = _kill(fleet, stage, number)
                kills.append(kill)
                print(
                    f"  {way}, {stage.name}: held after {kill.held_s:.2f} s, decided {kill.decided_s:.2f} s, "
                    f"{kill.move} {kill.ended_s:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
                load.wait(0.5)
        latencies.extend(source.latencies.took_s)
        return correctness_of(load, cluster, OPERATOR)


def _kill(fleet: Fleet, stage: Stage, number: int) -> Kill:
    """Kills the leader at a stage of a move, and requests another move until it is decided. Raises TimeoutError."""
    cluster, leader, term = Cluster(fleet.address), fleet.leader(), fleet.hold().term
    moved, asked = number % PARTITIONS, (number + PARTITIONS // 2) % PARTITIONS
    owners = next(each.owners for each in cluster.status().operators if each.name == OPERATOR)
    killed = threading.Event()
    at_s = 0.0

    def spring() -> None:
        nonlocal at_s
        fleet.kill(leader)
        at_s = time.monotonic()
        killed.set()

    for proxy in fleet.proxies.values():
        proxy.reset()  # only a new connection sends its headers uncompressed
    proxy = fleet.proxies[owners[moved] if stage.at_source else _other(owners[moved])]
    proxy.trap = Trap(stage.method, stage.moment, spring)
    moving = threading.Thread(target=_move, args=(cluster, moved, _other(owners[moved])), daemon=True)
    moving.start()
    if not killed.wait(STAGE_TIMEOUT_S):
        raise TimeoutError(f"the stage was never reached: {stage.name}")
    proxy.trap = None
    held: list[float] = []
    watching = threading.Thread(target=_watch_the_hold, args=(fleet, term, held), daemon=True)
    watching.start()
    _move(cluster, asked, _other(owners[asked]))
    decided_at = time.monotonic()
    fleet.restart(leader)
    watching.join()
    moving.join(END_TIMEOUT_S)
    newest = _ended(cluster, moved)
    for each in cluster.reconfigurations(2):
        _ended(cluster, each.moves[0].partition)
    return Kill(stage.name, held[0] - at_s, decided_at - at_s, newest[1] - at_s, newest[0].moves[0].state)


def _other(replica: str) -> str:
    return REPLICAS[1 - REPLICAS.index(replica)]


def _move(cluster: Cluster, partition: int, to: str) -> None:
    """Requests a move again and again until a controller has decided it."""
    while True:
        try:
            cluster.migrate(OPERATOR, [partition], to)
            return
        except StateflowError as error:
            if error.code in ("already_there", "move_conflict"):
                return
            time.sleep(POLL_S)


def _watch_the_hold(fleet: Fleet, term: int, held: list[float]) -> None:
    while fleet.hold().term == term:
        time.sleep(POLL_S)
    held.append(time.monotonic())


def _ended(cluster: Cluster, partition: int) -> tuple[Reconfiguration, float]:
    """Waits for the end of a partition's newest move. Raises TimeoutError.

    Returns (reconfiguration, time at which its end was seen).
    """
    until = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < until:
        try:
            of_it = (each for each in cluster.reconfigurations() if each.moves[0].partition == partition)
            newest = next(of_it, None)
            if newest is not None and newest.state != "RUNNING":
                return newest, time.monotonic()
        except StateflowError:
            pass
        time.sleep(POLL_S)
    raise TimeoutError(f"the move of partition {partition} did not end within {END_TIMEOUT_S:g} s")
