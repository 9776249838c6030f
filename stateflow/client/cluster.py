"""A running cluster, by its controller's address."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from time import sleep
from typing import Any

import pyarrow as pa

from stateflow import moves
from stateflow.client import sources
from stateflow.client.commands import POLL_S, Migration, RollingRestart, Spawning, Sweeping
from stateflow.client.forwarding import ForwardingClient
from stateflow.client.given import iterable_given
from stateflow.client.packing import Bundle
from stateflow.client.sources import OutputDropReport, SourceReport
from stateflow.client.stream import StreamClient
from stateflow.errors import (
    AlreadyThere,
    BatchChanged,
    InvalidArgument,
    MoveAborted,
    NotOwner,
    OperatorNotDeployed,
    Unavailable,
    UnknownPartition,
    brief,
)
from stateflow.fleet import Request
from stateflow.moves import MoveOptions
from stateflow.partitioner import partition_of
from stateflow.reports import (
    AdoptedOperator,
    AgentReport,
    AutopilotReport,
    CheckpointReport,
    ClusterStatus,
    JobReport,
    JobRun,
    OperatorVersion,
    Placement,
    Reconfiguration,
    ReplicaStatistics,
    RestoredPartition,
    StandbyReport,
    Taken,
)
from stateflow.router import Router, backoff
from stateflow.rpc.clients import ReplicaClient
from stateflow.rpc.cluster_client import ClusterClient
from stateflow.runtime.arrow import read_table
from stateflow.runtime.code_key import signed
from stateflow.runtime.operator import DEFAULT_PARTITIONS, Operator, describe
from stateflow.runtime.positions import INITIAL
from stateflow.runtime.reading import joined
from stateflow.settings import ClientSettings, RouterSettings
from stateflow.state import encode_row_key
from stateflow.types import PARTITIONS_MAX, OperatorSpec, check_name

#: rows of initial state that are sent at a time
LOADED_ROWS = 50_000


@brief
class Cluster:
    """Control surface of a running controller. Methods raise what the controller refuses with, or Unavailable.

    ``address``: of the controller, or ``a:7070,b:7070`` of several. The one that leads is asked; where none does, what
    only is read another one answers, and its report has a ``follower``. No answer is older than one that came before.

    Where nobody listens at its address, or nobody leads, they wait for it, ``STATEFLOW_CLIENT_CONNECT_TIMEOUT_S`` (5 s)
    at most.

    Example: ``Cluster("ctl:7070").migrate("DelayByAircraft", [3, 5], to="edge-1", max_pause_ms=50).wait()``
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = ClusterClient(address, ClientSettings().connect_timeout_s)

    def status(self, *, measured: bool = False) -> ClusterStatus:
        """Args: measured: also what room replicas have, and what is known of links; they are asked first."""
        return self._client.status(measured)

    def deploy(
        self,
        operator: type[Operator],
        partitions: int | None = None,
        *,
        sites: Iterable[str] | None = None,
        name: str | None = None,
        bundle: Bundle | None = None,
        failover: str | None = None,
    ) -> None:
        """Create an operator's partitions on the replicas of ``sites`` (all by default). Doing it twice is no error.

        Without ``partitions`` an operator that is deployed keeps its own, and a new one has 128.

        The operator is confined to these sites: rebalances, drains and standbys stay there, and take-overs where
        anybody there answers. Deploying it with others, or with ``()`` for anywhere, changes that, and moves nothing by
        itself; without ``sites`` it stays confined as it is.

        A class of a module is imported where replicas run, or comes in a ``bundle``, see
        :func:`~stateflow.client.packing.pack`: then it reaches the sites by itself, and versions of it are apart. Any
        other, of a script, a notebook or a REPL, goes along as text, with what it uses. Replicas run it from their next
        batch on, also in place of an earlier version.

        ``failover``: with ``"automatic"``, as at first, a partition whose owner does not answer is taken over. With
        ``"manual"`` its owner serves it on while it is cut off from every controller, also after a restart, and nobody
        takes it over but by :meth:`take_over`. Without it stays as it is.

        Raises OperatorNotImportable, DeclarationError, CodeRefused, AlreadyDeployed; nothing is changed then.
        """
        if partitions is None:
            partitions = self._partitions_of(name or operator.__name__)
        spec = describe(operator, partitions, name)
        if bundle is not None:
            spec = replace(spec, bundle=bundle.digest)
            self._client.put_bundle(bundle.digest, bundle.packed)
        self._client.deploy(signed(spec), sites, failover)

    def _partitions_of(self, operator: str) -> int:
        """Returns how many partitions an operator has; the default for one that is not deployed."""
        try:
            return self.operator(operator).partitions
        except OperatorNotDeployed:
            return DEFAULT_PARTITIONS

    def take_over(self, operator: str, partitions: Iterable[int] = (), *, accept_loss: bool = False) -> list[Migration]:
        """Give partitions whose owner does not answer to others, with what standbys and checkpoints have; without
        partitions all that nobody is known to serve. For operators whose failover is manual.

        Raises LossPossible without ``accept_loss``: what an owner has served since it was heard is lost. Raises
        InvalidArgument for one whose owner answers, UnknownPartition, OperatorNotDeployed, Unavailable."""
        numbers = sorted(_numbers(partitions)) if partitions else []
        return self._migrations(self._client.take_over(operator, numbers, accept_loss))

    def versions(self, operator: str) -> list[OperatorVersion]:
        """As they were deployed; the last one serves."""
        return self._client.versions(operator)

    def upgrade(self, operator: str, version: int) -> OperatorVersion:
        """Serve by a version that was deployed before; it becomes the newest one, and is returned. Replicas run it from
        their next batch on; states evolve as with a deployment.

        Raises OperatorNotDeployed, VersionUnknown, BundleMissing, and what a replica refuses it with; nothing is
        changed then.
        """
        self._client.upgrade(operator, version)
        return self.versions(operator)[-1]

    def operator(self, name: str) -> OperatorSpec:
        return self._client.deployment(name).spec

    def stream(
        self,
        operator: str,
        source: str,
        *,
        schema: str | pa.Schema | None = None,
        acknowledged: int | Callable[[], int | None] | None = None,
        settings: RouterSettings | None = None,
        site: str = "",
        addresses: Mapping[str, str] | None = None,
    ) -> StreamClient:
        """The newest client of a source, see :class:`~stateflow.client.stream.StreamClient`."""
        if source == INITIAL:
            raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")
        return StreamClient(
            self.address,
            operator,
            source,
            schema=schema,
            acknowledged=acknowledged,
            settings=settings,
            site=site,
            addresses=addresses,
        )

    def forwarding(self, operator: str, source: str, outbox: str | Path, **options: Any) -> ForwardingClient:
        """The newest client of a source, which stores what cannot be sent yet, see
        :class:`~stateflow.client.forwarding.ForwardingClient`."""
        if source == INITIAL:
            raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")
        return ForwardingClient(self.address, operator, source, outbox, **options)

    def sources(self, operator: str) -> list[SourceReport]:
        """Whoever has sent to an operator, as far as its partitions know; those that sent last come last."""
        return sources.sources(Router(self.address, operator))

    def retire_source(self, operator: str, source: str) -> int:
        """Keep of a source only which batch is contained, in how many partitions is returned. It may come back.

        Raises InvalidArgument for one that nobody knows.
        """
        return sources.retire(Router(self.address, operator), source)

    def drop_output(self, operator: str, source: str, batch: int, *, apply: bool = False) -> OutputDropReport:
        """Keep no output of a batch that was applied: whoever sends it again is given no rows of it. The state keeps
        what the batch did. For a query that stands still because what is stored cannot be read.

        Args:
            apply: else only say what is kept.

        Raises InvalidArgument where no partition keeps an output of that batch.
        """
        return sources.drop_output(Router(self.address, operator), source, batch, apply)

    def load_state(
        self, operator: str, rows: Iterable[Mapping[str, Any]], *, schema: str | pa.Schema | None = None
    ) -> int:
        """Give an operator its first state, see :meth:`Operator.init_state`; returns how many rows there were.

        Interrupted, it may be called again with the same rows, and goes on where it stopped. Raises StaleBatch once
        the operator has processed rows, BatchChanged for other rows than were loaded.
        """
        stream = StreamClient(self.address, operator, INITIAL, schema=schema)
        loaded = stream.position
        remaining, count = iter(iterable_given(rows)), 0
        for number in itertools.count():
            chunk = list(itertools.islice(remaining, LOADED_ROWS))
            if not chunk and number <= loaded:
                raise BatchChanged(
                    f"{count} rows are given, more were loaded before",
                    remedy="first state is loaded once: load the same rows, or deploy the operator under another name",
                    operator=operator,
                )
            if not chunk:
                return count
            count += len(chunk)
            if number >= loaded:
                stream.send(chunk, sequence=number)
        raise AssertionError

    def migrate(
        self,
        operator: str,
        partitions: Iterable[int],
        to: str,
        options: MoveOptions = moves.DEFAULT,
        **changed: Any,
    ) -> Migration:
        """Start moving partitions to a site or replica; those that are there already stay.

        Args:
            options: how, for this and for ``rebalance`` and ``drain``.
            changed: what is other than in ``options``, by name: ``max_pause_ms=50``.

        Raises AlreadyThere when nothing is to move, MoveConflict, UnknownSite, UnknownPartition, Unavailable,
        OperatorNotImportable or OperatorOutdated for a target without the operator or with an older one; nothing is
        changed then.
        """
        asked = _asked(options, changed)
        return Migration(self._client, self._client.migrate(operator, _numbers(partitions), to, asked))

    def rebalance(self, operator: str = "", options: MoveOptions = moves.DEFAULT, **changed: Any) -> list[Migration]:
        """Bring every replica that answers to its weight's share, by as few moves as that takes; one reconfiguration
        per operator, none when nothing is to do."""
        return self._migrations(self._client.rebalance(operator, _asked(options, changed)))

    def propose(self, *policies: str, operator: str = "") -> Placement:
        """What placement policies would move now, and what would come of it; nothing is moved.

        Args: policies: ``ring``, ``load``, ``locality``, in the order of their say; see docs/moving-state.md.

        Measures for two seconds where nobody has lately. Raises InvalidArgument, OperatorNotDeployed.
        """
        return self._client.propose(operator, policies)

    def place(
        self, *policies: str, operator: str = "", options: MoveOptions = moves.DEFAULT, **changed: Any
    ) -> list[Migration]:
        """Have partitions go where these policies want them now, as :meth:`propose` says; one reconfiguration per
        operator, none when nothing is to do."""
        return self._migrations(self._client.place(operator, policies, _asked(options, changed)))

    def autopilot(
        self,
        *policies: str,
        max_pause_ms: float | None = None,
        cool_down_s: float = 60.0,
        moves_per_minute: float = 60.0,
    ) -> AutopilotReport:
        """Have the controller bring partitions to where these policies want them, from now on; none: no more.

        Args:
            max_pause_ms: a partition is cut over only when its pause is predicted to be within; None: no budget.
            cool_down_s: a partition that has moved is left alone for so long, and a wish must stand for a quarter of
                it.
            moves_per_minute: that begin, at most.

        Raises InvalidArgument.
        """
        return self._client.autopilot(AutopilotReport(policies, max_pause_ms, cool_down_s, moves_per_minute))

    def autopilot_orders(self) -> AutopilotReport:
        """What the autopilot is told now."""
        return self._client.autopilot(None)

    def create_job(
        self,
        name: str,
        schedule: str,
        do: str,
        *,
        operator: str = "",
        policies: Iterable[str] = (),
        partitions: Iterable[int] = (),
        to: str = "",
        coordinator: str = "",
        workers: str = "",
        options: MoveOptions = moves.DEFAULT,
        **changed: Any,
    ) -> JobReport:
        """Have something done by itself, each time once, whichever controller leads then; see docs/fleet.md.

        Args:
            schedule: ``once 2030-01-01T18:00:00Z``, ``every 3600`` (seconds, from the end of the run before), or
                ``cron 0 18 * * 1-5 Europe/Berlin`` (UTC without a zone).
            do: ``rebalance`` (by ``policies``), ``migrate`` (``partitions`` of ``operator`` to ``to``), ``drain``
                (``to``: the replica that is drained) or ``checkpoint``.
            coordinator: which controller may coordinate its runs, ``hard`` or ``soft``, by node, site or label, as
                ``soft:30 site cloud``; empty: any.
            workers: which nodes its moves may go to, as ``hard label disk=ssd:2-4``: at least 2 are wanted, 4 at most
                are used; empty: any.

        Raises InvalidArgument, also for what nothing there could ever satisfy; OperatorNotDeployed.
        """
        asked, numbers = _asked(options, changed), tuple(_numbers(partitions)) if partitions else ()
        given = JobReport(
            name, schedule, do, operator, tuple(policies), numbers, to, False, 0, (), coordinator, workers
        )
        return self._client.create_job(given, asked)

    def jobs(self) -> list[JobReport]:
        """What is done by itself, and what became of it."""
        return self._client.jobs()

    def job(self, name: str) -> JobReport:
        """Raises InvalidArgument where there is none."""
        return self._client.jobs(name)[0]

    def run_job(self, name: str) -> JobRun:
        """Once, now; what came of it is asked for with :meth:`job_run`. Raises InvalidArgument while it runs."""
        return self._client.change_job(name, "run").runs[-1]

    def job_run(self, run: str, *, wait: bool = False) -> JobRun:
        """What came of a run, or how far it is. Args: run: its id; wait: until it has ended.

        Raises InvalidArgument where there is none, or a hundred came after it."""
        while (found := self._client.job_run(run)).state == "IN_PROCESS" and wait:
            sleep(POLL_S)
        return found

    def change_job(self, name: str, change: str) -> JobReport:
        """``pause``, ``resume``, ``run`` (now, once) or ``delete`` a job. Raises InvalidArgument."""
        return self._client.change_job(name, change)

    def replace(self, replica: str, directory: str = "") -> tuple[str, int]:
        """Give a replica's name to the data directory that asks for it (``directory``: to which, where several do).
        What the former one has is lost, and its partitions come from standbys and checkpoints.

        Returns (directory, how many partitions). Raises NameTaken while the former one may be serving, InvalidArgument
        when nobody asks."""
        return self._client.replace(replica, directory)

    def undeploy(self, operator: str, *, delete_state: bool = False) -> list[str]:
        """Take an operator out of the cluster, and delete its state on every replica. Checkpoints and savepoints stay.

        Returns the replicas that did not answer: they delete what they have when they come back. Raises PartitionsLive
        unless ``delete_state`` says that this is meant, MoveConflict while its partitions move or are restored,
        OperatorNotDeployed; nothing is changed then."""
        return self._client.undeploy(operator, delete_state)

    def forget(self, replica: str) -> None:
        """Know nothing any more of a replica that has ended for good. One that comes under its name is a new one.

        Raises NameTaken while it may be serving, PartitionsLive while partitions are its own, MoveConflict while some
        are on their way to or from it, InvalidArgument; nothing is changed then."""
        self._client.forget(replica)

    def adopt(self, *, dry_run: bool = False, partial: bool = False) -> list[AdoptedOperator]:
        """Take what replicas have into a ledger that knows nothing of it, because another one was lost.

        Args:
            dry_run: only say what there is.
            partial: also where partitions are missing: they wait for a checkpoint or their owner; and where there is
                only a copy that was sealed for a move: it is served again.

        Raises AdoptionRefused; nothing was changed then."""
        return self._client.adopt(dry_run, partial)

    def drain(self, replica: str, options: MoveOptions = moves.DEFAULT, **changed: Any) -> list[Migration]:
        """Move everything away from a replica, to others of its site where there are some. Raises AlreadyThere when it
        owns nothing."""
        return self._migrations(self._client.drain(replica, _asked(options, changed)))

    def maintain(
        self,
        node: str,
        *,
        for_s: float = 0.0,
        one_of: str = "",
        options: MoveOptions = moves.DEFAULT,
        **changed: Any,
    ) -> list[Migration]:
        """:meth:`drain` a node, which may own nothing, and have nothing given to it from now on: by no command, policy,
        take-over or deployment. ``status().maintenance`` tells of it.

        Args:
            for_s: it ends by itself then; 0: with :meth:`end_maintenance`.
            one_of: a set, by any name, of which no two are to be in maintenance at a time.

        Raises InMaintenance while another one of the set is, InvalidArgument.
        """
        return self._migrations(self._client.drain(node, _asked(options, changed), (for_s, one_of)))

    def end_maintenance(self, node: str) -> None:
        """It may be given partitions again. Raises InvalidArgument where it is not in maintenance."""
        self._client.end_maintenance(node)

    def would_migrate(self, operator: str, partitions: Iterable[int], to: str) -> Placement:
        """What :meth:`migrate` would move, what that costs and what pauses are expected; nothing is moved. Raises as it
        does."""
        return self._client.would_migrate(operator, list(partitions), to)

    def would_drain(self, replica: str) -> Placement:
        """As :meth:`would_migrate`."""
        return self._client.would_drain(replica)

    def would_rebalance(self, operator: str = "") -> Placement:
        """As :meth:`would_migrate`."""
        return self._client.would_rebalance(operator)

    def would_take_over(self, operator: str, partitions: Iterable[int] = ()) -> Placement:
        """As :meth:`would_migrate`: who would get what :meth:`take_over` gives, and from what. Nothing is said of what
        would be lost: only its owner knows what it served since it was heard."""
        return self._client.would_take_over(operator, sorted(_numbers(partitions)) if partitions else [])

    # -- agents -------------------------------------------------------------------------------------------

    def agents(self) -> list[AgentReport]:
        """By name: what they have, and what they are to have."""
        return self._client.agents()

    def spawn(
        self,
        at: str,
        *,
        count: int = 1,
        workers: int = 1,
        weight: int = 1,
        memory_bytes: int = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Spawning:
        """Have replicas started at an agent, or at agents of a site.

        Args:
            count: of replicas.
            workers: of each.
            memory_bytes: that each may have; 0: no limit.
            labels: of agents, all of which one must have.

        Raises UnknownSite, Unavailable where no agent there answers, NoRoom; nothing is started then.
        """
        request = Request(at, count, workers, weight, memory_bytes, dict(labels or {}))
        return Spawning(self._client, self._client.spawn(request))

    def stop_replica(self, replica: str, *, drain: bool = False, force: bool = False) -> Spawning:
        """Have a replica stopped by its agent; its data directory stays, and ``restart_replica`` starts it again.

        Args:
            drain: move what it owns to others first.
            force: also while it owns partitions: nobody serves them until they are taken over.

        Raises PartitionsLive, MoveConflict, InvalidArgument for one that no agent started; MoveAborted where a
        partition could not be moved away. It runs on then.
        """
        if drain:
            with suppress(AlreadyThere):
                for migration in self.drain(replica):
                    report = migration.wait()
                    if report.state != "COMPLETED":
                        failed = next((move.error for move in report.moves if move.error), "it was cancelled")
                        raise MoveAborted(
                            f"the replica could not be drained, and runs on: {failed}",
                            remedy=f"see `stateflow reconfig info {report.id}`",
                            replica=replica,
                        )
        return Spawning(self._client, self._client.stop_replica(replica, force))

    def restart_replica(self, replica: str) -> Spawning:
        """Have a replica ended, where it runs, and started by its agent. Raises InvalidArgument, NoRoom."""
        return Spawning(self._client, self._client.restart_replica(replica))

    def restart_all(self, site: str = "", *, limit: int = 1) -> RollingRestart:
        """Have every replica that an agent runs restarted, ``limit`` nodes at a time, the next one when the one before
        serves again. Rows for what is away wait meanwhile. After one that does not serve again nothing more is
        restarted.

        Args: site: or an agent: only there.

        Raises InvalidArgument; MoveConflict while another one is under way."""
        return RollingRestart(self._client, self._client.restart_all(site, limit))

    def rolling(self, roll: str) -> RollingRestart:
        """One that was begun before, by its id. Raises MoveUnknown."""
        return RollingRestart(self._client, self._client.rolling(roll))

    def logs(self, replica: str, *, lines: int = 100, follow: bool = False) -> Iterator[bytes]:
        """The newest lines of what a replica of an agent logged, and with ``follow`` what it logs from then on, in
        pieces. Raises InvalidArgument, Unavailable."""
        return self._client.logs(replica, lines, follow)

    def forget_agent(self, agent: str) -> None:
        """Know nothing any more of an agent that has ended for good, nor of what it was to have.

        Raises NameTaken while it may be running, PartitionsLive, InvalidArgument; nothing is changed then."""
        self._client.forget_agent(agent)

    def _migrations(self, begun: Iterable[Reconfiguration]) -> list[Migration]:
        return [Migration(self._client, each) for each in begun]

    def standby(self, operator: str, count: int) -> list[StandbyReport]:
        """Keep ``count`` copies of every partition following beside its owner, from now on; 0 ends that. They take over
        when the owner dies. Raises InvalidArgument when there are too few replicas."""
        if count < 0:
            raise InvalidArgument("a count cannot be negative", remedy="give 0 to end standbys")
        return self._client.standby(operator, count)

    def reconfigurations(self, limit: int = 0) -> list[Reconfiguration]:
        """Newest first, those from before the controller's last start too; ``limit``: so many at most."""
        return self._client.reconfigurations(limit)

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Raises MoveUnknown."""
        return self._client.reconfiguration(reconfiguration)

    def cancel(self, reconfiguration: str) -> None:
        """Moves before their fence are rolled back, those behind it complete."""
        self._client.cancel(reconfiguration)

    def resolve(self, reconfiguration: str, how: str) -> Migration:
        """Give up moves whose seal cannot be proved at the target. ``how``: ``serve-source``: the source serves what it
        sealed; ``restore``: a standby or checkpoint is taken, and what came after that is lost.

        Raises MoveUnknown, MoveConflict when none of its moves stands behind its fence."""
        return Migration(self._client, self._client.resolve(reconfiguration, how))

    def pause(self, reconfiguration: str) -> Migration:
        """Moves that have not begun wait; those under way complete."""
        return Migration(self._client, self._client.pause(reconfiguration))

    def resume(self, reconfiguration: str) -> Migration:
        return Migration(self._client, self._client.resume(reconfiguration))

    def edit(
        self,
        reconfiguration: str,
        *,
        limit: int | None = None,
        per_node: int | None = None,
        per_link: int | None = None,
    ) -> Migration:
        """So many of its moves go on at a time from now on: altogether, with one node as source or target, between two
        sites; 0: no limit but the controller's; None: as before. Those under way complete."""
        limits = {"limit": limit, "per_node": per_node, "per_link": per_link}
        for name, value in limits.items():
            if value is not None and not (isinstance(value, int) and 0 <= value < 1 << 31):
                raise InvalidArgument(f"{name} cannot be {value!r}", remedy="give a number from 0 on")
        return Migration(self._client, self._client.edit(reconfiguration, limits))

    def retry(self, reconfiguration: str, *, cancelled: bool = False) -> Migration:
        """A new reconfiguration for what failed of this one, with the same options. Args: cancelled: also for what was
        cancelled."""
        return Migration(self._client, self._client.retry(reconfiguration, cancelled))

    def checkpoint(self, operator: str = "") -> CheckpointReport:
        """Take a checkpoint of every partition now and wait for it."""
        return self._client.checkpoint(operator).report

    def checkpoint_all(self, operator: str = "", *, site: str = "", limit: int = 1) -> Sweeping:
        """Have a checkpoint taken of every partition, node by node, ``limit`` at a time. Whoever leads carries it on. A
        node that fails is said to, and the others go on; what moves between nodes meanwhile is taken in the end.

        Args:
            operator: only of this one.
            site: or a node: only of what is there when it begins.

        Raises OperatorNotDeployed, UnknownSite, InvalidArgument; MoveConflict while another one is under way."""
        return Sweeping(self._client, self._client.begin_sweep("checkpoint", operator, site, limit))

    def verify_all(self, operator: str = "", *, site: str = "", limit: int = 1) -> Sweeping:
        """Have every partition read by its owner, node by node: every block by its checksum, every cell by its
        declaration, and its state compared with that of its standby where both are at one sequence. Batches go on, and
        nothing is changed; ``report.faults()`` names what is damaged, and what could not be read (``undone``). Args and
        errors as of ``checkpoint_all``."""
        return Sweeping(self._client, self._client.begin_sweep("verify", operator, site, limit))

    def sweep(self, sweep: str) -> Sweeping:
        """Checkpoints of everything, or a verification, that were begun before, by their id. Raises MoveUnknown."""
        return Sweeping(self._client, self._client.sweep(sweep))

    def savepoint(self, name: str, operator: str = "") -> CheckpointReport:
        """Take a checkpoint now and keep it under this name until it is deleted.

        Raises Unavailable when a partition was moving all the time; the call can be made again with another name.
        """
        check_name("savepoint", name)
        names = [operator] if operator else [each.name for each in self.status().operators]
        done: list[Taken] = []
        for each in names:
            left = set(range(self.operator(each).partitions))
            for pause in backoff():
                taken = self._client.checkpoint(each, name, sorted(left))
                done.append(taken)
                left -= set(taken.numbers)
                if not left:
                    break
                if pause is None:
                    raise Unavailable(
                        f"partitions {sorted(left)} were with nobody", remedy="try again when no move is under way"
                    )
                sleep(pause)
        return Taken.together(done).report

    def restore(
        self,
        operator: str,
        partitions: Iterable[int] = (),
        *,
        to: str = "",
        url: str = "",
        savepoint: str = "",
        at: tuple[str, int] | None = None,
        stop_sources: bool = False,
    ) -> list[RestoredPartition]:
        """Put partitions back to a checkpoint, each at a newer epoch; all of them by default.

        Args:
            to: a site or replica; by default each where it is, or on any replica where its owner is dead.
            url: of another store than the replicas' own, as an exported savepoint is.
            savepoint: its name; the newest checkpoint by default.
            at: (source, batch): the newest checkpoint that ends with exactly this batch.
            stop_sources: refuse the stream clients that have sent so far (SourceTaken): else one that runs sends again
                what it keeps, and the state is soon where it was. One that is started anew goes on behind the
                checkpoint. Spark queries are refused either way, until they are rewound.

        A partition that could not be restored is as it was, and says so in its ``error``.
        """
        return self._client.restore(
            operator, _numbers(partitions), to=to, url=url, savepoint=savepoint, at=at, stop_sources=stop_sources
        )

    def cancel_restore(self, restore: str) -> None:
        """Partitions that have not begun stay as they are, and say so in the report of whoever waits for it.

        Args:
            restore: its id: ``restores/<id>`` in ``stateflow batch list``.

        Raises MoveUnknown where none is under way."""
        self._client.cancel_restore(restore)

    def read_state(self, operator: str, state: str, key: Any = None) -> pa.Table:
        """Entries of one state: columns key, map_key (null for a value), value, partition; of one key, or of all.

        Each partition is read as of one moment between two batches' commits, without what has expired by then. Nothing
        is stopped for it.
        """
        pages = [read_table(record) for record in self.scan_state(operator, state, key)]
        return joined(pages)

    def scan_state(
        self,
        operator: str,
        state: str,
        key: Any = None,
        *,
        partitions: Collection[int] | None = None,
        whole: bool = True,
    ) -> Iterator[bytes]:
        """The same in pieces, one partition's after the other's: Arrow IPC streams. Args: partitions: of these only.
        whole: False: of each its first piece."""
        count = self.operator(operator).partitions
        left = set(range(count)) if key is None else {partition_of(key, count)}
        if partitions is not None:
            left &= set(partitions)
        keys = [] if key is None else [encode_row_key(key)]
        for pause in backoff():
            deployed = self._client.deployment(operator)
            for partition in sorted(left):
                try:
                    address = deployed.owners[partition].address
                    scan = ReplicaClient(address).scan(operator, state, [partition], keys)
                    records = list(scan) if whole else [next(scan)]
                except (NotOwner, Unavailable):  # it moved since the controller was asked, or its owner is starting
                    if pause is None:
                        if (why := deployed.why_unserved().get(partition)) is not None:
                            raise why from None
                        raise
                    continue
                yield from records
                left.discard(partition)
            if not left:
                break
            sleep(pause or 0.0)

    def replica_stats(
        self, address: str, after: int = 0, *, newest: int = 0, sizes: bool = False, timeout_s: float | None = None
    ) -> ReplicaStatistics:
        """What a replica holds and did.

        Args:
            after: of the requests that it served, those behind this number.
            newest: of these so many at most; 0: all.
            sizes: of partitions, too, for which it looks at its files.
            timeout_s: it is waited for so long; None: as long as for any call.
        """
        return ReplicaClient(address).statistics(after, newest, sizes, timeout_s)


def _numbers(partitions: object) -> list[int]:
    """Raises InvalidArgument for what is no list of partitions: a number, for one."""
    numbers: list[Any] = [None]
    if isinstance(partitions, Iterable) and not isinstance(partitions, str):
        numbers = list(partitions)
    if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers):
        raise InvalidArgument(
            f"partitions={partitions!r} is no list of partitions",
            remedy="write partitions=[20], or range(20) for the first twenty",
        )
    for number in numbers:
        if not 0 <= number < PARTITIONS_MAX:
            raise UnknownPartition(f"there is no partition {number}", remedy="count from 0")
    return numbers


def _asked(options: MoveOptions, changed: Mapping[str, Any]) -> MoveOptions:
    """Raises InvalidArgument."""
    names = [each.name for each in fields(MoveOptions)]
    if unknown := changed.keys() - set(names):
        raise InvalidArgument(f"a move has no option {min(unknown)!r}", remedy=f"use {', '.join(names)}")
    return replace(options, **changed)
