"""Commands on agents, and on the replicas that agents start and stop."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the system, here where everything is put together
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from stateflow.cli import show
from stateflow.cli.cluster import follow_nodes
from stateflow.cli.group import Commands
from stateflow.cli.output import (
    LOCAL,
    NUMBER_MAX,
    Controller,
    Insecure,
    Json,
    byte_count,
    console,
    emit,
    errors,
    guarded,
    keep_stdout,
    labels_of,
    log_to_stderr,
    size,
)
from stateflow.cli.processes import StopWithParent, Verbose, say_ready, stop_on_signal
from stateflow.client import AgentReport, ChildReport, Cluster, RollingRestart, Spawning
from stateflow.code.loading import check_outside
from stateflow.errors import InvalidArgument, MoveAborted
from stateflow.fleet import Listening
from stateflow.private import UMASK
from stateflow.settings import ReplicaSettings
from stateflow.settings.base import check_variables
from stateflow.storage.store import raise_limit
from stateflow.types import SPAWNED_MAX, WEIGHT_MAX, WORKERS_MAX, check_name

app = Commands()
agents = Commands("agent", invoke_without_command=True)
app.add_typer(agents)
#: seconds that an agent may take to end, in addition to the stop timeout of its replicas
STOP_S = 25.0


# -- the process ----------------------------------------------------------------------------------------------


@agents.callback()
@guarded
def agent(
    context: typer.Context,
    site: Annotated[str | None, typer.Option(help="Site of this agent.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory of the agent and its replicas. No two agents share one.")
    ] = None,
    controller: Controller = LOCAL,
    name: Annotated[
        str | None, typer.Option(help="Name of the agent, kept across restarts; default: <site>-<host name>.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label key=value by which jobs and spawn select agents; repeatable.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="host:port to listen on; port 0 picks a free port. Replicas listen on other ports of this host."
        ),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str | None,
        typer.Option(help="Host at which others reach the agent and its replicas; default: the host of --listen."),
    ] = None,
    cores: Annotated[
        int, typer.Option(help="Cores that its replicas may use; 0: all cores of the machine.", min=0, max=1 << 16)
    ] = 0,
    memory: Annotated[
        str | None, typer.Option(help="Memory that its replicas may use, e.g. 4GiB; default: all.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            envvar="STATEFLOW_CHECKPOINTS", help="Checkpoint store of its replicas: directory or fsspec URL, or @FILE."
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="host:port of /metrics and /sd; replicas use other ports of this host.")
    ] = "",
    insecure: Insecure = False,
    as_json: Json = False,
    verbose: Verbose = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """Run an agent, which starts and stops replicas on this machine. The commands below list and forget agents."""
    if context.invoked_subcommand is not None:
        return
    if site is None or data_dir is None:
        raise InvalidArgument(
            "an agent needs a site and a data directory", remedy="pass --site SITE --data-dir DIRECTORY"
        )
    check_outside("an agent")
    from stateflow.agent import processes
    from stateflow.agent.agent import Agent, Config
    from stateflow.agent.processes import LocalLauncher

    if stop_with_parent:
        keep_stdout()
    raise_limit()
    os.umask(UMASK)
    named = check_name("agent", name or f"{site}-{socket.gethostname()}")
    log_to_stderr(verbose, named)
    check_variables()
    stop_s = ReplicaSettings().stop_timeout_s
    environment = dict(os.environ) | ({"STATEFLOW_CHECKPOINTS": checkpoints} if checkpoints else {})
    config = Config(
        name=named,
        site=check_name("site", site),
        controller=controller,
        data_dir=data_dir.absolute(),
        listen=listen,
        advertise=_advertised(advertise),
        labels=labels_of(label or []),
        cores=cores,
        memory_bytes=0 if memory is None else byte_count(memory),
        stop_timeout_s=stop_s,
        environment=environment,
        metrics=metrics,
    )

    async def run() -> None:
        stop = stop_on_signal(stop_with_parent, stop_s + STOP_S)
        one = Agent(config, processes.limits(processes.own_group()), LocalLauncher(), Random())

        def ready(address: str) -> None:
            say_ready(Listening(address), f"agent {named} at {site}", as_json)

        await one.run(stop, ready)

    asyncio.run(run())


def _advertised(host: str | None) -> str:
    """Returns ``host`` with port 0, as an address to advertise; empty for None.

    Raises InvalidArgument for a host with a port.
    """
    if host is None:
        return ""
    if ":" in host.rpartition("]")[2]:
        raise InvalidArgument(
            f"{host!r} includes a port, but an agent and its replicas need one each", remedy="pass only the host"
        )
    return f"{host}:0"


# -- lists ----------------------------------------------------------------------------------------------------


@agents.command("list")
def list_agents(controller: Controller = LOCAL, as_json: Json = False) -> None:
    """List agents, their resources, and their replicas."""
    found = Cluster(controller).agents()
    if as_json:
        emit({"agents": [each.to_dict() for each in found]})
        return
    console.print(_agents(found))
    if any(each.replicas for each in found):
        console.print(_children(found))


def _agents(found: list[AgentReport]) -> RenderableType:
    numbers = ("cores", "memory", "disk free")
    columns = ("agent", "site", "cores", "memory", "disk free", "limits", "state", "labels")
    table = show.new_table(*columns, numbers=numbers)
    for each in found:
        running = [child for child in each.replicas if child.wanted == "running"]
        table.add_row(
            each.name,
            each.site,
            f"{sum(child.workers for child in running)} of {each.cores}",
            size(each.memory_bytes),
            size(each.disk_free_bytes),
            each.limits,
            Text("alive", "green") if each.alive else Text(_silent(each), "bold red"),
            " ".join(f"{key}={value}" for key, value in sorted(each.labels.items())),
        )
    return show.titled("Agents", table)


def _silent(agent: AgentReport) -> str:
    heard_s = agent.last_heartbeat_s
    return "silent" if heard_s < 0 else f"silent for {heard_s:.0f} s"


def _children(found: list[AgentReport]) -> RenderableType:
    table = show.new_table(
        "replica", "agent", "workers", "memory", "desired", "state", "error", numbers=("workers", "memory")
    )
    for agent_ in found:
        for child in agent_.replicas:
            memory = size(child.memory_bytes) if child.memory_bytes else ""
            row = child.replica, agent_.name, str(child.workers), memory, child.wanted, _state(child, agent_)
            table.add_row(*row, Text(_why(child), "red"))
    return show.titled("Replicas of agents", table)


def _why(child: ChildReport) -> str:
    """Returns the error of a replica. It is empty while the replica runs, because an earlier failure is over."""
    return "" if child.state == "RUNNING" else child.error


def _state(child: ChildReport, agent: AgentReport) -> Text:
    said = child.state.lower() or "not reported yet"
    if not agent.alive:
        return Text(f"unknown, was {said}" if child.state else "unknown", "yellow")
    if child.state == "WAITS":
        return Text(f"waiting to restart ({child.deaths} deaths)", "bold red")
    return Text(said, "green" if child.state == "RUNNING" else "yellow")


@agents.command("forget")
def forget_agent(
    agent: Annotated[str, typer.Argument(help="Agent that has ended for good.")],
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Forget an agent that has ended, and its replicas."""
    Cluster(controller).forget_agent(agent)
    if as_json:
        emit({"agent": agent})
    else:
        console.print(f"agent {agent} forgotten")


