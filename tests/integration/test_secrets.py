"""A search for the secrets of a whole run in all that it leaves: none is found, and a planted one is."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.replay import has_compiler, make_jar
from benchmarks.replay.operators import Count
from stateflow.security.authority import write_private
from stateflow.security.certificates import PREFIX
from stateflow.security.roles import Identity
from stateflow.spark.session import REAL_TIME
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.test_connect import LIVE, client, serving
from tests.versions import lacks

pytestmark = [pytest.mark.processes, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
PASSWORD = "pw-4f2d8c61b7"
#: longer secrets are searched for in pieces of 32 characters: a part would do harm, too
PIECE = 32
#: the JVM and the workers that it starts have no token: only the driver's Python has one, once the session is there
PROGRAM = """
import os, sys
from stateflow.spark import apply_operator, register_state
from stateflow.spark.session import local_session
from tests.integration.operators import Tally

address, folder, token = sys.argv[1:]
spark = local_session(
    "secrets", spark__sql__shuffle__partitions="2", spark__eventLog__enabled="true",
    spark__eventLog__dir=f"file://{folder}/events", spark__eventLog__compress="false", spark__log__level="DEBUG",
    spark__eventLog__logBlockUpdates__enabled="true", spark__driver__extraJavaOptions="",
)
os.environ["STATEFLOW_TOKEN_FILE"] = token
spark.range(100).selectExpr("concat('secret', id % 7) k", "id v").write.parquet(f"{folder}/rows")
rows = spark.readStream.schema("k string, v long").parquet(f"{folder}/rows")
applied = apply_operator(rows, Tally, cluster=address)
applied.explain("formatted")
query = applied.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
query = query.trigger(availableNow=True).start(f"{folder}/out")
query.awaitTermination()
query.explain(True)
print(query.lastProgress)
batch = apply_operator(spark.read.parquet(f"{folder}/rows"), Tally, cluster=address, source="once")
batch.explain("extended")
print("OUT", spark.read.parquet(f"{folder}/out").count(), batch.count())
register_state(spark)
state = spark.read.format("stateflow").options(cluster=address, operator="Tally", state="n").load()
state.explain("extended")
print("STATE", sorted((row.key, row.value) for row in state.where("key in ('secret1', 'secret2')").collect()))
try:
    apply_operator(spark.read.parquet(f"{folder}/rows"), Tally, cluster=address, name="Reading")
except Exception as error:
    print(error)
os.environ["STATEFLOW_TOKEN_FILE"] = folder + "/damaged"
try:
    apply_operator(spark.read.parquet(f"{folder}/rows"), Tally, cluster=address)
except Exception as error:
    import traceback
    traceback.print_exc()
"""

#: follows ``CLIENT`` and ``LIVE`` of ``test_connect.py``
OVER_CONNECT = """
from stateflow.spark import register_state
shown = []
spark.createDataFrame(rows(0), COLUMNS).coalesce(1).write.parquet(str(there / "in"))
stream = spark.readStream.schema(COLUMNS).parquet(str(there / "in"))
out = apply_operator(stream, Tally, cluster=cluster, order_by="seq")
shown.append(out._explain_string(extended=True))
writer = out.writeStream.format("parquet").option("checkpointLocation", str(there / "streamed"))
query = writer.trigger(availableNow=True).start(str(there / "streamed-out"))
query.awaitTermination()
shown += [str(query.lastProgress), json.dumps(query.status)]
batch = apply_operator(spark.createDataFrame(rows(1), COLUMNS), Tally, cluster=cluster, source="once", order_by="seq")
shown.append(batch._explain_string(extended=True))
count = batch.count()
if REAL_TIME_TOO:
    (there / "out").mkdir()
    options = {"partitions": 2, "intervalUs": 20_000, "t0us": round(time.time() * 1e6), "keys": 5, "total": 40}
    rated = spark.readStream.format("replay.Source").options(**options).load()
    real = apply_operator(rated, Count, **said)
    shown.append(real._explain_string(extended=True))
    query = begin(real)
    counts = lambda: read_state(spark, cluster=cluster, operator="Count", state="n").collect()
    eventually(lambda: sum(row.value for row in counts()) == 80, "rows come", 300)
    shown += [str(query.lastProgress), json.dumps(query.status)]
    query.stop()
