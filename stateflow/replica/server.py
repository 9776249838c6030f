"""Runs a replica's process, with one event loop for control, one thread for batches and a few threads for files.

:func:`serve` finds the partitions in the replica's data directory. Then it serves requests and performs the replica's
:func:`duties`, until it is stopped or a duty ends unexpectedly.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import uuid
from collections import Counter
from collections.abc import Coroutine
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import REPORT_LOG, StateflowError
from stateflow.fleet import Listening
from stateflow.metrics.figures import Values
from stateflow.metrics.limits import Limit
from stateflow.partition.environment import keep_buffers
from stateflow.partition.lifecycle import SERVED
from stateflow.partition.replica import ReplicaNode
from stateflow.release import VERSION
from stateflow.replica.executor import ErrorThrottle, Garbage, Threads
from stateflow.replica.membership import say_opening, stay_registered
from stateflow.replica.service import ReplicaService
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.clients import addresses_of
from stateflow.rpc.faults import unexpected
from stateflow.rpc.secure import check_reach
from stateflow.rpc.serving import CallLimits, add_health, bind, new_server, reached_at
from stateflow.settings import ServerSettings
from stateflow.tracing import begin_tracing, end_tracing
from stateflow.types import ReplicaInfo

log = logging.getLogger(__name__)
#: shortest interval between two measurements of the sizes on disk, in seconds
SIZES_S = 30.0
#: time after which the interpreter switches threads; it limits how long a running batch delays the event loop, and so
#: the pause of a move
SWITCH_INTERVAL_S = 0.0005

# -- Metrics ---------------------------------------------------------------------------------------------------------


class Figures:
    """Metrics of a replica, computed from its memory at each call, and from its disk at intervals."""

    def __init__(self, service: ReplicaService, info: ReplicaInfo, limits: CallLimits, clock: Clock) -> None:
        self._service, self._info, self._limits, self._clock = service, info, limits, clock
        self._sizes: Values = {}
        self._sized_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self) -> Values:
        service, node = self._service, self._service.node
        by_operator = dict(service.applier.samples.by_operator)  # the batch thread adds to it
        states = Counter[tuple[str, str]]()
        rates: dict[str, float] = {}
        for view in node.views():
            states[view.partition.operator, str(view.state)] += 1
            rates[view.partition.operator] = rates.get(view.partition.operator, 0.0) + view.batch_rate
        left, followers = node.lease.until - self._clock.monotonic(), node.sender.followers()
        return {
            "stateflow_info": {("replica", self._info.name, self._info.site, VERSION): 1},
            "stateflow_rows_total": {(name,): of.rows for name, of in by_operator.items()},
            "stateflow_batch_seconds": {(name,): of.took for name, of in by_operator.items()},
            "stateflow_batch_held_seconds_total": {(name,): of.held_s for name, of in by_operator.items()},
            "stateflow_partitions": states,
            "stateflow_batches_per_second": {(name,): rate for name, rate in rates.items()},
            "stateflow_lease_seconds": {(): left} if math.isfinite(left) else {},
            "stateflow_checkpoint_rounds_total": {(): service.checkpointing.taken},
            "stateflow_followers": {(name,): followers[name] for name in rates},
            "stateflow_streams": {(): len(service.streams)},
            **await self._of_disk(),
            **self._limits.figures(self._limits_used()),
        }

    def _limits_used(self) -> dict[Limit, float]:
        """Returns which part of each limit is in use. A limit that each stream has is as full as that of the fullest
        stream."""
        service, settings = self._service, self._service.node.settings
        used = [stream.used() for stream in service.streams]
        return {
            **service.node.limits_used(),
            "read_ahead_bytes": sum(stream.unread for stream in service.streams) / settings.stream_bytes_max,
            "untaken_bytes": sum(stream.untaken for stream in service.streams) / settings.stream_bytes_max,
            "stream_read_ahead_bytes": max((read for read, _ in used), default=0.0),
            "stream_untaken_bytes": max((untaken for _, untaken in used), default=0.0),
            "waiting_bytes": service.applier.waiting.bytes / settings.waiting_bytes_max,
        }

    async def _of_disk(self) -> Values:
        """Returns sizes on disk, at most ``SIZES_S`` old.

        Callers during a measurement wait for that measurement, and get its error if it fails.
        """
        if self._looking is None and self._clock.monotonic() - self._sized_at >= SIZES_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.shield(self._looking)  # shielded: other callers wait for it, too
        return self._sizes

    async def _look(self) -> None:
        node, sizes, entries = self._service.node, Counter[str](), Counter[str]()
        unknown: set[str] = set()
        try:
            views, disk = await self._service.threads.in_sizes(node.sized, node.views())
        finally:
            self._looking = None
        for view in views:
            name = view.partition.operator
            sizes[name] += view.bytes
            if view.state in SERVED:
                entries[name] += view.entries or 0
                unknown |= {name} if view.entries is None else set()
        self._sizes = {
            "stateflow_state_bytes": {(name,): size for name, size in sizes.items()},
            "stateflow_state_entries": {(name,): n for name, n in entries.items() if name not in unknown},
            "stateflow_disk_free_bytes": {(): disk.disk_free_bytes},
        }
        self._sized_at = self._clock.monotonic()


# -- Process ---------------------------------------------------------------------------------------------------------


async def serve(
    node: ReplicaNode,
    listen: str,
    controller: str,
    *,
    advertise: str | None = None,
    random: Random,
    checkpoints: CheckpointStore | None = None,
    metrics: str = "",
    clock: Clock = SYSTEM_CLOCK,
    ready: asyncio.Future[Listening] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Runs a replica until ``stop`` is set, or until one of its duties ends unexpectedly.

    If a duty ends, the replica stops and raises the duty's error, because without renewals of its lease or without the
    watchdog for stuck batches it would only look alive.

    Args:
        listen: address at which the replica listens.
        controller: address of the controller, or comma-separated addresses of several.
        advertise: address at which others reach the replica; by default the address at which it listens.
        random: spreads the heartbeats and periodic checkpoints of replicas that were started together.
        checkpoints: store for checkpoints; None if none are taken.
        metrics: address at which metrics are served; empty if they are not served.
        ready: gets the addresses once the replica serves requests.
        stop: ends the replica when it is set.

    Raises PortInUse, InvalidArgument if an address is not valid, InsecureRefused if other machines would be reached in
    plain text, BadCertificate, or ExtraMissing if metrics need a package that is not installed.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_buffers()
    stop = stop or asyncio.Event()
    limits = CallLimits(ServerSettings())
    tracing = begin_tracing("replica", node.info.name, node.info.site)
    server, page = new_server(limits), None
    garbage = Garbage(lambda: node.cache.objects)
    service = ReplicaService(node, checkpoints, clock, random=random, garbage=garbage, tracing=tracing)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(service, server)
    add_health(server, lambda: node.lease.serves_some(clock.monotonic()))
    try:
        check_reach(addresses_of(controller))
        address = bind(server, listen, advertise)
        info = ReplicaInfo(node.info.name, node.info.site, reached_at(advertise, address), node.info.weight)
        if not await recover(service, info, controller, stop):
            return
        await server.start()
        if metrics:
            from stateflow.metrics.page import Page  # only replicas that serve metrics import it

            figures = Figures(service, info, limits, clock)
            page = Page(metrics, figures, asyncio.get_running_loop(), node.batches.figures)
        if ready is not None:
            ready.set_result(Listening(address, {} if page is None else {info.name: page.address}))
        tasks = [
            asyncio.create_task(duty, name=getattr(duty, "__qualname__", None))
            for duty in duties(service, info, controller, uuid.uuid4().hex)
        ]
        ended = await _first_to_end(tasks, stop)
        for task in tasks:
            task.cancel()
        stopping = asyncio.ensure_future(server.stop(grace=2))
        service.end_streams()  # otherwise streams last as long as their clients
        await stopping
    finally:
        if page is not None:
            await asyncio.to_thread(page.close)
        await service.close()
        if tracing is not None:
            await asyncio.to_thread(end_tracing)
    if ended is not None:
        raise ended


async def _first_to_end(duties: list[asyncio.Task[None]], stop: asyncio.Event) -> StateflowError | None:
    """Waits until ``stop`` is set or a duty ends. Returns None in the first case; in the second, sets ``stop`` and
    returns the duty's error."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopping, *duties], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if stop.is_set():
        return None
    duty = next(iter(done))
    why = None if duty.cancelled() else duty.exception()
    log.critical("replica stops: the background task %s ended unexpectedly", duty.get_name(), exc_info=why)
    stop.set()
    if why is not None:
        return unexpected(why)
    return StateflowError(f"the background task {duty.get_name()} ended unexpectedly", remedy=REPORT_LOG)


