"""Avro's binary encoding of our own record types, compiled from the types: several times faster than by way of dictionaries.

Follows Apache Avro 1.11, "Binary encoding". Only what our schemas are made of: long, double, boolean, string, bytes, arrays, maps,
records and unions of null with one other. Fields go in the order of the type's, which is that of its schema. The tests hold it
against the general library, which reads what other versions wrote.
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

Write: TypeAlias = Callable[[Any], bytes]
Read: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
"""From bytes and a position: the value, and the position after it. Raises ``ValueError`` or ``IndexError`` for what is none."""

_DOUBLE = struct.Struct("<d")
_LEAST, _MOST = -(2**63), 2**63 - 1
_LONGEST_VARINT = 10


class _Strings(dict[str, bytes]):
    """Encoded strings by value: names repeat. Emptied when it has grown, so that free text costs no more than it did."""

    def __missing__(self, value: str) -> bytes:
        data = value.encode()
        written = write_long(len(data)) + data
        if len(self) >= 4_096:
            self.clear()
        self[value] = written
        return written


def write_long(value: int) -> bytes:
    """A zigzag varint. Raises ``OverflowError`` beyond 64 bits."""
    if 0 <= value < 64:
        return _SMALL[value]
    if not _LEAST <= value <= _MOST:
        raise OverflowError(f"{value} does not fit into 64 bits")
    rest = value << 1 if value >= 0 else ((-value) << 1) - 1
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def read_long(data: bytes, at: int) -> tuple[int, int]:
    """The opposite."""
    byte = data[at]
    if byte < 128:
        return (byte >> 1) ^ -(byte & 1), at + 1
    rest = byte & 127
    shift = 7
    for after in range(at + 1, at + _LONGEST_VARINT):
        byte = data[after]
        rest |= (byte & 127) << shift
        if byte < 128:
            if rest >> 64:
                break
            return (rest >> 1) ^ -(rest & 1), after + 1
        shift += 7
    raise ValueError("a number of more than 64 bits")


_SMALL = [bytes([value << 1]) for value in range(64)]


@cache
def writer(kind: type[msgspec.Struct]) -> Write:
    """What writes records of ``kind``."""
    writes = [_writer(hint, null_first) for hint, null_first in _fields(kind)]

    def write(record: Any) -> bytes:
        return b"".join([each(value) for each, value in zip(writes, msgspec.structs.astuple(record), strict=True)])

    return write


@cache
def reader(kind: type[msgspec.Struct]) -> Read:
    """What reads records of ``kind``."""
    reads = [_reader(hint, null_first) for hint, null_first in _fields(kind)]

    def read(data: bytes, at: int) -> tuple[Any, int]:
        values = []
        for each in reads:
            value, at = each(data, at)
            values.append(value)
        return kind(*values), at

    return read


def _fields(kind: type[msgspec.Struct]) -> list[tuple[Any, bool]]:
    """Type of each field, and whether null is the first branch of its union: a default is of the first branch."""
    hints = typing.get_type_hints(kind)
    return [(hints[field.name], field.default in (None, msgspec.NODEFAULT)) for field in msgspec.structs.fields(kind)]


def _optional(hint: Any) -> Any:
    """The other branch of a union with null; None for anything else."""
    if get_origin(hint) in (types.UnionType, Union):
        (inner,) = (arm for arm in get_args(hint) if arm is not type(None))
        return inner
    return None


# -- writing


def _writer(hint: Any, null_first: bool = True) -> Write:
    inner = _optional(hint)
    if inner is not None:
        null, other = (b"\x00", b"\x02") if null_first else (b"\x02", b"\x00")
        write_inner = _writer(inner)
        return lambda value: null if value is None else other + write_inner(value)
    origin = get_origin(hint)
    if origin is Literal or hint is str:
        return _Strings().__getitem__
    if origin is list:
        return _array_writer(_writer(get_args(hint)[0]))
    if origin is dict:
        return _map_writer(_writer(get_args(hint)[1]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return writer(hint)
    return {int: write_long, bool: _write_bool, float: _DOUBLE.pack, bytes: _write_bytes}[hint]


def _write_bool(value: bool) -> bytes:
    return b"\x01" if value else b"\x00"


def _write_bytes(value: bytes) -> bytes:
    return write_long(len(value)) + value


def _array_writer(write_item: Write) -> Write:
    def write(items: list[Any]) -> bytes:
        return write_long(len(items)) + b"".join([write_item(item) for item in items]) + b"\x00" if items else b"\x00"

    return write


def _map_writer(write_value: Write) -> Write:
    write_key = _Strings().__getitem__

    def write(items: dict[str, Any]) -> bytes:
        if not items:
            return b"\x00"
        return write_long(len(items)) + b"".join([write_key(key) + write_value(value) for key, value in items.items()]) + b"\x00"

    return write


# -- reading


def _reader(hint: Any, null_first: bool = True) -> Read:
    inner = _optional(hint)
    if inner is not None:
        return _union_reader(_reader(inner), 0 if null_first else 2)
    origin = get_origin(hint)
    if origin is Literal:
        return _choice_reader(frozenset(get_args(hint)))
    if origin is list:
        return _array_reader(_reader(get_args(hint)[0]))
    if origin is dict:
        return _map_reader(_reader(get_args(hint)[1]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return reader(hint)
    return {int: read_long, bool: _read_bool, float: _read_double, bytes: _read_bytes, str: _read_str}[hint]


def _union_reader(read_inner: Read, null: int) -> Read:
    other = 2 - null

    def read(data: bytes, at: int) -> tuple[Any, int]:
        branch = data[at]
        if branch == null:
            return None, at + 1
        if branch != other:
            raise ValueError("a union without such a branch")
        return read_inner(data, at + 1)

    return read


def _read_bool(data: bytes, at: int) -> tuple[bool, int]:
    value = data[at]
    if value > 1:
        raise ValueError("neither true nor false")
    return value == 1, at + 1


def _read_double(data: bytes, at: int) -> tuple[float, int]:
    if at + 8 > len(data):
        raise IndexError("cut short")
    return _DOUBLE.unpack_from(data, at)[0], at + 8


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_long(data, at)
    end = at + size
    if size < 0 or end > len(data):
        raise IndexError("cut short")
    return data[at:end], end


def _read_str(data: bytes, at: int) -> tuple[str, int]:
    value, end = _read_bytes(data, at)
    return value.decode(), end


def _choice_reader(choices: frozenset[str]) -> Read:
    known = {choice.encode(): choice for choice in choices}

    def read(data: bytes, at: int) -> tuple[str, int]:
        value, end = _read_bytes(data, at)
        if value not in known:
            raise ValueError("no such value")
        return known[value], end

    return read


def _block_size(data: bytes, at: int) -> tuple[int, int]:
    """How many items follow; a negative number is followed by their size in bytes."""
    count, at = read_long(data, at)
    if count < 0:
        _, at = read_long(data, at)
    return abs(count), at


def _array_reader(read_item: Read) -> Read:
    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        count, at = _block_size(data, at)
        while count:
            for _ in range(count):
                item, at = read_item(data, at)
                items.append(item)
            count, at = _block_size(data, at)
        return items, at

    return read


def _map_reader(read_value: Read) -> Read:
    def read(data: bytes, at: int) -> tuple[dict[str, Any], int]:
        items: dict[str, Any] = {}
        count, at = _block_size(data, at)
        while count:
            for _ in range(count):
                key, at = _read_str(data, at)
                items[key], at = read_value(data, at)
            count, at = _block_size(data, at)
        return items, at

    return read
