"""The page of all settings."""

from __future__ import annotations

import re

import pytest

from stateflow.settings.base import SECTIONS, Settings, checked, known_variables
from stateflow.settings.models import ReplicaProcess, ReplicaSettings
from tests.pages import ROOT, blocks

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / ".ci" / "docs")
    from settings_page import kind_of, page, unit_of

PAGE = ROOT / "docs" / "settings.md"
KINDS = [kind for kinds in SECTIONS.values() for kind in kinds]


def test_the_page_is_what_the_models_give() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text(), "run .ci/generate-settings"
    with pytest.raises(ValueError, match="no line that marks where the tables begin"):
        page("prose")


def test_every_variable_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert {name for name in known_variables() if f"| `{name}` |" not in text} == set()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_setting_says_what_it_is(kind: type[Settings]) -> None:
    assert kind.__doc__
    assert [name for name, info in kind.model_fields.items() if not info.description] == []


def test_no_key_is_of_two_models() -> None:
    for section, kinds in SECTIONS.items():
        names = [name for kind in kinds for name in kind.model_fields]
        assert len(names) == len(set(names)), section


def test_types_and_units() -> None:
    fields = ReplicaProcess.model_fields | ReplicaSettings.model_fields
    assert kind_of(fields["workers"]) == "integer ≥ 1, ≤ 256"
    assert kind_of(fields["acknowledge"]) == "wal, fsync, standby"
    units = ("lease_s", "pause_ms", "room_bytes", "sources_bytes_max", "verify_bytes_per_s", "workers")
    assert list(map(unit_of, units)) == ["s", "ms", "bytes", "bytes", "bytes/s", ""]


def test_examples_of_the_page_are_files_of_settings() -> None:
    import tomllib

    examples = [block for block in blocks(PAGE) if block.kind == "toml"]
    assert examples
    for block in examples:
        checked(tomllib.loads(block.text), SECTIONS, block.text, PAGE)


def test_messages_of_the_page_are_those_of_the_code() -> None:
    """Messages quoted on the page are those of the code.

    The quoted one is tested in test_file.py, with another file name.
    """
    quoted = re.findall(r"`(there is no key [^`]+)`", PAGE.read_text())
    assert quoted == ["there is no key replica.acknowlege (file=fleet.toml line=3): did you mean acknowledge?"]
