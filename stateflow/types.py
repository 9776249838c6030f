"""Words shared by every layer: who, where, which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from stateflow.errors import InvalidArgument

#: integer that rises by one each time a partition changes hands
Epoch = NewType("Epoch", int)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}\Z")


def check_name(kind: str, name: str) -> str:
    """Names become directory names and ledger ids, so they are kept plain. Raises InvalidArgument."""
    if not NAME.match(name):
        raise InvalidArgument(
            f"{name!r} is not a valid {kind} name",
            remedy="use letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return name


@dataclass(frozen=True, slots=True)
class PartitionId:
    operator: str
    partition: int

    def __str__(self) -> str:
        return f"{self.operator}/{self.partition}"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica as the controller knows it. ``weight`` is its share of new partitions relative to others."""

    name: str
    site: str
    address: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What it takes to run an operator anywhere: where its code is, and how its keys are cut.

    ``target`` is ``package.module:Class`` or ``/path/file.py:Class``. ``key`` are input column names.
    ``output_schema`` is an Arrow IPC schema.
    """

    name: str
    target: str
    partitions: int
    key: tuple[str, ...]
    output_schema: bytes
    state_schema: str  # JSON, as KeyedState.schema() gives it
    side_schemas: tuple[tuple[str, bytes], ...] = ()  # (tag, Arrow IPC schema), by tag
