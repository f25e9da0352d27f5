"""One file of a spool: its frames, how it is read, and how it is written whole.

A file is named after the first index it covers. Every frame holds entries with consecutive indices and the checkpoint as it was
then; the first frame holds the checkpoint alone, so that it outlives the files before. A file that replaces several says up to
which index: whatever a crash left over of those is known by that.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import msgspec

from producers.folders import sync_folder, write_all
from producers.frames import frame, scan
from producers.restate import Entry

SUFFIX = ".spool"
_NAME = re.compile(r"\d{20}\.spool")

Indexed: TypeAlias = tuple[int, Entry]


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``entries`` have the indices from ``first`` on. ``until`` (0: nothing replaced): the file replaces those that begin before it."""

    first: int
    until: int
    checkpoint: bytes | None
    entries: list[Entry]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(first: int, checkpoint: bytes | None, entries: list[Entry], until: int = 0) -> bytes:
    """A frame, ready to be written."""
    return frame(_encoder.encode(Frame(first, until, checkpoint, entries)))


@dataclass
class Segment:
    """Consecutive entries of a spool that are written, dropped and deleted together.

    It covers the indices from ``first`` up to, not including, ``end``; ``runs`` are the stretches of them (first, count) that have an
    entry. ``path`` None: in memory alone. ``size`` in bytes. ``entries`` None: to be read from the file when needed.
    """

    first: int
    end: int
    path: Path | None
    size: int
    checkpoint: bytes | None
    runs: list[tuple[int, int]] = field(default_factory=list)
    entries: list[Indexed] | None = None
    restated: bool = False

    @property
    def last(self) -> int:
        """The highest index with an entry; -1 if there is none."""
        return self.runs[-1][0] + self.runs[-1][1] - 1 if self.runs else -1

    def count(self, after: int = -1) -> int:
        """How many entries have an index above ``after``."""
        return sum(count - min(max(after + 1 - first, 0), count) for first, count in self.runs)

    def add(self, first: int, entries: list[Entry], size: int, checkpoint: bytes | None) -> None:
        """Account for entries that follow all others; their contents are kept if the others' are."""
        self.size += size
        self.checkpoint = checkpoint
        if entries:
            self.end = first + len(entries)
            add_run(self.runs, first, len(entries))
            if self.entries is not None:
                self.entries.extend(enumerate(entries, first))


def add_run(runs: list[tuple[int, int]], first: int, count: int) -> None:
    """Add a stretch of indices behind the others, as part of the last one if it adjoins."""
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + count
    elif count:
        runs.append((first, count))


def from_index(entries: list[Indexed], index: int) -> int:
    """The place of the first entry with this index or a higher one."""
    return bisect_left(entries, index, key=itemgetter(0))


@dataclass
class Contents:
    """What a file was found to hold. ``bad``: stretches (start, end) of it that are no frame, or none that this version knows."""

    first: int | None = None
    until: int = 0
    checkpoint: bytes | None = None
    entries: list[Indexed] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0


def parse(data: bytes) -> Contents:
    """Everything readable in the bytes of a file. Entries whose index does not rise are taken for bad."""
    contents = Contents(size=len(data))
    following = 0
    for start, end, body in scan(data):
        held = _decode(body) if body is not None else None
        if held is None or held.first < following:
            contents.bad.append((start, end))
            continue
        if contents.first is None:
            contents.first, contents.until = held.first, held.until
        contents.checkpoint = held.checkpoint
        contents.entries.extend(enumerate(held.entries, held.first))
        following = held.first + len(held.entries)
    return contents


def runs_of(entries: Iterable[Indexed]) -> list[tuple[int, int]]:
    """The stretches of consecutive indices."""
    runs: list[tuple[int, int]] = []
    for index, _ in entries:
        add_run(runs, index, 1)
    return runs


def path_of(folder: Path, first: int) -> Path:
    """Where the file whose indices begin with ``first`` lies."""
    return folder / f"{first:020d}{SUFFIX}"


def paths(folder: Path) -> list[Path]:
    """The spool's files, in order."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def free_path(path: Path) -> Path:
    """``path``, or with a number added to its name if that exists."""
    number = 0
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def segment_bytes(segment: Segment, entries: list[Indexed], until: int = 0) -> bytes:
    """The whole file of a segment that holds ``entries``."""
    parts = [encode(segment.first, segment.checkpoint, [], until)]
    place = 0
    for first, count in runs_of(entries):
        parts.append(encode(first, segment.checkpoint, [entry for _, entry in entries[place : place + count]]))
        place += count
    return b"".join(parts)


def replace(path: Path, data: bytes) -> None:
    """Put a file in the place of ``path``, whole or not at all, whatever happens. Raises :class:`OSError`."""
    made = path.with_suffix(".tmp")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        made.rename(path)
    except OSError:
        with suppress(OSError):
            made.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not every file system can
        sync_folder(path.parent)


def _decode(body: bytes) -> Frame | None:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None
