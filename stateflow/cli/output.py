"""Output of commands, and options that many commands share.

Commands print tables for people, one JSON object for machines, and one line on stderr for errors. On a terminal, work
that takes longer than a second shows a progress line, which is removed at the end (:func:`waiting`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO, TypeVar, cast, get_type_hints
from uuid import UUID

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from stateflow.errors import InvalidArgument, StateflowError
from stateflow.private import state_directory
from stateflow.settings import LogSettings
from stateflow.tracing import ids_of
from stateflow.types import LABEL, SEQUENCE_MAX, MoveOptions, check_name, shown
from stateflow.types import Order as MoveOrder

F = TypeVar("F", bound=Callable[..., Any])
#: width of output that is not a terminal: so wide that no line is cut or folded, and ids in a pipe are complete
_UNFOLDED = 1 << 15
if not os.environ.get("COLUMNS", "1").strip("0"):  # rich would take it for a width, and print nothing
    del os.environ["COLUMNS"]
_looked_at = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
#: printed strings are plain text, without markup and emoji codes; Text objects have styles
console = Console(markup=False, emoji=False, width=None if _looked_at else _UNFOLDED)
errors = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)


def show_everything() -> None:
    """Makes standard output escape characters that the terminal cannot show.

    Otherwise such a character would end the command in the middle of its output. An ASCII or Latin-1 terminal lacks
    most characters, and every terminal lacks halves of surrogate pairs, which file names may contain. Standard error
    escapes such characters by itself.
    """
    found = sys.stdout
    if not isinstance(found, io.TextIOWrapper):  # a program has replaced it
        return
    try:
        found.reconfigure(errors="backslashreplace")
    except OSError:  # in a forked process, a pipe has replaced the file for which the object was created
        sys.stdout = os.fdopen(found.fileno(), "w", encoding=found.encoding, errors="backslashreplace", closefd=False)


def emit(value: dict[str, Any]) -> None:
    """Prints one JSON object, on one line, at once.

    Values of a state that JSON lacks, such as times, become texts. Raises TypeError for any other object, whose text
    would be Python's; a report is passed as its ``to_dict()``.
    """
    print(json.dumps(_finite(value), default=_text_of, allow_nan=False), file=_for_emit, flush=True)


#: stream of :func:`emit`; None: standard output
_for_emit: TextIO | None = None


def keep_stdout() -> None:
    """Reserves standard output for :func:`emit`: all other output, such as that of operators, goes to standard error.

    The parent process reads only the lines that it needs from this process's standard output. Other output would fill
    the pipe, and the next print would block.
    """
    global _for_emit  # noqa: PLW0603 - a process has one standard output
    if _for_emit is None:
        _for_emit = os.fdopen(os.dup(1), "w", encoding="utf-8")
        flush()
        os.dup2(2, 1)


def _text_of(value: object) -> str:
    if isinstance(value, date | time | timedelta | Decimal | UUID | bytes):
        return str(value)
    raise TypeError(f"{value!r} has no form in JSON")


def _finite(value: Any) -> Any:
    """Returns the value with None in place of infinite numbers and NaN, which JSON cannot represent."""
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
    """Runs a block, and reports an error of the user or the environment as one line on stderr.

    The process then exits with status 1; after Ctrl-C, with status 130.
    """
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

        meant = _of_words(error) or meaning(error) or _of_path(error)
        if meant is None:  # a defect of stateflow keeps its traceback
            raise
        _tell(meant, as_json)


def _of_words(error: Exception) -> StateflowError | None:
    """Returns the error to show for an argument that is not UTF-8, such as one typed into a Latin-1 terminal; None: it
    is another error."""
    if not isinstance(error, UnicodeEncodeError) or not re.search("[\ud800-\udfff]", error.object):
        return None
    return InvalidArgument(
        f"{shown(error.object)} is not UTF-8", remedy="use a terminal whose encoding is UTF-8, and type it again"
    )


#: errors of a path that cannot be the file or directory that a command needs; a missing file may be one of stateflow's
_PATH_ERRORS = frozenset({errno.ENAMETOOLONG, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP})


def _of_path(error: Exception) -> StateflowError | None:
    """Returns the error to show for a path that cannot be used; None: it is another error."""
    number, path = getattr(error, "errno", None), getattr(error, "filename2", None) or getattr(error, "filename", None)
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib before Python 3.13
        number = errno.ELOOP
    elif not isinstance(error, OSError) or not (number in _PATH_ERRORS or _is_of_mkdir(error)):
        return None
    return InvalidArgument(
        f"a path cannot be used: {os.strerror(number or 0)}",
        remedy="correct the path, or name another file or directory",
        path=path,
    )


def _is_of_mkdir(error: OSError) -> bool:
    """Tells whether a file system, such as /proc, makes no directory: then the missing path is none of stateflow's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return error.errno == errno.ENOENT and trace is not None and trace.tb_frame.f_code.co_name == "mkdir"


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
        os._exit(status)  # otherwise Python would flush again, and print a traceback
    raise typer.Exit(status) from None


