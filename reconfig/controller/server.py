"""The process of a controller: leads or waits to lead, and answers in both cases.

The ledger names the process that leads, its holder. A process on the same machine that waits to lead notices that the
holder has ended (:func:`is_gone`), and need not wait until the holder's leader lease has lapsed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections import Counter
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the system, here where a controller's process is put together

from reconfig.controller.context import Leadership, Writer
from reconfig.controller.controller import Controller
from reconfig.controller.following import Following
from reconfig.controller.leading import Leading
from reconfig.controller.service import ControllerService
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.ledger import Holder, Ledger
from stateflow.metrics.figures import Values
from stateflow.release import VERSION
from stateflow.rpc.serving import CallLimits, add_health, bind, new_server
from stateflow.settings import ControllerSettings, ServerSettings
from stateflow.status import ReplicaStatus
from stateflow.tracing import begin_tracing, end_tracing

log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


# -- Holders ---------------------------------------------------------------------------------------------------------


def here(address: str) -> Holder:
    """Returns the description of this process that the ledger stores with a lease.

    If the system does not tell when this process started, no other process can conclude that this one has ended.
    """
    pid = os.getpid()
    return Holder(
        uuid.uuid4().hex, socket.gethostname(), address, pid, _started(pid) or 0, _read(_BOOT).strip(), _namespace()
    )


def is_gone(other: Holder) -> bool:
    """Tells whether another process has certainly ended.

    It has ended if it was started since this boot, in this process's namespace, and no longer runs. Returns False if
    that cannot be seen, because files are missing or /proc hides the processes of other users.
    """
    if not other.started or not other.boot or not other.namespace:
        return False
    if other.boot != _read(_BOOT).strip() or other.namespace != _namespace():
        return False
    try:
        return _parsed(_stat(other.pid).read_text()) != other.started
    except FileNotFoundError:
        return not _runs(other.pid)
    except (OSError, ValueError, IndexError):
        return False


def _started(pid: int) -> int | None:
    """Returns when a process was started, in ticks since boot; None: it does not run, or the system does not tell."""
    try:
        return _parsed(_stat(pid).read_text())
    except (OSError, ValueError, IndexError):
        return None


def _stat(pid: int) -> Path:
    return Path(f"/proc/{pid}/stat")


def _parsed(stat: str) -> int | None:
    """Returns when a process was started, in ticks since boot; None: it is dead or a zombie.

    Raises ValueError, IndexError.
    """
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _runs(pid: int) -> bool:
    """Tells whether a process with this number exists, whichever user runs it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        return True
    return True


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


# -- Metrics ---------------------------------------------------------------------------------------------------------


class Figures:
    """Metrics of a controller: whether it leads and, if it does, figures of its cluster."""

    def __init__(self, leading: Leading, address: str, site: str, limits: CallLimits) -> None:
        self._leading, self._address, self._site, self._limits = leading, address, site, limits

    async def __call__(self) -> Values:
        controller = self._leading.serving if self._leading.leads else None
        common: Values = {
            "stateflow_info": {("controller", self._address, self._site, VERSION): 1},
            "stateflow_leads": {(): int(controller is not None)},
            **self._limits.figures(),
        }
        return common if controller is None else common | _of_cluster(controller)


def _of_cluster(controller: Controller) -> Values:
    status = controller.status_reporter.status()
    unserved = {
        (each.name,): sum(len(reason.partitions) for reason in each.unserved) for each in status.status().operators
    }
    return {
        "stateflow_replicas": Counter((_state(each),) for each in status.replicas),
        "stateflow_replica_partitions": {(each.name,): each.partitions for each in status.replicas},
        "stateflow_replica_heartbeat_seconds": {
            (each.name,): each.last_heartbeat_s for each in status.replicas if each.last_heartbeat_s >= 0
        },
        "stateflow_partitions_unserved": unserved,
        "stateflow_partitions_damaged": {(): len(status.damaged)},
        "stateflow_moves_running": {(): len(controller.cluster.open_moves)},
        "stateflow_moves_total": controller.runs.ended,
        "stateflow_move_pause_seconds": {(kind,): pauses for kind, pauses in controller.runs.pauses.items()},
        "stateflow_standbys": Counter((each.operator, str(each.phase)) for each in status.standbys),
    }


def _state(replica: ReplicaStatus) -> str:
    if replica.alive:
        return "alive"
    return "stopped" if replica.stopped else "opening" if replica.opening else "silent"


# -- The process -----------------------------------------------------------------------------------------------------


async def serve(
    ledger: Ledger,
    listen: str,
    settings: ControllerSettings | None = None,
    *,
    advertise: str | None = None,
    metrics: str = "",
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[str] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Runs a controller until ``stop``, leading or waiting to lead.

    Args:
        metrics: address at which metrics are served; empty: they are not served.

    Raises PortInUse, InsecureRefused and BadCertificate. Raises ExtraMissing or InvalidArgument if tracing cannot begin
    as the OTEL_* environment variables say.
    """
    settings = settings or ControllerSettings()
    tracing = begin_tracing("controller", advertise or listen, settings.site)
    limits = CallLimits(ServerSettings())
    server, page = new_server(limits), None
    random = Random()

    def make(leadership: Leadership, writer: Writer, grace_s: float) -> Controller:
        return Controller(
            ledger,
            settings,
            clock,
            leadership=leadership,
            writer=writer,
            grace_s=grace_s,
            address=address,
            random=random,
        )

    def gone(holder: Holder) -> bool:
        return settings.notice_gone and is_gone(holder)

    try:
        address = bind(server, listen, advertise)
        log.info("controller uses ledger %s at %s", ledger.id, ledger.database.shown)
        leading = Leading(ledger, here(advertise or address), gone, settings, clock, make, random)
        following = Following(ledger, settings, clock, lambda: leading.leads, leading.who)
        ControllerService(leading, following).add_to(server)
        add_health(server)  # a controller that waits to lead is ready, too
        running: asyncio.Task[None] | None = None
        reading: asyncio.Task[None] | None = None
        try:
            await leading.try_once()
            await server.start()
            if metrics:
                from stateflow.metrics.page import Page  # loaded only where metrics are wanted

                figures = Figures(leading, advertise or address, settings.site, limits)
                page = Page(metrics, figures, asyncio.get_running_loop())
            running = asyncio.create_task(leading.run())
            reading = asyncio.create_task(following.run())
            if ready is not None:
                ready.set_result(address)
            stopping = asyncio.create_task((stop or asyncio.Event()).wait())
            await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # raises, because the task ends only with an error
            await server.stop(grace=1)
        finally:
            if page is not None:
                await asyncio.to_thread(page.close)
            for task in (running, reading):
                if task is not None:
                    task.cancel()
            following.close()
            await leading.close()
    finally:
        ledger.close()
        if tracing is not None:
            await asyncio.to_thread(end_tracing)
