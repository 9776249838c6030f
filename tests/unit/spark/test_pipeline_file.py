"""Pipeline files: their content, parameters, and secrets, which are never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stateflow.errors import InvalidArgument, OperatorFailed, PipelineFailed
from stateflow.ledger import Ledger
from stateflow.spark.pipeline import PipelineFile, failure_of, load_pipeline

ENVIRONMENT = {"DB_PASSWORD": "hunter2", "DB_USER": "me"}


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tallies",
        "cluster": "localhost:7070",
        "parameters": {"day": "2024-01-01", "width": 4},
        "connections": {
            "warehouse": {"url": "jdbc:x://db", "user": "${ENV:DB_USER}", "password": "${env.DB_PASSWORD}"}
        },
        "source": {"format": "parquet", "path": "in/${param.day}", "schema": "k string, v long"},
        "operators": [{"operator": "ops:Tally", "order_by": "v", "tasks": "${param.width}"}],
        "sink": {"format": "jdbc", "connection": "warehouse", "options": {"dbtable": "t"}, "checkpoint": "c"},
        **changes,
    }


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def call(content: Any, settings: dict[str, str] | None = None, **environment: str) -> PipelineFile:
        file = tmp_path / "pipeline.yml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_pipeline(file, settings or {}, {**ENVIRONMENT, **environment})

    return call


def test_parameters_have_defaults_and_are_set_with_their_type(load: Any) -> None:
    config = load(document()).config
    assert (config.source.path, config.operators[0].tasks) == ("in/2024-01-01", 4)
    config = load(document(), {"day": "2024-02-02", "width": "8"}).config
    assert (config.source.path, config.operators[0].tasks) == ("in/2024-02-02", 8)
    assert config.parameters == {"day": "2024-02-02", "width": 8}


def test_a_default_may_be_of_the_environment_and_is_a_secret(load: Any) -> None:
    """A default may come from the environment, and is a secret then.

    `${env.DAY}` used to be taken for the name of a directory.
    """
    given = document(parameters={"day": "at-${env.DAY}", "width": 4})
    pipeline = load(given, DAY="monday")
    assert (pipeline.config.source.path, pipeline.config.parameters["day"]) == ("in/at-monday", "at-monday")
    assert "monday" not in json.dumps(pipeline.shown)
    assert pipeline.secrets.masked("x monday") == "x ***"
    with pytest.raises(InvalidArgument, match=r"DAY is not set in the environment \(at=parameters\.day\)"):
        load(given)
    assert load(given, {"day": "${env.DAY}"}).config.source.path == "in/${env.DAY}", "what is set is taken as it is"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": {"day": "${param.width}", "width": 4}}, "a default cannot refer to the parameter 'width'"),
        ({"name": "${env.MY-NAME}"}, r"\$\{env.MY-NAME\} is not a valid reference \(at=name\)"),
        ({"name": "${Param.day}"}, "is not a valid reference"),
        ({"name": "${params.day}"}, "is not a valid reference"),
        ({"connections": {"warehouse": {"${env.DB_USER}": "x"}}}, "cannot contain a reference"),
    ],
)
def test_a_reference_is_replaced_or_refused(load: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load(document(**changes))


TEXTS = """
name: {name}
parameters: {{version: {parameter}}}
source: {{format: csv, path: in, schema: "k string", streaming: {streaming}, options: {{header: {option}}}}}
operators: [{{operator: "ops:Tally", allowed_lateness: {lateness}}}]
sink: {{format: console, checkpoint: c}}
"""
PLAIN = {"name": "n", "parameter": "x", "streaming": "true", "option": "true", "lateness": "1.5"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "no"}, 'name is no, which YAML reads as false .*line=2.*write "no", in quotes, or write false'),
        ({"name": "1.10"}, 'name is 1.10, which YAML reads as 1.1 .*write "1.10", in quotes, or write 1.1'),
        ({"parameter": "1.10"}, r"parameters\.version is 1\.10, which YAML reads as 1\.1"),
        (
            {"parameter": "2013-01-01"},
            'version is 2013-01-01, which YAML reads as 2013-01-01 .*"2013-01-01", in quotes$',
        ),
        ({"parameter": "12:30"}, "reads as 750"),
        ({"parameter": "0755"}, "reads as 493"),
        ({"parameter": "1_000"}, "reads as 1000"),
        ({"parameter": "0x1F"}, "reads as 31"),
        ({"option": "yes"}, r"source\.options\.header is yes, which YAML reads as true"),
        ({"option": "Off"}, "reads as false"),
    ],
)
def test_what_yaml_reads_otherwise_than_it_is_written_is_asked_about(
    load: Any, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load(TEXTS.format(**PLAIN | changes))


@pytest.mark.parametrize("lateness", [".inf", "1.0e+300", "2000000000"])
def test_a_lateness_that_is_no_span_is_refused(load: Any, lateness: str) -> None:
    """The pipeline ended in an OverflowError when it built the operator."""
    with pytest.raises(InvalidArgument, match=r"allowed_lateness is invalid: .* less than or equal to 1000000000"):
        load(TEXTS.format(**PLAIN | {"lateness": lateness}))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": '"no"', "parameter": "'1.10'", "option": '"yes"'},
        {"parameter": "1.1", "option": "True"},
        {"parameter": "-7", "option": "false"},
        {"streaming": "no", "lateness": "1.50"},  # the types of these are known
        {"parameter": "~"},
    ],
)
def test_what_is_not_in_doubt_is_taken(load: Any, changes: dict[str, str]) -> None:
    load(TEXTS.format(**PLAIN | changes), {"version": "1.10"} if changes == {"parameter": "~"} else None)


def test_options_of_a_connection_come_first(load: Any) -> None:
    changed = document()
    changed["sink"]["options"]["user"] = "other"
    config = load(changed).config
    assert config.options(config.sink) == {
        "url": "jdbc:x://db",
        "user": "other",
        "password": "hunter2",
        "dbtable": "t",
    }


def test_what_is_shown_has_no_secrets(load: Any) -> None:
    changed = document()
    changed["source"]["options"] = {
        "servers": "nats://me:secret1@host:4222",
        "api_token": "secret2",
        "header": "Bearer ${DB_PASSWORD}",
    }
    changed["connections"]["other"] = {"by number": {1: ["2024", "${DB_PASSWORD}"]}}
    shown = load(changed).shown
    assert shown["connections"].pop("other") == {"by number": {"1": ["2024", "***"]}}
    text = json.dumps(shown)
    for secret in ("hunter2", "secret1", "secret2"):
        assert secret not in text
    assert shown["connections"]["warehouse"] == {"url": "jdbc:x://db", "user": "***", "password": "***"}
    assert shown["source"]["options"]["header"] == "Bearer ***"
    assert shown["source"]["path"] == "in/2024-01-01"
    assert shown["trigger"] == "0 seconds", "defaults are shown"
    assert load(changed).secrets.masked("connect me/hunter2") == "connect ***/***"


def test_fields_with_a_pattern_may_be_of_the_environment(load: Any) -> None:
    sink = {"format": "parquet", "path": "out", "mode": "${env.MODE}", "checkpoint": "c"}
    pipeline = load(document(trigger="${N} seconds", sink=sink), N="5", MODE="append")
    assert (pipeline.config.trigger, pipeline.config.sink.mode) == ("5 seconds", "append")
    assert (pipeline.shown["trigger"], pipeline.shown["sink"]["mode"]) == ("*** seconds", "***")
    kafka = {"format": "kafka", "mode": "update", "checkpoint": "c"}
    timely = load(document(real_time="${env.N} seconds", sink=kafka, operators=[{"operator": "a:B"}]), N="5")
    assert (timely.config.real_time, timely.shown["real_time"]) == ("5 seconds", "*** seconds")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sorce": {}}, "sorce is unknown: did you mean 'source'?"),
        ({"source": {"fromat": "csv"}}, "source.format is missing: add it"),
        ({"source": {"format": "csv", "shema": "k int"}}, "source.shema is unknown: did you mean 'schema'?"),
        (
            {"operators": [{"operator": "a:B"}, {"operator": "a:C", "order": "v"}]},
            "operators[1].order is unknown: did you mean 'order_by'?",
        ),
        (
            {"operators": [{"operator": "a:B", "initial_state": {"format": "csv", "xyz": 1}}]},
            "operators[0].initial_state.xyz is unknown: leave it out; known: format, path, schema",
        ),
        ({"source": {"format": 3}}, "source.format is invalid: Input should be a valid string"),
        ({"trigger": "often"}, "trigger is invalid: "),
        ({"sink": {"format": "parquet"}}, "sink.checkpoint is missing: a streaming pipeline could not resume"),
        (
            {"sink": {"format": "jdbc", "connection": "warehous", "checkpoint": "c"}},
            "sink.connection: there is no connection profile 'warehous': did you mean 'warehouse'?",
        ),
        ({"name": "${env.NOWHERE}"}, "NOWHERE is not set in the environment (at=name): set it"),
        ({"source": {"format": "csv", "path": "${param.dya}"}}, "(at=source.path): did you mean 'day'?"),
        ({"parameters": {"day": None, "width": 1}}, "the parameter 'day' has no value: pass --set day=…"),
        (
            {"source": {"format": "csv", "streaming": False}, "state_manager": {}},
            "state_manager.type cannot be None (where_in=state_manager.type): use SqLiteStateManager | ",
        ),
        (
            {"state_manager": {"type": "SqLiteStateManager", "conf": {"connection": "nowhere"}}},
            "no connection profile 'nowhere'",
        ),
        (
            {"source": {"format": "csv", "streaming": True, "record": "n"}},
            "source.record is only for a batch pipeline that records a stage in a ledger",
        ),
        ({"real_time": "often"}, "real_time is invalid: "),
        ({"real_time": "5 seconds"}, "sink.format conflicts with real_time: jdbc is written in micro-batches"),
        (
            {"real_time": "5 seconds", "trigger": "0 seconds"},
            "trigger conflicts with real_time: real_time sets the length",
        ),
        (
            {"real_time": "5 seconds", "sink": {"format": "kafka", "mode": "append", "checkpoint": "c"}},
            "sink.mode conflicts with real_time: use mode update",
        ),
        (
            {"real_time": "5 seconds", "source": {"format": "csv", "streaming": False}},
            "source.streaming conflicts with real_time: a batch pipeline cannot run in real-time mode",
        ),
        (
            {"operators": [{"operator": "a:B", "position": ["p", "o"]}]},
            "operators[0].position applies to real-time mode only",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_path(load: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(document(**changes))
    line = str(caught.value)
    assert said in line
    assert line.startswith("invalid_argument: ")
    assert "hunter2" not in line


def test_a_batch_pipeline_needs_no_checkpoint(load: Any) -> None:
    config = load(
        document(source={"format": "csv", "streaming": False}, sink={"format": "parquet", "path": "out"})
    ).config
    assert config.sink.checkpoint is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dya": "1"}, "did you mean 'day'"),
        ({"width": "wide"}, "'wide' is not a valid value of width: use a value of type int"),
    ],
)
def test_wrong_settings(load: Any, settings: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load(document(), settings)


@pytest.mark.parametrize(
    ("content", "said"), [("[1]", "declares no pipeline"), ("a: [", "is not valid YAML"), ("", "declares")]
)
def test_files_that_are_none(load: Any, content: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load(content)


def test_the_state_manager_is_the_ledgers(load: Any, tmp_path: Path) -> None:
    section = {"name": "s", "type": "SqLiteStateManager", "conf": {"connection": "ledger"}}
    changed = document(state_manager=section)
    changed["connections"]["ledger"] = {"database": "${LEDGER}"}
    file = load(changed, LEDGER=str(tmp_path / "ledger.db"))
    with pytest.raises(InvalidArgument, match=r"there is no ledger .*`stateflow ledger init`"):
        file.state_manager()
    assert not (tmp_path / "ledger.db").exists()
    Ledger(f"sqlite:///{tmp_path / 'ledger.db'}").close()
    manager = file.state_manager()
    assert manager is not None
    manager.ledger.close()
    assert str(tmp_path) not in json.dumps(file.shown)
    assert load(document()).state_manager() is None


def test_the_error_of_a_task_is_found_in_sparks() -> None:
    text = (
        "Job aborted\nTraceback (most recent call last):\n  File x\n"
        "stateflow.errors.OperatorFailed: operator_failed: process() raised ValueError: no (operator=Tally): mend it\n"
        "\tat org.apache.spark"
    )
    found = failure_of(RuntimeError(text))
    assert isinstance(found, OperatorFailed)
    assert str(found) == "operator_failed: process() raised ValueError: no (operator=Tally): mend it"
    other = failure_of(RuntimeError("\n[TABLE_NOT_FOUND] there is none\nat x"))
    assert isinstance(other, PipelineFailed)
    assert (
        str(other)
        == "pipeline_failed: [TABLE_NOT_FOUND] there is none: set spark.log.level to ERROR to see Spark's own log"
    )
