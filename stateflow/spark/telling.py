"""Shortens what Spark raises in the driver for an error in an operator's task: the error's line, first and last.

Spark wraps the error in the Python worker's traceback, its own and Java's, three times over for a streaming query.
Between the two lines is the operator's own traceback, if the operator failed. ``STATEFLOW_TRACEBACKS=1`` shows all the
rest.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

from stateflow.errors import StateflowError, tracebacks_wanted

#: an error raised by a task, or one that was shortened before and passed through a function in foreachBatch
_RAISED = re.compile(r"(?:stateflow\.errors|pyspark\.errors\.exceptions\.captured)\.\w+: ((\w+): .+)")
#: lines that follow the operator's traceback in Spark's text
_NOT_OURS = re.compile(r"^\s*(at \S+\(|SQLSTATE: |=== |\.\.\. \d+ more|Driver stacktrace:|Caused by: |\[|$)")


def raised_in(text: str) -> tuple[str, str, str] | None:
    """Returns (line, code, the operator's traceback or an empty text) of the last stateflow error in a text.

    Returns None where there is none.
    """
    found = [match for match in _RAISED.finditer(text) if match[2] in StateflowError.registry]
    if not found:
        return None
    line, code = found[-1][1].removesuffix(" SQLSTATE: 38000").rstrip(), found[-1][2]
    behind = text[found[-1].end() :].lstrip("\n").splitlines()
    details: list[str] = []
    for each in behind:
        if _NOT_OURS.match(each):
            break
        if each != line:
            details.append(each)
    return line, code, "\n".join(details)


def told(text: str) -> str | None:
    """Returns the shortened text, with the error's line first and last. None: the text has no error of stateflow."""
    found = raised_in(text)
    if found is None:
        return None
    line, _, details = found
    return f"{line}\n{details}\n{line}" if details else line


def tell_briefly() -> None:
    """Makes PySpark shorten its exceptions in this process, from now on.

    Errors that are not stateflow's stay as they are.
    """
    if find_spec("py4j") is not None:  # a client of Spark Connect may lack py4j
        _tell_briefly_in_classic()
    if "pyspark.sql.connect.client.core" in sys.modules:
        _tell_briefly_over_connect()


def _tell_briefly_over_connect() -> None:
    """Patches Spark Connect's client to shorten exceptions.

    The setting ``spark.sql.connect.serverStacktrace.enabled`` still shows the server's traces.
    """
    from pyspark.sql.connect.client import core

    if hasattr(core.convert_exception, "stateflow"):
        return
    convert = core.convert_exception

    def converted(*arguments: Any, **named: Any) -> Any:
        made = convert(*arguments, **named)
        said = None if tracebacks_wanted() else told(str(made))
        if said is not None:
            made._message, made._server_stacktrace, made._display_stacktrace = said, None, False
        return made

    converted.stateflow = True  # type: ignore[attr-defined]
    core.convert_exception = converted


def _tell_briefly_in_classic() -> None:
    from pyspark.errors.exceptions import captured

    if hasattr(captured.convert_exception, "stateflow"):
        return
    convert = captured.convert_exception

    def converted(error: Any) -> Any:
        made = convert(error)
        said = None if tracebacks_wanted() else told(_all_said(made))
        if said is None:
            return made
        # PySpark raises UnknownException as Py4J has it, with all of Java's frames; PythonException makes its text from
        # Java's again
        if isinstance(made, (captured.UnknownException, captured.PythonException)):
            return captured.PythonException(desc=said, stackTrace="")
        made._desc, made._stackTrace, made._cause = said, "", None
        return made.with_traceback(None)

    converted.stateflow = True  # type: ignore[attr-defined]
    captured.convert_exception = converted


def _all_said(error: Any) -> str:
    said = []
    while error is not None:
        said.append(str(error._desc))
        error = error._cause
    return "\n".join(said)
