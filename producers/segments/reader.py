"""Sealed segments from disk, whole or not at all. The encoding is told from the content, never from the name."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from producers.segments.contract import (
    ACTIVE,
    COLUMNS,
    MARKERS,
    ORPHAN_PREFIX,
    PARQUET_MAGIC,
    PARQUET_SUFFIX,
    RANGES,
    SCHEMA,
    SEALED_PREFIX,
    WAL_SUFFIX,
    ContractError,
    Endpoint,
    Row,
    as_text,
    check,
    check_needed,
    check_range,
)
from producers.segments.seal import SegmentError, parse_line

MAX_LINE_BYTES = 16 << 20
"""Longest line that is read, in bytes."""

MAX_ROWS = 20_000_000
"""Most records that are read of one segment."""

_BATCH_ROWS = 16_384


class VanishedError(SegmentError):
    """A segment that was there and is gone: dropped for the bound on the disk, or taken away by whoever ships it."""


@dataclass
class Found:
    """Files below some folders: candidates in a fixed order, and how many files were none."""

    segments: list[Path] = field(default_factory=list)
    skipped: int = 0


def find(paths: Iterable[Path]) -> Found:
    """Sealed segments in ``paths``, files or folders with whatever lies below them.

    An active segment and a draft never count, nor lines whose Parquet lies beside them, nor what is no file (a pipe would never end).
    A folder is looked into once, however many links lead there. Raises :class:`SegmentError` for a path that is not there, or that
    may not be looked at.
    """
    found = Found()
    entered: set[tuple[int, int]] = set()
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            raise SegmentError(f"{path}: no such file or folder") from None
        except OSError as error:
            raise SegmentError(f"{path}: {error.strerror or error}") from None
        if stat.S_ISREG(status.st_mode):
            found.segments.append(path)
        elif stat.S_ISDIR(status.st_mode):
            _walk(path, status, found, entered)
        else:
            raise SegmentError(f"{path}: not a file or folder")
    found.segments = list(dict.fromkeys(found.segments))
    return found


def _walk(folder: Path, status: os.stat_result, found: Found, entered: set[tuple[int, int]]) -> None:
    waiting = [(folder, status)]  # folders may lie deeper in each other than calls may
    while waiting:
        folder, status = waiting.pop()
        if (status.st_dev, status.st_ino) not in entered:
            entered.add((status.st_dev, status.st_ino))
            waiting += reversed(_look_into(folder, found))


def _look_into(folder: Path, found: Found) -> list[tuple[Path, os.stat_result]]:
    """Add the files of ``folder`` to ``found``; the folders in it."""
    folders: list[tuple[Path, os.stat_result]] = []
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:  # somebody took it away meanwhile
        return folders
    except OSError as error:
        raise SegmentError(f"{folder}: {error.strerror or error}") from None
    names = {entry.name for entry in entries}
    for entry in entries:
        converted = entry.suffix == WAL_SUFFIX and entry.with_suffix(PARQUET_SUFFIX).name in names
        may_be = _may_be_segment(entry.name) and not converted
        try:
            below = entry.stat()
        except OSError as error:
            # One that was taken away meanwhile counts as such when it is to be read.
            if may_be and not isinstance(error, FileNotFoundError):
                raise SegmentError(f"{entry}: {error.strerror or error}") from None
            is_folder, is_file = False, True
        else:
            is_folder, is_file = stat.S_ISDIR(below.st_mode), stat.S_ISREG(below.st_mode)
        if is_folder:
            folders.append((entry, below))
        elif may_be and is_file:
            found.segments.append(entry)
        else:
            found.skipped += 1
    return folders


def _may_be_segment(name: str) -> bool:
    if name == ACTIVE or name.endswith(".tmp") or name.startswith("."):
        return False
    return name.startswith((SEALED_PREFIX, ORPHAN_PREFIX)) or name.endswith((WAL_SUFFIX, PARQUET_SUFFIX))


def read(path: Path) -> list[Row]:
    """All records of a sealed segment. Raises :class:`SegmentError`, and nothing else, for one that cannot be read whole."""
    return _read(path, None)


def head(path: Path, count: int) -> list[Row]:
    """The first records of a sealed segment: whose it is. Raises :class:`SegmentError`, also where no header stands first."""
    return _read(path, count)


def _read(path: Path, most: int | None) -> list[Row]:
    path = _present(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == PARQUET_MAGIC:
            rows = list(itertools.islice(_parquet(path, most or _BATCH_ROWS), most))
        elif magic.lstrip()[:1] == b"{":
            rows = list(itertools.islice(_lines(path), most))
        else:
            raise ContractError("neither Parquet nor JSON lines" if magic else "empty")
        if not rows or rows[0].kind not in MARKERS:
            raise ContractError(f"begins with {rows[0].kind if rows else 'nothing'}, not with segment_open")
    except OSError as error:
        raise SegmentError(f"{path}: {' '.join(str(error.strerror or error).split())}") from None
    except ContractError as error:
        raise SegmentError(f"{path}: {error}") from None
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError) as error:
        raise SegmentError(f"{path}: damaged: {' '.join(str(error).split())[:200] or type(error).__name__}") from None
    return rows


def digest(path: Path) -> bytes:
    """Of a file's bytes: the same segment shipped twice has the same. Raises :class:`SegmentError`."""
    path = _present(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise SegmentError(f"{path}: {error.strerror or error}") from None


def _present(path: Path) -> Path:
    """Where a segment lies now: its writer may have replaced the lines by their Parquet since. Raises :class:`VanishedError`."""
    if path.exists():
        return path
    converted = path.with_suffix(PARQUET_SUFFIX)
    if converted.exists():
        return converted
    raise VanishedError(f"{path}: is gone")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if number > MAX_ROWS:
                raise ContractError(f"more than {MAX_ROWS} records")
            if not line.endswith(b"\n"):
                raise ContractError(f"line {number}: {'too long' if len(line) == MAX_LINE_BYTES else 'cut short'}")
            if line.isspace():
                continue
            try:
                row = parse_line(line)
                check(row)
            except ContractError as error:
                raise ContractError(f"line {number}: {error}") from None
            yield row


def _parquet(path: Path, batch_rows: int) -> Iterator[Row]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if file.metadata.num_rows > MAX_ROWS:
            raise ContractError(f"{file.metadata.num_rows} records, more than {MAX_ROWS}")
        done = 0
        for batch in file.iter_batches(batch_size=batch_rows):
            for row in _batch_rows(batch):
                done += 1
                try:
                    check_needed(row)
                except ContractError as error:
                    raise ContractError(f"row {done}: {error}") from None
                yield row
        if done != file.metadata.num_rows:
            raise ContractError(f"{done} records instead of {file.metadata.num_rows}")


def _batch_rows(batch: Any) -> Iterator[Row]:
    """The rows of a record batch: columns of the contract typed as it says, any other into ``extra``."""
    columns: dict[str, list[Any]] = {}
    extra: list[dict[str, str]] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count == len(column):
            continue
        if name == "extra" and pa.types.is_map(column.type):
            for known, pairs in zip(extra, column.to_pylist(), strict=True):
                known.update({key: value for key, value in pairs or () if value is not None})
        elif name in COLUMNS:
            typed = column.cast(SCHEMA.field(name).type)
            if name in RANGES:
                _check_range(name, typed)
            columns[name] = typed.to_pylist()
        else:
            for known, value in zip(extra, column.to_pylist(), strict=True):
                if value is not None:
                    known[name] = as_text(value)
    for needed in ("kind", "at_ms"):
        if needed not in columns or None in columns[needed]:
            raise ContractError(f"a record without {needed}")
    if "endpoints" in columns:
        columns["endpoints"] = [None if value is None else msgspec.convert(value, list[Endpoint]) for value in columns["endpoints"]]
    absent = itertools.repeat(None)
    yield from map(Row, *[columns.get(name, absent) for name in COLUMNS], extra)


def _check_range(name: str, column: Any) -> None:
    found = pc.min_max(column).as_py()
    check_range(name, found["min"])
    check_range(name, found["max"])
    if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():  # which min_max passes over
        raise ContractError(f"{name} is nan")