async def recover(service: ReplicaService, info: ReplicaInfo, controller: str, stop: asyncio.Event) -> bool:
    """Finds the partitions on this replica, and until then notifies the controllers that the replica is starting.

    Returns False if ``stop`` was set. Raises the errors of :meth:`ReplicaNode.recover`.
    """
    finding = asyncio.ensure_future(service.threads.in_files(service.node.recover))
    saying = asyncio.create_task(say_opening(service.member(info), controller))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([finding, stopping], return_when=asyncio.FIRST_COMPLETED)
        service.node.give_up_recovery()
        await finding
        return not stop.is_set()
    finally:
        saying.cancel()
        stopping.cancel()


def duties(
    service: ReplicaService, info: ReplicaInfo, controller: str, incarnation: str
) -> list[Coroutine[Any, Any, None]]:
    """Returns the tasks that a replica performs without requests, as long as it runs."""
    found: list[Coroutine[Any, Any, None]] = [
        service.applier.watch.run(),
        stay_registered(service.member(info), controller, incarnation),
        _drop_unread(service.node, service.threads),
    ]
    if service.checkpointing.store is not None and service.node.settings.checkpoint_interval_s:
        found += [service.checkpointing.periodically(), service.checkpointing.tidily()]
    return found


async def _drop_unread(node: ReplicaNode, threads: Threads) -> None:
    throttle = ErrorThrottle(log, "cannot drop unread snapshots")
    while True:
        await asyncio.sleep(node.settings.transfer_timeout_s / 4)
        with throttle.survived():
            await threads.in_files(node.sender.drop_unread)
