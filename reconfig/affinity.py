"""Affinities of jobs: which controller coordinates a job, and which nodes it may use. Decisions only.

``[hard|soft[:SECONDS]] node NAME | site NAME | label KEY[=VALUE] [:AT_LEAST[-AT_MOST]]``, as ``hard site edge-1:2-4``.
A run waits for a hard affinity as long as it takes. It gives up a soft one after so many seconds, and uses the nodes
that there are. No job uses a node that takes no jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import InvalidArgument
from stateflow.types import shown

#: seconds after which a run gives up a soft affinity that names no time
FALLBACK_S = 60.0
FALLBACK_MAX_S = 1e9
WORKERS_AT_MOST = 1_000_000
_REMEDY = "write hard site edge-1, soft:30 node gw-1, or label disk=ssd:2-4 (at least 2 nodes, at most 4)"
_COUNTS = re.compile(r"(?P<rest>.+?)(?::(?P<least>\d{1,6})(?:-(?P<most>\d{1,6}))?)?")


#: the label of a node that takes no jobs; ``--no-jobs`` sets it
NO_JOBS = ("jobs", "no")


class By(StrEnum):
    NODE = "node"
    SITE = "site"
    LABEL = "label"


@dataclass(frozen=True, slots=True)
class Node:
    """A controller, or a node with replicas. ``agent``: name of the agent that started the node and gives it its
    labels; an affinity may name the node by it. Empty: no agent did."""

    name: str
    site: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    agent: str = ""

    @property
    def jobs(self) -> bool:
        """Tells whether the node takes jobs."""
        key, no = NO_JOBS
        return self.labels.get(key) != no


@dataclass(frozen=True, slots=True)
class Affinity:
    """An affinity, parsed by :meth:`parse`. ``least``, ``most``: numbers of nodes. ``fallback_s``: seconds after which
    a run gives it up, unless it is ``hard``."""

    text: str
    hard: bool
    by: By
    value: str
    least: int = 1
    most: int = WORKERS_AT_MOST
    fallback_s: float = FALLBACK_S

    @classmethod
    def parse(cls, text: str) -> Affinity:
        """Parses the text form (see the module). Raises InvalidArgument."""
        words = text.split(maxsplit=2)
        strength = words.pop(0) if words and words[0].partition(":")[0] in ("hard", "soft") else "hard"
        kind, _, seconds = strength.partition(":")
        rest = " ".join(words).split(maxsplit=1)
        found = _COUNTS.fullmatch(rest[1]) if len(rest) == 2 else None
        if found is None or rest[0] not in set(By) or (kind == "hard" and seconds):
            raise _none(text)
        try:
            fallback_s = float(seconds) if seconds else FALLBACK_S
        except ValueError:
            raise _none(text) from None
        if not 0 <= fallback_s <= FALLBACK_MAX_S:
            raise _none(text)
        least = int(found["least"] or 1)
        most = int(found["most"]) if found["most"] else WORKERS_AT_MOST
        if not 1 <= least <= most:
            raise InvalidArgument(
                f"{shown(text)} asks for at least {least} nodes and at most {most}",
                remedy="give the minimum, from 1 on, then the maximum, e.g. 2-4",
            )
        return cls(text, kind == "hard", By(rest[0]), found["rest"], least, most, fallback_s)

    def __str__(self) -> str:
        return f"{self.by} {self.value}"

    def fits(self, node: Node) -> bool:
        match self.by:
            case By.NODE:
                return self.value in (node.name, node.agent)
            case By.SITE:
                return node.site == self.value
        key, equals, value = self.value.partition("=")
        return key in node.labels and (not equals or node.labels[key] == value)

    def check(self, known: Iterable[Node], what: str) -> None:
        """Checks that the known nodes, alive or not, could ever satisfy the affinity. Raises InvalidArgument.

        Args:
            what: the word for the nodes in errors, ``nodes`` or ``controllers``.
        """
        known = list(known)
        fitting = [node for node in known if self.fits(node)]
        if not fitting:
            there = {
                By.NODE: sorted({node.name for node in known} | {node.agent for node in known if node.agent}),
                By.SITE: sorted({node.site for node in known if node.site}),
                By.LABEL: sorted({f"{key}={value}" for node in known for key, value in node.labels.items()}),
            }[self.by]
            raise InvalidArgument(
                f"none of the {what} matches {self}",
                remedy=f"use one of {', '.join(there) or 'none'}",
                wanted=self.text,
            )
        if not any(node.jobs for node in fitting):
            raise InvalidArgument(
                f"the {what} that match {self} take no jobs",
                remedy="start one without --no-jobs, or choose others",
                wanted=self.text,
            )
        if self.by is By.NODE and self.least > len(fitting):
            raise InvalidArgument(
                f"{self} matches {len(fitting)} of at least {self.least} nodes",
                remedy="choose by site or label",
                wanted=self.text,
            )


@dataclass(frozen=True, slots=True)
class Go:
    """The run goes on. ``nodes``: names of those it may use; None: all. ``note``: what was given up; empty: nothing."""

    nodes: frozenset[str] | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


def choose(affinity: Affinity | None, there: Sequence[Node], waited_s: float, what: str = "nodes") -> Go | Wait:
    """Chooses the nodes that a run uses now, the first by name if it wants fewer than there are.

    Args:
        there: nodes that answer now.
        waited_s: seconds since the run began.
        what: the word for the nodes in texts, ``nodes`` or ``controllers``.
    """
    willing = sorted((node for node in there if node.jobs), key=lambda node: node.name)
    if affinity is None:
        if there and not willing:
            return Wait(f"waits: none of the {what} that answer takes jobs")
        everyone = len(willing) == len(there)
        return Go(None if everyone else frozenset(node.name for node in willing))
    fitting = [node.name for node in willing if affinity.fits(node)]
    if len(fitting) >= affinity.least:
        return Go(frozenset(fitting[: affinity.most]))
    lacking = f"{len(fitting)} of at least {affinity.least} {what} that match {affinity} and take jobs answer"
    if affinity.hard:
        return Wait(f"waits: {lacking}")
    if waited_s < affinity.fallback_s:
        return Wait(f"waits: {lacking}; falls back in {affinity.fallback_s - waited_s:.0f} s")
    used = fitting or [node.name for node in willing]
    if not used:
        return Wait(f"waits: {lacking}, and no others do")
    return Go(frozenset(used[: affinity.most]), f"ran without its affinity: {lacking}")


def _none(text: str) -> InvalidArgument:
    return InvalidArgument(f"{shown(text)} is not an affinity", remedy=_REMEDY)
