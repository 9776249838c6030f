"""Commands that run a process of a cluster or its live page, or probe a process. A process stops on SIGINT and SIGTERM,
within a time limit (:class:`_Stop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the system, here where everything is put together
from typing import Annotated, Any

import typer
from rich.text import Text

from stateflow.cli import checkpoint
from stateflow.cli import ledger as ledger_commands
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LISTEN,
    LOCAL,
    Controller,
    Insecure,
    Json,
    console,
    default_ledger,
    emit,
    keep_stdout,
    log_to_stderr,
)
from stateflow.clock import SYSTEM_CLOCK
from stateflow.code.loading import INSIDE, check_outside
from stateflow.errors import InvalidArgument, StateflowError
from stateflow.fleet import Listening, NotReady
from stateflow.node.workers import Node, Workers, claim_node, directory_of, left_behind
from stateflow.partition.registry import Lease
from stateflow.partition.replica import ReplicaNode
from stateflow.private import UMASK, url_of
from stateflow.replica import server
from stateflow.rpc.serving import ask_health
from stateflow.settings import ControllerSettings, ReplicaSettings
from stateflow.settings.base import check_variables
from stateflow.storage.store import raise_limit
from stateflow.types import WEIGHT_MAX, WORKERS_MAX, ReplicaInfo, check_name, worker_name

log = logging.getLogger(__name__)
app = Commands()
#: maximum time from SIGTERM to the end of a controller, in seconds
STOP_S = 10.0
#: maximum time for writing a process's last log lines, in seconds
SAY_S = 2.0
#: maximum time for the answer to a probe, in seconds
HEALTH_S = 3.0
Metrics = Annotated[
    str,
    typer.Option(help="host:port of /metrics for Prometheus; with several workers, the first of consecutive ports."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v")]
StopWithParent = Annotated[
    bool, typer.Option("--stop-with-parent", help="Exit when standard input closes.", hidden=True)
]


@app.command()
def controller(
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 picks a free port.")] = LISTEN,
    ledger: Annotated[
        str | None,
        typer.Option(
            envvar="STATEFLOW_LEDGER",
            help="SQLAlchemy URL of the ledger, or @FILE that holds it; default: a file of this user.",
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="host:port at which others reach the controller; default: --listen.")
    ] = None,
    auto_rebalance: Annotated[
        bool,
        typer.Option(
            "--auto-rebalance/--no-auto-rebalance",
            help="When a replica joins, move its share of the partitions to it automatically.",
        ),
    ] = False,
    site: Annotated[str, typer.Option(help="Site of this controller, to which jobs can be constrained.")] = "",
    metrics: Metrics = "",
    dashboard: Annotated[
        str, typer.Option(help="host:port of the live page, on loopback; see `stateflow dashboard`.")
    ] = "",
    jobs: Annotated[
        bool, typer.Option("--jobs/--no-jobs", help="With --no-jobs, jobs wait for another controller.")
    ] = True,
    insecure: Insecure = False,
    as_json: Json = False,
    verbose: Verbose = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Run a controller, which assigns partitions to replicas, directs moves, and records both in the ledger.

    If several controllers share a ledger, one leads; the others wait until the leader ends.
    """
    from reconfig.controller.server import serve  # half of all imports, and no other command needs it
    from stateflow.ledger import Ledger

    check_outside("a controller")
    url = url_of(ledger) if ledger else ""
    if url:
        ledger_commands.check_outlasts(url)
    if stop_with_parent:
        keep_stdout()
    raise_limit()
    log_to_stderr(verbose, "controller")
    check_variables()
    os.umask(UMASK)
    url = url or default_ledger(make=True)
    ledger_commands.keep_file_private(url)

    async def run() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = stop_on_signal(stop_with_parent, STOP_S)

        def say(done: asyncio.Future[str]) -> None:
            if not done.cancelled():
                say_ready(Listening(done.result()), "controller", as_json)

        ready.add_done_callback(say)
        opened = Ledger(url)
        did = ledger_commands.told(opened)
        if did is not None:
            logging.getLogger(__name__).info("%s at %s", did, opened.database.shown)
        settings = ControllerSettings()
        given: dict[str, Any] = {"auto_rebalance": auto_rebalance, "site": site}
        given |= {} if jobs else {"labels": {**settings.labels, "jobs": "no"}}
        settings = settings.model_copy(update=given)
        with _page_of(dashboard, url, ready, as_json) if dashboard else contextlib.nullcontext():
            await serve(opened, listen, settings, advertise=advertise or None, metrics=metrics, ready=ready, stop=stop)

    asyncio.run(run())


