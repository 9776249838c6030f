"""Rules for plain text: it may go over loopback, and elsewhere only where ``insecure`` is set."""

from __future__ import annotations

import ipaddress
import logging

from stateflow.errors import InsecureRefused
from stateflow.security.connections import connection_settings

log = logging.getLogger(__name__)
REMEDY = (
    "set STATEFLOW_TLS_CA, STATEFLOW_TLS_CERT and STATEFLOW_TLS_KEY (`stateflow certs`), "
    "or allow it with --insecure or STATEFLOW_INSECURE=1"
)
_warned: set[str] = set()


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Tells whether an address is loopback. It looks up no name: another host may answer for a name tomorrow."""
    host = host_of(address).lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_served(listen: str, advertise: str | None, may: str = "control it") -> None:
    """Checks a server without TLS. Raises InsecureRefused where other machines could reach it; where ``insecure``
    allows it, logs a warning.

    Args:
        may: what a client that reaches it could do.
    """
    for address, verb in ((listen, "listening on"), (advertise, "advertising")):
        if not address or is_loopback(address):
            continue
        if not connection_settings().insecure:
            raise InsecureRefused(
                f"{verb} {host_of(address)} in plain text would let everybody there {may}", remedy=REMEDY
            )
        log.warning("INSECURE: plain text, everybody who reaches %s may %s. %s", address, may, _RATHER)
        return


_RATHER = "Use TLS: `stateflow certs`"


def check_dialled(address: str) -> None:
    """Checks a channel without TLS. Raises InsecureRefused where it would leave this machine; where ``insecure`` allows
    it, logs a warning once per address."""
    if is_loopback(address):
        return
    if not connection_settings().insecure:
        raise InsecureRefused(
            f"{address} is not on this machine, and plain text could be read by others", remedy=REMEDY
        )
    if address not in _warned:
        _warned.add(address)
        log.warning("INSECURE: plain text to %s. %s", address, _RATHER)
