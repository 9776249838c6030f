"""``Cluster`` controls a running cluster, given its controller's address."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pyarrow as pa

from stateflow.client.commands import FleetCommands, Migration, Sweeping, last_of, partition_list
from stateflow.client.forwarding import ForwardingClient
from stateflow.client.packing import Bundle
from stateflow.client.reading import StateReader
from stateflow.client.stream import (
    OutputDropReport,
    SourceReport,
    StreamClient,
    drop_output,
    list_sources,
    load_rows,
    retire_source,
)
from stateflow.code.loading import signed
from stateflow.errors import (
    InvalidArgument,
    OperatorNotDeployed,
    Unavailable,
    brief,
)
from stateflow.operator.arrow import read_table
from stateflow.operator.operator import DEFAULT_PARTITIONS, Operator, describe
from stateflow.partition.entries import ReadableStates, joined
from stateflow.partition.positions import INITIAL
from stateflow.reports import (
    AutopilotReport,
    CheckpointReport,
    OperatorVersion,
    Placement,
    Reconfiguration,
    ReplicaStatistics,
    RestoredPartition,
    Taken,
)
from stateflow.router import Router, backoff
from stateflow.rpc.clients import ReplicaClient
from stateflow.rpc.cluster_client import ClusterClient
from stateflow.settings import ClientSettings, RouterSettings
from stateflow.status import AdoptedOperator, ClusterStatus, StandbyReport
from stateflow.types import DEFAULT_OPTIONS, MoveOptions, OperatorSpec, check_name


@brief
class Cluster(FleetCommands):
    """Client that controls a running cluster.

    A method raises the error with which the controller refuses its request, or Unavailable.

    ``address``: the address of the controller, or of several, as in ``a:7070,b:7070``. The client asks the leader. If
    no controller leads, a follower answers requests that only read, and sets ``follower`` in its report. A report is
    never older than one that this client has received before.

    If no controller listens at the address, or none leads, methods wait for at most
    ``STATEFLOW_CLIENT_CONNECT_TIMEOUT_S`` (5 s).

    Example: ``Cluster("ctl:7070").migrate("DelayByAircraft", [3, 5], to="edge-1", max_pause_ms=50).wait()``
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = ClusterClient(address, ClientSettings().connect_timeout_s)

    def status(self, *, measured: bool = False) -> ClusterStatus:
        """Returns the status of the cluster.

        Args:
            measured: True also returns the replicas' resources and the measured links; the controller asks the replicas
                first.
        """
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
        """Creates an operator's partitions on the replicas of ``sites`` (default: all); repeating the call is no error.

        Without ``partitions`` a deployed operator keeps its number of partitions, and a new one has 128.

        The operator is confined to its sites: rebalances, drains and standbys use only replicas there, and so do
        takeovers while a replica there answers. Deploying it with other ``sites``, or with ``()`` for no restriction,
        changes the restriction and moves no partition. Without ``sites``, the restriction stays as it is.

        Replicas import a class of a module from the packages that are installed where they run, or from a ``bundle``
        (see :func:`~stateflow.client.packing.pack`). The cluster distributes bundles to the sites, and keeps their
        versions apart. A class of a script, a notebook or a REPL is sent as text, with the code that it uses. Replicas
        run the class from their next batch on, also in place of an earlier version.

        ``failover``: with ``"automatic"``, the default for a new operator, a partition whose owner does not answer is
        taken over. With ``"manual"``, an owner that is cut off from every controller keeps serving its partitions, also
        after a restart, and only :meth:`take_over` gives them to another replica. None keeps the present setting.

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
        """Returns the number of an operator's partitions; the default for an operator that is not deployed."""
        try:
            return self.operator(operator).partitions
        except OperatorNotDeployed:
            return DEFAULT_PARTITIONS

    def take_over(self, operator: str, partitions: Iterable[int] = (), *, accept_loss: bool = False) -> list[Migration]:
        """Lets other replicas take over the partitions whose owner does not answer, from standbys or checkpoints.

        Use it for operators with manual failover. Without ``partitions``, takes over all partitions that no replica is
        known to serve.

        Raises LossPossible unless ``accept_loss`` is True, because batches that an owner applied after its last
        heartbeat are lost. Raises InvalidArgument for a partition whose owner answers, UnknownPartition,
        OperatorNotDeployed, Unavailable.
        """
        numbers = sorted(partition_list(partitions)) if partitions else []
        return self._migrations(self._client.take_over(operator, numbers, accept_loss))

    def versions(self, operator: str) -> list[OperatorVersion]:
        """Returns the versions of an operator in the order of their deployment; the last one serves."""
        return self._client.versions(operator)

    def upgrade(self, operator: str, version: int) -> OperatorVersion:
        """Makes an earlier version the newest one again, and returns it.

        Replicas run it from their next batch on; states evolve as with a deployment.

        Raises OperatorNotDeployed, VersionUnknown, BundleMissing, and the error of a replica that refuses the version;
        nothing is changed then.
        """
        self._client.upgrade(operator, version)
        return last_of(self.versions(operator), "version")

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
        """Returns a new client, which takes the source over, see :class:`~stateflow.client.stream.StreamClient`."""
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
        """Returns a new client of a source, which stores rows that cannot be sent yet.

        See :class:`~stateflow.client.forwarding.ForwardingClient`.
        """
        if source == INITIAL:
            raise InvalidArgument(f"{source!r} is a reserved name", remedy="choose another name for the source")
        return ForwardingClient(self.address, operator, source, outbox, **options)

    def sources(self, operator: str) -> list[SourceReport]:
        """Returns the sources that have sent to an operator, as far as its partitions know.

        The sources are sorted by the time of their last batch.
        """
        return list_sources(Router(self.address, operator))

    def retire_source(self, operator: str, source: str) -> int:
        """Reduces a source to a tombstone, which has only its newest batch's number. The source may send again later.

        Returns the number of partitions that had kept more than a tombstone. Raises InvalidArgument for a source that
        no partition knows.
        """
        return retire_source(Router(self.address, operator), source)

    def drop_output(self, operator: str, source: str, batch: int, *, apply: bool = False) -> OutputDropReport:
        """Drops the stored output of an applied batch, so that a client that sends the batch again gets no rows.

        The state keeps the batch's effects. Use it for a query that cannot continue because the stored output cannot be
        read.

        Args:
            apply: False only reports what is stored.

        Raises InvalidArgument if no partition keeps an output of that batch.
        """
        return drop_output(Router(self.address, operator), source, batch, apply)

    def load_state(
        self, operator: str, rows: Iterable[Mapping[str, Any]], *, schema: str | pa.Schema | None = None
    ) -> int:
        """Loads an operator's initial state, see :meth:`Operator.init_state`; returns the number of rows.

        After an interruption, call it again with the same rows: it resumes. Raises StaleBatch once the operator has
        processed rows, BatchChanged for fewer rows than are loaded, or for other rows among the at most 50,000 that
        were sent last. Rows before these are not compared, and stay as they are loaded.
        """
        return load_rows(StreamClient(self.address, operator, INITIAL, schema=schema), rows)

    def migrate(
        self,
        operator: str,
        partitions: Iterable[int],
        to: str,
        options: MoveOptions = DEFAULT_OPTIONS,
        **changed: Any,
    ) -> Migration:
        """Starts to move partitions to a site or replica. Partitions that are already there are not moved.

        Args:
            options: how to move; ``rebalance`` and ``drain`` take the same options.
            changed: options that differ from ``options``, by name: ``max_pause_ms=50``.

        Raises AlreadyThere if no partition is to move, MoveConflict, UnknownSite, UnknownPartition, Unavailable,
        OperatorNotImportable or OperatorOutdated for a target without the operator or with an older version; nothing is
        changed then.
        """
        asked = options.changed(**changed)
        return Migration(self._client, self._client.migrate(operator, partition_list(partitions), to, asked))

    def rebalance(self, operator: str = "", options: MoveOptions = DEFAULT_OPTIONS, **changed: Any) -> list[Migration]:
        """Gives every replica that answers a share of partitions by its weight, with as few moves as possible.

        Returns one reconfiguration per operator; none if no partition has to move.
        """
        return self._migrations(self._client.rebalance(operator, options.changed(**changed)))

    def propose(self, *policies: str, operator: str = "") -> Placement:
        """Returns the moves that placement policies propose now, and their expected result; moves nothing.

        Args:
            policies: ``ring``, ``load``, ``locality``, by descending priority; see docs/moving-state.md.

        The controller measures for two seconds if it has no recent measurement. Raises InvalidArgument,
        OperatorNotDeployed.
        """
        return self._client.propose(operator, policies)

    def place(
        self, *policies: str, operator: str = "", options: MoveOptions = DEFAULT_OPTIONS, **changed: Any
    ) -> list[Migration]:
        """Carries out the moves that ``policies`` propose now, see :meth:`propose`.

        Returns one reconfiguration per operator; none if no partition has to move.
        """
        return self._migrations(self._client.place(operator, policies, options.changed(**changed)))

    def autopilot(
        self,
        *policies: str,
        max_pause_ms: float | None = None,
        cool_down_s: float = 60.0,
        moves_per_minute: float = 60.0,
    ) -> AutopilotReport:
        """Makes the controller carry out the moves that ``policies`` propose from now on.

        Without policies, the call stops the autopilot.

        Args:
            max_pause_ms: a partition is cut over only when its predicted pause is within this budget; None: no budget.
            cool_down_s: seconds before a partition that has moved may move again. A move begins only after it has been
                proposed for a quarter of this time.
            moves_per_minute: maximum number of moves that begin in a minute.

        Raises InvalidArgument.
        """
        return self._client.autopilot(AutopilotReport(policies, max_pause_ms, cool_down_s, moves_per_minute))

    def autopilot_orders(self) -> AutopilotReport:
        """Returns the autopilot's current settings."""
        return self._client.autopilot(None)

    def replace(self, replica: str, directory: str = "") -> tuple[str, int]:
        """Gives a replica's name to another data directory, whose replica has tried to register under that name.

        The state in the former data directory is lost to the cluster. Its partitions are restored from standbys and
        checkpoints.

        Args:
            directory: the new data directory; needed if replicas with several data directories try to register.

        Returns (new directory, number of partitions). Raises NameTaken while the former replica may be serving,
        InvalidArgument if no replica with another data directory tries to register.
        """
        return self._client.replace(replica, directory)

    def undeploy(self, operator: str, *, delete_state: bool = False) -> list[str]:
        """Removes an operator from the cluster, and deletes its state on every replica.

        Checkpoints and savepoints stay.

        Returns the replicas that did not answer: they delete their state when they come back. Raises PartitionsLive
        unless ``delete_state`` confirms the deletion, MoveConflict while the operator's partitions move or are
        restored, OperatorNotDeployed; nothing is changed then.
        """
        return self._client.undeploy(operator, delete_state)

    def forget(self, replica: str) -> None:
        """Forgets a replica that has ended for good. A replica that registers under its name later is a new one.

        Raises NameTaken while the replica may be serving, PartitionsLive while it owns partitions, MoveConflict while
        partitions move to or from it, InvalidArgument; nothing is changed then.
        """
        self._client.forget(replica)

    def adopt(self, *, dry_run: bool = False, partial: bool = False) -> list[AdoptedOperator]:
        """Records the replicas' partitions in a new ledger, after the former ledger was lost.

        Args:
            dry_run: True only reports the partitions.
            partial: True also adopts operators with missing partitions, and partitions of which only a sealed copy is
                left. A missing partition waits for a checkpoint or its owner; a sealed copy serves again.

        Raises AdoptionRefused; nothing is changed then.
        """
        return self._client.adopt(dry_run, partial)

    def drain(self, replica: str, options: MoveOptions = DEFAULT_OPTIONS, **changed: Any) -> list[Migration]:
        """Moves all partitions away from a replica, preferably to others of its site.

        Raises AlreadyThere if the replica owns no partition.
        """
        return self._migrations(self._client.drain(replica, options.changed(**changed)))

    def maintain(
        self,
        node: str,
        *,
        for_s: float = 0.0,
        one_of: str = "",
        options: MoveOptions = DEFAULT_OPTIONS,
        **changed: Any,
    ) -> list[Migration]:
        """Cordons a node: drains it as :meth:`drain` does, and keeps it without partitions from now on.

        No command, policy, takeover or deployment gives it partitions. A node without partitions is accepted, too.
        ``status().maintenance`` lists the nodes in maintenance.

        Args:
            for_s: seconds after which maintenance ends by itself; 0: it ends with :meth:`end_maintenance`.
            one_of: name of a set of nodes, of which only one may be in maintenance at a time.

        Raises InMaintenance while another node of the set is in maintenance, InvalidArgument.
        """
        return self._migrations(self._client.drain(node, options.changed(**changed), (for_s, one_of)))

    def end_maintenance(self, node: str) -> None:
        """Ends a node's maintenance: the node may receive partitions again.

        Raises InvalidArgument if the node is not in maintenance.
        """
        self._client.end_maintenance(node)

    def would_migrate(self, operator: str, partitions: Iterable[int], to: str) -> Placement:
        """Returns the moves that :meth:`migrate` would make, their cost and expected pauses; moves nothing.

        Raises the errors of :meth:`migrate`.
        """
        return self._client.would_migrate(operator, partition_list(partitions), to)

    def would_drain(self, replica: str) -> Placement:
        """Returns the moves that :meth:`drain` would make, see :meth:`would_migrate`."""
        return self._client.would_drain(replica)

    def would_rebalance(self, operator: str = "") -> Placement:
        """Returns the moves that :meth:`rebalance` would make, see :meth:`would_migrate`."""
        return self._client.would_rebalance(operator)

    def would_take_over(self, operator: str, partitions: Iterable[int] = ()) -> Placement:
        """Returns the replicas to which :meth:`take_over` would give partitions, and the copies that it would use;
        moves nothing.

        The loss is not included: only the owner knows which batches it has applied since its last heartbeat.
        """
        return self._client.would_take_over(operator, sorted(partition_list(partitions)) if partitions else [])

    def _migrations(self, begun: Iterable[Reconfiguration]) -> list[Migration]:
        return [Migration(self._client, each) for each in begun]

    def standby(self, operator: str, count: int) -> list[StandbyReport]:
        """Keeps ``count`` standby copies of every partition from now on; 0 removes the standbys.

        A standby follows the owner, and takes over if the owner dies. Raises InvalidArgument if there are too few
        replicas.
        """
        if isinstance(count, int) and count < 0:
            raise InvalidArgument("the number of standbys cannot be negative", remedy="pass 0 to remove the standbys")
        return self._client.standby(operator, count)

    def reconfigurations(self, limit: int = 0) -> list[Reconfiguration]:
        """Returns reconfigurations, newest first, including those from before the controller's last start.

        ``limit``: maximum number of reconfigurations to return; 0: all.
        """
        return self._client.reconfigurations(limit)

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Returns one reconfiguration by its id. Raises MoveUnknown."""
        return self._client.reconfiguration(reconfiguration)

    def cancel(self, reconfiguration: str) -> None:
        """Cancels a reconfiguration: moves that have not reached their fence are rolled back, the others complete."""
        self._client.cancel(reconfiguration)

    def resolve(self, reconfiguration: str, how: str) -> Migration:
        """Gives up moves that hang because the target cannot prove that its copy is the sealed state.

        ``how``: with ``serve-source`` the source serves the copy that it sealed. With ``restore`` the partitions are
        restored from a standby or checkpoint, and later batches are lost.

        Raises MoveUnknown, and MoveConflict if no move has passed its fence.
        """
        return Migration(self._client, self._client.resolve(reconfiguration, how))

    def pause(self, reconfiguration: str) -> Migration:
        """Pauses a reconfiguration: moves that have not begun wait, those under way complete."""
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
        """Changes how many of a reconfiguration's moves may run at a time; moves under way complete.

        Args:
            limit: maximum number of concurrent moves.
            per_node: maximum number of concurrent moves with the same node as source or target.
            per_link: maximum number of concurrent moves between the same two sites.

        With 0, only the controller's limit applies; None keeps the present limit.
        """
        limits = {"limit": limit, "per_node": per_node, "per_link": per_link}
        for name, value in limits.items():
            if value is not None and not (isinstance(value, int) and 0 <= value < 1 << 31):
                raise InvalidArgument(f"{name} cannot be {value!r}", remedy="pass an integer of 0 or more")
        return Migration(self._client, self._client.edit(reconfiguration, limits))

    def retry(self, reconfiguration: str, *, cancelled: bool = False) -> Migration:
        """Starts a new reconfiguration for the failed moves of an earlier one, with the same options.

        Args:
            cancelled: True includes cancelled moves.
        """
        return Migration(self._client, self._client.retry(reconfiguration, cancelled))

    def checkpoint(self, operator: str = "") -> CheckpointReport:
        """Takes a checkpoint of every partition of ``operator`` (empty: of all operators), and waits for it.

        Raises OperatorNotDeployed, the error of a replica that fails, and Unavailable, which names the partitions that
        no replica served for 30 s. The checkpoints of the other partitions remain.
        """
        return self._client.checkpoint(operator).report

    def checkpoint_all(self, operator: str = "", *, site: str = "", limit: int = 1) -> Sweeping:
        """Takes a checkpoint of every partition, node by node, ``limit`` nodes at a time.

        The work continues after a change of leaders. If a node fails, the report says so, and the other nodes continue.
        Partitions that move between nodes during the work are checkpointed at the end.

        Args:
            operator: only this operator; empty: all.
            site: only partitions that are at this site or node at the beginning; empty: all.

        Raises OperatorNotDeployed, UnknownSite, InvalidArgument, and MoveConflict while another
        :meth:`checkpoint_all` is under way.
        """
        return Sweeping(self._client, self._client.begin_sweep("checkpoint", operator, site, limit))

    def verify_all(self, operator: str = "", *, site: str = "", limit: int = 1) -> Sweeping:
        """Verifies every partition: the owners read their partitions, node by node.

        An owner checks every block by its checksum and every cell by its declaration, and compares the state with its
        standby's if both are at the same sequence. Processing continues, and no state is changed. ``report.faults()``
        names the damaged partitions, and those that could not be read (``undone``). Arguments and errors are those of
        :meth:`checkpoint_all`.
        """
        return Sweeping(self._client, self._client.begin_sweep("verify", operator, site, limit))

    def sweep(self, sweep: str) -> Sweeping:
        """Returns an earlier :meth:`checkpoint_all` or :meth:`verify_all`, by its id. Raises MoveUnknown."""
        return Sweeping(self._client, self._client.sweep(sweep))

    def savepoint(self, name: str, operator: str = "") -> CheckpointReport:
        """Takes a checkpoint now, and keeps it under ``name`` until it is deleted.

        Raises Unavailable if a partition kept moving; in this case, call it again with another name.
        """
        check_name("savepoint", name)
        names = [operator] if operator else [each.name for each in self.status().operators]
        done: list[Taken] = []
        for each in names:
            left = set(range(self.operator(each).partitions))
            pauses = backoff()
            while left:
                pause = next(pauses)
                taken = self._client.checkpoint(each, name, sorted(left))
                done.append(taken)
                left -= set(taken.numbers)
                if not left:
                    break
                if taken.numbers:
                    pauses = backoff()  # uploading the others took its time, which was no wait
                elif pause is None:
                    raise Unavailable(
                        f"no replica serves partitions {sorted(left)}", remedy="retry when no move is running"
                    )
                sleep(pause or 0.0)
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
        """Restores partitions from a checkpoint, each at a newer epoch.

        Args:
            partitions: partitions to restore; empty: all.
            to: a site or replica; empty: each partition stays at its owner, or goes to any replica if the owner is
                dead.
            url: URL of another store than the replicas' own, such as that of an exported savepoint.
            savepoint: name of a savepoint; empty: the newest checkpoint.
            at: (source, batch) selects the newest checkpoint that ends with exactly this batch.
            stop_sources: True refuses the stream clients that have sent so far (SourceTaken). Otherwise a running
                client sends again the batches that it keeps, which soon undoes the restore. A new client continues
                after the checkpoint. Spark queries are refused in both cases, until they are rewound.

        A partition that could not be restored is unchanged, and its report has an ``error``. Raises InvalidArgument for
        an ``at`` that is not a pair, and for an invalid savepoint name.
        """
        if at is not None and not (isinstance(at, tuple | list) and len(at) == 2):
            raise InvalidArgument(f"{at=!r} is not a position", remedy="pass (source, batch), such as ('meters', 7)")
        if savepoint:
            check_name("savepoint", savepoint)
        return self._client.restore(
            operator, partition_list(partitions), to=to, url=url, savepoint=savepoint, at=at, stop_sources=stop_sources
        )

    def cancel_restore(self, restore: str) -> None:
        """Cancels a restore: partitions not yet begun stay as they are, and the restore's report says so.

        Args:
            restore: id of the restore, which ``stateflow batch list`` shows as ``restores/<id>``.

        Raises MoveUnknown if no restore with this id is under way.
        """
        self._client.cancel_restore(restore)

    def read_state(self, operator: str, state: str, key: Any = None) -> pa.Table:
        """Returns the entries of one state as a table, for one key or for all keys.

        Columns: key, map_key (null for a value), value, partition. A state addressed at run time is read by the name of
        its tag, in all namespaces; window_start, window_end and namespace follow the key, see
        :class:`~stateflow.partition.entries.StateColumns`.

        Each partition is read as of one moment between two commits, without entries that have expired by then. Reading
        does not stop processing.
        """
        return joined([read_table(page) for page in self.scan_state(operator, state, key)])

    def scan_state(
        self,
        operator: str,
        state: str,
        key: Any = None,
        *,
        partitions: Collection[int] | None = None,
        whole: bool = True,
    ) -> Iterator[bytes]:
        """Yields the entries of :meth:`read_state` as Arrow IPC streams, one partition after the other.

        Args:
            state: name of the state's attribute or tag, or its exact name, see :meth:`readable_states`.
            partitions: only these partitions; None: all.
            whole: False yields only the first piece of each partition.

        Raises UnknownState; InvalidArgument if several tags have the name.
        """
        yield from StateReader(self._client, operator).scan(state, key, partitions, whole=whole)

    def readable_states(self, operator: str) -> ReadableStates:
        """Returns the states that can be read: those that the operator declares, and the tags used in any partition."""
        return StateReader(self._client, operator).states()

    def replica_stats(
        self, address: str, after: int = 0, *, newest: int = 0, sizes: bool = False, timeout_s: float | None = None
    ) -> ReplicaStatistics:
        """Returns statistics of a replica: its contents and its recent requests.

        Args:
            after: return only requests with a greater number.
            newest: maximum number of requests to return, the newest ones; 0: all.
            sizes: True includes the sizes of partitions, for which the replica inspects its files.
            timeout_s: seconds to wait for the replica; None: the usual timeout of calls.
        """
        return ReplicaClient(address).statistics(after, newest, sizes, timeout_s)
