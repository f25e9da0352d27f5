"""Segments on disk: write-ahead lines to Parquet, what a dead writer left, and which segment has to go first.

A folder holds at most one ``active.jsonl``, the only file that still changes besides ``*.parquet.tmp``. Every step can be cut
short by a kill and is gone through again by :func:`recover` at the next start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from producers.folders import sync_folder
from producers.segments import shape
from producers.segments.contract import (
    ACTIVE,
    CACHE_KINDS,
    COLUMNS,
    MARKERS,
    ORPHAN_PREFIX,
    PARQUET_SUFFIX,
    SCHEMA,
    TMP_SUFFIX,
    WAL_SUFFIX,
    ContractError,
    Record,
    Row,
    SealedName,
    incarnation_order,
    parse_sealed,
    row,
    sealed_stem,
)
from producers.segments.unshape import body_length
from schemas.errors import KvcensusError
from schemas.records import NO_SEQ

logger = logging.getLogger("kvcensus.segments")

BATCHES_KEY = b"kvcensus.batches"
"""Key of a Parquet file's metadata: JSON list of (life, first number, last number) of the batches in it."""

FILE_MODE = 0o640
"""Of every file: the forwarder writes, and whoever ships reads by its group."""

FOLDER_MODE = 0o750

_CHUNK_ROWS = 1_024
"""Rows turned into columns at a time. That is one step of the interpreter, and whoever runs beside this thread waits for it: some ms."""

_GROUP_CHUNKS = 16
"""Such chunks in a row group: bounds the memory of a conversion to some 20 MB."""

_rows = msgspec.json.Decoder(Row)
_dicts = msgspec.json.Decoder(dict[str, Any])
_encoder = msgspec.json.Encoder()
_PLAIN = tuple(b'{"kind":"%s",' % kind.encode() for kind in CACHE_KINDS)


class SegmentError(KvcensusError):
    """A folder of segments, or a segment, that cannot be used."""


def lines(records: Iterable[Record]) -> bytes:
    """Records as the write-ahead form has them."""
    return _encoder.encode_lines(list(records))


def parse_line(line: bytes) -> Row:
    """One line of the write-ahead form. Raises :class:`ContractError` for what is no record."""
    try:
        if line.startswith(_PLAIN):  # what we wrote ourselves: no field in it that the contract does not know
            return _rows.decode(line)
        return row(_dicts.decode(line))
    except ContractError:
        raise
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ContractError(str(error)) from None


# -- to Parquet


def convert(wal: Path) -> Path:
    """A sealed segment's lines as Parquet, verified, in place of the lines.

    Raises ``OSError`` or :class:`SegmentError`; the lines stay then.
    """
    target = wal.with_suffix(PARQUET_SUFFIX)
    draft = wal.with_suffix(TMP_SUFFIX)
    count = 0
    ranges = _Ranges()
    try:
        with _begun(draft) as file:
            # Checksums over the pages, so that a damaged file is refused and not misread.
            with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer, wal.open("rb") as source:
                chunks = _chunks(_read_whole(wal, source), ranges)
                while group := list(islice(chunks, _GROUP_CHUNKS)):
                    count += sum(chunk.num_rows for chunk in group)
                    writer.write_table(pa.Table.from_batches(group))
                writer.add_key_value_metadata({BATCHES_KEY: _encoder.encode(ranges.as_list())})
            file.flush()
            os.fsync(file.fileno())
        with pq.ParquetFile(draft) as written:
            if written.metadata.num_rows != count or written.metadata.num_columns < len(COLUMNS):
                raise SegmentError(f"{draft}: {written.metadata.num_rows} rows instead of {count}")
    except pa.ArrowException as error:
        draft.unlink(missing_ok=True)
        raise SegmentError(f"{wal}: cannot be converted: {_one_line(error)}") from None
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.rename(target)
    sync_folder(wal.parent)
    wal.unlink()
    return target


def _begun(draft: Path) -> BinaryIO:
    return os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb")


def _chunks(rows: Iterator[Row], ranges: _Ranges) -> Iterator[Any]:
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        ranges.add(chunk)
        yield to_columns(chunk)


def _read_whole(path: Path, source: Iterable[bytes]) -> Iterator[Row]:
    for number, line in enumerate(source, 1):
        try:
            if not line.endswith(b"\n"):
                raise ContractError("cut short")
            yield parse_line(line)
        except ContractError as error:
            raise SegmentError(f"{path}: line {number}: {error}") from None


