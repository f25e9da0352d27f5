"""The stored facts as the messages they were: rank by rank in the order of their places, in bounded memory.

What counting does not look at is not read back: adapters, extra keys, session and ownership of a block.
"""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from schemas.records import (
    ID_BYTES,
    NO_ID,
    Batch,
    Declaration,
    Departure,
    HolderReset,
    IdentityRefused,
    Loss,
    Op,
    RankMessage,
    Refusal,
    Scrape,
)
from schemas.topics import BATCHES
from sql.database import Database
from sql.fact_rows import read_empty_events
from sql.fact_spans import Part, parts

CHUNK_BATCHES = 2_000
"""Batches of one rank that are looked up at a time."""

CHUNK_BLOCKS = 400_000
"""Blocks in memory at a time, over all ranks; a single batch may bring more."""

_LEAST_CHUNK = 4_000
_US = "toUnixTimestamp64Micro"
_KINDS: Mapping[str, Any] = {"store": "STORE", "evict": "REMOVE", "clear": "CLEAR"}

_BODIES: Mapping[str, type[Any]] = {
    "holder_reset": HolderReset,
    "loss": Loss,
    "refusal": Refusal,
    "declaration": Declaration,
    "identity_refused": IdentityRefused,
    "scrape": Scrape,
    "departure": Departure,
}


class Fact(NamedTuple):
    """One message of a rank and its place on the topic; ``message`` null: one that could not be read, and was set aside."""

    instance_id: str
    dp_rank: int
    offset: int
    message: RankMessage | None


