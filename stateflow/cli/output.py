"""How commands speak: tables for people, one JSON object for machines, one line on stderr for errors."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from stateflow.errors import StateflowError

F = TypeVar("F", bound=Callable[..., Any])
console = Console()
errors = Console(stderr=True, soft_wrap=True)


def emit(value: dict[str, Any]) -> None:
    """One JSON object, on one line, at once."""
    print(json.dumps(value, default=str), flush=True)


def command(function: F) -> F:
    """A user's mistake ends with one line on stderr and status 1, never with a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        sys.path.insert(0, str(Path.cwd()))  # operators are often in the directory one works in
        try:
            return function(*args, **kwargs)
        except StateflowError as error:
            if kwargs.get("as_json"):
                emit({"error": error.to_wire()})
            errors.print(f"[bold red]{escape(error.code)}[/]{escape(str(error)[len(error.code) :])}", highlight=False)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            os._exit(1)

    return run  # type: ignore[return-value]


def log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(message)s" if errors.is_terminal else "%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[RichHandler(console=errors, show_path=False)] if errors.is_terminal else None,
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
