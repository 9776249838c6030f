"""Replicas inside a Spark application: Spark tries their tasks again, and a standby has what a lost executor had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from stateflow.errors import InvalidArgument
from stateflow.spark import start_cluster
from tests.integration.test_secrets import Secrets

pytestmark = [pytest.mark.spark, pytest.mark.processes]
ROOT = Path(__file__).parents[2]
FILES, ROWS, KEYS = 24, 40, 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rows to read."""
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        seq = list(range(number * ROWS, number * ROWS + ROWS))
        rows = {"seq": seq, "k": [f"k{each % KEYS}" for each in seq], "kind": ["a"] * ROWS, "v": [1] * ROWS}
        pq.write_table(pa.table(rows), tmp_path / "in" / f"{number:03d}.parquet")
    return tmp_path


def driven(what: str, master: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Runs the driver, checks that each row was applied once, and returns what it found and its other output."""
    found, said = found_by(what, master, folder)
    rows = len(list((folder / "in").glob("*.parquet"))) * ROWS
    wanted = Counter(f"k{seq % KEYS}" for seq in range(rows))
    assert {row["key"]: row["value"] for row in found["state"]} == dict(wanted)
    given = [row for file in (folder / "out").glob("*.parquet") for row in pq.ParquetFile(file).read().to_pylist()]
    assert sorted(row["seq"] for row in given) == list(range(rows))
    assert {(row["k"], row["n"]) for row in given} == {
        (k, n) for k, count in wanted.items() for n in range(1, count + 1)
    }
    return found, said


def found_by(what: str, master: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Runs the driver, and returns what it found and its other output."""
    command = [sys.executable, "-m", "tests.integration.inside_driver", what, master, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # executors have another working directory
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    # a driver that ends has workers in its process that go on starting executors, each in vain
    said = [line for line in done.stderr.splitlines() if "Failed to launch executor" not in line]
    assert done.returncode == 0, "\n".join(said)[-5000:]
    *said, last = done.stdout.splitlines()
    return json.loads(last), done.stderr + "\n".join(said)


@pytest.mark.parametrize("master", ["local[4,10]", "local-cluster[3,1,1024]"])
def test_rows_flow_on_whatever_their_replicas_run_in_is_killed(master: str, folder: Path) -> None:
    found, _ = driven("killed", master, folder)
    first, second = found["before"]
    lost = master.startswith("local-cluster")
    back = [name for name in found["alive"] if name == first or (lost and name.startswith(f"{first}-"))]
    assert back, "it came back with its data; of several executors Spark may have chosen another one"
    assert (second in found["alive"]) == (not lost)
    assert any(name.startswith(f"{second}-") for name in found["alive"]) == lost, "another one took its place"


def test_an_executor_that_is_decommissioned_loses_nothing_and_ends(folder: Path) -> None:
    """An executor that is decommissioned moves away what it has, of which there is no copy, and ends."""
    found, _ = driven("decommissioned", "local-cluster[3,1,1024]", folder)
    second = found["before"][1]
    assert found["owned"][second] > 0
    left = [move for move in found["moves"] if move["source"] == second]
    assert [move["state"] for move in left] == ["COMPLETED"] * found["owned"][second], "all of it moved away"
    assert second not in found["alive"]


def test_with_certificates_rows_flow_and_nobody_else_is_let_in(folder: Path) -> None:
    found, said = driven("secured", "local-cluster[3,1,1024]", folder)
    assert found["identities"] == [f"node/{name}" for name in found["before"]], "a replica speaks for itself only"
    assert found["modes"] == ["ca.pem 644", "cert.pem 644", "key.pem 600"]
    status, why = found["refused"]
    assert status == 1
    assert why.splitlines()[-1].startswith("unavailable: no answer from the controller"), why
    assert found["health"] == [0, 1], "a replica answers who has a certificate, and nobody else"
    assert found["left"], "this process is who it was before"
    state = {row["key"]: row["value"] for row in found["state"]}
    assert found["read"] == {"n": state, "one": [state["k1"]], "states": ["by_kind", "kinds", "n", "total"]}
    secrets = Secrets(
        found["secrets"]
        | {f"key {number}": "".join(key.splitlines()[1:-1]) for number, key in enumerate(found["keys"])}
    )
    assert any(" replica --name " in text.replace("\0", " ") for text in found["arguments"])
    shown = [said, *found["arguments"], *found["environments"]]
    shown += [path.read_text(errors="replace") for path in (folder / "events").rglob("*") if path.is_file()]
    assert any("SparkListenerSQLExecutionStart" in text for text in shown), "Spark wrote its event log"
    assert any("MapInArrow" in text for text in shown), "plans are among it"
    assert [names for text in shown if (names := secrets.within(text.encode()))] == []
    assert secrets.within(("x" + found["secrets"]["enrolment"]).encode()) == {"enrolment"}, "it finds what is there"


@pytest.mark.parametrize("ledger", [False, True], ids=["another-ledger", "its-ledger"])
def test_another_application_goes_on_from_a_savepoint(ledger: bool, folder: Path) -> None:
    """Another application goes on: with a ledger of its own it restores, with the former ledger replicas take over."""
    for file in sorted((folder / "in").iterdir())[8:]:
        file.unlink()
    if ledger:
        (folder / "ledger").mkdir()
    first, _ = found_by("kept", "local[4,10]", folder)
    assert 4 < first["batches"] < 8
    found, _ = driven("restored", "local[4,10]", folder)
    assert first["batches"] * ROWS <= found["rows"] <= (first["batches"] + 1) * ROWS, "the state of the savepoint"
    assert found["first"] == first["batches"], "the query goes on where it was"


@pytest.mark.parametrize("master", ["local[5,10]", "local-cluster[2,2,1024]"])
def test_replicas_that_leave_no_slot_are_refused_before_anything_starts(master: str, tmp_path: Path) -> None:
    found, _ = found_by("crowded", master, tmp_path)
    assert found["said"] == (
        "invalid_argument: 2 replicas leave no slot for queries: Spark has 2: "
        "use more executors or cores, or fewer replicas"
    )
    assert found["started"] == []


def test_what_cannot_be(spark: SparkSession) -> None:
    with pytest.raises(InvalidArgument, match=r"local\[2\] does not retry failed tasks"):
        start_cluster(spark, 1)
    for replicas, standbys in ((0, 0), (2, 2), (1, -1)):
        with pytest.raises(InvalidArgument, match="replicas cannot have"):
            start_cluster(spark, replicas, standbys=standbys)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        start_cluster(spark, 1, tls=True, insecure=True)
