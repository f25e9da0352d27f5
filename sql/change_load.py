"""Reading the two sides of a change from the store."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from sql.change import Cut
from sql.change_spans import Sides, around, two
from sql.database import Database
from sql.load import load
from sql.total_types import Span, Totals

_US = "toUnixTimestamp64Micro"
_FROM = "fromUnixTimestamp64Micro({since:Int64}, 'UTC')"
_TO = "fromUnixTimestamp64Micro({until:Int64}, 'UTC')"


def sides_around(database: Database, at_us: int, length_us: int) -> Sides:
    """The spans of ``length_us`` before and after ``at_us``, as far as the store has come. Raises :class:`sql.database.StoreError`."""
    base = _base_window(database, [Span(at_us - length_us, at_us + length_us)])
    return around(at_us, length_us, base, _newest_batch(database, at_us - base))


def sides_of(database: Database, before: Span, after: Span) -> Sides:
    """Any two spans, as far as the store has come. Raises :class:`sql.database.StoreError`."""
    base = _base_window(database, [before, after])
    return two(before, after, base, _newest_batch(database, min(before.start_us, after.start_us) - base))


def load_sides(database: Database, sides: Sides, cut: Cut, semantics_version: int | None = None) -> tuple[Totals, Totals]:
    """Totals of both sides, as :func:`sql.change.compare` takes them. Raises :class:`sql.database.StoreError`."""

    def of(span: Span) -> Totals:
        return load(database, span.start_us, span.end_us, cut.by, semantics_version=semantics_version, prefixes=0)

    return of(sides.before), of(sides.after)


def _base_window(database: Database, spans: list[Span]) -> int:
    """Length of the windows that hold batches there, microseconds; the longest where they differ, 0 where there are none."""
    found = [
        database.query(
            f"SELECT max(window_us) FROM rank_windows FINAL WHERE batches > 0 AND window_end > {_FROM} AND window_start < {_TO}",
            {"since": span.start_us, "until": span.end_us},
        ).rows[0][0]
        for span in spans
    ]
    return max(int(each or 0) for each in found)


def _newest_batch(database: Database, since_us: int) -> int | None:
    """The newest engine time of any window that starts at ``since_us`` or later."""
    found = database.query(f"SELECT {_US}(max(last_batch)) FROM rank_windows WHERE window_start >= {_FROM}", {"since": since_us}).rows
    return None if found[0][0] is None else int(found[0][0])
