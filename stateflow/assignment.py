"""Ownership of partitions: partition → (owner, epoch), versioned, one assignment per operator.

The assignment is authoritative and immutable; a change makes a new one with a higher version.
``0 <= partition < len(owners)``; epochs start at 1 and rise with each change of owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stateflow.errors import REPORT_LINE, InvariantBroken, StaleEpoch, UnknownPartition


@dataclass(frozen=True, slots=True)
class Assignment:
    operator: str
    version: int
    owners: tuple[str, ...]
    epochs: tuple[int, ...]

    @classmethod
    def initial(cls, operator: str, owners: Mapping[int, str], epoch: int = 1) -> Assignment:
        """Returns the first assignment of an operator.

        Args:
            epoch: greater than any of a former deployment of that name.
        """
        ordered = tuple(owners[p] for p in range(len(owners)))
        return cls(operator, 1, ordered, (epoch,) * len(ordered))

    def owner(self, partition: int) -> tuple[str, int]:
        """Returns (replica name, epoch). Raises UnknownPartition."""
        if not 0 <= partition < len(self.owners):
            raise UnknownPartition(
                f"there is no partition {partition}",
                remedy=f"use 0 to {len(self.owners) - 1}",
                operator=self.operator,
            )
        return self.owners[partition], self.epochs[partition]

    def moved(self, partition: int, owner: str, epoch: int) -> Assignment:
        """Returns the assignment after ``partition`` went to ``owner``. Raises StaleEpoch unless the epoch rises."""
        _, current = self.owner(partition)
        if epoch <= current:
            raise StaleEpoch(
                f"epoch {epoch} is not newer than {current}",
                remedy="read the assignment again",
                operator=self.operator,
                partition=partition,
            )
        owners, epochs = list(self.owners), list(self.epochs)
        owners[partition], epochs[partition] = owner, epoch
        return Assignment(self.operator, self.version + 1, tuple(owners), tuple(epochs))

    def validate(self) -> None:
        """Checks what always holds. Raises InvariantBroken, which only a bug can cause."""
        if len(self.owners) != len(self.epochs) or not all(self.owners) or min(self.epochs, default=1) < 1:
            raise InvariantBroken(
                f"some of {len(self.owners)} partitions lack an owner or have an epoch below 1",
                remedy=REPORT_LINE,
                operator=self.operator,
                version=self.version,
            )

    def of(self, replica: str) -> dict[int, int]:
        """Returns partition → epoch of everything that ``replica`` owns."""
        return {p: self.epochs[p] for p, owner in enumerate(self.owners) if owner == replica}
