"""Stored state declarations of a partition, and how they become those that are declared now."""

from __future__ import annotations

import json
from typing import Any

from stateflow.runtime import layout
from stateflow.runtime.operator import Operator
from stateflow.state import DeployedStates, Evolution, declarations_of
from stateflow.storage import PartitionStore

#: for an operator that was never deployed: it has what its code declares
UNDEPLOYED = DeployedStates()


def read_schema(stored: bytes) -> dict[str, Any]:
    """Reads ``{"version", "states"}`` as :func:`schema_after` wrote them."""
    found = json.loads(stored)
    # a list: as written before operators had a state_version
    return found if isinstance(found, dict) else {"version": 1, "states": found}


def schema_after(stored: bytes | None, version: int, states: list[dict[str, Any]], deployed: DeployedStates) -> bytes:
    """Returns the schema to store once a partition's states are those that are declared."""
    before = [] if stored is None else read_schema(stored)["states"]
    return json.dumps({"version": version, "states": deployed.schema(before, states)}, sort_keys=True).encode()


def evolution_of(operator: str, cls: type[Operator], stored: bytes, deployed: DeployedStates) -> Evolution:
    """Returns the evolution from what a partition has stored to what ``cls`` declares. Raises SchemaMismatch."""
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
