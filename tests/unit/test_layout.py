"""Unit tests lie where the modules lie that they are about."""

from __future__ import annotations

from pathlib import Path

import pytest

UNIT = Path(__file__).parent
ROOT = UNIT.parents[1]
#: about no one module
CROSS_CUTTING = {
    "test_distribution.py",
    "test_layout.py",
    "test_pages.py",
    "test_public_api.py",
    "state/test_docs.py",
    "state/test_tracked.py",
}


def package_of(directory: Path) -> Path:
    """``reconfig`` and ``benchmarks`` lie beside ``stateflow``, whose packages are not named after it here."""
    below = directory.relative_to(UNIT)
    return ROOT / below if below.parts[:1] in (("reconfig",), ("benchmarks",)) else ROOT / "stateflow" / below


@pytest.mark.parametrize("file", sorted(UNIT.rglob("test_*.py")), ids=lambda file: str(file.relative_to(UNIT)))
def test_a_test_is_named_after_its_module(file: Path) -> None:
    """``test_operator.py`` and ``test_operator_batch.py`` are both about ``operator.py``."""
    assert (file.parent / "__init__.py").exists(), "tests in two directories may have one name"
    package = package_of(file.parent)
    assert (package / "__init__.py").exists(), f"there is no package {package.relative_to(ROOT)}"
    if str(file.relative_to(UNIT)) not in CROSS_CUTTING:
        words = file.stem.removeprefix("test_").split("_")
        modules = ["_".join(words[: length + 1]) for length in range(len(words))]
        assert any((package / f"{module}.py").exists() for module in modules), f"none of {modules} in {package}"


def test_what_is_cross_cutting_is_there() -> None:
    assert [name for name in CROSS_CUTTING if not (UNIT / name).exists()] == []
