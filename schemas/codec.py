"""Records to bytes and back: Avro single-object encoding.

A message is the two bytes ``C3 01``, the CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian), then
the Avro body (Apache Avro specification 1.11, "Single-object encoding"). The reader finds the writer's schema by that
fingerprint among the present schemas and the released ones in ``schemas/released``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from io import BytesIO
from typing import Any, TypeVar, cast, get_args

import fastavro
import msgspec
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form
from fastavro.types import Schema

from schemas import binary, records
from schemas.errors import KvcensusError

_MAGIC = b"\xc3\x01"
_HEADER_BYTES = 10

R = TypeVar("R", bound=records.Record)


class CodecError(KvcensusError):
    """A message that is not one of ours: says what was wrong with it."""


def record_types() -> tuple[type[records.Record], ...]:
    """Every record type that has a schema of its own."""
    return cast("tuple[type[records.Record], ...]", get_args(records.Record))


def schema_json(name: str) -> dict[str, Any]:
    """The present Avro schema of record ``name``, as parsed JSON."""
    text = (files("schemas") / "avro" / f"{name}.avsc").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def schema_fingerprint(schema: dict[str, Any]) -> bytes:
    """CRC-64-AVRO of the schema's parsing canonical form: 8 bytes, little-endian, as single-object encoding has it."""
    canonical = to_parsing_canonical_form(schema)
    # fastavro writes the number's bytes as hex, lowest byte first already.
    return bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))


@cache
def _present(name: str) -> tuple[Schema, bytes]:
    raw = schema_json(name)
    return parse_schema(raw), _MAGIC + schema_fingerprint(raw)


def released_schemas(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(release, schema) of every released form of record ``name``, oldest first."""
    root: Traversable = files("schemas") / "released"
    if not root.is_dir():
        return
    for release in sorted(root.iterdir(), key=lambda entry: entry.name):
        path = release / f"{name}.avsc"
        if path.is_file():
            yield release.name, json.loads(path.read_text(encoding="utf-8"))


@cache
def _writers(name: str) -> dict[bytes, Schema]:
    raw = schema_json(name)
    known = [raw, *(schema for _, schema in released_schemas(name))]
    return {schema_fingerprint(schema): parse_schema(schema) for schema in known}


def encode(record: records.Record) -> bytes:
    """``record`` as a single-object Avro message."""
    kind = type(record)
    return _present(kind.__name__)[1] + binary.writer(kind)(record)


def decode(message: bytes, kind: type[R]) -> R:
    """The record in ``message``. Raises :class:`CodecError` for anything that is not a ``kind``."""
    if message[:2] != _MAGIC or len(message) < _HEADER_BYTES:
        raise CodecError(f"not an Avro single-object message ({len(message)} bytes)")
    name = kind.__name__
    writer = _writers(name).get(message[2:_HEADER_BYTES])
    if writer is None:
        raise CodecError(f"unknown schema {message[2:_HEADER_BYTES].hex()} for {name}: written by a newer version?")
    present, header = _present(name)
    try:
        if message[:_HEADER_BYTES] == header:
            record, end = binary.reader(cast("type[msgspec.Struct]", kind))(message, _HEADER_BYTES)
        else:
            source = BytesIO(message)
            source.seek(_HEADER_BYTES)
            record = msgspec.convert(fastavro.schemaless_reader(source, writer, present), kind, builtin_types=(bytes,))
            end = source.tell()
        if end != len(message):
            raise CodecError(f"{name}: bytes left over after the record")
        return cast("R", record)
    except CodecError:
        raise
    except Exception as error:  # there are a dozen kinds for bad bytes
        raise CodecError(f"{name}: {str(error) or type(error).__name__}") from error
