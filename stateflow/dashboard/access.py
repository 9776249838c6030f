"""Access to the page and its functions, decided from a request's headers, a token and the table of roles."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from stateflow.errors import BadCertificate, NotAllowed, StateflowError
from stateflow.security.identity import Identity, Role
from stateflow.security.reading import checked_pair
from stateflow.security.roles import check_call
from stateflow.security.token import decoded

#: header of requests that change something: no form and no picture of another page can send it
HEADER, HEADER_VALUE = "x-stateflow", "1"
COOKIE = "stateflow-session"
SESSIONS_MAX = 1000
#: a session without a new token lasts no longer
LONGEST = timedelta(hours=24)
#: in plain text users cannot be told apart, and each may do everything
EVERYBODY = Identity(Role.ADMIN, "everybody")
#: the page's functions, by the gRPC calls that they take
CALLS: Mapping[str, str] = {
    "plan": "Propose",
    "migrate": "Migrate",
    "drain": "Drain",
    "rebalance": "Rebalance",
    "place": "Place",
    "pause": "PauseReconfiguration",
    "resume": "ResumeReconfiguration",
    "cancel": "CancelReconfiguration",
    "retry": "RetryReconfiguration",
    "sweep": "BeginSweep",
    "batch": "CancelSweep",
    "restore": "CancelRestore",
    "job": "ChangeJob",
    "autopilot": "Autopilot",
    "state": "Scan",
}
_SERVICES = {"Scan": "ReplicaService"}


class SignInRequired(NotAllowed):
    """The user has not signed in yet."""

    code = "sign_in_required"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(header: str) -> str:
    """Returns the name or address in a Host header, without its port, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def check_host(header: str, hosts: Collection[str]) -> None:
    """Checks the host that the page was requested by. Raises NotAllowed.

    Another site may let its own name point here, and its page would then read the answers (DNS rebinding). So a name is
    accepted only if it is configured as this page's. An address cannot be made to point elsewhere.
    """
    host = host_of(header)
    if host == "localhost" or host.endswith(".localhost") or _is_address(host) or host in hosts:
        return
    raise NotAllowed(
        f"the page is not served under the name {host[:100]!r}",
        remedy="use its address, or start the dashboard with --host and this name",
    )


def check_same_page(headers: Mapping[str, str], scheme: str) -> None:
    """Checks that a request which changes something comes from the page itself. Raises NotAllowed."""
    if headers.get(HEADER) != HEADER_VALUE:
        raise NotAllowed(f"the header {HEADER} is missing", remedy="use the page, or the command line")
    own = f"{scheme}://{headers.get('host', '')}".lower()
    if headers.get("origin", "").lower() != own:
        raise NotAllowed("the request comes from another page", remedy="use the page, or the command line")


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of a token that a user has shown: the identity, its serial number, and how long it counts."""

    identity: Identity
    serial: int
    until: datetime


def shown_by(text: str, ca: bytes, revoked: Collection[int], now: datetime) -> Shown:
    """Checks a token, against this process's authority, not the one in the token. Raises BadCertificate."""
    _, cert, key = decoded(text)
    found = checked_pair(ca, cert, key, now, "the token")
    if found.serial in revoked:
        raise BadCertificate("the token was revoked", remedy="issue another one: `stateflow token issue`")
    assert found.identity is not None
    return Shown(found.identity, found.serial, min(found.not_after, now + LONGEST))


class Sessions:
    """Sessions of users that have shown a token. The token is not kept; the browser gets a random number in its
    place."""

    def __init__(self, new_id: Callable[[], str] = lambda: secrets.token_urlsafe(32)) -> None:
        self._new_id = new_id
        self._sessions: dict[str, Shown] = {}

    def open(self, shown: Shown) -> str:
        """Opens a session, and returns its number. Beyond ``SESSIONS_MAX`` the oldest session ends."""
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        number = self._new_id()
        self._sessions[number] = shown
        return number

    def find(self, number: str, revoked: Collection[int], now: datetime) -> Identity | None:
        """Returns the user of a session; None: there is none, or its token no longer counts, which ends the session."""
        shown = self._sessions.get(number)
        if shown is None:
            return None
        if now >= shown.until or shown.serial in revoked:
            self.end(number)
            return None
        return shown.identity

    def end(self, number: str) -> None:
        self._sessions.pop(number, None)


@dataclass(frozen=True, slots=True)
class Access:
    """The rights of one request.

    ``own``: this process's identity in the cluster; None: plain text. ``signed_in``: the user; None: not signed in.
    """

    own: Identity | None
    signed_in: Identity | None

    @property
    def needs_sign_in(self) -> bool:
        return self.own is not None and self.signed_in is None

    @property
    def who(self) -> Identity:
        """The user. Raises SignInRequired."""
        if self.own is None:
            return EVERYBODY
        if self.signed_in is None:
            raise SignInRequired("no user is signed in", remedy="sign in with a token: `stateflow token issue`")
        return self.signed_in

    def check(self, act: str) -> None:
        """Checks that the user may do something, and that this process may, as it does so for the user.

        Raises NotAllowed, SignInRequired.
        """
        call = CALLS[act]
        method = f"/stateflow.rpc.{_SERVICES.get(call, 'ControllerService')}/{call}"
        for each in (self.who, self.own):
            if each is not None:
                check_call(method, each)

    def check_look(self) -> None:
        """Checks that the user may look at the page. Raises as :meth:`check` does."""
        if self.own is not None:
            check_call("/stateflow.rpc.ControllerService/Status", self.who)

    def check_operator(self, operator: str) -> None:
        """Checks that tokens limited to some operators reach this one. Raises NotAllowed, SignInRequired."""
        for each in (self.who, self.own):
            if each is not None and not each.reaches(operator):
                raise NotAllowed(f"{each} may not reach the operator {operator!r}", remedy="use another token")

    def may(self) -> dict[str, bool]:
        """Returns, by function, whether the page offers it to the user."""
        return {act: self._allows(act) for act in CALLS}

    def _allows(self, act: str) -> bool:
        try:
            self.check(act)
        except StateflowError:
            return False
        return True