@dataclass(slots=True)
class Facts:
    """The facts of ``ranks`` (``INSTANCE/R``), to be read once.

    ``missing``: batches of each rank whose blocks are no longer all there, so far. They are left out, which leaves a gap in the stream.
    """

    database: Database
    ranks: dict[str, list[Part]]
    missing: dict[str, int] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """How many batches there are to read."""
        return sum(part.batches for some in self.ranks.values() for part in some)

    def __iter__(self) -> Iterator[Fact]:
        """All of them, each rank in its order, the ranks side by side in engine time."""
        blocks = max(CHUNK_BLOCKS // max(len(self.ranks), 1), _LEAST_CHUNK)
        streams = (self._in_time(number, some, blocks) for number, some in enumerate(self.ranks.values()))
        return (fact for _, _, fact in heapq.merge(*streams))

    def _in_time(self, number: int, some: Sequence[Part], blocks: int) -> Iterator[tuple[int, tuple[int, int], Fact]]:
        """Facts of one rank with the engine time reached, which never goes back; the number makes ties definite."""
        reached, turn = some[0].since_us, 0
        for part in some:
            for fact in self._of_part(part, blocks):
                if fact.message is not None:
                    reached = max(reached, fact.message.at_us)
                turn += 1
                yield reached, (number, turn), fact

    def _of_part(self, part: Part, blocks: int) -> Iterator[Fact]:
        if part.declared:
            yield from _declared_before(self.database, part)
        after = part.first - 1
        while after < part.last:
            heads = _heads(self.database, part, after)
            upto = heads[-1].offset if len(heads) == CHUNK_BATCHES else part.last
            others = _others(self.database, part, after, upto)
            yield from heapq.merge(self._batches(part, heads, blocks), others, key=lambda fact: fact.offset)
            after = upto

    def _batches(self, part: Part, heads: Sequence[_Head], blocks: int) -> Iterator[Fact]:
        for some in _portions(heads, blocks):
            events = _events(self.database, part, some)
            for head in some:
                ops = read_empty_events(head.empty_events)
                found = events.get((head.life_id, head.seq), [])
                if sum(blocks for _, blocks, _ in found) != head.blocks:
                    self.missing[part.key] = self.missing.get(part.key, 0) + 1
                    continue
                ops |= {index: op for index, _, op in found}
                batch = Batch([ops[index] for index in sorted(ops)], head.unknown_events, head.unresolved_blocks)
                yield Fact(part.instance_id, part.dp_rank, part.base + head.offset, head.message(part, batch))


class _Head(NamedTuple):
    """A row of ``batches``."""

    offset: int
    life_id: str
    seq: int
    at_us: int
    observed_at_ms: int
    incarnation: str
    skipped: int
    unknown_events: int
    unresolved_blocks: int
    blocks: int
    empty_events: str

    def message(self, part: Part, batch: Batch) -> RankMessage:
        """The message that brought ``batch``."""
        return RankMessage(
            part.instance_id,
            part.dp_rank,
            self.life_id,
            self.seq,
            self.at_us,
            self.observed_at_ms,
            self.incarnation,
            batch=batch,
            skipped=self.skipped,
        )


def facts(database: Database, *, since_us: int | None = None, until_us: int | None = None, ranks: Iterable[str] | None = None) -> Facts:
    """What is stored of ``ranks`` (``INSTANCE/R``; null: all), each from its first batch at or after ``since_us``.

    Each rank is read through its first batch at or after ``until_us``, which proves the time up to there (engine microseconds; null: all
    there is). Raises :class:`KvcensusError` as :func:`sql.fact_spans.parts` does.
    """
    return Facts(database, parts(database, since_us, until_us, ranks))


def _said(part: Part, row: Sequence[Any]) -> Fact:
    offset, kind, life_id, seq, at_us, observed_at_ms, incarnation, skipped, body = row
    said = {kind: msgspec.json.decode(body, type=_BODIES[kind])} if kind in _BODIES else {}
    message = RankMessage(part.instance_id, part.dp_rank, life_id, seq, at_us, observed_at_ms, incarnation, skipped=skipped, **said)
    return Fact(part.instance_id, part.dp_rank, part.base + offset, message)


_SAID = f"offset, kind, life_id, seq, {_US}(at), toUnixTimestamp64Milli(observed_at), incarnation, skipped, body"


def _declared_before(database: Database, part: Part) -> list[Fact]:
    """The declaration in force where reading begins in the middle, if one is stored."""
    question = f"""
        SELECT {_SAID} FROM rank_messages FINAL
        WHERE {part.condition} AND kind = 'declaration' AND offset < {{first:Int64}} ORDER BY offset DESC LIMIT 1
    """
    return [_said(part, row) for row in database.query(question, part.parameters, final=True).rows]


_SPAN = "offset > {after:Int64} AND offset <= {last:Int64}"


def _heads(database: Database, part: Part, after: int) -> list[_Head]:
    question = f"""
        SELECT offset, life_id, seq, {_US}(at), toUnixTimestamp64Milli(observed_at), incarnation, skipped, unknown_events,
            unresolved_blocks, blocks, empty_events
        FROM batches FINAL
        WHERE {part.condition} AND {_SPAN}
        ORDER BY offset LIMIT {CHUNK_BATCHES}
    """
    return [_Head(*row) for row in database.query(question, {**part.parameters, "after": after}, final=True).rows]


def _others(database: Database, part: Part, after: int, upto: int) -> list[Fact]:
    """What is no batch behind ``after`` and up to ``upto``, with what could not be read there, by place."""
    parameters = {**part.parameters, "after": after, "last": upto}
    said = f"SELECT {_SAID} FROM rank_messages FINAL WHERE {part.condition} AND {_SPAN} ORDER BY offset"
    found = [_said(part, row) for row in database.query(said, parameters, final=True).rows]
    if part.lives is None:  # else nobody can say on which of the topics a message was that could not be read
        aside = f"""
            SELECT DISTINCT offset FROM dead_letters
            WHERE topic = {{topic:String}} AND partition = {{partition:Int32}} AND key = {{key:String}} AND {_SPAN}
                AND offset NOT IN (SELECT offset FROM batches WHERE {part.condition} AND {_SPAN})
                AND offset NOT IN (SELECT offset FROM rank_messages WHERE {part.condition} AND {_SPAN})
        """
        rows = database.query(aside, {**parameters, "topic": BATCHES.name, "key": part.key}).rows
        found += [Fact(part.instance_id, part.dp_rank, part.base + row[0], None) for row in rows]
    return sorted(found, key=lambda fact: fact.offset)


def _portions(heads: Sequence[_Head], blocks: int) -> Iterator[Sequence[_Head]]:
    """``heads`` in portions of about ``blocks`` blocks."""
    start = held = 0
    for number, head in enumerate(heads):
        if number > start and held + head.blocks > blocks:
            yield heads[start:number]
            start, held = number, 0
        held += head.blocks
    if start < len(heads):
        yield heads[start:]


_Events = dict[tuple[str, int], list[tuple[int, int, Op]]]


def _events(database: Database, part: Part, heads: Sequence[_Head]) -> _Events:
    """(life, seq) to the events of the batch: index, rows and event."""
    lives: dict[str, list[_Head]] = {}
    for head in heads:
        if head.blocks:
            lives.setdefault(head.life_id, []).append(head)
    found: _Events = {}
    for life_id, some in lives.items():
        for row in _event_rows(database, part, life_id, some):
            found.setdefault((life_id, row[0]), []).append((row[1], row[2], _op(row[3:])))
    return found


def _event_rows(database: Database, part: Part, life_id: str, heads: Sequence[_Head]) -> list[tuple[Any, ...]]:
    seqs, times = [head.seq for head in heads], [head.at_us for head in heads]
    # Only hours and sequence numbers that lie in the key narrow the reading; the rest is settled by the caller.
    question = f"""
        SELECT
            seq, event_index, count(),
            any(kind), any(group_idx), any(tier), any(locality), any(n_tokens), any(spec_kind), any(reused),
            anyIf(parent_id, block_index = 0), anyIf(parent_unknown, block_index = 0), anyIf(parent_content_id, block_index = 0),
            arraySort(groupArray((block_index, block_id, ifNull(content_id, toFixedString('', {ID_BYTES})))))
        FROM block_events FINAL
        WHERE instance_id = {{instance:String}} AND dp_rank = {{rank:Int32}} AND life_id = {{life:String}}
            AND seq BETWEEN {{low:Int64}} AND {{high:Int64}}
            AND toStartOfHour(at) BETWEEN toStartOfHour(fromUnixTimestamp64Micro({{since:Int64}}, 'UTC'))
                AND toStartOfHour(fromUnixTimestamp64Micro({{until:Int64}}, 'UTC'))
        GROUP BY seq, event_index
        ORDER BY seq, event_index
    """
    parameters = {
        "instance": part.instance_id,
        "rank": part.dp_rank,
        "life": life_id,
        "low": min(seqs),
        "high": max(seqs),
        "since": min(times),
        "until": max(times),
    }
    return database.query(question, parameters, final=True).rows


def _op(row: Sequence[Any]) -> Op:
    """The event of one row of :func:`_event_rows`, from its kind on."""
    kind, group_idx, tier, locality, n_tokens, spec_kind, reused, parent_id, parent_unknown, parent_content, blocks = row
    word = _KINDS.get(kind, kind)
    if word == "CLEAR":
        return Op("CLEAR", group_idx, tier, locality)
    contents = [content for _, _, content in blocks]
    known = any(content != NO_ID for content in contents)
    return Op(
        word,
        group_idx,
        tier,
        locality,
        n_tokens,
        b"".join([block_id for _, block_id, _ in blocks]),
        b"".join(contents) if known else b"",
        "CONTENT" if parent_content is not None else "UNKNOWN" if parent_id is not None or parent_unknown or word != "STORE" else "ROOT",
        parent_content,
        spec_kind,
        None,
        reused,
        parent_id,
    )
