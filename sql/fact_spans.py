"""Which of the stored facts make up a span of a rank, and in which order.

The order is that of the places on the topic. A topic that was made anew (a broker that lost its log) counts them from 0 again, so
that one place stands for two messages; then the lives of the rank tell which of the topics each message was on.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.errors import KvcensusError
from schemas.records import rank_key
from schemas.topics import BATCHES
from sql.database import Database

_US = "toUnixTimestamp64Micro"


@dataclass(slots=True)
class Part:
    """Facts of one rank on one topic: places ``first`` to ``last`` of ``partition``, of ``lives`` alone (null: of all).

    ``base`` is added to a place so that places grow over all parts of the rank. ``batches`` stand there; ``since_us`` is the engine time of
    the first. ``declared``: whether the declaration that held before is to be told first.
    """

    instance_id: str
    dp_rank: int
    partition: int
    lives: tuple[str, ...] | None
    first: int = 0
    last: int = 0
    base: int = 0
    batches: int = 0
    since_us: int = 0
    declared: bool = False

    @property
    def key(self) -> str:
        """The rank as ``INSTANCE/R``."""
        return rank_key(self.instance_id, self.dp_rank)

    @property
    def condition(self) -> str:
        """SQL that holds for rows of this part's rank, partition and lives."""
        rank = "instance_id = {instance:String} AND dp_rank = {rank:Int32} AND partition = {partition:Int32}"
        return rank if self.lives is None else f"{rank} AND life_id IN {{lives:Array(String)}}"

    @property
    def parameters(self) -> dict[str, Any]:
        """What :attr:`condition` needs, and ``first`` and ``last``."""
        given: dict[str, Any] = {
            "instance": self.instance_id,
            "rank": self.dp_rank,
            "partition": self.partition,
            "first": self.first,
            "last": self.last,
        }
        return given if self.lives is None else {**given, "lives": list(self.lives)}


class _Life(NamedTuple):
    """What is stored of one life of a rank on one partition: its places, and when the forwarder saw its first batch."""

    life_id: str
    partition: int
    first_seen: int
    low: int
    high: int


def parts(database: Database, since_us: int | None, until_us: int | None, ranks: Iterable[str] | None = None) -> dict[str, list[Part]]:
    """The parts of each rank (``INSTANCE/R``) that has a batch at or after ``since_us`` and before ``until_us``, in their order.

    A rank ends with its first batch at or after ``until_us``, which proves the time up to there. Raises :class:`KvcensusError` for a rank
    that has nothing there, and where nothing tells the order.
    """
    wanted = None if ranks is None else set(ranks)
    ambiguous = _ambiguous(database)
    found: dict[str, list[Part]] = {}
    for (instance, rank), lives in _lives(database).items():
        key = rank_key(instance, rank)
        if wanted is not None and key not in wanted:
            continue
        chosen = _inside(database, _topics(instance, rank, lives, ambiguous), since_us, until_us)
        for part in chosen:
            _require_one_order(database, part)
        if chosen:
            found[key] = chosen
    unknown = (wanted or set()) - found.keys()
    if unknown:
        raise KvcensusError(f"no facts are stored of rank {', '.join(sorted(unknown))} in this span")
    return found


def _lives(database: Database) -> dict[tuple[str, int], list[_Life]]:
    """The lives of each rank, by when they were first seen."""
    rows = database.query(
        """
        SELECT instance_id, dp_rank, life_id, partition, toUnixTimestamp64Milli(min(observed_at)) AS seen, min(offset), max(offset)
        FROM batches
        GROUP BY instance_id, dp_rank, life_id, partition
        ORDER BY instance_id, dp_rank, seen, life_id, partition
        """
    ).rows
    found: dict[tuple[str, int], list[_Life]] = {}
    for instance, rank, *life in rows:
        found.setdefault((instance, rank), []).append(_Life(*life))
    return found


