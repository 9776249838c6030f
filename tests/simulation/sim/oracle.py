"""The oracle: it checks the invariants of a cluster during a run and at its end.

Every partition has one history: the commits of its owners, in the order in which their stores logged them. A commit
that does not continue the history comes from a replica that must not commit. At the end of a run, the oracle replays
the history on an operator that never moved and never crashed. Each output, and each byte of the partition's store, must
be the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stateflow.changes import Mutations
from stateflow.partition import layout
from stateflow.partition.lifecycle import Lifecycle, State
from stateflow.partition.positions import Batch, behind
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId
from tests.simulation.sim import flow
from tests.simulation.sim.flow import SCHEMA_BYTES, Flow


class Violation(AssertionError):
    pass


#: stand in place of the batch number in commits that are not of a batch
TAKEN, SETTLED = -1, -2


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of a batch, or an entry of one of three other kinds.

    Batch number TAKEN: a client took over its source; the batch names the client's session. Batch number SETTLED: the
    positions of skipped batches were written to the partition's own database. A skipped batch has no commit of its own,
    and the sequence of the commit before it.
    """

    sequence: int
    epoch: int
    replica: str
    batch: Batch
    rows: bytes
    now_us: int
    output: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes how the owner of an epoch got its copy, according to the ledger.

    Attributes:
        origin: the epoch from which the copy was taken.
        how: CREATED, MOVE, or the kind of takeover.
        abandoned: whether takeovers with epochs between ``origin`` and this one were given up; they may have happened.
        over: whether the takeover of this epoch was itself given up.
    """

    origin: int = 0
    how: str = "CREATED"
    abandoned: bool = False
    over: bool = False


def batches(history: Iterable[Commit]) -> list[Commit]:
    return [commit for commit in history if commit.batch.number >= 0]


@dataclass(slots=True)
class History:
    """History of an epoch: its commits, and the batches that the partition skipped, which needed no commit."""

    commits: list[Commit] = field(default_factory=list)
    skipped_batches: list[Commit] = field(default_factory=list)

    def up_to(self, sequence: int, held: Mapping[str, int] = MappingProxyType({})) -> History:
        """Returns the history up to a sequence.

        Args:
            held: source → the last batch that the partition skipped after that sequence and still counts.
        """
        skipped_batches = [
            each
            for each in self.skipped_batches
            if each.sequence < sequence
            or (each.sequence == sequence and each.batch.number <= held.get(each.batch.source, -1))
        ]
        return History(self.commits[:sequence], skipped_batches)

    @property
    def batches(self) -> list[Commit]:
        return batches([*self.commits, *self.skipped_batches])

    def newest(self, source: str) -> int:
        """Returns the number of the source's last batch, -1 if there is none."""
        return max([c.batch.number for c in self.batches if c.batch.source == source], default=-1)


def may_commit(lifecycle: Lifecycle) -> bool:
    return lifecycle.state is State.OWNED or lifecycle.running


