"""Packages for users, which work without the clone: a source distribution, and the wheel that is built from it."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

import stateflow
from tests.sizes import THOROUGH

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORTED = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = ("stateflow", "reconfig")
#: files that commands write for users; they are no modules
WRITTEN = re.compile("^stateflow/project/files/|^stateflow/examples/")
#: files that setuptools adds to those of a clone
MADE = {"PKG-INFO", "setup.cfg"}
IMPORTS = """
import importlib, pkgutil, sys, reconfig, stateflow
for package in (stateflow, reconfig):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in ("stateflow.__main__", "stateflow.ledger.migrations.env"):  # they run as programs
            importlib.import_module(module.name)
            print(module.name)
print(stateflow.__file__)
"""
#: what a user's module may say with mypy --strict
TYPED = """
from collections.abc import Iterator
from typing import Any

from stateflow import Cluster, Context, Operator, StreamClient, state
from stateflow.client import MoveOptions, Reconfiguration
from stateflow.spark import local_session
from stateflow.testing import OperatorHarness


class Count(Operator):
    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)
    by_tag = state.map(str, float)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int]]:
        self.n.value += 1
        self.by_tag["all"] = self.by_tag.get("all", 0.0) + 1.0
        yield row.k, self.n.value


def moved(cluster: Cluster, to: str) -> Reconfiguration:
    return cluster.migrate("Count", [3, 5], to, MoveOptions(max_pause_ms=50.0)).wait()


def sent(client: StreamClient, rows: list[dict[str, str]]) -> int:
    return len(client.send(rows))


harness = OperatorHarness(Count(), partitions=2)
harness.send([{"k": "a"}])
reveal_type(Count().n.value)
reveal_type(Count().by_tag["all"])
"""


@dataclass(frozen=True, slots=True)
class Built:
    tree: Path  # what was built: the files of a clone, without ignored ones
    held: frozenset[str]  # its files
    source: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds as `make dist` does, but with the setuptools that are here, so that nothing is fetched."""
    tree, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    held = _held()
    for name in held:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    _call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), ".", cwd=tree)
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(tree, frozenset(held), source, wheel)


def _held() -> list[str]:
    """Returns the names of a clone's files; in an unpacked source distribution, of those in its SOURCES.txt."""
    if (ROOT / ".git").exists():
        said = _call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        return sorted(name for name in said if (ROOT / name).is_file())
    names = (ROOT / "stateflow_streams.egg-info" / "SOURCES.txt").read_text().splitlines()
    return [name for name in names if not name.startswith("stateflow_streams.egg-info/")]


def _call(*command: str, cwd: Path, status: int = 0, **more: str) -> str:
    """Runs a command without this process's PYTHONPATH, so that it does not find the clone, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == status, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _own(names: Iterable[str]) -> set[str]:
    return {name for name in names if PurePosixPath(name).parts[0] in PACKAGES}


def test_the_source_distribution_holds_what_a_clone_holds(built: Built) -> None:
    with tarfile.open(built.source) as opened:
        files = [each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "docs/state.md", "pyproject.toml"} <= set(files)
    kept = {name for name in files if name not in MADE and ".egg-info/" not in name}
    assert kept == built.held - {".gitignore"}


def test_the_wheel_is_the_two_packages_byte_by_byte(built: Built) -> None:
    """The wheel, which is built from the source distribution, holds the two packages as a clone does."""
    with zipfile.ZipFile(built.wheel) as opened:
        files = opened.namelist()
        own = _own(files)
        assert own == _own(built.held)
        assert [name for name in own if opened.read(name) != (built.tree / name).read_bytes()] == []
        others = {name.partition("/")[2] for name in set(files) - own}
        (metadata,) = [opened.read(name) for name in files if name.endswith(".dist-info/METADATA")]
    assert others == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    said = email.message_from_bytes(metadata)
    assert (said["Name"], said["Version"]) == ("stateflow-streams", stateflow.__version__)
    assert said["Requires-Python"] == f"<3.{int(SUPPORTED[-1][2:]) + 1},>={SUPPORTED[0]}"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Summary"]
    assert said["Keywords"]
    assert str(said.get_payload()).startswith("# stateflow\n")


@dataclass(frozen=True, slots=True)
class Installed:
    bin: Path
    empty: Path  # a directory from which nothing of the clone is found

    def stateflow(self, *words: str, status: int = 0) -> str:
        return _call(str(self.bin / "stateflow"), *words, cwd=self.empty, status=status, HOME=str(self.empty))

    def python(self, *words: str, cwd: Path | None = None) -> str:
        return _call(str(self.bin / "python"), *words, cwd=cwd or self.empty)


def _python(version: str) -> str | None:
    """Finds a Python that starts.

    The pyenv shim of a version that is not switched on does not start; the version itself does.
    """
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/{name}")
    for python in [each for each in (shutil.which(name), *map(str, sorted(pyenv))) if each is not None]:
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.fixture(scope="module", params=SUPPORTED)
def installed(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A virtual environment with the wheel.

    The tests' own Python sees the dependencies where the tests have them. For another Python they are installed, which
    takes minutes: make test-all does so.
    """
    place, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    bin_ = place / "bin"
    if request.param == OWN:
        _call(sys.executable, "-m", "venv", "--without-pip", str(place), cwd=empty)
        target = _call(str(bin_ / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty)
        Path(target.strip(), "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
        pip = (sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "install", "--no-deps", "--no-index")
        _call(*pip, str(built.wheel), cwd=empty)
        return Installed(bin_, empty)
    python = _python(request.param)
    if python is None:
        pytest.skip(f"there is no python{request.param} here that starts")
    if not THOROUGH:
        pytest.skip(f"python{request.param} needs everything installed: make test-all does so")
    _call(python, "-m", "venv", str(place), cwd=empty)
    _call(str(bin_ / "pip"), "install", "-q", f"{built.wheel}[connect,demo,jetstream]", "pytest", cwd=empty)
    return Installed(bin_, empty)


@pytest.mark.timeout(900)  # where everything is installed
def test_its_commands_work_from_an_empty_directory(installed: Installed) -> None:
    assert installed.stateflow("--version").startswith(f"stateflow {stateflow.__version__}\n")
    assert list(installed.empty.iterdir()) == []
    found = json.loads(installed.stateflow("doctor", "--data-dir", "state", "--json"))["findings"]
    assert {"Python", "disk"} <= {each["what"] for each in found}
    installed.stateflow("init", "alarms")
    assert "2 passed" in installed.python("-m", "pytest", "-p", "no:cacheprovider", cwd=installed.empty / "alarms")
    installed.stateflow("ledger", "init", "--ledger", "sqlite:///ledger.db")  # by its migrations


@pytest.mark.timeout(900)
def test_every_module_is_there_and_is_imported_from_the_wheel(built: Built, installed: Installed) -> None:
    *modules, where = installed.python("-c", IMPORTS).splitlines()
    assert Path(where).is_relative_to(installed.bin.parent)
    sources = [name for name in _own(built.held) if name.endswith(".py") and not WRITTEN.search(name)]
    named = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in sources}
    assert set(modules) == named - {*PACKAGES, "stateflow.__main__", "stateflow.ledger.migrations.env"}


@pytest.mark.timeout(900)
def test_what_users_write_is_checked_by_its_types(installed: Installed) -> None:
    module = installed.empty / "typed.py"
    module.write_text(TYPED)
    checks = (sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed.bin / "python"))
    told = _call(*checks, "--cache-dir", "cache", str(module), cwd=installed.empty)
    assert re.findall(r'Revealed type is "(?:builtins\.)?(\w+)"', told) == ["int", "float"]
