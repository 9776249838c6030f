"""The demonstration as its users run it, and a run whose verdict is no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stateflow.spark.session import JETSTREAM
from tests.integration.nats_support import URL, ask
from tests.integration.test_java import marked_processes
from tests.versions import lacks, needs

pytestmark = [pytest.mark.spark, pytest.mark.processes]

REPOSITORY = Path(__file__).resolve().parents[2]
SUMMARY = {
    "state_equal",
    "output_equal",
    "moves_completed",
    "moves_failed",
    "pause_ms_max",
    "pause_ms_median",
    "rows",
    "rows_per_s",
}

#: The command, but one row too many reaches the operator before the comparison, for an aircraft it knows.
SPOILED = """
import dataclasses, json, sys
from pathlib import Path
from stateflow.cli import main
from stateflow.demo import run

original = run.run_demo

def spoil(cluster):
    key = cluster.read_state(run.OPERATOR, "flights").to_pylist()[0]["key"]
    row = {"seq": 10**9, "tailnum": key, "carrier": "ZZ", "dest": "ZZZ", "arr_delay": 1.0}
    [output] = cluster.stream(run.OPERATOR, source="spoiler").send([row])
    Path("spoiled.json").write_text(json.dumps(output))

def spoiled(options, **arguments):
    result = original(dataclasses.replace(options, before_compare=spoil), **arguments)
    Path("differences.json").write_text(json.dumps(list(result.differences)))
    return result

run.run_demo = spoiled
main()
"""


def demo(directory: Path, *program: str, rows: int, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "STATEFLOW_TEST_MARK": str(directory),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
    }
    # other tests run beside it: a tight budget needs the machine to itself
    arguments = ["--rows", str(rows), "--max-pause", "30s", "--out", "out", "--json", *options]
    done = subprocess.run(
        [sys.executable, *program, "demo", *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert marked_processes(f"STATEFLOW_TEST_MARK={directory}") == []
    assert "Traceback" not in done.stderr, done.stderr[-6000:]
    return done


def test_the_demo_ends_well(tmp_path: Path) -> None:
    done = demo(tmp_path, "-m", "stateflow", rows=20_000)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    summary = json.loads(line)
    assert set(summary) == SUMMARY
    assert summary["state_equal"] is True
    assert summary["output_equal"] is True
    assert summary["moves_completed"] >= 12
    assert summary["moves_failed"] == 0, done.stderr[-3000:]
    assert summary["rows"] == 20_000
    assert summary["rows_per_s"] > 0
    assert 0 < summary["pause_ms_median"] <= summary["pause_ms_max"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["demo.html", "demo.png", "plotly.min.js"]
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "</html>" in (tmp_path / "out" / "demo.html").read_text()


def demo_streams() -> set[str]:
    """Streams of demonstrations on the NATS server, which others may use, too."""
    if not URL:
        return set()
    found = ask(URL, lambda js: js.streams_info())
    return {info.config.name for info in found if info.config.name.startswith("stateflow-demo-")}


@needs(JETSTREAM)
def test_the_demo_without_a_nats_server_says_so(tmp_path: Path) -> None:
    done = demo(
        tmp_path, "-m", "stateflow", rows=3_000, options=["--source", "jetstream", "--nats", "nats://127.0.0.1:1"]
    )
    assert done.returncode == 1
    assert "\nunavailable: the NATS server does not answer" in done.stderr


def test_one_row_too_many_is_found_and_told_by_the_exit_status(tmp_path: Path) -> None:
    """One row too many makes the states unequal and the exit status 1; the outputs stay equal.

    The rows come over JetStream where there is a server and this Spark can read it.
    """
    (tmp_path / "spoiled.py").write_text(SPOILED)
    before = demo_streams()
    streamed = bool(URL) and not lacks(JETSTREAM)
    options = ["--source", "jetstream", "--nats", URL] if streamed else ()
    done = demo(tmp_path, "spoiled.py", rows=3_000, options=options)
    assert (tmp_path / "spoiled.json").exists(), done.stderr[-3000:]
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["state_equal"] is False
    assert summary["output_equal"] is True, "the row did not come through Spark"
    assert summary["rows"] == 3_000
    assert summary["moves_failed"] == 0, done.stderr[-3000:]
    spoiled = json.loads((tmp_path / "spoiled.json").read_text())
    key, count = spoiled["tailnum"], spoiled["flights"]
    assert count > 1, "a key that was there before"
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert {text.split(":")[0] for text in differences} == {f"key {key!r}"}, "that key, and no other"
    assert f"key {key!r}: flights: expected {count - 1}, got {count}" in differences
    assert any("ZZZ" in text for text in differences)
    assert any("ZZ" in text and "carriers" in text for text in differences)
    page = (tmp_path / "out" / "demo.html").read_text()
    assert key in page
    assert ("slices of a JetStream stream" in page) is streamed
    assert demo_streams() <= before, "its stream is gone"
