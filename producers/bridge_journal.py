"""The resolver's bridge on disk: what was learned in an engine's life, so that a forwarder that comes back goes on resolving.

An append-only file of frames. The first says what the entries hold for (life, key, model: the *scope*), each further one is what was
learned in a few batches, in columns. It is written without waiting for the disk: what it is for is a forwarder that is killed;
if the machine goes down, so does the engine, and its hashes with it. An entry that is missing costs an identity, never a wrong one.
"""

from __future__ import annotations

import errno
import logging
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, repeat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec

from producers.folders import write_all
from producers.frames import frame, scan
from producers.resolver import Learned
from producers.spool_files import replace
from schemas.errors import KvcensusError
from schemas.records import ID_BYTES

logger = logging.getLogger("kvcensus.bridge")

_SLICE = 16_384
"""Entries of a snapshot in one frame."""
_SPARE = 65_536
"""Entries more than twice a snapshot's before the file is worth writing anew."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Columns(msgspec.Struct, array_like=True, gc=False):
    """Entries by column. One number stands for a column of equal ones.

    ``hashes`` is u64 numbers in this machine's byte order (``width`` 0), or byte strings of ``width`` one after another, or a list.
    ``contents`` is the known content ids one after another, ``known`` a byte (0 or 1) for each entry, empty if all are.
    """

    hashes: bytes | list[int | bytes]
    width: int
    sizes: int | list[int]
    contents: bytes
    known: bytes
    groups: int | list[int]


class _Scope(msgspec.Struct, array_like=True, tag="scope"):
    scope: bytes


_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(_Columns)
_scope_decoder = msgspec.msgpack.Decoder(_Scope)


class BridgeJournal:
    """The journal at ``path`` for ``scope``; one for another scope, or none, begins anew. Used by one thread.

    Raises :class:`KvcensusError` if the file cannot be used at all. A full disk, and later any that takes nothing, costs what would
    have been written (``skipped``), and is told once.
    """

    def __init__(self, path: Path, scope: bytes) -> None:
        self.path = path
        self.scope = scope
        self.entries = 0
        """Entries in the file, those that came more than once counted each time."""
        self.bytes = 0
        self.skipped = 0
        """Entries that the disk did not take."""
        self.bad_bytes = 0
        """Bytes that could not be read at the start: an append cut short, or damage."""
        self._descriptor: int | None = None
        self._failing = False
        self._not_before = 0
        try:
            if not self._open():
                self._begin()
        except OSError as error:
            if error.errno in _FULL:
                self._note_fault(error)
                return
            raise KvcensusError(f"the bridge journal {path} cannot be used: {error.strerror or error}") from error

    def recovered(self) -> Iterator[Learned]:
        """What the file holds, in the order in which it was learned: for :meth:`RankResolver.restore`, before anything is appended."""
        for columns in self._columns():
            yield from _unpack(columns)

    def append(self, learned: list[Learned]) -> None:
        """Write down what was learned; all of it is there after a crash, or nothing."""
        if learned:
            self._write(frame(_encoder.encode(_pack(learned))), len(learned))

    def begin(self, scope: bytes) -> None:
        """Forget everything: from here on the journal is for ``scope``."""
        self.scope = scope
        self._close()
        try:
            self._begin()
        except OSError as error:
            self._note_fault(error)

    def due(self, entries: int) -> bool:
        """Whether the file holds so much more than a snapshot of ``entries`` that :meth:`compact` is worth it."""
        return self.entries > max(2 * entries + _SPARE, self._not_before)

    def compact(self, entries: Iterable[Learned]) -> None:
        """Write the file anew with ``entries``, which are all that is known now; after a crash the old one or the new one is there.

        The caller waits meanwhile: half a second to a second for each million.
        """
        made = self.path.with_suffix(".tmp")
        count = 0
        source = iter(entries)
        try:
            descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            try:
                write_all(descriptor, _header(self.scope))
                while part := list(islice(source, _SLICE)):
                    write_all(descriptor, frame(_encoder.encode(_pack(part))))
                    count += len(part)
                made.rename(self.path)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                made.unlink(missing_ok=True)
            self._not_before = self.entries + self.entries // 2  # not with every batch again
            self._note_fault(error)
            return
        self._not_before = 0
        self._close()
        self._descriptor = descriptor
        self.entries, self.bytes = count, os.fstat(descriptor).st_size

    def close(self) -> None:
        """Let go of the file; everything is in it already."""
        self._close()

    def __enter__(self) -> BridgeJournal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> bool:
        """Take up the file that is there, if it is for this scope."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return False
        if not size:
            return False
        readable = 0
        entries = 0
        with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            for start, end, body in scan(data):
                if start == 0 and not _is_scope(body, self.scope):
                    return False
                if body is None:
                    self.bad_bytes += end - start
                    continue
                readable = end
                columns = _decode(body) if start else None
                entries += _count(columns) if columns is not None else 0
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        if readable < size:
            os.ftruncate(self._descriptor, readable)
        self.entries, self.bytes = entries, readable
        return True

    def _begin(self) -> None:
        self.entries = self.bytes = 0
        try:
            replace(self.path, header := _header(self.scope))
        except OSError:
            # What is there is for another scope: better nothing than that with ours behind it.
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            raise
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self.bytes = len(header)

    def _columns(self) -> Iterator[_Columns]:
        if not self.entries:
            return
        with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            for start, _, body in scan(data):
                columns = _decode(body) if start and body is not None else None
                if columns is not None:
                    yield columns

    def _write(self, data: bytes, count: int) -> None:
        try:
            if self._descriptor is None:
                self._begin()
            assert self._descriptor is not None
            write_all(self._descriptor, data)
        except OSError as error:
            self.skipped += count
            if self._descriptor is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self.bytes)
            self._note_fault(error)
            return
        if self._failing:
            self._failing = False
            logger.warning("%s can be written again", self.path)
        self.entries += count
        self.bytes += len(data)

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _note_fault(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            logger.warning(
                "%s cannot be written (%s): a forwarder that is started again will not know some content until it is stored anew",
                self.path,
                error.strerror or error,
            )


def _header(scope: bytes) -> bytes:
    return frame(_encoder.encode(_Scope(scope)))


def _is_scope(body: bytes | None, scope: bytes) -> bool:
    try:
        return body is not None and _scope_decoder.decode(body).scope == scope
    except msgspec.DecodeError:
        return False


def _decode(body: bytes) -> _Columns | None:
    try:
        return _columns_decoder.decode(body)
    except msgspec.DecodeError:
        return None


def _pack(learned: list[Learned]) -> _Columns:
    hashes, sizes, contents, groups = zip(*learned, strict=True)
    packed, width = _pack_hashes(hashes)
    known = b""
    try:
        joined = b"".join(contents)
    except TypeError:
        known = bytes([content is not None for content in contents])
        joined = b"".join([content for content in contents if content is not None])
    return _Columns(packed, width, _pack_numbers(sizes), joined, known, _pack_numbers(groups))


def _pack_hashes(hashes: tuple[int | bytes, ...]) -> tuple[bytes | list[int | bytes], int]:
    try:
        return array("Q", cast("tuple[int, ...]", hashes)).tobytes(), 0
    except (TypeError, OverflowError):
        width = len(hashes[0]) if isinstance(hashes[0], bytes) else 0
        if width and all(isinstance(one, bytes) and len(one) == width for one in hashes):
            return b"".join(cast("tuple[bytes, ...]", hashes)), width
        return list(hashes), 0


def _pack_numbers(numbers: tuple[int, ...]) -> int | list[int]:
    return numbers[0] if numbers.count(numbers[0]) == len(numbers) else list(numbers)


def _count(columns: _Columns) -> int:
    if isinstance(columns.hashes, list):
        return len(columns.hashes)
    return len(columns.hashes) // (columns.width or 8)


def _unpack(columns: _Columns) -> Iterator[Learned]:
    count = _count(columns)
    hashes: Iterable[int | bytes]
    if isinstance(columns.hashes, list):
        hashes = columns.hashes
    elif columns.width:
        hashes = _cut(columns.hashes, columns.width)
    else:
        hashes = array("Q", columns.hashes)
    contents: Iterable[bytes | None] = _cut(columns.contents, ID_BYTES)
    if columns.known:
        given = iter(_cut(columns.contents, ID_BYTES))
        contents = [next(given) if one else None for one in columns.known]
    sizes = repeat(columns.sizes, count) if isinstance(columns.sizes, int) else columns.sizes
    groups = repeat(columns.groups, count) if isinstance(columns.groups, int) else columns.groups
    return zip(hashes, sizes, contents, groups, strict=True)


def _cut(packed: bytes, width: int) -> list[bytes]:
    return [packed[place : place + width] for place in range(0, len(packed), width)]
