"""What Spark needs on a machine: a Java, and workers that run this interpreter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stateflow.errors import ExtraMissing, JavaMissing
from stateflow.runtime.code import check_outside
from stateflow.spark.versions import JETSTREAM, REAL_TIME, require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
#: Spark plans a micro-batch with a shuffle anew when the shuffle is done, in a job of its own. That takes 30 ms, and
#: there is nothing to learn where the partitions are given.
PLAN_ONCE = {"spark.sql.adaptive.streaming.stateless.enabled": "false"}
#: The most that Spark takes, which is no limit: for any other it adds up, at every row, the bytes of its batch so far,
#: 35 ms of a micro-batch of 100,000 rows. Those of at most ``maxRecordsPerBatch`` rows are made in any case, and a task
#: of a micro-batch has all of its rows in memory before it sends the first.
BATCHES_BY_ROWS = {"spark.sql.execution.arrow.maxBytesPerBatch": "2147483647"}
#: Where a checkpoint is on a local disk. Hadoop has two ways to the same files, written aside and renamed. Without its
#: native library, which PySpark does not bring, the one that Spark prefers runs 10 commands per file of the
#: log (``readlink``, ``chmod``), this one 2: 65 ms less in a micro-batch, which writes two or three of them.
LOG_ON_LOCAL_DISK = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}
#: What a query in real-time mode needs, see :func:`real_time_settings`.
_REAL_TIME = {
    # Spark's list of what it allows in real-time mode has no Python operator
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
    # a worker reads rows while it writes outputs, and writes each output at once
    "spark.python.udf.pipelined.enabled": "true",
    "spark.python.udf.pipelined.queueDepth": "1000",
    # rows go to it one by one, and do not wait in a buffer
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    # by TCP a row takes 80 ms more: each side waits for the other's acknowledgement
    "spark.python.unix.domain.socket.enabled": "true",
}
#: what a failed task is told by: a line, instead of two hundred
LOGGING = Path(__file__).with_name("log4j2.properties")
_REMEDY = (
    f"install a Java runtime, version {JAVA_MIN} or newer (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17), or set JAVA_HOME to one"
)


def require_java() -> int:
    """The major version of the Java that Spark will use. Raises JavaMissing when there is none new enough.

    Example: ``require_java() >= 17``
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise JavaMissing("Spark needs Java and there is none on the PATH", remedy=_REMEDY)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise JavaMissing(f"{java} does not run", remedy=_REMEDY, java_home=home) from error
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    version = int(match[1]) if match else 0
    if version < JAVA_MIN:
        raise JavaMissing(f"Java {version} is too old for Spark 4", remedy=_REMEDY, java=java)
    return version


def quick_settings(master: str) -> dict[str, str]:
    """What takes time off every micro-batch; all of it where a ``local`` master has checkpoints on this disk."""
    settings = PLAN_ONCE | BATCHES_BY_ROWS
    if master.startswith("local"):
        settings |= LOG_ON_LOCAL_DISK
    return settings


def real_time_settings() -> dict[str, str]:
    """Spark settings without which an operator in real-time mode is refused: for ``SparkSession.builder.config(map=…)``
    or ``spark-submit --conf``. They are for queries in real-time mode only: other Python functions become slow by them.
    Real-time mode needs PySpark 4.3 or newer.

    Example: ``SparkSession.builder.config(map=real_time_settings())``
    """
    return dict(_REAL_TIME)


def local_session(name: str, master: str = "local[2]", *, real_time: bool = False, **settings: str) -> SparkSession:
    """A quiet Spark session on this machine whose Python workers run this interpreter.

    Args:
        real_time: for queries in real-time mode, see :func:`real_time_settings`.
        settings: Spark settings with ``__`` for the dots, e.g. ``spark__sql__shuffle__partitions="4"``.

    Raises JavaMissing, ExtraMissing without PySpark, or InvalidArgument where it is too old for real-time mode.

    Example: ``spark = local_session("flights", spark__sql__shuffle__partitions="4")``
    """
    check_outside("a Spark session")
    require_java()
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ExtraMissing("PySpark is not installed", remedy="pip install 'stateflow-streams[spark]'") from error
    if real_time:
        require(REAL_TIME)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(name)
    fixed = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
        **quick_settings(master),
        **(_REAL_TIME if real_time else {}),
    }
    for key, value in {**fixed, **{key.replace("__", "."): value for key, value in settings.items()}}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def register_state(spark: SparkSession) -> None:
    """Makes ``spark.read.format("stateflow")`` known to a session: state that executors read, of a cluster, checkpoint
    or savepoint; what changed between two savepoints; and what there is to read. Options: docs/spark.md.

    Example: ``register_state(spark)``
    """
    from stateflow.spark.state_source import StateSource
    from stateflow.spark.telling import tell_briefly

    tell_briefly()
    spark.dataSource.register(StateSource)


def register_jetstream(spark: SparkSession) -> None:
    """Makes ``spark.readStream.format("jetstream")`` known to a session. Raises ExtraMissing, or InvalidArgument where
    PySpark is older than 4.2.

    Example: ``register_jetstream(spark)``
    """
    require(JETSTREAM, spark)
    try:
        from stateflow.spark.jetstream import JetStreamSource
    except ImportError as error:
        raise ExtraMissing(
            f"the JetStream source lacks {error.name}", remedy="pip install 'stateflow-streams[jetstream]'"
        ) from error
    spark.dataSource.register(JetStreamSource)
