"""Projects are written whole, and no existing file is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.project.writing import FILES, HERE, write_project
from stateflow.spark.pipeline import load_pipeline


def test_what_is_written(tmp_path: Path) -> None:
    assert [path.name for path in write_project(tmp_path / "alarms")] == list(FILES)
    assert (tmp_path / "alarms" / "README.md").read_text().startswith("# alarms\n")
    assert load_pipeline(tmp_path / "alarms" / "pipeline.yml", {}, {}).config.name == "alarms"
    assert sorted(path.name for path in HERE.iterdir() if path.is_file()) == sorted(FILES)
    (tmp_path / "empty").mkdir()
    write_project(tmp_path / "empty")


@pytest.mark.parametrize("name", ["no", "1.10", "null", "2026-01-01", "0x1f", "1e3"])
def test_a_name_that_is_something_else_in_yaml_stays_a_name(name: str, tmp_path: Path) -> None:
    write_project(tmp_path / name)
    assert load_pipeline(tmp_path / name / "pipeline.yml", {}, {}).config.name == name


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "ops.py").write_text("x")
    (tmp_path / "file").touch()
    for place in ("mine", "file"):
        with pytest.raises(InvalidArgument, match="is not an empty directory"):
            write_project(tmp_path / place)
    with pytest.raises(InvalidArgument, match=r"is not a valid|cannot be"):
        write_project(tmp_path / "a b\n")
    assert (tmp_path / "mine" / "ops.py").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
