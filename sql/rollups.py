"""Keeping the rollups right: what was touched since the last round is counted anew from the windows as they stand.

Every insert into the windows notes which windows of 5 minutes it touched (migration 0008). A round takes what was noted since the last
one, and once more what was noted :data:`SETTLED_S` ago: an insert notes the time at which it began and shows its rows when it ends, so a
round in between could have missed them. Rounds may repeat, overlap and be cut short anywhere: rows replace each other, the newer reading
wins, and the marks move only at the end of a round.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text and whole numbers

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sql import rollup_absent, rollup_duplicates, rollup_sql
from sql.database import Database
from sql.rollup_parts import GRAINS, Chunk, Grain, cut, leftovers

log = logging.getLogger("kvcensus.rollups")

SETTLED_S = 330
"""No insert takes longer: the client of the sink gives up before."""

_US = 1_000_000
_CELL, _HOUR, _DAY = (grain.seconds for grain in GRAINS)
_LAST_UNTIL = f"toInt64(ceil(toUnixTimestamp64Micro(max(until)) / {_US}))"
"""Of ``rollup_spans``: where the last of some rows ends, in whole seconds."""

_SOURCES = ("rank_windows", "duplicate_windows")
_FORGOTTEN_S = 6 * _DAY
"""What was touched is noted for 7 days: after so long without a round it is looked up in the windows themselves."""

_FORGIVEN_US = _DAY * _US
"""When the store's clock goes back, what was touched in so long before its new time is counted again."""

_SKEW_US = 10 * _US
"""So far the clocks of a cluster's nodes may differ: it is no step back."""

_AHEAD_US = _HOUR * _US
"""Versions then go on so far above the last round that ended: above those of any that was cut short after it."""

_RANKS_AT_ONCE = 1_000
"""Of so many ranks one hour is counted in one go, of fewer more, up to a day: what bounds the memory that a statement takes."""

_INSTANCES_TOLD_APART = 200
"""Where more of them were touched in an hour (or day), all are counted."""


@dataclass
class Round:
    """What one round did.

    ``windows`` of 5 minutes counted anew, by table. ``expired``: parts left as they had been counted, since retention took rows of theirs.
    ``absences``: windows of 5 minutes in which a rank was found missing, or no longer.
    """

    windows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SOURCES, 0))
    expired: int = 0
    absences: int = 0

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not any(self.windows.values())


Progress = Callable[[int, int], None]
"""Called with how many pieces of work are done, of how many."""


@dataclass
class _Touched:
    """Windows of 5 minutes by their starts, seconds, in ascending order, and the instances concerned (``None``: all)."""

    starts: tuple[int, ...]
    instances: tuple[str, ...] | None


def run(database: Database, progress: Progress | None = None, *, settled_s: float = SETTLED_S) -> Round:
    """One round. Raises :class:`sql.database.StoreError`; what was done stands, and the next round does the whole of it again.

    ``settled_s``: how long ago an insert that has not ended can have begun.
    """
    work = steps(database, settled_s=settled_s)
    while True:
        try:
            done, of = next(work)
        except StopIteration as end:
            result: Round = end.value
            return result
        if progress is not None:
            progress(done, of)


def steps(database: Database, *, settled_s: float = SETTLED_S) -> Generator[tuple[int, int], None, Round]:
    """One round in small steps, for who has something else to do in between: (pieces of work done, of how many) after each.

    Otherwise as :func:`run`. Left half way, it was a round cut short.
    """
    late_us = int(settled_s * _US)
    found, now_us = _marks(database), _now_us(database)
    marks = _marks_at(found, now_us)
    if _remember(database, marks, now_us, late_us):
        now_us = _now_us(database)
    now_us = max(now_us, marks.counted + 1)
    conditions = [f"(touched_at > {_time(marks.counted)} AND touched_at <= {_time(now_us)})"]
    if marks.began:
        log.warning("the store's clock has gone back by %.0f s or more: what was touched in the last day is counted again", marks.back_s)
        conditions.append(f"(touched_at > {_time(found['counted'])})")
    settling = now_us - late_us - marks.settled >= late_us
    if settling:  # not with every round, or each window would always be counted twice
        conditions.append(f"(touched_at > {_time(marks.settled)} AND touched_at <= {_time(now_us - late_us)})")
    version, highest = now_us, max(found.get("counted", 0), found.get("version", 0))
    if version <= highest:
        version = highest + (1 if "version" in found and found["version"] == highest else _AHEAD_US)
        database.insert("rollup_marks", ("name", "mark"), (["version"], [version]))  # at once: the next round must be above it
    work = _Work(database, " OR ".join(conditions), now_us, version)
    yield from work.steps()
    if not work.done.idle or settling:
        names = ["counted", "settled"] if settling else ["counted"]
        moved = [name + marks.epoch for name in names]
        database.insert("rollup_marks", ("name", "mark"), (moved, [now_us, now_us - late_us][: len(moved)]))
    return work.done


