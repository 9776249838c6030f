"""Registry of a replica's data directory, operators and partitions, and the replica's lease.

A replica serves only while it has a lease from the controller. The controller answers a heartbeat with a duration. The
replica counts the duration on its own monotonic clock from when it *sent* that heartbeat, the controller from when it
received the heartbeat, which is later. If the clocks drift apart by less than the controller's margin, a replica knows
that its lease has lapsed before the controller acts on it (Gray and Cheriton, "Leases", SOSP 1989). A process that was
suspended finds its lease lapsed when it continues, because the monotonic clock kept running. An operator with manual
failover needs no lease while no controller answers, because no other replica gets its partitions then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stateflow.clock import Clock
from stateflow.code.bundles import BundleStore
from stateflow.durable import MALFORMED
from stateflow.errors import (
    REPORT_LINE,
    CommitLogDamaged,
    DecodeError,
    InvariantBroken,
    LeaseLost,
    OperatorNotDeployed,
    OperatorNotImportable,
    OperatorOutdated,
    StaleEpoch,
    StateDamaged,
    StateflowError,
    StateMissing,
    Unavailable,
)
from stateflow.operator.operator import Operator, class_of, describe
from stateflow.operator.rows import get_ready
from stateflow.partition.change_feed import ChangeLog, FileDigests
from stateflow.partition.data_directory import Copies, Quarantine, identify
from stateflow.partition.environment import Environment
from stateflow.partition.layout import Commits
from stateflow.partition.lifecycle import SERVED, Lifecycle, State
from stateflow.partition.local_partition import CheckedLifecycle, CheckedMutex, LocalPartition
from stateflow.partition.processor import StoredStates, evolution_of
from stateflow.partition.sources import SkippedBatches
from stateflow.settings import ReplicaSettings
from stateflow.state import DeployedStates
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: how long operators may take together to close when the replica stops, seconds
CLOSE_S_MAX = 3.0
#: how long a stopping replica waits for threads that still write to its partitions, in seconds for all partitions
#: together
RELEASE_S_MAX = 1.0
#: file with the greatest term that this replica has seen, and the ledger of that term
TERM = "TERM"
ALONE = "ALONE"

# -- Lease -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lease:
    """Lease up to ``until``, in monotonic seconds. Sans-io. By default it never expires, for replicas without a
    controller.

    Attributes:
        alone: operators that the replica serves without a lease while it is ``cut_off``.
        cut_off: the replica has asked every controller since the last answer, or since its start, and none answered.
    """

    until: float = math.inf
    alone: frozenset[str] = frozenset()
    cut_off: bool = False

    @classmethod
    def none(cls) -> Lease:
        """Returns a lease that is not valid before the controller grants it."""
        return cls(-math.inf)

    def granted(self, sent_at: float, duration_s: float) -> None:
        """Extends the lease by the answer to a heartbeat sent at ``sent_at``. Answers may arrive out of order."""
        self.until = max(self.until, sent_at + duration_s)
        self.cut_off = False

    def revoke(self) -> None:
        """Ends the lease, because the controller no longer knows this process."""
        self.until = -math.inf
        self.cut_off = False

    def unanswered(self) -> None:
        """Marks the replica as cut off: no controller has answered."""
        self.cut_off = True

    def holds(self, now: float, operator: str = "") -> bool:
        return now < self.until or (self.cut_off and operator in self.alone)

    def serves_some(self, now: float) -> bool:
        return now < self.until or (self.cut_off and bool(self.alone))

    def check(self, now: float, operator: str = "") -> None:
        """Checks that the operator may be served. Call it before a batch is applied, and again before the batch is
        acknowledged. Raises LeaseLost."""
        if not self.holds(now, operator):
            raise LeaseLost(
                "this replica's lease has lapsed: its partitions may have other owners",
                remedy="refresh the assignment; the replica serves again once it reaches the controller",
            )


# -- Registry --------------------------------------------------------------------------------------------------------


class PartitionRegistry:
    """Manages a replica's data directory, its operators and its partitions.

    Raises DataDirLocked if another process has claimed the directory, InvalidArgument if it belongs to another replica.

    Layout:

    * ``LOCK``: locked by the process that owns the directory
    * ``NODE`` and ``workers/``: see :mod:`stateflow.node.workers`
    * ``REPLICA``: see :mod:`stateflow.partition.data_directory`
    * ``TERM``: greatest term of a controller that this replica has seen, and the ledger of that term
    * ``ALONE``: operators that may be served while no controller answers
    * ``RUNNING``, ``CRASHES``: see :class:`stateflow.partition.running.Crashes`
    * ``operators/<name>/operator.json``: description of an operator
    * ``operators/<name>/p00003/<copy>/``: RocksDB, see :mod:`stateflow.partition.data_directory`
    * ``commits/``: see :mod:`stateflow.partition.layout`
    * ``passed/``: see :mod:`stateflow.partition.sources`
    * ``bundles/<digest>.zip``: see :mod:`stateflow.code.bundles`
    * ``snapshots/<id>/``: hard links that serve a transfer; emptied at start
    """

    def __init__(
        self,
        info: ReplicaInfo,
        root: Path,
        settings: ReplicaSettings,
        clock: Clock,
        environment: Environment | None = None,
    ) -> None:
        self.info = info
        self.settings = settings
        self.clock = clock
        self.root = root
        self.environment = environment or Environment(settings)
        self._claim = self.environment.claim(root)
        self.snapshots = root / "snapshots"
        self.removed: set[Path] = set()  # snapshots that :meth:`.Sender.drop_unread` removes again if they are there
        try:
            self.identity = identify(self.environment, root, info.name)
            self.environment.remove_tree(self.snapshots)
            self.snapshots.mkdir(parents=True)
        except Exception:
            self._claim.close()
            raise
        self.digests = FileDigests()
        self._operators: dict[str, tuple[OperatorSpec, type[Operator]]] = {}
        self._deployed: dict[str, DeployedStates] = {}
        self._unloadable: dict[str, StateflowError] = {}
        self._recorded_us: dict[str, int] = {}  # operator → when the version kept here was recorded
        self._learning = self.environment.mutex()
        self._makers: Counter[str] = Counter()  # running calls that create something of an operator, by its name
        self._undeployed: dict[str, int] = {}  # operator → newest epoch that this process was told to drop
        self._local: dict[PartitionId, LocalPartition] = {}
        #: every change log, by its snapshot; an entry changes with the partition's ``logs``, under its ``mutex``
        self._followed: dict[str, tuple[LocalPartition, ChangeLog]] = {}
        #: called, from any thread, after each change of a partition's lifecycle
        self.on_change: Callable[[PartitionId], None] = lambda _: None
        #: called, from any thread, when a partition was lost
        self.on_lost: Callable[[], None] = lambda: None
        self._closed = False
        self.served_at = -math.inf  # when a batch last ran, monotonic seconds
        self.bundles = BundleStore(root / "bundles")
        self.quarantine = Quarantine(root, self.environment)
        durable = {"wal": False, "fsync": True}.get(settings.acknowledge)  # None: a standby confirms commits
        self.skipped_batches = SkippedBatches(root, self.environment, durable)
        self.commits = Commits(
            root,
            settings,
            self.environment,
            lambda partition: self.look(partition).directory,
            lambda partition, why: self.lose(self.local(partition), why),
            self._reopen,
            partial(self._reopen, flush=True),
        )
        self.copies = Copies(info.name, self.environment, self.commits, settings.disk_reserve_bytes)

    def recover_operator(self, folder: Path) -> None:
        """Loads an operator's description and code.

        Its partitions are recovered even without description and code, because the controller can send both.
        """
        file = folder / "operator.json"
        self._unloadable[folder.name] = Unavailable(
            "the operator's description is missing here",
            remedy="wait until the controller sends it",
            operator=folder.name,
        )
        if not file.exists():
            log.error("operator %s: description missing, requested from the controller", folder.name)
            return
        try:
            spec = OperatorSpec.from_json(json.loads(file.read_text()))
            if spec.name != folder.name:
                raise ValueError(f"it describes {spec.name!r}")
        except MALFORMED as error:
            kept = self.quarantine.put_aside(file, folder.name)
            log.error(
                "operator %s: description unreadable (%s), quarantined as %s; requested from the controller",
                folder.name,
                error,
                kept,
            )
            return
        self._recorded_us[spec.name] = spec.recorded_us
        try:
            self._know(spec, self._load(spec))
            del self._unloadable[spec.name]
        except StateflowError as error:
            log.error("operator %s cannot be served: %s", spec.name, error)
            self._unloadable[spec.name] = error
        get_ready()

    def put_aside(self, partition: PartitionId, directory: Path, why: str) -> None:
        """Quarantines a copy of a partition that cannot be used. Removes nothing that might be state."""
        self.commits.put_aside(partition, directory)
        kept = self.quarantine.put_aside(directory, partition.operator, directory.parent.name)
        log.error("%s is not served from %s, which is quarantined as %s: %s", partition, directory.name, kept, why)

    def lose(self, local: LocalPartition, why: StateDamaged) -> None:
        """Quarantines a partition that cannot be read any more. From then on the replica neither serves it nor makes
        promises about it."""
        with local.work, local.mutex:
            if not local.lifecycle.lose():
                return
            self._shut(local)
            local.unkept, local.directory = local.directory, None
            local.kept, local.lost = None, why
            self._put_aside_lost(local)
        self.on_change(local.id)
        self.on_lost()

    def _put_aside_lost(self, local: LocalPartition) -> None:
        """Quarantines a lost copy; the commit log repeats this if it fails. Callers hold ``work`` and ``mutex``."""
        if local.unkept is not None:
            try:
                if local.unkept.exists():
                    self.put_aside(local.id, local.unkept, str(local.lost))
                self.commits.forget([local.id])
                local.unkept = None
            except (OSError, CommitLogDamaged) as error:  # it stays where it is, and is still lost
                log.error("damaged copy %s cannot be quarantined: %s (damage: %s)", local.unkept, error, local.lost)

    def read_term(self) -> tuple[str, int]:
        """Returns (ledger, greatest term) of the controllers that this replica has seen; ("", 0): none.

        Raises DecodeError.
        """
        file = self.root / TERM
        if not file.exists():
            return "", 0
        try:
            kept = json.loads(file.read_text())
            return str(kept["ledger"]), int(kept["term"])
        except MALFORMED:
            raise DecodeError(
                "the record of this replica's controller is damaged",
                remedy="remove the file if only one controller runs, and restart the replica",
                path=file,
            ) from None

    def keep_term(self, ledger: str, term: int) -> None:
        self.environment.write_durably(self.root / TERM, json.dumps({"ledger": ledger, "term": term}))

    def read_alone(self) -> tuple[int, frozenset[str]]:
        """Returns (number, operators) of the stored permission to serve without a controller; no operators if it is
        damaged."""
        file = self.root / ALONE
        if not file.exists():
            return 0, frozenset()
        try:
            kept = json.loads(file.read_text())
            return int(kept["order"]), frozenset(map(str, kept["operators"]))
        except MALFORMED as error:
            log.error(
                "list of operators to serve without a controller cannot be read, a controller must allow them anew: %s",
                error,
            )
            return 0, frozenset()

    def keep_alone(self, order: int, operators: frozenset[str]) -> None:
        kept = {"order": order, "operators": sorted(operators)}
        self.environment.write_durably(self.root / ALONE, json.dumps(kept))

    def expect(self, more: int) -> None:
        """Checks that ``more`` databases can be opened in addition to the existing ones. Raises TooFewFiles."""
        here = sum(
            (local.directory is not None) + (local.incoming is not None) + (local.restoring is not None)
            for local in self.local_partitions()
        )
        self.environment.expect(here + more)

    def learn(self, spec: OperatorSpec) -> None:
        """Learns an operator: loads its code and keeps its description. A version older than the present one is
        ignored, because its request was sent or begun before the newer version was deployed.

        Raises OperatorNotImportable, OperatorOutdated, and SchemaMismatch if a partition here has states that cannot
        evolve to those of this code.
        """
        with self._learning:
            known = self._operators.get(spec.name)
            if known is not None and known[0] == spec:
                return
            if spec.recorded_us < self._recorded_us.get(spec.name, 0):
                self.operator(spec.name)
                return
            cls = self.check(spec)
            get_ready()
            folder = self.root / "operators" / spec.name
            folder.mkdir(parents=True, exist_ok=True)
            self.environment.write_durably(folder / "operator.json", json.dumps(spec.to_json()))
            self.environment.sync([folder.parent, self.root])  # a file is only as durable as its directory entries
            self._know(spec, cls)
            self._recorded_us[spec.name] = spec.recorded_us
            self._unloadable.pop(spec.name, None)

    def follow(self, spec: OperatorSpec) -> StateflowError | None:
        """Learns the version that is deployed now. Returns the error that prevents this; None: it is learnt. After an
        error, no older version serves in its place, and the controller names the version again at the next
        registration."""
        with self._learning:
            try:
                self.learn(spec)
                return None
            except StateflowError as error:
                log.error("operator %s cannot be served: %s", spec.name, error)
                self._operators.pop(spec.name, None)
                self._recorded_us[spec.name] = max(spec.recorded_us, self._recorded_us.get(spec.name, 0))
                self._unloadable[spec.name] = error
                return error

    @contextmanager
    def making(self, spec: OperatorSpec, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Learns an operator, and keeps it from being forgotten while the caller creates its partitions here.

        Raises the errors of :meth:`learn`.

        Args:
            check: raises if the request behind the call is void by now.
        """
        with self._learning:
            check()
            self.learn(spec)
            self._makers[spec.name] += 1
        try:
            yield
        finally:
            with self._learning:
                self._makers[spec.name] -= 1

    def _know(self, spec: OperatorSpec, cls: type[Operator]) -> None:
        self._deployed[spec.name] = DeployedStates.of(spec.state_schema, spec.dropped)
        self._operators[spec.name] = spec, cls

    def _stored_states(self, operator: str) -> set[StoredStates]:
        """Returns the distinct descriptions of states with which the operator's partitions here are stored."""
        found = {self.stored_states(local) for local in self.local_partitions() if local.id.operator == operator}
        return {states for states in found if states is not None}

    @staticmethod
    def stored_states(local: LocalPartition) -> StoredStates | None:
        """Returns the descriptions of the states of a partition served here; None: it is not served here, or nothing is
        stored.

        Opens no database.
        """
        if local.lifecycle.state is not State.OWNED:
            return None
        with local.mutex:
            return local.states if local.store is None else StoredStates.of(local.store)

    def undeployed(self, operator: str, epoch: int) -> None:
        """Refuses, from now on, requests to create partitions of an operator at this epoch or an older one, however
        late they arrive. This holds for this process only: requests to an earlier process are void."""
        self._undeployed[operator] = max(epoch, self._undeployed.get(operator, 0))

    def check_deployed(self, partition: PartitionId, epoch: int) -> None:
        """Checks that the operator was not undeployed at this epoch. Callers hold ``mutex``, so that a concurrent drop
        either is noticed here, or finds the partitions created. Raises StaleEpoch."""
        undeployed = self._undeployed.get(partition.operator, 0)
        if epoch <= undeployed:
            raise StaleEpoch(
                f"the operator was undeployed at epoch {undeployed}, the partition cannot be created at {epoch}",
                remedy="deploy it again",
                partition=partition,
            )

    def unlearn(self, operator: str) -> None:
        """Forgets an operator, unless partitions of it exist here or are being created, for example by a later
        deployment."""
        with self._learning:
            local_partitions = (local for local in self.local_partitions() if local.id.operator == operator)
            if self._makers[operator] or any(self._has_something(local) for local in local_partitions):
                return
            self._operators.pop(operator, None)
            self._deployed.pop(operator, None)
            self._unloadable.pop(operator, None)
            self._recorded_us.pop(operator, None)
            self.environment.remove_tree(self.root / "operators" / operator)

    @staticmethod
    def _has_something(local: LocalPartition) -> bool:
        with local.mutex:
            return (
                local.lifecycle.state is not State.ABSENT or local.incoming is not None or local.restoring is not None
            )

    def barrier(self) -> None:
        """Waits for every call that is changing something, so that later calls see all earlier decisions."""
        with self._learning:
            pass
        for local in self.local_partitions():
            with local.mutex:
                pass

    def _load(self, spec: OperatorSpec) -> type[Operator]:
        """Loads the class of a version. Raises OperatorNotImportable, which names this replica as the place of the
        import."""
        try:
            return class_of(spec, self.bundles)
        except OperatorNotImportable as error:
            error.where["process"] = f"replica {self.info.name}"
            raise

    def check(self, spec: OperatorSpec) -> type[Operator]:
        """Loads the class of a version and checks that it fits the states stored here. The version need not become the
        serving one. Raises the errors of :meth:`learn`."""
        cls = self._load(spec)
        _check_version(spec, cls)
        for stored in self._stored_states(spec.name):
            evolution_of(spec.name, cls, stored, DeployedStates.of(spec.state_schema, spec.dropped))
        return cls

    def operator(self, operator: str) -> tuple[OperatorSpec, type[Operator]]:
        try:
            return self._operators[operator]
        except KeyError:
            if (error := self._unloadable.get(operator)) is not None:
                raise error from None
            raise OperatorNotDeployed(
                f"there is no operator {operator!r} here",
                remedy="deploy it with `stateflow deploy module:Class`",
                replica=self.info.name,
            ) from None

    def deployed(self, operator: str) -> DeployedStates:
        """Returns the deployed states of a known operator; the same object until the operator is deployed again."""
        return self._deployed[operator]

    def operators(self) -> list[OperatorSpec]:
        return [spec for spec, _ in list(self._operators.values())]

    def local(self, partition: PartitionId) -> LocalPartition:
        """Returns a partition as it is here; an empty one if this replica has no copy of it."""
        local = self._local.get(partition)
        if local is None:
            local = self._local.setdefault(partition, self._empty(partition))
        return local

    def look(self, partition: PartitionId) -> LocalPartition:
        """Returns a partition as it is here, for reading. No entry is made for an absent partition, because callers may
        ask for any."""
        return self._local.get(partition) or self._empty(partition)

    def _empty(self, partition: PartitionId) -> LocalPartition:
        home = self.root / "operators" / partition.operator / f"p{partition.partition:05d}"
        checked = self.settings.debug_validate
        lifecycle = CheckedLifecycle(partition) if checked else Lifecycle(partition)
        local = LocalPartition(partition, lifecycle, home, self.environment.work_lock(), self.environment.mutex())
        if checked:
            local.mutex = CheckedMutex(local.mutex, local)
        return local

    def local_partitions(self) -> Iterator[LocalPartition]:
        return iter(list(self._local.values()))

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken in a state that only a bug leads to."""
        for partition, local in list(self._local.items()):
            with local.mutex:
                local.validate()
                known = partition.operator in self._operators or partition.operator in self._unloadable
                if local.id != partition or not (known or local.lifecycle.state is State.ABSENT):
                    raise self._broken(
                        "a partition has another partition's name, or an operator that is unknown here", local
                    )
                for changes in local.logs.values():
                    if self._followed.get(changes.snapshot_id) != (local, changes):
                        raise self._broken("a change log is not found by its snapshot", local)
        for snapshot_id, (local, changes) in list(self._followed.items()):
            with local.mutex:
                if snapshot_id in self._followed and local.logs.get(changes.move_id) is not changes:
                    raise self._broken("a change log is still found by its snapshot, though it was dropped", local)

    def _broken(self, words: str, local: LocalPartition) -> InvariantBroken:
        return InvariantBroken(words, remedy=REPORT_LINE, partition=local.id, replica=self.info.name)

    def store(self, local: LocalPartition) -> PartitionStore:
        """Returns a partition's store; the first call opens it. Raises StateMissing, StateDamaged, Unavailable."""
        store = local.store
        if store is None:
            with local.mutex:  # readers hold no lock
                store = local.store
                if store is None:
                    if self._closed:
                        raise Unavailable(
                            "the replica is stopping", remedy="the request is retried", partition=local.id
                        )
                    if local.directory is None:
                        raise StateMissing("the partition is not here", remedy="ask its owner", partition=local.id)
                    store = local.store = self.commits.open(local.id, local.lifecycle.epoch, local.directory)
        return store

    def close_store(self, local: LocalPartition) -> None:
        """Closes a partition's store; the next caller that needs the store opens it again.

        Followers start over, because it is unknown whether the closed store contains the last write.
        """
        with local.work, local.mutex:
            if local.lifecycle.running or local.store is None:
                return
            with contextlib.suppress(Exception):
                local.states = StoredStates.of(local.store)
            self._shut(local)

    def _shut(self, local: LocalPartition) -> None:
        """Closes a partition's operator and store, and ends its followers. Callers hold ``work`` and ``mutex``."""
        processor, store = local.processor, local.store
        local.processor = local.store = local.since = None
        for move_id in list(local.logs):
            self.drop_log(local, move_id)
        if processor is not None:
            processor.let_go(self.environment.aside)
        if store is not None:
            with contextlib.suppress(Exception):  # what could be written is written
                store.close()

    def _reopen(self, partition: PartitionId, *, flush: bool = False) -> None:
        """Opens the store of a partition served here, or quarantines a lost one. ``flush``: then writes all of it to
        files that are durable. Raises the errors of :meth:`store`, and of the disk."""
        local = self.look(partition)
        if flush or local.store is None:
            with self.reopening(local, only_unsure=True), local.work:  # nobody closes the store meanwhile
                with local.mutex:
                    self._put_aside_lost(local)
                if local.lifecycle.state in SERVED:
                    store = self.store(local)
                    if flush:
                        store.flush()

    @contextmanager
    def reopening(self, local: LocalPartition, *, only_unsure: bool = False) -> Iterator[None]:
        """Closes the store if a write outside of a batch fails; the caller may then try again.

        A database that could not write accepts no more writes before it is reopened, and the processor accepts none
        while its last commit is unsure. Callers do not hold ``mutex``.

        Args:
            only_unsure: close the store only if the last commit is unsure, or the database failed and still cannot
                write, because other errors may not be of the database.
        """
        try:
            yield
        except Exception as error:
            if not (only_unsure or isinstance(error, StateflowError)):
                self.close_store(local)
            elif local.is_unsure or type(error.__cause__ or error) is Exception:  # RocksDB's errors have no class
                with local.work:  # otherwise a commit that is just being written would look like one that failed
                    if local.is_unsure or not local.can_flush():
                        self.close_store(local)
            raise

    def settle(self, local: LocalPartition) -> None:
        """Writes the positions held for a partition, from skipped batches, to its database. Callers hold ``work``, or
        ``mutex`` with no batch running. Raises errors of the disk."""
        if local.skipped is not None:
            self.skipped_batches.settle(local, self.store(local), self.commits.log)

    def sync(self, store: PartitionStore) -> float:
        """Forces a store to disk. Returns the duration in milliseconds."""
        began = self.clock.monotonic()
        store.sync()
        return (self.clock.monotonic() - began) * 1e3

    def add_log(self, local: LocalPartition, changes: ChangeLog) -> None:
        """Adds a follower's change log, which is empty. Callers hold ``mutex``, and have dropped the log of the same
        move."""
        local.logs[changes.move_id] = changes
        self._followed[changes.snapshot_id] = local, changes

    def followed(self, snapshot_id: str) -> tuple[LocalPartition, ChangeLog] | None:
        """Returns the partition of which a snapshot was taken, and the change log since then; None: there is no such
        snapshot, or its log was dropped. Callers need no lock."""
        return self._followed.get(snapshot_id)

    def drop_log(self, local: LocalPartition, move_id: str) -> None:
        """Removes a follower's change log and its snapshot. Callers hold ``mutex``."""
        changes = local.logs.pop(move_id, None)
        if changes is not None:
            self._followed.pop(changes.snapshot_id, None)
            changes.close()
            self.remove_snapshot(self.snapshots / changes.snapshot_id)

    def remove_snapshot(self, directory: Path) -> None:
        """Removes a snapshot that nobody will use. Its name is never used again."""
        self.removed.add(directory)
        self.environment.remove_tree(directory)

    def close(self) -> None:
        """Closes everything in bounded time. A partition to which a thread still writes is left as after a kill, and
        commits no further batch. Raises the first error, after everything else was closed."""
        self._closed = True
        _all([self._close_partitions, self.skipped_batches.close, self.commits.close, self._claim.close])

    def _close_partitions(self) -> None:
        closing: list[Callable[[], None]] = []
        with contextlib.ExitStack() as held:
            free = list(self._free(held))
            for local in free:
                if local.processor is not None:
                    with contextlib.suppress(Exception):  # else the next start finds the held positions
                        self.settle(local)
                    local.processor.let_go(closing.append)
            if closing:  # an operator that never returns from close() keeps nothing open
                self.environment.aside(partial(_all, closing), CLOSE_S_MAX)
            copies = [copy for local in free for copy in (local.incoming, local.restoring) if copy is not None]
            stores = [local.store for local in free if local.store is not None]
            _all([*(partial(self.copies.discard, copy) for copy in copies), *(store.close for store in stores)])

    def _free(self, held: contextlib.ExitStack) -> Iterator[LocalPartition]:
        """Yields the partitions on which no thread works any more. No thread can begin work on them until ``held``
        ends."""
        until = self.clock.monotonic() + RELEASE_S_MAX
        for local in self.local_partitions():
            if local.work.acquire(max(0.0, until - self.clock.monotonic())):
                held.callback(local.work.release)
                yield local
                continue
            if (processor := local.processor) is not None:
                processor.end()
            log.error("%s is still in use while the replica stops, its database is left open", local.id)


