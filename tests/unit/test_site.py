"""The documentation site: its generated pages and its links. `make check` builds all of it."""

from __future__ import annotations

import re

import pytest
import typer.main
from typer.core import TyperGroup

import stateflow
from stateflow import client, ledger, spark, state, testing
from stateflow.cli.app import app
from stateflow.errors import StateflowError
from stateflow.ledger.records import METADATA
from tests.pages import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / ".ci" / "docs")
    import command_page
    import error_page
    import format_page
    import ledger_page
    import links
    import service_page

API = ROOT / "docs" / "reference" / "api"


@pytest.mark.parametrize(
    ("page", "text", "becomes"),
    [
        ("spark.md", "[a](state.md#types)", "[a](state.md#types)"),
        ("howto/drain.md", "[a](../fleet.md)", "[a](../fleet.md)"),
        ("howto/drain.md", "[a](../../README.md)", "[a](../readme.md)"),
        ("readme.md", "[a](docs/spark.md) ![b](docs/images/demo.png)", "[a](spark.md) ![b](images/demo.png)"),
        ("readme.md", "[a](CONTRIBUTING.md) [b](docs/decisions)", "[a](contributing.md) [b](decisions/README.md)"),
        ("reference/errors.md", "[a](../../stateflow/errors.py)", "[a](../source/stateflow/errors.py.md)"),
        ("spark.md", "[a](https://example.org/x.md) [b](#types)", "[a](https://example.org/x.md) [b](#types)"),
        ("spark.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("readme.md", "```text\n[a](docs/spark.md)\n```", "```text\n[a](docs/spark.md)\n```"),
    ],
)
def test_links_are_those_of_the_site(page: str, text: str, becomes: str) -> None:
    assert links.rewritten(text, page) == becomes


def test_files_that_a_page_names_are_found() -> None:
    text = "[a](../stateflow/errors.py) [b](spark.md) [c](https://example.org) [d](nowhere.md)"
    assert list(links.targets(text, "docs/state.md")) == ["stateflow/errors.py", "docs/spark.md"]


def test_every_public_name_is_on_a_page() -> None:
    shown = set(re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in API.glob("*.md")), re.MULTILINE))
    short = {name.rpartition(".")[2] for name in shown}
    modules = (state, testing, spark, client, ledger)
    assert [f"{each.__name__}.{name}" for each in modules for name in each.__all__ if name not in short] == []
    of_their_own = {"state", "StateflowError"}  # a module, and the errors' own page
    assert set(stateflow.__all__) - short == of_their_own


def test_every_error_that_is_raised_says_what_to_do() -> None:
    page = error_page.page()
    found = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    groups = {kind.code for kind in error_page._abstract()}
    assert set(StateflowError.registry) - found <= groups
    without = [kind.code for kind, said in error_page.raised().items() if not any(each.remedy for each in said)]
    assert without == []


def test_texts_of_errors_are_read_from_the_code() -> None:
    said = {each.what: each.remedy for each in error_page.raised()[StateflowError.registry["data_dir_locked"]]}
    assert said
    remedies = " ".join(each.remedy for each in error_page.raised()[StateflowError.registry["busy"]])
    assert "STATEFLOW_SERVER_CALLS_PER_CALLER_MAX" in remedies
    assert "STATEFLOW_REPLICA_FOLLOWERS_MAX" in remedies


def test_every_command_is_there() -> None:
    def leaves(command: object, words: tuple[str, ...]) -> list[str]:
        if not isinstance(command, TyperGroup):
            return [" ".join(words)]
        return [leaf for name, each in command.commands.items() for leaf in leaves(each, (*words, name))]

    found = re.findall(r"^#+ stateflow (.+)$", command_page.page(), re.MULTILINE)
    assert set(leaves(typer.main.get_command(app), ())) <= set(found)


def test_every_call_table_and_format_is_there() -> None:
    services = service_page.page()
    for file in service_page.described():
        for service in file.service:
            assert all(f"| `{method.name}` |" in services for method in service.method)
        assert all(f"### {message.name}\n" in services for message in file.message_type)
    assert "Rows in, committed outputs back" in services, "with what the protos say of them"
    tables = ledger_page.page()
    assert all(f"## {name}\n" in tables for name in METADATA.tables)
    formats = format_page.page()
    assert all(f"In `{name}`" in formats for name in format_page.FORMATS)
    assert ":meth:" not in formats