# -- commands to agents ---------------------------------------------------------------------------------------


@app.command()
def spawn(
    at: Annotated[str, typer.Argument(help="Agent that starts the replicas, or a site.")],
    count: Annotated[int, typer.Option(help="Number of replicas to start.", min=1, max=SPAWNED_MAX)] = 1,
    workers: Annotated[
        int, typer.Option(help="Worker processes of each replica; each uses one core.", min=1, max=WORKERS_MAX)
    ] = 1,
    weight: Annotated[int, typer.Option(help="Relative share of partitions, per worker.", min=1, max=WEIGHT_MAX)] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each replica, e.g. 512MB; default: none.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Only agents with the label key=value; repeatable.")] = None,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Start replicas through an agent, and wait until they have registered."""
    limit = 0 if memory is None else byte_count(memory)
    begun = Cluster(controller).spawn(
        at, count=count, workers=workers, weight=weight, memory_bytes=limit, labels=labels_of(label or [])
    )
    _follow(begun, as_json)


@app.command()
def stop(
    replica: Annotated[str, typer.Argument(help="Name of a replica that an agent started.")],
    drain: Annotated[bool, typer.Option("--drain", help="Move its partitions to other replicas first.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Stop the replica even if it owns partitions, which wait for its restart or for a takeover, or if an "
            "operator then has no standby.",
        ),
    ] = False,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Stop a replica through its agent. The replica's state stays on disk, and `stateflow restart` starts the replica
    again."""
    _follow(Cluster(controller).stop_replica(replica, drain=drain, force=force), as_json)


@app.command()
def restart(
    replica: Annotated[str, typer.Argument(help="Name of a replica that an agent started.")] = "",
    rolling: Annotated[
        bool,
        typer.Option("--all", help="Restart every replica that an agent runs, node by node; other nodes keep serving."),
    ] = False,
    site: Annotated[str, typer.Option(help="With --all: only the replicas of this site or agent.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=256, help="With --all: number of nodes at a time.")] = 1,
    controller: Controller = LOCAL,
    as_json: Json = False,
) -> None:
    """Restart a replica through its agent, or all replicas, node by node."""
    if bool(replica) == rolling:
        raise InvalidArgument("exactly one of a replica and --all is required", remedy="name a replica, or pass --all")
    if rolling:
        _roll(Cluster(controller).restart_all(site, limit=limit), as_json)
    else:
        _follow(Cluster(controller).restart_replica(replica), as_json)


def _roll(begun: RollingRestart, as_json: bool) -> None:
    """Follows a rolling restart. Raises MoveAborted if it failed; for JSON, the report says so, and the process exits
    with status 1."""
    follow_nodes(begun, as_json)
    if as_json:
        emit(begun.report.to_dict())
    if begun.report.state != "DONE":
        if as_json:  # an error would be a second object
            raise typer.Exit(1)
        failed = next((each for each in begun.report.nodes if each.error), None)
        what = "the rolling restart was cancelled"
        raise MoveAborted(
            what if failed is None else f"{failed.node} was not restarted: {failed.error}",
            remedy=f"see `stateflow batch info roll/{begun.id}`; fix the cause, then repeat the command",
        )


def _follow(begun: Spawning, as_json: bool) -> None:
    """Follows replicas until each is in the commanded state. Prints a line for each change."""
    said: dict[str, str] = {}
    for replicas in begun.progress(deaths_max=5):
        for name in begun.names:
            line = _standing(name, replicas.get(name))
            if not as_json and said.get(name) != line:
                said[name] = line
                errors.print(line, highlight=False)
    if as_json:
        emit({"replicas": [child.to_dict() for child in begun.replicas.values()]})
    else:
        console.print(" ".join(begun.names))


def _standing(name: str, child: ChildReport | None) -> str:
    if child is None or not child.state:
        return f"{name}: waiting for its agent (`stateflow agent list` shows whether it answers)"
    where = f" at {child.address}" if child.address else ""
    return f"{name}: {child.state.lower()}{where}" + (f"; {why}" if (why := _why(child)) else "")


@app.command()
def logs(
    replica: Annotated[str, typer.Argument(help="Name of a replica that an agent started.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they arrive, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of newest lines to print first.", min=0, max=NUMBER_MAX)
    ] = 100,
    controller: Controller = LOCAL,
) -> None:
    """Show the log of a replica that an agent runs."""
    for piece in Cluster(controller).logs(replica, lines=lines, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
