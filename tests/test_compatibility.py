"""The compatibility check itself, rule by rule of Avro's schema resolution; where it matters, against fastavro on real bytes."""

from __future__ import annotations

from io import BytesIO

import fastavro
import pytest

from schemas.compatibility import Json, SchemaError, can_read


def record(*fields: dict[str, Json], name: str = "R", **more: Json) -> dict[str, Json]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def a(kind: Json, name: str = "a", **more: Json) -> dict[str, Json]:
    return {"name": name, "type": kind, **more}


def enum(*symbols: str, **more: Json) -> dict[str, Json]:
    return {"type": "enum", "name": "E", "symbols": list(symbols), **more}


def fixed(size: int) -> dict[str, Json]:
    return {"type": "fixed", "name": "F", "size": size}


ARRAY: dict[str, Json] = {"type": "array", "items": "long"}
MAP: dict[str, Json] = {"type": "map", "values": "long"}
TREE = record(a("int", "v"), a(["null", "R"], "next", default=None))

READABLE: list[tuple[str, Json, Json, object]] = [
    # what, reader, writer, a value that was written
    ("the same", record(a("long")), record(a("long")), {"a": 1}),
    ("int as long", "long", "int", 7),
    ("long as double", "double", "long", 7),
    ("float as double", "double", "float", 0.5),
    ("string as bytes", "bytes", "string", "x"),
    ("bytes as string", "string", "bytes", b"x"),
    ("a field that only the writer has", record(), record(a("long")), {"a": 1}),
    ("a field that only the reader has, with default", record(a("long", default=3)), record(), {}),
    ("a nullable field that only the reader has", record(a(["null", "string"], default=None)), record(), {}),
    ("fields in another order", record(a("int", "x"), a("string", "y")), record(a("string", "y"), a("int", "x")), {"x": 1, "y": "q"}),
    ("a field renamed with an alias", record(a("long", "new", aliases=["old"])), record(a("long", "old")), {"old": 1}),
    ("a record renamed with an alias", record(a("int"), name="N", aliases=["R"]), record(a("int")), {"a": 1}),
    ("a value where the reader takes null too", record(a(["null", "long"])), record(a("long")), {"a": 1}),
    ("a union that lost a branch nobody wrote is still wider", ["null", "string", "long"], ["null", "long"], 1),
    ("a union in another order", ["string", "null"], ["null", "string"], "x"),
    ("a one-branch union read plainly", "long", ["int"], 1),
    ("enum with more symbols", enum("A", "B"), enum("A"), "A"),
    ("enum with fewer symbols and a default", enum("A", default="A"), enum("A", "B"), "A"),
    ("fixed", fixed(4), fixed(4), b"abcd"),
    ("array of a promoted type", {"type": "array", "items": "double"}, ARRAY, [1, 2]),
    ("map of a promoted type", {"type": "map", "values": "double"}, MAP, {"k": 1}),
    ("a recursive record", TREE, TREE, {"v": 1, "next": {"v": 2, "next": None}}),
    ("a primitive in its long form", {"type": "long"}, "int", 1),
]

