"""Every call has a deadline, or a limit for silence: no process is waited for without end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2
from tests.pages import ROOT

METHODS = {
    method.name
    for module in (agent_pb2, controller_pb2, replica_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
#: calls without a deadline of their own, and why none of them lasts for ever
ELSEWHERE = {
    "stateflow/replica/peers.py SourceReplica.fetch": "Peer._next limits the silence between two pieces",
    "stateflow/replica/peers.py SourceReplica.follow": "IncomingTransfer._next limits the silence; sources say nothing "
    "for FOLLOW_IDLE_S at most",
    "stateflow/replica/peers.py Controller.heartbeat": "_call passes its time limit on",
    "stateflow/replica/peers.py Controller.register": "_call passes its time limit on",
    "stateflow/replica/peers.py Controller.claim": "_call passes its time limit on",
    "stateflow/replica/peers.py Controller.bundle_part": "_call passes its time limit on",
    "stateflow/rpc/clients.py _link": "BatchSession.check_silence gives a silent stream up",
}


def unlimited(source: str) -> Iterator[str]:
    """Yields the functions, by qualified name, that make a call without ``timeout`` and without a limit for silence."""
    tree = ast.parse(source)
    within = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if _names_a_call(node) and not _is_limited(node, within):
            around = [node, *_around(node, within)]
            names = [each.name for each in around if isinstance(each, FUNCTIONS | ast.ClassDef)]
            yield ".".join(reversed(names))


def _names_a_call(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=stub, attr=name):
            return name in METHODS and _is_stub(stub)
        case ast.Call(func=ast.Name("getattr"), args=[stub, *_]):
            return _is_stub(stub)
    return False


def _is_stub(node: ast.expr) -> bool:
    """Tells whether an expression is a stub, such as ``self._stub``, ``_stub(kind, address)`` or ``Stub(channel)``."""
    return re.match(r"(self\.)?_?stub\b|\S*Stub\(", ast.unparse(node)) is not None


def _is_limited(node: ast.AST, within: dict[ast.AST, ast.AST]) -> bool:
    while isinstance(above := within[node], ast.Attribute):  # .future, .with_call
        node = above
    if not (isinstance(above, ast.Call) and above.func is node):
        return False
    if any(each.arg == "timeout" for each in above.keywords):
        return True
    user = within[above]
    if isinstance(user, ast.Assign):
        (target,) = user.targets
        function = next(each for each in _around(user, within) if isinstance(each, FUNCTIONS))
        return any(_hears(each, ast.unparse(target)) for each in ast.walk(function))
    return _hears(user, ast.unparse(above))


def _hears(node: ast.AST, call: str) -> bool:
    match node:
        case ast.Call(func=ast.Name("read_stream" | "read_stream_blocking"), args=[first, *_]):
            return ast.unparse(first) == call
    return False


def _around(node: ast.AST, within: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (found := within.get(node)) is not None:
        yield found
        node = found


def test_every_call_has_a_deadline_or_a_limit_for_silence() -> None:
    files = [path for room in ("stateflow", "reconfig") for path in sorted((ROOT / room).rglob("*.py"))]
    found = {
        f"{path.relative_to(ROOT)} {name}"
        for path in files
        if not re.search(r"_pb2(_grpc)?\.py$", path.name)
        for name in unlimited(path.read_text())
    }
    assert found == ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("call", "is_limited"),
    [
        ("await self._stub.Verify(request)", False),
        ("await self._stub.Verify(request, timeout=5)", True),
        ("[page async for page in self._stub(name).Try(request)]", False),
        ("[page for page in read_stream(self._stub(name).Try(request), name)]", True),
        ("call = stub.Try(request); [page for page in call]", False),
        ("call = stub.Try(request); [page for page in read_stream_blocking(call, name)]", True),
        ("call = stub.Try(request); [page for page in read_stream(another, name)]", False),
        ("getattr(stub, method)(request)", False),
        ("getattr(_stub(kind, address), method)(request, timeout=None)", True),
        ("stub.Positions.future(request)", False),
        ("stub.Positions.future(request, timeout=self._timeout_s)", True),
        ("self._call(stub.Heartbeat, request)", False),
        ("another.Verify(request)", True),
    ],
)
def test_what_is_unlimited_is_found(call: str, is_limited: bool) -> None:
    lines = "".join(f"        {line.strip()}\n" for line in call.split(";"))
    source = f"class Client:\n    async def ask(self):\n{lines}"
    assert list(unlimited(source)) == ([] if is_limited else ["Client.ask"])
