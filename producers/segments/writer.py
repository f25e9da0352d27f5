"""The writer of one rank's segments: write-ahead lines, sealed by age and size into Parquet, the disk bounded.

Nothing that :meth:`SegmentWriter.write` returned for is lost by a kill of the process. Conversion runs on a thread of its own, so
that the caller goes on meanwhile. A disk that takes nothing is no crash: what could not be written is counted, told once, and
declared lost as soon as the disk takes records again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from producers.folders import folder_name, sync_folder, write_all
from producers.segments import seal, shape
from producers.segments.contract import ACTIVE, WAL_SUFFIX, Record, incarnation, sealed_stem
from producers.segments.seal import SegmentError
from producers.segments.shape import Fact
from schemas.records import NO_SEQ, Declaration, Loss, RankMessage

logger = logging.getLogger("kvcensus.segments")

DEFAULT_SEGMENT_BYTES = 16 << 20
"""A segment's lines are sealed beyond this size; as Parquet they are about an eighth of it."""

_PLAIN = "@:+=,"
"""Stand as they are in the name of an instance's folder."""

_TELL_EVERY = 60.0
"""Seconds between two lines about a disk that takes nothing."""

_MAX_OWED = 10_000
"""Messages kept in memory while the disk takes nothing; batches are not among them, since of them only the range is kept."""


@dataclass
class SegmentCounters:
    """Cumulative over one writer. ``records`` were written; ``refused_batches``: batches the disk did not take, declared lost.

    ``refused_records``: other messages and lifecycle records that it did not take and that were given up. ``segments_dropped`` gave
    way to the bound on the disk. ``recovered`` and ``recovered_bytes_lost``: segments of a dead run, and what of them was unreadable.
    """

    messages: int = 0
    records: int = 0
    segments_sealed: int = 0
    segments_dropped: int = 0
    refused_batches: int = 0
    refused_records: int = 0
    write_errors: int = 0
    recovered: int = 0
    recovered_bytes_lost: int = 0
    unconverted: int = 0


def rank_folder(parent: Path, instance_id: str, dp_rank: int) -> Path:
    """Where under ``parent`` the segments of a rank lie: ``INSTANCE/R``, the instance percent-encoded where it is no plain file name."""
    return parent / folder_name(instance_id, _PLAIN) / str(dp_rank)


