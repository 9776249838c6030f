"""Runs the drive: convoys drive between three edge sites, and an autopilot moves their state to the sites they reach.

The convoys' telemetry arrives through Spark, and their readings arrive through gateways. No code here requests a move,
and every figure shown was measured. TCP proxies on this machine represent the distance between sites: they delay data
by half a round trip in each direction.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random  # noqa: TID251 - seeded here
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from stateflow.client import Cluster, MoveReport, Reconfiguration, StreamClient
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.demo.follow.fleet import COLUMNS, SITES, Fleet, Told
from stateflow.demo.follow.report import milliseconds, write_report
from stateflow.demo.follow.result import (
    CLOUD,
    FACTS,
    OUTPUTS,
    FollowResult,
    Sample,
    compare,
    expected_outputs,
    expected_state,
    site_of,
    state_facts,
)
from stateflow.demo.operators import Trips
from stateflow.demo.surroundings import ProgressPrinter, console_of, fresh, live_page, move_row, versions
from stateflow.errors import StateflowError, Unavailable
from stateflow.operator.arrow import parse_ddl
from stateflow.spark import apply_operator, local_session
from stateflow.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

PIECE_BYTES = 64 << 10
#: maximum number of delayed pieces in each direction of a connection; reading waits beyond that
PIECES_MAX = 1024


class Links:
    """A context manager that runs a proxy for each of ``upstreams`` (``host:port``).

    Only the data of a connection is delayed, not its opening.

    Attributes:
        addresses: upstream → address of its proxy.
    """

    def __init__(self, upstreams: Iterable[str], rtt_s: float) -> None:
        self._upstreams, self._delay_s = list(upstreams), rtt_s / 2
        self.addresses: dict[str, str] = {}
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="links", daemon=True)

    def __enter__(self) -> Links:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        servers, connections = [], set[asyncio.Task[None]]()
        for upstream in self._upstreams:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: str = upstream) -> None:
                connection = asyncio.create_task(self._connect(upstream, reader, writer))
                connections.add(connection)
                connection.add_done_callback(connections.discard)

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            self.addresses[upstream] = f"{host}:{port}"
            servers.append(server)
        self._listening.set()
        await self._over.wait()
        for server in servers:
            server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connect(self, upstream: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = upstream.rpartition(":")
        with suppress(OSError), closing(writer):
            there, back = await asyncio.open_connection(host, int(port))
            with closing(back):
                await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forwards data in one direction of a connection, with the delay, until the source ends."""
        clock = asyncio.get_running_loop().time
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)

        async def receive() -> None:
            while True:
                try:
                    data = await source.read(PIECE_BYTES)
                except OSError:
                    data = b""
                await under_way.put((clock() + self._delay_s, data))
                if not data:
                    return

        receiving = asyncio.create_task(receive())
        try:
            with suppress(OSError):
                while True:
                    due, data = await under_way.get()
                    await asyncio.sleep(max(0.0, due - clock()))
                    if not data:
                        sink.write_eof()
                        return
                    sink.write(data)
                    await sink.drain()
        finally:
            receiving.cancel()


# -- Threads that write telemetry and send readings during the drive -------------------------------------------------

SCHEMA: pa.Schema = parse_ddl(COLUMNS)


class Sends(Protocol):
    def send(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]: ...


