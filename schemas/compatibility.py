"""Can data written with one Avro schema be read with another? Schema resolution of the Avro specification 1.11, without data.

Beyond the letter of the specification it is strict where readers differ: a default must fit the type it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""A schema as parsed JSON."""

_PROMOTIONS: dict[str, frozenset[str]] = {
    "int": frozenset({"int", "long", "float", "double"}),
    "long": frozenset({"long", "float", "double"}),
    "float": frozenset({"float", "double"}),
    "string": frozenset({"string", "bytes"}),
    "bytes": frozenset({"bytes", "string"}),
    "double": frozenset({"double"}),
    "boolean": frozenset({"boolean"}),
    "null": frozenset({"null"}),
}
"""Writer's primitive type to the reader's types that take it."""

_INT_RANGE = {"int": 2**31, "long": 2**63}


class SchemaError(ValueError):
    """Not an Avro schema: says what is wrong with it."""


@dataclass(frozen=True)
class _Type:
    """A schema with its references looked up. ``kind`` is ``union`` or the Avro type name."""

    kind: str
    name: str = ""
    body: Mapping[str, Json] = field(default_factory=dict)
    branches: tuple[Json, ...] = ()
    namespace: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


class _Schema:
    """A schema document: its root, and the named types defined anywhere in it."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self._named: dict[str, _Type] = {}
        self._collect(root, "")

    def resolve(self, schema: Json, namespace: str = "") -> _Type:
        """``schema``, a part of this document found where ``namespace`` is the enclosing one. Raises :class:`SchemaError`."""
        if isinstance(schema, str):
            if schema in _PROMOTIONS:
                return _Type(schema)
            found = self._named.get(_full_name(schema, namespace)) or self._named.get(schema)
            if found is None:
                raise SchemaError(f"no type is named {schema!r}")
            return found
        if isinstance(schema, Mapping):
            kind = schema.get("type")
            if not isinstance(kind, str):
                return self.resolve(kind, namespace)
            if kind in ("record", "error", "enum", "fixed"):
                return self._named[_full_name(_text(schema, "name"), _text(schema, "namespace", namespace))]
            if kind in ("array", "map"):
                return _Type(kind, body=schema, namespace=namespace)
            return self.resolve(kind, namespace)
        if isinstance(schema, Sequence):
            return _Type("union", branches=tuple(schema), namespace=namespace)
        raise SchemaError(f"not a schema: {schema!r}")

    def _collect(self, schema: Json, namespace: str) -> None:
        if isinstance(schema, Mapping):
            kind = schema.get("type")
            if kind in ("record", "error", "enum", "fixed"):
                name = _full_name(_text(schema, "name"), _text(schema, "namespace", namespace))
                namespace = name.rpartition(".")[0]
                plain = "record" if kind == "error" else str(kind)
                self._named[name] = _Type(plain, name, schema, namespace=namespace)
                for part in _fields(schema):
                    self._collect(part.get("type"), namespace)
            elif isinstance(kind, str):
                self._collect(schema.get("items"), namespace)
                self._collect(schema.get("values"), namespace)
            else:
                self._collect(kind, namespace)
        elif isinstance(schema, Sequence) and not isinstance(schema, str):
            for branch in schema:
                self._collect(branch, namespace)


def can_read(reader: Json, writer: Json) -> list[str]:
    """Why a reader with schema ``reader`` can't read everything written with ``writer``; empty when it can.

    Each reason names the place, e.g. ``RankMessage.batch.ops[].kind: …``. Raises :class:`SchemaError` for what is no schema.
    """
    of_reader, of_writer = _Schema(reader), _Schema(writer)
    check = _Check(of_reader, of_writer)
    left, right = of_reader.resolve(reader), of_writer.resolve(writer)
    return list(check.types(left, right, left.name.rpartition(".")[2] or left.kind))


class _Check:
    def __init__(self, reader: _Schema, writer: _Schema) -> None:
        self._reader = reader
        self._writer = writer
        self._under_way: set[tuple[str, str]] = set()

    def types(self, reader: _Type, writer: _Type, path: str) -> Iterator[str]:
        if writer.kind == "union":
            for branch in writer.branches:
                yield from self.types(reader, self._writer.resolve(branch, writer.namespace), path)
        elif reader.kind == "union":
            yield from self._into_union(reader, writer, path)
        elif writer.kind in _PROMOTIONS or reader.kind in _PROMOTIONS:
            if reader.kind not in _PROMOTIONS.get(writer.kind, ()):
                yield f"{path}: {writer.label} cannot be read as {reader.label}"
        elif reader.kind != writer.kind:
            yield f"{path}: {writer.label} cannot be read as {reader.label}"
        elif reader.kind == "array":
            yield from self._parts(reader, writer, "items", f"{path}[]")
        elif reader.kind == "map":
            yield from self._parts(reader, writer, "values", f"{path}{{}}")
        elif not _same_name(reader, writer):
            yield f"{path}: {writer.label} cannot be read as {reader.label}: another name, and no alias for it"
        elif reader.kind == "record":
            yield from self._records(reader, writer, path)
        elif reader.kind == "enum":
            yield from _enums(reader, writer, path)
        elif reader.body.get("size") != writer.body.get("size"):
            yield f"{path}: fixed of {writer.body.get('size')} bytes cannot be read as one of {reader.body.get('size')}"

    def _parts(self, reader: _Type, writer: _Type, key: str, path: str) -> Iterator[str]:
        left = self._reader.resolve(reader.body.get(key), reader.namespace)
        right = self._writer.resolve(writer.body.get(key), writer.namespace)
        yield from self.types(left, right, path)

    def _into_union(self, reader: _Type, writer: _Type, path: str) -> Iterator[str]:
        reasons: list[str] = []
        for branch in reader.branches:
            candidate = self._reader.resolve(branch, reader.namespace)
            failed = list(self.types(candidate, writer, path))
            if not failed:
                return
            # A branch of the same kind is the one that was meant: its own reasons say more than "none fits".
            if candidate.kind == writer.kind:
                reasons += failed
        labels = ", ".join(self._reader.resolve(branch, reader.namespace).label for branch in reader.branches)
        yield from reasons or [f"{path}: {writer.label} fits no branch of the reader's union ({labels})"]

    def _records(self, reader: _Type, writer: _Type, path: str) -> Iterator[str]:
        pair = (reader.name, writer.name)
        if pair in self._under_way:
            return
        self._under_way.add(pair)
        try:
            written = {_text(part, "name"): part for part in _fields(writer.body)}
            for part in _fields(reader.body):
                name = _text(part, "name")
                here = f"{path}.{name}"
                kind = self._reader.resolve(part.get("type"), reader.namespace)
                if "default" in part and not self._fits(part["default"], kind):
                    yield f"{here}: its default {part['default']!r} is no {kind.label}"
                match = next((written[known] for known in (name, *_names(part, "aliases")) if known in written), None)
                if match is not None:
                    yield from self.types(kind, self._writer.resolve(match.get("type"), writer.namespace), here)
                elif "default" not in part:
                    yield f"{here}: not written, and it has no default"
        finally:
            self._under_way.discard(pair)

    def _fits(self, value: Json, kind: _Type) -> bool:
        """Whether ``value`` may be the default of the reader's ``kind``: for a union, of its first branch."""
        match kind.kind:
            case "union":
                return bool(kind.branches) and self._fits(value, self._reader.resolve(kind.branches[0], kind.namespace))
            case "null":
                return value is None
            case "boolean":
                return isinstance(value, bool)
            case "int" | "long":
                limit = _INT_RANGE[kind.kind]
                return isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit
            case "float" | "double":
                return isinstance(value, int | float) and not isinstance(value, bool)
            case "string":
                return isinstance(value, str)
            case "bytes" | "fixed":
                # Bytes are written as the characters of the same numbers.
                fits = isinstance(value, str) and all(ord(character) < 256 for character in value)
                return fits and (kind.kind == "bytes" or len(str(value)) == kind.body.get("size"))
            case "enum":
                return value in _names(kind.body, "symbols")
            case "array":
                items = self._reader.resolve(kind.body.get("items"), kind.namespace)
                return isinstance(value, Sequence) and not isinstance(value, str) and all(self._fits(item, items) for item in value)
            case "map":
                values = self._reader.resolve(kind.body.get("values"), kind.namespace)
                return isinstance(value, Mapping) and all(self._fits(item, values) for item in value.values())
            case _:
                if not isinstance(value, Mapping):
                    return False
                return all(
                    self._fits(value[_text(part, "name")], self._reader.resolve(part.get("type"), kind.namespace))
                    if _text(part, "name") in value
                    else "default" in part
                    for part in _fields(kind.body)
                )


