"""Evolving a partition's stored states to the declared ones, once for each deployment."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stateflow.changes import Mutations
from stateflow.runtime import layout
from stateflow.runtime.committing import Committer
from stateflow.runtime.instance import OperatorInstance
from stateflow.runtime.positions import MIGRATION
from stateflow.runtime.schema import evolution_of, read_schema, schema_after
from stateflow.runtime.watchdog import Guard
from stateflow.state import DeployedStates, Evolution, KeyedState, declarations_of
from stateflow.state.evolution import Evolved
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


class Evolver:
    """Evolves the stored states of one partition.

    Args:
        deployed: returns the states as they are deployed now; a new object when that has changed.
    """

    def __init__(
        self,
        partition: PartitionId,
        store: PartitionStore,
        instance: OperatorInstance,
        committer: Committer,
        deployed: Callable[[], DeployedStates],
    ) -> None:
        self._partition, self._store = partition, store
        self._instance, self._committer, self._deployed = instance, committer, deployed
        #: deployment to which the stored states were evolved; None: not checked yet
        self._evolved: DeployedStates | None = None

    def evolve(self, now_us: int, watermark_us: int | None, guard: Guard) -> None:
        """Evolves the stored states if the deployment has changed. Raises SchemaMismatch, OperatorFailed."""
        deployed = self._deployed()
        if deployed is self._evolved:
            return
        self._committer.unsaved = []
        try:
            self._evolve(now_us, watermark_us, guard, deployed)
        except BaseException:
            self._committer.unsaved = []  # otherwise the next commit would record the new schema without evolving
            raise
        self._evolved = deployed

    def _evolve(self, now_us: int, watermark_us: int | None, guard: Guard, deployed: DeployedStates) -> None:
        instance = self._instance
        operator, state = instance.operator, instance.state
        stored = self._store.get(layout.SCHEMA)
        declared = schema_after(stored, operator.state_version, state.schema(), deployed)
        if stored == declared:
            return
        self._committer.unsaved = [(layout.SCHEMA, declared)]
        if stored is None:
            return
        evolution = evolution_of(self._partition.operator, type(operator), stored, deployed)
        if not evolution.needed:
            return
        reader = evolution.evolved(self._store)
        times_us, before = (now_us, watermark_us), read_schema(stored)["version"]
        try:
            made = converted(self._partition.operator, evolution, reader, instance, before, times_us)
            guard.begin_commit()
            self._committer.commit(MIGRATION, operator.state_version, made)
            guard.end_commit()
            state.invalidate()
            self._committer.known()
        finally:
            instance.attach()


def converted(
    operator: str,
    evolution: Evolution,
    reader: Evolved,
    instance: OperatorInstance,
    before: int,
    times_us: tuple[int, int | None],
) -> Mutations:
    """Makes the mutations that turn the stored states into the declared ones. Args: before: version of the stored
    states; times_us: processing time and watermark."""
    keyed = KeyedState(operator, declarations_of(type(instance.operator)), reader)

    def migrate(key: Any, old: SimpleNamespace) -> None:
        keyed.bind(instance.operator, key)
        instance.migrate_state(before, key, old)

    keyed.set_time(*times_us)
    try:
        return evolution.convert(reader, keyed, migrate)
    finally:
        keyed.unbind(instance.operator)