@contextlib.contextmanager
def _page_of(listen: str, ledger: str, ready: asyncio.Future[str], as_json: bool) -> Iterator[None]:
    """Serves the live page in a thread while the block runs, from the time at which the controller can be reached.

    Raises the errors of Dashboard.
    """
    from stateflow.dashboard import Dashboard, DashboardOptions
    from stateflow.security.plain import tls_files

    if tls_files() is not None:
        raise InvalidArgument(
            "the live page is a client, for which a controller's certificate is not valid",
            remedy="leave out --dashboard, and run `stateflow dashboard` with its own certificate or token",
        )
    page = Dashboard(DashboardOptions("", listen, ledger=ledger))

    def begin(address: str) -> None:
        try:
            page.start(address)
        except StateflowError as error:
            log.error("the live page cannot start: %s", error)
        else:
            if not as_json:  # the address is also logged
                console.print(Text.assemble("the dashboard is at ", (page.url, "bold")))

    def start(done: asyncio.Future[str]) -> None:
        """Starts the page in a thread, because starting it would block the controller's event loop."""
        if not done.cancelled():
            threading.Thread(target=begin, args=(done.result(),), name="dashboard begins", daemon=True).start()

    ready.add_done_callback(start)
    try:
        yield
    finally:
        page.close()


