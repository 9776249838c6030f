"""Writes the project of ``stateflow init``: a small one that runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stateflow.errors import InvalidArgument
from stateflow.project.examples import Example
from stateflow.types import check_name

#: files of the project, in which ``NAME`` stands for the project's name
FILES = ("README.md", "ops.py", "pipeline.yml", "readings.csv", "test_ops.py")
HERE = Path(__file__).parent / "files"


def write_project(folder: Path, example: Example | None = None) -> list[Path]:
    """Writes a project into a new or an empty directory, whose name is the project's.

    Args:
        example: the example to write; None: the project that everyone begins with.

    Raises InvalidArgument where the directory is not empty, or cannot be written.
    """
    name = folder.resolve().name
    check_name("project", name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument("the path is not an empty directory", remedy="pass a new directory", path=folder)
    source, files = (HERE, FILES) if example is None else (example.folder, example.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _copied(source, files, folder, name)
    except OSError as error:
        raise InvalidArgument(
            f"the directory cannot be written: {error.strerror}", remedy="pass a writable directory", path=folder
        ) from error


def _copied(source: Path, files: Sequence[str], folder: Path, name: str) -> list[Path]:
    written = []
    for file in files:
        written.append(folder / file)
        text = (source / file).read_text(encoding="utf-8")
        written[-1].write_text(text.replace("NAME", name), encoding="utf-8")
    return written