def guarded(function: F) -> F:
    """Wraps a command so that a user's mistake ends with one line on stderr and status 1, never with a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with telling(as_json=bool(kwargs.get("as_json"))):
            sys.path.insert(0, _working_directory())  # operators are often there
            result = function(*args, **kwargs)
            flush()  # an error, such as a full disk, can still be reported here
            return result

    return run  # type: ignore[return-value]


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise InvalidArgument(
            "the working directory no longer exists", remedy="change to another directory, and try again"
        ) from None


def shown_time(at_us: int | None, *, exactly: bool = False) -> str:
    """Returns a time in UTC in the form that tables show; empty for None.

    Args:
        at_us: microseconds since 1970.
        exactly: True shows milliseconds.
    """
    if at_us is None:
        return ""
    try:
        at = datetime.fromtimestamp(at_us // 1_000_000, UTC)
    except (ValueError, OverflowError, OSError, TypeError):  # a time out of a damaged ledger
        return f"{at_us} µs"
    return f"{at:%Y-%m-%d %H:%M:%S}" + (f".{at_us // 1000 % 1000:03}" if exactly else "")


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object a line. The object's keys are ``time`` (RFC 3339, UTC), ``level``,
    ``who``, ``logger``, ``message``, the line's ids (see :mod:`stateflow.tracing`), and ``exception`` if there is
    one."""

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
        who: name of the process that logs.
        one_of_several: True: several processes log to the same stream, so lines of text begin with ``who``.
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
    """Returns a number of bytes with a binary unit, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# -- Progress --------------------------------------------------------------------------------------------------------

T = TypeVar("T")
#: seconds before a progress line appears
QUIET_S = 1.0
LOOK_S = 0.25


@dataclass(slots=True)
class Shown:
    """The progress that a progress line shows.

    Attributes:
        what: description of the work.
        total: number of parts; 0: not known.
        over: set when the work has ended.
    """

    what: str
    done: int = 0
    total: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def of(self, done: int, total: int) -> None:
        self.done, self.total = done, total


@contextmanager
def waiting(
    what: str,
    *,
    as_json: bool = False,
    look: Callable[[Shown], None] | None = None,
    console: Console = errors,
    quiet_s: float = QUIET_S,
) -> Iterator[Shown]:
    """Shows a progress line while the block runs, unless output is not a terminal or is JSON.

    Args:
        look: called at intervals to update the progress. Its errors are ignored, because the work itself continues.
        quiet_s: seconds before the line appears.
    """
    shown = Shown(what)
    if as_json or not console.is_terminal:
        yield shown
        return
    drawing = threading.Thread(target=_draw, args=(shown, look, console, quiet_s), daemon=True)
    drawing.start()
    try:
        yield shown
    finally:
        shown.over.set()
        drawing.join()


def one_by_one(what: str, items: Sequence[T], *, as_json: bool = False) -> Iterator[T]:
    """Yields the items, and shows how many of them the caller has processed."""
    with waiting(what, as_json=as_json) as shown:
        for done, item in enumerate(items):
            shown.of(done, len(items))
            yield item


def _draw(shown: Shown, look: Callable[[Shown], None] | None, console: Console, quiet_s: float) -> None:
    if shown.over.wait(quiet_s):
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(shown.what, total=None)
        while True:
            if look is not None:
                with contextlib.suppress(Exception):
                    look(shown)
            _update(progress, task, shown)
            if shown.over.wait(LOOK_S):
                return


def _update(progress: Progress, task: TaskID, shown: Shown) -> None:
    counted = f", {shown.done} of {shown.total}" if shown.total else ""
    progress.update(task, description=shown.what + counted)


# -- Options that many commands share, and the parsing of their values -----------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Controller = Annotated[
    str,
    typer.Option(
        "--controller", envvar="STATEFLOW_CONTROLLER", help="host:port of the controller, or of several: a:7070,b:7070."
    ),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        envvar="STATEFLOW_CHECKPOINTS",
        help="Checkpoint store: directory or fsspec URL, or @FILE that holds it.",
    ),
]
#: largest number that a message can carry where it counts something
NUMBER_MAX = (1 << 32) - 1
LISTEN = "127.0.0.1:7070"
#: `stateflow.cli.configuring` replaces this default if a program runs its own cluster in this directory
LOCAL = LISTEN


def allow_plain_text(wanted: bool) -> None:
    """Allows plain text over a network, for this process and those that it starts."""
    if wanted:
        os.environ["STATEFLOW_INSECURE"] = "1"


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        callback=allow_plain_text,
        expose_value=False,
        help="Allow plain text over a network, where anyone can read it and send commands.",
    ),
]


def savepoint_of(given: str | None) -> str:
    """Returns the name of a savepoint, or empty text for the newest checkpoints if no name is given.

    Raises InvalidArgument for any other text; for an empty name, too, such as that of a shell's variable that is not
    set.
    """
    return "" if given is None else check_name("savepoint", given)


#: a century: times that far away can still be reckoned with
SECONDS_MAX = 36_500 * 86_400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def default_ledger(*, make: bool = False) -> str:
    """Returns the URL of the user's default ledger, a file that does not depend on the working directory.

    Args:
        make: creates the file's directory.
    """
    from stateflow.ledger.database import sqlite_url

    file = state_directory() / "ledger.db"
    if make:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return sqlite_url(file)


def seconds(text: str) -> float:
    """Parses ``90s``, ``15m``, ``2h``, ``7d``, up to a century. Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    found = math.inf if match is None else float(match[1]) * _UNITS[match[2]]
    if found > SECONDS_MAX:
        raise InvalidArgument(f"{shown(text)} is not a duration", remedy="write 90s, 15m, 2h or 7d, up to 36500d")
    return found


