"""A repeatable source of rows for micro-batches and real time, and a sink that logs the time at which each row arrives.

The source and the sink are Java classes, which are compiled before use.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stateflow.errors import StateflowError


def has_compiler() -> bool:
    return shutil.which("javac") is not None


def make_jar(directory: Path) -> Path:
    """Compiles the Java classes against the installed Spark, and returns the jar file.

    Raises StateflowError if there is no compiler, or the classes do not compile.
    """
    import pyspark

    if not has_compiler():
        raise StateflowError(
            "javac is missing: the source and sink of rows in real time are written in Java",
            remedy="install a JDK (Debian/Ubuntu: apt-get install openjdk-17-jdk-headless)",
        )
    classes, jar = directory / "classes", directory / "replay.jar"
    spark = Path(pyspark.__file__).parent / "jars"
    sources = sorted(Path(__file__).parent.glob("*.java"))
    lint = ["-Xlint:all,-path", "-Werror", "--release", "17"]
    command = ["javac", *lint, "-cp", f"{spark}/*", "-d", str(classes), *map(str, sources)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise StateflowError(f"the source of rows does not compile: {made.stderr.strip()[-800:]}")
    with zipfile.ZipFile(jar, "w") as packed:
        for each in sorted(classes.rglob("*.class")):
            packed.write(each, each.relative_to(classes))
    return jar


@dataclass(frozen=True, slots=True)
class Given:
    """A row that the sink received.

    Attributes:
        at_us: time of arrival, in microseconds since 1970.
        attempt: id of the attempt of the task in the epoch that sent the row.
        columns: values of the row, as text.
    """

    at_us: int
    epoch: int
    task: int
    attempt: str
    columns: tuple[str, ...]


class Log:
    """The sink's log, which may still be growing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> list[Given]:
        """Returns the rows of all attempts, in the order in which they arrived."""
        return [given for kind, given in self._lines() if kind == "row"]

    def taken(self) -> list[Given]:
        """Returns the rows that a sink would keep if it took the rows of an epoch only at the epoch's end.

        For each task in each epoch, these are the rows of the last attempt that was completed.
        """
        ended = {(given.epoch, given.task): given.attempt for kind, given in self._lines() if kind == "end"}
        return [given for given in self.rows() if ended.get((given.epoch, given.task)) == given.attempt]

    def _lines(self) -> Iterator[tuple[str, Given]]:
        if not self._path.exists():
            return
        for line in self._path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # the sink is writing this line
            kind, at_us, epoch, task, attempt, *columns = line.rstrip("\n").split(",")
            yield kind, Given(int(at_us), int(epoch), int(task), attempt, tuple(columns))
