"""How far a move is at its target."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stateflow.errors import StateflowError


class Phase(Enum):
    WARMING = "WARMING"
    CATCHING_UP = "CATCHING_UP"
    OWNED = "OWNED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Progress:
    """Sizes in bytes, rates in bytes a second, ``_ms`` milliseconds, ``_s`` seconds."""

    phase: Phase = Phase.WARMING
    bytes_warm: int = 0  # fetched of the base
    bytes_stored: int = 0  # of these, from the checkpoint store
    bytes_reused: int = 0  # of the base, here already
    base_bytes: int = 0  # of all base files
    bytes_delta: int = 0  # change sets received
    rounds: int = 0  # reports while catching up
    lag_bytes: int = 0  # written at the source, not applied here yet
    change_rate: float = 0.0  # of new change sets
    bandwidth: float = 0.0  # as seen while warming
    rtt_ms: float = 0.0
    stall_ms: float = 0.0  # by so much the longest of the last round trips exceeded rtt_ms
    sync_ms: float = 0.0  # what forcing the copy to disk took, the last time
    waited_s: float = 0.0  # since the base was there
    sequence: int = 0  # reached here
    epoch: int = 0  # when OWNED
    digest: str = ""  # when OWNED: chain digest, equal on both sides
    fault: StateflowError | None = None  # when FAILED; when OWNED: it was, and is lost