def touch(database: Database, since_us: int | None, until_us: int | None) -> None:
    """Have all windows that reach into [``since_us``, ``until_us``), engine time in microseconds, counted anew by the next round."""
    conditions = ["1"]
    if since_us is not None:
        conditions.append(f"window_end > {_time(since_us)}")
    if until_us is not None:
        conditions.append(f"window_start < {_time(until_us)}")
    for source in _SOURCES:
        _touch_rows(database, source, " AND ".join(conditions))


def _touch_rows(database: Database, source: str, condition: str) -> None:
    instance = "instance_id" if source == "rank_windows" else "''"
    database.command(
        f"""
        INSERT INTO rollup_touched
        SELECT DISTINCT '{source}', arrayJoin({cut(GRAINS[0])}), {instance}, now64(6) FROM {source} WHERE {condition}
        """
    )


def _time(us: int) -> str:
    return f"fromUnixTimestamp64Micro(toInt64({us}), 'UTC')"


def _now_us(database: Database) -> int:
    return int(database.query("SELECT toUnixTimestamp64Micro(now64(6))").rows[0][0])


def _marks(database: Database) -> dict[str, int]:
    return dict(database.query("SELECT toString(name), toUnixTimestamp64Micro(max(mark)) FROM rollup_marks GROUP BY name").rows)


@dataclass(frozen=True)
class _Marks:
    """How far the rounds have come, by the store's clock as it goes now.

    When that clock goes back, what is touched from then on lies before the marks. Until it has caught up there are others, whose names end
    in ``epoch``. ``began``: this round is the first of them.
    """

    counted: int
    settled: int
    epoch: str = ""
    began: bool = False
    back_s: float = 0.0
    known: bool = True


def _marks_at(marks: Mapping[str, int], now_us: int) -> _Marks:
    counted, settled = marks.get("counted", 0), marks.get("settled", 0)
    if now_us >= counted - _SKEW_US:
        return _Marks(counted, settled, known="counted" in marks)
    epoch = ""
    while now_us < (last := marks.get(f"counted{epoch}", 0)) - _SKEW_US:
        epoch, counted = f" before {last}", last
    back_s = (counted - now_us) / _US
    if f"counted{epoch}" not in marks:
        return _Marks(now_us - _FORGIVEN_US, now_us - _FORGIVEN_US, epoch, began=True, back_s=back_s)
    return _Marks(marks[f"counted{epoch}"], marks.get(f"settled{epoch}", now_us - _FORGIVEN_US), epoch, back_s=back_s)


def _remember(database: Database, marks: _Marks, now_us: int, late_us: int) -> bool:
    """Note again what may have been touched and is not noted (any more); whether that was to be done.

    Notes are kept for 7 days only; and an insert that ran while the schema was brought up to date may have begun before notes were taken.
    """
    settled = marks.settled
    if marks.known and now_us - settled < _FORGOTTEN_S * _US:
        return False
    since = f"inserted_at >= toDateTime({max(0, settled - late_us) // _US}, 'UTC')"
    for source in _SOURCES:
        _touch_rows(database, source, since)
        database.command(
            f"""
            INSERT INTO rollup_spans
            SELECT '{source}', toDateTime(intDiv(toUnixTimestamp64Micro(window_start), {_CELL * _US}) * {_CELL}, 'UTC') AS at,
                max(window_end)
            FROM {source} WHERE {since} GROUP BY at
            """
        )
    database.command(
        f"""
        INSERT INTO fleet_clock SELECT semantics_version, ifNull(max(last_batch), toDateTime64(0, 6, 'UTC'))
        FROM rank_windows WHERE {since} GROUP BY semantics_version
        """
    )
    return True


