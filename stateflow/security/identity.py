"""The identity that a certificate is for. It stands in the certificate as a URI among its alternative names:
``stateflow://node/edge-0``, ``stateflow://data/gw-7?operator=Pumps``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from stateflow.errors import InvalidArgument
from stateflow.types import NAME, check_name, node_of

SCHEME = "stateflow"


class Role(StrEnum):
    READ = "read"
    DATA = "data"
    OPERATE = "operate"
    ADMIN = "admin"
    NODE = "node"
    AGENT = "agent"
    CONTROLLER = "controller"

    @property
    def listens(self) -> bool:
        """Tells whether members with this role are servers: their certificates are for servers, too, and name hosts."""
        return self in (Role.NODE, Role.AGENT, Role.CONTROLLER)


@dataclass(frozen=True, slots=True)
class Identity:
    """Role and name of a certificate's owner. ``operators``: the only operators that it reaches; empty: all of them."""

    role: Role
    name: str
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @classmethod
    def of(cls, role: str, name: str, operators: tuple[str, ...] = ()) -> Identity:
        """Builds an identity from a user's words. Raises InvalidArgument."""
        if role not in set(Role):
            raise InvalidArgument(f"there is no role {role!r}", remedy=f"use {', '.join(Role)}")
        if operators and role != Role.DATA:
            raise InvalidArgument(
                f"the role {role} cannot be restricted to operators", remedy="restrict only the role data"
            )
        for operator in operators:
            NAME.check(operator, "operator name")
        return cls(Role(role), check_name(role, name), tuple(sorted(set(operators))))

    @property
    def uri(self) -> str:
        query = urlencode([("operator", each) for each in self.operators])
        return f"{SCHEME}://{self.role}/{quote(self.name)}{'?' + query if query else ''}"

    @classmethod
    def of_uri(cls, text: str) -> Identity | None:
        """Parses a URI. None: it is no identity of this version."""
        try:
            parts = urlsplit(text)
        except ValueError:
            return None
        if parts.scheme != SCHEME:
            return None
        fields = parse_qsl(parts.query, keep_blank_values=True)
        if any(key != "operator" for key, _ in fields):  # a later version's field, which may restrict the identity
            return None
        try:
            return cls.of(parts.netloc, parts.path.removeprefix("/"), tuple(value for _, value in fields))
        except InvalidArgument:
            return None

    def speaks_for(self, name: str) -> bool:
        """Tells whether it may say what the replica or agent ``name`` is and has. A node may for its workers. An agent
        may for itself, and for the replicas that it starts, which are named after it and have its certificate."""
        node = node_of(name)
        if node == self.name:
            return self.role in (Role.NODE, Role.AGENT)
        return self.role is Role.AGENT and re.fullmatch(rf"{re.escape(self.name)}-\d+", node) is not None

    def reaches(self, operator: str) -> bool:
        return not self.operators or operator in self.operators
