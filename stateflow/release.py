"""Compatibility of releases.

A fleet is upgraded process by process, so a release speaks with the one before and the one after it. A caller of a more
distant release is refused before its request is examined, with an error that names both releases. A caller that does
not state its release is taken for the first release.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from stateflow.errors import ReleaseMismatch

VERSION = "0.2.0"


@dataclass(frozen=True, slots=True)
class Release:
    """A release of stateflow.

    Attributes:
        protocol: version of the wire protocol; it rises when an older release would misunderstand messages.
        oldest: oldest protocol that the release still speaks.
    """

    version: str
    protocol: int
    oldest: int

    @property
    def agent(self) -> str:
        """The ``user-agent`` of HTTP/2 (RFC 9110, 10.1.5) that is sent with each call."""
        return f"stateflow/{self.version} protocol/{self.protocol}-{self.oldest}"

    def speaks_with(self, other: Release) -> bool:
        return self.oldest <= other.protocol and other.oldest <= self.protocol


#: first release, with the dependencies of 2026; also assumed of callers that are not stateflow's clients
FIRST = Release("0.1.0", 1, 1)
OWN = Release(VERSION, 2, 1)
_AGENT = re.compile(r"stateflow/([\w.+-]{1,40}) protocol/(\d{1,9})-(\d{1,9})")


@functools.lru_cache(maxsize=256)
def release_of(agent: str) -> Release:
    found = _AGENT.match(agent)
    return FIRST if found is None else Release(found[1], int(found[2]), int(found[3]))


def check_release(other: Release, own: Release = OWN) -> None:
    """Checks that two releases speak with each other. Raises ReleaseMismatch."""
    if own.speaks_with(other):
        return
    newer = other.oldest > own.protocol
    raise ReleaseMismatch(
        f"the caller's stateflow {other.version} and the server's {own.version} are incompatible",
        remedy=f"upgrade {'the server' if newer else 'the caller'} first, release by release",
        protocol=f"{other.protocol}-{other.oldest}",
        here=f"{own.protocol}-{own.oldest}",
    )
