"""What a data directory holds when a replica starts: of each partition the newest copy that is this replica's own."""

from __future__ import annotations

from pathlib import Path

from stateflow.errors import DecodeError, StateDamaged, StateMissing
from stateflow.runtime import layout
from stateflow.runtime.committing import read_sequence
from stateflow.runtime.lifecycle import State
from stateflow.runtime.registry import PART, RECEIVED, UNFINISHED, PartitionRegistry
from stateflow.runtime.transfer import Kept
from stateflow.storage.faults import damage
from stateflow.types import PartitionId, ReplicaInfo


class Recovery:
    """Done once, before anything else is asked of the data directory."""

    def __init__(self, registry: PartitionRegistry) -> None:
        self._registry = registry
        self._given_up = False

    def give_up(self) -> None:
        """From another thread: this process is to end, whatever was found."""
        self._given_up = True

    def run(self) -> None:
        """Find what is here. Nothing that might be state is removed: what cannot be used is put aside, and said."""
        registry = self._registry
        registry.evidence.say()
        for folder in sorted(path for path in (registry.root / "operators").glob("*") if path.is_dir()):
            # what is seen here may not be durable yet: the process may have been killed before it saw to that
            registry.environment.sync([folder, folder.parent, registry.root])
            registry.recover_operator(folder)
            for home in sorted(folder.glob("p[0-9][0-9][0-9][0-9][0-9]")):
                if self._given_up:
                    return
                rests = list(home.glob("*" + PART))
                if rests:
                    registry.environment.sync(
                        [home]
                    )  # else a half removed one may come back under the name of a whole one
                for rest in rests:
                    registry.environment.remove_tree(rest)
                self._recover(PartitionId(folder.name, int(home.name[1:])), home)
        registry.expect(0)

    def _recover(self, partition: PartitionId, home: Path) -> None:
        """Of the copies on disk the newest that is this replica's own counts.

        They are only looked at here, which takes a third of what opening them takes: that is done when they are needed.
        """
        registry = self._registry
        found: list[tuple[layout.Ownership, bool, Path, int, bytes | None]] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir() and path.name != RECEIVED):
            if (directory / UNFINISHED).exists():
                registry.remove(directory)
                continue
            try:
                ownership, sequence, schema = self._look_at(directory)
            except (StateMissing, StateDamaged, DecodeError) as error:
                if _held_nothing(directory):
                    registry.remove(directory)
                else:
                    registry.put_aside(partition, directory, str(error))
                continue
            incoming = registry.is_incoming(directory)
            if ownership is not None and ownership.replica == registry.info.name:
                found.append((ownership, not incoming, directory, sequence, schema))
            elif incoming:
                registry.remove(directory)
            else:
                owner = "nobody" if ownership is None else repr(ownership.replica)
                registry.put_aside(partition, directory, f"it says that it is {owner}'s copy")
        if not found:
            return
        found.sort(key=lambda copy: (copy[0].epoch, copy[1]))  # a copy of what is sealed comes before that
        *older, (ownership, _, directory, sequence, schema) = found
        for _, _, superseded, *_ in older:  # as is done when a newer copy is owned
            registry.remove(superseded)
        slot = registry.slot(partition)
        successor = ReplicaInfo(ownership.target, ownership.target_site, ownership.target_address)
        slot.lifecycle.recover(
            State(ownership.state),
            ownership.epoch,
            ownership.move_id,
            successor if ownership.state == State.SEALED else None,
        )
        slot.directory, slot.schema = directory, schema
        if ownership.state == State.SEALED and ownership.move_id:
            slot.kept = Kept(ownership.move_id, ownership.epoch, sequence)

    def _look_at(self, directory: Path) -> tuple[layout.Ownership | None, int, bytes | None]:
        """Whose a copy is, its sequence and its states. Raises StateMissing, StateDamaged, DecodeError."""
        store = self._registry.environment.open_read_only(directory)
        try:
            record = store.get(layout.OWNERSHIP)
            ownership = layout.Ownership.decode(record) if record else None
            return ownership, read_sequence(store), store.get(layout.SCHEMA)
        except Exception as error:
            raise damage(error) or error from error
        finally:
            store.close()


def _held_nothing(directory: Path) -> bool:
    """Was the process killed before anything was written there?"""
    names = [path.name for path in directory.iterdir()]
    return not any(name.startswith("MANIFEST-") or name.endswith((".sst", ".log")) for name in names)