@app.command()
def replica(
    site: Annotated[str, typer.Option(help="Site of this replica.")],
    data_dir: Annotated[Path, typer.Option(help="Directory for the replica's state. No two replicas share one.")],
    controller: Controller = LOCAL,
    name: Annotated[
        str | None, typer.Option(help="Name of the replica, kept across restarts; default: <site>-<host name>.")
    ] = None,
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 picks a free port.")] = "127.0.0.1:0",
    advertise: Annotated[
        str | None, typer.Option(help="host:port at which others reach the replica; default: --listen.")
    ] = None,
    weight: Annotated[int, typer.Option(help="Relative share of partitions, per worker.", min=1, max=WEIGHT_MAX)] = 1,
    workers: Annotated[
        int,
        typer.Option(help="Worker processes; each uses one core, for some of the partitions.", min=1, max=WORKERS_MAX),
    ] = 1,
    worker: Annotated[int | None, typer.Option(hidden=True, help="Number of this worker within its node.")] = None,
    lock: Annotated[
        int | None, typer.Option(hidden=True, help="Inherited lock file descriptor, kept open until exit.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            envvar="STATEFLOW_CHECKPOINTS", help="Checkpoint store: directory or fsspec URL, or @FILE that holds it."
        ),
    ] = None,
    checkpoint_interval: Annotated[
        float | None, typer.Option(help="Seconds between periodic checkpoints; 0: none.", min=0)
    ] = None,
    checkpoint_cache: Annotated[
        Path | None, typer.Option(help="Directory of a local checkpoint cache, shared by this machine's replicas.")
    ] = None,
    metrics: Metrics = "",
    insecure: Insecure = False,
    as_json: Json = False,
    verbose: Verbose = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Run a replica: an operator process at a site."""
    check_outside("a replica")
    if stop_with_parent:
        keep_stdout()
    if lock is not None:
        os.set_inheritable(lock, False)  # a process that an operator starts may live longer
    raise_limit()
    os.umask(UMASK)
    settings = ReplicaSettings()
    if checkpoint_interval is not None:
        settings = settings.model_copy(update={"checkpoint_interval_s": checkpoint_interval})
    named = check_name("replica", name or f"{site}-{socket.gethostname()}")
    log_to_stderr(verbose, worker_name(named, worker or 0), one_of_several=worker is not None)
    if worker is None:
        check_variables()
    check_name("site", site)
    claimed = claim_node(data_dir) if worker is None else None  # held until this process ends
    if claimed is not None and (workers > 1 or left_behind(data_dir, 1)):
        given = _given(site, controller, named, weight, checkpoints, checkpoint_interval, checkpoint_cache, verbose)
        asyncio.run(
            _run_workers(
                named,
                data_dir,
                controller,
                workers,
                listen,
                advertise or None,
                given,
                metrics,
                settings,
                as_json,
                stop_with_parent,
            )
        )
        return
    number = worker or 0
    # a surplus worker receives no more partitions
    info = ReplicaInfo(worker_name(named, number), site, "", weight if number < workers else 0)
    os.environ[INSIDE] = f"the replica {info.name}"
    data_dir = directory_of(data_dir, number)

    async def run() -> None:
        store = checkpoint.store_for_replica(url_of(checkpoints), settings, checkpoint_cache) if checkpoints else None
        node = ReplicaNode(info, data_dir, settings, lease=Lease.none(), recover=False)
        if store is not None:
            node.remember(store)
            checkpoint.try_out(store)
        ready: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        stop = stop_on_signal(stop_with_parent, settings.stop_timeout_s)

        def say(done: asyncio.Future[Listening]) -> None:
            if not done.cancelled():
                say_ready(done.result(), f"replica {info.name} at {site}", as_json)

        ready.add_done_callback(say)
        await server.serve(
            node,
            listen,
            controller,
            random=Random(),
            advertise=advertise or None,
            checkpoints=store,
            metrics=metrics,
            ready=ready,
            stop=stop,
        )
        stop.say_over()
        if node.batches.running.is_stuck:
            _end_now(0)

    asyncio.run(run())


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="host:port of a controller, replica or agent.")],
    service: Annotated[str, typer.Option(help="live: the process answers; ready: it accepts work.")] = "ready",
    as_json: Json = False,
) -> None:
    """Ask a process whether it is live or ready, as a probe does. Exits with status 0 for yes, and with 1 for no."""
    well = ask_health(address, service, HEALTH_S)
    if as_json:
        emit({"address": address, "service": service, "serving": well})
    else:
        console.print(f"{address} is {'' if well else 'not '}{service}")
    if not well:
        raise typer.Exit(1)


def _given(
    site: str,
    controller: str,
    name: str,
    weight: int,
    checkpoints: str | None,
    checkpoint_interval: float | None,
    checkpoint_cache: Path | None,
    verbose: bool,
) -> list[str]:
    """Returns the arguments that all workers of a node share.

    The URL of the checkpoint store may contain a secret, so it is passed on as an environment variable, which this
    function sets.
    """
    given = ["replica", "--site", site, "--controller", controller, "--name", name, "--weight", str(weight)]
    if checkpoints is not None:
        os.environ["STATEFLOW_CHECKPOINTS"] = checkpoints
    if checkpoint_interval is not None:
        given += ["--checkpoint-interval", str(checkpoint_interval)]
    if checkpoint_cache is not None:
        given += ["--checkpoint-cache", str(checkpoint_cache)]
    return given + ["--verbose"] * verbose


async def _run_workers(
    name: str,
    data_dir: Path,
    controller: str,
    count: int,
    listen: str,
    advertise: str | None,
    given: list[str],
    metrics: str,
    settings: ReplicaSettings,
    as_json: bool,
    stop_with_parent: bool,
) -> None:
    def arguments(number: int, listens: str, advertises: str | None, figures: str) -> list[str]:
        place = ["--data-dir", str(data_dir), "--workers", str(count), "--worker", str(number), "--listen", listens]
        # given even if empty, because the environment or the file may have other values
        return [*given, *place, "--advertise", advertises or "", "--metrics", figures]

    def ready(listening: Listening) -> None:
        say_ready(listening, f"node {name} of {count} worker{'s' if count > 1 else ''}", as_json)

    def failing(said: NotReady) -> None:
        say_failing(said, name, as_json)

    stop = stop_on_signal(stop_with_parent, settings.stop_timeout_s + 10)
    node = Node(name, data_dir, controller, listen, advertise, metrics, arguments, settings.stop_timeout_s)
    await Workers(node, count).run(stop, ready, failing)


class _Stop(asyncio.Event):
    """An event that stops the process. Once it is set, the process ends within ``limit_s`` seconds.

    The process may end while threads are busy, because everything that was acknowledged is on disk.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._set_at = 0.0

    def set(self) -> None:
        if not self.is_set():
            self._set_at = SYSTEM_CLOCK.monotonic()
            last = threading.Timer(self._limit_s, _end_as_it_is, (self._limit_s,))
            last.daemon = True
            last.start()
        super().set()

    def say_over(self) -> None:
        """Logs how long the shutdown took, so that users can choose the limit. Logs nothing if the event is not set."""
        if self.is_set():
            took_s = SYSTEM_CLOCK.monotonic() - self._set_at
            log.info("shutdown took %.1f s of at most %g s", took_s, self._limit_s)


def stop_on_signal(with_parent: bool, limit_s: float) -> _Stop:
    """Returns an event that SIGINT and SIGTERM set.

    Args:
        with_parent: True: the end of standard input sets the event, too, because it means that the parent has died.
    """
    stop = _Stop(limit_s)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _parent_ended, stop)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _parent_ended(stop: _Stop) -> None:
    """Stops this process, because its parent has ended.

    The parent no longer reads this process's output, and a full pipe would block each thread that writes to it. So this
    function empties the pipe, which releases blocked threads, and discards later output.
    """
    if not stop.is_set() and stat.S_ISFIFO(os.fstat(2).st_mode):
        with contextlib.suppress(OSError):  # without /proc, blocked threads stay blocked
            threading.Thread(target=_read_on, args=(os.open("/proc/self/fd/2", os.O_RDONLY),), daemon=True).start()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for each in (1, 2):
            os.dup2(nowhere, each)
        os.close(nowhere)
    stop.set()


