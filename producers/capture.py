"""Captures: files of raw engine messages, as recorded from the socket. JSON lines, gzip or plain.

Read forms: ``{"t": seconds, "frames": [base64, ...]}``, the same with ``"dir"`` for exchanges with a replay socket (sent rows and the end
marker are left out), and ``{"arrival": seconds, "seq": n, "topic_hex": ..., "payload_hex": ...}``.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from producers import wire
from schemas.errors import KvcensusError

_GZIP_MAGIC = b"\x1f\x8b"
_SEQ_BYTES = 8
_END_SEQ = 2**64 - 1
MAX_LINE_BYTES = 3 * wire.MAX_PAYLOAD_BYTES
"""Longest line that is read, in bytes: room for the largest payload in hexadecimal."""


class Frame(NamedTuple):
    """One engine message as received: receiver's clock in unix seconds, topic, sequence number, payload (msgpack)."""

    received_at_s: float
    topic: bytes
    seq: int
    payload: bytes


def read(path: str | os.PathLike[str]) -> Iterator[Frame]:
    """The frames of a capture file in recorded order. Raises :class:`KvcensusError` naming file and line for what can't be read."""
    number = 0
    try:
        with _open(path) as file:
            while True:
                number += 1
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    return
                frame = _frame(line)
                if frame is not None:
                    yield frame
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise KvcensusError(f"{path}: line {number}: cut short or damaged: {error}") from None
    except _BadLineError as error:
        raise KvcensusError(f"{path}: line {number}: {error}") from None
    except OSError as error:
        raise KvcensusError(f"{path}: {error.strerror or error}") from None


def ranks(path: str | os.PathLike[str]) -> dict[int, list[Frame]]:
    """The frames of ``path`` by the rank that each batch names itself (0 if it names none), order kept, lowest rank first."""
    return split_ranks(read(path))


def split_ranks(frames: Iterable[Frame]) -> dict[int, list[Frame]]:
    """As :func:`ranks`, for frames at hand. An unreadable payload goes to the rank of the frame before it."""
    by_rank: dict[int, list[Frame]] = {}
    rank = 0
    for frame in frames:
        with contextlib.suppress(wire.WireError):  # whoever decodes it will refuse and count it
            rank = wire.dp_rank(frame.payload) or 0
        by_rank.setdefault(rank, []).append(frame)
    return dict(sorted(by_rank.items()))


def restamp(payload: bytes, delta_us: int) -> bytes:
    """``payload`` with its engine time moved by ``delta_us`` microseconds, all else untouched. Raises :class:`WireError`."""
    moved = (wire.micros(wire.timestamp(payload)) + delta_us) / 1_000_000
    wire.micros(moved)
    if payload[0] & 0xF0 == 0x90 and payload[1] == 0xCB:  # short array, then a float64
        return payload[:1] + struct.pack(">Bd", 0xCB, moved) + payload[10:]
    outer = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
    outer[0] = msgspec.Raw(msgspec.msgpack.encode(moved))
    return msgspec.msgpack.encode(outer)


class _BadLineError(Exception):
    pass


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115, PTH123 - the caller closes it
    if file.peek(2)[:2] == _GZIP_MAGIC:
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    return file


def _frame(line: bytes) -> Frame | None:
    if len(line) == MAX_LINE_BYTES:
        raise _BadLineError(f"longer than {MAX_LINE_BYTES} bytes")
    if line.isspace():
        return None
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _BadLineError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadLineError("not a JSON object")
    try:
        if "payload_hex" in row:
            return _hex_frame(row)
        if "frames" in row:
            return _socket_frame(row)
    except (KeyError, TypeError, ValueError) as error:
        raise _BadLineError(f"not a frame: {error}") from None
    raise _BadLineError("has neither `frames` nor `payload_hex`: not a capture of engine messages")


def _hex_frame(row: dict[str, Any]) -> Frame:
    seq = int(row["seq"])
    if not 0 <= seq < _END_SEQ:
        raise ValueError(f"sequence {seq} is out of range")
    return Frame(float(row["arrival"]), bytes.fromhex(row.get("topic_hex", "")), seq, bytes.fromhex(row["payload_hex"]))


def _socket_frame(row: dict[str, Any]) -> Frame | None:
    if row.get("dir", "recv") != "recv":
        return None
    # [topic, seq, payload] live; from the replay socket [b"", seq, payload], or from newer engines [b"", topic, seq, payload].
    parts = [base64.b64decode(part, validate=True) for part in row["frames"]]
    if len(parts) not in (2, 3, 4):
        raise ValueError(f"{len(parts)} parts")
    *lead, number, payload = parts
    if len(number) != _SEQ_BYTES:
        raise ValueError(f"sequence of {len(number)} bytes, expected {_SEQ_BYTES}")
    seq = int.from_bytes(number, "big")
    if seq == _END_SEQ:
        return None
    return Frame(float(row["t"]), lead[-1] if lead else b"", seq, payload)
