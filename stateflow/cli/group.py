"""Groups of commands, and the behaviour that all of them share on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from stateflow.cli.completing import completed
from stateflow.cli.configuring import Configured
from stateflow.cli.examples import EXAMPLES
from stateflow.cli.output import guarded
from stateflow.cli.panels import BRIEFLY, in_order, panel_of

F = TypeVar("F", bound=Callable[..., Any])
#: a negative number, which a key may be
_NEGATIVE = re.compile(r"-\.?\d")
#: type shown for a flag, which takes no value
_NO_TYPE = ""


def _untyped(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = _NO_TYPE
    return params


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
    """Commands of one module, which is added to the others with ``add_typer``. They answer to ``-h``, their help ends
    with examples, and their errors are one line.

    Args:
        name: name of their group; None: they are commands of the group that they are added to.
        root: they are the program itself.
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