register_state(spark)
state = spark.read.format("stateflow").options(cluster=cluster, operator="Tally", state="n").load()
shown.append(state._explain_string(extended=True))
tell(shown=shown, count=count, state=state.count())
"""


def pieces_of(secret: str) -> set[bytes]:
    """Returns pieces of a secret: of the text, and of what it looks like as base64 or as bytes of Java."""
    text = "".join(secret.split())
    size = min(PIECE, len(text))
    found = {text[at : at + size].encode() for at in range(0, len(text) - size + 1, size)}
    found |= {base64.b64encode(text.encode()[shift:])[4 : 4 + PIECE] for shift in range(3)}
    return {each for each in found if len(each) >= min(PIECE, len(PASSWORD))}


class Secrets:
    def __init__(self, named: Mapping[str, str]) -> None:
        self._pieces = {name: pieces_of(secret) for name, secret in named.items()}

    def within(self, data: bytes) -> set[str]:
        """Returns the names of secrets that are there, in whole or in part.

        Line ends are left out, too, as a PEM's may be within a piece.
        """
        joined = data.replace(b"\n", b"").replace(b"\\n", b"")
        return {name for name, pieces in self._pieces.items() if any(each in data or each in joined for each in pieces)}


@contextlib.contextmanager
def commands_seen() -> Iterator[set[bytes]]:
    """Collects the command lines of all processes, looked at every 50 ms."""
    seen, over = set[bytes](), threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def private_body(path: Path) -> str:
    return "".join(line for line in path.read_text().splitlines() if not line.startswith("-----"))


def test_no_secret_shows_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code_key, checkpoint_key = (hashlib.sha256(each).hexdigest() for each in (b"code", b"checkpoint"))
    monkeypatch.setenv("STATEFLOW_CODE_KEY", code_key)
    monkeypatch.setenv("STATEFLOW_CHECKPOINT_KEY", checkpoint_key)
    cluster_dir, spark_dir = tmp_path / "cluster", tmp_path / "spark"
    (spark_dir / "events").mkdir(parents=True)
    with (
        LocalCluster(Tally, partitions=4, data_dir=cluster_dir, tls=True) as local,
        commands_seen() as commands,
    ):
        assert local.certificates is not None
        token, _ = local.certificates.authority.token(Identity.of("data", "query", ("Tally",)), timedelta(hours=1))
        file = tmp_path / "query.token"
        write_private(file, token.encode())
        write_private(spark_dir / "damaged", token[:-40].encode())
        plain = {name: value for name, value in os.environ.items() if not name.startswith("STATEFLOW_TLS")}
        given = plain | {"PYTHONPATH": str(ROOT)}
        arguments = [sys.executable, "-c", PROGRAM, local.address, str(spark_dir), str(file)]
        done = subprocess.run(arguments, env=given, capture_output=True, timeout=600, check=False)
        assert b"OUT 100 100" in done.stdout, done.stderr[-3000:]
        assert b"STATE [('secret1', 30), ('secret2', 28)]" in done.stdout, done.stderr[-3000:]
        assert b"bad_certificate: the token is damaged" in done.stderr
        said = [done.stdout, done.stderr]
        for words in (
            ["token", "show", str(file)],
            ["status", "--controller", local.address],
            ["checkpoint", "now", "--controller", local.address],
            [
                "checkpoint",
                "restore",
                "Tally",
                "--from",
                f"s3://user:{PASSWORD}@nowhere/x",
                "--controller",
                local.address,
            ],
            ["controller", "--listen", "127.0.0.1:0", "--ledger", f"postgresql://user:{PASSWORD}@127.0.0.1:1/none"],
        ):
            by_token = given | {"STATEFLOW_TOKEN_FILE": str(file)} if words[0] == "token" else dict(os.environ) | given
            if words[0] not in ("token", "controller"):
                by_token = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
            ran = subprocess.run(
                [sys.executable, "-m", "stateflow", *words], env=by_token, capture_output=True, timeout=600, check=False
            )
            said += [ran.stdout, ran.stderr]
        assert b"data/query, for Tally only, until" in said[2]
        keys = {path.parent.name: private_body(path) for path in (cluster_dir / "certificates").glob("*/key.pem")}
        assert len(keys) >= 3
        time.sleep(0.2)
    secrets = Secrets(
        {
            "token": token.removeprefix(PREFIX),
            "code key": code_key,
            "checkpoint key": checkpoint_key,
            "authority's key": private_body(cluster_dir / "certificates" / "authority" / "ca.key"),
            **keys,
        }
    )
    left = [
        path
        for place in (cluster_dir, spark_dir)
        for path in place.rglob("*")
        if path.is_file() and path.suffix not in (".pem", ".key") and path.name not in ("damaged", "CODE_KEY")
    ]
    assert {"ledger.db", "controller.log", "local-0.log"} <= {path.name for path in left}
    assert any("events" in path.parts for path in left), "Spark wrote its event log"
    found = {str(path): names for path in left if (names := secrets.within(path.read_bytes()))}
    found |= {f"said {number}": names for number, text in enumerate(said) if (names := secrets.within(text))}
    # a password on a command line is the user's doing
    found |= {str(each[:200]): names for each in commands if (names := secrets.within(each))}
    assert found == {}
    assert not any(PASSWORD.encode() in text for text in said), "what was given on a command line is not said again"
    assert not [path for path in left if PASSWORD.encode() in path.read_bytes()]
    planted = [
        token.encode(),
        token[200:300].encode(),
        b"x" + base64.b64encode(token.encode()),
        keys["admin-local"].encode(),
    ]
    assert all(secrets.within(b"a log line with " + each + b" in it") for each in planted), (
        "the search finds what is there"
    )
    assert any(b"stateflow" in each for each in commands)


def test_no_secret_shows_over_connect(tmp_path: Path) -> None:
    """The client's token reaches Spark's workers within the function, also in real-time mode."""
    real_time = not lacks(REAL_TIME) and has_compiler()
    logged = {
        "spark__eventLog__enabled": "true",
        "spark__eventLog__dir": f"file://{tmp_path}/events",
        "spark__eventLog__compress": "false",
        "spark__log__level": "INFO",  # at DEBUG Spark logs requests whole, as docs/spark.md says
    }
    live = {"real_time": True, "spark__jars": str(make_jar(tmp_path))} if real_time else {}
    (tmp_path / "events").mkdir()
    (tmp_path / "client").mkdir()
    with (
        LocalCluster(Tally, Count, partitions=4, data_dir=tmp_path / "cluster", tls=True) as local,
        (tmp_path / "server.log").open("wb") as log,
        commands_seen() as commands,
    ):
        assert local.certificates is not None
        who = Identity.of("data", "client", ("Tally", "Count"))
        token, _ = local.certificates.authority.token(who, timedelta(hours=1))
        file = tmp_path / "token"
        write_private(file, token.encode())
        with serving(log, master="local[6]", **logged, **live) as url:
            program = f"REAL_TIME_TOO = {real_time}\n" + LIVE + OVER_CONNECT
            said = client(program, url, local, tmp_path / "client", STATEFLOW_TOKEN_FILE=str(file))
        assert said["count"] == 20
        assert said["state"] == 5
        time.sleep(0.2)
    secrets = Secrets({"token": token.removeprefix(PREFIX)})
    apart = (".jar", ".pem", ".key")  # the token contains certificates
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path != file and path.suffix not in apart]
    assert any("events" in path.parts for path in left), "Spark wrote its event log"
    assert (tmp_path / "server.log").stat().st_size > 50_000, "the server wrote its log"
    found = {str(path): names for path in left if (names := secrets.within(path.read_bytes()))}
    found |= {text[:200]: names for text in said["shown"] if (names := secrets.within(text.encode()))}
    found |= {str(each[:200]): names for each in commands if (names := secrets.within(each))}
    assert found == {}
