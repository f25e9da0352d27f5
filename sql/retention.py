"""How long rows are kept: what is in force, as the tables themselves say, and changing it.

Time counts from insertion. What is in force stays so until somebody says otherwise: it lives in the tables' TTL and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import KvcensusError
from sql import cluster as clusters
from sql.cluster import LOCAL, Cluster
from sql.database import Database, StoreError

TABLES: Mapping[str, tuple[str, ...]] = {
    "facts": ("block_events", "batches", "rank_messages", "recomputes"),
    "windows": ("rank_windows", "duplicate_windows", "shared_prefixes", "rank_events", "lifecycle", "engine_metrics", "dead_letters"),
    "rollups": ("rank_rollups", "duplicate_rollups"),
}
"""What is kept equally long, by the name of its option (``--keep-facts`` ...). Tables that are not among them are kept for good."""

_LASTING: Mapping[str, str] = {
    "rank_messages": " DELETE WHERE kind != 'declaration'",
    "rank_events": " DELETE WHERE kind NOT IN ('declaration', 'departure')",
}
"""What a row must be to go at all: what holds until the next of its kind must not."""

_UNITS = {"h": "HOUR", "d": "DAY", "w": "WEEK", "y": "YEAR"}
_HOURS = {"HOUR": 1, "DAY": 24, "WEEK": 24 * 7, "YEAR": 24 * 366}
_LONGEST_YEARS = 50
_GIVEN = re.compile(r"([1-9]\d{0,8})([hdwy])")
_TTL = re.compile(r"\bTTL (.*?)(?: SETTINGS |$)", re.DOTALL)
_OURS = re.compile(r"inserted_at \+ toInterval(Hour|Day|Week|Year)\((\d+)\)(?: DELETE)?(?: WHERE .*)?", re.DOTALL)
_MODIFIES = re.compile(r"ALTER TABLE (\w+)\s+MODIFY TTL\b")


@dataclass(frozen=True)
class Period:
    """So long from insertion; ``count`` 0: for good."""

    count: int
    unit: str = "DAY"

    def __str__(self) -> str:
        if not self.count:
            return "forever"
        return f"{self.count} {self.unit.lower()}{'' if self.count == 1 else 's'}"


FOREVER = Period(0)
Wanted = Mapping[str, Period]
"""What a user asked for, by the names of :data:`TABLES`; what is not in it is left as it is."""


@dataclass(frozen=True)
class InForce:
    """How long rows of ``table`` are kept. ``period`` is ``None`` where its TTL (``rule``, SQL) is none that an option sets."""

    table: str
    group: str
    period: Period | None
    rule: str


def period(text: str) -> Period:
    """What a user wrote: ``12h``, ``14d``, ``6w``, ``2y`` or ``forever``. Raises :class:`KvcensusError`."""
    if text.lower() == "forever":
        return FOREVER
    found = _GIVEN.fullmatch(text.lower())
    if found is None:
        raise KvcensusError(f"{text!r}: expected a whole number of hours, days, weeks or years, as 12h, 14d, 6w, 2y, or 'forever'")
    given = Period(int(found.group(1)), _UNITS[found.group(2)])
    if given.count * _HOURS[given.unit] > _LONGEST_YEARS * _HOURS["YEAR"]:
        # inserted_at ends in 2106: a sum beyond that begins anew in 1970, and everything would be due at once.
        raise KvcensusError(f"{text!r}: more than {_LONGEST_YEARS} years; say 'forever'")
    return given


def in_force(database: Database) -> list[InForce]:
    """What is in force for each table of :data:`TABLES` that there is, in their order; nothing where the schema has not been created."""
    try:
        rows = database.query(
            "SELECT name, engine_full FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree'"
        ).rows
    except StoreError as error:
        if error.schema_missing:
            return []
        raise
    engines = {name.removesuffix(LOCAL): engine for name, engine in rows}
    return [_read(table, group, engines[table]) for group, tables in TABLES.items() for table in tables if table in engines]


def _read(table: str, group: str, engine_full: str) -> InForce:
    found = _TTL.search(engine_full)
    if found is None:
        return InForce(table, group, FOREVER, "")
    ours = _OURS.fullmatch(found.group(1))
    # A rule that would take what must last is none of ours, whatever its time.
    lasting = table in _LASTING and _LASTING[table].removeprefix(" DELETE") not in found.group(1)
    return InForce(table, group, Period(int(ours.group(2)), ours.group(1).upper()) if ours and not lasting else None, found.group(1))


def changes(now: Iterable[InForce], wanted: Wanted) -> list[str]:
    """The statements that bring ``wanted`` in force where it is not yet, for one server. Pure."""
    return [_statement(each.table, wanted[each.group]) for each in now if each.group in wanted and each.period != wanted[each.group]]


def with_missing(now: Iterable[InForce]) -> list[InForce]:
    """``now``, and each table of :data:`TABLES` that is not there yet, as it is made: without a TTL. Pure."""
    there = {each.table: each for each in now}
    return [there.get(table, InForce(table, group, FOREVER, "")) for group, tables in TABLES.items() for table in tables]


def _statement(table: str, wanted: Period) -> str:
    if wanted == FOREVER:
        return f"ALTER TABLE {table} REMOVE TTL"
    return f"ALTER TABLE {table} MODIFY TTL inserted_at + INTERVAL {wanted.count} {wanted.unit}{_LASTING.get(table, '')}"


def defaults(statements: Sequence[str], now: Iterable[InForce], wanted: Wanted) -> list[str]:
    """``statements`` of the migration that sets the defaults, less those for tables of which somebody has said how long already. Pure.

    By a TTL that is in force, or by what is ``wanted``: :func:`apply` brings that in force next, and no row may go by a default in between.
    """
    said = {each.table for each in now if each.rule} | {table for group in wanted for table in TABLES[group]}
    return [each for each in statements if (found := _MODIFIES.search(each)) is None or found.group(1) not in said]


def apply(database: Database, wanted: Wanted, cluster: Cluster | None) -> list[InForce]:
    """Bring ``wanted`` in force; what was in force before, of the tables that changed. The schema must be up to date.

    Raises :class:`StoreError`, and :class:`KvcensusError` where the store can only be asked.
    """
    before = in_force(database)
    todo = changes(before, wanted)
    if todo and not database.can_write:
        raise KvcensusError(f"{database.place} can only be asked: how long rows are kept is changed when its owner does not run")
    for statement in todo if cluster is None else clusters.rewrite(todo, cluster):
        database.command(statement)
    return [each for each in before if each.group in wanted and each.period != wanted[each.group]]
