"""Spark DDL to Arrow: what is understood; everything else is refused with a DeclarationError."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import DeclarationError, InvalidArgument
from stateflow.operator.arrow import parse_ddl, schema_of

# the Arrow type Spark 4.3 itself gives: pyspark.sql.pandas.types.to_arrow_schema(StructType.fromDDL(text))
ATOMS = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "decimal": pa.decimal128(10, 0),
    "decimal(12)": pa.decimal128(12, 0),
    "decimal(38, 18)": pa.decimal128(38, 18),
    "dec(5,2)": pa.decimal128(5, 2),
    "numeric(5,2)": pa.decimal128(5, 2),
}


@pytest.mark.parametrize(("word", "type_"), ATOMS.items())
def test_atomic_types(word: str, type_: pa.DataType) -> None:
    assert parse_ddl(f"x {word}") == pa.schema([pa.field("x", type_)])
    assert parse_ddl(f"x {word.upper()}") == pa.schema([pa.field("x", type_)])


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("a string, n long", pa.schema([("a", pa.string()), ("n", pa.int64())])),
        ("a: string, n: long", pa.schema([("a", pa.string()), ("n", pa.int64())])),
        ("  a\n  string,\n\tn long  ", pa.schema([("a", pa.string()), ("n", pa.int64())])),
        ("n long NOT NULL", pa.schema([pa.field("n", pa.int64(), nullable=False)])),
        ("n long not null, m int", pa.schema([pa.field("n", pa.int64(), nullable=False), ("m", pa.int32())])),
        ("n long COMMENT 'how many, really?', m int", pa.schema([("n", pa.int64()), ("m", pa.int32())])),
        ("n long NOT NULL COMMENT 'it''s'", None),  # Spark joins adjacent literals; we refuse what we do not know
        ("`dep time` int", pa.schema([("dep time", pa.int32())])),
        ("`a``b` int", pa.schema([("a`b", pa.int32())])),
        ("```a` int", pa.schema([("`a", pa.int32())])),
        ("string string, date date", pa.schema([("string", pa.string()), ("date", pa.date32())])),
        ("_x1 int", pa.schema([("_x1", pa.int32())])),
        ("tags array<string>", pa.schema([("tags", pa.list_(pa.string()))])),
        ("m map<string,array<double>>", pa.schema([("m", pa.map_(pa.string(), pa.list_(pa.float64())))])),
        (
            "s struct<a:int,b:struct<c:string>>",
            pa.schema([("s", pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))]))]),
        ),
        (
            "s struct<a: int NOT NULL, b: decimal(10,2)>",
            pa.schema([("s", pa.struct([pa.field("a", pa.int32(), False), pa.field("b", pa.decimal128(10, 2))]))]),
        ),
    ],
)
def test_grammar(text: str, schema: pa.Schema | None) -> None:
    if schema is None:
        with pytest.raises(DeclarationError):
            parse_ddl(text)
    else:
        assert parse_ddl(text).equals(schema, check_metadata=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column"),
        ("   ", "no column"),
        ("a", "ends too early"),
        ("a string,", "ends with a comma"),
        ("a string,,b int", "','"),
        (", a string", "','"),
        ("a string b int", "comma is missing"),
        ("a strang", "'strang' is not a known type"),
        ("a string, a int", "named twice"),
        ("a struct<x:int,x:long>", "a field of 'a' is named twice: 'x'"),
        ("a array<struct<x:int,x:long>>", "a field of 'a' is named twice: 'x'"),
        ("a map<string,array<struct<x:struct<y:int,`y`:long>>>>", "a field of 'x' is named twice: 'y'"),
        ("a array", "ends too early"),
        ("a array<", "ends too early"),
        ("a array<string", "ends too early"),
        ("a array<string>>", "comma is missing"),
        ("a array(string)", "expected '<', found '('"),
        ("a map<string>", "expected ',', found '>'"),
        ("a struct<>", "'>'"),
        ("a struct<b>", "'>'"),
        ("a decimal(", "ends too early"),
        ("a decimal()", "')'"),
        ("a decimal(x)", "'x'"),
        ("a decimal(40,2)", "40"),
        ("a decimal(0)", "0"),
        ("a decimal(5,6)", "6"),
        ("a decimal(5,2", "ends too early"),
        ("(a int)", "'('"),
        ("< int", "'<'"),
        ("'a' int", "'a'"),
        ("a int COMMENT", "ends too early"),
        ("a int COMMENT b", "'b'"),
        ("a int NOT", "comma is missing"),
        ("a-b int", "'-b int'"),
        ("a int; drop", "'; drop'"),
        ("`a int", "'`a int'"),
        ("`` int", "'`` int'"),
    ],
)
def test_what_is_not_understood_is_said(text: str, why: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        parse_ddl(text)
    assert why in caught.value.what
    assert repr(text) in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ([("a", pa.int64()), ("a", pa.string())], "a column is named twice: 'a'"),
        ([("a", pa.list_(pa.struct([("x", pa.int64()), ("x", pa.int64())])))], "a field of 'a' is named twice: 'x'"),
    ],
)
def test_arrow_schemas_are_looked_at_too(schema: Any, why: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        schema_of(pa.schema(schema))
    assert why in caught.value.what


def test_arrow_schemas_of_types_that_are_not_taken() -> None:
    with pytest.raises(InvalidArgument, match="dictionary"):
        schema_of(pa.schema([("a", pa.dictionary(pa.int32(), pa.string()))]))


def test_entries_of_maps_and_lists_may_have_the_same_names() -> None:
    same = pa.map_(pa.string(), pa.map_(pa.string(), pa.list_(pa.list_(pa.int64()))))
    assert schema_of(pa.schema([("key", same), ("item", same)])).names == ["key", "item"]


types = st.recursive(
    st.sampled_from(sorted(ATOMS)).map(lambda word: (word, ATOMS[word])),
    lambda inner: (
        inner.map(lambda t: (f"array<{t[0]}>", pa.list_(t[1])))
        | st.tuples(inner, inner).map(lambda p: (f"map<{p[0][0]},{p[1][0]}>", pa.map_(p[0][1], p[1][1])))
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda ts: (
                "struct<" + ",".join(f"f{i}:{t[0]}" for i, t in enumerate(ts)) + ">",
                pa.struct([(f"f{i}", t[1]) for i, t in enumerate(ts)]),
            )
        )
    ),
    max_leaves=6,
)


@given(st.lists(types, min_size=1, max_size=4), st.sampled_from([" ", "  ", "\n"]))
def test_any_nesting(columns: list[tuple[str, pa.DataType]], space: str) -> None:
    text = f",{space}".join(f"c{i}{space}{word}" for i, (word, _) in enumerate(columns))
    assert parse_ddl(text) == pa.schema([(f"c{i}", type_) for i, (_, type_) in enumerate(columns)])


@given(st.text("ab <>(),:`'09\n", max_size=20) | st.text(max_size=20))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    with contextlib.suppress(DeclarationError):
        assert len(parse_ddl(text)) > 0
