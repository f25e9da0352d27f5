"""Frames in an append-only file: after a crash all of one is there, or it can be told that it is not. Pure.

A frame is a mark of 4 bytes, the length of its body and the body's CRC-32 (both u32, little-endian), and the body. The mark
lets a reader find the next frame behind bytes that are no longer one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from mmap import mmap
from typing import TypeAlias

MARK = b"\xf5kv\x01"
_HEAD = struct.Struct("<4sII")
HEAD_BYTES = _HEAD.size

Found: TypeAlias = tuple[int, int, bytes | None]
"""Where a frame starts, where it ends (not inclusive), and its body; a body of None: these bytes are no frame."""


def frame(body: bytes) -> bytes:
    """``body`` (less than 4 GiB) as a frame."""
    return b"".join((_HEAD.pack(MARK, len(body), zlib.crc32(body)), body))


def scan(data: bytes | mmap) -> Iterator[Found]:
    """What ``data`` consists of, in order and without a gap; stretches that are no frame come as one piece each."""
    position, size = 0, len(data)
    while position < size:
        body = _body_at(data, position)
        if body is not None:
            end = position + HEAD_BYTES + len(body)
            yield position, end, body
            position = end
            continue
        start = position
        while True:
            position = data.find(MARK, position + 1)
            if position < 0:
                position = size
            if position == size or _body_at(data, position) is not None:
                break
        yield start, position, None


def cut_short(data: bytes) -> bool:
    """Whether bytes that are no frame look like the beginning of one, or like blocks that a crash left unwritten (zeros)."""
    return data.startswith(MARK) or MARK.startswith(data) or not data.strip(b"\0")


def _body_at(data: bytes | mmap, position: int) -> bytes | None:
    if position + HEAD_BYTES > len(data):
        return None
    mark, length, checksum = _HEAD.unpack_from(data, position)
    start = position + HEAD_BYTES
    if mark != MARK or start + length > len(data):
        return None
    body = data[start : start + length]
    return body if zlib.crc32(body) == checksum else None