UNREADABLE: list[tuple[str, Json, Json, str]] = [
    # what, reader, writer, part of the reason
    ("long as int", "int", "long", "long cannot be read as int"),
    ("double as float", "float", "double", "double cannot be read as float"),
    ("string as long", record(a("long")), record(a("string")), "R.a: string cannot be read as long"),
    ("boolean as int", "int", "boolean", "boolean"),
    ("a field that only the reader has, no default", record(a("long")), record(), "R.a: not written, and it has no default"),
    ("a nullable field without a default", record(a(["null", "long"])), record(), "R.a: not written"),
    ("a field renamed without an alias", record(a("long", "new")), record(a("long", "old")), "R.new: not written"),
    ("a record renamed without an alias", record(name="N"), record(name="R"), "another name"),
    ("null where the reader takes none", record(a("long")), record(a(["null", "long"])), "R.a: null cannot be read as long"),
    ("a branch the reader lost", ["null", "long"], ["null", "long", "string"], "string fits no branch"),
    ("deep in a branch", ["null", record(a("int"))], ["null", record(a("string"))], "union.a: string cannot be read as int"),
    ("enum with fewer symbols", enum("A"), enum("A", "B"), "does not know B"),
    ("enum whose default it does not know", enum("A", default="C"), enum("A", "B"), "does not know B"),
    ("fixed of another size", fixed(4), fixed(8), "fixed of 8 bytes"),
    ("array items", {"type": "array", "items": "int"}, ARRAY, "array[]: long cannot be read as int"),
    ("map values", {"type": "map", "values": "string"}, MAP, "map{}: long cannot be read as string"),
    ("array as map", MAP, ARRAY, "array cannot be read as map"),
    ("record as map", MAP, record(), "record R cannot be read as map"),
    ("fixed as bytes", "bytes", fixed(4), "fixed F cannot be read as bytes"),
    (
        "inside a recursive record",
        TREE,
        record(a("string", "v"), a(["null", "R"], "next", default=None)),
        "R.v: string cannot be read as int",
    ),
    ("a default of the wrong type", record(a("long", default="3")), record(a("long")), "its default '3' is no long"),
    ("a default for the second branch", record(a(["long", "null"], default=None)), record(a("long")), "its default None"),
    ("a default beyond long", record(a("long", default=2**63)), record(a("long")), "is no long"),
    ("a default of half an array", record(a(ARRAY, default=[1, "x"])), record(a(ARRAY)), "is no array"),
    ("a default of a record without one of its fields", record(a(record(a("int"), name="S"), default={})), record(), "is no record S"),
    ("a default that is no symbol", record(a(enum("A"), default="Z")), record(), "is no enum E"),
    ("a default of a fixed too short", record(a(fixed(2), default="x")), record(), "is no fixed F"),
]


@pytest.mark.parametrize(("reader", "writer", "value"), [case[1:] for case in READABLE], ids=[case[0] for case in READABLE])
def test_readable(reader: Json, writer: Json, value: object) -> None:
    assert can_read(reader, writer) == []
    body = BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(writer), value)  # type: ignore[arg-type]
    body.seek(0)
    fastavro.schemaless_reader(body, fastavro.parse_schema(writer), fastavro.parse_schema(reader))  # type: ignore[arg-type]
    assert body.read() == b""


@pytest.mark.parametrize(("reader", "writer", "reason"), [case[1:] for case in UNREADABLE], ids=[case[0] for case in UNREADABLE])
def test_unreadable(reader: Json, writer: Json, reason: str) -> None:
    reasons = can_read(reader, writer)
    assert reasons
    assert reason in " ".join(reasons)


def test_every_reason_is_given() -> None:
    reader = record(a("int", "x"), a("int", "y"), a("int", "z"))
    writer = record(a("string", "x"), a("int", "y"))
    assert can_read(reader, writer) == ["R.x: string cannot be read as int", "R.z: not written, and it has no default"]


def test_names_are_found_in_their_namespace() -> None:
    inner = record(a("int"), name="I")
    schema = record(a(inner, "one"), a("I", "two"), a("n.I", "three"), namespace="n")
    assert can_read(schema, schema) == []
    changed = record(a(record(a("string"), name="I"), "one"), a("I", "two"), a("n.I", "three"), namespace="n")
    assert can_read(schema, changed) == [f"R.{name}.a: string cannot be read as int" for name in ("one", "two", "three")]


@pytest.mark.parametrize("nonsense", ["nosuch", {"type": "record", "fields": []}, {"type": "array"}, 3, None, {}, record("x")])  # type: ignore[arg-type]
def test_what_is_no_schema_is_refused(nonsense: Json) -> None:
    with pytest.raises(SchemaError):
        can_read(nonsense, nonsense)
