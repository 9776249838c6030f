"""Commands. Each is a thin shell around the library: parse, call, show."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the system, here where everything is put together
from typing import Annotated

import typer
from rich.text import Text

from stateflow import __version__
from stateflow.cli import batch as batch_commands
from stateflow.cli import checkpoint, leaving, moving, show, source, spark, state
from stateflow.cli import ledger as ledger_commands
from stateflow.cli import run as run_command
from stateflow.cli import stages as stages_commands
from stateflow.cli.group import Commands
from stateflow.cli.options import (
    LOCAL,
    Controller,
    Json,
    MaxBandwidth,
    MaxPause,
    Order,
    Patience,
    Strategy,
    default_ledger,
    milliseconds,
    move_options,
    partition_numbers,
)
from stateflow.cli.output import command, console, emit, log_to_stderr, telling
from stateflow.client import Cluster
from stateflow.errors import InvalidArgument
from stateflow.private import UMASK, url_of
from stateflow.replica import server
from stateflow.runtime.code import INSIDE, check_outside
from stateflow.runtime.lease import Lease
from stateflow.runtime.operator import DEFAULT_PARTITIONS, load
from stateflow.runtime.replica import ReplicaNode
from stateflow.settings import ControllerSettings, ReplicaSettings
from stateflow.storage.files import raise_limit
from stateflow.types import ReplicaInfo, check_name

log = logging.getLogger(__name__)
#: a controller ends so long after SIGTERM at most
STOP_S = 10.0
app = Commands(help="Stateful stream operators whose state can move while the pipeline runs.")
app.add_typer(ledger_commands.ledger, name="ledger")
app.add_typer(stages_commands.stages, name="stages")
app.add_typer(batch_commands.batch, name="batch")
app.command("run")(run_command.run)
Verbose = Annotated[bool, typer.Option("--verbose", "-v")]
StopWithParent = Annotated[
    bool, typer.Option("--stop-with-parent", help="End when standard input closes.", hidden=True)
]


app.add_typer(checkpoint.checkpoints, name="checkpoint")
app.add_typer(checkpoint.savepoints, name="savepoint")
app.add_typer(state.app, name="state")
app.add_typer(source.app, name="source")
app.add_typer(spark.app, name="spark")
moving.add_to(app)
leaving.add_to(app)


def _say_version(wanted: bool) -> None:
    if wanted:
        console.print(f"stateflow {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Stateful stream operators whose state can move while the pipeline runs."""


def main() -> None:
    try:
        with telling():
            app()
    except typer.Exit as ended:  # what failed was telling of it
        sys.exit(ended.exit_code)


# -- processes ------------------------------------------------------------------------------------------------


