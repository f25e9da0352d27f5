"""Inserting rows of which some may be refused, and which message each came from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from schemas.errors import KvcensusError
from schemas.topics import (
    BATCHES,
    DEAD_LETTERS,
    DEPLOYS,
    DUPLICATE_WINDOWS,
    ENGINE_METRICS,
    LIFECYCLE,
    RANK_WINDOWS,
    RECOMPUTES,
    SHARED_PREFIXES,
)
from sql.columns import ColumnBatch
from sql.database import Database, StoreError, StoreUnavailable
from sql.rows import TableRows

_SYSTEMIC_ROWS = 8

# ClickHouse's numbers for values that do not fit their column; every other refusal may pass, so those are tried again.
_DATA_CODES = frozenset({6, 27, 33, 38, 41, 43, 53, 69, 70, 72, 131, 321, 349, 469})


class Refused(Exception):
    """Some rows of this insert are at fault, not the store."""


class Origin(NamedTuple):
    """A message as it stood on its topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Origins:
    """Which message brought which rows of ``rows``."""

    def __init__(self, rows: TableRows) -> None:
        self._tables: Mapping[str, tuple[ColumnBatch, ...]] = {
            RANK_WINDOWS.name: (rows.rank_windows,),
            RECOMPUTES.name: (rows.recomputes,),
            DUPLICATE_WINDOWS.name: (rows.duplicate_windows,),
            SHARED_PREFIXES.name: (rows.shared_prefixes,),
            DEAD_LETTERS.name: (rows.dead_letters,),
            DEPLOYS.name: (rows.deploys,),
            LIFECYCLE.name: (rows.lifecycle,),
            ENGINE_METRICS.name: (rows.engine_metrics,),
            BATCHES.name: (rows.block_events, rows.batches_of_ranks, rows.rank_messages, rows.rank_events),
        }
        self._ends: dict[str, list[int]] = {}
        self._messages: dict[str, list[Origin]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all, as the rows are."""
        names = [table.table for tables in self._tables.values() for table in tables]
        self._ends = {name: [] for name in names}
        self._messages = {name: [] for name in names}

    def note(self, origin: Origin) -> None:
        """The rows added last, in whichever table of its topic, came from ``origin``."""
        for table in self._tables[origin.topic]:
            ends, rows = self._ends[table.table], len(table)
            if rows > (ends[-1] if ends else 0):
                ends.append(rows)
                self._messages[table.table].append(origin)

    def of(self, batch: ColumnBatch, refused: Sequence[tuple[int, str]]) -> dict[Origin, list[str]]:
        """The messages that brought the ``refused`` rows of ``batch``, each with what was said of its rows."""
        found: dict[Origin, list[str]] = {}
        ends, messages = self._ends[batch.table], self._messages[batch.table]
        for row, problem in refused:
            found.setdefault(messages[bisect_right(ends, row)], []).append(problem)
        return found


def insert(store: Database, batch: ColumnBatch) -> list[tuple[int, str]]:
    """Insert ``batch``; the rows that the store refuses for their values, with what it said, are left out.

    Raises :class:`StoreError` if the store is away or refuses for another reason, and :class:`KvcensusError` if it refuses row after row
    from the first on: then the schema is at fault.
    """
    try:
        _insert(store, batch.table, batch.column_names, batch.columns)
    except Refused:
        return _insert_rest(store, batch)
    return []


def _insert(store: Database, table: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
    try:
        store.insert(table, names, columns)
    except StoreUnavailable:
        raise
    except StoreError as error:
        if error.code is None or error.code in _DATA_CODES:
            raise Refused(str(error)) from error
        raise
    except (TypeError, ValueError, OverflowError, AttributeError, LookupError, ArithmeticError) as error:
        raise Refused(f"insert into {table}: {error}") from error  # a value that the driver cannot put into its column


def _insert_rest(store: Database, batch: ColumnBatch) -> list[tuple[int, str]]:
    bad: list[tuple[int, str]] = []
    pending = [(0, len(batch))]
    while pending:
        start, end = pending.pop()
        try:
            _insert(store, batch.table, batch.column_names, [column[start:end] for column in batch.columns])
        except Refused as error:
            if end - start > 1:
                middle = (start + end) // 2
                pending += [(middle, end), (start, middle)]
                continue
            bad.append((start, str(error)))
            if len(bad) == end >= _SYSTEMIC_ROWS:
                raise KvcensusError(f"{error}; row after row is refused: is the schema of this version? (kvcensus migrate)") from error
    return bad
