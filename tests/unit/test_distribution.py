"""The distribution's own name: on the package index ``stateflow`` belongs to another project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import stateflow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [ROOT / "README.md", ROOT / "pyproject.toml"] + [
    path
    for folder in ("stateflow", "reconfig", "benchmarks", "tests", "docs")
    for kind in ("*.py", "*.md")
    for path in (ROOT / folder).rglob(kind)
]
#: a distribution with extras; indexing in Python has no such name before the bracket
ASKED = re.compile(r"(?<![\w.`/-])(stateflow[\w.-]*)\[([a-z0-9,]+)\]")


def test_its_name_and_version() -> None:
    assert PROJECT["name"] == "stateflow-streams"
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", stateflow.__version__)


def test_whoever_is_told_to_install_it_is_told_its_name() -> None:
    wheel = f"{PROJECT['name'].replace('-', '_')}-{stateflow.__version__}-py3-none-any.whl"
    told = [(path, *asked) for path in TEXTS for asked in ASKED.findall(path.read_text())]
    assert len(told) > 10
    assert [each for each in told if each[1] not in (PROJECT["name"], wheel)] == []
    assert [each for each in told if not set(each[2].split(",")) <= PROJECT["optional-dependencies"].keys()] == []