def to_columns(rows: list[Row]) -> Any:
    """Rows as a record batch of :data:`SCHEMA`."""
    *values, extra = zip(*map(msgspec.structs.astuple, rows), strict=True)
    columns = []
    for name, column in zip(COLUMNS, values, strict=True):
        kind = SCHEMA.field(name).type
        if column.count(None) == len(column):
            columns.append(pa.nulls(len(column), kind))
        elif name == "endpoints":
            columns.append(pa.array(msgspec.to_builtins(column), kind))
        else:
            columns.append(pa.array(column, kind))
    columns.append(pa.array([list(fields.items()) for fields in extra], SCHEMA.field("extra").type))
    return pa.record_batch(columns, schema=SCHEMA)


class _Ranges:
    """First and last number of the batches of each life."""

    def __init__(self) -> None:
        self._lives: dict[str, tuple[int, int]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        for found in rows:
            life, seq = found.extra.get("life_id"), found.seq
            if life is None or found.kind not in ("batch", "refusal") or seq is None or seq >= NO_SEQ:
                continue
            first, last = self._lives.get(life, (seq, seq))
            self._lives[life] = min(first, seq), max(last, seq)

    def as_list(self) -> list[tuple[str, int, int]]:
        return [(life, first, last) for life, (first, last) in self._lives.items()]


# -- what is there


@dataclass(frozen=True)
class SealedFile:
    """A sealed segment in a folder, with its size in bytes."""

    path: Path
    name: SealedName
    size: int


def sealed_files(folder: Path) -> list[SealedFile]:
    """Sealed segments of a folder, oldest first: by incarnation, then by number as a number; an orphan by when it was recovered."""
    found = []
    for path in folder.iterdir():
        name = parse_sealed(path.name)
        if name is None:
            continue
        try:
            found.append(SealedFile(path, name, path.stat().st_size))
        except FileNotFoundError:  # whoever ships the files may take them away
            continue
    return sorted(found, key=lambda file: (file.name.started_ms, not file.name.orphan, file.name.pid, file.name.segment_seq))


def batches_in(path: Path) -> list[tuple[str, int, int]]:
    """Life, first and last number of the batches in a sealed segment; empty if that cannot be told."""
    try:
        if path.suffix == PARQUET_SUFFIX:
            with pq.ParquetFile(path) as file:
                raw = (file.metadata.metadata or {}).get(BATCHES_KEY)
            return msgspec.json.decode(raw, type=list[tuple[str, int, int]]) if raw else []
        ranges = _Ranges()
        with path.open("rb") as source:
            ranges.add(_read_whole(path, source))
        return ranges.as_list()
    except (OSError, pa.ArrowException, msgspec.MsgspecError, SegmentError):
        return []


@dataclass
class Drop:
    """Segments that have to go: what to say of them, and the files."""

    records: list[Record] = field(default_factory=list)
    files: list[SealedFile] = field(default_factory=list)


def drop_plan(folder: Path, max_bytes: int, active_bytes: int, at_ms: float) -> Drop:
    """Which segments to drop, oldest first, so that ``folder`` with its active segment of ``active_bytes`` stays within ``max_bytes``."""
    files = sealed_files(folder)
    excess = sum(file.size for file in files) + active_bytes - max_bytes
    drop = Drop()
    for file in files:
        if excess <= 0:
            break
        excess -= file.size
        drop.files.append(file)
    by_run: dict[str, list[SealedFile]] = {}
    for file in drop.files:
        if file.name.orphan:
            drop.records.append({"kind": "orphan_dropped", "at_ms": at_ms, "first": file.path.name})
        else:
            by_run.setdefault(file.name.incarnation, []).append(file)
    for run, gone in by_run.items():
        lost = [batches for file in gone for batches in batches_in(file.path)]
        names, seqs = [file.path.name for file in gone], [file.name.segment_seq for file in gone]
        drop.records.append(shape.segments_dropped(at_ms, incarnation=run, names=names, seqs=seqs, lost=lost))
    return drop


# -- after a death


@dataclass(frozen=True)
class Recovery:
    """What :func:`recover` found: orphans sealed, with an owner and without, and bytes of them that could not be read."""

    attributed: int = 0
    unattributed: int = 0
    dropped_bytes: int = 0


def recover(folder: Path, at_ms: int) -> Recovery:
    """Finish what a dead writer of ``folder`` began: drafts away, half-done conversions decided, the active segment sealed.

    Lines that wait for their conversion are left to :func:`convert_waiting`. Raises ``OSError``.
    """
    for draft in folder.glob(f"*{TMP_SUFFIX}"):
        draft.unlink()
    for wal in waiting(folder):
        if wal.with_suffix(PARQUET_SUFFIX).exists():
            wal.unlink()  # a Parquet under its own name was verified
    active = folder / ACTIVE
    return _seal_orphan(active, at_ms) if active.exists() else Recovery()


def waiting(folder: Path) -> list[Path]:
    """Sealed segments that are not Parquet yet, oldest first."""
    return [file.path for file in sealed_files(folder) if not file.name.parquet]


def convert_waiting(folder: Path) -> int:
    """Convert what waits, oldest first; how many could not be converted now, each told in the log, and stay as they are."""
    failed = 0
    for wal in waiting(folder):
        try:
            convert(wal)
        except (OSError, SegmentError) as error:
            failed += 1
            logger.warning("segment %s stays as it is for now: %s", wal, error.strerror or error if isinstance(error, OSError) else error)
    return failed


def _seal_orphan(active: Path, at_ms: int) -> Recovery:
    """What a dead writer wrote, as far as it is whole, under its own name, or as an orphan if it does not say whose it is.

    Being killed in here leaves an active segment that the next recovery reads as this one would have.
    """
    kept, size, first = _whole_part(active)
    if size == 0:
        active.unlink()
        return Recovery()
    length = sum(len(line) for line in kept)
    dropped = size - length
    stem = _own_name(first)
    attributed = stem is not None and not any((active.parent / f"{stem}{suffix}").exists() for suffix in (WAL_SUFFIX, PARQUET_SUFFIX))
    marker = lines([shape.segment_recovered(at_ms, attributed=attributed, dropped_bytes=dropped)])
    if attributed:
        with active.open("r+b") as file:
            file.truncate(length)
            file.seek(length)
            file.write(marker)
            file.flush()
            os.fsync(file.fileno())
        target = active.parent / f"{stem}{WAL_SUFFIX}"
    else:
        draft = active.with_suffix(TMP_SUFFIX)
        with _begun(draft) as file:
            if first is None or first.kind != "segment_recovered":
                file.write(marker)
            file.writelines(kept[1:] if stem is not None else kept)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(active)
        target = _free_orphan(active.parent, at_ms)
    active.rename(target)
    sync_folder(active.parent)
    logger.warning("%s: sealed what an earlier run left as %s, %d bytes of it unreadable", active.parent, target.name, dropped)
    return Recovery(int(attributed), int(not attributed), dropped)


def _free_orphan(folder: Path, at_ms: int) -> Path:
    while any((folder / f"{ORPHAN_PREFIX}{at_ms}{suffix}").exists() for suffix in (WAL_SUFFIX, PARQUET_SUFFIX)):
        at_ms += 1
    return folder / f"{ORPHAN_PREFIX}{at_ms}{WAL_SUFFIX}"


def _whole_part(active: Path) -> tuple[list[bytes], int, Row | None]:
    """The lines up to the first that is torn, with no half batch at the end; the file's size; and the first record, if it is a header.

    A header that cannot be read is left out, and what follows it is kept.
    """
    raw = active.read_bytes()
    kept: list[bytes] = []
    first: Row | None = None
    whole = owed = 0
    for number, line in enumerate(raw.splitlines(keepends=True)):
        try:
            if not line.endswith(b"\n"):
                raise ContractError("cut short")
            found = parse_line(line)
            if number == 0:
                if found.kind not in MARKERS:
                    raise ContractError("no header")
                first = found
            owed = owed - 1 if owed else body_length(found)
        except ContractError:
            if number == 0:
                continue
            break
        kept.append(line)
        if not owed:
            whole = len(kept)
    return kept[:whole], len(raw), first


def _own_name(first: Row | None) -> str | None:
    """The name that a segment's header gives it, without suffix; None where it does not say whose it is."""
    if first is None or first.kind != "segment_open" or first.incarnation is None or first.segment_seq is None:
        return None
    return None if incarnation_order(first.incarnation) is None else sealed_stem(first.incarnation, first.segment_seq)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