class Beside:
    """A context manager for threads that run beside the caller.

    When the block is left, ``over`` is set, which the threads must obey, and the threads are joined.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - go_on raises it
            self._errors.append(error)

    def go_on(self) -> bool:
        """Tells whether any thread still runs. Raises the first error of a thread."""
        if self._errors:
            raise self._errors[0]
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()


def in_time(told: Iterable[Told], began: float, over: threading.Event, clock: Clock) -> Iterator[Told]:
    """Yields each item at its time, or at once if its time has passed. Ends early when ``over`` is set.

    Args:
        began: start of the drive, in seconds of ``clock.monotonic``.
    """
    for each in told:
        if over.wait(max(0.0, began + each.at_s - clock.monotonic())):
            return
        yield each


def write_telemetry(directory: Path, number: int, told: Told) -> None:
    """Writes rows to a file of their own, atomically: readers see the complete file or none."""
    hidden = directory / f".{number:06}.parquet"
    pq.write_table(pa.Table.from_pylist(told.rows, schema=SCHEMA), hidden)
    hidden.rename(directory / f"{number:06}.parquet")


class Gateways:
    """The gateways, which send readings.

    Args:
        streams: (site, convoy) → client through which the site's gateway sends the convoy's readings.

    Attributes:
        samples: measured time of each batch, from sending it to receiving its outputs.
        outputs: outputs that all gateways have received.
    """

    def __init__(self, streams: Mapping[tuple[str, int], Sends], clock: Clock) -> None:
        self._streams, self._clock = streams, clock
        self.samples: list[Sample] = []
        self.outputs: list[dict[str, Any]] = []

    def serve(self, convoy: int, readings: Iterable[Told], began: float, over: threading.Event) -> None:
        """Sends the readings of one convoy one after another, each at its time through the gateway of its site."""
        for told in in_time(readings, began, over, self._clock):
            sent_at = self._clock.monotonic()
            outputs = self._streams[told.site, convoy].send(told.rows)
            took_ms = (self._clock.monotonic() - sent_at) * 1e3
            self.samples.append(Sample(sent_at - began, took_ms, convoy, told.site, len(told.rows)))
            self.outputs += outputs


# -- The drive -------------------------------------------------------------------------------------------------------

OPERATOR = Trips.__name__
CONVOYS = 6
VEHICLES = 20
SEED = 7
TRIGGER = "500 milliseconds"
#: seconds between two requests to the controller for reports about moves
LOOK_S = 1.0
#: cool-down as a share of the drive: a move should be over before the next change of site
COOL_DOWN = 1 / 8
MOVES_PER_MINUTE = 600.0
#: seconds to wait for moves under way when the convoys have arrived
SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """Options of a drive.

    Attributes:
        rtt_ms: round trip between sites.
        max_pause_ms: budget of every move.
        before_compare: called with the cluster when all rows have arrived; tests use it to spoil the result.
    """

    out: Path = Path("demo-out")
    seconds: float = 60.0
    rtt_ms: float = 40.0
    max_pause_ms: float = 50.0
    before_compare: Callable[[Cluster], None] | None = None


def run_follow(options: FollowOptions, tell_stderr: bool = False) -> FollowResult:
    """Runs the drive, and returns its result.

    Raises JavaMissing, ExtraMissing, DataDirLocked, or the error of the cluster or of Spark.

    Args:
        tell_stderr: print progress on stderr instead of stdout.
    """
    console = console_of(tell_stderr)
    work = fresh(options.out)
    telling = ProgressPrinter(console)
    console.print(Text.assemble(("stateflow demo --follow", "bold"), ": vehicles drive, and their state follows them"))
    fleet = Fleet(Random(SEED), CONVOYS, VEHICLES, options.seconds)
    local = LocalCluster(
        Trips,
        sites={CLOUD: 1, **dict.fromkeys(SITES, 1)},
        partitions=CONVOYS,
        data_dir=work / "cluster",
        deploy_to=(CLOUD,),
    )
    with ExitStack() as running:
        with telling.of("starting the processes"):
            running.enter_context(local)
        running.enter_context(live_page(local, console))
        with telling.of("starting Spark"):
            spark = local_session("stateflow demo --follow")
            query = _start(spark, local, work)
            running.callback(query.stop)
            write_telemetry(work / "telemetry", 0, fleet.telemetry[0])
            query.processAllAvailable()  # the first batch takes seconds
        drive = _Drive(options, local, fleet, console, telling)
        with telling.of("opening the gateways"):
            gateways = running.enter_context(_gateways(local, options.rtt_ms / 1e3))
        console.print(
            f"  {CONVOYS} convoys of {VEHICLES} vehicles, between {', '.join(SITES)}; their state is in the cloud. "
            f"Round trip to another site: {options.rtt_ms:g} ms"
        )
        drive.drive(gateways, work / "telemetry", query)
        with telling.of("processing the last rows"):
            query.processAllAvailable()
            query.stop()
        if options.before_compare is not None:
            options.before_compare(local.cluster)
        with telling.of("recomputing with pandas, and comparing every row"):
            result = drive.result(gateways, _read_state(local.cluster), _read_output(spark, work))
    with telling.of("drawing the report"):
        html, png = write_report(result, options.out)
    shutil.rmtree(work, ignore_errors=True)
    _conclude(console, result, html, png)
    return result


def _start(spark: SparkSession, local: LocalCluster, work: Path) -> StreamingQuery:
    (work / "telemetry").mkdir()
    telemetry = spark.readStream.schema(COLUMNS).parquet(str(work / "telemetry"))
    trips = apply_operator(telemetry, Trips, cluster=local, order_by="seq", site="site", tasks=1)
    return (
        trips.writeStream.format("parquet")
        .option("checkpointLocation", str(work / "spark-checkpoint"))
        .trigger(processingTime=TRIGGER)
        .start(str(work / "output"))
    )


@contextmanager
def _gateways(local: LocalCluster, rtt_s: float) -> Iterator[Gateways]:
    """Opens a gateway at each site, with a stream for each convoy.

    A gateway connects directly to the replica of its own site, and through a proxy to all other replicas.
    """
    replicas = {name: process.address for name, process in local.processes.items() if name not in local.controllers}
    with Links(replicas.values(), rtt_s) as links, ExitStack() as streams:
        found: dict[tuple[str, int], StreamClient] = {}
        for site in SITES:
            away = {address: links.addresses[address] for name, address in replicas.items() if site_of(name) != site}
            for convoy in range(CONVOYS):
                found[site, convoy] = streams.enter_context(
                    local.stream(OPERATOR, f"{site}-{convoy}", schema=COLUMNS, site=site, addresses=away)
                )
        yield Gateways(found, SYSTEM_CLOCK)


class _Drive:
    """Sends the convoys' rows, watches the moves of the autopilot, and keeps the ended moves."""

    def __init__(
        self, options: FollowOptions, local: LocalCluster, fleet: Fleet, console: Console, telling: ProgressPrinter
    ) -> None:
        self._options, self._cluster, self._fleet = options, local.cluster, fleet
        self._console, self._telling = console, telling
        self._began_us = 0
        self._moves: dict[str, MoveReport] = {}  # moves that have ended

    def drive(self, gateways: Gateways, telemetry: Path, query: StreamingQuery) -> None:
        options, fleet, cluster = self._options, self._fleet, self._cluster
        self._began_us, began = SYSTEM_CLOCK.now_us(), SYSTEM_CLOCK.monotonic()
        cluster.autopilot(
            "locality",
            max_pause_ms=options.max_pause_ms,
            cool_down_s=options.seconds * COOL_DOWN,
            moves_per_minute=MOVES_PER_MINUTE,
        )
        with Beside() as beside, self._telling.of("driving"):
            beside.start(lambda: self._write(telemetry, began, beside.over))
            for convoy, readings in zip(fleet.convoys, fleet.readings, strict=True):
                beside.start(_serving(gateways, convoy.number, readings, began, beside.over))
            while beside.go_on():
                self._look()
                at_s = SYSTEM_CLOCK.monotonic() - began
                self._telling.say(f"driving, {min(at_s, options.seconds):.0f} of {options.seconds:.0f} s")
                if query.awaitTermination(LOOK_S):  # raises the error with which it failed
                    raise Unavailable("the Spark query ended unexpectedly", remedy="see Spark's messages above")
        with self._telling.of("the convoys have arrived: waiting for running moves"):
            cluster.autopilot()
            until = SYSTEM_CLOCK.monotonic() + SETTLE_S
            while self._look() and SYSTEM_CLOCK.monotonic() < until:
                sleep(LOOK_S / 4)

    def _write(self, directory: Path, began: float, over: threading.Event) -> None:
        later = self._fleet.telemetry[1:]  # the first is written already
        for number, told in enumerate(in_time(later, began, over, SYSTEM_CLOCK), start=1):
            write_telemetry(directory, number, told)

    def _look(self) -> bool:
        """Prints the moves that have ended since the last call. Returns whether a reconfiguration is still running."""
        try:
            found = [each for each in self._cluster.reconfigurations() if each.kind == "autopilot"]
        except StateflowError:  # the next look asks again
            return True
        for each in found:
            for move in each.moves:
                if move.id not in self._moves and _has_ended(each, move):
                    self._moves[move.id] = move
                    self._tell(move)
        return any(each.state == "RUNNING" for each in found)

    def _tell(self, move: MoveReport) -> None:
        row = move_row(move, self._began_us)
        said = f"  {row.pause_at_s:5.1f} s  convoy {row.partition}: {site_of(row.source)} → {site_of(row.target)}"
        if row.completed:
            self._console.print(f"{said}, pause {row.pause_ms:.1f} ms", highlight=False)
        else:
            self._console.print(Text(f"{said} not moved: {row.error}", "yellow"))

    def result(self, gateways: Gateways, state: pd.DataFrame, output: pd.DataFrame) -> FollowResult:
        options, fleet = self._options, self._fleet
        telemetry = [row for told in fleet.telemetry for row in told.rows]
        wanted = expected_outputs(fleet.rows)
        by_spark = wanted["seq"].isin({row["seq"] for row in telemetry})
        answers = pd.DataFrame(gateways.outputs, columns=OUTPUTS)
        return FollowResult(
            seconds=options.seconds,
            rtt_ms=options.rtt_ms,
            budget_ms=options.max_pause_ms,
            convoys=CONVOYS,
            vehicles=VEHICLES,
            telemetry_rows=len(telemetry),
            reading_rows=len(wanted) - len(telemetry),
            changes=fleet.changes(),
            samples=sorted(gateways.samples, key=lambda sample: sample.at_s),
            moves=[move_row(move, self._began_us) for move in self._moves.values()],
            state=compare(expected_state(fleet.rows), state, FACTS[:2]),
            output=compare(wanted[by_spark], output[OUTPUTS], OUTPUTS[:1]),
            answers=compare(wanted[~by_spark], answers, OUTPUTS[:1]),
            settings={
                "sites": [CLOUD, *SITES],
                "convoys": CONVOYS,
                "vehicles per convoy": VEHICLES,
                "round trip between sites, ms": options.rtt_ms,
                "max_pause_ms": options.max_pause_ms,
                "cool-down, s": options.seconds * COOL_DOWN,
                "seed": SEED,
            },
            versions=versions(),
        )


