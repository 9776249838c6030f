"""Evolution of a partition's stored states to the declared ones, once for each deployment.

A partition stores the version and the declarations of its states. :class:`Evolver` compares them with the deployed ones
before a batch, when the deployment has changed. If the stored cells can stay unchanged, or nothing is stored yet,
the new declarations are written with the next commit. Otherwise one commit of the whole partition converts the cells
and writes the new declarations. Its source is ``MIGRATION``, its batch number the new state version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stateflow.changes import Mutations
from stateflow.operator.instance import OperatorInstance
from stateflow.operator.operator import Operator
from stateflow.operator.watchdog import Guard
from stateflow.partition import layout
from stateflow.partition.commits import Committer
from stateflow.partition.positions import MIGRATION
from stateflow.state import DeployedStates, Evolution, KeyedState, declarations_of
from stateflow.state.evolution import Evolved
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: for an operator that was never deployed: it has what its code declares
UNDEPLOYED = DeployedStates()


def read_schema(stored: bytes) -> dict[str, Any]:
    """Reads ``{"version", "states"}`` as :func:`schema_after` wrote them."""
    found = json.loads(stored)
    # a list: as written before operators had a state_version
    return found if isinstance(found, dict) else {"version": 1, "states": found}


def schema_after(stored: bytes | None, version: int, states: list[dict[str, Any]], deployed: DeployedStates) -> bytes:
    """Returns the schema to store once a partition's states match their declaration."""
    before = [] if stored is None else read_schema(stored)["states"]
    return json.dumps({"version": version, "states": deployed.schema(before, states)}, sort_keys=True).encode()


def evolution_of(operator: str, cls: type[Operator], stored: bytes, deployed: DeployedStates) -> Evolution:
    """Returns the evolution from a partition's stored states to those that ``cls`` declares. Raises SchemaMismatch."""
    before, migrates = read_schema(stored), cls.migrate_state is not Operator.migrate_state
    declared = declarations_of(cls)
    return Evolution(operator, before["states"], before["version"], declared, cls.state_version, migrates, deployed)


def is_evolved(cls: type[Operator], store: PartitionStore, deployed: DeployedStates = UNDEPLOYED) -> bool:
    """Tells whether the stored schema is the declared one, or nothing is stored yet."""
    stored = store.get(layout.SCHEMA)
    if stored is None:
        return True
    states = [each.describe() for each in declarations_of(cls).values()]
    return stored == schema_after(stored, cls.state_version, states, deployed)


class Evolver:
    """Evolves the stored states of one partition.

    Args:
        deployed: returns the states of the present deployment; a new object after each change.
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
