"""Values given to users are plain frozen data, never messages of a wire format, whose fields and names may change."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from google.protobuf.message import Message

from stateflow import client, reports, rpc, status
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import value_of
from stateflow.testing import LocalCluster
from stateflow.types import MoveOptions

SURFACES = [client.Cluster, client.Migration, client.StreamClient, LocalCluster]
#: exchanged between controllers and clients only
BETWEEN = {status.ClusterReport, status.Deployment, reports.Taken}
REPORTS = [
    each
    for module in (reports, status)
    for each in vars(module).values()
    if is_dataclass(each) and each.__module__ == module.__name__ and each not in BETWEEN
]


def parts(annotation: object) -> Iterator[object]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from parts(part)


def promised() -> Iterator[tuple[str, object]]:
    for surface in SURFACES:
        for name, member in inspect.getmembers(surface):
            if not name.startswith("_") and isinstance(member, types.FunctionType | property):
                function = member.fget if isinstance(member, property) else member
                for part in parts(typing.get_type_hints(inspect.unwrap(function)).get("return")):
                    yield f"{surface.__name__}.{name}", part


def test_no_method_returns_a_message() -> None:
    found = list(promised())
    assert ("Cluster.checkpoint", client.CheckpointReport) in found
    assert [where for where, part in found if isinstance(part, type) and issubclass(part, Message)] == []


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_reports_are_frozen_and_say_what_they_are(report: type) -> None:
    assert issubclass(report, reports.Report)
    assert report.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert report.__doc__
    assert not report.__doc__.startswith(f"{report.__name__}("), "the docstring that dataclasses write"
    for hint in typing.get_type_hints(report).values():
        assert not any(isinstance(part, type) and issubclass(part, Message) for part in parts(hint))


def test_a_report_is_a_dict_for_machines() -> None:
    sample = rpb.RequestSample(number=3, at_us=5, operator="Tally", rows=2, total_ms=1.5, held_ms=0.5)
    view = rpb.PartitionView(operator="Tally", partition=1, state="OWNED", epoch=2, sequence=9, batch_rate=0.5, rows=8)
    found = value_of(
        reports.ReplicaStatistics, rpb.StatsReply(samples=[sample], partitions=[view], rows=7, checkpoints=1)
    )
    assert json.loads(json.dumps(found.to_dict())) == {
        "requests": [{"number": 3, "at_us": 5, "operator": "Tally", "rows": 2, "total_ms": 1.5, "held_ms": 0.5}],
        "partitions": [
            {
                "operator": "Tally",
                "partition": 1,
                "state": "OWNED",
                "epoch": 2,
                "sequence": 9,
                "move_id": "",
                "batch_rate": 0.5,
                "rows": 8,
                "bytes": 0,
                "entries": None,
            }
        ],
        "rows": 7,
        "checkpoints": 1,
    }


def test_options_of_moves_are_those_of_the_wire() -> None:
    assert {each.name for each in fields(MoveOptions)} == {
        each.name for each in rpc.controller_pb2.MoveOptions.DESCRIPTOR.fields
    }
    assert {each.name for each in fields(client.CheckpointReport)} <= set(rpb.CheckpointReply.DESCRIPTOR.fields_by_name)
