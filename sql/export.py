"""Tables and views of the store, read day by day in pieces that fit into memory, for :mod:`sql.export_files` to write.

A table is read by its time column, in UTC days. How the rows lie in an hour is asked first, and each query then takes so many of them as
make a piece of about :data:`PIECE_BYTES`: the embedded store answers no query with more than some hundred megabytes, and a process that
exports a year needs no more memory than one that exports an hour.
"""

# ruff: noqa: S608 - identifiers are names from this module or the system tables, quoted; every value is a bound parameter

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from schemas.errors import KvcensusError
from sql.database import Database, StoreError
from sql.readable import Ids, select_list
from sql.rollup_parts import GRAINS
from sql.statements import quoted

Clock = Literal["engine", "forwarder", "store"]

PIECE_BYTES = 32 * 1024 * 1024
"""So much of a table one query takes, in Arrow's form; a little more or less, as rows differ."""

FIRST_ROWS, MOST_ROWS = 10_000, 500_000
"""Rows of the first piece, when nobody knows yet how long they are; and of any."""

DAY_US = 86_400_000_000
_UNITS_US = (3_600_000_000, 60_000_000, 1_000_000, 1_000)
_TOO_LARGE = frozenset({241, 396})
"""ClickHouse's numbers for a result, or the memory to make it, beyond a limit."""


class Timed(NamedTuple):
    """By which column a table is cut into days, and whose clock that is. No column: the table has no time, and is written whole."""

    column: str | None
    clock: Clock | None = "engine"


TABLES: dict[str, Timed] = {
    "rank_windows": Timed("window_start"),
    "recomputes": Timed("back_at"),
    "duplicate_windows": Timed("window_start"),
    "shared_prefixes": Timed("as_of"),
    "block_events": Timed("at"),
    "batches": Timed("at"),
    "rank_messages": Timed("observed_at", "forwarder"),
    "rank_events": Timed("observed_at", "forwarder"),
    "lifecycle": Timed("at", "forwarder"),
    "engine_metrics": Timed("at", "forwarder"),
    "dead_letters": Timed("inserted_at", "store"),
    "deploys": Timed("at"),
    "rank_rollups": Timed("window_start"),
    "duplicate_rollups": Timed("window_start"),
    "known_ranks": Timed(None, None),
    "life_groups": Timed(None, None),
}
"""Every table that can be exported."""

OF_A_GRAIN = (
    "repeat_compute",
    "repeat_compute_fleet",
    "repeat_compute_by_workload",
    "repeat_compute_by_model",
    "gpu_time",
    "duplicate_footprint",
    "workload_pairs",
    "return_times",
    "rank_health",
    "coverage",
)
"""Families of views: each has one for every grain, named after it."""

_SINGLE: Mapping[str, Timed] = {
    "repeat_compute": Timed("window_start"),
    "return_times": Timed("window_start"),
    "duplicate_footprint": Timed("window_start"),
    "workload_pairs": Timed("window_start"),
    "rank_window_groups": Timed("window_start"),
    "recomputed_blocks": Timed("back_at"),
    "metric_breaches": Timed("window_start"),
    "top_shared_prefixes": Timed("as_of"),
    "coverage_gaps": Timed("window_start"),
    "interruptions": Timed("observed_at", "forwarder"),
    "deploys_declared": Timed("at"),
    "deploy_windows": Timed("window_start"),
    "deploy_effect": Timed("at"),
    "life_primary_groups": Timed(None, None),
}

VIEWS: Mapping[str, Timed] = {
    **_SINGLE,
    **{f"{name}_{grain.name}": Timed("window_start") for name in OF_A_GRAIN for grain in GRAINS},
}
"""Every view that can be exported."""

TAKE_VALUES = ("deploy_effect_of", "recomputed_blocks_between")
"""Views that are asked as NAME(value = ...)."""

NOT_EXPORTED = frozenset({"schema_migrations", "rollup_touched", "rollup_marks", "rollup_spans", "fleet_clock", *TAKE_VALUES})
"""Tables of ours that say how far schema and rollups have come, and views that take values: other views have the same rows. Nor are
triggers exported, nor the views (``rollup_``...) that those of a grain are cut from."""

_BYTES: Mapping[str, frozenset[str]] = {"dead_letters": frozenset({"key", "payload"})}
"""Columns that hold any bytes, though their type says text."""


class Piece(NamedTuple):
    """A stretch of time, microseconds, half open, with about so many rows."""

    start_us: int
    end_us: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """What is to be read of one table: about how many rows in which hours of which days. A table without a time has one entry, ``None``."""

    table: str
    timed: Timed
    days: Mapping[date | None, Sequence[Piece]]

    @property
    def rows(self) -> int:
        """About how many rows: some of them may be replaced by others."""
        return sum(piece.rows for pieces in self.days.values() for piece in pieces)


def find(name: str) -> Timed:
    """How ``name`` is cut into days. Raises :class:`KvcensusError` with the names there are."""
    timed = TABLES.get(name) or VIEWS.get(name)
    if timed is None:
        raise KvcensusError(f"no table or view {name!r}; {listed()}")
    return timed


def listed() -> str:
    """The names of all tables and views, for people."""
    grains = ", ".join(f"_{grain.name}" for grain in GRAINS)
    return f"tables: {', '.join(TABLES)}; views: {', '.join(_SINGLE)}; views that end in {grains}: {', '.join(OF_A_GRAIN)}"