def position(text: str) -> tuple[str, int]:
    """Parses ``SOURCE=BATCH``. Raises InvalidArgument."""
    source, _, batch = text.rpartition("=")
    if not source or not batch.isdecimal() or len(batch) > len(str(SEQUENCE_MAX)):
        raise InvalidArgument(
            f"{shown(text)} is not a position", remedy="write SOURCE=BATCH, as `stateflow checkpoint list` shows them"
        )
    return source, int(batch)


def labels_of(words: Sequence[str]) -> dict[str, str]:
    """Parses words of the form ``key=value``. Raises InvalidArgument."""
    labels: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and LABEL.holds(key) and LABEL.holds(value)):
            raise InvalidArgument(
                f"{shown(word)} is not a label", remedy="write key=value, each of 1 to 256 printable characters"
            )
        labels[key] = value
    return labels


MaxPause = Annotated[
    str | None, typer.Option("--max-pause", help="Pause budget of each partition, e.g. 50ms; default: no limit.")
]
MaxBandwidth = Annotated[
    str | None,
    typer.Option(
        "--max-bandwidth",
        help="Limit of all base copies of this command together, over all operators, e.g. 20MB/s; default: none. "
        "Changes written during the copy and copies for standbys are not limited.",
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        help="Strategy of the move: auto, warm-up, stop-and-restart, pause-and-copy, fluid, batched or on-demand."
    ),
]
Order = Annotated[str, typer.Option(help="Order of the partitions: number, hot-first or hot-last.")]
Patience = Annotated[
    str | None,
    typer.Option(
        "--patience", help="How long to wait for a pause within the budget, e.g. 30s, before the move is refused."
    ),
]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the planned moves and their cost.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Maximum number of moves at a time.", min=1)]
PerNode = Annotated[
    int | None,
    typer.Option("--per-node", help="Maximum number of moves at a time with the same node as source or target.", min=1),
]
PerLink = Annotated[
    int | None, typer.Option("--per-link", help="Maximum number of moves at a time between the same two sites.", min=1)
]
Policies = Annotated[
    str, typer.Option("--policy", help="ring, load, locality, or several in order of priority, e.g. locality,load.")
]


