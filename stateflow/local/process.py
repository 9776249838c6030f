"""One process of a cluster on this machine, and the fork server that starts such processes quickly.

:class:`Process` starts a process, waits until it listens, and ends it. On Linux the fork server forks the process,
unless the process needs a command with a prefix.

Without the fork server, a cluster would spend most of its start on imports, which every process repeats.
:class:`ForkServer` starts one process that imports everything once, and forks the others from this process. It
resembles :mod:`multiprocessing.forkserver`, but does not run the caller's main module again in every process. So a
script that starts a cluster need not guard its ``__main__``. A forked process is a real process with its own memory; it
is killed, stopped and waited for like any other process.

The fork server has one thread, and runs no code but imports before it forks. It ends when the process that started it
and all forked processes have ended. Forked processes have the limits, priority and processors that the starting process
had when it started the fork server.

Forked processes append to their logs themselves, because in a pipe to the starting process their lines would wait for
it. The fork server rotates the logs.

A request is sent through a socket pair: a length (``!I``), and a :class:`Request` of that length as JSON. Four file
descriptors are sent with the request: the new process's standard input, output and error, and the writing end of its
*life* pipe. The fork server writes the process id (``!i``) into the life pipe, and the exit code (``!i``) when the
process has ended. If the life pipe ends without an exit code, the fork server has died; the process is then killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from stateflow.agent.processes import LocalLauncher, Processes, last_line, rotate_open_log
from stateflow.errors import InvalidArgument, Unavailable
from stateflow.fleet import Command, Launcher, Listening, NotReady, Started, heard
from stateflow.fleet import Process as Child

#: prefixes of variables that are read only after the fork; any other variable may affect the imports before the fork
_READ_LATER = ("STATEFLOW_", "PYTEST_")
_LENGTH = struct.Struct("!I")
_EXIT = struct.Struct("!i")
#: seconds between two looks of the fork server at the sizes of logs
LOOK_S = 2.0

# -- The fork server as its clients use it ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A request to fork ``python -m stateflow ARGUMENTS``."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    log: str


class Forked:
    """A process that a fork server has forked."""

    def __init__(self, pid: int, life: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self._life = life
        weakref.finalize(self, os.close, life)
        self._exit: int | None = None
        self._reading = threading.Lock()
        self.stdin: IO[str] | None = os.fdopen(stdin, "w")
        self.stdout: IO[str] | None = os.fdopen(stdout)

    def poll(self) -> int | None:
        """Returns the exit code; None: the process runs. As with Popen, the code is negative if a signal ended it."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended, and returns its exit code. Raises subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        if self._exit is None and readable([self._life], timeout_s):
            with self._reading:
                if self._exit is None:
                    self._exit = self._read_exit()
        return self._exit

    def _read_exit(self) -> int:
        said = _read(self._life, _EXIT.size)
        if said:
            return int(_EXIT.unpack(said)[0])
        with contextlib.suppress(ProcessLookupError):  # the fork server is gone, and could not report the end
            os.kill(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


class ForkServer:
    """Forks ``python -m stateflow`` processes from a process that has imported everything. Thread-safe. Linux only."""

    def __init__(self) -> None:
        self._environment = _from_the_beginning()
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def usable(self) -> bool:
        """True if the fork server is running, and was started with the environment that this process has now."""
        return self._process.poll() is None and self._environment == _from_the_beginning()

    def start(self, name: str, arguments: list[str], environment: dict[str, str], log: IO[str]) -> Forked:
        """Forks a process with ``log`` as its standard error. The fork server rotates the log. Raises Unavailable.

        Args:
            log: file that was opened by its path, for appending.
        """
        path = str(Path(log.name).absolute())
        request = json.dumps(asdict(Request(name, arguments, environment, str(Path.cwd()), path))).encode()
        (their_in, stdin), (stdout, their_out), (life, their_life) = os.pipe(), os.pipe(), os.pipe()
        try:
            with self._lock:
                socket.send_fds(
                    self._socket, [_LENGTH.pack(len(request))], [their_in, their_out, log.fileno(), their_life]
                )
                self._socket.sendall(request)
        except OSError as error:
            raise self._gone() from error
        finally:
            for each in (their_in, their_out, their_life):
                os.close(each)
        pid = _read(life, _EXIT.size)
        if not pid:
            raise self._gone()
        return Forked(_EXIT.unpack(pid)[0], life, stdin, stdout)

    def close(self) -> None:
        """Makes the fork server accept no more requests. It ends when all processes that it forked have ended."""
        self._socket.close()

    def _gone(self) -> Unavailable:
        return Unavailable("the fork server has ended", remedy="retry; this program's standard error has the cause")


_fork_server: ForkServer | None = None
_lock = threading.Lock()


def fork_server() -> ForkServer:
    """Returns the fork server of this process, and starts one if needed.

    A new one is needed if there is none, if the former one has ended, or if environment variables that may affect
    imports have changed.
    """
    global _fork_server  # noqa: PLW0603 - one for all clusters of a process
    with _lock:
        if _fork_server is None or not _fork_server.usable:
            if _fork_server is not None:
                _fork_server.close()
            _fork_server = ForkServer()
        return _fork_server


class ForkLauncher(Processes):
    """A launcher that forks processes, see :class:`~stateflow.fleet.Launcher`. Linux only."""

    def start(self, spec: Command) -> Started:
        """Starts a process. Raises Unavailable, OSError."""
        rotate_open_log(spec.log)
        with spec.log.open("a") as log:
            return Started(spec, fork_server().start(spec.name, list(spec.arguments), dict(spec.environment), log))


def _forget() -> None:
    """Drops the fork server in a process that was forked from this one, because the fork server belongs to the
    parent."""
    global _fork_server, _lock
    _fork_server, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _from_the_beginning() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_READ_LATER)}


