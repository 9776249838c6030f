"""A controller's process, which leads or waits to lead, and answers in both cases."""

from __future__ import annotations

import asyncio
import logging

from reconfig.controller.context import ClusterStates
from reconfig.controller.controller import Controller
from reconfig.controller.figures import Figures
from reconfig.controller.following import Following
from reconfig.controller.leading import Leading
from reconfig.controller.processes import here, is_gone
from reconfig.controller.service import ControllerService
from reconfig.tenure import Tenure
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.ledger import Holder, Ledger
from stateflow.rpc.health import add_health
from stateflow.rpc.limits import CallLimits
from stateflow.rpc.serving import new_server
from stateflow.rpc.wire import bind
from stateflow.settings import ControllerSettings, ServerSettings
from stateflow.tracing import begin_tracing, end_tracing

log = logging.getLogger(__name__)


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

    Raises PortInUse, InsecureRefused, BadCertificate; ExtraMissing and InvalidArgument for OTEL_* in the environment.
    """
    settings = settings or ControllerSettings()
    tracing = begin_tracing("controller", advertise or listen, settings.site)
    limits = CallLimits(ServerSettings())
    server, page = new_server(limits), None

    def make(tenure: Tenure, states: ClusterStates, grace_s: float) -> Controller:
        return Controller(ledger, settings, clock, tenure=tenure, states=states, grace_s=grace_s, address=address)

    def gone(holder: Holder) -> bool:
        return settings.notice_gone and is_gone(holder)

    try:
        address = bind(server, listen, advertise)
        log.info("ledger %s at %s", ledger.id, ledger.database.shown)
        leading = Leading(ledger, here(advertise or address), gone, settings, clock, make)
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
                running.result()  # raises: the task ends only with an error
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
