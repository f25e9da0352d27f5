"""The tables of the worker: the last row given out for each window, and the topics that carry them. No Faust here.

Block-level state is not in tables (one changelog message per block would dwarf everything else). What is: one entry per
(rank, window) and per (scope, window), written once per flush, after the row itself was acknowledged. A table may
know less than was given out (a broker that lost the end of a changelog, a crash between the two writes); then a row is
given out once more, and it replaces itself. It never knows more.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Generic, TypeVar

from schemas import codec
from schemas.records import DuplicateWindow, RankWindow, rank_key
from schemas.topics import MAX_MESSAGE_BYTES, Topic

RANK_WINDOW_TABLE = "kvcensus.rank-window-table"
"""Changelog of the rank windows given out; as many partitions as ``kvcensus.batches``, and in them the same ranks."""

DUPLICATE_WINDOW_TABLE = "kvcensus.duplicate-window-table"
"""Changelog of the duplicate windows given out; one partition, like ``kvcensus.duplicate-steps``."""

_COMPACTED = {"cleanup.policy": "compact"}

STATE = Topic(
    "kvcensus.state",
    None,
    "owner and chunk",
    config={
        **_COMPACTED,
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        # Segments that are closed soon, since only those are compacted; and what was just written stays readable for a while.
        "segment.bytes": str(64 * 1024 * 1024),
        "min.compaction.lag.ms": str(10 * 60 * 1000),
    },
)
"""Snapshots of what is known of single blocks: partition *n* holds what belongs to partition *n* of the input topics."""

CHANGELOGS = (
    STATE,
    Topic(RANK_WINDOW_TABLE, None, "rank and window", config=_COMPACTED),
    Topic(DUPLICATE_WINDOW_TABLE, None, "scope and window", single_partition=True, config=_COMPACTED),
)
"""What ``kvcensus topics create`` makes beside the topics of :mod:`schemas.topics`."""

RETENTION_US = 3_600 * 1_000_000
"""A window this much older than its rank's (or scope's) newest leaves the table; if it changes later, it is simply given out."""

IDLE_SECONDS = 6 * 3_600.0
"""A rank or scope of which no row was given out for so long leaves the table whole; if it comes back, its rows are simply given out."""

Row = TypeVar("Row", RankWindow, DuplicateWindow)


def row_group(row: RankWindow | DuplicateWindow) -> str:
    """What ``row`` is a window of: the first part of its table key."""
    if isinstance(row, RankWindow):
        return rank_key(row.instance_id, row.dp_rank)
    return f"{row.scope}|{row.scope_key}|{row.tier}"


def row_key(row: RankWindow | DuplicateWindow, base_us: int, rules: str = "") -> str:
    """Table key of ``row``. ``base_us`` is the worker's window, ``rules`` what else it was told: rows counted otherwise are other rows."""
    life = row.life_id if isinstance(row, RankWindow) else ""
    return f"{row_group(row)}|{life}|{row.semantics_version}|{base_us}{rules}|{row.window_start_us}"


def group_of_key(key: str) -> str:
    """The group in a table key: inverse of :func:`row_key` for its first part."""
    return key.rsplit("|", 4)[0]


def _start_of_key(key: str) -> int:
    return int(key.rsplit("|", 1)[1])


class WindowLedger(Generic[Row]):
    """Which rows still have to be given out, over a table of the rows that were.

    ``table`` maps :func:`row_key` to the row as it was sent; rows are kept ``retention_us`` behind their group's newest, and groups
    until :meth:`expire` finds them idle. A worker that was told another window or other ``rules`` counts all of it again, and its rows
    have the versions of those that stand in the table: they are given out all the same.
    """

    def __init__(
        self, table: MutableMapping[str, bytes], kind: type[Row], *, base_us: int, rules: str = "", retention_us: int = RETENTION_US
    ) -> None:
        self._table = table
        self._kind: type[Row] = kind
        self._base_us = base_us
        self._rules = rules
        self._retention_us = retention_us
        self._versions: dict[str, int] = {}
        self._groups: dict[str, set[str]] = {}
        self._newest: dict[str, int] = {}
        self._busy: set[str] = set()
        self._idle_since: dict[str, float] = {}
        self.withheld = 0

    def rebuild(self) -> None:
        """Learn again what the table holds, after something else changed it: a recovery, partitions that moved."""
        groups = {group_of_key(key) for key in self._table}
        self._versions.clear()
        self._groups.clear()
        self._newest.clear()
        self._idle_since = {group: since for group, since in self._idle_since.items() if group in groups}
        for key in list(self._table):
            self._note(group_of_key(key), key, _start_of_key(key))

    def _note(self, group: str, key: str, start: int) -> None:
        self._groups.setdefault(group, set()).add(key)
        self._newest[group] = max(self._newest.get(group, start), start)

    def _known_version(self, key: str) -> int:
        """Version given out for ``key``, -1 if none is known. A row that cannot be read counts as absent."""
        version = self._versions.get(key)
        if version is None:
            kept = self._table.get(key)
            if kept is None:
                return -1
            try:
                version = codec.decode(kept, self._kind).version
            except codec.CodecError:
                version = -1
            self._versions[key] = version
        return version

    def is_news(self, row: Row) -> bool:
        """Whether ``row`` is above what was given out for its window; counts those that are not."""
        if row.version > self._known_version(row_key(row, self._base_us, self._rules)):
            return True
        self.withheld += 1
        return False

    def given_out(self, row: Row, message: bytes) -> None:
        """Note that ``row`` was acknowledged as ``message``, and drop what has become too old beside it."""
        group, start = row_group(row), row.window_start_us
        newest = self._newest.get(group)
        if newest is not None and start < newest - self._retention_us:
            return
        key = row_key(row, self._base_us, self._rules)
        self._busy.add(group)
        self._table[key] = message
        self._versions[key] = row.version
        self._note(group, key, start)
        if newest is not None and start > newest:
            keys = self._groups[group]
            for old in [kept for kept in keys if _start_of_key(kept) < start - self._retention_us]:
                keys.discard(old)
                self._versions.pop(old, None)
                self._table.pop(old, None)

    def expire(self, now: float) -> int:
        """Drop the rows of groups that were idle for :data:`IDLE_SECONDS`; how many rows went. ``now``: seconds of any steady clock."""
        for group in self._busy:
            self._idle_since.pop(group, None)
        self._busy.clear()
        dropped = 0
        for group in [*self._groups]:
            if now - self._idle_since.setdefault(group, now) < IDLE_SECONDS:
                continue
            for key in self._groups.pop(group):
                self._versions.pop(key, None)
                self._table.pop(key, None)
                dropped += 1
            del self._newest[group], self._idle_since[group]
        return dropped