def day_of(us: int) -> date:
    """The UTC day of a time."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).date()


def joined(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Neighbours put together while they hold at most ``most`` rows; what holds more stays alone."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].rows + piece.rows <= most:
            found[-1] = Piece(found[-1].start_us, piece.end_us, found[-1].rows + piece.rows)
        else:
            found.append(piece)
    return found


class Source:
    """One table or view of a store. Raises :class:`StoreError`, with ``schema_missing`` set where there is none of that name."""

    def __init__(self, database: Database, table: str, ids: Ids) -> None:
        self.table = table
        self.timed = find(table)
        self._database = database
        columns = [(row[0], row[1]) for row in database.query(f"DESCRIBE TABLE {quoted(table)}").rows]
        self._kinds = dict(columns)
        self._select = select_list(columns, ids)[0]
        self._bytes = _BYTES.get(table, frozenset())
        key = database.query(
            "SELECT sorting_key FROM system.tables WHERE database = currentDatabase() AND name = {name:String}", {"name": table}
        ).rows
        time = quoted(self.timed.column) if self.timed.column else ""
        # As the table lies on disk: neighbours are alike, which makes small files.
        self._order = (key[0][0] if key else "") or time
        self._most_rows = FIRST_ROWS

    def plan(self, since_us: int | None, until_us: int | None) -> Plan:
        """What lies from ``since_us`` to ``until_us``, each open where ``None``."""
        if self.timed.column is None:
            rows = self._database.query(f"SELECT count() FROM {quoted(self.table)}", final=True).rows[0][0]
            return Plan(self.table, self.timed, {None: [Piece(0, 0, rows)]} if rows else {})
        hours = self._counted(since_us, until_us, _UNITS_US[0])
        return Plan(self.table, self.timed, {day: list(of) for day, of in groupby(hours, lambda piece: day_of(piece.start_us))})

    def read(self, plan: Plan, day: date | None) -> Iterator[pa.Table]:
        """The rows of one day of the plan, as Arrow tables of one schema, in the order of time."""
        if day is None:
            yield self._rows(None, None)
            return
        yield from self._read(list(plan.days[day]), 1)

    def _read(self, pieces: list[Piece], finer: int) -> Iterator[pa.Table]:
        while pieces:
            most = self._most_rows
            together = joined(pieces, most)
            piece = together[0]
            pieces = [each for each in pieces if each.start_us >= piece.end_us]
            if piece.rows > most and finer < len(_UNITS_US):
                yield from self._read(self._counted(piece.start_us, piece.end_us, _UNITS_US[finer]), finer + 1)
            else:
                yield from self._halved(piece.start_us, piece.end_us)

    def _halved(self, start_us: int, end_us: int) -> Iterator[pa.Table]:
        """The rows of a stretch; in halves where the store finds them too many for one result."""
        try:
            table = self._rows(start_us, end_us)
        except StoreError as error:
            if error.code not in _TOO_LARGE or end_us - start_us < 2:
                raise
            self._most_rows = max(1, self._most_rows // 2)
            middle = (start_us + end_us) // 2
            yield from self._halved(start_us, middle)
            yield from self._halved(middle, end_us)
            return
        if table.num_rows:
            self._most_rows = min(MOST_ROWS, max(1, PIECE_BYTES * table.num_rows // max(1, table.nbytes)))
            yield table

    def _counted(self, since_us: int | None, until_us: int | None, unit_us: int) -> list[Piece]:
        """How many rows lie in each ``unit_us`` that has any."""
        column, (where, parameters) = self._column(), self._where(since_us, until_us)
        rows = self._database.query(
            f"""
            SELECT intDiv(toUnixTimestamp64Micro(toDateTime64({column}, 6, 'UTC')), {{unit:Int64}}) AS unit, count()
            FROM {quoted(self.table)} WHERE {where} GROUP BY unit ORDER BY unit
            """,
            parameters | {"unit": unit_us},
        ).rows
        return [
            Piece(
                unit * unit_us if since_us is None else max(since_us, unit * unit_us),
                (unit + 1) * unit_us if until_us is None else min(until_us, (unit + 1) * unit_us),
                count,
            )
            for unit, count in rows
        ]

    def _rows(self, start_us: int | None, end_us: int | None) -> pa.Table:
        where, parameters = self._where(start_us, end_us)
        order = f" ORDER BY {self._order}" if self._order else ""
        # The condition stands inside: outside, a column's name could mean its readable form, which is in no index.
        table = self._database.query_arrow(
            f"SELECT {self._select} FROM (SELECT * FROM {quoted(self.table)} WHERE {where}{order})", parameters, final=True
        )
        for name in self._bytes:
            place = table.schema.get_field_index(name)
            field = table.schema.field(place)
            table = table.set_column(place, pa.field(name, pa.binary(), field.nullable), table.column(place).cast(pa.binary()))
        return table

    def _column(self) -> str:
        assert self.timed.column is not None
        return quoted(self.timed.column)

    def _where(self, since_us: int | None, until_us: int | None) -> tuple[str, dict[str, Any]]:
        conditions, parameters = ["1"], {}
        for name, sign, value in (("since", ">=", since_us), ("until", "<", until_us)):
            if value is not None:
                conditions.append(f"{self._column()} {sign} fromUnixTimestamp64Micro({{{name}:Int64}}, 'UTC')")
                parameters[name] = value
        return " AND ".join(conditions), parameters