class Oracle:
    """Checks one cluster.

    Every epoch of a partition has its own history. It begins with the history of the epoch from which its owner's copy
    was taken, up to the sequence of that copy: all of it after a move, perhaps less after a takeover by a copy that
    lagged.

    Args:
        acknowledge: the replicas' setting, which decides in which cases acknowledged batches may be lost.
        operator: the class that is deployed.
    """

    def __init__(self, acknowledge: str, operator: type[Flow] = Flow) -> None:
        self.acknowledge, self.operator = acknowledge, operator
        self.epochs: dict[PartitionId, int] = {}  # the newest epoch that had an owner
        self.acknowledged: dict[tuple[PartitionId, str, int], bytes] = {}
        self.owners: dict[tuple[PartitionId, int], str] = {}  # by epoch
        self.commits = self.lost = self.skipped_batches = self.settles = 0
        self._histories: dict[tuple[PartitionId, int], History] = {}
        #: histories of owners before they lost power; standbys may still have the lost part
        self._before_power: dict[tuple[PartitionId, int], list[History]] = {}
        #: partitions at which a client gave up batches, as batches of a former client had taken their numbers
        self.given_up: set[PartitionId] = set()
        self._lost: set[tuple[PartitionId, str, int]] = set()

    def history(self, partition: PartitionId) -> History:
        """Returns the history of the newest epoch."""
        return self._histories.get((partition, self.epochs.get(partition, 0)), History())

    # -- while it runs ------------------------------------------------------------------------------------

    def changed(self, partition: PartitionId, nodes: dict[str, Any]) -> None:
        """Checks, after a lifecycle has changed, that at most one replica may commit to the partition.

        Whether each lifecycle is valid by itself is not checked here: lifecycles validate themselves.
        """
        able = [name for name, node in nodes.items() if may_commit(node.lifecycle(partition))]
        serving = [name for name in able if nodes[name].leased]
        if len(serving) > 1:
            raise Violation(f"{' and '.join(serving)} may both commit to {partition}")
        for name in able:
            lifecycle = nodes[name].lifecycle(partition)
            if self.owners.setdefault((partition, lifecycle.epoch), name) != name:
                raise Violation(f"{partition} was owned by two replicas at epoch {lifecycle.epoch}")

    def serves(self, partition: PartitionId, replica: str, epoch: int, given_up: bool) -> None:
        """Checks that a replica that has a lease may commit to the partition at this epoch.

        Args:
            given_up: whether the takeovers of all newer epochs were given up, according to the ledger.
        """
        if epoch < self.epochs[partition]:
            if not given_up:
                raise Violation(f"{replica} commits to {partition} at epoch {epoch} after {self.epochs[partition]}")
            before = self.history(partition).batches
            self.epochs[partition] = epoch
            self._gone(partition, before, self.acknowledge != "standby", "by a takeover that was given up")

    def committed(
        self, partition: PartitionId, replica: str, epoch: int, batch: Batch, rows: bytes, now_us: int, wrote: Mutations
    ) -> None:
        """Adds a commit to its epoch's history.

        A replica whose lease has lapsed may still commit, but must not acknowledge the batch; ``answered`` checks that.
        """
        written = dict(wrote.puts)
        sequence = int.from_bytes(written[layout.SEQUENCE], "big")
        history = self._continued(partition, replica, epoch, sequence)
        output = written[layout.OUTPUT + batch.source.encode()]
        history.append(Commit(sequence, epoch, replica, batch, rows, now_us, output))
        self.commits += 1

    def taken(self, partition: PartitionId, replica: str, epoch: int, batch: Batch, wrote: Mutations) -> None:
        """Adds to the history that a newer client took over the source."""
        sequence = int.from_bytes(dict(wrote.puts)[layout.SEQUENCE], "big")
        history = self._continued(partition, replica, epoch, sequence)
        history.append(Commit(sequence, epoch, replica, batch, b"", 0, b""))

    def settled(self, partition: PartitionId, replica: str, epoch: int, wrote: Mutations) -> None:
        """Adds to the history that the positions of skipped batches were written to the partition's own database."""
        sequence = int.from_bytes(dict(wrote.puts)[layout.SEQUENCE], "big")
        history = self._continued(partition, replica, epoch, sequence)
        history.append(Commit(sequence, epoch, replica, Batch("", SETTLED), b"", 0, b""))
        self.settles += 1

    def passed(self, partition: PartitionId, replica: str, epoch: int, batch: Batch, now_us: int) -> None:
        history = self._histories.get((partition, epoch))
        if history is None:
            raise Violation(f"{batch} passes {partition} at {replica} at epoch {epoch}, which nobody owned")
        if history.newest(batch.source) != batch.number - 1:
            raise Violation(f"{batch} passes {partition} at {replica} behind {history.newest(batch.source)}")
        history.skipped_batches.append(Commit(len(history.commits), epoch, replica, batch, b"", now_us, b""))
        self.skipped_batches += 1

    def _continued(self, partition: PartitionId, replica: str, epoch: int, sequence: int) -> list[Commit]:
        history = self._histories.get((partition, epoch))
        if history is None:
            raise Violation(f"{replica} commits to {partition} at epoch {epoch}, which nobody owned")
        if sequence != len(history.commits) + 1:
            raise Violation(f"{replica} commits {sequence} to {partition} after {len(history.commits)}")
        return history.commits

    def opened(
        self, partition: PartitionId, epoch: int, sequence: int, held: Mapping[str, int], power_was_lost: bool
    ) -> None:
        """Checks the copy that an owner has after a restart, and cuts the history to that copy.

        Args:
            sequence: the sequence of the copy.
            held: source → the last batch that the partition skipped, as the replica stored it.
            power_was_lost: whether the replica lost power, so that the copy may lack commits.
        """
        self.epochs.setdefault(partition, epoch)
        history = self._histories.setdefault((partition, epoch), History())
        if sequence > len(history.commits):
            raise Violation(f"{partition} came back with {sequence} of {len(history.commits)} commits of epoch {epoch}")
        for source, number in held.items():
            passed = [each.batch.number for each in history.skipped_batches if each.batch.source == source]
            if number not in passed:
                raise Violation(f"{partition} came back as if batch {number} of {source} had passed it")
        kept = history.up_to(sequence, held)
        missing = [each for each in history.batches if each not in kept.batches]
        if missing and not power_was_lost:
            raise Violation(f"{partition} lost {missing[0].batch} although its power was never lost")
        before = self.history(partition).batches
        if missing:
            self._before_power.setdefault((partition, epoch), []).append(history)
        self._histories[partition, epoch] = kept
        self._gone(partition, before, self.acknowledge == "wal", "with its power")

    def owned(self, partition: PartitionId, replica: str, epoch: int, entries: dict[bytes, bytes], plan: Plan) -> None:
        """Begins an epoch's history when a lifecycle becomes OWNED: the partition now contains what the copy contains.

        Args:
            entries: the entries of the owner's copy.
            plan: how the owner got the copy.
        """
        if (partition, epoch) in self._histories:
            return
        before = self.history(partition).batches
        if not plan.over:
            self.epochs[partition] = max(epoch, self.epochs.get(partition, 0))
        source = plan.origin
        if plan.how == "LOCAL":  # the copy is of the newest epoch at which this replica was the owner
            source = max(e for (p, e), name in self.owners.items() if (p, name) == (partition, replica) and e < epoch)
        sequence = int.from_bytes(entries.get(layout.SEQUENCE, b""), "big")
        origin = self._histories.get((partition, source), History())
        # a power loss splits the history: the owner continues without the lost part, which a standby may have
        if parted := self._before_power.get((partition, source)):
            histories = [origin, *parted] if plan.how == "STANDBY" else [origin]
            could = [h for h in histories if len(h.commits) >= sequence]
            played = (h for h in could if self.same(entries, self._play(partition, h.up_to(sequence))))
            origin = next(played, History())
            if sequence and not origin.commits:
                raise Violation(f"{partition} has {sequence} commits by {plan.how}, of none of {len(could)} histories")
        if sequence > len(origin.commits):
            raise Violation(f"{partition} has {sequence} of {len(origin.commits)} commits by {plan.how}")
        kept = origin.up_to(sequence)
        missing = [each for each in origin.batches if each not in kept.batches]
        if missing and plan.how != "STANDBY":
            raise Violation(f"{partition} lost {missing[0].batch} by {plan.how}")
        self._histories[partition, epoch] = kept
        # a takeover that its target never reported, and that was given up, does not count: later batches may be lost
        may = plan.how == "STANDBY" or (plan.abandoned and plan.how == "LOCAL")
        self._gone(partition, before, may and self.acknowledge != "standby", f"by {plan.how}")

    def _gone(self, partition: PartitionId, before: list[Commit], acknowledged_too: bool, how: str) -> None:
        there = {(c.batch.source, c.batch.number) for c in self.history(partition).batches}
        for commit in before:
            if (commit.batch.source, commit.batch.number) not in there:
                key = partition, commit.batch.source, commit.batch.number
                if key in self.acknowledged and not acknowledged_too:
                    raise Violation(f"{partition} lost the acknowledged {commit.batch} {how}")
                self.lost += 1
                self._lost.add(key)
                self.acknowledged.pop(key, None)

    def newest(self, partition: PartitionId, source: str) -> int:
        """Returns the number of the source's last batch that the partition contains, -1 if there is none."""
        return self.history(partition).newest(source)

    def answered(self, partition: PartitionId, source: str, number: int, output: bytes) -> None:
        """Checks that a batch acknowledged to a client was committed once, with the output that the client got."""
        contained = self.history(partition).batches
        committed = [c for c in contained if (c.batch.source, c.batch.number) == (source, number)]
        key = partition, source, number
        if key in self._lost:
            return  # the answer is from before the loss, or is to a batch that was sent again
        if len(committed) != 1:
            raise Violation(f"batch {number} of {source} was acknowledged and is {len(committed)} times in {partition}")
        if committed[0].output != output:
            raise Violation(f"batch {number} of {source} gave another output than it committed in {partition}")
        if self.acknowledged.setdefault(key, output) != output:
            raise Violation(f"batch {number} of {source} gave two outputs in {partition}")

    # -- in the end ---------------------------------------------------------------------------------------

    @staticmethod
    def same(one: dict[bytes, bytes], other: dict[bytes, bytes]) -> bool:
        """Tells whether two copies of a partition are equal, apart from their ownership records."""
        return _content(one) == _content(other)

    def compare(
        self,
        partition: PartitionId,
        entries: dict[bytes, bytes],
        sent: dict[tuple[str, int], bytes],
        mended: Collection[str] = (),
    ) -> None:
        """Checks that the owner's copy equals that of an undisturbed operator with the same input. Raises Violation.

        Args:
            sent: (source, number) → rows, for every batch that clients sent to this partition.
            mended: sources whose clients resent all lost batches.
        """
        history = self.history(partition)
        seen = {(c.batch.source, c.batch.number): c.rows for c in history.batches}
        if len(seen) != len(history.batches):
            raise Violation(f"{partition} took a batch twice")
        told = partition in self.given_up
        lost = {(source, n) for p, source, n in self._lost if p == partition and (told or source not in mended)}
        missing = [key for key in sent if key not in seen and key not in lost]
        if missing or not all(sent[key] == rows for key, rows in seen.items()):
            raise Violation(f"{partition} took other batches than were sent; missing: {missing}")
        expected = self._play(partition, history)
        visited = self._play(partition, history, visits=True)
        if _cells(visited) != _cells(expected):
            raise Violation(f"{partition} has other states than if nothing had passed it")
        if not self.same(entries, expected):
            one, other = _content(entries), _content(expected)
            different = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
            raise Violation(f"{partition} differs from an uninterrupted run in {different[:5]}")

    def _play(self, partition: PartitionId, history: History, *, visits: bool = False) -> dict[bytes, bytes]:
        """Replays the history on an operator that never moved and never crashed, and returns the entries of its store.

        Args:
            visits: also apply the batches that the partition skipped.
        """
        store = MemoryStore()
        processor, newest = PartitionProcessor(self.operator, partition, store, 1), None
        step, flow.step = flow.step, lambda: None  # no thread may pause here, as the replay is not part of the run
        skipped_batches = deque(history.skipped_batches)
        try:
            for commit in history.commits:
                held: dict[str, layout.Position] = {}
                while skipped_batches and skipped_batches[0].sequence < commit.sequence:
                    each = skipped_batches.popleft()
                    if visits:
                        if processor.apply(each.batch, SCHEMA_BYTES, each.rows, each.now_us).output:
                            raise Violation(f"{each.batch} passed {partition}, where something was due")
                        continue
                    before = held.get(each.batch.source) or processor.contains(each.batch.source)
                    assert before is not None
                    held[each.batch.source] = behind(before, each.batch, 0, each.now_us)
                if commit.batch.number == SETTLED:
                    if not visits:
                        processor.settle(held)
                    continue
                if commit.batch.number == TAKEN:
                    assert commit.batch.session is not None
                    # the same session again: the client opened its source once more, at another copy
                    if commit.batch.session == newest:
                        store.apply(Mutations(puts=layout.lapsing(store)))
                        processor = PartitionProcessor(self.operator, partition, store, 1)
                    newest = commit.batch.session
                    processor.adopt(held)
                    processor.open_source(commit.batch.source, commit.batch.session)
                    continue
                processor.adopt(held)
                output = processor.apply(commit.batch, SCHEMA_BYTES, commit.rows, commit.now_us).output
                if output != commit.output:
                    raise Violation(f"{partition}: {commit.batch} gave another output than without interruption")
        finally:
            flow.step = step
        return dict(store.scan(b""))


def _cells(entries: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns the entries of states and timers, without the partition's metadata."""
    return {k: v for k, v in entries.items() if not k.startswith(b"m")}


def _content(entries: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {k: v for k, v in entries.items() if k != layout.OWNERSHIP and not k.startswith(layout.LAPSED)}
