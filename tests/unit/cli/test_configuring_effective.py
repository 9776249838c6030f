"""Output of ``--print-config``: read back, it gives the same settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from stateflow.cli.configuring import COMMANDS, PROCESSES, Part, effective
from stateflow.private import masked
from stateflow.settings import CONFIG, ConnectionSettings, LedgerSettings, Settings, base
from stateflow.settings.base import FRACTION_MAX, SECTIONS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: masked(text) == text)
KINDS: list[type[Settings]] = [kind for kinds in SECTIONS.values() for kind in kinds]
#: these variables, others, or none
WHO = st.sampled_from(
    [{}, {"tls_ca": "ca", "tls_cert": "cert", "tls_key": "key"}, {"token_file": "token"}, {"token": SecretStr("abc")}]
)


def values_of(info: FieldInfo) -> st.SearchStrategy[Any]:
    limits = {name: getattr(each, name) for each in info.metadata for name in ("ge", "gt", "le") if hasattr(each, name)}
    least, most = limits.get("ge", limits.get("gt")), limits.get("le")
    kind: Any = info.annotation
    if kind is int:
        return st.integers(least, most if most is not None else 1 << 62)
    if kind is float:
        most = FRACTION_MAX if most is None else most
        return st.floats(-FRACTION_MAX if least is None else least, most, exclude_min="gt" in limits)
    if kind is bool:
        return st.booleans()
    if kind is SecretStr:
        return TEXTS.map(SecretStr)
    if kind == dict[str, str]:
        return st.dictionaries(TEXTS, TEXTS, max_size=3)
    for each in info.metadata:
        if getattr(each, "pattern", None) is not None:
            return st.from_regex(each.pattern, fullmatch=True)
    if kind is str:
        shortest = max([getattr(each, "min_length", 0) or 0 for each in info.metadata], default=0)
        return TEXTS.filter(lambda text: len(text) >= shortest)
    return st.sampled_from(kind.__args__)


@st.composite
def models(draw: st.DrawFn, kind: type[Settings]) -> Settings:
    given = {
        name: draw(values_of(info))
        for name, info in kind.model_fields.items()
        if not name.startswith(("tls_", "token"))
    }
    return kind(**given, **(draw(WHO) if kind is ConnectionSettings else {}))


def open_(model: Settings) -> dict[str, Any]:
    """Returns the fields of a model except its secrets."""
    return {name: value for name, value in model if not isinstance(value, SecretStr)}


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for kind in KINDS:
        for name in kind.model_fields:
            monkeypatch.delenv(kind.variable(name), raising=False)
    return monkeypatch


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_as_the_same(
    data: st.DataObject, tmp_path: Path, no_variables: pytest.MonkeyPatch
) -> None:
    no_variables.delenv(CONFIG, raising=False)
    found = [data.draw(models(kind)) for kind in data.draw(st.sampled_from([*PROCESSES.values(), COMMANDS]))]
    text = effective("x", [Part(model, dict(model)) for model in found])

    file = tmp_path / "fleet.toml"
    file.write_text(text, encoding="utf-8", newline="")
    base._read.cache_clear()
    no_variables.setenv(CONFIG, str(file))
    assert [open_(type(model)()) for model in found] == [open_(model) for model in found]


def test_all_is_said_once_with_what_it_is_and_where_it_is_from(no_variables: pytest.MonkeyPatch) -> None:
    no_variables.setenv("STATEFLOW_LOG_FORMAT", "json")
    for kinds in PROCESSES.values():
        text = effective("x", [Part(kind(), {}) for kind in kinds])
        read = tomllib.loads(text)
        for kind in kinds:
            for name, info in kind.model_fields.items():
                assert name in read[kind.section]
                origin = "STATEFLOW_LOG_FORMAT" if (kind.section, name) == ("log", "format") else "default"
                assert f"# {info.description} ({origin})\n" in text


def test_secrets_are_not_written() -> None:
    text = effective("x", [Part(ConnectionSettings(token=SecretStr("abc")), {"token": SecretStr("abc")})])
    assert '(token)\n# omitted, contains a secret: token = "***"\n' in text
    assert "abc" not in text
    assert "token" not in tomllib.loads(text)["connection"]

    ledger = LedgerSettings(url="postgresql://me:abc@host/db")
    text = effective("x", [Part(ledger, {"url": ledger.url})])
    assert 'contains a secret: url = "postgresql://me:***@host/db"\n' in text
    assert tomllib.loads(text) == {"ledger": {}}