class SegmentWriter:
    """Writes facts of one rank into ``folder`` (made if missing), which is its own: a second writer is refused.

    ``started_ms`` and ``pid`` name the incarnation (a later start, if that name is taken there). ``declaration`` holds until a message
    brings another. A segment is sealed once it is ``max_segment_seconds`` old or ``segment_bytes`` large; a write goes into one segment
    whole. All segments of the folder together stay within ``max_bytes``, the oldest giving way. After a failure the disk is left
    alone for ``retry_seconds``. ``clock`` gives unix ms. Used by one thread.

    Raises :class:`SegmentError` if the folder cannot be used or another writer has it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        instance_id: str,
        dp_rank: int,
        started_ms: int,
        declaration: Declaration,
        pid: int | None = None,
        max_segment_seconds: float = 300.0,
        max_bytes: int = 10 << 30,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        retry_seconds: float = 1.0,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.folder = folder
        self.incarnation = ""
        self.counters = SegmentCounters()
        self._instance_id = instance_id
        self._dp_rank = dp_rank
        self._declaration = declaration
        self._max_segment_ms = max_segment_seconds * 1_000
        self._max_segment_seconds = max_segment_seconds
        self._max_bytes = max_bytes
        # Several segments must fit, or the bound would drop each one as it is sealed.
        self._segment_bytes = min(segment_bytes, max(max_bytes // 4, 1))
        self._clock = clock
        self._active = -1
        self._size = 0
        self._opened_ms = 0
        self._segment_seq = 0
        self._owed: deque[Fact] = deque()
        self._broken = False
        self._retry_seconds = retry_seconds
        self._retry_at = 0.0
        self._told_at = -_TELL_EVERY
        self._job: Future[int] | None = None
        self._job_wanted = True
        self._worker = ThreadPoolExecutor(1, "segments")
        self._lock = _locked(folder)
        try:
            recovery = seal.recover(folder, clock())
            self.incarnation = _unused(folder, started_ms, os.getpid() if pid is None else pid)
        except OSError as error:
            os.close(self._lock)
            raise SegmentError(f"segments in {folder}: {error.strerror or error}") from None
        self.counters.recovered = recovery.attributed + recovery.unattributed
        self.counters.recovered_bytes_lost = recovery.dropped_bytes
        self._work()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, facts: Iterable[Fact]) -> bool:
        """Hand ``facts`` to the operating system, all into one segment. False: the disk did not take them."""
        taken = list(facts)
        if not taken:
            return True
        if not self._may_write() or (self._owed and not self._write_owed()) or not self._append(taken):
            self._owe(taken)
            return False
        self.tick()
        return True

    def tick(self) -> None:
        """Seal what is old or large enough, and take in what the converting thread has done. To be called about once a second."""
        if self._owed and self._may_write():
            self._write_owed()
        if self._active >= 0:
            age = self._clock() - self._opened_ms
            if age < 0:  # the clock was set back
                self._opened_ms += age
            if self._size >= self._segment_bytes or age >= self._max_segment_ms:
                self._seal()
        self._work()

    def close(self) -> None:
        """Seal the active segment, wait for the conversions, and give the folder back."""
        if self._lock < 0:
            return
        try:
            if self._owed:
                self._write_owed()
            for _ in range(3):  # what is said of dropped segments is a segment too
                if self._active >= 0:
                    self._seal()
                while self._job is not None or self._job_wanted:
                    if self._job is not None:
                        self._job.exception()
                    self._work()
                if self._active < 0:
                    break
            self.counters.refused_records += sum(not _is_loss(fact) for fact in self._owed)
            self._owed.clear()
        finally:
            self._worker.shutdown()
            if self._active >= 0:
                os.close(self._active)
                self._active = -1
            os.close(self._lock)
            self._lock = -1

    # -- the active segment

    def _append(self, facts: list[Fact]) -> bool:
        declaration = self._declaration
        records: list[Record] = []
        for fact in facts:
            if isinstance(fact, RankMessage) and fact.declaration is not None:
                declaration = fact.declaration
            records += shape.records(fact, declaration)
        if not self._append_records(records):
            return False
        self._declaration = declaration
        self.counters.messages += len(facts)
        return True

    def _append_records(self, records: list[Record]) -> bool:
        """All of ``records`` at the end of the active segment, or none of them."""
        try:
            self._open()
            content = seal.lines(records)
            write_all(self._active, content)
        except OSError as error:
            self._failed(error)
            return False
        self._size += len(content)
        self._broken = False
        self.counters.records += len(records)
        return True

    def _open(self) -> None:
        """An active segment with its header, or ``OSError``."""
        if self._active >= 0:
            if self._broken:
                self._cut()
            return
        now = self._clock()
        header = seal.lines(
            [
                shape.segment_open(
                    now,
                    incarnation=self.incarnation,
                    segment_seq=self._segment_seq,
                    instance_id=self._instance_id,
                    dp_rank=self._dp_rank,
                    declaration=self._declaration,
                    max_segment_seconds=self._max_segment_seconds,
                )
            ]
        )
        path = self.folder / ACTIVE
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, seal.FILE_MODE)
        try:
            write_all(descriptor, header)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._active, self._size, self._opened_ms = descriptor, len(header), now
        self._segment_seq += 1

    def _cut(self) -> None:
        """Take back what a failed write left at the end: else a half record would stand in the middle."""
        os.ftruncate(self._active, self._size)

    def _may_write(self) -> bool:
        """Not right after a failure: a full disk is not asked for every batch, and what it did not take becomes one range."""
        return not self._broken or time.monotonic() >= self._retry_at

    def _failed(self, error: OSError) -> None:
        self.counters.write_errors += 1
        self._broken = True
        self._retry_at = time.monotonic() + self._retry_seconds
        if time.monotonic() - self._told_at >= _TELL_EVERY:
            self._told_at = time.monotonic()
            logger.warning("segments in %s: %s; what is not written will be declared lost there", self.folder, error.strerror or error)
        if self._active >= 0:
            try:
                self._cut()
            except OSError:
                return  # tried again before the next write

    def _seal(self) -> None:
        """The active segment under its own name; it is converted by and by."""
        path = self.folder / f"{sealed_stem(self.incarnation, self._segment_seq - 1)}{WAL_SUFFIX}"
        try:
            if self._broken:
                self._cut()
            os.fsync(self._active)
            (self.folder / ACTIVE).rename(path)
            sync_folder(self.folder)
        except FileNotFoundError:
            # Its number is missing from here on, which is how a reader knows.
            logger.warning("segments in %s: somebody took the active segment away", self.folder)
        except OSError as error:
            self._failed(error)
            return
        else:
            self.counters.segments_sealed += 1
        os.close(self._active)
        self._active, self._size = -1, 0
        self._job_wanted = True

    # -- what the disk did not take

    def _owe(self, facts: list[Fact]) -> None:
        """Of batches remember which they were, of other messages all; a heartbeat or scrape says nothing that the next one does not."""
        for fact in facts:
            if not isinstance(fact, RankMessage) or fact.scrape is not None:
                self.counters.refused_records += 1
                continue
            if fact.batch is not None:
                self.counters.refused_batches += 1
                self._owe_loss(fact)
            elif len(self._owed) < _MAX_OWED:
                self._owed.append(fact)
            else:
                self.counters.refused_records += 1

    def _owe_loss(self, fact: RankMessage) -> None:
        last = self._owed[-1] if self._owed else None
        first = fact.seq - fact.skipped  # as in any loss, the numbers of other ranks before it belong to the range
        if (
            isinstance(last, RankMessage)
            and last.loss is not None
            and last.loss.reason == _REASON
            and (last.life_id, last.loss.last_seq + 1) == (fact.life_id, first)
        ):
            last.loss.last_seq, last.seq = fact.seq, fact.seq + 1
            last.at_us, last.observed_at_ms = fact.at_us, fact.observed_at_ms
            last.skipped += fact.skipped
            return
        if len(self._owed) >= _MAX_OWED or fact.seq >= NO_SEQ:
            return  # a reader sees the numbers missing
        self._owed.append(
            RankMessage(
                fact.instance_id,
                fact.dp_rank,
                fact.life_id,
                fact.seq + 1,
                fact.at_us,
                fact.observed_at_ms,
                fact.incarnation,
                loss=Loss(first, fact.seq, _REASON),
                skipped=fact.skipped,
            )
        )

    def _write_owed(self) -> bool:
        while self._owed:
            if not self._append([self._owed[0]]):
                return False
            self._owed.popleft()
        return True

    # -- behind the active segment

    def _work(self) -> None:
        """Between two conversions, enforce the bound; start the next one if something waits."""
        if self._job is not None:
            if not self._job.done():
                return
            job, self._job = self._job, None
            fault = job.exception()
            if fault is not None:
                logger.warning("segments in %s: %s", self.folder, fault)
            else:
                self.counters.unconverted = job.result()
            self._enforce()
        if self._job_wanted:
            self._job_wanted = False
            self._job = self._worker.submit(seal.convert_waiting, self.folder)

    def _enforce(self) -> None:
        """Drop what is beyond the bound, and say so first: being killed in between, the next run says it again."""
        try:
            drop = seal.drop_plan(self.folder, self._max_bytes, self._size, float(self._clock()))
            if not drop.files:
                return
            if not self._append_records(drop.records):
                # The disk has no room even for this: the numbers that are missing will have to say it.
                logger.warning("segments in %s: dropped %d without a record of it", self.folder, len(drop.files))
            for file in drop.files:
                file.path.unlink(missing_ok=True)
            sync_folder(self.folder)
        except OSError as error:
            logger.warning("segments in %s: %s", self.folder, error)
            return
        self.counters.segments_dropped += len(drop.files)
        logger.warning("segments in %s: dropped the %d oldest to stay within %d bytes", self.folder, len(drop.files), self._max_bytes)


_REASON = "could not be written to the segment"


def _is_loss(fact: Fact) -> bool:
    return isinstance(fact, RankMessage) and fact.loss is not None and fact.loss.reason == _REASON


def _unused(folder: Path, started_ms: int, pid: int) -> str:
    """An incarnation that no segment in ``folder`` has: in containers every process may have the same id."""
    taken = {file.name.incarnation for file in seal.sealed_files(folder)}
    while incarnation(started_ms, pid) in taken:
        started_ms += 1
    return incarnation(started_ms, pid)


def _locked(folder: Path) -> int:
    """A descriptor of ``folder`` that holds its lock. Raises :class:`SegmentError`."""
    try:
        folder.mkdir(mode=seal.FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentError(f"segments in {folder}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SegmentError(f"segments in {folder}: another forwarder writes there") from None
    return descriptor
