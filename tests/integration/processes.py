"""Looks processes up in ``/proc``: by their parents, and by what they run."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Returns the children of a process that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # ended meanwhile
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def spark_jvm(driver: int) -> int | None:
    return next((pid for pid in children(driver) if "org.apache.spark" in command(pid)), None)


def spark_workers(driver: int) -> list[int]:
    """Returns the Python processes that run tasks of a local session."""
    jvm = spark_jvm(driver)
    return [] if jvm is None else python_workers(jvm)


def python_workers(executor: int) -> list[int]:
    """Returns the Python processes that run tasks of one executor.

    Args:
        executor: a JVM that runs tasks; in a local session, the driver's.
    """
    daemons = [pid for pid in children(executor) if "pyspark.daemon" in command(pid)]
    return [worker for daemon in daemons for worker in children(daemon)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
