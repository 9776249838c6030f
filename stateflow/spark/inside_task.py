"""Tasks in which replicas run, each in a process of its own that ends with the task."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from stateflow.errors import StateflowError, Unavailable
from stateflow.node.workers import nobody_in
from stateflow.security.variables import NO_TOKEN, variables_of
from stateflow.settings import ReplicaSettings
from stateflow.spark.credentials import RENEW_S, Enrolment

log = logging.getLogger(__name__)
SITE = "spark"
#: file in a replica's directory with the replica's name
_NAME = "REPLICA"


def base_of(group: str) -> str:
    """Returns the prefix of the replica names of a group."""
    return f"{SITE}-{group}"


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """Function for ``mapInArrow`` that runs a replica.

    Yields no rows; runs until killed, and raises if its replica ends.

    ``enrolment``: where the task gets a certificate. None: the replica talks plain text, beyond this machine only if
    ``insecure``. ``again``: a task of an earlier job may have used this task's name.
    """

    controller: str
    application: str
    group: str
    checkpoints: str
    insecure: bool
    enrolment: Enrolment | None = None
    again: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            self._run()
        yield from ()

    def _run(self) -> NoReturn:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number, attempt = context.partitionId(), context.attemptNumber()
        folder = self._folder(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = self.name(folder, number, context.taskAttemptId() if attempt or self.again else None)
        _wait_for_former(folder / "state")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # the URL may contain a password
        environment |= {"STATEFLOW_CHECKPOINTS": self.checkpoints} if self.checkpoints else {}
        environment |= self._enrolled(folder, name)
        with (folder / "replica.log").open("ab") as said:
            replica = subprocess.Popen(
                self._command(folder, name),
                stdin=subprocess.PIPE,  # closes when this process ends, and the replica ends with it
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=environment,
            )
        try:
            status = self._ended(replica, folder, name)
        finally:
            replica.kill()
        last = (folder / "replica.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(
            f"the replica {name} exited with status {status}: {''.join(last)}", remedy="see its log", log=folder
        )

    def _folder(self, number: int) -> Path:
        """Returns the task's directory on this executor's local disk, which is gone with the executor."""
        local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()
        return Path(local) / f"stateflow-{self.application}-{self.group}" / str(number)

    def name(self, folder: Path, number: int, attempt: int | None) -> str:
        """Returns the name of the replica that has this directory, or gives it a new name.

        Args:
            attempt: number that no other task of the application has; None: first attempt.
        """
        file = folder / _NAME
        if not file.exists():
            file.write_text(f"{base_of(self.group)}-{number}" + ("" if attempt is None else f"-{attempt}"))
        return file.read_text()

    def _enrolled(self, folder: Path, name: str) -> Mapping[str, str]:
        """Returns the environment variables of the replica's identity. Raises NotAllowed, Unavailable, OSError."""
        if self.enrolment is None:
            return {}
        self.enrolment.enrol(name, folder / "tls")
        # no revocation list reaches the task
        return variables_of(folder / "tls") | NO_TOKEN | {"STATEFLOW_TLS_CRL": ""}

    def _ended(self, replica: subprocess.Popen[bytes], folder: Path, name: str) -> int:
        """Waits for the replica to end, and returns its status.

        Renews the certificate meanwhile; the replica rereads its files by itself.
        """
        while True:
            try:
                return replica.wait(None if self.enrolment is None else RENEW_S)
            except subprocess.TimeoutExpired:
                try:
                    self._enrolled(folder, name)
                except (StateflowError, OSError) as error:
                    log.warning("certificate of %s not renewed, will retry: %s", name, error)

    def _command(self, folder: Path, name: str) -> list[str]:
        command = [sys.executable, "-m", "stateflow", "replica", "--name", name, "--site", SITE]
        command += [
            "--controller",
            self.controller,
            "--listen",
            f"{_host_towards(self.controller)}:0",
            "--data-dir",
            str(folder / "state"),
        ]
        command += ["--insecure"] if self.insecure else []
        return [*command, "--json", "--stop-with-parent"]


def _host_towards(controller: str) -> str:
    """Returns this machine's address on the way to the controller."""
    host, _, port = controller.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect((host, int(port)))
        return str(way.getsockname()[0])


def _wait_for_former(state: Path) -> None:
    """Waits for a former replica in this directory: its process may end after its killed task. Raises DataDirLocked."""
    if state.is_dir():
        with nobody_in(state, ReplicaSettings().stop_timeout_s):
            pass
