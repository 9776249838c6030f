"""Issues certificates and tokens for a cluster inside Spark, from an authority on the driver.

The authority exists as long as its directory; a temporary directory is deleted when the cluster stops. The controller
and each replica have a certificate with their name. The driver's process is an administrator while the cluster runs.
Spark tasks get tokens that allow less: tasks of queries get a token with the role ``data`` for their operator, and
tasks that read state get one from :func:`read_token`.

The machines on which Spark runs replicas are not known in advance. So each task enrols its replica:

1. A task carries, within its function, the authority's certificate and a secret of the application, see
   :class:`Enrolment`.
2. The task makes its replica's key on its own machine. It requests the certificate, over TLS, from an enrolment desk in
   the driver's process, see :class:`Desk`.
3. The desk issues a certificate for the replica's name and the address from which the request came, see
   :class:`Register`. If a name already has a certificate for one address, the desk refuses any other address.

So a process with the secret can impersonate only a replica that has not enrolled yet, or one on its own machine.

A request is one line of JSON with the fields ``secret``, ``name`` and ``request``. The answer is one line of JSON with
the field ``cert``, or with ``refused``, which contains an error.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.durable import MALFORMED
from stateflow.errors import BadCertificate, InvalidArgument, NotAllowed, StateflowError, Unavailable, from_wire
from stateflow.security.authority import Authority, own_request, write_own, write_private
from stateflow.security.certificates import LONGEST, Certificate, certificate_of, decoded_token, utc
from stateflow.security.plain import (
    NO_TOKEN_VARIABLES,
    OWN_CERT,
    OWN_KEY,
    environment,
    issuing,
    own_issuer,
    variables_of,
)
from stateflow.security.roles import Identity, Role
from stateflow.types import NAME

log = logging.getLogger(__name__)
#: time limit for receiving a request or an answer, in seconds
ASK_S = 10.0
#: longest request or answer, in bytes; a certificate request has some 400 characters
ANSWER_LONGEST = 16 << 10
#: number of requests that are answered at a time; others wait
PLACES = 32
AGAIN_S = 1.0
#: seconds between renewals of certificates and of the administrator's token, less than their lifetime
RENEW_S = timedelta(days=7).total_seconds()
#: lifetime of a token for reads of state; when Spark plans a read, at least half of the lifetime is left
READ_FOR = timedelta(days=1)
#: time for which further uses of an operator get the token of the first one: ``foreachBatch`` may apply an operator to
#: each micro-batch, and each token leaves a certificate with the authority and connections to the replicas
TOKEN_SHARED_FOR = timedelta(hours=1)
_AUTHORITY = "authority"
_SPARK = "spark"  # name of the controller, and of tasks
_SECRET, _NAME, _REQUEST, _CERT, _REFUSED = "secret", "name", "request", "cert", "refused"


# -- Enrolment of replicas -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Access to the enrolment desk, for tasks.

    Attributes:
        address: address of the desk.
        ca: certificate of the desk's authority, PEM.
        secret: the application's secret, which the desk demands.
    """

    address: str
    ca: bytes
    secret: str = field(repr=False)

    def enrol(self, name: str, out: Path) -> None:
        """Writes a key, its certificate and the authority's certificate to ``out``.

        Raises NotAllowed if the desk refuses, Unavailable if it does not answer, or OSError if ``out`` cannot be
        written.
        """
        key, request = own_request()
        said = {_SECRET: self.secret, _NAME: name, _REQUEST: request.decode()}
        try:
            answer = json.loads(self._ask(json.dumps(said).encode() + b"\n"))
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"no certificate received from the driver: {error}",
                remedy="allow connections from the executors to the driver's host, on all ports",
                address=self.address,
            ) from error
        if _REFUSED in answer:
            raise from_wire(answer[_REFUSED])
        write_own(out, key, str(answer[_CERT]).encode(), self.ca)

    def _ask(self, said: bytes) -> bytes:
        """Sends one line to the desk and returns its answer. Raises OSError."""
        host, _, port = self.address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the certificate, and that it is for this host
        context.load_verify_locations(cadata=self.ca.decode())
        with (
            socket.create_connection((host, int(port)), ASK_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as way,
        ):
            way.sendall(said)
            return _line(way)


class Register:
    """Decides which tasks get a certificate. Thread-safe.

    Args:
        base: prefix of replica names. A replica is called ``{base}-{number}``, and its replacement
            ``{base}-{number}-{attempt}``; the number is less than ``replicas``.
        replicas: number of replicas.
        secret: secret that each request must contain.
        certify: (name, host, request) → certificate, PEM.
    """

    def __init__(self, base: str, replicas: int, secret: str, certify: Callable[[str, str, bytes], bytes]) -> None:
        self._wanted = re.compile(rf"{re.escape(base)}-(\d+)(-\d+)?")
        self._replicas, self._secret, self._certify = replicas, secret, certify
        self._hosts: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, said: bytes, host: str) -> bytes:
        """Returns the answer, as one line, to the request ``said`` from ``host``."""
        answer: dict[str, Any]
        try:
            name, request = self._checked(said, host)
            answer = {_CERT: self._certify(name, host, request).decode()}
        except StateflowError as error:
            answer = {_REFUSED: error.to_wire()}
        return json.dumps(answer).encode() + b"\n"

    def _checked(self, said: bytes, host: str) -> tuple[str, bytes]:
        """Returns (name, certificate request) of a valid request. Raises NotAllowed if the request is not valid."""
        try:
            asked = json.loads(said)
            name, secret, request = str(asked[_NAME]), str(asked[_SECRET]).encode(), str(asked[_REQUEST]).encode()
        except MALFORMED:
            raise NotAllowed("malformed certificate request", remedy="run the same release everywhere") from None
        if not hmac.compare_digest(secret, self._secret.encode()):
            raise NotAllowed(
                "the request does not come from a task of this application",
                remedy="enrol only tasks that the driver of this application started",
            )
        found = self._wanted.fullmatch(name)
        if found is None or not NAME.holds(name) or int(found[1]) >= self._replicas:
            raise NotAllowed(
                f"{name!r} is not a replica of this cluster", remedy="request a certificate for the task's own name"
            )
        with self._lock:
            if (known := self._hosts.setdefault(name, host)) != host:
                raise NotAllowed(
                    f"{name} runs at {known}, not at {host}", remedy="request a certificate for the task's own name"
                )
        return name, request


