"""The folder that an export fills: ``TABLE/day=YYYY-MM-DD/part-0.parquet``, each file there whole or not at all.

A file is written under a draft's name, flushed to disk, and renamed. One process writes to a folder at a time, so that a draft which is
found at the start was left by one that was killed, and goes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import KvcensusError

ROW_GROUP_ROWS, ROW_GROUP_BYTES = 122_880, 64 * 1024 * 1024
"""A row group is complete with so many rows or bytes (in Arrow's form, before compression)."""

FILE = "part-0.parquet"
_DRAFT = ".part-0.draft"
_LOCK = ".export.lock"
_METADATA = b"kvcensus"


@dataclass(frozen=True)
class Extent:
    """What a file holds: times from ``since_us`` to ``until_us``, each open where ``None``, and so many rows."""

    since_us: int | None
    until_us: int | None
    rows: int

    def within(self, since_us: int | None, until_us: int | None) -> bool:
        """Whether a file from ``since_us`` to ``until_us`` holds all that this one does."""
        before = since_us is None or (self.since_us is not None and since_us <= self.since_us)
        return before and (until_us is None or (self.until_us is not None and until_us >= self.until_us))


class ExportFolder:
    """A folder that this process fills. Raises :class:`KvcensusError` where it cannot be used, and where another process does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._told():
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise KvcensusError(f"another export writes to {folder}: wait for it, or choose another folder") from error
        except OSError as error:
            os.close(self._lock)
            raise KvcensusError(f"{folder} cannot be locked: {error.strerror or error}") from error

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def __enter__(self) -> ExportFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, table: str, day: date | None) -> Path:
        """Where the file of a table's day lies. A table without a time has one file."""
        return self.folder / table / (FILE if day is None else f"day={day.isoformat()}/{FILE}")

    def sweep(self, table: str) -> None:
        """Remove the drafts that a killed process left under ``table``."""
        with self._told():
            for draft in (self.folder / table).glob(f"**/{_DRAFT}"):
                draft.unlink(missing_ok=True)

    def standing(self, table: str, day: date | None) -> Extent | None:
        """What the file of a table's day holds now. Raises :class:`KvcensusError` for one that is not of an export."""
        path = self.place(table, day)
        if not path.exists():
            return None
        try:
            metadata = pq.read_metadata(path)
            told = json.loads((metadata.metadata or {})[_METADATA])
            return Extent(told["since_us"], told["until_us"], metadata.num_rows)
        except (OSError, ValueError, KeyError, TypeError) as error:  # pa.ArrowInvalid is a ValueError
            raise KvcensusError(f"{path} was not written by an export: move it away, or choose another folder") from error

    def write(self, table: str, day: date | None, tables: Iterable[pa.Table], told: dict[str, Any]) -> tuple[int, int]:
        """Write the file of a table's day, instead of the one that stands there; the rows and bytes of it.

        ``told`` is kept in the file: its ``since_us`` and ``until_us`` are what :meth:`standing` gives. Without a row nothing is written.
        """
        path = self.place(table, day)
        draft = path.with_name(_DRAFT)
        rows = 0
        writer: pq.ParquetWriter | None = None
        try:
            with self._told():
                try:
                    for group in _row_groups(tables):
                        if writer is None:
                            path.parent.mkdir(parents=True, exist_ok=True)
                            schema = group.schema.with_metadata({_METADATA: json.dumps(told).encode()})
                            writer = pq.ParquetWriter(draft, schema, compression="zstd")
                        writer.write_table(group.replace_schema_metadata(None), row_group_size=group.num_rows)
                        rows += group.num_rows
                finally:
                    if writer is not None:
                        writer.close()
                if writer is None:
                    return 0, 0
                size = draft.stat().st_size
                _flush(draft)
                draft.replace(path)
                _flush(path.parent)
                return rows, size
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def write_manifest(self, name: str, document: dict[str, Any]) -> Path:
        """Write ``manifests/NAME``; where it lies."""
        path = self.folder / "manifests" / name
        draft = path.with_name(f".{name}.draft")
        try:
            with self._told():
                path.parent.mkdir(exist_ok=True)
                draft.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
                _flush(draft)
                draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return path

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvcensusError(f"cannot write to {error.filename or self.folder}: {error.strerror or error}") from error


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(each.num_rows for each in held) >= ROW_GROUP_ROWS or sum(each.nbytes for each in held) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    together = pa.concat_tables(held) if held else None
    if together is not None and together.num_rows:
        yield together


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
