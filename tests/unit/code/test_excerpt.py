"""Excerpts of programs: all that a class needs goes along, whole; nothing else of the program is ever run."""

from __future__ import annotations

import datetime as dt
import math
import sys
import warnings
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath
from types import GenericAlias, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from stateflow.code import excerpt as module_under_test
from stateflow.code.compiled import compiled
from stateflow.code.excerpt import written
from stateflow.code.program import code
from stateflow.code.statements import Program
from stateflow.errors import OperatorNotImportable

#: code that must never run again
BOOM = "raise AssertionError('this was run')"


def excerpt(texts: list[str], name: str, live: dict[str, Any] | None = None, package: str | None = None) -> str:
    return module_under_test.excerpt(written(texts, package), name, live)


def run(text: str, name: str = "program") -> dict[str, Any]:
    """Runs an excerpt as a replica does."""
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(text, "<excerpt>", "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules[name]
    return vars(module)


def each_way(source: str, name: str = "Op") -> list[dict[str, Any]]:
    """Returns what excerpts define: of a program that has run, of one that has not, and of one whose text is gone."""
    live = run(source, "live")
    texts = [excerpt([source], name, live), excerpt([source], name), piped(source, name, live)]
    return [run(text) for text in texts]


def piped(source: str, name: str, live: dict[str, Any]) -> str:
    return module_under_test.excerpt(from_pipe(source), name, live)


def from_pipe(source: str) -> Program:
    return compiled(compile(source, "<stdin>", "exec", dont_inherit=True))


@pytest.mark.parametrize(
    ("before", "expression"),
    [
        ("N = 3", "N"),
        ("N, OTHER = 3, 4", "N"),
        ("N = 1; N = 3", "N"),
        ("N = {}\nN['a'] = 3", "N['a']"),
        ("N = 1\nN += 2", "N"),
        ("import math", "math.floor(3.5)"),
        ("import os.path", "len(os.path.join('a', 'b'))"),
        ("import os.path as p", "len(p.join('a', 'b'))"),
        ("import xml.etree.ElementTree as t", "len(t.fromstring('<aaa/>').tag)"),
        ("from math import floor as down", "down(3.5)"),
        ("from math import *", "floor(3.5)"),
        ("def three():\n    return 3", "three()"),
        ("three = lambda: 3", "three()"),
        ("def fact(n):\n    return n * fact(n - 1) if n else 1", "fact(3) - 3"),
        ("async def three():\n    return 3\nimport asyncio", "asyncio.run(three())"),
        ("N = 3\ndef three(n=N):\n    return n", "three()"),
        ("N = 3", "[N for _ in 'a'][0]"),
        ("N = 2\ndef count():\n    global N\n    N += 1\n    return 3", "count()"),
        ("class A:\n    n = 3\nclass B(A): ...", "B().n"),
        ("N = 3\nclass A:\n    n = N", "A.n"),
        ("class A:\n    class B:\n        n = 3", "A.B.n"),
        ("def add(cls):\n    cls.n = 3\n    return cls\n@add\nclass A: ...", "A.n"),
        ("from functools import cache\n@cache\ndef three():\n    return 3", "three()"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 3", "P().x"),
        ("from enum import Enum\nclass E(Enum):\n    A = 3", "E.A.value"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x')", "P(3).x"),
        ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int", "P(3).x"),
        ("from datetime import timedelta\nT = timedelta(seconds=3)", "T.seconds"),
        ("try:\n    import no_such as m\nexcept ImportError:\n    import math as m", "m.floor(3.5)"),
        ("import sys\nif sys.version_info > (3,):\n    N = 3\nelse:\n    N = 2", "N"),
    ],
)
@pytest.mark.parametrize("where", ["above", "below"])
def test_what_the_class_uses_comes_along(before: str, expression: str, where: str) -> None:
    cls = f"class Op:\n    def f(self):\n        return {expression}\n"
    for names in each_way(f"{before}\n{cls}" if where == "above" else f"{cls}{before}\n"):
        assert names["Op"]().f() == 3


def with_text(source: str) -> list[str]:
    """Returns the excerpts of a program that has run and of one that has not."""
    return [excerpt([source], "Op", run(source, "live")), excerpt([source], "Op")]


@pytest.mark.parametrize(
    ("made", "perhaps", "expression"),
    [
        ("N = 3", "if not M: N = 4", "N"),
        ("N = re.compile('3')", "if not M:\n    N = re.compile('4')", "int(N.pattern)"),
        ("N = re.compile('4')", "if M:\n    N = re.compile('3')", "int(N.pattern)"),
        ("def N(): return 3", "if not M:\n    def N(): return 4", "N()"),
        ("def round(_): return 3", "if not M:\n    def round(_): return 4", "round(1.5)"),
        ("class N: n = 3", "if not M:\n    class N: n = 4\nelif M:\n    pass", "N.n"),
        ("import math as m", "try:\n    import no_such as m\nexcept ImportError:\n    pass", "m.floor(3.5)"),
        (
            "import math as m",
            "try:\n    from no_such import x\n    m = x\nexcept ImportError:\n    x = 1",
            "m.floor(3.5)",
        ),
    ],
)
def test_a_statement_that_may_leave_a_name_as_it_is(made: str, perhaps: str, expression: str) -> None:
    source = f"import re\nM = 1\n{made}\n{perhaps}\nclass Op:\n    f = lambda self: {expression}"
    for text in with_text(source):
        assert run(text)["Op"]().f() == 3


@pytest.mark.parametrize(
    "always",
    [
        "if M:\n    N = object()\nelse:\n    N = len",
        "if not M:\n    N = object()\nelif M:\n    N = len\nelse:\n    raise ValueError",
        "try:\n    import no_such\n    N = 1\nexcept ImportError:\n    N = len",
        "try:\n    pass\nexcept ImportError:\n    raise\nelse:\n    N = len",
        "try:\n    pass\nfinally:\n    N = len",
    ],
)
def test_a_statement_that_binds_a_name_whatever_happens(always: str) -> None:
    for text in with_text(f"M = 1\nN = open('/dev/null')\n{always}\nclass Op:\n    f = lambda self: N"):
        assert "/dev/null" not in text


@pytest.mark.parametrize(
    "perhaps",
    [
        "if not re:\n    def floor(x): return 7",
        "try:\n    from no_such import floor\nexcept ImportError: pass",
        "def other(f): return f\nfloor = other(floor)",
        "try:\n    floor = re.no_such\nexcept AttributeError: pass",
    ],
)
def test_a_name_of_a_module_that_is_imported_whole_and_perhaps_bound_anew(perhaps: str) -> None:
    source = f"from math import *\nimport re\n{perhaps}\nclass Op:\n    f = lambda self: floor(3.5)"
    live = run(source, "live")
    texts = [excerpt([source], "Op", live), excerpt([source], "Op"), piped(source, "Op", live)]
    for text in texts:
        assert run(text)["Op"]().f() == 3


def test_a_name_of_a_module_that_is_not_the_name_of_another() -> None:
    source = "from math import *\nimport re\nif re:\n    def three(): return 3\nclass Op:\n    f = lambda self: three()"
    for names in each_way(source):
        assert names["Op"]().f() == 3


def test_a_text_that_the_compiler_warns_of() -> None:
    source = "def other(x): return x is 5\nS = '\\d'\nclass Op:\n    f = lambda self: (other, S)"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        live = run(source, "live")
        begun = len(seen)
        excerpt([source], "Op", live)
        assert (begun, len(seen)) == (2, 2)
        warnings.simplefilter("error")
        assert excerpt([source], "Op", live)


def test_a_loop_whose_name_the_next_statement_may_leave_as_it_is() -> None:
    source = "import re\nfor N in [re.compile('3')]: ...\nif not re: N = 4\nclass Op:\n    f = lambda self: N"
    for live in (run(source, "live"), None):
        with pytest.raises(OperatorNotImportable, match=r"Op uses 'N',.* is changed by a statement that"):
            excerpt([source], "Op", live)


@pytest.mark.parametrize(
    "imports",
    [
        "import json.decoder\nimport json.encoder",
        "import json.decoder\nimport json.encoder\nimport json",
        "import json.decoder, re\nif True:\n    import json.encoder",
        "import json.decoder\ntry:\n    import json.encoder\nexcept ImportError:\n    import json.scanner",
    ],
)
def test_modules_of_one_package(imports: str) -> None:
    for text in with_text(f"{imports}\nclass Op:\n    f = lambda self: json"):
        assert "import json.decoder" in text
        assert "import json.encoder" in text


def test_imports_that_run_again_change_nothing() -> None:
    cells = ["import json.decoder", "import json.encoder", "class Op:\n    f = lambda self: json.decoder"]
    live: dict[str, Any] = {"__name__": "live"}
    for each in cells:
        exec(compile(each, "<cell>", "exec", dont_inherit=True), live)
    text = excerpt(cells, "Op", live)
    assert text.splitlines()[:2] == cells[:2]
    assert excerpt([*cells, *cells[:2], *cells[:2]], "Op", live) == text


@pytest.mark.parametrize(
    "line",
    [
        "import re; N = re.compile('3')",
        "import re; make = re.compile; N = make('3')",
        "import re; a = '3'; b = ''; N = re.compile(a + b)",
    ],
)
def test_statements_on_one_line_keep_their_order(line: str) -> None:
    for text in with_text(f"{line}\nclass Op:\n    f = lambda self: int(N.pattern)"):
        assert run(text)["Op"]().f() == 3


def test_a_change_on_the_line_of_the_definition() -> None:
    line = "N = ConfigParser(); N.read_string('[a]')"
    source = f"from configparser import ConfigParser\n{line}\nclass Op:\n    f = lambda self: N"
    for live in (run(source, "live"), None):
        with pytest.raises(OperatorNotImportable, match=r"Op uses 'N',.* is changed by a statement that"):
            excerpt([source], "Op", live)


def in_cells(*cells: str, name: str = "Op") -> dict[str, Any]:
    """Returns what the excerpt of a notebook defines. The cells are in the order in which they ran."""
    live: dict[str, Any] = {"__name__": "live"}
    for each in cells:
        exec(compile(each, "<cell>", "exec", dont_inherit=True), live)
    return run(excerpt(list(cells), name, live))


@pytest.mark.parametrize(
    "again",
    [
        "import math\nfrom math import floor as down",
        "N = 3",
        "WORDS = ['a', 'b']",
        "def three(f=None):\n    return f or 3",
        "class A:\n    n = 3",
    ],
)
def test_a_cell_above_the_class_is_run_again(again: str) -> None:
    reads = "class B:\n    n = (math, down, N, WORDS, three, A)\n"
    cells = ["import math\nfrom math import floor as down", "N = 3", "WORDS = ['a', 'b']"]
    cells += ["def three(f=None):\n    return f or 3", "class A:\n    n = 3"]
    made = in_cells(*cells, f"{reads}class Op(B):\n    def f(self):\n        return self.n[2]", again)
    assert made["Op"]().f() == 3


@pytest.mark.parametrize("flow", ["return {}", "for n in 'ab':\n            if {}: return n\n        return {}"])
def test_a_call_of_a_module_that_another_cell_imports(flow: str) -> None:
    made = in_cells("import json", "class Op:\n    def f(self):\n        " + flow.replace("{}", "json.loads('3')"))
    assert made["Op"]().f() in (3, "a")


def test_a_call_of_a_module_that_cannot_be_imported() -> None:
    source = "import json\ntry:\n    import no_such\nexcept ImportError:\n    no_such = None\n"
    source += "class Op:\n    f = lambda self: json.loads('3') if no_such is None else no_such.loads('3')"
    for text in with_text(source):
        assert run(text)["Op"]().f() == 3


def test_all_cells_are_run_again() -> None:
    cells = ["N = 3", "def add(cls):\n    cls.n = N\n    return cls", "@add\nclass A: ...", "class Op(A): ..."]
    assert in_cells(*cells, *cells)["Op"]().n == 3
    assert in_cells(*cells, *cells[:-1])["Op"]().n == 3


def test_a_cell_that_empties_what_the_class_has_read() -> None:
    with pytest.raises(OperatorNotImportable, match="the definition of Op reads 'N', which a later statement changes"):
        in_cells("N = []", "N.append(3)", "class Op:\n    n = N[0]", "N = []")


@pytest.mark.parametrize(
    ("made", "reads", "changed"),
    [
        ("n = 1", "class A:\n    m = n", "n = 2"),
        ("n = 1", "class A:\n    n = n + 1", "n = 2"),
        ("n = 1", "class A:\n    class B:\n        m = n\n        n = 3", "n = 2"),
        ("n = 1", "A = re.compile('|'.join([str(n) for _ in 'ab']))", "n = 2"),
        ("n = 1", "class A:\n    m = {n for _ in 'ab'}", "n = 2"),
        ("n = 1", "def f(n=n):\n    return n\nA = f", "n = 2"),
        ("n = 1", "A = re.compile(str(n))", "for n in range(3): ..."),
        ("n = 1", "A = re.compile(str(n))", "def count():\n    global n\n    n += 1\ncount()"),
        ("n = ['a']", "A = re.compile('|'.join(n))", "n.append('b')"),
        ("n = make()", "A = make(n)", "n = make(1)"),
        ("n = make()", "A = make(n)", "n = make()"),
        ("class n: ...", "class A(n): ...", "class n:\n    m = 3"),
    ],
)
def test_a_value_that_changes_after_a_definition_has_read_it(made: str, reads: str, changed: str) -> None:
    before = "import re\nclass make:\n    def __init__(self, of=None): ...\n"
    source = f"{before}{made}\n{reads}\n{changed}\nclass Op:\n    a = A"
    live = run(source, "live")
    for program in (written([source]), from_pipe(source)):
        with pytest.raises(
            OperatorNotImportable, match=r"the definition of . reads 'n', which a later statement changes|uses 'n'"
        ):
            module_under_test.excerpt(program, "Op", live)


def test_a_name_that_a_class_body_binds_for_itself() -> None:
    inner = "\n    class A:\n        key = 'a'\n        for n in key: m = n\n    def f(self, n=3): return key"
    source = f"class Op:\n    key = 'k'\n    output = key + ' string'{inner}\nfor key in 'abc': n = object"
    assert run(excerpt([source], "Op", run(source, "live")))["Op"].output == "k string"


def test_a_builtin_that_is_hidden_below_a_definition() -> None:
    source = "class A:\n    n = len('abc')\ndef len(_):\n    return 4\nclass Op(A):\n    m = len('')"
    for names in each_way(source):
        assert (names["Op"].n, names["Op"].m) == (3, 4)


@pytest.mark.parametrize("mark", ["\x0c", "\x0b", "\x1c", "\x85", "\u2028"])
def test_characters_at_which_only_splitlines_ends_a_line(mark: str) -> None:
    source = f"import re  # {mark}\nS = re.compile('a{mark}b')\nT = str(3)\nclass Op:\n    s, t = S, int(T)\n"
    for names in each_way(source):
        assert (names["Op"].s.pattern, names["Op"].t) == (f"a{mark}b", 3)


def test_form_feeds_between_definitions() -> None:
    for names in each_way("\x0cimport math\n\x0c\nclass Op:\n    n = math.floor(3.5)\n"):
        assert names["Op"].n == 3


def test_what_the_class_body_itself_uses() -> None:
    source = "N = 2\nclass Base:\n    m = 1\ndef double(f):\n    return lambda self: 2 * f(self)\n"
    source += "class Op(Base):\n    n = N\n    @double\n    def f(self, o=N):\n        return self.n + self.m + o\n"
    for names in each_way(source):
        assert names["Op"]().f() == 10


@pytest.mark.parametrize(
    "statement",
    [
        "print('x') if False else boom()",
        "with boom():\n    pass",
        "unused = boom()",
        "for _ in boom():\n    pass",
        "while boom():\n    pass",
        "assert boom()",
        "if __name__ == '__main__':\n    boom()",
        "if True:\n    boom()",
        "try:\n    import no_such\nexcept ImportError:\n    boom()",
        "boom()",
        "del boom",
        "def other(x=boom()): ...",
        "class Other:\n    x = boom()",
    ],
)
@pytest.mark.parametrize("where", ["above", "below"])
def test_nothing_else_is_run(statement: str, where: str) -> None:
    cls = "class Op:\n    def f(self):\n        unused = 3\n        return unused\n"
    source = f"{statement}\n{cls}" if where == "above" else f"{cls}{statement}\n"
    live = run(cls)
    for text in (excerpt([source], "Op"), piped(source, "Op", live)):
        names = run(text)
        assert names["Op"]().f() == 3
        assert not names.keys() & {"boom", "unused", "Other", "other"}


LOCAL_NAMES = """
rows = {boom}
def rows_of():
    {boom}
class Op:
    def f(self):
        rows = 3
        return rows
    def g(self, rows_of):
        return [rows for rows in rows_of]
"""


def test_a_local_name_is_not_the_programs() -> None:
    text = excerpt([LOCAL_NAMES.format(boom="boom()")], "Op")
    assert "boom" not in text


FUTURE = """from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints
if TYPE_CHECKING:
    from no_such_module import Never

@dataclass
class Inner:
    x: int

@dataclass
class Outer:
    inner: Inner
    other: "list[Inner]"

class Op:
    def f(self, never: Never | None = None) -> Missing:
        return Outer(Inner(3), [])
"""


def test_annotations_that_are_read_later() -> None:
    """Annotations that are text resolve to types, as records are stored by the types of their fields."""
    from typing import get_type_hints

    live = run(FUTURE, "live")
    for text in (excerpt([FUTURE], "Op", live), excerpt([FUTURE], "Op"), piped(FUTURE, "Op", live)):
        module = ModuleType("hinted")
        sys.modules["hinted"] = module
        exec(compile(text, "<excerpt>", "exec", dont_inherit=True), vars(module))
        hints = get_type_hints(vars(module)["Outer"])
        inner = vars(module)["Inner"]
        assert hints == {"inner": inner, "other": GenericAlias(list, (inner,))}
        assert vars(module)["Op"]().f().inner.x == 3


def test_plain_data_is_what_it_is_now() -> None:
    """Plain data goes along with its present value, whether a loop, an argument or the clock made it."""
    source = """
import os
TABLE = {}
for n in range(3):
    TABLE[n] = {n}
HERE = os.environ.get("NO_SUCH", "here")
with open(os.devnull) as file:
    CONTENT = file.read() or None
class Op:
    def f(self):
        return TABLE, HERE, CONTENT
"""
    live = run(source, "live")
    for text in (excerpt([source], "Op", live), piped(source, "Op", live)):
        assert run(text)["Op"]().f() == ({0: {0}, 1: {1}, 2: {2}}, "here", None)
        assert "environ" not in text


UTC_PLUS_1 = dt.timezone(dt.timedelta(hours=1), "one")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            -3,
            10**30,
            0.1,
            -0.0,
            "ä'\n",
            b"\x00'",
            (),
            (1,),
            [1, [2]],
            {"a": {1, 2}},
            frozenset({"x", "y"}),
        ),
        *(set(), math.nan, -math.inf, complex(1, math.inf), bytearray(b"x"), range(3), {"f": math.floor}),
        *(Counter("aab"), OrderedDict(b=1, a=2), defaultdict(list, {1: [2]}), deque([1, 2], 3), deque([1])),
        *(Decimal("1.50"), Decimal("NaN"), Fraction(1, 3), UUID(int=5), Path("/x"), MappingProxyType({"a": 1})),
        *(
            dt.date(2020, 1, 2),
            dt.datetime(2020, 1, 2, 3, 4, 5, 6),
            dt.timedelta(-1, 2, 3),
            dt.time(1, 2, tzinfo=dt.UTC),
        ),
        *(dt.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), dt.datetime.now(UTC_PLUS_1)),
        *(Namespace(rate=0.5, names=["a"]), SimpleNamespace(a=1), array("d", [1, 2])),
        *(np.arange(6).reshape(2, 3), np.float32(1.5), np.bool_(True), np.array([]), np.array(["a numpy.x"])),
        *(
            np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
            np.datetime64("2020-01-01"),
            np.zeros((0, 3)),
            np.arange(300.0),
        ),
    ],
    ids=lambda value: type(value).__name__,  # a set's text differs between processes
)
def test_data_that_can_be_written(value: object) -> None:
    live = {"VALUE": value, "Op": type("Op", (), {})}
    text = excerpt(["VALUE = make()\nclass Op:\n    def f(self):\n        return VALUE"], "Op", live)
    got = run(text)["Op"]().f()
    assert type(got) is type(value)
    assert repr(got) == repr(value)
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype
        assert got.flags.writeable


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # the second one in Python 3.13
@pytest.mark.parametrize("made", [Path, PurePosixPath])
def test_a_path_is_written_whatever_its_module_is_called(
    module: str, made: type[PurePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("/x")
    monkeypatch.setattr(type(path), "__module__", module)
    live = {"VALUE": path, "Op": type("Op", (), {})}
    text = excerpt(["VALUE = make()\nclass Op:\n    def f(self):\n        return VALUE"], "Op", live)
    assert run(text)["VALUE"] == path


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.ma.array([1]),
        np.zeros(2, {"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 12}),
        Namespace(file=object()),
        [lambda: 1],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_made_where_it_is_made(value: object) -> None:
    live = {"VALUE": value, "Op": type("Op", (), {})}
    text = excerpt(["VALUE = make()\ndef make(): return 3\nclass Op:\n    f = lambda self: VALUE"], "Op", live)
    assert "VALUE = make()" in text
    filled = ["VALUE = make()\ndef make(): return 3\nVALUE.fill()\nclass Op:\n    f = lambda self: VALUE"]
    with pytest.raises(OperatorNotImportable, match=r"Op uses 'VALUE', a .*, which is changed by a statement"):
        excerpt(filled, "Op", live)


FILLED = [
    ("from collections import Counter", "Counter()", "N.update('aa')", {"a": 2}),
    ("from collections import defaultdict", "defaultdict(list)", "for n in (1, 2): N[n].append(n)", {1: [1], 2: [2]}),
    ("from collections import defaultdict", "defaultdict(lambda: 7)", "N['a']; N['b'] = 1", {"a": 7, "b": 1}),
    ("from collections import OrderedDict", "OrderedDict()", "N.update(a=1)", {"a": 1}),
    ("import collections", "collections.deque()", "N.extend([1, 2])", [1, 2]),
    ("import numpy as np", "np.zeros(2)", "N += 1\nN.fill(3)", [3, 3]),
    ("from argparse import Namespace", "Namespace()", "setattr(N, 'a', 1)", {"a": 1}),
    ("def one(): return 1", "{}", "N.update(one=one)", ["one"]),
    ("class One: ...", "{}", "for n in range(2): N[n] = One", [0, 1]),
    ("def add(f):\n    N[f.__name__] = f\n    return f", "{}", "@add\ndef one(): return 1", ["one"]),
    ("from math import *", "{}", "N['f'] = floor", ["f"]),
]


@pytest.mark.parametrize(
    ("imports", "made", "filled", "holds"), FILLED, ids=[f"{each[1]} {each[2]}" for each in FILLED]
)
def test_what_was_filled_after_it_was_made_comes_full(imports: str, made: str, filled: str, holds: Any) -> None:
    source = f"{imports}\nN = {made}\n{filled}\nclass Op:\n    def f(self):\n        return N\n"
    live = run(source, "live")
    for text in (excerpt([source], "Op", live), piped(source, "Op", live)):
        got = run(text, "live")["Op"]().f()
        assert type(got) is type(live["N"])
        assert vars(got) == holds if isinstance(got, Namespace) else [*got] == [*holds]
        assert not isinstance(holds, dict) or isinstance(got, Namespace) or dict(got) == holds
        if "lambda" in made:
            assert got["c"] == 7


NAMED = "def named(f):\n    N[len(N)] = f.__name__\n    return f\n"
MADE = "class A:\n    def __init__(self, *of): "


@pytest.mark.parametrize(
    "source",
    [
        f"N = {{}}\n{NAMED}@named\ndef a(): ...\n@named\ndef b(): ...\nuses = (b,)",
        f"N = {{}}\n{NAMED}@named\ndef a(): ...\n@named\ndef b(): ...\nuses = (a,)",
        f"N: dict = {{}}\nN[7] = 'x'\n{NAMED}@named\ndef a(): ...\nN.update({{9: 'y'}})\nuses = (a,)",
        f"N, M = {{}}, []\nM.append(1)\n{NAMED}@named\ndef a(): return M\nuses = (a,)",
        f"N = dict([(5, 6)])\n{NAMED}@named\ndef a(): ...\nuses = (a,)",
        "N = []\ndef fill(n):\n    n.append(3)\n    return lambda: len(n)\nmade = fill(N)\nuses = (made,)",
        f"N = []\n{MADE}N.append(1)\na = A()\nb = A()\nuses = (a, A)",
        f"N = set()\n{MADE}N.add(len(N))\na = A()\nb = A()\nuses = (a, A)",
        f"N = bytearray(b'a')\n{MADE}N.append(65)\na = A()\nuses = (a, A)",
        f"import collections\nN = collections.deque([7], 2)\n{MADE}N.append(65)\na = A()\nuses = (a, A)",
        f"import numpy as np\nN = np.zeros(2)\n{MADE}N[0] += 1\na = A()\nuses = (a, A)",
        f"from argparse import Namespace\nN = Namespace(n=[])\n{MADE}N.n.append(1)\na = A()\nuses = (a, A)",
        f"from collections import *\nN = defaultdict(lambda: [4])\n{MADE}N.setdefault(len(N), 1)\na = A()\nuses = a",
        f"from collections import *\nN = defaultdict(list)\n{MADE}N.setdefault(len(N), 1)\na = A()\nuses = a",
        "N = 0\nclass A:\n    def __init__(self):\n        global N\n        N += 1\na = A()\nb = A()\nuses = (a, A)",
    ],
)
def test_what_statements_of_the_excerpt_fill_is_as_in_the_program(source: str) -> None:
    source = f"{source}\nclass Op:\n    f = lambda self: (uses, N)"
    live = run(source, "live")
    for text in (excerpt([source], "Op", live), piped(source, "Op", live)):
        names = run(text, "live")
        got = names["N"]
        assert names.get("M") == live.get("M")
        assert type(got) is type(live["N"])
        assert repr(got).partition("{")[2] == repr(live["N"]).partition("{")[2]
        assert [*got] == [*live["N"]] if hasattr(got, "__iter__") else got == live["N"]


@pytest.mark.parametrize(
    ("made", "reads"),
    [
        ("N = dict([(1, 2)])", "def fill(n):\n    n.setdefault(3, 4)\n    return object\na = fill(N)"),
        ("N = int('3')", "a = object if (N := 4) else None"),
        ("N = sorted('ab')", "class A:\n    def __init__(self, n): self.n = n.copy()\na = A(N).n and object"),
    ],
)
def test_what_is_set_once_more_is_the_same(made: str, reads: str) -> None:
    for names in each_live(f"{made}\n{reads}\nclass Op:\n    f = lambda self: (a, N)")[:1]:
        assert names["Op"]().f() == (object, names["N"])


def test_objects_that_are_made_from_what_they_change_are_as_in_the_program() -> None:
    counted = (
        "N = 0\nclass A:\n    def __init__(self):\n        global N\n        N += 1\n        self.n = N\na = A()\n"
    )
    held = "N = []\ndef fill(n):\n    n.append(3)\n    return lambda: n\nmade = fill(N)\n"
    both = "class A: ...\na, N = A(), []\nN.append(3)\n"
    for names in each_live(f"{counted}class Op:\n    f = lambda self: (a.n, N)"):
        assert names["Op"]().f() == (1, 1)
    for names in each_live(f"{held}class Op:\n    f = lambda self: (N, made())"):
        assert names["Op"]().f() == ([3], [3])
        assert names["N"] is names["made"]()
    text = excerpt([f"{both}class Op:\n    f = lambda self: (a, N)"], "Op", run(f"{both}class Op: ...", "live"))
    assert run(text)["N"] == [3]


def each_live(source: str) -> list[dict[str, Any]]:
    live = run(source, "live")
    return [run(text) for text in (excerpt([source], "Op", live), piped(source, "Op", live))]


@pytest.mark.parametrize(
    "source",
    [
        "N = len('ab')\nclass A:\n    def __init__(self):\n        global N\n        N += 1\na = A()",
        "N = [3] * 2\ndef last(n): return A(n.pop())\nclass A:\n    def __init__(self, n): ...\na = last(N)",
        "N = sorted('ab')\nclass A:\n    def __init__(self, n): ...\na = A(N.pop())",
    ],
)
def test_a_definition_that_changes_what_it_reads_is_refused_if_that_is_not_known(source: str) -> None:
    source = f"{source}\nclass Op:\n    f = lambda self: (a, N)"
    with pytest.raises(OperatorNotImportable, match=r"the definition of a changes 'N', whose value before that is not"):
        excerpt([source], "Op", run(source, "live"))


CHANGED = [
    ("from configparser import ConfigParser\nN = ConfigParser()", "N.read_string('[a]')", "a ConfigParser"),
    ("from configparser import ConfigParser\nN = ConfigParser()", "read = N.read_string('[a]')", "a ConfigParser"),
    (
        "from configparser import ConfigParser\nN = ConfigParser()\ndef fill(n): n.read_string('')",
        "fill(N)",
        "a Config",
    ),
    ("from configparser import ConfigParser\nN = ConfigParser()\ndef fill(): N.read_string('')", "fill()", "a Config"),
    ("from configparser import ConfigParser\nN = ConfigParser()", "with open('/dev/null') as f: N.read_file(f)", "a C"),
    ("from configparser import ConfigParser\nN = ConfigParser()", "for a in 'xy': N[a] = {}", "a ConfigParser"),
    ("class A:\n    n = 0\n    def add(self): self.n += 1\nN = A()", "N.add()", "a A"),
    ("class A: ...\nN = A()", "for _ in range(2): N.x = 1", "a A"),
    ("class A:\n    x = 0\nN = A()", "for _ in range(2): N.x += 1 if _ else 2", "a A"),
    ("class A:\n    x = {1: [0, 0]}\nN = A()", "for _ in range(2): N.x[1][len(str(_))] += 1", "a A"),
    ("class A: ...\nN = A()\nN.x = {}", "for _ in range(2): vars(N)['x'] |= {}", "a A"),
    ("class A: ...\nN = A()\nN.x = {}", "for _ in range(2): N.x[str(_ + 1)] = 1", "a A"),
    ("class A:\n    x = 0\nN = A()\ndef add(n): n.x += 1", "for _ in range(2): add(N)", "a A"),
    ("class A:\n    table = {}\nN = A", "N.table.update(a=1)", "a type"),
    ("class A: ...\nN = A()", "setattr(N, 'x', 1)", "a A"),
    ("class A: ...\nN = A()", "def fill(): setattr(N, 'x', 1)\nfill()", "a A"),
    ("class A: ...\nN = []", "for _ in range(2): N.append(A())", "a list"),
    ("class A: ...\nN = {}", "exec('N[1] = A()')", "a dict"),
    ("from functools import singledispatch\n@singledispatch\ndef N(x): ...", "@N.register\ndef _(x: int): ...", "a f"),
]


@pytest.mark.parametrize(("made", "changed", "kind"), CHANGED, ids=[f"{each[0][-20:]} {each[1]}" for each in CHANGED])
def test_what_another_statement_changes_is_refused_with_its_name(made: str, changed: str, kind: str) -> None:
    source = f"{made}\n{changed}\nclass Op:\n    def f(self):\n        return N\n"
    live = run(source, "live")
    for program in (written([source]), from_pipe(source)):
        with pytest.raises(
            OperatorNotImportable, match=f"Op uses 'N', {kind}.* is changed by a statement that replicas do not run"
        ):
            module_under_test.excerpt(program, "Op", live)


HELD = "class A:\n    def __init__(self): self.held = {}\nN = A()\n"


@pytest.mark.parametrize(
    "changed",
    [
        "vars(N)['x'] = 1",
        "vars(N).update(x=1)",
        "d = N\nd.x = 1",
        "d = e = N\ne.x = 1",
        "d = N.held\nd['x'] = 1",
        "d = N\ne = d.held\ne.update(x=1)",
        "d = vars(N)\nd['x'] = 1",
        "if N:\n    d = N\n    setattr(d, 'x', 1)",
        "d = N\ndef fill(): d.x = 1\nfill()",
    ],
)
def test_what_is_changed_under_another_name_is_refused(changed: str) -> None:
    source = f"{HELD}{changed}\nclass Op:\n    def f(self):\n        return N\n"
    live = run(source, "live")
    compiled_one = from_pipe(source)
    for program, values in ((written([source]), live), (written([source]), None), (compiled_one, live)):
        with pytest.raises(OperatorNotImportable, match=r"uses 'N'.* which is changed by a statement that replicas do"):
            module_under_test.excerpt(program, "Op", values)


@pytest.mark.parametrize(
    "changed",
    [
        "N = d = A()\nd.x = 1",
        "d = N = A()\nd.x = 1",
        "d = N = e = A()\nc = e\nc.x = 1",
        "d: A = N\nd.x = 1",
        "if (d := N): d.x = 1",
        "e = (d := N)\ne.x = 1",
        "d, e = 1, N\ne.x = 1",
        "d = None or N\nd.x = 1",
        "d = N if A else None\nd.x = 1",
        "for d in [A(), N]: d.x = 1",
        "from contextlib import nullcontext\nwith nullcontext(N) as d: d.x = 1",
        "d = N\nd = d if d else None\nd.x = 1",
    ],
)
def test_what_is_changed_under_a_name_of_another_statement_is_refused(changed: str) -> None:
    source = f"{HELD}{changed}\nclass Op:\n    def f(self):\n        return N\n"
    for live in (run(source, "live"), None):
        with pytest.raises(OperatorNotImportable, match=r"uses 'N'.* which is changed by a statement that replicas do"):
            excerpt([source], "Op", live)


#: statements that cannot be cut out, or are taken for changes, where only the compiled code is known: an attribute that
#: is read, and a store
NOT_IN_CODE = (
    "d = e = A()\ne = A()\ne.x = 1",
    "d = N\nd.x = 1",
    "d = N.held\nprint(d.get('x'))",
    "N.name = 'n'\nd = N.name\nprint(d.upper())",
)


@pytest.mark.parametrize(
    ("other", "uses"),
    [
        ("d = N\nd = {}\nd['x'] = 1", "N"),  # another object by then
        ("M = N\nN = A()\nM.x = 1", "N"),
        ("d = N.held\nd['x'] = 1", "d"),  # the excerpt has this statement, too
        ("d = N\nd.x = 1", "N, d"),
        ("d = N.held\nprint(d.get('x'))", "N"),
        ("N.name = 'n'\nd = N.name\nprint(d.upper())", "N"),  # text
        ("d = e = A()\ne = A()\ne.x = 1", "N, d"),
        ("d = e = 'text'\nprint(e.swapcase())", "N, d"),
        ("for n in [1, 'a']: print(n)\nn = N", "n"),
        ("d = N\ndef other():\n    d = A()\n    d.x = 1\nother()", "N"),
    ],
)
def test_another_name_that_changes_nothing_else_comes_along(other: str, uses: str) -> None:
    source = f"{HELD}{other}\nclass Op:\n    def f(self):\n        return {uses}\n"
    live = run(source, "live")
    assert run(excerpt([source], "Op", live))["Op"]().f() is not None
    if other not in NOT_IN_CODE:
        assert run(piped(source, "Op", live))["Op"]().f() is not None


@pytest.mark.parametrize(
    ("made", "filled"),
    [
        ("N = {}", "N.update(a=1)"),
        ("N = {}", "setattr(N, 'a', 1)"),
        ("N = []", "for n in range(3): N.append(n)"),
        ("N = make()", "N.start()"),
        ("N = None", "with open('x') as f: N = f.read()"),
        ("N = Router()", "@N.on('a')\ndef one(): ..."),
        ("N = Router()", "@N.parts['a'].on(key='a')\nclass One: ..."),
    ],
)
def test_a_file_that_does_not_run_here_says_what_it_fills(made: str, filled: str) -> None:
    source = f"{made}\n{filled}\nclass Op:\n    def f(self):\n        return N\n"
    with pytest.raises(OperatorNotImportable, match=r"Op uses 'N', which is changed by .*\(line=2\): build it in one"):
        excerpt([source], "Op")


def test_a_decorator_of_what_goes_along() -> None:
    router = "class Router:\n    def __init__(self): self.of = {}\n    def on(self, name):\n"
    router += "        return lambda f: self.of.setdefault(name, f)\nN = Router()\n"
    source = f"{router}class Op:\n    @N.on('f')\n    def f(self):\n        return [*N.of]\n"
    for text in with_text(source):
        assert run(text)["Op"]().f() == ["f"]
    counted = f"{router}n = len(N.of.setdefault('n', 'abc'))\nclass Op:\n    f = lambda self: (n, N)"
    with pytest.raises(OperatorNotImportable, match="Op uses 'N', a Router, which is changed by a statement that"):
        excerpt([counted], "Op", run(counted, "live"))


def test_a_logger_of_a_file_that_does_not_run_here_may_be_set_up() -> None:
    source = "import logging\nN = logging.getLogger('x')\nN.setLevel('INFO')\nclass Op:\n    f = lambda self: N\n"
    assert run(excerpt([source], "Op"))["Op"]().f().name == "x"


@pytest.mark.parametrize("filled", ["Op.N.update(a=1)", "for n in range(2): Op.N[n] = n", "Op.N['a'] = 1"])
def test_what_a_class_holds_is_looked_at_too(filled: str) -> None:
    source = f"class Op:\n    N = {{}}\n    def f(self):\n        return self.N\n{filled}\n"
    live = run(source, "live")
    if filled.startswith("Op.N["):  # an assignment goes along
        assert run(excerpt([source], "Op", live))["Op"]().f() == {"a": 1}
        return
    with pytest.raises(
        OperatorNotImportable, match="Op uses 'Op', a type, which is changed by a statement that replicas do not"
    ):
        excerpt([source], "Op", live)


HOOK = "class N:\n    held = {}\n    def __init_subclass__(cls, **named): "
ADDS = "class N:\n    held = {}\n    @classmethod\n    def add(cls, name): cls.held[name] = 1\n"
META = "class M(type):\n    def __init__(cls, *made): "


@pytest.mark.parametrize(
    "filled",
    [
        f"{HOOK}N.held.update(a=cls)\nclass A(N): ...",
        f"{HOOK}N.held['a'] = cls\nclass A(N): ...",
        f"{HOOK}cls.held['a'] = cls\nclass A(N): ...",
        f"{HOOK}cls.held.setdefault('a', cls)\nclass A(N, name='a'): ...",
        f"{HOOK}add(cls)\ndef add(cls): N.held['a'] = cls\nclass A(N): ...",
        f"{HOOK}cls.held[cls.__name__] = cls\nclass Mixin: ...\nclass A(Mixin, N): ...\nclass B(A): ...",
        f"{META}cls.held['a'] = cls\nclass N(metaclass=M):\n    held = {{}}\nclass A(N): ...",
        f"{META}N.put(cls)\nclass Held:\n    def put(self, cls): ...\nN = Held()\nclass A(metaclass=M): ...",
        "from abc import ABC\nclass N(ABC): ...\nclass A: ...\nN.register(A)",
        "from abc import ABC\nclass N(ABC): ...\n@N.register\nclass A: ...",
        f"{HOOK}cls.held['a'] = cls\n    __class_getitem__ = classmethod(lambda cls, of: cls)\nclass A(N[int]): ...",
        f"{META}cls.held['a'] = cls\nclass M2(M): ...\nclass N(metaclass=M2):\n    held = {{}}\nclass A(N): ...",
        f"{HOOK}cls.held['a'] = cls\nif N:\n    class A(N): ...",
        f"{HOOK}cls.held['a'] = cls\ndef make():\n    class A(N): ...\nmake()",
        f"{ADDS}N.add('a')",
        f"{ADDS}@N.add\ndef one(): ...",
        f"{ADDS}class A(N): ...\nA.add('a')",
        f"{ADDS}    @classmethod\n    def count(cls): cls.add('a')\nN.count()",
        f"{ADDS}    @classmethod\n    def count(cls): cls.counted = 1\nN.count()",
        f"{ADDS}class A:\n    def __init__(self): N.held['a'] = self\nA()",
    ],
)
def test_what_the_making_of_a_class_changes_is_refused(filled: str) -> None:
    source = f"{filled}\nclass Op:\n    f = lambda self: N\n"
    live = run(source, "live")
    programs = [(written([source]), live), (written([source]), None), (from_pipe(source), live)]
    for program, values in programs[:2] if "add(cls)" in filled else programs:
        with pytest.raises(OperatorNotImportable, match=r"Op uses 'N',.* is changed by a statement that replicas do"):
            module_under_test.excerpt(program, "Op", values)


@pytest.mark.parametrize(
    "cells",
    [
        ["class A: ...", "class A(A): ...", "class A(A): ..."],
        ["from math import floor as A", "A = int\nclass A(A): ...", "class B(A): ..."],
        ["class A: ...", "class B(A): ...", "class A(B): ...", "class C(A): ..."],
    ],
)
def test_classes_that_take_the_names_of_their_bases(cells: list[str]) -> None:
    names = in_cells("N = 3", *cells, "class Op:\n    f = lambda self: N")
    assert names["Op"]().f() == 3


@pytest.mark.parametrize(
    ("base", "others"),
    [
        (f"{HOOK}cls.own = 3", "class A(N): ..."),
        (f"{HOOK}super().__init_subclass__(**named)\n    own = 3", "class A(N): ..."),
        (f"{HOOK}cls.own = N.held.setdefault('n', 3)", ""),  # what goes along is run
        (f"{HOOK}cls.own = 3\n    def add(self): N.held['a'] = 1", "class A(N): ..."),
        (f"{META}cls.own = 3\nclass N(metaclass=M): ...", "class A(N): ..."),
    ],
)
def test_a_base_class_that_changes_only_its_subclasses(base: str, others: str) -> None:
    for text in with_text(f"{base}\n{others}\nclass Op(N):\n    f = lambda self: self.own"):
        assert run(text)["Op"]().f() == 3


@pytest.mark.parametrize("get", ["get", "Get"])  # before and after the classes in the order of names
def test_all_that_changes_a_base_class_goes_along(get: str) -> None:
    source = f"{HOOK}cls.held[cls.__name__] = 3\nclass A(N): ...\nclass B(N): ...\ndef get(): return [*N.held]\n"
    source = f"{source}class Op:\n    f = lambda self: (A, B) and get()".replace("get", get)
    for text in with_text(source):
        assert run(text)["Op"]().f() == ["A", "B"]
    lacking = source.replace("(A, B)", "A")
    for live in (run(lacking, "live"), None):
        with pytest.raises(OperatorNotImportable, match=r"uses 'N',.* is changed by a statement that replicas do"):
            excerpt([lacking], "Op", live)


def test_a_base_class_without_parameters() -> None:
    source = "class N:\n    def __init_subclass__(*made): ...\nclass A(N): ...\nclass Op(N): ..."
    for text in with_text(source):
        assert issubclass(run(text)["Op"], object)


@pytest.mark.parametrize(
    ("made", "looked"),
    [
        ("import logging\nN = logging.getLogger('x')", "N.info('begun')\nN.setLevel('INFO')"),
        ("import re\nN = re.compile('a')", "print(N.sub('', 'b'))"),
        ("class A:\n    def __init__(self): self.n = 1\n    def get(self): return 1\nN = A()", "print(N.get())"),
        ("import pyarrow as pa\nN = pa.schema([('a', 'int64')])", "print(N.with_metadata({}))"),
        ("class N:\n    @classmethod\n    def make(cls): return cls()", "n = N.make()"),
        ("N = object()", "def other(N): N.change()"),
        (
            "class A:\n    def get(self): return 1\nN = A()",
            "def other(n):\n    n = n or A()\n    return n.get()\nother(N)",
        ),
        ("N = object()", "def other():\n    N = []\n    N.append(1)\nother()"),
        ("from functools import cache\n@cache\ndef N(): return 1", "N.cache_clear()"),
        ("N = 1; N = object()", "print([N for N in range(3)])"),
    ],
)
def test_what_is_only_looked_at_comes_along(made: str, looked: str) -> None:
    source = f"{made}\n{looked}\nclass Op:\n    def f(self):\n        return N\n"
    live = run(source, "live")
    for text in (excerpt([source], "Op", live), piped(source, "Op", live)):
        assert run(text)["Op"]().f() is not None


def test_arguments_of_a_script_come_as_they_are() -> None:
    source = (
        "from argparse import ArgumentParser\nparser = ArgumentParser()\nparser.add_argument('--rate', default=3)\n"
    )
    source += "args = parser.parse_args([])\nclass Op:\n    def f(self):\n        return args.rate\n"
    live = run(source, "live")
    for text in (excerpt([source], "Op", live), piped(source, "Op", live)):
        assert "parser" not in text
        assert run(text)["Op"]().f() == 3


def test_functions_in_a_table_are_the_programs_own() -> None:
    source = (
        "N = {}\ndef one(): return len(N)\nN['one'] = one\nclass Op:\n    def f(self):\n        return N['one']()\n"
    )
    names = run(excerpt([source], "Op", run(source, "live")), "live")
    assert names["Op"]().f() == 1
    assert names["N"]["one"] is names["one"]
    early = source.replace("class Op:", "class Op:\n    first = [*N]")
    with pytest.raises(OperatorNotImportable, match="the definition of Op reads 'N', which holds functions or classes"):
        excerpt([early], "Op", run(early, "live"))


def test_public_names_are_imported_from_where_each_release_has_them() -> None:
    source = "from stateflow import *\nN = {}\nN['w'] = Window\n"
    source += "class Op:\n    t = Timer\n    def f(self):\n        return N\n"
    live = run(source, "live")
    text = excerpt([source], "Op", live)
    assert "stateflow." not in text
    found = run(text)
    assert (found["Op"].t, found["Op"]().f()) == (live["Timer"], {"w": live["Window"]})


def test_a_line_is_where_it_was() -> None:
    source = "\n\nRATE = 3\n\nprint('x')\n\nclass Op:\n    def f(self):\n        raise ValueError\n"
    for live in (None, run(source, "live")):
        with pytest.raises(ValueError) as caught:
            run(excerpt([source], "Op", live))["Op"]().f()
        assert caught.traceback[-1].lineno + 1 == 9


def test_cells_of_a_notebook() -> None:
    """The last definition counts, and a cell that is not Python never ran."""
    cells = [
        "",
        "N = 1\ndef n(): return N",
        "this is no python",
        "def n(): break",
        "N = await n()",
        "def n(): return N + 10",
        "class Op:\n    f = lambda self: n()",
    ]
    live: dict[str, Any] = {"__name__": "live"}
    for cell in (*cells[:2], *cells[5:]):
        exec(cell, live)
    live["N"] = 5
    assert run(excerpt(cells, "Op", live))["Op"]().f() == 15


def test_equal_programs_are_equal_text() -> None:
    source = "SITES = {'a', 'b', 'c'}\nclass Op:\n    def f(self):\n        return SITES\n"
    assert excerpt([source], "Op", run(source)) == excerpt([source], "Op", {**run(source), "SITES": {"c", "b", "a"}})
    assert excerpt([source + "print()"], "Op") == excerpt([source], "Op"), "what is not used is no other version"


class Session:
    """An object of a kind that cannot go to another process."""


Session.__module__ = "pyspark.sql.session"


@pytest.mark.parametrize(
    ("source", "live", "said"),
    [
        (
            "with x() as N: ...\nclass Op:\n    def f(self): return N",
            None,
            "Op uses 'N', which is defined by a statement",
        ),
        (
            "for N in x(): ...\nclass Op:\n    def f(self): return N",
            {"N": object()},
            "Op uses 'N', which is defined by",
        ),
        (
            "N = x()\nclass Op:\n    def f(self): return N",
            {"N": Session()},
            "a Session, which cannot be sent to a replica",
        ),
        ("class Op:\n  def f(self) return", None, "SyntaxError"),
        ("class Op:\n  def f(self): break", None, "SyntaxError: 'break' outside loop .*line=2"),
        ("def g():\n    return N\nwith x() as N: ...\nclass Op:\n    f = g", None, "g uses 'N'"),
    ],
)
def test_what_cannot_come_along(source: str, live: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(OperatorNotImportable, match=said) as caught:
        excerpt([source], "Op", None if live is None else {"Op": object, **live})
    assert caught.value.remedy


def test_a_file_that_was_changed_since_it_was_run() -> None:
    source = "class Op:\n    def f(self):\n        return 3\n    g = property(lambda self: 1)\n    h = lambda self: 2\n"
    live: dict[str, Any] = {"__name__": "live"}
    exec(source, live)
    assert excerpt([f"# a comment\n{source}"], "Op", live)
    with pytest.raises(OperatorNotImportable, match=r"Op\.f has changed since it was loaded"):
        excerpt([source.replace("3", "4")], "Op", live)
    source = "class Op:\n    def f(self, a):\n        if a:\n            a()\n            a()\n"
    exec(source, live)
    with pytest.raises(OperatorNotImportable, match=r"Op\.f has changed since it was loaded"):
        excerpt([source.removesuffix("    a()\n") + "a()\n"], "Op", live)


WRAPPED = """
from functools import cached_property, wraps
def timed(f):
    @wraps(f)
    def timing(*args):
        return f(*args) + 1
    return timing
@timed
def helper():
    return 2
class Op:
    @timed
    def f(self):
        return helper()
    @cached_property
    def g(self):
        return 5
"""


def test_functions_that_are_wrapped() -> None:
    for names in each_way(WRAPPED):
        assert names["Op"]().f() == 4
    live = run(WRAPPED, "live")
    for changed in (
        ("+ 1", "+ 2"),
        ("return 2", "return 3"),
        ("helper()\n    @", "1\n    @"),
        ("return 5", "return 6"),
    ):
        with pytest.raises(OperatorNotImportable, match=r"has changed since it was loaded"):
            excerpt([WRAPPED.replace(*changed)], "Op", live)


def cell(text: str) -> str:
    """Returns the text of a cell as IPython keeps it."""
    magic, _, body = text.removeprefix("%%").partition("\n")
    name, _, line = magic.partition(" ")
    return f"get_ipython().run_cell_magic({name!r}, {line!r}, {body!r})\n" if text.startswith("%%") else text


OP = "class Op:\n    def f(self):\n        return N"


@pytest.mark.parametrize("magic", ["%%time", "%%capture said --no-stderr", "%%prun"])
def test_a_cell_that_is_timed_is_a_cell(magic: str) -> None:
    cells = [cell(f"{magic}\nN = object\n{OP}")]
    live = run(f"N = object\n{OP}")
    assert run(excerpt(cells, "Op", live))["Op"]().f() is object


def test_a_cell_of_another_kind_is_named() -> None:
    live = {"__name__": "__main__", "Op": type("Op", (), {"__module__": "__main__"}), "N": 1}
    with pytest.raises(
        OperatorNotImportable, match=r"'Op' is defined in a cell that begins with %%cython, .*: define it in a"
    ):
        excerpt([cell(f"%%cython -a\n{OP}")], "Op", live)
    with pytest.raises(
        OperatorNotImportable, match="Op uses 'N', which is defined in a cell that begins with %%cython"
    ):
        excerpt([cell("%%cython\nN = x()"), OP], "Op", {**live, "N": object()})
    with pytest.raises(OperatorNotImportable, match="Op uses 'Op', which is defined by a statement that"):
        excerpt([cell("%%bash\nls | wc")], "Op", live)


def test_relative_imports_of_a_module_that_was_run() -> None:
    text = excerpt(["from .operators import Count\nclass Op(Count): ..."], "Op", package="tests.unit")
    assert run(text)["Op"].__mro__[1].__name__ == "Count"


def test_what_was_compiled_is_equal_from_run_to_run_and_for_this_python_only() -> None:
    source = "password = 'hidden'\nclass Op:\n    def f(self):\n        return 3\n"
    text = piped(source, "Op", run(source))
    assert text == piped(source, "Op", run(source))
    constants = [each for each in _codes_in(text)[0].co_consts if isinstance(each, str)]
    assert "hidden" not in constants, "what the class does not use stays where it is"
    with pytest.raises(OperatorNotImportable, match="another version of Python"):
        code("00000000", "")


def _codes_in(text: str) -> list[Any]:
    import ast

    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and len(node.args) == 2]
    return [code(*(each.value for each in call.args)) for call in calls if isinstance(call.func, ast.Attribute)]  # type: ignore[attr-defined]


A = "class A:\n    def __init__(self, of=None): self.of = of\n"


@pytest.mark.parametrize(
    "source",
    [
        "def N(): return 1\nif not sys:\n    def N(): return 2",
        "if sys:\n    class N: ...\nelse:\n    class N:\n        n = 2",
        "N = A()\nif not sys: N = A(2)",
        "N = A()\nfor n in range(2): N = A(N)",
        "N = A()\nwhile True:\n    N = A(N)\n    if N.of.of: break",
        "N = A()\ntry: len(1)\nexcept TypeError: pass\nelse: N = A(2)",
        "if not sys: N = A()\nif sys: N = A(2)\nN = A(N)",
        "with open('/dev/null') as N: ...\nif sys: N = A()",
    ],
)
def test_compiled_code_that_binds_a_name_in_branches_is_refused(source: str) -> None:
    source = f"import sys\n{A}{source}\nclass Op:\n    f = lambda self: N\n"
    with pytest.raises(OperatorNotImportable, match="uses 'N', which is defined by a statement that replicas do not"):
        piped(source, "Op", run(source, "live"))


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ("try: from math import floor as N\nexcept ImportError: from math import ceil as N", "N(3.5)"),
        ("import json as N\nif sys: import math as N", "N.floor(3.5)"),
        ("N = 4\nif sys: N = 3", "N"),
        ("if not sys: N = A(2)\nN = A(3)", "N.of"),
        ("try: N = A(2)\nexcept TypeError: N = A(4)\nN = A(3)", "N.of"),
        ("N = A(3)\ntry: N = A(N)\nfinally: len('')", "N.of.of"),
        ("try: len(1)\nexcept TypeError: pass\nN = A(3)\nN = A(N)", "N.of.of"),
        ("if sys:\n    N = A(3)", "N.of"),
    ],
)
def test_compiled_code_that_binds_a_name_in_branches_comes_along_as_it_ran(source: str, expression: str) -> None:
    source = f"import sys\n{A}{source}\nclass Op:\n    f = lambda self: {expression}\n"
    assert run(piped(source, "Op", run(source, "live")))["Op"]().f() == 3


CHAIN = "class Chain:\n    made = 0\n    def add(self):\n        self.made += 1\n        return self.made\n"
CHAIN += "chain = Chain()\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{CHAIN}for n in range(3): N = A(chain.add())",
        f"{CHAIN}for n in range(3):\n    class N:\n        of = chain.add()",
        f"{HOOK}N.held[len(N.held)] = 1\nBase = N\nfor n in range(3):\n    class N(Base): ...",
        "numbers = iter([1, 2, 3])\nfor _ in range(2): N = A(next(numbers))",
        "numbers = iter([1, 2, 3])\nwhile True:\n    N = A(next(numbers))\n    if N.of == 2: break",
        "for n in range(3):\n    if n == 2: continue\n    def N(n=n): return n",
        "n = 0\nwhile n < 3:\n    def N(n=n): return n\n    n += 1",
        "N = A(1) if sys else A(2)",
        "N = A(1) or A(2)",
        "N = (lambda: 1) if sys else (lambda: 2)",
    ],
)
def test_compiled_code_whose_only_statement_runs_otherwise_when_it_is_alone_is_refused(source: str) -> None:
    source = f"import sys\n{A}{source}\nclass Op:\n    f = lambda self: N\n"
    said = r"uses 'N', which is defined by a statement that|the definition of N reads 'n', which a later statement"
    with pytest.raises(OperatorNotImportable, match=said):
        piped(source, "Op", run(source, "live"))


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ("for n in range(2):\n    def N(): return 3", "N()"),
        ("from enum import Enum\nfor n in range(2):\n    class N(Enum): n = 3", "N.n.value"),
        ("for n in range(4):\n    def N(n=n): return n", "N()"),
        ("n = 0\nwhile n < 3:\n    n += 1\n    N = lambda n=n: n", "N()"),
        ("for n in range(2): import math as N", "N.floor(3.5)"),
        ("for n in range(2):\n    N = A(3)\n    break", "N.of"),
        ("for n in range(2):\n    try:\n        N = A(3)\n        break\n    except OSError: print('again')", "N.of"),
        ("N = 4 if not sys else 3", "N"),
    ],
)
def test_compiled_code_in_a_loop_that_makes_the_same_each_time_comes_along(source: str, expression: str) -> None:
    source = f"import sys\n{A}{source}\nclass Op:\n    f = lambda self: {expression}\n"
    assert run(piped(source, "Op", run(source, "live")))["Op"]().f() == 3