def _read_on(pipe: int) -> None:
    while os.read(pipe, 1 << 16):
        pass


def _end_as_it_is(limit_s: float) -> None:
    _end_now(1, f"shutdown exceeded {limit_s:g} s, exiting at once; nothing that was acknowledged is lost")


def _end_now(status: int, why: str = "") -> None:
    """Ends the process at once, after logging ``why``.

    Threads that do not return, such as one that writes to a pipe without a reader, are not waited for.
    """

    def say() -> None:
        if why:
            log.error("%s", why)
        logging.shutdown()

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(SAY_S)
    os._exit(status)


def say_ready(listening: Listening, what: str, as_json: bool) -> None:
    address = listening.address
    try:
        if as_json:
            emit({"address": address} | ({"metrics": listening.metrics} if listening.metrics else {}))
        else:
            console.print(Text.assemble(f"{what} listens on ", (address, "bold"), " (Ctrl-C ends it)"))
    except OSError as error:
        log.warning("%s listens on %s, but cannot write that to stdout: %s", what, address, error.strerror)


def say_failing(said: NotReady, name: str, as_json: bool) -> None:
    """Says to the process that started this one why the node is not ready. The log says it, too."""
    if as_json:
        try:
            emit({"failing": said.fault.to_wire(), "deaths": said.deaths})
        except OSError as error:
            log.warning("node %s is not ready, but cannot write that to stdout: %s", name, error.strerror)


@app.command()
def dashboard(
    controller: Controller = LOCAL,
    listen: Annotated[str, typer.Option(help="host:port of the page; port 0 picks a free port.")] = "127.0.0.1:7071",
    ledger: Annotated[
        str,
        typer.Option(
            envvar="STATEFLOW_LEDGER",
            help="SQLAlchemy URL of the ledger, or @FILE that holds it, to show batches and search records.",
        ),
    ] = "",
    checkpoints: Annotated[
        str,
        typer.Option(
            envvar="STATEFLOW_CHECKPOINTS",
            help="Checkpoint store to show: directory or fsspec URL, or @FILE that holds it.",
        ),
    ] = "",
    cert: Annotated[
        Path | None, typer.Option(envvar="STATEFLOW_DASHBOARD_CERT", help="Certificate that browsers accept, PEM.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(envvar="STATEFLOW_DASHBOARD_KEY", help="Private key of --cert, PEM.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Name by which browsers reach the page, if not in --cert; repeatable.")
    ] = None,
    insecure: Insecure = False,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Serve the live page of a cluster: sites, replicas, and partitions that move between them."""
    # imports SQLAlchemy and a web server, which no other command needs
    from stateflow.dashboard import Dashboard, DashboardOptions

    log_to_stderr(verbose, "dashboard")
    check_variables()
    options = DashboardOptions(
        controller,
        listen,
        cert,
        key,
        tuple(host or ()),
        url_of(ledger) if ledger else None,
        url_of(checkpoints) if checkpoints else None,
    )

    async def run(page: Dashboard) -> None:
        stop = stop_on_signal(False, STOP_S)
        if as_json:
            emit({"url": page.url})
        else:
            console.print(Text.assemble("the dashboard is at ", (page.url, "bold"), " (Ctrl-C ends it)"))
        await stop.wait()

    with Dashboard(options) as page:
        asyncio.run(run(page))