class Desk:
    """Server for certificate requests, which listens on ``host`` until :meth:`close`.

    Args:
        files: directory with the server's certificate and key.
        answer: (line, address from which the line came) → answer.

    Raises OSError if the server cannot listen on ``host``.
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
        """Uses the certificate in ``files`` from now on. Raises OSError."""
        self._context.load_cert_chain(files / OWN_CERT, files / OWN_KEY)

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the next request
        self._listening.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            self._places.acquire()
            try:
                plain, peer = self._listening.accept()
            except OSError as error:  # closed, or this process has too many files open
                self._places.release()
                if not self._over.wait(AGAIN_S):
                    log.warning("cannot accept certificate requests, will retry: %s", error)
                continue
            threading.Thread(target=self._attend, args=(plain, peer[0]), daemon=True).start()

    def _attend(self, plain: socket.socket, host: str) -> None:
        try:
            plain.settimeout(ASK_S)
            with plain, self._context.wrap_socket(plain, server_side=True) as way:
                way.sendall(self._answer(_line(way), host))
        except OSError:  # not a task of this application, or the client has closed the connection
            pass
        finally:
            self._places.release()


def _line(way: ssl.SSLSocket) -> bytes:
    """Reads one line. Raises OSError if the connection breaks, or if the line is too long or arrives too slowly."""
    until, said = SYSTEM_CLOCK.monotonic() + ASK_S, b""
    while not said.endswith(b"\n"):
        left = until - SYSTEM_CLOCK.monotonic()
        if left <= 0 or len(said) > ANSWER_LONGEST:
            raise TimeoutError("the line is too long or took too long")
        way.settimeout(left)
        more = way.recv(4096)
        if not more:
            raise ConnectionError("the line is incomplete")
        said += more
    return said


# -- Credentials of a cluster ----------------------------------------------------------------------------------------


class Credentials:
    """Authority, enrolment desk and tokens of one cluster.

    Args:
        directory: directory for all files; made if it does not exist.
        host: address at which other machines reach the driver.
        base: see :class:`Register`.
        replicas: see :class:`Register`.

    Raises BadCertificate if the authority in ``directory`` cannot be used, or OSError.
    """

    def __init__(self, directory: Path, host: str, base: str, replicas: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory.absolute()
        self._authority = Authority.open_or_init(directory / _AUTHORITY, "stateflow in Spark")
        self._host, self._controller = host, directory / "controller"
        #: file with an administrator's token; commands on this machine use the token if STATEFLOW_TOKEN_FILE names the
        #: file
        self.token_file = directory / "token"
        self._own = contextlib.ExitStack()
        self._tokens: dict[str, tuple[str, Certificate]] = {}
        self._issue()
        secret = secrets.token_hex(32)
        register = Register(base, replicas, secret, self._certify)
        self._desk = Desk(host, self._controller, register.answer)
        self.enrolment = Enrolment(self._desk.address, self._authority.ca, secret)

    def _certify(self, name: str, host: str, request: bytes) -> bytes:
        return self._authority.certify(Identity(Role.NODE, name), [host], request)

    def _issue(self) -> None:
        self._authority.issue(Identity(Role.CONTROLLER, _SPARK), [self._host], self._controller)
        token, _ = self._authority.token(Identity(Role.ADMIN, "driver"), LONGEST)
        write_private(self.token_file, token.encode())

    def renew(self) -> None:
        """Issues new certificates and a new token. Call it every :data:`RENEW_S`.

        Processes reread their files by themselves. Raises BadCertificate, OSError.
        """
        self._issue()
        self._desk.use(self._controller)

    def task_token(self, operator: str, clock: Clock = SYSTEM_CLOCK) -> str:
        """Returns a token for the tasks that send one query's rows to an operator, valid for the longest possible time,
        less at most ``TOKEN_SHARED_FOR``. A token that was revoked is not returned again.

        Raises InvalidArgument, BadCertificate.
        """
        known = self._tokens.get(operator)
        if (
            known is None
            or known[1].not_after - utc(clock) < LONGEST - TOKEN_SHARED_FOR
            or self._authority.has_revoked(known[1].serial)
        ):
            known = self._authority.token(Identity.of(Role.DATA, _SPARK, (operator,)), LONGEST)
            self._tokens[operator] = known
        return known[0]

    @property
    def of_controller(self) -> Mapping[str, str]:
        """Environment variables of the controller."""
        return variables_of(self._controller) | NO_TOKEN_VARIABLES

    def begin(self) -> None:
        """Makes this process an administrator of this cluster until :meth:`end`.

        Until then the process cannot call other clusters, and it passes to tasks only tokens that allow less. Raises
        InvalidArgument if it is an administrator of another cluster.
        """
        check_no_other()
        given = dict.fromkeys(self.of_controller, "") | {"STATEFLOW_TOKEN_FILE": str(self.token_file)}
        self._own.enter_context(environment(given))
        self._own.enter_context(issuing(self))

    def end(self) -> None:
        """Stops issuing certificates, and ends the administrator's role of this process."""
        self._desk.close()
        self._own.close()


