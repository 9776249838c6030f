"""Makes Spark sessions and adapts to their differences.

The module also checks which features a version of PySpark has, shortens Spark's errors, reads facts from classic and
Spark Connect sessions, and packs this package for executors.

If a caller asks for a feature that the installed PySpark lacks, :func:`require` refuses it by name. Otherwise Spark or
Python would raise an error about some internal part.

The driver of a Spark Connect session runs in a server, which may be on another machine, and this process has none of
its objects. From a classic session this package reads facts through the JVM. From a Connect session it gets them by
running a plan, or does without them.

The zip that Spark sends to executors contains only modules, each with its compiled code. From source text alone, a
Python worker would compile every module at each start.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import py_compile
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateflow.code.loading import check_outside
from stateflow.durable import files_below
from stateflow.errors import TRACEBACKS, ExtraMissing, InvalidArgument, JavaMissing, StateflowError, is_on
from stateflow.release import VERSION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

JAVA_MIN = 17
#: Turns off adaptive execution. With it, Spark plans the rest of a micro-batch anew after its shuffle, in a job of its
#: own. That takes 30 ms, and gains nothing because the number of tasks is fixed.
PLAN_ONCE = {"spark.sql.adaptive.streaming.stateless.enabled": "false"}
#: The largest value that Spark accepts, which means no limit. With any other value Spark adds up the bytes of an Arrow
#: batch at every row, which takes 35 ms of a micro-batch of 100,000 rows. Spark limits Arrow batches to
#: ``maxRecordsPerBatch`` rows in any case, and a task of a micro-batch holds all of its rows before it sends the first.
BATCHES_BY_ROWS = {"spark.sql.execution.arrow.maxBytesPerBatch": "2147483647"}
#: Setting for checkpoints on a local disk. Hadoop has two interfaces to the same files, both of which write a temporary
#: file and rename it. PySpark does not include Hadoop's native library. Without it the interface that Spark prefers
#: runs 10 commands (``readlink``, ``chmod``) for each file of the log; the interface set here runs 2. That saves 65 ms
#: in a micro-batch, which writes two or three files.
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
#: Spark passes filters to Python sources only with this setting; without it, it refuses sources that accept filters
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
SPECULATION = "spark.speculation"
#: log settings with which a failed task takes one line instead of two hundred
LOGGING = Path(__file__).with_name("log4j2.properties")
_REMEDY = (
    f"install a Java runtime, version {JAVA_MIN} or newer (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17), or set JAVA_HOME to one"
)
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
#: an error raised by a task, or an error that was already shortened and passed through a function in foreachBatch
_RAISED = re.compile(r"(?:stateflow\.errors|pyspark\.errors\.exceptions\.captured)\.\w+: ((\w+): .+)")
#: lines that follow the operator's traceback in Spark's text
_NOT_OURS = re.compile(r"^\s*(at \S+\(|SQLSTATE: |=== |\.\.\. \d+ more|Driver stacktrace:|Caused by: |\[|$)")
#: a master with tasks that run in the driver, with its number of cores and the number of failures allowed for a task
LOCAL = re.compile(r"local(?:\[\s*(?P<cores>\d+|\*)\s*(?:,\s*(?P<failures>\d+)\s*)?\])?\Z")
#: rows of a range that Spark splits into its default number of parts
_RANGE = 1 << 12
_FOREACH_BATCH = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
_PARALLELISM: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by session


# -- Versions of PySpark ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that needs a newer PySpark.

    Attributes:
        what: name of the feature, as users read it.
        since: first version of PySpark, and of Spark, that supports the feature.
    """

    what: str
    since: tuple[int, int]

    def is_in(self, version: str) -> bool:
        """Tells whether a version has the feature.

        Args:
            version: in the form of PySpark and Spark, ``4.2.1`` or ``4.3.0.dev1``.
        """
        return _is_at_least(version, self.since)

    def needs(self) -> str:
        """Returns the requirement in words, such as ``real-time mode needs PySpark 4.3 or newer``."""
        return f"{self.what} needs PySpark {_dotted(self.since)} or newer"


