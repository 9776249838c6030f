"""Settings of every command, from its command line, the environment and the settings file.

If an option belongs to a field of a settings model, its default is the field's environment variable, or the field's key
in the settings file. The command gets the option's value as a parameter. All other settings are only in the models,
which are created by the code that needs them. A command reads its settings before its options are parsed
(:class:`Configured`). ``--print-config`` writes the effective settings as a settings file (:func:`effective`).

*Completion.* The Tab key completes commands and options, and names that a cluster, a ledger or a checkpoint store
knows. The user waits for the names, so the request for them has a short timeout. If it fails, nothing is offered and no
error is printed, because the command itself will report the error.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tomli_w
import typer
from pydantic import SecretStr
from rich.text import Text

from stateflow.cli.output import LISTEN, allow_plain_text, errors, flush, labels_of, telling
from stateflow.errors import StateflowError
from stateflow.private import MASK, masked
from stateflow.release import VERSION
from stateflow.settings import (
    CONFIG,
    AgentProcess,
    CheckpointSettings,
    ClientSettings,
    CodeSettings,
    ConnectionSettings,
    ControllerProcess,
    ControllerSettings,
    DashboardProcess,
    EmbeddedSettings,
    LedgerSettings,
    LogSettings,
    NatsSettings,
    ReplicaProcess,
    ReplicaSettings,
    RouterSettings,
    ServerSettings,
    Settings,
    configured_by,
)
from stateflow.settings.base import STRICT, check_variables, expanded, is_strict, leave_unchecked

# -- Settings in effect, written as a file ---------------------------------------------------------------------------

HEADER = """\
# {what}: effective settings.
# In parentheses: the origin of each. Load the file with --config FILE.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A settings model with its values, and those of the values that flags have set."""

    model: Settings
    given: Mapping[str, Any]


def effective(what: str, parts: Sequence[Part]) -> str:
    """Returns settings as TOML.

    Secrets are masked and commented out. A process that reads the file gets its secrets from the same places as before.

    Args:
        what: name of the program with these settings.
    """
    sections: dict[str, list[Part]] = {}
    for part in parts:
        sections.setdefault(part.model.section, []).append(part)
    return HEADER.format(what=what) + "".join(_section(name, found) for name, found in sections.items())


def _section(name: str, parts: Sequence[Part]) -> str:
    lines, tables = [f"\n[{name}]\n"], []
    for part in parts:
        for key, info in type(part.model).model_fields.items():
            value = getattr(part.model, key)
            origin = type(part.model).origin(key, part.given)
            comment = f"# {info.description} ({origin})\n"
            if isinstance(value, dict):
                tables += ["\n", comment, tomli_w.dumps({name: {key: value}})]
            else:
                lines += [comment, _line(key, value)]
    return "".join(lines + tables)


