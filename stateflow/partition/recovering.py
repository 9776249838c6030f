"""Recovery of a data directory when a replica starts: finds each partition's newest copy that this replica owned.

:mod:`stateflow.partition.install` describes what a copy on disk may look like, and why. Nothing is installed here: the
record that decides is there already, and no other one is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stateflow.errors import CommitLogDamaged, DecodeError, StateDamaged, StateMissing
from stateflow.partition import layout
from stateflow.partition.change_feed import Kept
from stateflow.partition.commits import read_sequence
from stateflow.partition.install import PART, RECEIVED, UNFINISHED
from stateflow.partition.lifecycle import State
from stateflow.partition.registry import PartitionRegistry
from stateflow.storage.commit_log import Commit
from stateflow.storage.faults import damage
from stateflow.types import PartitionId, ReplicaInfo


class Recovery:
    """Recovers a data directory. Runs once, before any other use."""

    def __init__(self, registry: PartitionRegistry) -> None:
        self._registry = registry
        self._given_up = False

    def give_up(self) -> None:
        """Ends the recovery early, because this process must end. Called from another thread."""
        self._given_up = True

    def run(self) -> None:
        """Finds the partitions in the directory. Removes nothing that might be state: copies that cannot be used are
        quarantined and logged."""
        registry = self._registry
        registry.commits.find()
        registry.skipped_batches.find()
        registry.quarantine.say()
        for folder in sorted(path for path in (registry.root / "operators").glob("*") if path.is_dir()):
            # files seen here may not be durable yet: the last process may have been killed before it synced
            registry.environment.sync([folder, folder.parent, registry.root])
            registry.recover_operator(folder)
            for home in sorted(folder.glob("p[0-9][0-9][0-9][0-9][0-9]")):
                if self._given_up:
                    return
                rests = list(home.glob("*" + PART))
                if rests:
                    registry.environment.sync(
                        [home]
                    )  # otherwise a half removed one may come back under the name of a whole one
                for rest in rests:
                    registry.environment.remove_tree(rest)
                self._recover(PartitionId(folder.name, int(home.name[1:])), home)
        registry.expect(0)
        registry.bundles.keep_only({spec.bundle for spec in registry.operators()})
        registry.commits.begin()
        registry.skipped_batches.begin()

    def _recover(self, partition: PartitionId, home: Path) -> None:
        """Chooses the newest copy on disk that this replica owned, and completes it from the commit log.

        Copies are only read here, which takes a third of the time of opening them; they are opened when needed.
        """
        registry = self._registry
        found: list[_Copy] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir() and path.name != RECEIVED):
            if (directory / UNFINISHED).exists():
                registry.copies.remove(directory)
                continue
            try:
                copy = self._look_at(partition, directory)
            except (StateMissing, StateDamaged, DecodeError, CommitLogDamaged) as error:
                if _held_nothing(directory):
                    registry.copies.remove(directory)
                else:
                    registry.put_aside(partition, directory, str(error))
                continue
            if self._is_ours(copy.ownership):
                found.append(copy)
            elif copy.incoming:
                registry.copies.remove(directory)
            else:
                owner = "no replica" if copy.ownership is None else repr(copy.ownership.replica)
                registry.put_aside(partition, directory, f"its ownership record names {owner}")
        found.sort(key=lambda copy: (copy.epoch, not copy.incoming))  # a copy made from a sealed one ranks below it
        while found and not self._complete(partition, found[-1]):
            found.pop()
        if not found:
            return
        *older, newest = found
        for copy in older:  # as is done when a newer copy is owned
            registry.copies.remove(copy.directory)
        registry.copies.recovered(newest.directory)
        local, ownership = registry.local(partition), newest.ownership
        assert ownership is not None
        successor = ReplicaInfo(ownership.target, ownership.target_site, ownership.target_address)
        local.lifecycle.recover(
            State(ownership.state),
            ownership.epoch,
            ownership.move_id,
            successor if ownership.state == State.SEALED else None,
        )
        local.directory, local.schema = newest.directory, newest.schema
        if ownership.state == State.OWNED:
            sequence = newest.lacking[-1].sequence if newest.lacking else newest.sequence
            local.skipped = registry.skipped_batches.found(partition, ownership.epoch, sequence)
        if ownership.state == State.SEALED and ownership.move_id:
            local.kept = Kept(ownership.move_id, ownership.epoch, newest.sequence)

    def _is_ours(self, ownership: layout.Ownership | None) -> bool:
        return ownership is not None and ownership.replica == self._registry.info.name

    def _complete(self, partition: PartitionId, copy: _Copy) -> bool:
        """Completes a copy from the commit log. False: the copy was quarantined."""
        registry = self._registry
        try:
            registry.commits.complete(partition, copy.directory, copy.lacking, up_to_damage=copy.up_to_damage)
            if copy.lacking:
                copy.schema = self._read(copy.directory, up_to_damage=False).schema
            return True
        except StateDamaged as error:
            registry.put_aside(partition, copy.directory, str(error))
            return False

    def _look_at(self, partition: PartitionId, directory: Path) -> _Copy:
        """Reads a copy; a damaged copy is read up to the damage if the commit log has the rest.

        Raises StateMissing, StateDamaged, DecodeError, CommitLogDamaged.
        """
        commits = self._registry.commits
        damaged: StateDamaged | None = None
        try:
            copy = self._read(directory, up_to_damage=False)
        except StateDamaged as error:
            if not commits.knows(partition, directory):
                raise
            damaged = error  # perhaps only the end of its own log, torn by a loss of power
            try:
                copy = self._read(directory, up_to_damage=True)
            except (StateMissing, StateDamaged, DecodeError):
                raise damaged from None
        ownership = copy.ownership
        if ownership is not None and self._is_ours(ownership) and ownership.state == State.OWNED:
            copy.lacking = commits.lacking(partition, directory, ownership.epoch, copy.sequence)
        if damaged is not None and not copy.lacking:
            raise damaged
        return copy

    def _read(self, directory: Path, *, up_to_damage: bool) -> _Copy:
        """Reads a copy's ownership, sequence and schema. Raises StateMissing, StateDamaged, DecodeError."""
        store = self._registry.environment.open_read_only(directory, up_to_damage=up_to_damage)
        try:
            record = store.get(layout.OWNERSHIP)
            ownership = layout.Ownership.decode(record) if record else None
            schema, incoming = store.get(layout.SCHEMA), self._registry.copies.is_incoming(directory)
            return _Copy(directory, ownership, incoming, read_sequence(store), schema, up_to_damage)
        except Exception as error:
            raise damage(error) or error from error
        finally:
            store.close()


@dataclass(slots=True)
class _Copy:
    """A copy of a partition. ``lacking``: logged commits that its database lacks; ``up_to_damage``: its write-ahead log
    is damaged, and can be read only up to the damage."""

    directory: Path
    ownership: layout.Ownership | None
    incoming: bool
    sequence: int
    schema: bytes | None
    up_to_damage: bool
    lacking: list[Commit] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return 0 if self.ownership is None else self.ownership.epoch


def _held_nothing(directory: Path) -> bool:
    """Tells whether a copy is empty because the process was killed before it wrote anything."""
    names = [path.name for path in directory.iterdir()]
    return not any(name.startswith("MANIFEST-") or name.endswith((".sst", ".log")) for name in names)
