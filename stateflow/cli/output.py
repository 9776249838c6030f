"""Output of commands: tables for people, one JSON object for machines, one line on stderr for errors."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from stateflow.about import ids_of
from stateflow.errors import StateflowError
from stateflow.settings import LogSettings

F = TypeVar("F", bound=Callable[..., Any])
#: width without a terminal: no line is cut or folded, so that an id in a pipe is whole
_UNFOLDED = 1 << 15
_looked_at = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
#: all that is printed is plain text: nothing in it is markup or an emoji. Style is in Text and Style
console = Console(markup=False, emoji=False, width=None if _looked_at else _UNFOLDED)
errors = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)


def show_everything() -> None:
    """Escapes characters that the terminal cannot show, in all that this process prints. An ASCII or Latin-1 terminal
    lacks most characters, and every terminal lacks halves of surrogate pairs, which names of files may have. Otherwise
    the command would end in the middle of its output. Standard error escapes them by itself."""
    found = sys.stdout
    if not isinstance(found, io.TextIOWrapper):  # a program has replaced it
        return
    try:
        found.reconfigure(errors="backslashreplace")
    except OSError:  # in a forked process: a pipe took the place of the file that the object was made for
        sys.stdout = os.fdopen(found.fileno(), "w", encoding=found.encoding, errors="backslashreplace", closefd=False)


def emit(value: dict[str, Any]) -> None:
    """Prints one JSON object, on one line, at once."""
    print(json.dumps(_finite(value), default=str, allow_nan=False), file=_for_emit, flush=True)


#: stream of :func:`emit`; None: standard output
_for_emit: TextIO | None = None


def keep_stdout() -> None:
    """Keeps standard output for :func:`emit`: all other output, as that of operators, goes to standard error. The
    process that started this one reads the lines that it needs, and then no more: once the pipe is full, the next print
    would block for ever."""
    global _for_emit  # noqa: PLW0603 - a process has one standard output
    if _for_emit is None:
        _for_emit = os.fdopen(os.dup(1), "w", encoding="utf-8")
        flush()
        os.dup2(2, 1)


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass for :func:`emit`, with their values as they are."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _finite(value: Any) -> Any:
    """Replaces infinite numbers by null: JSON has none."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flush() -> None:
    if sys.stdout is not None:  # None when a process is started without one
        sys.stdout.flush()


@contextlib.contextmanager
def telling(*, as_json: bool = False) -> Iterator[None]:
    """Reports errors of users and their environment as one line on stderr, with status 1; Ctrl-C is status 130."""
    try:
        yield
    except StateflowError as error:
        _tell(error, as_json)
    except KeyboardInterrupt:
        _end(130)
    except BrokenPipeError:  # the reader has seen enough
        os._exit(1)
    except Exception as error:
        from stateflow.storage.faults import meaning  # imports the database

        meant = meaning(error)
        if meant is None:  # a defect of stateflow keeps its traceback
            raise
        _tell(meant, as_json)


def _tell(error: StateflowError, as_json: bool) -> NoReturn:
    with contextlib.suppress(OSError):  # the reader may be gone
        if as_json:
            emit({"error": error.to_wire()})
    with contextlib.suppress(OSError):
        errors.print(Text.assemble((error.code, "bold red"), str(error)[len(error.code) :]), highlight=False)
    _end(1)


def _end(status: int) -> NoReturn:
    try:
        flush()
    except (OSError, ValueError):
        os._exit(status)  # otherwise Python tries again, and prints a traceback
    raise typer.Exit(status) from None


def guarded(function: F) -> F:
    """Wraps a command so that a user's mistake ends with one line on stderr and status 1, never with a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        sys.path.insert(0, str(Path.cwd()))  # operators are often in the working directory
        with telling(as_json=bool(kwargs.get("as_json"))):
            result = function(*args, **kwargs)
            flush()  # an error, such as a full disk, can still be reported here
            return result

    return run  # type: ignore[return-value]


def shown_time(at_us: int | None, *, exactly: bool = False) -> str:
    """Returns a time of UTC as tables show it; empty for None.

    Args:
        at_us: microseconds since 1970.
        exactly: with milliseconds.
    """
    if at_us is None:
        return ""
    try:
        at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    except (ValueError, OverflowError, OSError, TypeError):  # a time out of a damaged ledger
        return f"{at_us} µs"
    return f"{at:%Y-%m-%d %H:%M:%S}" + (f".{at_us // 1000 % 1000:03}" if exactly else "")


class JsonLines(logging.Formatter):
    """A formatter that writes one object a line: ``time`` (RFC 3339, UTC), ``level``, ``who``, ``logger``, ``message``;
    the ids that the line is about, see :mod:`stateflow.about`; and ``exception`` where there is one."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        said: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "who": self._who,
            "logger": record.name,
            "message": record.getMessage(),
            **ids_of(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)  # ASCII only: a stream that escapes characters would break the JSON


def log_to_stderr(verbose: bool, who: str, *, one_of_several: bool = False) -> None:
    """Logs to standard error, in the format of the settings.

    Args:
        who: the process that logs; lines name it where it is ``one_of_several`` that log to one place.
    """
    level, says = logging.DEBUG if verbose else logging.INFO, f"{who}: " if one_of_several else ""
    if LogSettings().format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines(who))
        logging.basicConfig(level=level, handlers=[handler])
        return
    logging.basicConfig(
        level=level,
        format=f"{says}%(message)s" if errors.is_terminal else f"%(asctime)s %(levelname)s {says}%(name)s: %(message)s",
        handlers=[RichHandler(console=errors, show_path=False)] if errors.is_terminal else None,
    )


def size(count: float) -> str:
    """Returns a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
