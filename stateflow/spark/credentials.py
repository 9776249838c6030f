"""Certificates and tokens of a cluster inside Spark, from an authority on the driver.

The authority lives as long as the application, or as its directory. The controller has a certificate, and each replica
has one with the replica's name. The driver's process is an administrator while the cluster runs. Tasks of queries get
tokens with the role ``data``.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from stateflow.environment import environment
from stateflow.security.authority import KEY, Authority, write_private
from stateflow.security.identity import Identity, Role
from stateflow.security.token import LONGEST
from stateflow.security.variables import NO_TOKEN, variables_of
from stateflow.spark.enrolment import Desk, Enrolment, Register

#: seconds between renewals of certificates and of the administrator's token, which are valid for longer
RENEW_S = timedelta(days=7).total_seconds()


class Credentials:
    """Authority, enrolment desk and tokens of one cluster.

    ``directory`` is made. ``host`` is the driver's address for others. ``base`` and ``replicas``: see
    :class:`~stateflow.spark.enrolment.Register`. Raises BadCertificate, OSError.
    """

    def __init__(self, directory: Path, host: str, base: str, replicas: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = directory / "authority"
        self._authority = Authority(place) if (place / KEY).exists() else Authority.init(place, "stateflow in Spark")
        self._host, self._controller = host, directory / "controller"
        #: an administrator's token for commands on this machine: STATEFLOW_TOKEN_FILE
        self.token_file = directory / "token"
        self._own = contextlib.ExitStack()
        self._issue()
        secret = secrets.token_hex(32)
        register = Register(base, replicas, secret, self._certify)
        self._desk = Desk(host, self._controller, register.answer)
        self.enrolment = Enrolment(self._desk.address, self._authority.ca, secret)

    def _certify(self, name: str, host: str, request: bytes) -> bytes:
        return self._authority.certify(Identity(Role.NODE, name), [host], request)

    def _issue(self) -> None:
        self._authority.issue(Identity(Role.CONTROLLER, "spark"), [self._host], self._controller)
        token, _ = self._authority.token(Identity(Role.ADMIN, "driver"), LONGEST)
        write_private(self.token_file, token.encode())

    def renew(self) -> None:
        """Issues new files; called every :data:`RENEW_S`. Processes reread their files by themselves.

        Raises BadCertificate, OSError.
        """
        self._issue()
        self._desk.use(self._controller)

    def task_token(self) -> str:
        """Returns a token for the tasks of one query, which use it as long as the query runs. Raises BadCertificate."""
        return self._authority.token(Identity(Role.DATA, "spark"), LONGEST)[0]

    @property
    def of_controller(self) -> Mapping[str, str]:
        """Environment variables of the controller."""
        return variables_of(self._controller) | NO_TOKEN

    def begin(self) -> None:
        """Makes this process an administrator of this cluster until :meth:`end`.

        The process can talk to no other cluster meanwhile.
        """
        given = dict.fromkeys(self.of_controller, "") | {"STATEFLOW_TOKEN_FILE": str(self.token_file)}
        self._own.enter_context(environment(given))

    def end(self) -> None:
        """Stops giving certificates, and ends the administrator's role of this process."""
        self._desk.close()
        self._own.close()
