"""The program ``stateflow``. Each of its commands parses the arguments, calls the library, and shows the result.

A command imports only its own module, and the program's help imports no command, because importing all of them takes
longer than most commands run.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from stateflow.cli.group import BRIEFLY, PANELS, Commands
from stateflow.cli.output import Insecure, console, show_everything, telling
from stateflow.release import VERSION

#: environment variable that a shell sets when it requests completions
COMPLETING = "_STATEFLOW_COMPLETE"
HELP = "Stateful stream operators whose state can move while the pipeline runs."
#: commands by module
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "agents": ("spawn", "stop", "restart", "logs", "agent"),
    "beginning": ("init", "examples", "doctor", "demo"),
    "certs": ("certs", "token"),
    "checkpoint": ("checkpoint", "savepoint"),
    "cluster": (
        "deploy",
        "status",
        "takeover",
        "upgrade",
        "migrate",
        "operator",
        "undeploy",
        "forget",
        "maintenance",
        "verify",
    ),
    "generate": ("generate",),
    "jobs": ("batch", "job"),
    "ledger": ("ledger", "stages"),
    "moving": (
        "adopt",
        "nodes",
        "partitions",
        "rebalance",
        "autopilot",
        "drain",
        "replace",
        "standby",
        "reconfig",
    ),
    "processes": ("controller", "replica", "health", "dashboard"),
    "spark": ("run", "spark"),
    "state": ("state", "source"),
}
_MODULE_OF = {command: module for module, commands in COMMANDS.items() for command in commands}


def _say_version(wanted: bool) -> None:
    if wanted:
        console.print(f"stateflow {VERSION}\n{_beside()}", highlight=False)
        raise typer.Exit


def _beside() -> str:
    """Returns the versions of Python, Spark and rocksdict as one line, without importing the packages."""
    found = [f"Python {platform.python_version()}"]
    for name, package in (("Spark", "pyspark"), ("rocksdict", "rocksdict")):
        try:
            found.append(f"{name} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # Spark comes with an extra
            found.append(f"no {name}")
    return ", ".join(found)


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Stateful stream operators whose state can move while the pipeline runs."""


def _root() -> Commands:
    root = Commands(root=True, help=HELP)
    root.callback()(_common)
    return root


def app_of(modules: Iterable[str]) -> Commands:
    """Builds the program with the commands of these modules."""
    root = _root()
    for name in modules:
        root.add_typer(importlib.import_module(f"stateflow.cli.{name}").app)
    return root


def outline() -> Commands:
    """Builds the program for its help alone. The commands do nothing, and their modules are not imported."""
    root = _root()
    for name in (name for names in PANELS.values() for name in names):
        root.command(name, short_help=BRIEFLY[name])(lambda: None)
    return root


def app_for(arguments: Sequence[str]) -> Commands:
    """Builds the part of the program that a command line needs, or the whole program if the part is not clear."""
    if COMPLETING in os.environ:  # the command line to complete is in the environment, not in the arguments
        return app_of(COMMANDS)
    first = arguments[0] if arguments else "--help"
    if first in _MODULE_OF:
        return app_of([_MODULE_OF[first]])
    if list(arguments) in ([], ["--help"], ["-h"], ["--version"]):
        return outline()
    return app_of(COMMANDS)


def __getattr__(name: str) -> Any:
    """Builds ``app``, the whole program, when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = found = app_of(COMMANDS)
    return found


def main() -> None:
    show_everything()
    try:
        with telling():
            app_for(sys.argv[1:])()
    except typer.Exit as ended:  # printing the output failed
        sys.exit(ended.exit_code)
