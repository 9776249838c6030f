"""Claims: partitions that replicas have and the ledger does not know. The controller remembers them, so that it never
creates empty partitions in their place.

A replica that belongs to another ledger is not registered; a replica that registers may have operators that this ledger
has lost. Both report what they have. Claims are kept in memory, as replicas report them again to a new controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reconfig.adoption import Claim, Held, claimants
from reconfig.controller.roster import Home
from stateflow.clock import Clock
from stateflow.errors import PartitionsClaimed
from stateflow.runtime.view import PartitionView
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, ReplicaInfo

#: the most silent replicas remembered at once, as any process may report under any name
SILENT_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a replica's report of what it has. ``belongs_to``: the ledger of its data directory. ``first``: it
    voids what the replica reported before; ``last``: it completes the report."""

    info: ReplicaInfo
    home: Home
    belongs_to: str
    operators: Sequence[OperatorSpec]
    partitions: Sequence[PartitionView]
    first: bool = False
    last: bool = False

    def only(self, partitions: Sequence[PartitionView]) -> Piece:
        return replace(self, partitions=partitions)


@dataclass(slots=True)
class Claimant:
    """A replica with claims. ``whole``: its report is complete. ``at``: when it was last heard, monotonic seconds."""

    info: ReplicaInfo
    home: Home
    claim: Claim
    at: float
    whole: bool = False


class Claims:
    def __init__(self, settings: ControllerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._by_directory: dict[str, Claimant] = {}
        #: by directory: replica that has not completed its report, and when it was last heard
        self._silent: dict[str, tuple[str, float]] = {}
        self._heard_from = clock.monotonic() + 2 * settings.heartbeat_interval_s

    def note(self, piece: Piece) -> None:
        directory = piece.home.directory
        if piece.first or directory not in self._by_directory:
            claim = Claim(piece.info.name, directory, piece.belongs_to, {}, {})
            self._by_directory[directory] = Claimant(piece.info, piece.home, claim, self._clock.monotonic())
        noted = self._by_directory[directory]
        specs, held = dict(noted.claim.specs), dict(noted.claim.held)
        specs |= {spec.name: spec for spec in piece.operators}
        held |= {view.partition: Held(view.state, view.epoch) for view in piece.partitions}
        noted.claim = Claim(noted.claim.replica, noted.claim.directory, noted.claim.ledger, specs, held)
        noted.whole = piece.last

    def registered(self, unknown: Piece) -> None:
        """Notes what a replica brings as it registers.

        Args:
            unknown: the replica's partitions of operators that the ledger does not know.
        """
        self._by_directory.pop(unknown.home.directory, None)
        if unknown.partitions:  # the replica will report more of them; until then nothing is created in their place
            self.note(unknown)

    @property
    def early_s(self) -> float:
        """Seconds until every running replica should have been heard. A controller with an empty ledger waits so long
        before it creates partitions."""
        return max(0.0, self._heard_from - self._clock.monotonic())

    def foreign(self, replica: str, directory: str) -> bool:
        """Notes a heartbeat of a replica of another ledger. Returns whether its report is complete; otherwise it may
        still be opening its partitions."""
        whole = self.heard(directory)
        if whole:
            self._silent.pop(directory, None)
        else:
            self._silent[directory] = replica, self._clock.monotonic()
            if len(self._silent) > SILENT_MAX:
                del self._silent[next(iter(self._silent))]
        return whole

    def heard(self, directory: str) -> bool:
        """Notes a heartbeat of a replica. Returns whether its report is complete."""
        noted = self._by_directory.get(directory)
        if noted is None:
            return False
        noted.at = self._clock.monotonic()
        return noted.whole

    def present(self) -> list[Claimant]:
        """Returns the claimants with complete reports that were heard lately, by name."""
        since = self._present_since()
        there = [noted for noted in self._by_directory.values() if noted.whole and noted.at >= since]
        return sorted(there, key=lambda noted: (noted.info.name, noted.home.directory))

    def _present_since(self) -> float:
        return self._clock.monotonic() - self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def check_free(self, operator: str, ledger: str) -> None:
        """Checks that an operator can be created. Raises PartitionsClaimed if a replica has partitions of it, or may
        have."""
        since = self._present_since()
        silent = sorted({replica for replica, at in self._silent.values() if at >= since})
        if silent:
            raise PartitionsClaimed(
                "replicas of another ledger have not reported their partitions yet",
                remedy="deploy again when `stateflow status` shows no replica that is opening",
                operator=operator,
                replicas=" ".join(silent),
                ledger=ledger or None,
            )
        found = claimants([noted.claim for noted in self._by_directory.values()], operator)
        if found:
            raise PartitionsClaimed(
                "replicas have partitions of this operator that the ledger does not know",
                remedy="start the controller with the ledger that they belong to; if it is lost, `stateflow adopt "
                "--dry-run` shows what they have, and `stateflow adopt` adds it to this one",
                operator=operator,
                replicas=" ".join(sorted(found)),
                ledger=ledger or None,
            )
