"""YAML files that people write: read with bounds, so that no file takes the process's memory, time or stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from stateflow.errors import InvalidArgument

BYTES_MAX = 1 << 20
#: sections within each other
DEPTH_MAX = 50
#: values, those that anchors repeat counted each time
VALUES_MAX = 100_000


def read_document(path: Path) -> Any:
    """What a YAML file holds. Raises InvalidArgument: it cannot be read, or is none, or is more than anybody writes."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", remedy="name a YAML file") from error
    if len(data) > BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {BYTES_MAX >> 20} MiB", remedy="name a YAML file")
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        what = f"it is not UTF-8 (byte {error.start})"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = (error.problem or error.context or "it cannot be read") + (f" (line {mark.line + 1})" if mark else "")
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        what = " ".join(str(error).split())[:200]
    raise InvalidArgument(f"{path} is no YAML: {what}", remedy="correct it")


def parse(text: str) -> Any:
    """Raises yaml.YAMLError; ValueError for a date or number that is none."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        try:
            if self.depth > DEPTH_MAX:
                raise yaml.MarkedYAMLError(
                    problem=f"sections are nested deeper than {DEPTH_MAX}", problem_mark=self.get_mark()
                )
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {}, 0)
        return node


def _measure(node: Node, known: dict[int, int], depth: int) -> int:
    """How many values a node has, with what its aliases stand for. Raises MarkedYAMLError when they are too many, too
    deep, within themselves, or under the same name twice."""
    size = known.get(id(node))
    if size == 0:
        raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
    if size is not None:
        return size
    if depth > DEPTH_MAX:
        raise yaml.MarkedYAMLError(problem=f"sections are nested deeper than {DEPTH_MAX}", problem_mark=node.start_mark)
    known[id(node)] = 0  # being measured
    size = 1
    if isinstance(node, SequenceNode):
        size += sum(_measure(each, known, depth + 1) for each in node.value)
    elif isinstance(node, MappingNode):
        names: set[tuple[str, str]] = set()
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value[:80]!r} is there twice", problem_mark=key.start_mark
                    )
                names.add((key.tag, key.value))
            size += _measure(key, known, depth + 1) + _measure(value, known, depth + 1)
    if size > VALUES_MAX:
        raise yaml.MarkedYAMLError(
            problem=f"its anchors come to more than {VALUES_MAX:,} values", problem_mark=node.start_mark
        )
    known[id(node)] = size
    return size
