"""What came for a partition, as placement asks: how much, and from where. Counted, and forgotten with the process."""

from __future__ import annotations

from dataclasses import dataclass, field

#: sites that are told apart; rows of others count with those that say nothing
SITES_MAX = 64


@dataclass(slots=True)
class Traffic:
    """``rows`` since this process first served the partition, ``bytes`` of them as Arrow has them, and how many said
    that they are of which site. They only grow: whoever looks twice has a rate."""

    rows: int = 0
    bytes: float = 0.0
    origins: dict[str, int] = field(default_factory=dict)

    def came(self, rows: int, row_bytes: float, site: str) -> None:
        """So many rows, of so many bytes each; ``site``: empty where they do not say."""
        self.rows += rows
        self.bytes += rows * row_bytes
        if site and (site in self.origins or len(self.origins) < SITES_MAX):
            self.origins[site] = self.origins.get(site, 0) + rows
