"""What must hold while a cluster runs, and what must be true of it in the end.

Every partition has one history: the commits of whoever owned it, in order, as their stores' logs took them. A commit
that does not continue it is one of somebody who may not commit. In the end the history is played into an operator that
never moved, never crashed: every output must have been this, and every byte of the partition's store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stateflow.changes import Mutations
from stateflow.runtime import layout
from stateflow.runtime.host import PartitionHost
from stateflow.runtime.lifecycle import Lifecycle, State
from stateflow.runtime.positions import Batch
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId
from tests.simulation.sim.flow import SCHEMA_BYTES, Flow


class Violation(AssertionError):
    pass


@dataclass(frozen=True, slots=True)
class Commit:
    sequence: int
    epoch: int
    replica: str
    batch: Batch
    rows: bytes
    now_us: int
    output: bytes


def may_commit(lifecycle: Lifecycle) -> bool:
    return lifecycle.state is State.OWNED or lifecycle.in_hand


class Oracle:
    """Args: lossy: acknowledged writes may be lost with power, as ``acknowledge="wal"`` says."""

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.histories: dict[PartitionId, list[Commit]] = {}
        self.acknowledged: dict[tuple[PartitionId, str, int], bytes] = {}
        self.owners: dict[tuple[PartitionId, int], str] = {}  # by epoch
        self.commits = self.lost = 0
        self._lost: set[tuple[PartitionId, str, int]] = set()

    # -- while it runs ------------------------------------------------------------------------------------

    def changed(self, partition: PartitionId, nodes: dict[str, Any]) -> None:
        """A lifecycle changed: at most one replica may commit."""
        able = [name for name, node in nodes.items() if may_commit(node.lifecycle(partition))]
        if len(able) > 1:
            raise Violation(f"{' and '.join(able)} may both commit to {partition}")
        for name in able:
            lifecycle = nodes[name].lifecycle(partition)
            if self.owners.setdefault((partition, lifecycle.epoch), name) != name:
                raise Violation(f"{partition} was owned by two replicas at epoch {lifecycle.epoch}")

    def committed(
        self, partition: PartitionId, replica: str, epoch: int, batch: Batch, rows: bytes, now_us: int, wrote: Mutations
    ) -> None:
        written = dict(wrote.puts)
        sequence = int.from_bytes(written[layout.SEQUENCE], "big")
        history = self.histories.setdefault(partition, [])
        if sequence != len(history) + 1:
            raise Violation(f"{replica} commits {sequence} to {partition} after {len(history)}")
        if history and epoch < history[-1].epoch:
            raise Violation(f"{replica} commits to {partition} at epoch {epoch} after {history[-1].epoch}")
        output = written[layout.OUTPUT + batch.source.encode()]
        history.append(Commit(sequence, epoch, replica, batch, rows, now_us, output))
        self.commits += 1

    def opened(self, partition: PartitionId, sequence: int, power_was_lost: bool) -> None:
        """An owner is back, with what its disk kept."""
        history = self.histories.setdefault(partition, [])
        if sequence > len(history):
            raise Violation(f"{partition} came back with {sequence} of {len(history)} commits")
        gone = history[sequence:]
        for commit in gone:
            key = partition, commit.batch.source, commit.batch.number
            if key in self.acknowledged and not (self.lossy and power_was_lost):
                raise Violation(f"{partition} lost the acknowledged batch {commit.batch}")
            if not power_was_lost:
                raise Violation(f"{partition} lost {commit.batch} although its power was never lost")
            self.lost += 1
            self._lost.add(key)
            self.acknowledged.pop(key, None)
        del history[sequence:]

    def newest(self, partition: PartitionId, source: str) -> int:
        """The last batch of a source that the partition contains, -1 for none."""
        return max([c.batch.number for c in self.histories.get(partition, ()) if c.batch.source == source], default=-1)

    def answered(self, partition: PartitionId, source: str, number: int, output: bytes) -> None:
        """A client was told this."""
        committed = [
            c for c in self.histories.get(partition, ()) if (c.batch.source, c.batch.number) == (source, number)
        ]
        key = partition, source, number
        if key in self._lost:
            return  # said before the power was lost, or of what was sent again
        if len(committed) != 1:
            raise Violation(f"batch {number} of {source} was acknowledged and is {len(committed)} times in {partition}")
        if committed[0].output != output:
            raise Violation(f"batch {number} of {source} gave another output than it committed in {partition}")
        if self.acknowledged.setdefault(key, output) != output:
            raise Violation(f"batch {number} of {source} gave two outputs in {partition}")

    # -- in the end ---------------------------------------------------------------------------------------

    def compare(self, partition: PartitionId, entries: dict[bytes, bytes], sent: dict[tuple[str, int], bytes]) -> None:
        """The partition, as its owner has it, is what an undisturbed operator makes of the same input.

        Args: sent: (source, number) → rows, of every batch that this partition was sent.
        """
        history = self.histories.get(partition, [])
        seen = {(c.batch.source, c.batch.number): c.rows for c in history}
        if len(seen) != len(history):
            raise Violation(f"{partition} took a batch twice")
        missing = [key for key in sent if key not in seen and (partition, *key) not in self._lost]
        if missing or not all(sent[key] == rows for key, rows in seen.items()):
            raise Violation(f"{partition} took other batches than were sent; missing: {missing}")
        store = MemoryStore()
        host = PartitionHost(Flow, partition, store, 1)
        for commit in history:
            output = host.apply(commit.batch, SCHEMA_BYTES, commit.rows, commit.now_us).output
            if output != commit.output:
                raise Violation(f"{partition}: {commit.batch} gave another output than without interruption")
        expected = dict(store.scan(b""))
        found = {key: value for key, value in entries.items() if key != layout.OWNERSHIP}
        if found != expected:
            different = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
            raise Violation(f"{partition} differs from an uninterrupted run in {different[:5]}")