def test_every_module_of_a_package_that_compiled_code_imports_comes_along() -> None:
    source = "import xml.etree.ElementTree\nclass Op:\n    f = lambda self: xml\nimport xml.dom.minidom\n"
    source += "try: import xml.no_such\nexcept ImportError: pass\n"
    assert "import xml.etree.ElementTree, xml.dom.minidom\n" in piped(source, "Op", run(source, "live"))


def test_statements_that_have_not_run_yet_are_left_out() -> None:
    source = f"{A}N = A(3)\nclass Op:\n    f = lambda self: N\ntext = excerpt_of(Op)\nN = A(4)\nwhile N: N = None\n"

    def excerpt_of(op: type) -> str:
        frame = sys._getframe(1)
        return module_under_test.excerpt(compiled(frame.f_code, frame.f_lasti), "Op", {**frame.f_globals})

    live: dict[str, Any] = {"__name__": "live", "excerpt_of": excerpt_of}
    exec(compile(source, "<stdin>", "exec", dont_inherit=True), live)
    assert run(live["text"])["Op"]().f().of == 3


def test_many_constants_and_names() -> None:
    """Indexes of constants and names may take more than a byte."""
    lines = [f"n{number} = 'c{number}'" for number in range(300)]
    source = "\n".join([*lines, "def last():\n    return 'x'", "class Op:\n    f = lambda self: n299 + last()"])
    for names in each_way(source):
        assert names["Op"]().f() == "c299x"