def _all(calls: Iterable[Callable[[], None]]) -> None:
    """Makes all calls, and raises the first error after the last call."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)
    if errors:
        raise errors[0]


def _check_version(spec: OperatorSpec, cls: type[Operator]) -> None:
    """Checks that code matches the deployed version. Code may have more states than the deployed version; with fewer it
    would lose some. Raises OperatorOutdated."""
    here = describe(cls, spec.partitions, spec.name)
    differs = [name for name in ("key", "output_schema") if getattr(here, name) != getattr(spec, name)]
    have = {each["name"]: each for each in json.loads(here.state_schema)}
    states: list[dict[str, Any]] = json.loads(spec.state_schema)
    differs += [f"state {each['name']}" for each in states if not _is_same(each, have.get(each["name"]))]
    if differs:
        raise OperatorOutdated(
            "the operator's code here is not the deployed version",
            remedy="install the deployed version on this replica and restart it, or deploy the version that is here",
            operator=spec.name,
            target=spec.target,
            differs=", ".join(differs),
        )


def _is_same(state: dict[str, Any], here: dict[str, Any] | None) -> bool:
    """Tells whether a state is stored in the same way by two descriptions. Descriptions by earlier versions have no
    types."""
    return here is not None and all(state[part] == here.get(part) for part in ("tag", "types") if part in state)
