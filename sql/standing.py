"""Writing rows that were counted again beside those that stand: a row of the same rules gives way only to one that saw more."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from schemas.records import DuplicateWindow, RankWindow, Recompute, SharedPrefix
from sql.database import Database
from sql.rows import TableRows

CHUNK_ROWS = 20_000
"""Rows that are compared and inserted at a time."""

Row = RankWindow | Recompute | DuplicateWindow | SharedPrefix
_US = "toUnixTimestamp64Micro"
_Key = tuple[Any, ...]


@dataclass(slots=True)
class Tally:
    """Of one table: rows that were counted, those written (or that would be), and those left out because what stands is as good."""

    counted: int = 0
    written: int = 0
    kept: int = 0


@dataclass(slots=True)
class Standing:
    """Rows beside those of ``semantics_version`` in ``database``; with ``dry_run`` nothing is written.

    Rank windows must be written before the recomputes in them: a recompute goes the way of its window.
    """

    database: Database
    semantics_version: int
    window_us: int
    dry_run: bool = False
    tallies: dict[str, Tally] = field(default_factory=dict)
    _kept: dict[_Key, array[int]] = field(default_factory=dict)

    def write(self, rows: Iterable[Row], table: str) -> None:
        """Write those of ``rows``, all of ``table``, that are better than what stands. They are compared quickest in the order of time."""
        tally = self.tallies.setdefault(table, Tally())
        some: list[Row] = []
        for row in rows:
            some.append(row)
            if len(some) >= CHUNK_ROWS:
                self._write(some, table, tally)
                some = []
        if some:
            self._write(some, table, tally)
        for starts in self._kept.values():
            starts[:] = array("q", sorted(starts))

    def _write(self, some: Sequence[Any], table: str, tally: Tally) -> None:
        choose: dict[str, Callable[[Sequence[Any]], Sequence[Row]]] = {
            "rank_windows": self._better_windows,
            "recomputes": self._better_recomputes,
            "duplicate_windows": self._better_duplicates,
            "shared_prefixes": self._new_prefixes,
        }
        better = choose[table](some)
        tally.counted += len(some)
        tally.written += len(better)
        tally.kept += len(some) - len(better)
        if self.dry_run or not better:
            return
        columns = TableRows()
        for row in better:
            columns.add(row)
        for batch in columns.batches():
            self.database.insert(batch.table, batch.column_names, batch.columns)

    def _better_windows(self, some: Sequence[RankWindow]) -> list[RankWindow]:
        standing = self._standing(
            "rank_windows",
            f"instance_id, dp_rank, life_id, {_US}(window_start)",
            "version, is_final, observed_us, 1",
            [row.window_start_us for row in some],
        )
        better = []
        for row in some:
            key = (row.instance_id, row.dp_rank, row.life_id)
            if _gives_way(standing.get((*key, row.window_start_us)), row, row.observed_us, 1):
                better.append(row)
            else:
                self._kept.setdefault(key, array("q")).append(row.window_start_us)
        return better

    def _better_recomputes(self, some: Sequence[Recompute]) -> list[Recompute]:
        return [row for row in some if not self._stands((row.instance_id, row.dp_rank, row.life_id), row.back_at_us)]

    def _stands(self, key: _Key, at_us: int) -> bool:
        starts = self._kept.get(key)
        if starts is None:
            return False
        start = at_us - at_us % self.window_us
        at = bisect_left(starts, start)
        return at < len(starts) and starts[at] == start

    def _better_duplicates(self, some: Sequence[DuplicateWindow]) -> list[DuplicateWindow]:
        standing = self._standing(
            "duplicate_windows",
            f"scope, scope_key, tier, {_US}(window_start)",
            f"version, is_final, observed_us, expected_ranks * ({_US}(as_of) - {_US}(window_start))",
            [row.window_start_us for row in some],
        )
        return [
            row
            for row in some
            if _gives_way(
                standing.get((row.scope, row.scope_key, row.tier, row.window_start_us)),
                row,
                row.observed_us,
                row.expected_ranks * (row.as_of_us - row.window_start_us),
            )
        ]

    def _new_prefixes(self, some: Sequence[SharedPrefix]) -> list[SharedPrefix]:
        """Places of one instant belong together: an instant that stands is left as it is."""
        rows = self.database.query(
            f"SELECT DISTINCT {_US}(as_of) FROM shared_prefixes WHERE semantics_version = {{rules:Int32}} AND {_between('as_of')}",
            self._bounds([row.as_of_us for row in some]),
        ).rows
        standing = {row[0] for row in rows}
        return [row for row in some if row.as_of_us not in standing]

    def _standing(self, table: str, key: str, values: str, times: Sequence[int]) -> dict[_Key, tuple[int, bool, int, int]]:
        rows = self.database.query(
            f"SELECT {key}, {values} FROM {table} FINAL WHERE semantics_version = {{rules:Int32}} AND {_between('window_start')}",
            self._bounds(times),
            final=True,
        ).rows
        return {tuple(row[:-4]): (row[-4], row[-3], row[-2], row[-1]) for row in rows}

    def _bounds(self, times: Sequence[int]) -> dict[str, int]:
        return {"rules": self.semantics_version, "low": min(times), "high": max(times)}


def _between(column: str) -> str:
    return f"{column} BETWEEN fromUnixTimestamp64Micro({{low:Int64}}, 'UTC') AND fromUnixTimestamp64Micro({{high:Int64}}, 'UTC')"


def _gives_way(standing: tuple[int, bool, int, int] | None, row: RankWindow | DuplicateWindow, observed: int, whole: int) -> bool:
    """Whether nothing stands, or what saw less than ``row``, or is provisional where ``row`` is not; then ``row`` is put above it."""
    if standing is None:
        return True
    version, final, standing_observed, standing_whole = standing
    ours, theirs = _share(observed, whole), _share(standing_observed, standing_whole)
    if ours < theirs or (ours == theirs and (final or not row.final)):
        return False
    row.version = max(row.version, version + 1)
    return True


def _share(observed: int, whole: int) -> Fraction:
    return Fraction(observed, whole) if whole else Fraction(0)


def base_window(database: Database, semantics_version: int | None = None) -> int | None:
    """Length of the windows that hold batches, in microseconds: of rows of these rules, or of the newest that stand; null if none do."""
    rows = database.query(
        "SELECT semantics_version AS rules, max(window_us) FROM rank_windows WHERE batches > 0 GROUP BY rules ORDER BY rules DESC"
    ).rows
    found = [length for version, length in rows if semantics_version in (None, version)]
    return int(found[0]) if found else None
