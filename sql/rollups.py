"""Keeping the rollups right: what was touched since the last round is counted anew from the windows as they stand.

Every insert into the windows notes which windows of 5 minutes it touched (migration 0008). A round takes what was noted since the last
one, and once more what was noted :data:`SETTLED_S` ago: an insert notes the time at which it began and shows its rows when it ends, so a
round in between could have missed them. Rounds may repeat, overlap and be cut short anywhere: rows replace each other, the newer reading
wins, and the marks move only at the end of a round.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sql import rollup_sql
from sql.database import Database
from sql.rollup_sql import GRAINS, Chunk, Grain

SETTLED_S = 330
"""No insert takes longer: the client of the sink gives up before."""

_US = 1_000_000
_HOUR_US = 3_600 * _US
_SOURCES = ("rank_windows", "duplicate_windows")


@dataclass
class Round:
    """What one round did: ``windows`` of 5 minutes counted anew, by table, and ``expired`` ones left as they were counted before."""

    windows: dict[str, int]
    expired: int = 0

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not any(self.windows.values())


Progress = Callable[[int, int], None]
"""Called with how many pieces of work are done, of how many."""


def run(database: Database, progress: Progress | None = None) -> Round:
    """One round. Raises :class:`sql.database.StoreError`; what was done stands, and the next round does the whole of it again."""
    now_us = int(database.query("SELECT toUnixTimestamp64Micro(now64(6))").rows[0][0])
    marks: dict[str, int] = dict(
        database.query("SELECT toString(name), toUnixTimestamp64Micro(max(mark)) FROM rollup_marks GROUP BY name").rows
    )
    settled_us = now_us - SETTLED_S * _US
    fresh = f"touched_at > {_time(marks.get('counted', 0))} AND touched_at <= {_time(now_us)}"
    again = f"touched_at > {_time(marks.get('settled', 0))} AND touched_at <= {_time(settled_us)}"
    done = _count(database, f"(({fresh}) OR ({again}))", now_us, progress)
    if not done.idle or now_us - marks.get("counted", 0) > SETTLED_S * _US:
        database.insert("rollup_marks", ("name", "mark"), (["counted", "settled"], [now_us, settled_us]))
    return done


def touch(database: Database, since_us: int, until_us: int) -> None:
    """Have all windows that reach into [``since_us``, ``until_us``), engine time in microseconds, counted anew by the next round."""
    five = GRAINS[0]
    for source in _SOURCES:
        instance = "instance_id" if source == "rank_windows" else "''"
        database.command(
            f"""
            INSERT INTO rollup_touched
            SELECT DISTINCT '{source}', arrayJoin({rollup_sql.cut(five)}), {instance}, now64(6) FROM {source}
            WHERE window_start < {_time(until_us)} AND window_end > {_time(since_us)}
            """
        )


def _time(us: int) -> str:
    return f"fromUnixTimestamp64Micro(toInt64({us}), 'UTC')"


def _count(database: Database, touched: str, version: int, progress: Progress | None) -> Round:
    hours = {source: _hours(database, source, touched) for source in _SOURCES}
    total, finished = sum(len(each) for each in hours.values()), 0
    done = Round(dict.fromkeys(_SOURCES, 0))
    if not total:
        return done
    longest = int(database.query("SELECT max(longest_us) FROM fleet_clock").rows[0][0])
    for source in _SOURCES:
        duplicates = source == "duplicate_windows"
        key = "window_start" if duplicates else "window_start, instance_id"
        for start_us, windows in hours[source]:
            chosen = f"SELECT {key} FROM rollup_touched WHERE source = '{source}' AND {touched}"
            chunk = Chunk(start_us, start_us + _HOUR_US, chosen, version, longest)
            kept = database.query(rollup_sql.expired(chunk, duplicates=duplicates)).rows
            if kept:
                done.expired += len(kept)
                chosen += f" AND ({key}) NOT IN ({rollup_sql.expired(chunk, duplicates=duplicates)})"
                chunk = Chunk(start_us, start_us + _HOUR_US, chosen, version, longest)
            _fill(database, GRAINS[0], chunk, duplicates)
            done.windows[source] += windows
            finished += 1
            if progress is not None:
                progress(finished, total)
        for grain in GRAINS[1:]:
            for start_us in sorted({start - start % grain.us for start, _ in hours[source]}):
                _fill(database, grain, _coarser(grain, start_us, version, duplicates), duplicates)
    return done


def _hours(database: Database, source: str, touched: str) -> list[tuple[int, int]]:
    """Hours with windows to count, as (start, how many windows)."""
    rows = database.query(
        f"""
        SELECT intDiv(toUnixTimestamp(window_start), 3600) * {_HOUR_US} AS hour, uniqExact(window_start, instance_id)
        FROM rollup_touched WHERE source = '{source}' AND {touched}
        GROUP BY hour ORDER BY hour
        """
    ).rows
    return [(int(hour), int(windows)) for hour, windows in rows]


def _coarser(grain: Grain, start_us: int, version: int, duplicates: bool) -> Chunk:
    """The window of ``grain`` at ``start_us``, of what its finer windows were counted for in this round."""
    table = "duplicate_rollups" if duplicates else "rank_rollups"
    at = f"toDateTime(intDiv(toUnixTimestamp(window_start), {grain.seconds}) * {grain.seconds}, 'UTC')"
    key = at if duplicates else f"{at}, instance_id"
    within = f"window_start >= toDateTime({start_us // _US}, 'UTC') AND window_start < toDateTime({(start_us + grain.us) // _US}, 'UTC')"
    return Chunk(
        start_us,
        start_us + grain.us,
        f"SELECT DISTINCT {key} FROM {table} FINAL WHERE grain = '{grain.finer}' AND {within} AND version = {version}",
        version,
    )


def _fill(database: Database, grain: Grain, chunk: Chunk, duplicates: bool) -> None:
    for statement in _statements(grain, chunk, duplicates):
        database.command(statement)


def _statements(grain: Grain, chunk: Chunk, duplicates: bool) -> Iterator[str]:
    if duplicates:
        yield rollup_sql.duplicate_rollup(grain, chunk)
        yield rollup_sql.leftovers("duplicate_rollups", grain, chunk)
        return
    yield rollup_sql.rank_rollup(grain, chunk)
    yield rollup_sql.leftovers("rank_rollups", grain, chunk)
    if grain.finer is None:
        yield rollup_sql.absent_ranks(chunk)


__all__: Sequence[str] = ("SETTLED_S", "Progress", "Round", "run", "touch")
