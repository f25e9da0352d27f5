"""The queue between an engine's batches and Kafka: in order, bounded, and on disk before anything is sent.

What was appended is there again after any end of the process, together with the checkpoint that was appended with it. What
is over the bound is taken out oldest first, and what stands for it (:mod:`producers.restate`) takes its place.

A disk that is full or fails does not stop the forwarder: what comes is kept in memory, within a bound of its own, until
the disk takes it. What is only there does not outlive the process; the checkpoint on disk then is that much older.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from producers import spool_files as files
from producers.folder_lock import FolderLock
from producers.folders import write_all
from producers.frames import cut_short, frame, scan
from producers.restate import Entry, Restated, restate
from producers.spool_files import Indexed, Segment
from schemas.errors import KvcensusError

__all__ = ["Entry", "Indexed", "Spool"]

logger = logging.getLogger("kvcensus.spool")

FALLBACK_BYTES = 64 * 1024 * 1024
"""Most bytes kept in memory while the disk takes nothing."""
_FILES = 16
"""A file is this part of the bound, within the two limits below: the grain in which the bound forces out."""
_MIN_FILE_BYTES = 64 * 1024
_MAX_FILE_BYTES = 8 * 1024 * 1024
_ACKNOWLEDGED = "acknowledged"
_U64 = struct.Struct("<Q")


class Spool:
    """Entries in order, each under an index that only rises. Used by one thread.

    ``folder`` None keeps all in memory, by the same rules. ``max_bytes`` bounds the files, or the memory; only what must not be
    dropped, and what was handed out, goes beyond it. ``fallback_bytes`` bounds what waits in memory for a disk that takes nothing;
    ``file_bytes`` is the size from which another file is begun (None: by the bound).
    Raises :class:`KvcensusError` if the folder cannot be used or another process uses it.
    """

    def __init__(
        self,
        folder: Path | None,
        max_bytes: int,
        restate: Callable[[Sequence[Entry]], Restated] = restate,
        *,
        fallback_bytes: int = FALLBACK_BYTES,
        file_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.checkpoint: bytes | None = None
        """What was appended with the newest entries, in this process or one before; None: nothing ever was."""
        self.bytes = 0
        """Size of all files, and of what is kept in memory in place of one."""
        self.messages = 0
        """Entries not acknowledged yet."""
        self.dropped_batches = 0
        """Batches and refusals that the bound forced out since the spool was opened; a loss stands for them."""
        self.dropped_other = 0
        """Entries that may be dropped, and were, since the spool was opened."""
        self.torn_bytes = 0
        """Bytes of an append that the end of the process before cut short; it had not returned."""
        self.bad_bytes = 0
        """Bytes that could not be read; they were set aside in ``*.bad`` files."""
        self.vanished = 0
        """Entries that were written and could not be read again."""
        self.faults = 0
        """How often the disk began to refuse."""
        self._restate = restate
        self._fallback_bytes = min(fallback_bytes, max_bytes)
        self._file_bytes = file_bytes or min(max(max_bytes // _FILES, _MIN_FILE_BYTES), _MAX_FILE_BYTES)
        self._segments: list[Segment] = []
        self._next = 0
        self._position = 0
        """Everything before it was handed out."""
        self._acknowledged = -1
        self._written_acknowledged = -1
        self._descriptor: int | None = None
        self._unsynced = False
        self._failing = False
        self._told = False
        """Whether people know that the disk takes nothing."""
        self._lock = FolderLock(folder, "spool") if folder is not None else None
        try:
            if folder is not None:
                self._recover(folder)
            if not self._segments:
                self._begin_segment()
        except OSError as error:
            self._release()
            raise KvcensusError(f"the spool folder {folder} cannot be used: {error.strerror or error}") from error
        except BaseException:
            self._release()
            raise

    @property
    def place(self) -> str:
        """Where entries wait, for people."""
        return "memory" if self.folder is None else str(self.folder)

    # -- in

    def append(self, entries: Sequence[Entry], checkpoint: bytes) -> None:
        """Add ``entries`` (there may be none), all or none of them whatever happens, with the ``checkpoint`` that holds after them.

        Where the bound leaves no room, older ones give way; where those cannot, what stands for the new ones is added.
        """
        added = list(entries)
        self.checkpoint = checkpoint
        data = files.encode(self._next, checkpoint, added)
        if len(data) > self._bound:
            added, data = self._restated(added, checkpoint)
        if self._over(len(data)):
            self._make_room(len(data))
            if self._over(len(data)):
                added, data = self._restated(added, checkpoint)
        active = self._active
        if active.size + len(data) > self._file_bytes and (active.runs or active.size > self._file_bytes):
            active = self._begin_segment()
        if active.path is not None and not self._write(active, data):
            active = self._begin_segment()
        active.add(self._next, added, len(data), checkpoint)
        self.bytes += len(data)
        self.messages += len(added)
        self._next += len(added)

    def sync(self) -> None:
        """Make what was appended last through a crash of the machine, not only of the process; about once a second.

        Also says on disk how far things are acknowledged, and writes what waited in memory if the disk takes it again.
        """
        if self.folder is None:
            return
        if self._failing:
            self._write_waiting(self.folder)
        if self._unsynced and self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
                self._unsynced = False
            except OSError as error:
                self._note_fault(error)
        self._write_acknowledged(self.folder)

    def close(self) -> None:
        """Write what is left to write and let go of the folder. What only memory holds is gone then."""
        if self._lock is not None:
            self.sync()
        self._release()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- out

    def take(self, max_bytes: int) -> list[Indexed]:
        """The next entries not handed out yet, in order, with their indices: values of ``max_bytes`` at most, but one if there is one."""
        taken: list[Indexed] = []
        size = 0
        for segment in self._segments:
            if segment.end <= self._position:
                continue
            entries = self._entries(segment)
            for place in range(files.from_index(entries, self._position), len(entries)):
                index, entry = entries[place]
                if taken and size + len(entry.value) > max_bytes:
                    return taken
                taken.append(entries[place])
                size += len(entry.value)
                self._position = index + 1
            self._position = max(self._position, segment.end)
            self._forget(segment)
        return taken

    def acknowledge(self, index: int) -> None:
        """All entries up to and including ``index``, as far as they were handed out, are done and not needed again."""
        index = min(index, self._position - 1)
        if index <= self._acknowledged:
            return
        for segment in self._segments:
            if segment.first > index:
                break
            self.messages -= segment.count(self._acknowledged) - segment.count(index)
        self._acknowledged = index
        self._trim()

    # -- the bound

    @property
    def _active(self) -> Segment:
        return self._segments[-1]

    @property
    def _falling_back(self) -> bool:
        return self.folder is not None and self._active.path is None

    @property
    def _bound(self) -> int:
        return self._fallback_bytes if self._falling_back else self.max_bytes

    def _over(self, added: int) -> bool:
        if self.bytes + added > self.max_bytes:
            return True
        return self._falling_back and sum(s.size for s in self._segments if s.path is None) + added > self._fallback_bytes

    def _restated(self, entries: list[Entry], checkpoint: bytes) -> tuple[list[Entry], bytes]:
        outcome = self._count(self._restate(entries))
        return outcome.entries, files.encode(self._next, checkpoint, outcome.entries)

    def _count(self, outcome: Restated) -> Restated:
        self.dropped_batches += outcome.batches
        self.dropped_other += outcome.droppable
        return outcome

    def _make_room(self, needed: int) -> None:
        if self._active.runs and not self._active.count(self._acknowledged):
            self._begin_segment()
            self._trim()
        while self._over(needed) and self._restate_oldest():
            pass

    def _restate_oldest(self) -> bool:
        """Put what stands for the oldest entries not handed out in their place; False: everything is restated already."""
        # With a disk that takes nothing, only what memory holds gives way: nothing else could be written.
        fallen = self._falling_back and self.bytes <= self.max_bytes
        for place, segment in enumerate(self._segments):
            if segment.restated or segment.last < self._position or (fallen and segment.path is not None):
                continue
            if segment is self._active:
                self._begin_segment()
            before = self._segments[place - 1] if place else None
            joined = (
                before is not None
                and before.restated
                and before.last >= self._position
                and before.size <= self._file_bytes // 4
                and (before.path is None) == (segment.path is None)
            )
            self._replace(place - 1 if joined else place, place + 1)
            return True
        return False

    def _replace(self, start: int, stop: int) -> None:
        """Restate the segments ``start`` to ``stop`` (not inclusive) into one; what was handed out of them stays as it is."""
        group = self._segments[start:stop]
        held = [entry for segment in group for entry in self._entries(segment)]
        held = held[files.from_index(held, self._acknowledged + 1) :]
        split = files.from_index(held, self._position)
        outcome = self._count(self._restate([entry for _, entry in held[split:]]))
        end = group[-1].end
        # The highest indices of the range: behind whatever was handed out of it.
        entries = held[:split] + list(enumerate(outcome.entries, end - len(outcome.entries)))
        made = Segment(group[0].first, end, None, 0, group[-1].checkpoint, files.runs_of(entries), entries, restated=True)
        data = files.segment_bytes(made, entries, end)
        made.size = len(data)
        self.bytes += made.size - sum(segment.size for segment in group)
        self.messages += len(entries) - len(held)
        self._segments[start:stop] = [made]
        on_disk = [segment.path for segment in group if segment.path is not None]
        if on_disk and (entries or self._newest_on_disk() is None):
            self._write_in_place(made, data, on_disk)
        elif not entries:
            self._segments.remove(made)
            self.bytes -= made.size
            self._delete(on_disk)
        self._trim()

    def _write_in_place(self, made: Segment, data: bytes, replaced: list[Path]) -> None:
        try:
            files.replace(replaced[0], data)
        except OSError as error:
            # No room for even this: make some first. A kill in between loses the declaration, not the order.
            self._delete(replaced)
            try:
                files.replace(replaced[0], data)
            except OSError:
                self._note_fault(error)
                return
        made.path = replaced[0]
        self._delete(replaced[1:])
        self._forget(made)

    # -- segments and files

    def _entries(self, segment: Segment) -> list[Indexed]:
        if segment.entries is None:
            assert segment.path is not None
            try:
                found = files.parse(segment.path.read_bytes()).entries
            except OSError as error:
                logger.warning("the spool file %s cannot be read: %s", segment.path, error.strerror or error)
                found = []
            if len(found) < segment.count():
                self._note_vanished(segment, found)
            segment.entries = found
        return segment.entries

    def _note_vanished(self, segment: Segment, found: list[Indexed]) -> None:
        """Somebody or something took written entries away: go on with what is left."""
        runs = files.runs_of(found)
        before = segment.count(self._acknowledged)
        segment.runs = runs
        missing = before - segment.count(self._acknowledged)
        self.vanished += missing
        self.messages -= missing
        logger.warning("%d messages in the spool file %s cannot be read any more", missing, segment.path)

    def _forget(self, segment: Segment) -> None:
        """Drop the contents from memory if they are on disk and not in use."""
        if segment.path is not None and segment is not self._active and not segment.first <= self._position < segment.end:
            segment.entries = None

    def _trim(self) -> None:
        """Let go of what is acknowledged as a whole, but never of the newest file: it says where the streams stood, and how far."""
        anchor = self._newest_on_disk()
        done: list[Path] = []
        place = 0
        while place < len(self._segments) - 1 and not self._segments[place].count(self._acknowledged):
            if self._segments[place] is anchor:
                place += 1
                continue
            gone = self._segments.pop(place)
            self.bytes -= gone.size
            if gone.path is not None and gone.path != self._segments[place].path:
                done.append(gone.path)
        self._delete(done)

    def _newest_on_disk(self) -> Segment | None:
        return next((segment for segment in reversed(self._segments) if segment.path is not None), None)

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._note_fault(error)

    def _begin_segment(self) -> Segment:
        """Begin another file, or another stretch of memory if there is no folder or it takes nothing."""
        if self._segments:
            self._seal()
        first = self._next
        made = Segment(first, first, None, 0, self._checkpoint_written(), entries=[])
        if self.folder is not None and not self._failing:
            path = files.path_of(self.folder, first)
            data = files.encode(first, made.checkpoint, [])
            try:
                files.replace(path, data)
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
                made.path, made.size = path, len(data)
            except OSError as error:
                self._note_fault(error)
        # One without entries has the same first index; it stays as long as its file does.
        self._drop_replaced(first, made.path)
        self._segments.append(made)
        self.bytes += made.size
        for segment in self._segments[-2:-1]:
            self._forget(segment)
        return made

    def _drop_replaced(self, first: int, path: Path | None) -> None:
        """Let go of segments without entries from ``first`` on whose file, if any, is another one's now."""
        for empty in [segment for segment in self._segments if segment.first == first and not segment.runs]:
            if empty.path is None or empty.path == path:
                self._segments.remove(empty)
                self.bytes -= empty.size

    def _checkpoint_written(self) -> bytes | None:
        return self._segments[-1].checkpoint if self._segments else self.checkpoint

    def _seal(self) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if self._unsynced:
                os.fsync(descriptor)
            self._unsynced = False
        except OSError as error:
            self._note_fault(error)
        finally:
            with suppress(OSError):
                os.close(descriptor)

    def _write(self, active: Segment, data: bytes) -> bool:
        assert self._descriptor is not None
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            with suppress(OSError):  # if not even this works, a reader passes over the part that is there
                os.ftruncate(self._descriptor, active.size)
            self._note_fault(error)
            return False
        self._unsynced = True
        return True

    # -- a disk that refuses

    def _note_fault(self, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            self.faults += 1
            if self._told:
                return
            self._told = True
            logger.warning(
                "the spool in %s cannot be written (%s): up to %.3g MiB wait in memory until it can, and are lost if the forwarder ends",
                self.folder,
                error.strerror or error,
                self._fallback_bytes / (1 << 20),
            )

    def _write_waiting(self, folder: Path) -> None:
        """Write what waits in memory, oldest first, so that what is on disk is always what came first; go on there if all went."""
        for segment in list(self._segments):
            if segment.path is not None or not segment.runs:
                continue
            assert segment.entries is not None
            path = files.path_of(folder, segment.first)
            data = files.segment_bytes(segment, segment.entries)
            try:
                files.replace(path, data)
            except OSError as error:
                self._note_fault(error)
                return
            self._drop_replaced(segment.first, path)
            self.bytes += len(data) - segment.size
            segment.path, segment.size = path, len(data)
        self._failing = False
        self._begin_segment()
        if self._active.path is not None:
            self._told = False
            logger.warning("the spool in %s can be written again", self.folder)

    # -- what was acknowledged

    def _write_acknowledged(self, folder: Path) -> None:
        if self._written_acknowledged == self._acknowledged:
            return
        try:
            descriptor = os.open(folder / _ACKNOWLEDGED, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, frame(_U64.pack(self._acknowledged)), 0)
            finally:
                os.close(descriptor)
            self._written_acknowledged = self._acknowledged
        except OSError as error:
            self._note_fault(error)

    # -- opening and closing

    def _recover(self, folder: Path) -> None:
        """Take over what another process left, whatever state it is in."""
        for left in folder.glob("*.tmp"):
            left.unlink()
        with suppress(FileNotFoundError):
            for _, _, body in scan((folder / _ACKNOWLEDGED).read_bytes()):
                if body is not None and len(body) == _U64.size:
                    self._acknowledged = _U64.unpack(body)[0]
                    break
        paths = files.paths(folder)
        replaced_until = 0
        for path in paths:
            if int(path.stem) < replaced_until:
                path.unlink()  # a crash came between its replacement and its end
                continue
            segment, until = self._recover_file(path, path is paths[-1])
            replaced_until = max(replaced_until, until)
            if segment is not None:
                self._segments.append(segment)
                self.bytes += segment.size
        if self._segments:
            self._acknowledged = max(self._acknowledged, self._segments[0].first - 1)
            self.checkpoint = self._segments[-1].checkpoint
            self.messages = sum(segment.count(self._acknowledged) for segment in self._segments)
        self._next = max(self._acknowledged + 1, *(segment.end for segment in self._segments), 0)
        self._position = self._acknowledged + 1
        if self._segments:
            self._take_up()
            self._trim()

    def _take_up(self) -> None:
        """Go on in the last file, if it may grow."""
        last = self._segments[-1]
        if last.size >= self._file_bytes or last.path is None:
            self._begin_segment()
            return
        last.entries = files.parse(last.path.read_bytes()).entries
        self._descriptor = os.open(last.path, os.O_WRONLY | os.O_APPEND)

    def _recover_file(self, path: Path, newest: bool) -> tuple[Segment | None, int]:
        """The segment in a file (None: nothing readable), and up to which index it replaces others."""
        found = files.parse(data := path.read_bytes())
        torn = 0
        if newest and found.bad and found.bad[-1][1] == len(data) and cut_short(data[found.bad[-1][0] :]):
            start, end = found.bad.pop()
            torn = end - start
            self.torn_bytes += torn
        if found.bad:
            self._set_aside(path, data, found)
        elif found.first is None:
            path.unlink()
        elif torn:
            os.truncate(path, len(data) - torn)
        if found.first is None:
            return None, 0
        first = int(path.stem)
        end = max(found.until, found.entries[-1][0] + 1 if found.entries else first)
        return Segment(first, end, path, path.stat().st_size, found.checkpoint, files.runs_of(found.entries)), found.until

    def _set_aside(self, path: Path, data: bytes, found: files.Contents) -> None:
        """Keep what cannot be read of a file in one of its own, for people to look at, and go on with the rest."""
        bad = b"".join(data[start:end] for start, end in found.bad)
        self.bad_bytes += len(bad)
        logger.warning("%d bytes of the spool file %s cannot be read: they are set aside in a *.bad file beside it", len(bad), path)
        try:
            files.replace(files.free_path(path.with_suffix(".bad")), bad)
            if found.first is None:
                path.unlink()
                return
            kept = Segment(int(path.stem), 0, None, 0, found.checkpoint)
            files.replace(path, files.segment_bytes(kept, found.entries, found.until))
        except OSError as error:  # it stays as it is: a reader passes over such bytes
            self._note_fault(error)

    def _release(self) -> None:
        self._seal()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
