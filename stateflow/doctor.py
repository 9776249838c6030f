"""Checks whether this machine and its environment have all that stateflow needs. The checks change nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateflowError
from stateflow.release import VERSION
from stateflow.security.certificates import SOON, TlsFiles, utc
from stateflow.settings import ConnectionSettings
from stateflow.settings.base import expanded, own_variables, unknown_variables
from stateflow.spark.session import require_java
from stateflow.storage import store as stores

FILES_MIN = 4096
FREE_MIN = 2 << 30
#: median duration above which a durable write is slow, in ms; number of writes
SYNC_SLOW_MS, SYNCS = 20.0, 15
LEAST_CORES, LEAST_MEMORY = 2, 2 << 30
#: result of adjtimex(2) when no program disciplines the clock
_UNSYNCHRONISED = 5


class Verdict(StrEnum):
    GOOD = "good"
    WARNING = "warning"  # it works, and could be better
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        what: name of the check.
        found: what the check found, in words.
        remedy: what the user should do; empty if nothing needs to be done.
    """

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examined(data_dir: Path, controller: str, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yields findings one by one, because each check takes some time."""
    checks: list[Callable[[], Finding]] = [
        python,
        java,
        cores,
        open_files,
        lambda: room(data_dir),
        lambda: syncs(data_dir),
        clock,
        lambda: variables(environment),
        certificate,
        lambda: cluster(controller),
    ]
    for check in checks:
        yield check()


def python() -> Finding:
    return Finding("Python", Verdict.GOOD, f"Python {platform.python_version()}, stateflow {VERSION}")


def java() -> Finding:
    """Checks Java and PySpark, which only Spark jobs need."""
    try:
        version = require_java()
    except StateflowError as error:
        return Finding("Java, for Spark", Verdict.WARNING, error.what, error.remedy)
    try:
        import pyspark
    except ImportError:
        remedy = "pip install 'stateflow-streams[spark]'"
        return Finding("Java, for Spark", Verdict.WARNING, f"Java {version}, but no PySpark", remedy)
    return Finding("Java, for Spark", Verdict.GOOD, f"Java {version}, PySpark {pyspark.__version__}")


def cores() -> Finding:
    count, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{count} cores, {memory / (1 << 30):.1f} GiB of memory"
    if count < LEAST_CORES or memory < LEAST_MEMORY:
        return Finding(
            "machine", Verdict.WARNING, found, "use a larger machine: a replica, a controller and Spark share it"
        )
    return Finding("machine", Verdict.GOOD, found)


def open_files(limit: int | None = None) -> Finding:
    """Checks the limit of open files.

    Args:
        limit: number of files that a process may open; None: the hard limit of this process.
    """
    most = _hard_limit() if limit is None else limit
    found = f"{most} at most" if most < 1 << 30 else "not limited"
    if most < FILES_MIN:
        partitions = max(0, (most - stores.RESERVED) // (stores.PER_DATABASE + stores.TABLES_MIN))
        remedy = f"raise the limit (`ulimit -Hn`, LimitNOFILE=): now a replica can have about {partitions} partitions"
        return Finding("open files", Verdict.WARNING, found, remedy)
    return Finding("open files", Verdict.GOOD, found)


def _hard_limit() -> int:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def room(data_dir: Path) -> Finding:
    try:
        free = shutil.disk_usage(_existing(data_dir)).free
    except OSError as error:
        return Finding("room", Verdict.BAD, f"{data_dir}: {error.strerror}", "pass a usable directory with --data-dir")
    found = f"{free / (1 << 30):.1f} GiB free for {data_dir}"
    if free < FREE_MIN:
        return Finding("room", Verdict.WARNING, found, "delete files or use another disk: a full disk stops all writes")
    return Finding("room", Verdict.GOOD, found)


def syncs(data_dir: Path) -> Finding:
    """Measures the duration of small synced writes. Batches with ``acknowledge=fsync`` and takeovers need such
    writes."""
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(data_dir), prefix=".stateflow-doctor-") as file:
            took = []
            for _ in range(SYNCS):
                began = time.perf_counter()
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
                took.append((time.perf_counter() - began) * 1e3)
    except OSError as error:
        remedy = "pass a directory that this user can write to with --data-dir"
        return Finding("disk", Verdict.BAD, f"{data_dir} cannot be written: {error.strerror}", remedy)
    middle = statistics.median(took)
    found = f"a synced write takes {middle:.1f} ms, the slowest of {SYNCS} {max(took):.1f} ms"
    if middle > SYNC_SLOW_MS:
        return Finding("disk", Verdict.WARNING, found, "put the data directory on an SSD, or on a local disk")
    return Finding("disk", Verdict.GOOD, found)


def _existing(path: Path) -> Path:
    """Returns the path if it is an existing directory, otherwise the nearest existing directory above it. Raises
    NotADirectoryError if a file, or a link that leads nowhere, is in the way.
    """
    path = expanded(path).absolute()
    while not (path.exists() or path.is_symlink()):
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory", path)
    return path


def clock() -> Finding:
    """Checks that the time of day is plausible and synchronized, because timers, TTLs and certificates use it.

    Leases do not depend on it: each machine measures them by its own monotonic clock.
    """
    now = datetime.fromtimestamp(SYSTEM_CLOCK.now_us() / 1e6)
    found = f"{now:%Y-%m-%d %H:%M:%S} here"
    if now.year < 2024:
        return Finding("clock", Verdict.BAD, found, "set the clock: certificates and timers depend on it")
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Finding("clock", Verdict.UNKNOWN, f"{found}; synchronization unknown")
    if state == _UNSYNCHRONISED:
        return Finding("clock", Verdict.WARNING, f"{found}; not synchronized", "run chrony or systemd-timesyncd")
    return Finding("clock", Verdict.GOOD, f"{found}, synchronized")


def variables(environment: Mapping[str, str]) -> Finding:
    strange = unknown_variables(environment)
    if not strange:
        return Finding("environment", Verdict.GOOD, f"{len(own_variables(environment))} stateflow variables, all known")
    hints = [f"{name}: did you mean {meant}?" for name, meant in strange.items() if meant]
    remedy = "; ".join(hints) or "remove them: nothing reads them"
    return Finding("environment", Verdict.BAD, f"unknown: {', '.join(strange)}", remedy)


def certificate() -> Finding:
    try:
        own = ConnectionSettings()
        if not (own.by_token or own.tls_cert):
            if not own.insecure:
                return Finding("certificate", Verdict.GOOD, "none: plain text, on this machine only")
            remedy = "create your own authority with `stateflow certs init`"
            return Finding("certificate", Verdict.WARNING, "none: plain text, also beyond this machine", remedy)
        current = TlsFiles(own).current().own
    except StateflowError as error:
        return Finding("certificate", Verdict.BAD, error.what, error.remedy)
    left = current.not_after - utc(SYSTEM_CLOCK)
    found = f"{current.identity}, until {current.not_after:%Y-%m-%d %H:%M} UTC"
    if left < min(SOON, timedelta(days=7)):
        return Finding(
            "certificate", Verdict.WARNING, found, "renew it with `stateflow certs renew`, or use another token"
        )
    return Finding("certificate", Verdict.GOOD, found)


def cluster(controller: str) -> Finding:
    if _nobody_listens(controller):  # a Cluster would wait for a controller
        return Finding("cluster", Verdict.UNKNOWN, f"nothing listens at {controller}")
    try:
        status = Cluster(controller).status()
    except StateflowError as error:
        return Finding("cluster", Verdict.WARNING, error.what, error.remedy)
    silent = [each.name for each in status.replicas if each.alive is False]
    versions = sorted({each.version for each in status.replicas if each.version} | {VERSION})
    found = f"{len(status.replicas)} replicas and {len(status.operators)} operators at {controller}"
    if silent:
        return Finding("cluster", Verdict.WARNING, f"{found}; silent: {', '.join(silent)}", "see `stateflow status`")
    if len(versions) > 1:
        remedy = "upgrade all processes to one release: mixed releases are meant only for the time of an upgrade"
        return Finding("cluster", Verdict.WARNING, f"{found}, of releases {', '.join(versions)}", remedy)
    return Finding("cluster", Verdict.GOOD, found)


def _nobody_listens(addresses: str) -> bool:
    for address in addresses.split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except (OSError, ValueError):
            continue
        return False
    return True


def worst(findings: Iterable[Finding]) -> Verdict:
    return Verdict.BAD if any(each.verdict is Verdict.BAD for each in findings) else Verdict.GOOD
