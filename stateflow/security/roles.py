"""Identities and their permissions: one table names the roles that may call each RPC.

A certificate contains its identity as a URI among the alternative names, e.g. ``stateflow://node/edge-0`` or
``stateflow://data/gw-7?operator=Pumps``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from stateflow.errors import InvalidArgument, NotAllowed
from stateflow.types import NAME, check_name, node_of

SCHEME = "stateflow"
#: maximum number of characters in the name of an author
AUTHOR_MAX = 128


class Role(StrEnum):
    READ = "read"
    QUERY = "query"
    DATA = "data"
    OPERATE = "operate"
    ADMIN = "admin"
    NODE = "node"
    AGENT = "agent"
    CONTROLLER = "controller"

    @property
    def listens(self) -> bool:
        """Tells whether members with this role are servers. Certificates of servers are valid for both sides of a
        connection, and name hosts."""
        return self in (Role.NODE, Role.AGENT, Role.CONTROLLER)

    @property
    def limited(self) -> bool:
        """Tells whether members with this role can be limited to some operators."""
        return self in (Role.QUERY, Role.DATA)


@dataclass(frozen=True, slots=True)
class Identity:
    """Role and name of a certificate's owner. ``operators`` are the only operators that it may reach; empty: all."""

    role: Role
    name: str
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @classmethod
    def of(cls, role: str, name: str, operators: tuple[str, ...] = ()) -> Identity:
        """Returns the identity with this role and name, both as a user wrote them. Raises InvalidArgument."""
        if role not in set(Role):
            raise InvalidArgument(f"there is no role {role!r}", remedy=f"use {', '.join(Role)}")
        if operators and not Role(role).limited:
            raise InvalidArgument(
                f"the role {role} cannot be restricted to operators", remedy="restrict only the roles query and data"
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
        """Parses a URI. None: it is not an identity that this version knows."""
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
        """Tells whether this identity may report on the replica or agent ``name``. A node may report on its workers. An
        agent may report on itself, and on the replicas that it starts, which are named after it and use its
        certificate."""
        node = node_of(name)
        if node == self.name:
            return self.role in (Role.NODE, Role.AGENT)
        return self.role is Role.AGENT and re.fullmatch(rf"{re.escape(self.name)}-\d+", node) is not None

    def reaches(self, operator: str) -> bool:
        return not self.operators or operator in self.operators


@dataclass(frozen=True, slots=True)
class Asker:
    """The caller that asks for some work.

    Attributes:
        identity: that of its certificate.
        user: the user who signed in to the calling process, and for whom it calls; None: the caller calls for itself.
    """

    identity: Identity
    user: Identity | None = None

    def __str__(self) -> str:
        return str(self.identity) if self.user is None else via(self.user, str(self.identity))


def via(user: Identity, process: str) -> str:
    """Returns the author of what a process does for a user, in at most ``AUTHOR_MAX`` characters."""
    most = (AUTHOR_MAX - len(" via ")) // 2
    return f"{str(user)[:most]} via {process[:most]}"


READ, QUERY, DATA, OPERATE, ADMIN = Role.READ, Role.QUERY, Role.DATA, Role.OPERATE, Role.ADMIN
NODE, AGENT, CONTROLLER = Role.NODE, Role.AGENT, Role.CONTROLLER
#: roles of replicas: an agent's replicas use the agent's certificate
_NODES = frozenset({NODE, AGENT})
_OPERATORS = frozenset({OPERATE, ADMIN})
_READERS = frozenset({READ, QUERY, DATA, OPERATE, ADMIN})
#: roles of processes that may name the user for whom they call, such as a dashboard. An administrator could as well do
#: what the user may do, so that nobody gains rights by it
DELEGATES = frozenset({ADMIN})


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions of a call.

    Attributes:
        roles: the roles that may make the call.
        own: field of the request that names a replica or agent. A node or agent that makes the call must speak for the
            named replica or agent.
        itself: the caller must have exactly that name, because an agent may have the name of another agent's replica.
        operator: field that names an operator, which the caller must reach; empty: the caller must reach all operators.
        pieces: the request arrives in pieces, and only the first piece names the operator.
    """

    roles: frozenset[Role]
    own: str = ""
    itself: bool = False
    operator: str = ""
    pieces: bool = False

    @property
    def is_report(self) -> bool:
        """Tells whether only members of the cluster make the call. Such a call is a report, and not a request that a
        person could make.
        """
        return all(role.listens for role in self.roles)


_READ = Rule(_READERS)
_OPERATE = Rule(_OPERATORS)
_ADMIN = Rule(frozenset({ADMIN}))
_COMMAND = Rule(frozenset({CONTROLLER}))  # from a controller to its members
_PEER = Rule(_NODES)  # from one replica to another
_CONTROLLER = {
    "Register": Rule(_NODES, own="replica.name"),
    "Heartbeat": Rule(_NODES, own="name"),
    "Claim": Rule(_NODES, own="replica.name"),
    "GetBundlePart": Rule(_NODES),
    "AgentBeat": Rule(frozenset({AGENT}), own="agent.name", itself=True),
    # a node spreads partitions among its workers, and takes them from those that are about to end
    "Status": Rule(_READERS | _NODES),
    "Migrate": Rule(_OPERATORS | _NODES, own="to"),
    "Drain": Rule(_OPERATORS | _NODES, own="replica"),
    "Forget": Rule(frozenset({ADMIN}) | _NODES, own="replica"),
    "GetDeployment": Rule(_READERS, operator="operator"),
    "ListVersions": Rule(_READERS, operator="operator"),
    "ListReconfigurations": _READ,
    "GetReconfiguration": _READ,
    "WatchReconfiguration": _READ,
    "ListAgents": _READ,
    "ListJobs": _READ,
    "GetJobRun": _READ,
    "GetRolling": _READ,
    "GetSweep": _READ,
    "Propose": _READ,
    "Rebalance": _OPERATE,
    "EndMaintenance": _OPERATE,
    "Place": _OPERATE,
    "Autopilot": _OPERATE,
    "CreateJob": _OPERATE,
    "ChangeJob": _OPERATE,
    "Standby": _OPERATE,
    "CancelReconfiguration": _OPERATE,
    "EditReconfiguration": _OPERATE,
    "PauseReconfiguration": _OPERATE,
    "ResumeReconfiguration": _OPERATE,
    "RetryReconfiguration": _OPERATE,
    "Checkpoint": _OPERATE,
    "RestartAll": _OPERATE,
    "CancelRolling": _OPERATE,
    "BeginSweep": _OPERATE,
    "CancelSweep": _OPERATE,
    "RestartReplica": _OPERATE,
    "Spawn": _OPERATE,
    "StopReplica": _OPERATE,
    "Logs": _OPERATE,
    # calls that deploy code or may lose state
    "Deploy": _ADMIN,
    "Upgrade": _ADMIN,
    "Undeploy": _ADMIN,
    "PutBundlePart": _ADMIN,
    "ResolveReconfiguration": _ADMIN,
    "Restore": _ADMIN,
    "CancelRestore": _ADMIN,
    "Replace": _ADMIN,
    "Adopt": _ADMIN,
    "TakeOver": _ADMIN,
    "ForgetAgent": _ADMIN,
}
_DATA = frozenset({DATA, ADMIN})
_REPLICA = {
    "Apply": Rule(_DATA, operator="header.operator", pieces=True),
    "Positions": Rule(_READERS, operator="operator"),
    "OpenSource": Rule(_DATA, operator="asked.operator"),
    "Outputs": Rule(_DATA, operator="operator"),
    "Scan": Rule(_DATA | {QUERY}, operator="operator"),
    "Sources": Rule(_READERS, operator="operator"),
    "RetireSource": Rule(_OPERATORS, operator="operator"),
    "DropOutput": Rule(_OPERATORS, operator="operator"),
    "Inspect": Rule(_READERS | _NODES | {CONTROLLER}, operator="operator"),
    "Stats": Rule(_READERS | _NODES | {CONTROLLER}),
    "Create": _COMMAND,
    "Prepare": _COMMAND,
    "Fence": _COMMAND,
    "Cancel": _COMMAND,
    "Release": _COMMAND,
    "TakeOver": _COMMAND,
    "Drop": _COMMAND,
    "Hold": _COMMAND,
    "Checkpoint": _COMMAND,
    "Restore": _COMMAND,
    "Surrender": _COMMAND,
    "Verify": _COMMAND,
    "Try": _COMMAND,
    "RoundTrips": _COMMAND,
    "Snapshot": _PEER,
    "Fetch": _PEER,
    "Follow": _PEER,
    "Confirm": _PEER,
}
#: the pages ``/metrics`` and ``/sd`` of a process, which are read over HTTP and are no RPC
METRICS = "/metrics"
RULES: Mapping[str, Rule] = {
    **{f"/stateflow.rpc.ControllerService/{name}": rule for name, rule in _CONTROLLER.items()},
    **{f"/stateflow.rpc.ReplicaService/{name}": rule for name, rule in _REPLICA.items()},
    "/stateflow.rpc.AgentService/Logs": _COMMAND,
    "/grpc.health.v1.Health/Check": Rule(frozenset(Role)),
    METRICS: _READ,
}


def check_call(method: str, who: Identity) -> Rule:
    """Checks that an identity may call a method. Returns the rule for the requests of the call. Raises NotAllowed."""
    rule, call = RULES.get(method), method.rpartition("/")[2]
    if rule is None or who.role not in rule.roles:
        needs = ", ".join(sorted(rule.roles)) if rule is not None else "nobody"
        another = f"use a certificate with another role: {needs}"
        raise _refused(
            who,
            call,
            f"call {call}",
            another if rule is not None else "no role may call it: check the method's name and the releases",
            needs=needs,
        )
    if who.operators and not rule.operator and method != _HEALTH:
        raise _refused(
            who,
            call,
            f"call {call}, which concerns all operators",
            "use a certificate that is not restricted to some operators",
        )
    return rule


def check_delegate(method: str, who: Identity, user: Identity) -> None:
    """Checks that a caller may name a user for whom it calls. Raises NotAllowed."""
    if who.role in DELEGATES and user.role in _READERS:
        return
    raise NotAllowed(
        f"{who} may not call for {user}",
        remedy="give a process that calls for its users a certificate with the role admin",
        call=method.rpartition("/")[2],
        who=who,
        role=who.role,
    )


def check_request(rule: Rule, method: str, who: Identity, request: Any) -> None:
    """Checks that an identity may make a request, by the rule of its call. Raises NotAllowed."""
    call = method.rpartition("/")[2]
    if rule.own and who.role in _NODES:
        name = _field(request, rule.own)
        if not (name == who.name if rule.itself else who.speaks_for(name)):
            whom = repr(name) if name else "an unnamed replica"
            raise _refused(
                who,
                call,
                f"call {call} for {whom}: a node may act only for itself",
                "give each node a certificate with its own name",
            )
    goes_on = rule.pieces and not request.HasField(rule.operator.partition(".")[0])
    if rule.operator and who.operators and not goes_on:
        operator = _field(request, rule.operator)
        if not who.reaches(operator):
            raise _refused(
                who,
                call,
                f"reach the operator {operator!r}",
                f"use a certificate that reaches it; this one reaches {', '.join(who.operators)}",
            )


def check_owners(who: Identity, owners: Mapping[int, str]) -> None:
    """Checks that a node moves partitions away only from its own workers. Raises NotAllowed.

    Args:
        owners: owners of the partitions to move, by partition.
    """
    if who.role not in _NODES:
        return
    for number, owner in owners.items():
        if not who.speaks_for(owner):
            raise _refused(
                who, "Migrate", f"move partition {number} away from {owner}", "use a certificate with the role operate"
            )


def check_follower(who: Identity, call: str, follower: str, *, standby: bool = True, as_standby: bool = False) -> None:
    """Checks that a node copies only what it was told to copy. Raises NotAllowed.

    Args:
        follower: replica that the controller named for the copy; empty: it named none.
        standby: the replica was named as a standby.
        as_standby: the caller wants to be a standby, whose confirmations count.
    """
    if not who.speaks_for(follower):
        whose = f"it is for {follower}" if follower else "the controller has no such move"
        raise _refused(
            who,
            call,
            f"call {call} for this copy: {whose}",
            "let the controller begin the copy: `stateflow migrate`, `stateflow standby`",
        )
    if as_standby and not standby:
        raise _refused(
            who,
            call,
            f"call {call} as a standby: the controller named {follower} as the target of a move",
            "check what runs there, and its version",
        )


def _refused(who: Identity, call: str, what: str, remedy: str, **where: object) -> NotAllowed:
    """Returns the error of an identity that may not make a call."""
    return NotAllowed(f"{who} may not {what}", remedy=remedy, call=call, who=who, role=who.role, **where)


def _field(request: Any, path: str) -> str:
    """Returns a field of a request. An unset field is empty, which is not a valid name."""
    return str(reduce(getattr, path.split("."), request))


_HEALTH = "/grpc.health.v1.Health/Check"