def _ambiguous(database: Database) -> set[tuple[str, int, int]]:
    """(instance, rank, partition) of which some place stands for two messages."""
    rows = database.query(
        "SELECT instance_id, dp_rank, partition FROM batches GROUP BY instance_id, dp_rank, partition "
        "HAVING uniqExact(offset) < uniqExact((offset, life_id, seq))"
    ).rows
    return {(instance, rank, partition) for instance, rank, partition in rows}


def _topics(instance: str, rank: int, lives: list[_Life], ambiguous: set[tuple[str, int, int]]) -> list[Part]:
    """The rank's stream cut where the topic was made anew: another partition, or places that begin again."""
    made: list[tuple[Part, list[str], int]] = []
    for life in lives:
        split = (instance, rank, life.partition) in ambiguous
        if made:
            part, names, high = made[-1]
            if part.partition == life.partition and (not split or life.low > high):
                names.append(life.life_id)
                made[-1] = part, names, max(high, life.high)
                continue
        part = Part(instance, rank, life.partition, None)
        if made:
            part.base = made[-1][0].base + made[-1][2] + 1
        made.append((part, [life.life_id], life.high))
    if len(made) > 1:
        for part, names, _ in made:
            part.lives = tuple(names)
    return [part for part, _, _ in made]


def _inside(database: Database, topics: list[Part], since_us: int | None, until_us: int | None) -> list[Part]:
    chosen: list[Part] = []
    for part in topics:
        beyond = _settle(database, part, since_us, until_us, begun=bool(chosen))
        if part.batches:
            chosen.append(part)
        if beyond:
            break
    return chosen


def _settle(database: Database, part: Part, since_us: int | None, until_us: int | None, *, begun: bool) -> bool:
    """Find where ``part`` begins and ends; whether the end of the span lies in it. Without a batch in the span it has none."""
    since = "1" if since_us is None or begun else f"{_US}(at) >= {{since:Int64}}"
    beyond = "0" if until_us is None else f"{_US}(at) >= {{until:Int64}}"
    bounds = {name: value for name, value in (("since", since_us), ("until", until_us)) if value is not None}
    inside, first, first_us, after, first_after, last = database.query(
        f"""
        SELECT
            countIf({since} AND NOT ({beyond})), minIf(offset, {since}), minIf({_US}(at), {since}),
            countIf({beyond}), minIf(offset, {beyond}), max(offset)
        FROM batches WHERE {part.condition}
        """,
        {**part.parameters, **bounds},
    ).rows[0]
    if not inside:
        return bool(after)
    part.since_us = first_us
    if since_us is not None and not begun:
        # What was said right before the first batch belongs to it: the reset and the declarations that stand there.
        part.first = _before(database, part, first) + 1
        part.declared = True
    part.last = first_after if after else max(last, _last_said(database, part))
    question = f"SELECT count() FROM batches FINAL WHERE {part.condition} AND offset BETWEEN {{first:Int64}} AND {{last:Int64}}"
    part.batches = database.query(question, part.parameters, final=True).rows[0][0]
    return bool(after)


def _before(database: Database, part: Part, offset: int) -> int:
    question = f"SELECT count(), max(offset) FROM batches WHERE {part.condition} AND offset < {{before:Int64}}"
    count, last = database.query(question, {**part.parameters, "before": offset}).rows[0]
    return int(last) if count else -1


def _last_said(database: Database, part: Part) -> int:
    return int(database.query(f"SELECT max(offset) FROM rank_messages WHERE {part.condition}", part.parameters).rows[0][0])


def _require_one_order(database: Database, part: Part) -> None:
    question = f"""
        SELECT uniqExact((offset, life_id, seq)), uniqExact(offset) FROM batches
        WHERE {part.condition} AND offset BETWEEN {{first:Int64}} AND {{last:Int64}}
    """
    messages, places = database.query(question, part.parameters).rows[0]
    if messages != places:
        raise KvcensusError(
            f"rank {part.key}: places of {BATCHES.name}[{part.partition}] stand for two messages each within one life: the topic was "
            "made anew meanwhile, and nothing tells the order of these facts; choose a span before or after"
        )