class _Work:
    """One round's work on what ``touched``, a condition on ``rollup_touched``, tells."""

    def __init__(self, database: Database, touched: str, now_us: int, version: int) -> None:
        self._database = database
        self._touched = touched
        self._now_us = now_us
        self._version = version
        self._finished = self._total = 0
        self.done = Round()

    def steps(self) -> Iterator[tuple[int, int]]:
        """All of it; how far it has come after each piece."""
        ranks = int(self._database.query("SELECT uniqExact(instance_id, dp_rank) FROM known_ranks").rows[0][0])
        length = min(24, max(1, _RANKS_AT_ONCE // max(1, ranks))) * _HOUR
        touched = {source: self._windows(source, length) for source in _SOURCES}
        if touched["rank_windows"]:
            touched["rank_windows"] += self._followers(touched["rank_windows"], length)
        self._total = sum(len(parts) for parts in touched.values())
        for source in _SOURCES:
            parts = sorted(touched[source], key=lambda part: part.starts)
            if not parts:
                continue
            duplicates = source == "duplicate_windows"
            yield from self._count(parts, duplicates)
            if not duplicates:
                changed: list[_Touched] = []
                for found in self._absences(min(part.starts[0] for part in parts)):
                    changed += found
                    yield self._finished, self._total
                parts += changed
            yield from self._roll_up(parts, duplicates)

    def _step(self) -> tuple[int, int]:
        self._finished += 1
        return self._finished, max(self._finished, self._total)

    # -- what there is to do ------------------------------------------------------------------------------------

    def _windows(self, source: str, length: int) -> list[_Touched]:
        """What was touched, in pieces of ``length`` seconds."""
        limit = _INSTANCES_TOLD_APART + 1
        rows = self._database.query(
            f"""
            SELECT arraySort(groupUniqArray(toUnixTimestamp(window_start))), groupUniqArray({limit})(toString(instance_id))
            FROM rollup_touched WHERE source = '{source}' AND ({self._touched})
            GROUP BY intDiv(toUnixTimestamp(window_start), {_DAY}), intDiv(toUnixTimestamp(window_start) % {_DAY}, {length})
            """
        ).rows
        ranks = source == "rank_windows"
        return [_Touched(tuple(starts), tuple(sorted(names)) if ranks and len(names) < limit else None) for starts, names in rows]

    def _followers(self, touched: Sequence[_Touched], length: int) -> list[_Touched]:
        """Windows that were their rank's first when they were counted, and no longer are: it was expected from their beginning."""
        first = min(part.starts[0] for part in touched)
        last = max(part.starts[-1] for part in touched)
        begun = f"""
            SELECT instance_id, dp_rank, min(first_window) AS first FROM known_ranks GROUP BY instance_id, dp_rank
            HAVING first >= toDateTime({first}, 'UTC') AND first < toDateTime({last + _CELL}, 'UTC')
        """
        if not int(self._database.query(f"SELECT count() FROM ({begun})").rows[0][0]):
            return []
        rows = self._database.query(
            f"""
            SELECT toUnixTimestamp(window_start) AS at, toString(instance_id)
            FROM (SELECT * FROM rank_rollups FINAL WHERE grain = '5m' AND windows > 0 AND window_start >= toDateTime({first}, 'UTC')) AS r
            INNER JOIN ({begun}) AS k ON k.instance_id = r.instance_id AND k.dp_rank = r.dp_rank
            GROUP BY window_start, r.instance_id, r.dp_rank, semantics_version
            HAVING any(k.first) < window_start
                AND toUnixTimestamp64Micro(max(expected_until)) - sum(expected_us) > toInt64(at) * {_US}
            """
        ).rows
        return _grouped(rows, length)

    # -- the windows of 5 minutes -------------------------------------------------------------------------------

    def _count(self, parts: Sequence[_Touched], duplicates: bool) -> Iterator[tuple[int, int]]:
        source = "duplicate_windows" if duplicates else "rank_windows"
        begun = self._reaching(source, parts[0].starts[0], parts[-1].starts[-1] + _CELL)
        expired = rollup_duplicates.expired_duplicates if duplicates else rollup_sql.expired_ranks
        for part in parts:
            reach = tuple(start for start, until in begun if start < part.starts[0] and until > part.starts[0])
            chunk = Chunk(part.starts, self._version, part.instances, reach)
            kept = int(self._database.query(f"SELECT count() FROM ({expired(chunk)})").rows[0][0])
            self.done.expired += kept
            self._fill(GRAINS[0], chunk, duplicates, kept=kept > 0)
            self.done.windows[source] += len(part.starts)
            yield self._step()

    def _reaching(self, source: str, first: int, end: int) -> list[rollup_absent.Span]:
        """Windows of 5 minutes in which rows begin that end in a later one, among those that lie before ``end`` and reach to ``first``."""
        rows = self._database.query(
            f"""
            SELECT toUnixTimestamp(window_start) AS start, {_LAST_UNTIL} AS over
            FROM rollup_spans WHERE source = '{source}' AND window_start < toDateTime({end}, 'UTC') AND until > toDateTime({first}, 'UTC')
            GROUP BY window_start HAVING over > toInt64(start) + {_CELL}
            """
        ).rows
        return [(int(start), int(until)) for start, until in rows]

    def _fill(self, grain: Grain, chunk: Chunk, duplicates: bool, *, kept: bool = False) -> None:
        fill = rollup_duplicates.duplicate_rollup if duplicates else rollup_sql.rank_rollup
        self._database.command(fill(grain, chunk, kept=kept))
        self._database.command(leftovers(grain, chunk, duplicates=duplicates))

    # -- who is missing -----------------------------------------------------------------------------------------

    def _absences(self, since: int) -> Iterator[list[_Touched]]:
        """Say who is missing from ``since`` on; where that changed, day by day."""
        spans = [
            (int(start), int(until))
            for start, until in self._database.query(
                f"""
                SELECT toUnixTimestamp(window_start), {_LAST_UNTIL} FROM rollup_spans
                WHERE source = 'rank_windows' AND until > toDateTime({since}, 'UTC') GROUP BY window_start
                """
            ).rows
        ]
        last = int(
            self._database.query(
                f"""
                SELECT {_LAST_UNTIL} FROM rollup_spans
                WHERE source = 'rank_windows' AND until <= toDateTime({since}, 'UTC')
                """
            ).rows[0][0]
        )
        for piece in rollup_absent.pieces(since, last or None, spans):
            found = rollup_absent.changes(piece, self._database.query(rollup_absent.seen(piece)).rows)
            if not found:
                yield []
                continue
            # Noted first: a round that is cut short before it has rolled them up leaves them to the next.
            noted = sorted({(each.start, each.instance_id) for each in found})
            self._database.insert(
                "rollup_touched",
                ("source", "window_start", "instance_id", "touched_at"),
                (
                    ["rank_windows"] * len(noted),
                    [start for start, _ in noted],
                    [name for _, name in noted],
                    [self._now_us + 1] * len(noted),
                ),
            )
            self._database.insert("rank_rollups", rollup_absent.COLUMNS, rollup_absent.columns(found, self._version))
            self.done.absences += len(found)
            yield _grouped(noted, _DAY)

    # -- longer windows -----------------------------------------------------------------------------------------

    def _roll_up(self, parts: Sequence[_Touched], duplicates: bool) -> Iterator[tuple[int, int]]:
        """The hours and days that ``parts`` lie in."""
        for grain in GRAINS[1:]:
            for starts, names in _by_day(parts, grain):
                instances = None if duplicates or names is None or len(names) > _INSTANCES_TOLD_APART else tuple(sorted(names))
                self._fill(grain, Chunk(tuple(sorted(starts)), self._version, instances), duplicates)
                yield self._finished, self._total


def _by_day(parts: Iterable[_Touched], grain: Grain) -> Iterator[tuple[set[int], set[str] | None]]:
    """The windows of ``grain`` that ``parts`` lie in, those of each day together, and whose (``None``: all)."""
    days: dict[int, tuple[set[int], set[str] | None]] = {}
    for part in parts:
        for start in part.starts:
            starts, names = days.get(start // _DAY, (set(), set()))
            starts.add(start - start % grain.seconds)
            named = None if names is None or part.instances is None else names | set(part.instances)
            days[start // _DAY] = starts, named
    for _, found in sorted(days.items()):
        yield found


def _grouped(windows: Iterable[tuple[int, str]], length: int) -> list[_Touched]:
    """(start, instance) as pieces of ``length`` seconds, none across two days."""
    found: dict[tuple[int, int], tuple[set[int], set[str]]] = {}
    for start, name in windows:
        starts, names = found.setdefault((start // _DAY, start % _DAY // length), (set(), set()))
        starts.add(start)
        names.add(name)
    return [
        _Touched(tuple(sorted(starts)), tuple(sorted(names)) if len(names) <= _INSTANCES_TOLD_APART else None)
        for _, (starts, names) in sorted(found.items())
    ]


__all__: Sequence[str] = ("SETTLED_S", "Progress", "Round", "run", "steps", "touch")