#: needs Python workers that return a row's outputs before they get the next row, see
#: ``spark.python.udf.pipelined.enabled``
REAL_TIME = Feature("real-time mode", (4, 3))
#: needs Python sources that are given a micro-batch's start, and its limit of rows (``ReadLimit``)
JETSTREAM = Feature("the JetStream source", (4, 2))


def require(feature: Feature, spark: SparkSession | None = None) -> None:
    """Checks that PySpark and the Spark of a session have a feature; over Spark Connect their versions may differ.

    Raises InvalidArgument if one of them is too old, ImportError if PySpark is not installed.
    """
    import pyspark

    remedy = f"pip install 'pyspark=={_dotted(feature.since)}.*'"
    if not feature.is_in(pyspark.__version__):
        raise InvalidArgument(f"{feature.needs()}, but this is {pyspark.__version__}", remedy=remedy)
    if spark is not None and not feature.is_in(spark.version):
        raise InvalidArgument(
            f"{feature.needs()}, but the session's Spark is {spark.version}",
            remedy=f"run on the Spark server: {remedy}",
        )


def metadata_of(planned: Any, version: str) -> Any:
    """Returns the metadata that Spark stored together with the offsets of a batch.

    Args:
        planned: the JVM's entry of the offset log.
        version: Spark's version.
    """
    return (planned.metadataOpt() if _is_at_least(version, (4, 2)) else planned.metadata()).get()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Converts Spark's schema to Arrow's, with times in UTC: PySpark 4.1 always uses UTC, later versions on request."""
    from pyspark.sql.pandas.types import to_arrow_schema

    told = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    found: pa.Schema = to_arrow_schema(schema, **told)
    return found


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    found = _NUMBERS.match(version)
    return found is not None and (int(found[1]), int(found[2])) >= least


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# -- Brief errors ----------------------------------------------------------------------------------------------------


def raised_in(text: str) -> tuple[str, str, str] | None:
    """Returns (line, code, the operator's traceback or an empty text) of the last stateflow error in a text.

    Returns None if the text contains no stateflow error.
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
    """Returns a shortened form of the text of a Spark error, or None if the text contains no stateflow error.

    The result is the stateflow error's line. If the operator's traceback is in the text, it follows, and then the line
    again.
    """
    found = raised_in(text)
    if found is None:
        return None
    line, _, details = found
    return f"{line}\n{details}\n{line}" if details else line


def tell_briefly() -> None:
    """Makes PySpark shorten its exceptions in this process, from now on.

    Spark adds three tracebacks to an error in an operator's task (the Python worker's, Spark's and Java's), and repeats
    them three times for a streaming query. The shortened text has the error's line first and last, and in between the
    operator's own traceback, if the operator failed. ``STATEFLOW_TRACEBACKS=1`` shows everything. Errors that are not
    stateflow's stay as they are.
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
        said = None if is_on(TRACEBACKS) else told(str(made))
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
        said = None if is_on(TRACEBACKS) else told(_all_said(made))
        if said is None:
            return made
        # an UnknownException is raised with all of Java's frames, and a PythonException makes its text from Java's
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


# -- Sessions of Spark Connect ---------------------------------------------------------------------------------------


def is_connect(frame_or_session: Any) -> bool:
    """Tells whether ``frame_or_session`` belongs to Spark Connect.

    The function compares the name of the class's module, because Connect's packages need not be installed for a classic
    session.
    """
    return type(frame_or_session).__module__.startswith("pyspark.sql.connect")


def default_parallelism(spark: SparkSession) -> int:
    """Returns the number of tasks that Spark makes by default. For a Connect session, one query determines the number,
    which is then cached."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    if spark not in _PARALLELISM:
        from pyspark.sql import functions as F  # noqa: N812

        parts = spark.range(_RANGE).select(F.spark_partition_id().alias("part")).distinct()
        _PARALLELISM[spark] = parts.count()
    return _PARALLELISM[spark]


def quoted(name: str) -> str:
    """Returns a column's name as Spark parses it, because a dot or a backtick in a name is syntax otherwise."""
    return "`" + name.replace("`", "``") + "`"


def master_of(spark: SparkSession) -> str:
    """Returns Spark's master URL, with the host in front if a Spark Connect server is on another machine."""
    if not is_connect(spark):
        return str(spark.sparkContext.master)
    client: Any = spark.client
    master = str(spark.conf.get("spark.master", "unknown"))
    return master if is_here(spark) else f"{client.host}: {master}"


def is_stopped(context: SparkContext) -> bool:
    """Tells whether Spark was stopped, by this program or by itself."""
    from py4j.protocol import Py4JError

    java = context._jsc
    try:
        return java is None or bool(java.sc().isStopped())
    except (Py4JError, OSError):  # the JVM has ended
        return True


def driver_host(spark: SparkSession) -> str:
    """Returns the IP address at which executors reach the driver. Raises InvalidArgument if it has no IPv4 address."""
    host = spark.conf.get("spark.driver.host") or "localhost"
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise InvalidArgument(
            f"spark.driver.host={host} has no IPv4 address: {error.strerror}",
            remedy="set spark.driver.host to an IPv4 address of the driver, or to a name that has one",
        ) from None


def is_here(spark: Any) -> bool:
    """Tells whether the server of a Connect session is on this machine, by its address."""
    return spark.client.host in ("localhost", "127.0.0.1", "::1")


def local_slots(spark: SparkSession) -> int | None:
    """Returns the number of tasks that run at once under a ``local`` master, or None if the number is unknown.

    The number is always unknown for other masters.
    """
    get = spark.conf.get
    match = LOCAL.match(get("spark.master", "") or "")
    if match is None:
        return None
    cores = match["cores"] or "1"
    if cores == "*":
        if is_connect(spark):
            return None
        cores = str(spark.sparkContext._jvm.java.lang.Runtime.getRuntime().availableProcessors())
    return int(int(cores) // float(get("spark.task.cpus", None) or 1))


def speculates(conf: Any, master: str) -> bool:
    """Tells whether Spark starts second attempts of slow tasks. A local master never does.

    Args:
        conf: settings of a session or of Spark.
    """
    return not LOCAL.match(master) and (conf.get(SPECULATION, "") or "").strip().lower() == "true"


def analyzed_plan(spark: Any, plan: Any) -> str:
    """Returns a plan as text, analyzed by a Connect session's server: one line for each node, the last node first."""
    text = str(spark.client.explain_string(plan, explain_mode="extended"))
    _, _, text = text.rpartition("== Analyzed Logical Plan ==\n")
    text, _, _ = text.partition("\n== Optimized Logical Plan ==")
    return text.partition("\n")[2]  # the first line shows the columns


def in_micro_batch(df: DataFrame) -> bool:
    """Tells whether the caller runs within ``foreachBatch``."""
    if is_connect(df):
        return _FOREACH_BATCH in (getattr(sys.modules["__main__"].__spec__, "name", None), *sys.modules)
    return df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") is not None


# -- Sessions on this machine ----------------------------------------------------------------------------------------


def require_java() -> int:
    """Returns the major version of the Java that Spark will use. Raises JavaMissing if it is missing or too old.

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

    For a ``local`` master they include a setting for checkpoints on this machine's disk.
    """
    settings = PLAN_ONCE | BATCHES_BY_ROWS
    if master.startswith("local"):
        settings |= LOG_ON_LOCAL_DISK
    return settings


def real_time_settings() -> dict[str, str]:
    """Returns the Spark settings that an operator in real-time mode requires.

    Pass them to ``SparkSession.builder.config(map=…)`` or ``spark-submit --conf``. Use them only in sessions for
    real-time queries, because they make other Python functions slow. Real-time mode needs PySpark 4.3 or newer.

    Example: ``SparkSession.builder.config(map=real_time_settings())``
    """
    return dict(_REAL_TIME)


def local_session(name: str, master: str = "local[2]", *, real_time: bool = False, **settings: str) -> SparkSession:
    """Makes a quiet Spark session on this machine. Its Python workers run this interpreter.

    Args:
        name: name of the Spark application.
        master: Spark's master URL.
        real_time: True for queries in real-time mode, see :func:`real_time_settings`.
        settings: Spark settings with ``__`` for the dots, e.g. ``spark__sql__shuffle__partitions="4"``.

    Raises JavaMissing if Java is missing or too old, ExtraMissing if PySpark is not installed, or InvalidArgument if
    PySpark is too old for real-time mode.

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
    of what can be read. docs/spark.md lists the options.

    Spark requires ``spark.sql.python.filterPushdown.enabled`` for sources that accept filters, so this function sets it
    in the session. If this process has a token, reads of the session use the token as it is now. Register the source
    again when the token was renewed. With a cluster inside Spark, call this function after ``start_cluster``, so that
    each read gets a token of its own, for the operator that it reads.

    Raises BadCertificate if the token cannot be read.

    Example: ``register_state(spark)``
    """
    from stateflow.security.plain import own_issuer, token_to_hand_on
    from stateflow.spark.state_source import StateSource

    tell_briefly()
    issuer = own_issuer()
    source = (
        StateSource.bound(token_to_hand_on()) if issuer is None else StateSource.bound(issuer=str(issuer.directory))
    )
    spark.dataSource.register(source)
    spark.conf.set(PUSH_DOWN, "true")


def register_jetstream(spark: SparkSession) -> None:
    """Registers ``spark.readStream.format("jetstream")`` with a session.

    Raises ExtraMissing if the packages of the extra ``jetstream`` are not installed, or InvalidArgument if PySpark is
    older than 4.2.

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


#: packages that processes on executors import
_PACKAGES = ("stateflow", "reconfig")
_DISTRIBUTION = "stateflow-streams"
#: files written for users, which are not modules of the package
_NOT_MODULES = ("stateflow/project/files/", "stateflow/examples/")
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Written:
    """The zip of this package that :func:`write_package` wrote.

    Attributes:
        file: path of the zip.
        version: version of this package.
        python: version of Python for which the zip contains compiled code; other versions compile the source text.
        modules: number of modules.
        requires: requirements that are not in the zip, in pip's form.
    """

    file: Path
    version: str
    python: str
    modules: int
    requires: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}


def write_package(out: Path) -> Written:
    """Writes this package to a zip.

    Raises InvalidArgument if ``out`` cannot be written, or if this package is in a zip itself.
    """
    modules = 0
    try:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text, code in _modules():
                archive.writestr(zipfile.ZipInfo(name, _DATE), text, zipfile.ZIP_DEFLATED)
                archive.writestr(zipfile.ZipInfo(f"{name}c", _DATE), code, zipfile.ZIP_DEFLATED)
                modules += 1
    except OSError as error:
        raise InvalidArgument(f"{out} cannot be written: {error.strerror}", remedy="name another file") from error
    python = ".".join(map(str, sys.version_info[:2]))
    return Written(out, VERSION, python, modules, _requires())


def _modules() -> Iterator[tuple[str, bytes, bytes]]:
    """Yields (path in the zip, text, compiled code) of each module.

    The compiled code does not record the time of its source file, so Python does not look for that file.
    """
    with tempfile.TemporaryDirectory(prefix="stateflow-package-") as folder:
        compiled = Path(folder) / "compiled"
        for package in _PACKAGES:
            root = _root(package)
            for path in sorted(path for path in files_below(root) if path.suffix == ".py"):
                name = f"{package}/{path.relative_to(root).as_posix()}"
                if not name.startswith(_NOT_MODULES):
                    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    py_compile.compile(str(path), str(compiled), name, doraise=True, invalidation_mode=unchecked)
                    yield name, path.read_bytes(), compiled.read_bytes()


def _root(package: str) -> Path:
    found = importlib.util.find_spec(package)
    root = None if found is None or found.origin is None else Path(found.origin).parent
    if root is None or not root.is_dir():
        raise InvalidArgument(
            f"{package} is not installed as plain files",
            remedy="build the zip in an environment that has it installed: pip install stateflow-streams",
        )
    return root


def _requires() -> tuple[str, ...]:
    """Returns the requirements of the distribution and its extra ``spark``.

    Returns an empty tuple if the package is on the path but not installed.
    """
    try:
        required = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = []
    for each in required:
        wanted, _, marker = each.partition(";")
        if "extra" not in marker or re.search(r"""extra\s*==\s*["']spark["']""", marker):
            found.append(wanted.strip())
    return tuple(found)