def milliseconds(text: str) -> float:
    """Parses ``50ms``, ``0.2s``, ``300us``; a bare number is milliseconds. Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9.]+)\s*(us|ms|s)?", text.strip())
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3, None: 1.0}[match[2]]
    except ValueError:
        raise InvalidArgument(f"{shown(text)} is not a duration", remedy="write 50ms or 0.2s") from None


def bytes_per_second(text: str) -> float:
    """Parses ``20MB/s``, ``1GiB/s``, ``500kB``; a bare number is bytes. Raises InvalidArgument."""
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1024, "Mi": 1 << 20, "Gi": 1 << 30}
    match = re.fullmatch(r"([0-9.]+)\s*(k|M|G|Ki|Mi|Gi)?(?:B?(?:/s)?)", text.strip())
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * units[match[2] or ""]
    except ValueError:
        raise InvalidArgument(f"{shown(text)} is not a bandwidth", remedy="write 20MB/s or 1GiB/s") from None


def byte_count(text: str) -> int:
    """Parses ``512MB``, ``4GiB``; a bare number is bytes. Raises InvalidArgument."""
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(k|M|G|T|Ki|Mi|Gi|Ti)?B?", text.strip())
    count = 0.0 if match is None else float(match[1]) * units[match[2] or ""]
    if not 1 <= count < 1 << 63:
        raise InvalidArgument(f"{shown(text)} is not a size", remedy="write 512MB or 4GiB")
    return round(count)


class _OfMoves(NamedTuple):
    """The options of moves on the command line, with their defaults."""

    max_pause: MaxPause = None
    max_bandwidth: MaxBandwidth = None
    strategy: Strategy = "auto"
    order: Order = "number"
    patience: Patience = None
    limit: Limit = None
    per_node: PerNode = None
    per_link: PerLink = None

    def parsed(self) -> MoveOptions:
        """Returns the options for a move. Raises InvalidArgument."""
        return MoveOptions(
            None if self.max_pause is None else milliseconds(self.max_pause),
            None if self.max_bandwidth is None else bytes_per_second(self.max_bandwidth),
            None if self.patience is None else milliseconds(self.patience) / 1e3,
            self.strategy,
            cast("MoveOrder", self.order),  # MoveOptions refuses any other
            self.limit,
            self.per_node,
            self.per_link,
        )


#: parses the options of moves; raises InvalidArgument
GivenMoves = Callable[[], MoveOptions]


def with_move_options(*left_out: str) -> Callable[[F], F]:
    """Decorates a command: its parameter ``options`` becomes the options of moves on its command line.

    The command's function gets a :data:`GivenMoves` for the parameter.

    Args:
        left_out: options of moves that the command does not have.
    """
    hints = get_type_hints(_OfMoves, include_extras=True)
    own = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=_OfMoves._field_defaults[name], annotation=hints[name])
        for name in _OfMoves._fields
        if name not in left_out
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def run(**given: Any) -> Any:
            moves = _OfMoves(**{each.name: given.pop(each.name) for each in own})
            return function(**given, options=moves.parsed)

        taken = [own if name == "options" else [each] for name, each in signature.parameters.items()]
        parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for part in taken for each in part]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run  # type: ignore[return-value]

    return decorate
