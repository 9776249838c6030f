"""Certificates for replicas in Spark's tasks, of which nobody knows where they run before they do.

A task has, within its function, the authority's certificate and a secret of the application. Its replica's key is made
where it runs. The task asks at a desk beside the driver, over TLS, for the certificate, and is given one of its
replica's name and of the address that it was heard from. A name that has one for one address is given none for another:
whoever has the secret may speak for a replica that is not there yet, or is on its own machine, and for no other one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import NotAllowed, StateflowError, Unavailable, from_wire
from stateflow.security.authority import own_request, write_own
from stateflow.security.variables import OWN_CERT, OWN_KEY
from stateflow.types import NAME

log = logging.getLogger(__name__)
#: a question, and its answer, come within
ASK_S = 10.0
#: … and are not longer; a request has some 400 characters
LONGEST = 16 << 10
#: questions at a time: others wait
PLACES = 32
AGAIN_S = 1.0
_SECRET, _NAME, _REQUEST, _CERT, _REFUSED = "secret", "name", "request", "cert", "refused"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Given to tasks. ``address``: of the desk. ``ca``: PEM."""

    address: str
    ca: bytes
    secret: str = field(repr=False)

    def enrol(self, name: str, out: Path) -> None:
        """Into ``out``: key, certificate, the authority's certificate. Raises NotAllowed, Unavailable; OSError
        where it cannot be written."""
        key, request = own_request()
        said = {_SECRET: self.secret, _NAME: name, _REQUEST: request.decode()}
        try:
            answer = json.loads(self._ask(json.dumps(said).encode() + b"\n"))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"no certificate came from the driver: {error}",
                remedy="see that executors reach it at the address of its controller, at any port",
                address=self.address,
            ) from error
        if _REFUSED in answer:
            raise from_wire(answer[_REFUSED])
        write_own(out, key, str(answer[_CERT]).encode(), self.ca)

    def _ask(self, said: bytes) -> bytes:
        """Raises OSError."""
        host, _, port = self.address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks the certificate, and that it is for this host
        context.load_verify_locations(cadata=self.ca.decode())
        with (
            socket.create_connection((host, int(port)), ASK_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as way,
        ):
            way.sendall(said)
            return _line(way)


class Register:
    """Who is given a certificate. ``certify``: of a name, a host and a request; PEM. Called by any thread.

    Args: base: names are this with a number below ``replicas``, and behind it another one for who took its place.
    """

    def __init__(self, base: str, replicas: int, secret: str, certify: Callable[[str, str, bytes], bytes]) -> None:
        self._wanted = re.compile(rf"{re.escape(base)}-(\d+)(-\d+)?")
        self._replicas, self._secret, self._certify = replicas, secret, certify
        self._hosts: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, said: bytes, host: str) -> bytes:
        """A line, to what was heard from there."""
        answer: dict[str, Any]
        try:
            name, request = self._checked(said, host)
            answer = {_CERT: self._certify(name, host, request).decode()}
        except StateflowError as error:
            answer = {_REFUSED: error.to_wire()}
        return json.dumps(answer).encode() + b"\n"

    def _checked(self, said: bytes, host: str) -> tuple[str, bytes]:
        """Raises NotAllowed."""
        try:
            asked = json.loads(said)
            name, secret, request = str(asked[_NAME]), str(asked[_SECRET]).encode(), str(asked[_REQUEST]).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            raise NotAllowed("that is no question", remedy="use the same release everywhere") from None
        if not hmac.compare_digest(secret, self._secret.encode()):
            raise NotAllowed("who asks is no task of this application", remedy="leave it alone")
        found = self._wanted.fullmatch(name)
        if found is None or not NAME.holds(name) or int(found[1]) >= self._replicas:
            raise NotAllowed(f"{name!r} is no replica's name here", remedy="ask for one's own name")
        with self._lock:
            if (known := self._hosts.setdefault(name, host)) != host:
                raise NotAllowed(f"{name} is at {known}, and not at {host}", remedy="ask for one's own name")
        return name, request


class Desk:
    """Listens on ``host``, with the certificate of a server in ``files``, until :meth:`close`.

    Args: answer: what to say to a line from an address. Raises OSError where it cannot listen there.
    """

    def __init__(self, host: str, files: Path, answer: Callable[[bytes, str], bytes]) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.use(files)
        self._answer, self._places = answer, threading.BoundedSemaphore(PLACES)
        self._over = threading.Event()
        self._listening = socket.create_server((host, 0))
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, name="stateflow enrolment", daemon=True).start()

    def use(self, files: Path) -> None:
        """From now on. Raises OSError."""
        self._context.load_cert_chain(files / OWN_CERT, files / OWN_KEY)

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # whoever waits for the next question is woken
        self._listening.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            self._places.acquire()
            try:
                plain, peer = self._listening.accept()
            except OSError as error:  # it is closed; or this process has too many files open
                self._places.release()
                if not self._over.wait(AGAIN_S):
                    log.warning("replicas that ask for certificates are not heard: %s", error)
                continue
            threading.Thread(target=self._attend, args=(plain, peer[0]), daemon=True).start()

    def _attend(self, plain: socket.socket, host: str) -> None:
        try:
            plain.settimeout(ASK_S)
            with plain, self._context.wrap_socket(plain, server_side=True) as way:
                way.sendall(self._answer(_line(way), host))
        except OSError:  # a stranger, or one that has gone
            pass
        finally:
            self._places.release()


def _line(way: ssl.SSLSocket) -> bytes:
    """What comes, to the end of the line. Raises OSError, also where that takes too long, and for a line that is too
    long."""
    until, said = SYSTEM_CLOCK.monotonic() + ASK_S, b""
    while not said.endswith(b"\n"):
        left = until - SYSTEM_CLOCK.monotonic()
        if left <= 0 or len(said) > LONGEST:
            raise TimeoutError("the line does not end")
        way.settimeout(left)
        more = way.recv(4096)
        if not more:
            raise ConnectionError("the line is cut off")
        said += more
    return said
