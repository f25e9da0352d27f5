"""Inserting rows of which some may be refused, and which message each came from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from sql.database import Database, StoreError
from sql.rows import TableRows
from streams.sink_trouble import SchemaChanged, of_values
from streams.sink_values import misfits

Kinds = Mapping[str, Mapping[str, str]]
"""Table to column to ClickHouse type."""


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


def column_kinds(store: Database) -> Kinds:
    """The columns of all tables, as they are now. Raises :class:`StoreError`."""
    kinds: dict[str, dict[str, str]] = {}
    for table, column, kind in store.query("SELECT table, name, type FROM system.columns WHERE database = currentDatabase()").rows:
        kinds.setdefault(table, {})[column] = kind
    return kinds


class Inserter:
    """Inserts stretches of rows into ``store``, whose columns are ``kinds`` to begin with.

    ``breathe`` is called between attempts where one insert becomes many; what it raises goes through.
    """

    def __init__(self, store: Database, kinds: Kinds, breathe: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._kinds = kinds
        self._breathe = breathe

    def insert(self, batch: ColumnBatch, start: int = 0, end: int | None = None) -> list[tuple[int, str]]:
        """Insert the rows ``start`` to ``end`` of ``batch``; those left out because the store refuses their values, with what it said.

        Raises :class:`StoreError` if the store is away or refuses for another reason, and :class:`SchemaChanged` if it refuses every row
        and the columns are no longer those of the beginning: then the rows are not at fault, however many they are. With the columns as
        they were they are, however many: a producer that writes nothing but nonsense stops nobody else.
        """
        end = len(batch) if end is None else end
        try:
            self._insert(batch, range(start, end))
        except Refused as error:
            bad = self._insert_rest(batch, start, end)
            if len(bad) == end - start and (changed := self._changed(batch)):
                raise SchemaChanged(f"{error}; no row is taken, and the table has changed: {changed}") from error
            return bad
        return []

    def _insert(self, batch: ColumnBatch, rows: Sequence[int]) -> None:
        whole = isinstance(rows, range)
        columns = [column[rows[0] : rows[-1] + 1] if whole else [column[row] for row in rows] for column in batch.columns]
        try:
            self._store.insert(batch.table, batch.column_names, columns)
        except StoreError as error:
            if of_values(error):
                raise Refused(str(error)) from error
            raise
        except (TypeError, ValueError, OverflowError, AttributeError, LookupError, ArithmeticError) as error:
            raise Refused(f"insert into {batch.table}: {error}") from error  # a value that the driver cannot put into its column

    def _insert_rest(self, batch: ColumnBatch, start: int, end: int) -> list[tuple[int, str]]:
        """Insert all rows but those at fault; these."""
        wrong = misfits(batch.column_names, [column[start:end] for column in batch.columns], self._kinds.get(batch.table, {}))
        bad = [(start + row, f"insert into {batch.table}: {problem}") for row, problem in wrong.items()]
        pending: list[Sequence[int]] = [[row for row in range(start, end) if row - start not in wrong]]
        while pending:
            rows = pending.pop()
            if not rows:
                continue
            self._breathe()
            try:
                self._insert(batch, rows)
            except Refused as error:
                if len(rows) == 1:
                    bad.append((rows[0], str(error)))
                else:
                    middle = len(rows) // 2
                    pending += [rows[middle:], rows[:middle]]
        return sorted(bad)

    def _changed(self, batch: ColumnBatch) -> str:
        """How the columns of a table differ from those of the beginning; empty if they do not."""
        before, now = self._kinds.get(batch.table, {}), column_kinds(self._store).get(batch.table, {})
        names = [name for name in batch.column_names if before.get(name) != now.get(name)]
        return ", ".join(f"{name} is {now.get(name, 'missing')}, was {before.get(name, 'missing')}" for name in names)


def excerpt(batch: ColumnBatch, row: int) -> str:
    """The first values of a row, to be found again by."""
    values: list[Any] = [column[row] for column in batch.columns[:5]]
    return ", ".join(repr(value)[:100] for value in values)
