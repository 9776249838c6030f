"""Maintenance of nodes: they are given nothing meanwhile, and no two nodes of a set are in it at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stateflow.errors import InMaintenance, InvalidArgument


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A node's maintenance. ``until_us``: when it ends by itself; 0: it ends by command. ``one_of``: name of a set of
    nodes of which no two may be in maintenance at a time; empty: no set. Times are µs of the controller's clock."""

    since_us: int
    until_us: int = 0
    one_of: str = ""

    def to_payload(self) -> dict[str, Any]:
        return asdict(self)

    def lasts(self, now_us: int) -> bool:
        return not self.until_us or now_us < self.until_us


def ordered(node: str, now_us: int, for_s: float, one_of: str, known: Mapping[str, Maintenance]) -> Maintenance:
    """Returns the maintenance of a node from now on.

    Args:
        for_s: duration in seconds; 0: until it is ended by command.
        known: maintenance by node, of all nodes, over or not.

    Raises InvalidArgument; InMaintenance while another node of the set is in maintenance.
    """
    if not 0 <= for_s < 10 * 365 * 86400:
        raise InvalidArgument(f"maintenance cannot last {for_s:g} s", remedy="give a duration, e.g. 2h")
    others = [
        name for name, each in sorted(known.items()) if name != node and each.one_of == one_of and each.lasts(now_us)
    ]
    if one_of and others:
        raise InMaintenance(
            f"{others[0]} is in maintenance, and only one of {one_of} may be",
            remedy=f"wait, or end it: `stateflow maintenance end {others[0]}`",
            node=node,
        )
    return Maintenance(now_us, now_us + round(for_s * 1e6) if for_s else 0, one_of)
