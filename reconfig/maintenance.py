"""Nodes that are being looked after: nothing is given to them meanwhile, and never are two of a set. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stateflow.errors import InMaintenance, InvalidArgument


@dataclass(frozen=True, slots=True)
class Maintenance:
    """``until_us``: it ends by itself then; 0: by command. ``one_of``: a set of which no two are to be in maintenance
    at a time; empty: none. Times are µs, of the controller's clock."""

    since_us: int
    until_us: int = 0
    one_of: str = ""

    def to_payload(self) -> dict[str, Any]:
        return asdict(self)

    def lasts(self, now_us: int) -> bool:
        return not self.until_us or now_us < self.until_us


def ordered(node: str, now_us: int, for_s: float, one_of: str, known: Mapping[str, Maintenance]) -> Maintenance:
    """Of a node, from now on. Args: for_s: 0: until it is ended; known: of all nodes, over or not.

    Raises InvalidArgument; InMaintenance while another one of the set is."""
    if not 0 <= for_s < 10 * 365 * 86400:
        raise InvalidArgument(f"a maintenance cannot last {for_s:g} s", remedy="give a length of time, e.g. 2h")
    others = [
        name for name, each in sorted(known.items()) if name != node and each.one_of == one_of and each.lasts(now_us)
    ]
    if one_of and others:
        raise InMaintenance(
            f"{others[0]} is in maintenance, and never two of {one_of} are",
            remedy=f"wait, or end it: `stateflow maintenance end {others[0]}`",
            node=node,
        )
    return Maintenance(now_us, now_us + round(for_s * 1e6) if for_s else 0, one_of)