@app.command()
@command
def controller(
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = LOCAL,
    ledger: Annotated[
        str | None,
        typer.Option(
            envvar="STATEFLOW_LEDGER", help="SQLAlchemy URL, or @FILE that holds it; default: a file of this user's."
        ),
    ] = None,
    advertise: Annotated[str | None, typer.Option(help="host:port others reach it at, if not --listen.")] = None,
    auto_rebalance: Annotated[
        bool, typer.Option("--auto-rebalance", help="A replica that joins is given its share by itself.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Run the controller: members, assignment, reconfigurations, ledger.

    Of several with one ledger one leads; the others wait for it to end.
    """
    from reconfig.controller.service import serve  # half of what a command would import, and no other needs it
    from stateflow.ledger import Ledger

    check_outside("a controller")
    raise_limit()
    log_to_stderr(verbose)
    os.umask(UMASK)
    url = url_of(ledger) if ledger else default_ledger(make=True)
    ledger_commands.keep_file_private(url)

    async def run() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = _stop_on_signal(stop_with_parent, STOP_S)
        ready.add_done_callback(lambda done: _say_ready(done, "controller", as_json))
        opened = Ledger(url)
        did = ledger_commands.told(opened)
        if did is not None:
            logging.getLogger(__name__).info("%s at %s", did, opened.database.shown)
        settings = ControllerSettings(auto_rebalance=True) if auto_rebalance else ControllerSettings()
        await serve(opened, listen, settings, advertise=advertise, ready=ready, stop=stop)

    asyncio.run(run())


@app.command()
@command
def replica(
    site: Annotated[str, typer.Option(help="The place this replica is at.")],
    data_dir: Annotated[Path, typer.Option(help="Its state; one replica, one directory.")],
    controller: Controller = LOCAL,
    name: Annotated[str | None, typer.Option(help="Default: <site>-<host name>. Keep it over restarts.")] = None,
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:0",
    advertise: Annotated[str | None, typer.Option(help="host:port others reach it at, if not --listen.")] = None,
    weight: Annotated[int, typer.Option(help="Its share of partitions relative to others.", min=1)] = 1,
    checkpoints: Annotated[
        str | None,
        typer.Option(envvar="STATEFLOW_CHECKPOINTS", help="Directory or fsspec URL for checkpoints, or @FILE with it."),
    ] = None,
    checkpoint_interval: Annotated[
        float | None, typer.Option(help="Seconds between periodic checkpoints; 0 for none.", min=0)
    ] = None,
    checkpoint_cache: Annotated[
        Path | None, typer.Option(help="Directory for a copy near by, shared by this machine's replicas.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Run a replica: an operator process at a site."""
    check_outside("a replica")
    raise_limit()
    log_to_stderr(verbose)
    os.umask(UMASK)
    settings = ReplicaSettings()
    if checkpoint_interval is not None:
        settings = settings.model_copy(update={"checkpoint_interval_s": checkpoint_interval})
    info = ReplicaInfo(
        check_name("replica", name or f"{site}-{socket.gethostname()}"), check_name("site", site), "", weight
    )
    os.environ[INSIDE] = f"the replica {info.name}"

    async def run() -> None:
        store = checkpoint.store_for_replica(url_of(checkpoints), settings, checkpoint_cache) if checkpoints else None
        node = ReplicaNode(info, data_dir, settings, lease=Lease.none(), recover=False)
        if store is not None:
            node.remember(store)
            checkpoint.try_out(store)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stop = _stop_on_signal(stop_with_parent, settings.stop_timeout_s)
        ready.add_done_callback(lambda done: _say_ready(done, f"replica {info.name} at {site}", as_json))
        await server.serve(
            node, listen, controller, random=Random(), advertise=advertise, checkpoints=store, ready=ready, stop=stop
        )
        if node.is_stuck:
            _end_now(0)

    asyncio.run(run())


class _Stop(asyncio.Event):
    """Once it is set, by whomever, the process ends ``limit_s`` later at most: what was acknowledged is on disk, and
    nothing else is worth waiting for."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self._limit_s = limit_s

    def set(self) -> None:
        if not self.is_set():
            last = threading.Timer(self._limit_s, _end_as_it_is, (self._limit_s,))
            last.daemon = True
            last.start()
        super().set()


def _stop_on_signal(with_parent: bool, limit_s: float) -> asyncio.Event:
    """Set on SIGINT and SIGTERM; ``with_parent`` also when standard input closes, as it does when a parent dies."""
    stop = _Stop(limit_s)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _end_as_it_is(limit_s: float) -> None:
    log.error("it did not stop within %g s and ends as it is; nothing that was acknowledged is lost", limit_s)
    _end_now(1)


def _end_now(status: int) -> None:
    """Without waiting for threads that do not come back."""
    logging.shutdown()
    os._exit(status)


def _say_ready(done: asyncio.Future[str], what: str, as_json: bool) -> None:
    if done.cancelled():
        return
    try:
        if as_json:
            emit({"address": done.result()})
        else:
            console.print(Text.assemble(f"{what} listens on ", (done.result(), "bold"), " (Ctrl-C ends it)"))
    except OSError as error:
        log.warning("%s listens on %s; stdout does not take it: %s", what, done.result(), error.strerror)


# -- control --------------------------------------------------------------------------------------------------


@app.command()
@command
def deploy(
    target: Annotated[str, typer.Argument(help="package.module:Class or file.py:Class")],
    partitions: Annotated[int, typer.Option(help="Slices of the key space; fixed for ever.")] = DEFAULT_PARTITIONS,
    name: Annotated[str | None, typer.Option(help="Default: the class's name.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="Only on replicas of this site; repeatable.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Deploy an operator: create its partitions on the replicas."""
    cluster = Cluster(controller)
    operator = load(_absolute(target))
    cluster.deploy(operator, partitions, sites=site or (), name=name)
    status = next(o for o in cluster.status().operators if o.name == (name or operator.__name__))
    if as_json:
        emit({"operator": status.name, "partitions": status.partitions, "owners": list(status.owners)})
    else:
        show.deployed(status)


def _absolute(target: str) -> str:
    file, _, qualname = target.rpartition(":")
    return f"{Path(file).resolve()}:{qualname}" if file.endswith(".py") else target


@app.command()
@command
def status(
    controller: Controller = LOCAL,
    watch: Annotated[bool, typer.Option("--watch", help="Live, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """What runs where."""
    cluster = Cluster(controller)
    if as_json:
        emit(cluster.status().to_dict())
    elif watch:
        show.watch_status(cluster.status)
    else:
        console.print(show.status(cluster.status()))


@app.command()
@command
def migrate(
    operator: Annotated[str, typer.Argument()],
    partition: Annotated[list[str], typer.Argument(help="Partitions: 3, 5-9, or all.")],
    to: Annotated[str, typer.Option("--to", help="A site or a replica.")],
    max_pause: MaxPause = None,
    max_bandwidth: MaxBandwidth = None,
    strategy: Strategy = "auto",
    order: Order = "number",
    patience: Patience = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Move partitions to another site or replica while the pipeline runs."""
    cluster = Cluster(controller)
    numbers = partition_numbers(partition, cluster.operator(operator).partitions)
    options = move_options(max_pause, max_bandwidth, strategy, order, patience)
    move = cluster.migrate(operator, numbers, to, **options)
    report = move.wait() if as_json else show.migration(move)
    if as_json:
        emit(report.to_dict())
    if report.state != "COMPLETED":
        raise typer.Exit(1)


@app.command()
@command
def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo-out"),
    rows: Annotated[int | None, typer.Option(help="Replay only the first so many flights.", min=1000)] = None,
    max_pause: Annotated[str, typer.Option(help="Budget of every move: raise it on a busy machine.")] = "250ms",
    source: Annotated[str, typer.Option(help="files or jetstream.")] = "files",
    nats: Annotated[
        str, typer.Option(envvar="STATEFLOW_NATS_URL", help="The server of --source jetstream.")
    ] = "nats://127.0.0.1:4222",
    as_json: Json = False,
) -> None:
    """The whole story on this machine: real flights, five processes, moves while it streams, a crash, and the proof."""
    from stateflow.demo.extras import check_extras

    check_extras()
    from stateflow.demo.run import DemoOptions, run_demo

    if source not in ("files", "jetstream"):
        raise InvalidArgument(f"the flights cannot come from {source!r}", remedy="use --source files or jetstream")
    nats_url = nats if source == "jetstream" else None
    options = DemoOptions(out=out, rows=rows, max_pause_ms=milliseconds(max_pause), nats_url=nats_url)
    result = run_demo(options, tell_stderr=as_json)
    if as_json:
        emit(result.summary())
    if not result.held:
        raise typer.Exit(1)
