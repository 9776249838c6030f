"""Every command with its arguments, options and examples, from the program itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import typer.main
from typer.core import TyperArgument, TyperGroup

from stateflow.cli.app import app
from stateflow.cli.group import EXAMPLES

TYPES = {"float": "NUMBER", "int": "NUMBER", "Path": "PATH"}
#: of rich
_MARKUP = re.compile(r"\[(?:/|/?dim|/?bold)\]")


def page() -> str:
    return "\n".join(_commands(typer.main.get_command(app), ()))


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    if words and (not isinstance(command, TyperGroup) or command.invoke_without_command):
        yield from _command(command, words)
    if isinstance(command, TyperGroup):
        if words and not command.invoke_without_command:
            yield f"## stateflow {' '.join(words)}\n\n{_help(command)}\n"
        for name, each in sorted(command.commands.items()):
            yield from _commands(each, (*words, name))


def _command(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    called = " ".join(words)
    yield f"{'#' * (1 + len(words))} stateflow {called}\n\n{_help(command)}\n"
    given = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    if given:
        yield "| given | default | what |\n|---|---|---|"
        hints = get_type_hints(inspect.unwrap(command.callback))
        yield from (_row(each, str(hints.get(each.name, ""))) for each in given)
        yield ""
    if called in EXAMPLES:
        yield "```sh"
        yield from (f"stateflow {example}" for example in EXAMPLES[called])
        yield "```\n"


def _help(command: Any) -> str:
    return _MARKUP.sub("", command.help or "").strip()


def _row(param: Any, hint: str) -> str:
    """``hint``: the parameter's Python type, as text."""
    if isinstance(param, TyperArgument):
        name = f"`{param.metavar or param.name.upper()}{'…' if param.nargs == -1 else ''}`"
    else:
        name = ", ".join(f"`{each}`" for each in (*param.opts, *param.secondary_opts))
        if not param.is_flag:
            name += f" {param.metavar or next((said for kind, said in TYPES.items() if kind in hint), 'TEXT')}"
    told = " ".join((getattr(param, "help", None) or "").split()).replace("<", "&lt;")
    if variable := getattr(param, "envvar", None):
        told += f" Environment: `{variable}`."
    default = "(required)" if param.required else _default(param)
    return f"| {_cell(name)} | {_cell(default)} | {_cell(told)} |"


def _default(param: Any) -> str:
    value = param.default
    if value is None or value is False or value in ("", (), []) or callable(value):
        return ""
    return "on" if value is True else f"`{value}`"


def _cell(text: str) -> str:
    return _MARKUP.sub("", text).replace("|", "\\|").strip()