def readable(files: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Returns the files that can be read without blocking, including files at their end.

    Returns an empty set if no file can be read within ``timeout_s`` seconds; None: waits without a limit.
    """
    waiting = select.poll()  # select() supports no file descriptor above 1023
    for file in files:
        waiting.register(file, select.POLLIN)
    return {file for file, _ in waiting.poll(None if timeout_s is None else timeout_s * 1e3)}


def _read(file: int, size: int) -> bytes:
    """Reads ``size`` bytes, or fewer if the file ends before."""
    data = b""
    while len(data) < size and (more := os.read(file, size - len(data))):
        data += more
    return data


# -- The fork server's own process -----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> Request | None:
    """Forks processes on request.

    Returns twice: in each forked process it returns the request, and in the fork server it returns None at the end.
    """
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    lives: dict[int, int] = {}
    logs: dict[int, Path] = {}
    own = _directories(os.environ)
    base = [each for each in sys.path[1:] if each not in own]
    taking = True
    while taking or lives:
        ready = readable([awake, requests.fileno()] if taking else [awake], LOOK_S if logs else None)
        if awake in ready:
            os.read(awake, 1024)
            _reap(lives)
            logs = {pid: log for pid, log in logs.items() if pid in lives}
        for log in logs.values():
            rotate_open_log(log)
        if requests.fileno() in ready:
            header, files, _, _ = socket.recv_fds(requests, _LENGTH.size, 4)
            if not header:
                taking = False
                continue
            data = requests.recv(_LENGTH.unpack(header)[0], socket.MSG_WAITALL)
            request = Request(**json.loads(data))
            pid = os.fork()
            if pid == 0:
                requests.close()
                for each in (awake, wake, *lives.values()):
                    os.close(each)
                _become(request, files, base)
                return request
            lives[pid], logs[pid] = files.pop(), Path(request.log)
            for each in files:
                os.close(each)
            _say(lives[pid], pid)
    return None


def _reap(lives: dict[int, int]) -> None:
    for pid in list(lives):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _say(lives[pid], os.waitstatus_to_exitcode(status))
            os.close(lives.pop(pid))


def _say(life: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # no process reads the life pipe any more
        os.write(life, _EXIT.pack(number))


def _become(request: Request, files: list[int], base: list[str]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, life = files
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.close(life)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = list(dict.fromkeys([request.directory, *_directories(request.environment), *base]))
    sys.argv[:] = ["stateflow", *request.arguments]
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"sf {request.name}"[:15])


def _directories(environment: Mapping[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def _import_all() -> None:
    """Imports all modules that a controller and a replica need.

    It calls no function of a library, because threads that the library starts would not survive a fork.
    """
    import gc
    import importlib

    for module in ("stateflow.cli.app", "stateflow.cli.processes", "reconfig.controller.server", "stateflow.ledger"):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # pyarrow imports it when it first makes an array of Python objects
        importlib.import_module("pandas")
    gc.freeze()


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    if _serve(requests) is not None:
        runpy.run_module("stateflow", run_name="__main__")


# -- One process of a cluster ----------------------------------------------------------------------------------------

START_TIMEOUT_S = 60.0


def python_path(paths: Iterable[str]) -> str:
    """Returns the PYTHONPATH for a process that must import from these directories.

    Raises InvalidArgument for a directory that PYTHONPATH cannot express, because its modules would not be found.
    """
    found = list(dict.fromkeys(filter(None, paths)))
    for path in found:
        if os.pathsep in path and Path(path).exists():
            raise InvalidArgument(
                f"a process cannot import from a directory with {os.pathsep!r} in its name",
                remedy="rename it, or move the program elsewhere",
                path=path,
            )
    return os.pathsep.join(found)


class Process:
    """One process of stateflow. It logs to a file, and prints its address as its first line of output.

    Args:
        arguments: arguments of ``python -m stateflow``.
        within: prefix of the command, such as ``ip netns exec NAME``; empty: no prefix.
        environment: environment variables in addition to those of this process.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        log: Path,
        python_path: list[str],
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._within = within
        self._environment = dict(environment or {})
        self._arguments = arguments
        self._log = log
        self._python_path = python_path
        self.address = ""
        self._launcher: Launcher = (
            ForkLauncher() if sys.platform == "linux" and not within else LocalLauncher(rotates=False)
        )
        self._started: Started | None = None

    @property
    def _child(self) -> Child | None:
        return None if self._started is None else self._started.process

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Starts the process without waiting; call :meth:`wait_ready` afterwards."""
        arguments = [*self._arguments, "--json", "--stop-with-parent"]
        paths = [*self._python_path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | self._environment | {"PYTHONPATH": python_path(paths)}
        self._started = self._launcher.start(Command(self.name, arguments, environment, self._log, self._within))

    def wait_ready(self) -> str:
        """Waits until the process listens. Returns its address. Raises the error with which the process ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        out = self._child.stdout
        line = out.readline() if readable([out.fileno()], START_TIMEOUT_S) else ""
        said = heard(line)
        if isinstance(said, Listening):
            self.address = said.address
            return self.address
        self.stop()
        if said is not None:
            raise said.fault if isinstance(said, NotReady) else said
        why = last_line(self._log) or "no output"
        raise Unavailable(f"{self.name} did not start: {why}", remedy="read its log", log=self._log)

    def kill(self) -> None:
        """Kills the process with SIGKILL, so that it can neither flush data nor notify others."""
        if self._started is not None:
            self._launcher.kill(self._started)
        self._wait_for_end(None)

    def ask_to_stop(self) -> None:
        """Asks the process to stop, without waiting; call :meth:`stop` afterwards."""
        if self._started is not None:
            self._launcher.stop(self._started)

    def stop(self) -> None:
        self.ask_to_stop()
        try:
            self._wait_for_end(15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait_for_end(self, timeout_s: float | None) -> None:
        if self._child is not None:
            self._child.wait(timeout_s)
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    @property
    def running(self) -> bool:
        return self._started is not None and self._launcher.is_running(self._started)
