"""Write ``schemas/avro`` anew from the types in ``schemas.records``: ``python -m tests.tools.make_schemas``.

The tests tell when the two differ, and whether a change breaks what was released.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from msgspec import inspect

from schemas.codec import record_types

FOLDER = Path(__file__).resolve().parents[2] / "schemas" / "avro"
_PRIMITIVES: dict[type[inspect.Type], str] = {
    inspect.IntType: "long",
    inspect.StrType: "string",
    inspect.LiteralType: "string",
    inspect.BytesType: "bytes",
    inspect.BoolType: "boolean",
    inspect.FloatType: "double",
}


def avro_type(kind: inspect.Type, seen: set[str]) -> Any:
    """The Avro type of a field; a record is written out where it is met first."""
    if isinstance(kind, inspect.ListType):
        return {"type": "array", "items": avro_type(kind.item_type, seen)}
    if isinstance(kind, inspect.DictType):
        return {"type": "map", "values": avro_type(kind.value_type, seen)}
    if isinstance(kind, inspect.UnionType):
        (inner,) = (arm for arm in kind.types if not isinstance(arm, inspect.NoneType))
        return ["null", avro_type(inner, seen)]
    if isinstance(kind, inspect.StructType):
        return avro_record(kind, seen)
    return _PRIMITIVES[type(kind)]


def avro_record(kind: inspect.StructType, seen: set[str]) -> Any:
    """The Avro record of a struct, or its name where it was written out before."""
    name = kind.cls.__name__
    if name in seen:
        return f"kvcensus.{name}"
    seen.add(name)
    doc = (kind.cls.__doc__ or "").strip().split("\n")[0].replace("``", "")
    return {"type": "record", "name": name, "namespace": "kvcensus", "doc": doc, "fields": [avro_field(f, seen) for f in kind.fields]}


def avro_field(field: inspect.Field, seen: set[str]) -> dict[str, Any]:
    """One field with its default; Avro takes the default of a union for its first branch."""
    written: dict[str, Any] = {"name": field.name, "type": avro_type(field.type, seen)}
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return written
    if isinstance(written["type"], list) and default is not None:
        written["type"].reverse()
    written["default"] = default.decode("latin-1") if isinstance(default, bytes) else default
    return written


def main() -> None:
    """Write every schema."""
    for kind in record_types():
        described = inspect.type_info(kind)
        assert isinstance(described, inspect.StructType)
        schema = avro_record(described, set())
        fastavro.parse_schema(schema)
        (FOLDER / f"{kind.__name__}.avsc").write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
