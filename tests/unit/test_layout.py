"""Each unit test lies in the folder of the module that it tests, and no module of the product is too long."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).parent
ROOT = UNIT.parents[1]
#: a longer module has a part that belongs to another one
LINES_MAX = 700
#: tests about no single module
CROSS_CUTTING = {
    "test_audit.py",
    "test_distribution.py",
    "test_help.py",
    "test_layout.py",
    "test_pages.py",
    "test_public_api.py",
    "test_site.py",
    "state/test_docs.py",
    "state/test_tracked.py",
}


def package_of(directory: Path) -> Path:
    """Returns the package that a folder of tests is about.

    ``reconfig`` and ``benchmarks`` lie beside ``stateflow``, whose own packages drop its name here.
    """
    below = directory.relative_to(UNIT)
    return ROOT / below if below.parts[:1] in (("reconfig",), ("benchmarks",)) else ROOT / "stateflow" / below


@pytest.mark.parametrize("file", sorted(UNIT.rglob("test_*.py")), ids=lambda file: str(file.relative_to(UNIT)))
def test_a_test_is_named_after_its_module(file: Path) -> None:
    """A test file is named after its module.

    ``test_operator.py`` and ``test_operator_batch.py`` are both about ``operator.py``.
    """
    assert (file.parent / "__init__.py").exists(), "tests in two directories may have one name"
    package = package_of(file.parent)
    assert (package / "__init__.py").exists(), f"there is no package {package.relative_to(ROOT)}"
    if str(file.relative_to(UNIT)) not in CROSS_CUTTING:
        words = file.stem.removeprefix("test_").split("_")
        modules = ["_".join(words[: length + 1]) for length in range(len(words))]
        assert any((package / f"{module}.py").exists() for module in modules), f"none of {modules} in {package}"


def test_no_module_is_too_long() -> None:
    modules = [file for package in ("stateflow", "reconfig") for file in (ROOT / package).rglob("*.py")]
    lines = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").count("\n")
        for file in modules
        if "_pb2" not in file.name
    }
    long = sorted((count, name) for name, count in lines.items() if count > LINES_MAX)
    assert long == [], f"more than {LINES_MAX} lines; move a part to the module that it belongs to: " + ", ".join(
        f"{name} has {count}" for count, name in reversed(long)
    )


def contract(name: str) -> dict[str, Any]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(each for each in contracts if each["name"].startswith(name))


def test_the_readme_has_the_layers_that_are_held() -> None:
    shown = re.search(r"```text\n(stateflow\.cli .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    held = [name.strip() for layer in contract("layers")["layers"] for name in layer.split("|")]
    at = [re.search(rf"\b({re.escape(name)}|{name.rpartition('.')[2]})(?=\s)", shown[1]) for name in held]
    assert [name for name, found in zip(held, at, strict=True) if found is None] == []
    starts = [shown[1].count("\n", 0, found.start()) for found in at if found is not None]
    assert starts == sorted(starts), "from above to below"


def test_everything_but_the_command_line_is_held_not_to_know_reconfig() -> None:
    apart = {"__init__", "__main__", "__pycache__", "cli", "examples", "py"}
    there = {path.name.partition(".")[0] for path in (ROOT / "stateflow").iterdir()} - apart
    assert {f"stateflow.{name}" for name in there} == set(contract("stateflow does not know")["source_modules"])


def test_what_is_cross_cutting_is_there() -> None:
    assert [name for name in CROSS_CUTTING if not (UNIT / name).exists()] == []
