"""Groups of commands, the behaviour that all of them share on the command line, and the texts of their help.

``PANELS`` and ``BRIEFLY`` are the contents of `stateflow --help`: commands in the order in which people need them, and
one line about each. A command that is in no panel is shown among the tools. A command within a group needs no line in
``BRIEFLY`` if its docstring begins with a short line. ``EXAMPLES`` are shown at the end of a command's help.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from stateflow.cli.configuring import Configured, completed
from stateflow.cli.output import guarded, telling
from stateflow.errors import InvalidArgument

# -- Contents of `stateflow --help` ----------------------------------------------------------------------------------

PANELS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "examples", "doctor", "demo", "run"),
    "Operators": ("deploy", "status", "dashboard", "partitions", "state", "source", "operator", "upgrade", "undeploy"),
    "Moving": ("migrate", "rebalance", "autopilot", "drain", "standby", "takeover", "reconfig"),
    "Recovery": ("checkpoint", "savepoint", "verify", "replace", "adopt"),
    "Fleet": ("nodes", "agent", "spawn", "stop", "restart", "logs", "forget", "maintenance", "job", "batch"),
    "Ledger": ("ledger", "stages"),
    "Processes": ("controller", "replica", "health"),
    "Tools": ("generate", "certs", "token", "spark"),
}
OTHERS = "Tools"
#: command → line about it; each command of the program's help needs a line, because the help imports no command
BRIEFLY: dict[str, str] = {
    "status": "Show what runs where.",
    "partitions": "List each partition's owner, epoch and standbys.",
    "state": "Read state, of a live cluster or of a checkpoint.",
    "source": "Sources of an operator: queries, batch runs, stream clients.",
    "reconfig": "Show and control reconfigurations and their moves.",
    "checkpoint": "Take, list, verify, restore and collect checkpoints.",
    "savepoint": "Named checkpoints, kept until they are deleted.",
    "logs": "Show the log of a replica that an agent runs.",
    "job": "Jobs that the cluster starts once or on a schedule.",
    "batch": "Batches of work: their progress, entities and jobs.",
    "ledger": "The ledger: items and their records.",
    "replica": "Run a replica: an operator process at a site.",
    "certs": "TLS certificates from your own authority.",
    "token": "Short-lived tokens for people and Spark jobs.",
    "spark": "Spark queries: their executors and checkpoints.",
    "init": "Write a small project that runs at once.",
    "examples": "List the examples for `stateflow init --example`.",
    "dashboard": "Serve the live page of a cluster.",
    "doctor": "Check whether this machine has all that stateflow needs.",
    "demo": "Run the full demonstration here. Takes a minute.",
    "run": "Run a declared pipeline: a source, operators, a sink.",
    "deploy": "Deploy an operator, with its code, to the sites.",
    "operator": "Deployed versions of operators.",
    "upgrade": "Switch an operator to a version deployed before.",
    "undeploy": "Remove an operator and its state from the cluster.",
    "migrate": "Move partitions while the pipeline runs.",
    "rebalance": "Give every replica its share of partitions.",
    "autopilot": "Let partitions follow their rows and their load.",
    "drain": "Move all partitions away from a replica.",
    "standby": "Keep standby copies, which take over when owners die.",
    "takeover": "Take over partitions whose owner is gone for good.",
    "verify": "Let every owner read and check its partitions.",
    "replace": "Give a lost replica's name to a new data directory.",
    "adopt": "Adopt the replicas' partitions into a new ledger.",
    "nodes": "List replicas, their room, and the links between sites.",
    "agent": "Run an agent, which starts and stops replicas; list agents.",
    "spawn": "Start replicas through an agent.",
    "stop": "Stop a replica through its agent. Its state stays.",
    "restart": "Restart a replica through its agent, or all of them.",
    "forget": "Forget a replica that has ended.",
    "maintenance": "Nodes in maintenance, which get no partitions.",
    "stages": "Pipeline stages: data moved from source to sink.",
    "controller": "Run a controller, which assigns partitions to replicas.",
    "health": "Probe whether a process is alive or ready.",
    "generate": "Write files for systemd, Docker, Kubernetes, Prometheus.",
    "ledger init": "Create a ledger in an empty database, or upgrade one.",
    "ledger resolve": "Record that the cause of a blocked item was removed.",
    "ledger verify": "Check every record and everything derived from them.",
    "stages current": "Show a job's newest stage, and why it stopped.",
    "batch info": "Show the progress of one batch, and when it will end.",
    "batch jobs": "List jobs by status, in the order of their creation.",
    "batch pause": "Pause a batch after the entity in progress.",
    "batch cancel": "Cancel a batch: work that has not begun does not begin.",
    "checkpoint init": "Create a checkpoint store, or show its id.",
    "checkpoint now": "Take a checkpoint of every partition.",
    "checkpoint all": "Take a checkpoint of every partition, node by node.",
    "checkpoint verify": "Read every blob, and check hashes, digest and cells.",
    "checkpoint restore": "Restore partitions from a checkpoint.",
    "checkpoint gc": "Drop old checkpoints and unreferenced blobs.",
    "savepoint export": "Copy a complete savepoint into another store.",
    "savepoint delete": "Delete a savepoint.",
    "source list": "List sources: newest batch, its age, the watermark.",
    "source retire": "Drop a source's stored output and its watermark.",
    "source drop-output": "Unblock a query that cannot read a stored output.",
    "spark package": "Write stateflow as a zip, for `spark-submit --py-files`.",
    "spark rewind": "Set a stopped query back to a batch; deletes nothing.",
    "reconfig summary": "Sum up reconfigurations: states, moves, bytes, pauses.",
    "reconfig pause": "Pause a reconfiguration; moves under way complete.",
    "reconfig cancel": "Cancel a reconfiguration: roll back unfenced moves.",
    "reconfig retry": "Retry the failed moves of a reconfiguration.",
    "reconfig edit": "Limit the concurrent moves of a reconfiguration.",
    "reconfig resolve": "Give up fenced moves that cannot complete.",
    "job create": "Create a job, which runs once or on a schedule.",
    "job result": "Show the outcome of a run, or what it waits for.",
    "certs init": "Create an authority: its key and certificate.",
    "certs issue": "Write a certificate and key for one process or person.",
    "certs renew": "Write a new certificate for the same name and role.",
    "certs revoke": "Revoke certificates, so that servers refuse them.",
    "batch retry": "Set failed entities back to waiting.",
    "certs list": "List certificates and their expiry.",
    "job list": "List jobs, when they are due, and their last run.",
    "job resume": "Resume a paused job.",
    "job pause": "Pause a job: no run begins until it is resumed.",
    "maintenance end": "End the maintenance of a node.",
    "operator versions": "List an operator's versions in order of deployment.",
    "stages trace": "List the stages that a correlation id went through.",
    "stages last": "Show the newest stage that pulled an entity.",
    "token show": "Show a token's owner and its end of validity.",
    "token issue": "Issue a token: print it, or write it to a file.",
}


def panel_of(command: str) -> str:
    return next((panel for panel, names in PANELS.items() if command in names), OTHERS)


def in_order(commands: list[str]) -> list[str]:
    """Sorts commands by their place in the panels; commands in no panel are last."""
    place = {name: at for at, name in enumerate(name for names in PANELS.values() for name in names)}
    return sorted(commands, key=lambda name: place.get(name, len(place)))


# -- Examples --------------------------------------------------------------------------------------------------------

#: command → examples at the end of its help; tests parse each example
EXAMPLES: dict[str, tuple[str, ...]] = {
    "controller": (
        "controller --listen 0.0.0.0:7070 --advertise ctl:7070 --ledger sqlite:////var/lib/stateflow/ledger.db",
    ),
    "replica": (
        "replica --site edge-1 --data-dir /var/lib/stateflow --controller ctl:7070",
        "replica --site cloud --name cloud-a --data-dir /var/lib/stateflow --listen 0.0.0.0:7071 --advertise "
        "cloud-a:7071 --checkpoints s3://bucket/checkpoints",
    ),
    "init": ("init alarms", "init cards --example fraud"),
    "examples": ("examples",),
    "dashboard": (
        "dashboard --controller ctl:7070",
        "dashboard --listen 0.0.0.0:7443 --cert page.pem --key page.key --host fleet.example",
    ),
    "doctor": ("doctor", "doctor --data-dir /var/lib/stateflow --controller ctl:7070"),
    "health": ("health edge-1:7071 --service live",),
    "certs issue": (
        "certs issue edge-0 --role node --host edge-0.lan --host 10.0.0.7",
        "certs issue gateway --role data --operator DelayByAircraft",
    ),
    "certs renew": ("certs renew edge-0",),
    "certs revoke": ("certs revoke node/edge-0",),
    "token issue": (
        "token issue alice --role operate --for 8h",
        "token issue pumps --role data --operator Pumps --for 7d --out pumps.token",
    ),
    "token show": ("token show pumps.token",),
    "agent list": ("agent list", "agent list --json"),
    "agent forget": ("agent forget edge-1-gw7",),
    "spawn": ("spawn edge-1 --count 3 --memory 2GiB", "spawn edge-1 --workers 4 --label disk=ssd"),
    "stop": ("stop edge-1-gw7-0 --drain",),
    "restart": ("restart edge-1-gw7-0", "restart --all --site edge-1"),
    "logs": ("logs edge-1-gw7-0 --lines 20", "logs edge-1-gw7-0 -f"),
    "generate": (
        "generate prometheus --out monitoring",
        "generate systemd --for agent --site edge-1 --controller ctl:7070",
        "generate kubernetes --for replica --site cloud --controller ctl:7070 --count 3 --memory 4Gi --out manifests",
    ),
    "deploy": (
        "deploy myapp.ops:DelayByAircraft --partitions 128 --require 'geohash>=1'",
        "deploy ops.py:Count --site cloud --name CountV2",
        "deploy myapp.ops:DelayByAircraft --installed",
    ),
    "takeover": ("takeover DelayByAircraft 3 5-9 --accept-loss",),
    "upgrade": ("upgrade DelayByAircraft --to 2",),
    "operator versions": ("operator versions DelayByAircraft",),
    "undeploy": ("undeploy DelayByAircraft --delete-state",),
    "forget": ("forget edge-7",),
    "status": ("status", "status --watch", "status --json"),
    "migrate": (
        "migrate DelayByAircraft 3 5-9 --to edge-1 --max-pause 50ms",
        "migrate DelayByAircraft all --to cloud --max-bandwidth 20MB/s",
    ),
    "rebalance": ("rebalance --max-pause 50ms", "rebalance --policy locality,load --dry-run"),
    "autopilot": ("autopilot --policy locality,load --max-pause 50ms --cool-down 60s", "autopilot --off"),
    "job create": (
        'job create evening --schedule "cron 0 18 * * * Europe/Berlin" --do rebalance --policy locality,load',
        'job create nightly --schedule "every 3600" --do checkpoint',
    ),
    "drain": ("drain edge-1-gw7",),
    "replace": ("replace edge-1-gw7",),
    "adopt": ("adopt --dry-run", "adopt"),
    "standby": ("standby DelayByAircraft 1", "standby DelayByAircraft 0"),
    "partitions": ("partitions DelayByAircraft",),
    "run": ("run pipeline.yml", "run pipeline.yml --set day=2013-01-01 --once"),
    "demo": ("demo", "demo --rows 50000 --out report", "demo --source jetstream --nats nats://127.0.0.1:4222"),
    "reconfig list": ("reconfig list --limit 5",),
    "reconfig info": ("reconfig info 4b1f2c3d9a0e",),
    "reconfig resolve": ("reconfig resolve 4b1f2c3d9a0e --serve-source",),
    "verify": ("verify", "verify DelayByAircraft --site edge-1 --limit 2"),
    "checkpoint all": ("checkpoint all --limit 2", "checkpoint all DelayByAircraft --site edge-1"),
    "checkpoint restore": (
        "checkpoint restore DelayByAircraft",
        "checkpoint restore DelayByAircraft 3 5-9 --savepoint before-upgrade",
    ),
    "savepoint create": ("savepoint create before-upgrade",),
    "state get": ("state get DelayByAircraft flights N14228",),
    "state scan": ("state scan DelayByAircraft delay_by_dest --limit 10",),
    "state export": ("state export DelayByAircraft delay_by_dest --out delays.parquet",),
    "ledger init": ("ledger init --ledger @/run/secrets/ledger",),
    "ledger tail": ("ledger tail -n 50 -f",),
    "stages current": ("stages current tallies",),
    "stages failed": ("stages failed --job tallies",),
    "batch info": ("batch info 4b1f2c3d9a0e",),
    "batch cancel": ("batch cancel sweep/4b1f2c3d9a0e",),
    "source list": ("source list DelayByAircraft",),
    "spark package": ("spark package stateflow.zip",),
    "spark rewind": ("spark rewind checkpoint/ --to-batch 41", "spark rewind checkpoint/ --to-batch 41 --apply"),
}


# -- Commands and groups ---------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
#: beginning of a negative number; a key may be one
_NEGATIVE = re.compile(r"-\.?\d")
#: type shown for a flag, which takes no value
_NO_TYPE = ""


def _untyped(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = _NO_TYPE
    return params


def _check_paths(command: Any, ctx: Any, said: Mapping[str, Any]) -> None:
    """Checks that no path on a command line is empty, because it would become the working directory. Ends the program
    if one is.

    Args:
        said: parameter name → value on the command line.
    """
    empty = [name for name, value in said.items() if value == ""]
    if not empty or ctx.resilient_parsing:
        return
    hints = typing.get_type_hints(command.callback)
    with telling(as_json=bool(said.get("as_json"))):
        for name in empty:
            kind = hints.get(name)
            if Path in (kind, *typing.get_args(kind)):
                named = next(param.opts[0] for param in command.params if param.name == name)
                raise InvalidArgument(
                    f"the path {named if named.startswith('-') else named.upper()} is empty",
                    remedy="name a file or directory; . is the working directory",
                )


class _Command(Configured, TyperCommand):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bind()

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(map(_NEGATIVE.match, args)):  # no option begins with a digit
            ctx.ignore_unknown_options = True
        said, *_ = self.make_parser(ctx).parse_args(args=list(args))
        self.configure(ctx, said)
        _check_paths(self, ctx, said)
        return super().parse_args(ctx, args)


class _Group(Configured, TyperGroup):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bind()

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said, follows, _ = self.make_parser(ctx).parse_args(args=list(args))
        self.configure(ctx, said, is_above=bool(follows))
        _check_paths(self, ctx, said)
        return super().parse_args(ctx, args)


class Root(_Group):
    """The program itself, whose help shows its commands in panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        return in_order(super().list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = panel_of(cmd_name)
            command.short_help = BRIEFLY.get(cmd_name)
        return command


class Commands(typer.Typer):
    """The commands of one module, which ``add_typer`` adds to another group.

    ``-h`` shows a command's help, which ends with examples. A command that fails prints its error as one line.

    Args:
        name: name of the commands' group; None: they become commands of the group to which they are added.
        root: True: the commands are the whole program.
    """

    def __init__(self, name: str | None = None, *, root: bool = False, **options: Any) -> None:
        path = name if options.get("invoke_without_command") else "" if name is None else None
        super().__init__(
            name=name,
            cls=type("_Group", (Root if root else _Group,), {"path": path}),
            no_args_is_help=not options.get("invoke_without_command", False),
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )
        self._prefix = f"{name} " if name else ""

    def command(self, name: str | None = None, **given: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            called = self._prefix + (name or function.__name__.replace("_", "-"))
            examples = EXAMPLES.get(called, ())
            shown = "\n\n".join(f"[dim]$[/] stateflow {escape(example)}" for example in examples)
            completed(called, function)
            cls = type("_Command", (_Command,), {"path": called})
            options: dict[str, Any] = {"epilog": shown or None, "short_help": BRIEFLY.get(called), **given}
            super(Commands, self).command(name, cls=cls, **options)(guarded(function))
            return function

        return add
