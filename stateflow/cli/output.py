"""How commands speak: tables for people, one JSON object for machines, one line on stderr for errors."""

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
#: where nobody looks at the lines, none is cut or folded: an id in a pipe is whole
_UNFOLDED = 1 << 15
_looked_at = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
#: what is printed is text, wherever it comes from: nothing in it is markup or an emoji. Style is in Text and Style
console = Console(markup=False, emoji=False, width=None if _looked_at else _UNFOLDED)
errors = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)


def show_everything() -> None:
    """Has what a terminal cannot show written as an escape, whoever writes it. An ASCII or Latin-1 terminal lacks most
    characters, and any lacks half of a surrogate pair, as names of files may have. Else the command would end in the
    middle of its output. Standard error does so by itself.
    """
    found = sys.stdout
    if not isinstance(found, io.TextIOWrapper):  # a program has put something of its own there
        return
    try:
        found.reconfigure(errors="backslashreplace")
    except OSError:  # of a forked process, which was given a pipe in place of the file that this was made for
        sys.stdout = os.fdopen(found.fileno(), "w", encoding=found.encoding, errors="backslashreplace", closefd=False)


def emit(value: dict[str, Any]) -> None:
    """One JSON object, on one line, at once."""
    print(json.dumps(_finite(value), default=str, allow_nan=False), file=_for_emit, flush=True)


#: None: standard output
_for_emit: TextIO | None = None


def keep_stdout() -> None:
    """For :func:`emit`: what anybody else prints, as operators do, goes to standard error. Whoever started this process
    reads what it is to read, and then no more: a pipe that is full would have the next one who prints wait for ever."""
    global _for_emit  # noqa: PLW0603 - a process has one standard output
    if _for_emit is None:
        _for_emit = os.fdopen(os.dup(1), "w", encoding="utf-8")
        flush()
        os.dup2(2, 1)


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass holds, for :func:`emit`; its values as they are."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _finite(value: Any) -> Any:
    """What has no bound is null: JSON has no word for it."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flush() -> None:
    if sys.stdout is not None:  # it is when a process is started without one
        sys.stdout.flush()


@contextlib.contextmanager
def telling(*, as_json: bool = False) -> Iterator[None]:
    """What users and their environment did is one line on stderr and status 1; Ctrl-C is status 130."""
    try:
        yield
    except StateflowError as error:
        _tell(error, as_json)
    except KeyboardInterrupt:
        _end(130)
    except BrokenPipeError:  # whoever read it has seen enough
        os._exit(1)
    except Exception as error:
        from stateflow.storage.faults import meaning  # with it comes the database

        meant = meaning(error)
        if meant is None:  # a fault of ours is told with all that there is to know of it
            raise
        _tell(meant, as_json)


def _tell(error: StateflowError, as_json: bool) -> NoReturn:
    with contextlib.suppress(OSError):  # there may be nobody to tell
        if as_json:
            emit({"error": error.to_wire()})
    with contextlib.suppress(OSError):
        errors.print(Text.assemble((error.code, "bold red"), str(error)[len(error.code) :]), highlight=False)
    _end(1)


def _end(status: int) -> NoReturn:
    try:
        flush()
    except (OSError, ValueError):
        os._exit(status)  # else it is tried again, and told with a traceback
    raise typer.Exit(status) from None


def guarded(function: F) -> F:
    """A user's mistake ends with one line on stderr and status 1, never with a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        sys.path.insert(0, str(Path.cwd()))  # operators are often in the directory one works in
        with telling(as_json=bool(kwargs.get("as_json"))):
            result = function(*args, **kwargs)
            flush()  # here it can still be said that there is no room for it
            return result

    return run  # type: ignore[return-value]


def shown_time(at_us: int | None, *, exactly: bool = False) -> str:
    """Of UTC, as tables have it; empty: there is none. Args: at_us: since 1970. exactly: with milliseconds."""
    if at_us is None:
        return ""
    try:
        at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    except (ValueError, OverflowError, OSError, TypeError):  # as a damaged ledger has it
        return f"{at_us} µs"
    return f"{at:%Y-%m-%d %H:%M:%S}" + (f".{at_us // 1000 % 1000:03}" if exactly else "")


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (RFC 3339, UTC), ``level``, ``who``, ``logger``, ``message``; the ids that it is
    about, see :mod:`stateflow.about`; and ``exception`` where there is one."""

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
        return json.dumps(said, default=str)  # of ASCII: a stream that escapes would make no JSON of it


def log_to_stderr(verbose: bool, who: str, *, one_of_several: bool = False) -> None:
    """Args: who: logs; said in each line where it is ``one_of_several`` that log to one place."""
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
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
