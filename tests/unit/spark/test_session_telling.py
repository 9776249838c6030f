"""An error of stateflow's gives its one line, first and last, however it was wrapped."""

from __future__ import annotations

import subprocess
import sys
import traceback

import pytest

from stateflow.client import Cluster
from stateflow.errors import TRACEBACKS, OperatorFailed, Unavailable
from stateflow.spark.session import raised_in, told

LINE = "operator_failed: process() raised ValueError: no threes (operator=Op partition=3): mend the row"
OWN = '  File "/ops.py", line 9, in process\n    raise ValueError("no threes")\nValueError: no threes'
WORKER = f"""[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "/stateflow/spark/task.py", line 101, in __call__
    delivery = self._router().deliver(sent, schema, rows)
stateflow.errors.OperatorFailed: {LINE}

{OWN}
{LINE}
 SQLSTATE: 38000"""
JAVA = "\n\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1097)\n\tat java.base/x.Y(Z.java:1)"
STREAM = (
    f"[STREAM_FAILED] Query [id = 1] terminated with exception: {WORKER} SQLSTATE: XXKST\n=== Streaming Query ===\nx"
)


@pytest.mark.parametrize("text", [WORKER, WORKER + JAVA, STREAM, f"{STREAM}\n{WORKER}{JAVA}"])
def test_what_a_task_raised_comes_first_and_last(text: str) -> None:
    assert told(text) == f"{LINE}\n{OWN}\n{LINE}"
    assert raised_in(text) == (LINE, "operator_failed", OWN)


def test_what_foreach_batch_let_through_is_told_once() -> None:
    inner = (
        f"Traceback (most recent call last):\npyspark.errors.exceptions.captured.PythonException: {LINE}\n{OWN}\n{LINE}"
    )
    outer = (
        f"[STREAM_FAILED] Query [id = 1] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] {inner}\n{JAVA}"
    )
    assert told(outer) == f"{LINE}\n{OWN}\n{LINE}"


def test_without_an_operators_traceback_it_is_the_line_alone() -> None:
    line = "null_key: the key column 'k' is null in 2 rows (operator=Op): filter them"
    assert told(f"Job aborted.\nstateflow.errors.NullKey: {line}\n SQLSTATE: 38000{JAVA}") == line


@pytest.mark.parametrize(
    "text",
    ["", "Path does not exist: file:/x", "mine.errors.OperatorFailed: operator_failed: x", "stateflow.errors.X: y: z"],
)
def test_errors_of_others_stay_as_they_are(text: str) -> None:
    assert told(text) is None


def test_an_operators_failure_ends_with_its_line() -> None:
    error = OperatorFailed("process() raised ValueError: no threes", remedy="mend the row", traceback=f"\n{OWN}")
    error.located(operator="Op", partition=3)
    shown = "".join(traceback.format_exception_only(error)).splitlines()
    assert shown[0] == f"stateflow.errors.OperatorFailed: {LINE}"
    assert shown[-1] == LINE
    assert "ValueError: no threes" in shown


@pytest.mark.parametrize(("wanted", "most"), [("", 7), ("0", 7), ("1", 200)])
@pytest.mark.thorough
def test_an_error_shows_where_it_was_called_and_causes_on_request(
    monkeypatch: pytest.MonkeyPatch, wanted: str, most: int
) -> None:
    monkeypatch.setenv(TRACEBACKS, wanted)
    program = "from stateflow import StreamClient\nStreamClient('127.0.0.1:1', 'Op', 's')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("stateflow.errors.Unavailable: unavailable: no answer from the controller")
    assert len(lines) <= most
    assert ("direct cause" in done.stderr) is (wanted == "1")


@pytest.mark.thorough
def test_a_caller_can_go_on_asking_an_error_what_it_is() -> None:
    with pytest.raises(Unavailable) as caught:
        Cluster("127.0.0.1:1").status()
    assert caught.value.code == "unavailable"
    assert caught.value.__cause__ is None
