"""What the statements that roll windows up are put together from: grains, chunks of windows, shares. Pure text.

Whole numbers, and names written as hex, are the only values put into it.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text, whole numbers and hex

from __future__ import annotations

from dataclasses import dataclass

US = "toUnixTimestamp64Micro"
_SECOND = 1_000_000
_HOUR = 3_600

PART = "life_id, semantics_version, workload, model, reuse_reporting, removals, kv_connector, key_epoch, canary"
"""What is never added up across: each such part of a rank's window is a row of its own."""


@dataclass(frozen=True)
class Grain:
    """A length of time to which windows are rolled up; ``finer`` is what it is counted from (``None``: the windows themselves)."""

    name: str
    seconds: int
    finer: str | None

    @property
    def us(self) -> int:
        """Its length in microseconds."""
        return self.seconds * _SECOND


GRAINS = (Grain("5m", 300, None), Grain("1h", 3_600, "5m"), Grain("1d", 86_400, "1h"))
"""Finest first. Each is a whole number of the one before."""


def second(at: int) -> str:
    """``at`` (seconds) as a DateTime."""
    return f"toDateTime({at}, 'UTC')"


@dataclass(frozen=True)
class Chunk:
    """What one statement counts anew: windows of a grain.

    ``starts`` are their starts in ascending seconds, ``instances`` whose (``None``: all; duplicates have none). ``reach``: starts, in
    seconds, of the windows of 5 minutes before them in which rows begin that may reach into them. ``version`` is that of the rows written.
    """

    starts: tuple[int, ...]
    version: int
    instances: tuple[str, ...] | None = None
    reach: tuple[int, ...] = ()

    def among(self, grain: Grain, column: str = "at") -> str:
        """Condition that ``column``, a DateTime, is one of ``starts``."""
        first, last = self.starts[0], self.starts[-1]
        within = f"{column} >= {second(first)} AND {column} <= {second(last)}"
        if len(self.starts) == (last - first) // grain.seconds + 1:
            return within
        return f"{within} AND toUnixTimestamp({column}) IN ({', '.join(map(str, self.starts))})"

    def end(self, grain: Grain) -> int:
        """Where the last one ends, in seconds."""
        return self.starts[-1] + grain.seconds

    def of_instances(self) -> str:
        """`` AND ...``: the condition on ``instance_id``. Names are given as hex, so that whatever they hold stays a value."""
        if self.instances is None:
            return ""
        named = ", ".join(f"unhex('{instance.encode().hex()}')" for instance in self.instances)
        return f" AND instance_id IN ({named})"

    def rows_of(self, table: str, columns: str, end: str, *, ranks: bool) -> str:
        """``columns`` of the rows of ``table``, once for every window of 5 minutes that they reach into, ``at``.

        ``end``: where a row ends, in microseconds.
        """
        grain = GRAINS[0]
        start, over = self.starts[0], self.end(grain)
        hours = sorted({at - at % _HOUR for at in (*self.starts, *self.reach)})
        begins = f"window_start >= {second(min((start, *self.reach)))} AND window_start < {second(over)}"
        return f"""
            SELECT {columns} FROM {table} FINAL ARRAY JOIN {cut(grain, end)} AS at
            PREWHERE toStartOfHour(window_start) IN ({", ".join(map(second, hours))}) AND {begins}{self.of_instances() if ranks else ""}
            WHERE window_end > {second(start)} AND {self.among(grain)}
        """


ROW_END = f"{US}(window_start) + window_us"


def cut(grain: Grain, end: str = ROW_END) -> str:
    """The windows of ``grain`` that a row reaches into, as an array of DateTime; ``end`` is where it ends, microseconds."""
    first, last = f"intDiv({US}(window_start), {grain.us})", f"intDiv({end} - 1, {grain.us})"
    return f"arrayMap(n -> toDateTime(n * {grain.seconds}, 'UTC'), range(toUInt32({first}), toUInt32({last}) + 1))"


def spread(end: str) -> str:
    """What :func:`shared` needs, for WITH: ``end`` is up to where a row counts, in microseconds."""
    at_us = f"toInt64(toUnixTimestamp(at)) * {_SECOND}"
    return f"""
        {US}(window_start) AS begun, {end} AS ended, greatest(toInt64(1), ended - begun) AS length,
        least(ended, greatest(begun, {at_us})) - begun AS since, least(ended, {at_us} + {GRAINS[0].us}) - begun AS till
    """


