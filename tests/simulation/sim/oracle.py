"""Rules that must hold while a cluster runs, and at its end.

Every partition has one history: the commits of its owners, in order, as their stores' logs took them. A commit that
does not continue the history comes from a replica that may not commit. In the end the oracle plays the history into an
operator that never moved and never crashed: every output must have been the same, and every byte of the partition's
store.
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


#: batch numbers of commits that are no batches
TAKEN, SETTLED = -1, -2


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit of a batch, or one of two other kinds.

    TAKEN in place of the batch number: a client takes over its source; the batch names the client. SETTLED: positions
    of skipped batches become the partition's own. A skipped batch has the sequence of the commit before.
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
    """Origin of an epoch, according to the ledger.

    ``origin``: the epoch its copy was taken from. ``how``: CREATED, MOVE, or the kind of takeover. ``abandoned``:
    takeovers between ``origin`` and this epoch were given up, but may have happened. ``over``: this one was given up
    itself.
    """

    origin: int = 0
    how: str = "CREATED"
    abandoned: bool = False
    over: bool = False


def batches(history: Iterable[Commit]) -> list[Commit]:
    return [commit for commit in history if commit.batch.number >= 0]


@dataclass(slots=True)
class History:
    """History of an epoch. ``skipped_batches``: skipped batches, which needed no commit; the next commit keeps them."""

    commits: list[Commit] = field(default_factory=list)
    skipped_batches: list[Commit] = field(default_factory=list)

    def up_to(self, sequence: int, held: Mapping[str, int] = MappingProxyType({})) -> History:
        """Cuts the history at a sequence. ``held``: source → its last batch, of those skipped after the last commit."""
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
        """Returns the last batch of a source, -1 for none."""
        return max([c.batch.number for c in self.batches if c.batch.source == source], default=-1)


def may_commit(lifecycle: Lifecycle) -> bool:
    return lifecycle.state is State.OWNED or lifecycle.running


class Oracle:
    """Checks of a cluster.

    Every epoch of a partition has its history. It begins as the history of the epoch from which its owner's copy was
    taken, cut where that copy ended: after a move the whole of it, after a takeover by a copy that lagged perhaps less.

    Args:
        acknowledge: the replicas' setting, which tells what may be lost of acknowledged batches.
    """

    def __init__(self, acknowledge: str) -> None:
        self.acknowledge = acknowledge
        self.epochs: dict[PartitionId, int] = {}  # the newest that was owned
        self.acknowledged: dict[tuple[PartitionId, str, int], bytes] = {}
        self.owners: dict[tuple[PartitionId, int], str] = {}  # by epoch
        self.commits = self.lost = self.skipped_batches = self.settles = 0
        self._histories: dict[tuple[PartitionId, int], History] = {}
        #: before power losses; standbys may still have these
        self._before_power: dict[tuple[PartitionId, int], list[History]] = {}
        self.given_up: set[PartitionId] = set()  # where the client gave up batches whose place a former client's took
        self._lost: set[tuple[PartitionId, str, int]] = set()

    def history(self, partition: PartitionId) -> History:
        """Returns the history of the newest epoch."""
        return self._histories.get((partition, self.epochs.get(partition, 0)), History())

    # -- while it runs ------------------------------------------------------------------------------------

    def changed(self, partition: PartitionId, nodes: dict[str, Any]) -> None:
        """Checks, after a lifecycle changed, that at most one replica may commit. Each lifecycle validates itself."""
        able = [name for name, node in nodes.items() if may_commit(node.lifecycle(partition))]
        serving = [name for name in able if nodes[name].leased]
        if len(serving) > 1:
            raise Violation(f"{' and '.join(serving)} may both commit to {partition}")
        for name in able:
            lifecycle = nodes[name].lifecycle(partition)
            if self.owners.setdefault((partition, lifecycle.epoch), name) != name:
                raise Violation(f"{partition} was owned by two replicas at epoch {lifecycle.epoch}")

    def serves(self, partition: PartitionId, replica: str, epoch: int, given_up: bool) -> None:
        """Checks a commit by a replica that has a lease. ``given_up``: whether the ledger gave up every newer epoch."""
        if epoch < self.epochs[partition]:
            if not given_up:
                raise Violation(f"{replica} commits to {partition} at epoch {epoch} after {self.epochs[partition]}")
            before = self.history(partition).batches
            self.epochs[partition] = epoch
            self._gone(partition, before, self.acknowledge != "standby", "by a takeover that was given up")

    def committed(
        self, partition: PartitionId, replica: str, epoch: int, batch: Batch, rows: bytes, now_us: int, wrote: Mutations
    ) -> None:
        """Adds a commit, also of a replica whose lease has lapsed: it may not acknowledge it, see ``answered``."""
        written = dict(wrote.puts)
        sequence = int.from_bytes(written[layout.SEQUENCE], "big")
        history = self._continued(partition, replica, epoch, sequence)
        output = written[layout.OUTPUT + batch.source.encode()]
        history.append(Commit(sequence, epoch, replica, batch, rows, now_us, output))
        self.commits += 1

    def taken(self, partition: PartitionId, replica: str, epoch: int, batch: Batch, wrote: Mutations) -> None:
        """Adds the takeover of a source by a newer client."""
        sequence = int.from_bytes(dict(wrote.puts)[layout.SEQUENCE], "big")
        history = self._continued(partition, replica, epoch, sequence)
        history.append(Commit(sequence, epoch, replica, batch, b"", 0, b""))

    def settled(self, partition: PartitionId, replica: str, epoch: int, wrote: Mutations) -> None:
        """Adds a settlement: positions of skipped batches become the partition's own."""
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
        """Checks what an owner's disk kept when it is back.

        ``held``: source → its last batch, of those that were skipped.
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
        """Begins an epoch's history, when a lifecycle becomes OWNED.

        The owner's copy is what the partition contains from now on.
        """
        if (partition, epoch) in self._histories:
            return
        before = self.history(partition).batches
        if not plan.over:
            self.epochs[partition] = max(epoch, self.epochs.get(partition, 0))
        source = plan.origin
        if plan.how == "LOCAL":  # from the replica's own newest epoch
            source = max(e for (p, e), name in self.owners.items() if (p, name) == (partition, replica) and e < epoch)
        sequence = int.from_bytes(entries.get(layout.SEQUENCE, b""), "big")
        origin = self._histories.get((partition, source), History())
        # a power loss splits the history: the owner goes on without the lost part, which a standby may have
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
        # a takeover by a replica that was not heard any more, and that never reported it, counts as if it had not been
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
        """Returns the last batch of a source that the partition contains, -1 for none."""
        return self.history(partition).newest(source)

    def answered(self, partition: PartitionId, source: str, number: int, output: bytes) -> None:
        """Checks an answer to a client."""
        contained = self.history(partition).batches
        committed = [c for c in contained if (c.batch.source, c.batch.number) == (source, number)]
        key = partition, source, number
        if key in self._lost:
            return  # it was answered before the loss, or answers what was sent again
        if len(committed) != 1:
            raise Violation(f"batch {number} of {source} was acknowledged and is {len(committed)} times in {partition}")
        if committed[0].output != output:
            raise Violation(f"batch {number} of {source} gave another output than it committed in {partition}")
        if self.acknowledged.setdefault(key, output) != output:
            raise Violation(f"batch {number} of {source} gave two outputs in {partition}")

    # -- in the end ---------------------------------------------------------------------------------------

    @staticmethod
    def same(one: dict[bytes, bytes], other: dict[bytes, bytes]) -> bool:
        """Tells whether two copies agree in all but their owner and its epoch."""
        return _content(one) == _content(other)

    def compare(
        self,
        partition: PartitionId,
        entries: dict[bytes, bytes],
        sent: dict[tuple[str, int], bytes],
        mended: Collection[str] = (),
    ) -> None:
        """Checks that the owner's copy is what an undisturbed operator makes of the same input. Raises Violation.

        Args:
            sent: (source, number) → rows, of every batch that this partition was sent.
            mended: sources that sent again what was lost.
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

    @staticmethod
    def _play(partition: PartitionId, history: History, *, visits: bool = False) -> dict[bytes, bytes]:
        """Plays the history into an operator that never moved and never crashed.

        ``visits``: applies skipped batches, too.
        """
        store = MemoryStore()
        processor, newest = PartitionProcessor(Flow, partition, store, 1), None
        step, flow.step = flow.step, lambda: None  # no thread may pause here: this is not part of the run
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
                    if commit.batch.session == newest:  # again, because the served copy is not the one that was told
                        store.apply(Mutations(puts=layout.lapsing(store)))
                        processor = PartitionProcessor(Flow, partition, store, 1)
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
    """Returns the entries of states and timers."""
    return {k: v for k, v in entries.items() if not k.startswith(b"m")}


def _content(entries: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {k: v for k, v in entries.items() if k != layout.OWNERSHIP and not k.startswith(layout.LAPSED)}
