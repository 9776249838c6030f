"""Groups of commands: what all of them have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from stateflow.cli.examples import EXAMPLES
from stateflow.cli.output import guarded

F = TypeVar("F", bound=Callable[..., Any])
#: options of a flag show no type: it takes none
_NO_TYPE = ""


def _untyped(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = _NO_TYPE
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))


class Commands(typer.Typer):
    """Commands of one module, which is added to the others with ``add_typer``. They answer to ``-h``, their help ends
    with examples, and their errors are one line.

    Args: name: of the group that they are; without one they are commands of whatever they are added to.
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(
            name=name,
            cls=_Group,
            no_args_is_help=not options.get("invoke_without_command", False),
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )
        self._prefix = f"{name} " if name else ""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            called = self._prefix + (name or function.__name__.replace("_", "-"))
            examples = EXAMPLES.get(called, ())
            shown = "\n\n".join(f"[dim]$[/] stateflow {escape(example)}" for example in examples)
            super(Commands, self).command(name, cls=_Command, epilog=shown or None, **options)(guarded(function))
            return function

        return add