def check_no_other() -> None:
    """Checks that this process can call another cluster. Raises InvalidArgument if it has :class:`Credentials`."""
    if own_issuer() is not None:
        raise InvalidArgument(
            "this process is the administrator of another cluster inside Spark",
            remedy="stop that cluster first; until then this process cannot call others",
        )


def read_token(directory: Path, operator: str, *, state: bool, clock: Clock = SYSTEM_CLOCK) -> str:
    """Returns a token for tasks that read from a cluster inside Spark.

    Spark plans reads in a process on the driver's machine, which runs as the driver's user but without its environment.
    That process calls this function. The token is stored beside the authority and returned again while at least half of
    its lifetime is left and it was not revoked, so that the authority does not issue a certificate for each read.

    Args:
        directory: directory of the cluster's :class:`Credentials`.
        operator: operator that the token is for.
        state: True for a token with the role ``query``, which may read the operator's state. False for a token with the
            role ``read``, which may only read descriptions of the cluster.

    Raises InvalidArgument, or BadCertificate if the authority cannot be used.
    """
    who = Identity.of(Role.QUERY, _SPARK, (operator,)) if state else Identity(Role.READ, _SPARK)
    file = directory / f"{'-'.join([who.role, *who.operators])}.token"
    try:
        authority = Authority(directory / _AUTHORITY, clock)
        with contextlib.suppress(OSError, BadCertificate):
            kept = file.read_text("ascii", "replace")
            known = certificate_of(decoded_token(kept).cert)
            if known.not_after - utc(clock) >= READ_FOR / 2 and not authority.has_revoked(known.serial):
                return kept
        token, _ = authority.token(who, READ_FOR)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as written:  # only its owner can read it
            written.write(token)
        Path(written.name).replace(file)  # atomic, because another process may write a token at the same time
    except (BadCertificate, OSError) as error:
        raise BadCertificate(
            f"no token for this read: {error.what if isinstance(error, BadCertificate) else error}",
            remedy="read while the cluster runs; after another start_cluster call register_state again",
            dir=directory,
        ) from error
    return token
