"""What Spark raises in the driver for an error that a task of an operator had: that error's line, first and last.

Spark wraps it in the Python worker's traceback, its own and Java's, thrice over for a streaming query. What is between
the two lines is the operator's own traceback, if it failed. All the rest is shown with ``STATEFLOW_TRACEBACKS=1``.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

from stateflow.errors import StateflowError, tracebacks_wanted

#: by a task; or told briefly already, to a function in foreachBatch that let it through
_RAISED = re.compile(r"(?:stateflow\.errors|pyspark\.errors\.exceptions\.captured)\.\w+: ((\w+): .+)")
#: what follows the operator's traceback in Spark's text
_NOT_OURS = re.compile(r"^\s*(at \S+\(|SQLSTATE: |=== |\.\.\. \d+ more|Driver stacktrace:|Caused by: |\[|$)")


def raised_in(text: str) -> tuple[str, str, str] | None:
    """(line, code, the operator's traceback or nothing) of the last error in it that is one of stateflow's."""
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
    """First and last what happened; None: it is about something else."""
    found = raised_in(text)
    if found is None:
        return None
    line, _, details = found
    return f"{line}\n{details}\n{line}" if details else line


def tell_briefly() -> None:
    """Have PySpark's exceptions say it so in this process, from now on. Those of others stay as they are."""
    if find_spec("py4j") is not None:  # a client of Spark Connect may do without the JVM's
        _tell_briefly_in_classic()
    if "pyspark.sql.connect.client.core" in sys.modules:
        _tell_briefly_over_connect()


def _tell_briefly_over_connect() -> None:
    """Traces of the server are shown by whoever asks for them, see ``spark.sql.connect.serverStacktrace.enabled``."""
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
        # the first is raised as Py4J has it, with all of Java's frames; the second makes its text of Java's anew
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
