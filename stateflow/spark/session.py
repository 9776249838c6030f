"""Spark sessions: a Java that is new enough, and workers that run this interpreter."""

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
#: When the shuffle of a micro-batch is done, Spark plans the rest anew, in a job of its own. That takes 30 ms, and
#: gains nothing where the partitions are given.
PLAN_ONCE = {"spark.sql.adaptive.streaming.stateless.enabled": "false"}
#: The largest value that Spark takes, which means no limit. For any other value Spark adds up, at every row, the bytes
#: of its batch so far, 35 ms of a micro-batch of 100,000 rows. Spark limits batches to ``maxRecordsPerBatch`` rows in
#: any case, and a task of a micro-batch has all of its rows in memory before it sends the first.
BATCHES_BY_ROWS = {"spark.sql.execution.arrow.maxBytesPerBatch": "2147483647"}
#: For checkpoints on a local disk. Hadoop has two interfaces to the same files, both of which write a temporary file
#: and rename it. Without Hadoop's native library, which PySpark does not include, the interface that Spark prefers runs
#: 10 commands per file of the log (``readlink``, ``chmod``), this one 2. That saves 65 ms in a micro-batch, which
#: writes two or three files.
LOG_ON_LOCAL_DISK = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    )
}
#: Settings that a query in real-time mode needs, see :func:`real_time_settings`.
_REAL_TIME = {
    # Spark's list of operators allowed in real-time mode has no Python operator
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
    # the worker reads rows while it writes outputs, and writes each output at once
    "spark.python.udf.pipelined.enabled": "true",
    "spark.python.udf.pipelined.queueDepth": "1000",
    # rows go to the worker one by one, and do not wait in a buffer
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    # over TCP a row takes 80 ms more: each side waits for the other's acknowledgement
    "spark.python.unix.domain.socket.enabled": "true",
}
#: log settings with which a failed task takes one line instead of two hundred
LOGGING = Path(__file__).with_name("log4j2.properties")
_REMEDY = (
    f"install a Java runtime, version {JAVA_MIN} or newer (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17), or set JAVA_HOME to one"
)


def require_java() -> int:
    """Returns the major version of the Java that Spark will use. Raises JavaMissing when there is none new enough.

    Example: ``require_java() >= 17``
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise JavaMissing("Spark needs Java, which is not on the PATH", remedy=_REMEDY)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise JavaMissing(f"{java} cannot be run", remedy=_REMEDY, java_home=home) from error
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    version = int(match[1]) if match else 0
    if version < JAVA_MIN:
        raise JavaMissing(f"Java {version} is too old for Spark 4", remedy=_REMEDY, java=java)
    return version


def quick_settings(master: str) -> dict[str, str]:
    """Returns Spark settings that shorten every micro-batch.

    With a ``local`` master they include one for checkpoints on this machine's disk.
    """
    settings = PLAN_ONCE | BATCHES_BY_ROWS
    if master.startswith("local"):
        settings |= LOG_ON_LOCAL_DISK
    return settings


def real_time_settings() -> dict[str, str]:
    """Returns the Spark settings that an operator in real-time mode requires.

    Pass them to ``SparkSession.builder.config(map=…)`` or ``spark-submit --conf``, in sessions for real-time queries
    only: they make other Python functions slow. Real-time mode needs PySpark 4.3 or newer.

    Example: ``SparkSession.builder.config(map=real_time_settings())``
    """
    return dict(_REAL_TIME)


def local_session(name: str, master: str = "local[2]", *, real_time: bool = False, **settings: str) -> SparkSession:
    """Makes a quiet Spark session on this machine whose Python workers run this interpreter.

    Args:
        real_time: True for queries in real-time mode, see :func:`real_time_settings`.
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
    """Registers ``spark.read.format("stateflow")`` with a session.

    Executors read the state of a cluster, checkpoint or savepoint, the changes between two savepoints, or a description
    of what can be read. Options: docs/spark.md.

    Example: ``register_state(spark)``
    """
    from stateflow.spark.state_source import StateSource
    from stateflow.spark.telling import tell_briefly

    tell_briefly()
    spark.dataSource.register(StateSource)


def register_jetstream(spark: SparkSession) -> None:
    """Registers ``spark.readStream.format("jetstream")`` with a session.

    Raises ExtraMissing, or InvalidArgument where PySpark is older than 4.2.

    Example: ``register_jetstream(spark)``
    """
    require(JETSTREAM, spark)
    try:
        from stateflow.spark.jetstream import JetStreamSource
    except ImportError as error:
        raise ExtraMissing(
            f"the JetStream source needs {error.name}", remedy="pip install 'stateflow-streams[jetstream]'"
        ) from error
    spark.dataSource.register(JetStreamSource)
