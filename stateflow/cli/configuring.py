"""Settings of a command, made of its command line, the environment and the file of settings, for every command alike.

An option that is a field of a model has the field's variable, or its key in the file, as its default. The command takes
its value as a parameter. All other settings are in the models, which the code that needs them makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from stateflow.cli.completing import UNCONFIGURED
from stateflow.cli.effective import Part, effective
from stateflow.cli.options import LISTEN, allow_plain_text, labels_of
from stateflow.cli.output import errors, flush, telling
from stateflow.errors import StateflowError
from stateflow.local.place import running_in
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
from stateflow.settings.base import leave_unchecked
from stateflow.settings.variables import STRICT, check_variables, is_strict

_EVERY: tuple[type[Settings], ...] = (ConnectionSettings, ServerSettings, LogSettings, ClientSettings)
#: models of each process of a cluster, all checked before it begins
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
            "--print-config", expose_value=False, help="Print the effective settings as such a file, and exit."
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
    """A field of a model, and the command's option for it."""

    kind: type[Settings]
    name: str
    option: Any

    @property
    def is_table(self) -> bool:
        return self.kind.model_fields[self.name].annotation == dict[str, str]


class Configured:
    """A command or a group that reads settings before its options are parsed. ``path``: its words on the command line;
    empty: the program itself; None: a group that does nothing by itself."""

    path: str | None = None
    params: list[Any]

    def bind(self) -> None:
        """Binds options to settings. To be called once, when the command has its options."""
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
        """Reads the settings, which become the defaults of options. Raises Exit on an error, and when the settings are
        only to be printed.

        Args:
            said: options of the command line, by the names of parameters.
            is_above: another command follows, and the options are for that one.
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
        """Reads the settings for completion, which offers names of the cluster that the command would go to."""
        if said.get("insecure"):  # completion calls no callbacks of options
            allow_plain_text(True)
        try:
            if is_above:
                return use_file(said.get(_CONFIG.name))
            context.default_map = {**(context.default_map or {}), **self._defaults(*self._read(said))}
        except StateflowError:  # the command itself will report it
            context.meta[UNCONFIGURED] = True

    def _read(self, said: Mapping[str, Any]) -> tuple[list[Bound], dict[type[Settings], dict[str, Any]]]:
        """Reads the file. Returns the bound options, and the values that flags give. Raises InvalidArgument."""
        use_file(said.get(_CONFIG.name) or os.environ.get(CONFIG))
        bound = list(self._bound())
        return bound, _given(bound, said)

    def _defaults(self, bound: Sequence[Bound], given: Mapping[type[Settings], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the defaults of parameters. An empty string counts as not set."""
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
                found[each.option.name] = running_in() or LISTEN
        return found


def use_file(named: str | None) -> None:
    """Sets the file of settings for this process and those that it starts, in any directory. Raises InvalidArgument."""
    if named:
        os.environ[CONFIG] = str(Path(named).expanduser().absolute())
        configured_by()  # errors in it are reported now


def _warn(line: str) -> None:
    errors.print(Text.assemble(("warning", "bold yellow"), f": {line}"), highlight=False)


def _given(bound: Sequence[Bound], said: Mapping[str, Any]) -> dict[type[Settings], dict[str, Any]]:
    """Returns the values that flags give. Raises InvalidArgument."""
    found: dict[type[Settings], dict[str, Any]] = {}
    for each in bound:
        if each.option.name in said:
            value = said[each.option.name]
            found.setdefault(each.kind, {})[each.name] = labels_of(value) if each.is_table else value
    return found


def _is_said(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