def shared(value: str, kind: str = "toInt64") -> str:
    """The part of ``value``, spread evenly over a row, that lies in the window of 5 minutes ``at``.

    Shares are differences of a running whole, so that those of neighbours add up to the value.
    """
    high, low = (f"intDiv(toInt128({value}) * greatest(toInt64(0), {edge}), length)" for edge in ("till", "since"))
    return f"if(since = 0 AND till = ended - begun, {kind}({value}), {kind}({high} - {low}))"


def weakest(register: str) -> str:
    """The weakest of a group's registers, under the same name."""
    indeterminate, lower_bound = (f"max(s.{register} = '{word}')" for word in ("indeterminate", "lower_bound"))
    return f"multiIf({indeterminate}, 'indeterminate', {lower_bound}, 'lower_bound', 'exact') AS {register}"


def within(grain: Grain, chunk: Chunk) -> str:
    """Condition on ``window_start`` of a rollup that it lies between the first and the end of the last of the windows."""
    return f"window_start >= {second(chunk.starts[0])} AND window_start < {second(chunk.end(grain))}"


def aligned(grain: Grain) -> str:
    """The window of ``grain`` in which a finer one lies, as a DateTime."""
    return f"toDateTime(intDiv(toUnixTimestamp(window_start), {grain.seconds}) * {grain.seconds}, 'UTC')"


def _table(duplicates: bool) -> tuple[str, str]:
    """The table of rollups and what names a window there."""
    if duplicates:
        return "duplicate_rollups", "window_start, scope, scope_key, tier"
    return "rank_rollups", "window_start, instance_id, dp_rank"


def counted_last(columns: str, where: str, *, duplicates: bool) -> str:
    """Rows of a rollup table but for parts that an older round wrote late: what is left of a window is of one version."""
    table, key = _table(duplicates)
    return f"""
        SELECT {columns} FROM (SELECT {columns}, version, max(version) OVER (PARTITION BY {key}) AS last FROM {table} FINAL WHERE {where})
        WHERE version = last
    """


def rolled_up(finer: str, grain: Grain, chunk: Chunk, columns: str, select: str, *, duplicates: bool) -> str:
    """``select``, which needs ``columns``, of rows of the grain ``finer``; ``at`` is the window of ``grain`` in which each lies."""
    columns, where = f"window_start, {columns}", f"grain = '{finer}' AND {within(grain, chunk)}{chunk.of_instances()}"
    if finer == grain.name:
        rows = counted_last(columns, where, duplicates=duplicates)
    else:
        rows = f"SELECT {columns} FROM {_table(duplicates)[0]} FINAL WHERE {where}"
    return f"""
        SELECT {aligned(grain)} AS at, {select}
        FROM ({rows})
        WHERE {chunk.among(grain)}
    """


def or_as_before(counted: str, before: str, expired: str, unit: str) -> str:
    """Rows of ``counted``, but of the units that ``expired`` tells those of ``before``."""
    return f"""
        SELECT * FROM ({counted}) WHERE ({unit}) GLOBAL NOT IN ({expired})
        UNION ALL
        SELECT * FROM ({before}) WHERE ({unit}) GLOBAL IN ({expired})
    """


def leftovers(grain: Grain, chunk: Chunk, *, duplicates: bool) -> str:
    """Delete parts of the windows just written (those of ``chunk.version``) that were not written again: there are fewer than before.

    Of the finest grain only where some part was written: a window in which a rank is missing has no rows to be counted from.
    """
    table, key = _table(duplicates)
    those = f"grain = '{grain.name}' AND {chunk.among(grain, 'window_start')}{chunk.of_instances()}"
    written = f"AND ({key}) GLOBAL IN (SELECT {key} FROM {table} FINAL WHERE {those} AND version = {chunk.version})"
    return f"""
        INSERT INTO {table} (grain, {key}, part, version, is_deleted)
        SELECT grain, {key}, part, {chunk.version}, 1 FROM {table} FINAL
        WHERE {those} AND version < {chunk.version} {written if grain.finer is None else ""}
    """
