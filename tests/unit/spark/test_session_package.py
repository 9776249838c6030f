"""stateflow packed as a zip for executors."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.errors import InvalidArgument
from stateflow.spark import session as packaging
from stateflow.spark.session import write_package

LOOKS = """
import sys
sys.path.insert(0, sys.argv[1])
import stateflow.spark.task, reconfig
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("stateflow", "reconfig")]
print(len(ours), all(module.__file__.startswith(sys.argv[1]) for module in ours))
print(sum(module.__file__.endswith(".pyc") for module in ours))
"""


def test_what_an_operators_task_needs_is_imported_of_it_compiled(tmp_path: Path) -> None:
    file = tmp_path / "stateflow.zip"
    done = CliRunner().invoke(app, ["spark", "package", str(file), "--json"])
    said = json.loads(done.stdout)
    assert said["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    assert len(names) == 2 * said["modules"]
    assert "stateflow/spark/task.py" in names
    assert not any("/files/" in name or name.startswith("stateflow/examples/") for name in names)
    looked = subprocess.run(
        [sys.executable, "-I", "-c", LOOKS, str(file)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert looked.returncode == 0, looked.stderr
    count, compiled = looked.stdout.splitlines()
    assert int(count.split()[0]) > 100
    assert count.split()[1] == "True"
    assert compiled == count.split()[0]


def test_what_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["grpcio<2,>=1.80", 'pyspark<4.4,>=4.1; extra == "spark"', 'PyMySQL<2; extra == "mysql"']
    monkeypatch.setattr(packaging.importlib.metadata, "requires", lambda name: wanted)
    done = CliRunner().invoke(app, ["spark", "package", "sf.zip"])
    assert "spark-submit --py-files sf.zip" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["  grpcio<2,>=1.80", "  pyspark<4.4,>=4.1"]


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: No such file or directory: name another file"):
        write_package(tmp_path / "none" / "sf.zip")
    monkeypatch.setattr(packaging, "_PACKAGES", ("no_such_package",))
    with pytest.raises(InvalidArgument, match="no_such_package is not installed as plain files"):
        write_package(tmp_path / "sf.zip")