def _line(key: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        value, shown = value.get_secret_value(), MASK
    else:
        shown = masked(value) if isinstance(value, str) else value
    if value and shown != value:
        return f"# omitted, contains a secret: {key} = {tomli_w.dumps({'': shown})[5:]}"
    return tomli_w.dumps({key: value})


# -- Completion ------------------------------------------------------------------------------------------------------

Offers = Iterable[tuple[str, str]]
#: function that gets the command line so far, and returns offers for completion
Ask = Callable[["Said"], Offers]
ANSWER_S = 1.0
#: maximum wait for a connection to a controller, in seconds
CONNECT_S = 0.5
#: key in a context's ``meta``, set if the settings cannot be read and the cluster is therefore not known
UNCONFIGURED = "stateflow.unconfigured"
#: number of newest entries that are offered from a long list
NEWEST = 20


class Said:
    """The command line so far."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def of(self, name: str, variable: str = "", default: str = "") -> str:
        return self._given.get(name) or os.environ.get(variable) or default

    def cluster(self) -> Any:
        from stateflow.cli.output import LOCAL
        from stateflow.rpc.cluster_client import ClusterClient

        return ClusterClient(self.of("controller", "STATEFLOW_CONTROLLER", LOCAL), CONNECT_S)


def operators(said: Said) -> Offers:
    return [(each.name, f"{each.partitions} partitions") for each in said.cluster().status().operators]


def replicas(said: Said) -> Offers:
    return [(each.name, f"at {each.site}") for each in said.cluster().status().replicas]


def sites(said: Said) -> Offers:
    return [(site, "site") for site in dict.fromkeys(each.site for each in said.cluster().status().replicas)]


def places(said: Said) -> Offers:
    """Returns sites and replicas to which partitions can be moved."""
    found = said.cluster().status().replicas
    return [
        *((site, "site") for site in dict.fromkeys(each.site for each in found)),
        *((each.name, f"at {each.site}") for each in found),
    ]


def agents(said: Said) -> Offers:
    return [(each.name, f"at {each.site}") for each in said.cluster().agents()]


def where_agents_are(said: Said) -> Offers:
    found = said.cluster().agents()
    return [
        *((site, "site") for site in dict.fromkeys(each.site for each in found)),
        *((each.name, f"agent at {each.site}") for each in found),
    ]


def resting(said: Said) -> Offers:
    return [(each.node, "in maintenance") for each in said.cluster().status().maintenance]


def reconfigurations(said: Said) -> Offers:
    return [(each.id, f"{each.operator}, {each.state.lower()}") for each in said.cluster().reconfigurations(NEWEST)]


def jobs(said: Said) -> Offers:
    return [(each.name, f"{each.do}, {each.schedule}") for each in said.cluster().jobs()]


def runs(said: Said) -> Offers:
    return [(run.id, job.name) for job in said.cluster().jobs() for run in job.runs[-NEWEST:]]


def batches(said: Said) -> Offers:
    from stateflow.cli.ledger import opened_at
    from stateflow.ledger import Board

    with opened_at(said.of("url", "STATEFLOW_LEDGER")) as opened:
        return [(row["bid"], f"{row['name']}, {row['status']}") for row in Board(opened).batches(None, limit=NEWEST)]


def savepoints(said: Said) -> Offers:
    from stateflow.checkpoint import CheckpointStore
    from stateflow.private import url_of

    store = CheckpointStore(url_of(said.of("url", "STATEFLOW_CHECKPOINTS")), create=False)
    store.check()
    return [(name, f"{len(partitions)} partitions") for name, partitions in store.savepoints().items()]


#: parameter → its offers; an entry of the command in OF_COMMANDS takes precedence
PARAMETERS: dict[str, Ask] = {
    "agent": agents,
    "bid": batches,
    "operator": operators,
    "replica": replicas,
    "savepoint": savepoints,
    "site": sites,
}
OF_COMMANDS: dict[str, dict[str, Ask]] = {
    "checkpoint restore": {"to": places},
    "job create": {"to": places},
    "maintenance end": {"node": resting},
    "migrate": {"to": places},
    "savepoint delete": {"name": savepoints},
    "savepoint export": {"name": savepoints},
    "spawn": {"at": where_agents_are},
    **{f"job {each}": {"name": jobs} for each in ("info", "pause", "resume", "run-now", "delete")},
    "job result": {"run": runs},
    **{
        f"reconfig {each}": {"id": reconfigurations}
        for each in ("info", "details", "pause", "resume", "edit", "retry", "cancel", "resolve")
    },
}


def completed(called: str, function: Callable[..., Any]) -> None:
    """Adds completions to the parameters of a command.

    Args:
        called: the command's words on the command line.
    """
    known = PARAMETERS | OF_COMMANDS.get(called, {})
    asks = {name: known[name] for name in inspect.signature(function).parameters if name in known}
    hints = typing.get_type_hints(function, include_extras=True) if asks else {}
    for name, ask in asks.items():
        for each in getattr(hints[name], "__metadata__", ()):
            if hasattr(each, "autocompletion"):  # what typer.Argument and Option return
                each.autocompletion = _offering(ask)
        function.__annotations__[name] = hints[name]  # typer must get these objects, not evaluate the text again


def _offering(ask: Ask) -> Callable[..., list[tuple[str, str]]]:
    def offer(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        if UNCONFIGURED in ctx.meta:
            return []
        return [each for each in answered(lambda: ask(Said(ctx.params))) if each[0].startswith(incomplete)]

    return offer


def answered(ask: Callable[[], Offers], within_s: float = ANSWER_S) -> list[tuple[str, str]]:
    """Returns the offers; none if ``ask`` fails or takes longer than ``within_s``."""
    found: list[tuple[str, str]] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            found.extend(ask())

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(within_s)
    return list(found)


# -- Settings of a command -------------------------------------------------------------------------------------------

_EVERY: tuple[type[Settings], ...] = (ConnectionSettings, ServerSettings, LogSettings, ClientSettings)
#: process of a cluster → settings models, which are all checked before the process begins
PROCESSES: Mapping[str, tuple[type[Settings], ...]] = {
    "controller": (*_EVERY, LedgerSettings, CodeSettings, ControllerProcess, ControllerSettings),
    "replica": (*_EVERY, CheckpointSettings, ReplicaProcess, ReplicaSettings),
    "agent": (*_EVERY, CheckpointSettings, AgentProcess, ReplicaSettings),
    "dashboard": (*_EVERY, LedgerSettings, CheckpointSettings, DashboardProcess),
}
#: models of all other commands
COMMANDS: tuple[type[Settings], ...] = (
    *(ConnectionSettings, LogSettings, ClientSettings, LedgerSettings, CheckpointSettings, CodeSettings),
    *(EmbeddedSettings, RouterSettings, NatsSettings),
)
CONTROLLER = ConnectionSettings, "controller"


def _shared(
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", envvar=CONFIG, expose_value=False, help="TOML file with settings."),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", expose_value=False, help="Print the effective settings as a settings file, and exit."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", expose_value=False, help="Refuse STATEFLOW_… variables that nothing reads.")
    ] = False,
) -> None: ...


def _shared_options() -> list[Any]:
    alone = typer.Typer(add_completion=False)
    alone.command()(_shared)
    return list(typer.main.get_command(alone).params)


_CONFIG, _PRINT, _STRICT = _shared_options()


@dataclass(frozen=True, slots=True)
class Bound:
    """A field of a settings model, and the option of a command that sets it."""

    kind: type[Settings]
    name: str
    option: Any

    @property
    def is_table(self) -> bool:
        return self.kind.model_fields[self.name].annotation == dict[str, str]


class Configured:
    """A command or a group that reads settings before its options are parsed.

    Attributes:
        path: the command's words on the command line; empty: the program itself; None: a group that does nothing
            without a command.
    """

    path: str | None = None
    params: list[Any]

    def bind(self) -> None:
        """Binds options to settings. Call it once, after the command has got its options."""
        if self.path is None:
            return
        for bound in self._bound():  # a group would read variables for each of its commands
            if bound.option.envvar is None and not bound.is_table and not hasattr(self, "commands"):
                bound.option.envvar = bound.kind.variable(bound.name)
        self.params = [*self.params, _CONFIG, *([_PRINT] if self.path else []), _STRICT]

    @property
    def _kinds(self) -> tuple[type[Settings], ...]:
        return PROCESSES.get(self.path or "", COMMANDS)

    def _bound(self) -> Iterator[Bound]:
        options = {name: option for option in self.params for name in option.opts}
        for kind in self._kinds:
            for name in kind.model_fields:
                option = options.get(kind.flag(name) or "")
                if option is not None:
                    yield Bound(kind, name, option)

    def configure(self, context: Any, said: Mapping[str, Any], *, is_above: bool = False) -> None:
        """Reads the settings, which become the defaults of options.

        Raises Exit on an error, and after printing the settings for ``--print-config``.

        Args:
            said: parameter name → value on the command line.
            is_above: True for a group that is followed by a command. The group then only reads ``--config`` and
                ``--strict``, and the command does the rest.
        """
        if self.path is None or {"help", "version"} & said.keys():
            return
        leave_unchecked()  # unread variables are reported here
        if context.resilient_parsing:
            return self._configure_completion(context, said, is_above)
        with telling(as_json=bool(said.get("as_json"))):
            if said.get(_STRICT.name):
                os.environ[STRICT] = "1"
            if is_above:
                return use_file(said.get(_CONFIG.name))
            if self.path not in PROCESSES or is_strict(os.environ):  # processes report them in their logs
                check_variables(say=_warn)
            bound, given = self._read(said)
            if said.get(_PRINT.name):
                if context.parent is not None and _is_said(context.parent, "insecure"):
                    given.setdefault(ConnectionSettings, {})["insecure"] = True
                parts = [Part(kind(**given.get(kind, {})), given.get(kind, {})) for kind in self._kinds]
                typer.echo(effective(f"stateflow {self.path}, {VERSION}", parts), nl=False)
                flush()
                raise typer.Exit
            context.default_map = {**(context.default_map or {}), **self._defaults(bound, given)}

    def _configure_completion(self, context: Any, said: Mapping[str, Any], is_above: bool) -> None:
        """Reads the settings before names are completed, so that the names come from the command's own cluster."""
        if said.get("insecure"):  # completion calls no callbacks of options
            allow_plain_text(True)
        try:
            if is_above:
                return use_file(said.get(_CONFIG.name))
            context.default_map = {**(context.default_map or {}), **self._defaults(*self._read(said))}
        except StateflowError:  # the command itself will report it
            context.meta[UNCONFIGURED] = True

    def _read(self, said: Mapping[str, Any]) -> tuple[list[Bound], dict[type[Settings], dict[str, Any]]]:
        """Sets the settings file. Returns (bound options, values from flags by model). Raises InvalidArgument."""
        use_file(said.get(_CONFIG.name) or os.environ.get(CONFIG))
        bound = list(self._bound())
        return bound, _given(bound, said)

    def _defaults(self, bound: Sequence[Bound], given: Mapping[type[Settings], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns parameter → default from the settings. A setting with an empty string counts as not set."""
        found: dict[str, Any] = {}
        if self.path in PROCESSES:
            models = {kind: kind(**given.get(kind, {})) for kind in self._kinds}
            values = {
                each.option.name: getattr(models[each.kind], each.name)
                for each in bound
                if each.name not in given.get(each.kind, {}) and each.kind.origin(each.name, {}) != "default"
            }
        else:
            file = configured_by()
            sections = file.values if file is not None else {}
            values = {
                each.option.name: sections[each.kind.section][each.name]
                for each in bound
                if each.name in sections.get(each.kind.section, {})
            }
        for name, value in values.items():
            if value not in ("", {}):
                found[name] = [f"{key}={each}" for key, each in value.items()] if isinstance(value, dict) else value
        for each in bound:
            is_said = each.name in given.get(each.kind, {}) or os.environ.get(each.kind.variable(each.name))
            if (each.kind, each.name) == CONTROLLER and each.option.name not in found and not is_said:
                from stateflow.local.embedded import running_in  # not for help, which imports nothing heavy

                found[each.option.name] = running_in() or LISTEN
        return found


def use_file(named: str | None) -> None:
    """Sets the settings file for this process and its children; does nothing without a name.

    The path is made absolute, because a child may start in another directory. Raises InvalidArgument if the file has
    errors.
    """
    if named:
        os.environ[CONFIG] = str(expanded(named).absolute())
        configured_by()  # errors in it are reported now


def _warn(line: str) -> None:
    errors.print(Text.assemble(("warning", "bold yellow"), f": {line}"), highlight=False)


def _given(bound: Sequence[Bound], said: Mapping[str, Any]) -> dict[type[Settings], dict[str, Any]]:
    """Returns model → field → value for all fields that are set by flags. Raises InvalidArgument."""
    found: dict[type[Settings], dict[str, Any]] = {}
    for each in bound:
        if each.option.name in said:
            value = said[each.option.name]
            found.setdefault(each.kind, {})[each.name] = labels_of(value) if each.is_table else value
    return found


def _is_said(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