def _enums(reader: _Type, writer: _Type, path: str) -> Iterator[str]:
    known = _names(reader.body, "symbols")
    unknown = [symbol for symbol in _names(writer.body, "symbols") if symbol not in known]
    if unknown and reader.body.get("default") not in known:
        yield f"{path}: the reader does not know {', '.join(unknown)}, and has no default for it"


def _same_name(reader: _Type, writer: _Type) -> bool:
    """The specification compares unqualified names; an alias without a namespace is in the reader's."""
    if reader.name.rpartition(".")[2] == writer.name.rpartition(".")[2]:
        return True
    return any(_full_name(alias, reader.namespace) == writer.name for alias in _names(reader.body, "aliases"))


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _fields(schema: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    parts = schema.get("fields", ())
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise SchemaError(f"fields of {schema.get('name')!r} are not a list")
    fields = [part for part in parts if isinstance(part, Mapping)]
    if len(fields) != len(parts):
        raise SchemaError(f"a field of {schema.get('name')!r} is not an object")
    return fields


def _names(schema: Mapping[str, Json], key: str) -> list[str]:
    values = schema.get(key, ())
    return [value for value in values if isinstance(value, str)] if isinstance(values, Sequence) and not isinstance(values, str) else []


def _text(schema: Mapping[str, Json], key: str, default: str | None = None) -> str:
    value = schema.get(key, default)
    if not isinstance(value, str):
        raise SchemaError(f"{key!r} is missing in {str(schema)[:80]}")
    return value
