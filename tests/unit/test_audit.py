"""The check of pinned packages against known vulnerabilities, ``.ci/audit``."""

from __future__ import annotations

import importlib.machinery
import json
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADVISORY = """
id: PYSEC-2026-1
modified: 2026-02-06T20:20:18.162431Z
published: '2026-01-29T23:15:00Z'
aliases: [CVE-2026-1]
affected:
- package: {ecosystem: PyPI, name: Broken_Thing}
  ranges:
  - type: GIT
    events: [{introduced: "0"}, {fixed: 33ccdfb0}]
  - type: ECOSYSTEM
    events: [{introduced: "0"}, {fixed: 3.9.2}, {introduced: "4.0"}, {last_affected: 4.1.0}]
  versions: [3.9.1, 4.0.0]
"""


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader("audit", str(ROOT / ".ci" / "audit"))
    module = types.ModuleType(loader.name)
    module.__file__ = loader.path
    loader.exec_module(module)
    folder = tmp_path / "vulns" / "broken-thing"
    folder.mkdir(parents=True)
    (folder / "PYSEC-2026-1.yaml").write_text(ADVISORY)
    monkeypatch.setattr(module, "KNOWN", tmp_path / "advisories.json")
    monkeypatch.setattr(module, "PINS", tmp_path / "constraints.txt")
    return module


def pin(audit: types.ModuleType, version: str) -> None:
    audit.PINS.write_text(f"other==1.0\nbroken.thing=={version}\n")
    audit.update(audit.PINS.parent)


@pytest.mark.parametrize("version", ["3.9.1", "0.1", "4.0", "4.1.0"])
def test_a_pinned_version_with_a_known_vulnerability_is_named(audit: types.ModuleType, version: str) -> None:
    pin(audit, version)
    with pytest.raises(SystemExit, match=rf"broken-thing {version}: PYSEC-2026-1, CVE-2026-1"):
        audit.check()


@pytest.mark.parametrize("version", ["3.9.2", "3.10", "4.1.1"])
def test_a_mended_version_passes(audit: types.ModuleType, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    pin(audit, version)
    audit.check()
    assert "none of 1 known advisories concerns the 2 pinned packages" in capsys.readouterr().out


def test_a_folder_without_advisories_replaces_nothing(audit: types.ModuleType, tmp_path: Path) -> None:
    pin(audit, "3.9.2")
    before = audit.KNOWN.read_text()
    with pytest.raises(SystemExit, match="holds no advisories"):
        audit.update(tmp_path / "nowhere")
    assert audit.KNOWN.read_text() == before


def test_what_the_project_pins_was_compared() -> None:
    """The names of the file are those of constraints.txt; otherwise nothing would ever match."""
    known = json.loads((ROOT / ".ci" / "advisories.json").read_text())
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert len(known["packages"]) > 20
    assert not [name for name in known["packages"] if f"\n{name}==" not in f"\n{pinned}"]