def _serving(
    gateways: Gateways, convoy: int, readings: list[Any], began: float, over: threading.Event
) -> Callable[[], None]:
    return lambda: gateways.serve(convoy, readings, began, over)


def _has_ended(reconfiguration: Reconfiguration, move: MoveReport) -> bool:
    return move.state in ("COMPLETED", "ABORTED") or reconfiguration.over


def _read_state(cluster: Cluster) -> pd.DataFrame:
    told, metres, sites = (cluster.read_state(OPERATOR, name).to_pylist() for name in ("told", "metres", "sites"))
    return state_facts(told, metres, sites)


def _read_output(spark: SparkSession, work: Path) -> pd.DataFrame:
    output: pd.DataFrame = spark.read.parquet(str(work / "output")).toPandas()
    return output


def _conclude(console: Console, result: FollowResult, html: Path, png: Path) -> None:
    summary: Mapping[str, Any] = result.summary()
    for difference in result.differences:
        console.print(Text(f"  {difference}", "red"))
    console.print(f"report: {html}  picture: {png}", highlight=False)
    for what, value in (
        ("while the state is elsewhere", f"{milliseconds(summary['away_ms_median'])} median"),
        ("during moves", f"{milliseconds(summary['moving_ms_max'])} at worst"),
        ("after the state has followed", f"{milliseconds(summary['near_ms_median'])} median"),
    ):
        console.print(f"gateway wait {what}: {value}", highlight=False)
    console.print(f"readings served at the site they come from: {summary['served_near']:.0%}", highlight=False)
    failed = f", {summary['moves_failed']} failed" if summary["moves_failed"] else ""
    console.print(
        f"moves: {len(result.completed)}{failed}; {result.convoys} convoys set off with their state in the cloud "
        f"and changed site {summary['site_changes']} times",
        highlight=False,
    )
    console.print(f"longest pause: {milliseconds(result.pause_ms_max)}", highlight=False)
    if result.budget_kept is not None:
        kept, style = ("kept", "green") if result.budget_kept else ("not kept", "bold red")
        console.print(Text(f"budget of {result.budget_ms:g} ms {kept}", style))
    for what, good in (
        (f"rows: {summary['rows']:,}, {result.lost} lost, {result.duplicated} duplicated", result.equal),
        (f"state equal: {_yes(result.state.equal)} ({result.state.compared:,} facts)", result.state.equal),
        (
            f"output equal: {_yes(summary['output_equal'])} ({result.output.compared:,} rows from Spark, "
            f"{result.answers.compared:,} from gateways)",
            summary["output_equal"],
        ),
    ):
        console.print(Text(what, "green" if good else "bold red"))
    if not result.completed:
        console.print(Text("nothing moved: raise --max-pause on a machine this busy", "bold red"))


def _yes(equal: bool) -> str:
    return "yes" if equal else "no"
