"""Records of any producer of the contract as our facts. Pure: rows in, facts out.

The contract has a record for each block and names neither process lives nor batches; here is what stands for them:

- consecutive records of a rank with one ``seq`` (or, without numbers, one ``at_ms``) are a batch;
- a life is what lies between two ``holder_reset`` of one incarnation: its name is made of those;
- where every cache record of an instance has a number, numbers name the batches, and a missing one is a loss. Elsewhere the place of
  a batch (segment, record) names it, and whatever tells of a loss without a range becomes a refusal: the stretch counts as unobserved;
- an id that is not 32 hexadecimal digits becomes a digest of its text: equal where the text is equal.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from producers.segments.contract import CACHE_KINDS, Endpoint, Row
from producers.segments.shape import Fact
from producers.segments.survey import REMEMBERED, Survey
from schemas.records import (
    NO_ID,
    NO_SEQ,
    Batch,
    Declaration,
    Departure,
    HolderReset,
    IdentityRefused,
    Lifecycle,
    Loss,
    Op,
    RankMessage,
    Refusal,
    ReuseReporting,
)

__all__ = ["CUT", "DROPPED", "MISSING_SEGMENTS", "SEGMENTS_DROPPED", "UNSEQUENCED", "ForeignRun", "Survey", "foreign_id"]

_PERSON = b"kvcensus-foreign"
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SEGMENT_SHIFT = 32
_KNOWN_BLOCKS = 2_000_000

DROPPED = "messages were dropped"
"""Reason of a refusal: by a producer's counters, messages did not get through since it was heard of before."""
MISSING_SEGMENTS = "segments are missing"
"""Reason of a refusal, with the numbers behind it: nobody handed these segments over, and no record says why."""
SEGMENTS_DROPPED = "segments were dropped by their producer"
"""Reason of a refusal, with the incarnation and numbers behind it: the producer says so."""
CUT = "a recovered segment was cut"
"""Reason of a refusal, with the bytes behind it: its writer died, and so much of it could not be read."""
UNSEQUENCED = "recovered records that belong to no sequence"
"""Reason of a refusal: nothing says that between two records of such a segment nothing was lost."""

_LABELS = ("gpu", "vllm_version", "event_schema_version")
_KINDS: dict[str, Literal["start", "heartbeat", "stop"]] = {"agent_start": "start", "heartbeat": "heartbeat", "agent_stop": "stop"}

Rank = tuple[str, int]


def foreign_id(text: str) -> bytes:
    """16 bytes for an id of another producer: its own if it is 32 lower-case hexadecimal digits, else an unkeyed digest of the text."""
    if _HEX.fullmatch(text):
        found = bytes.fromhex(text)
        if found != NO_ID:
            return found
    return hashlib.blake2b(text.encode(), digest_size=len(NO_ID), person=_PERSON).digest()


@dataclass
class _Building:
    """An op whose ids are joined once, when its batch ends."""

    op: Op
    blocks: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def add(self, block_id: bytes, content: bytes, keys: bytes = b"") -> None:
        self.blocks.append(block_id)
        self.contents.append(content)
        self.keys.append(keys)

    def end(self) -> Op:
        op = self.op
        op.block_ids = b"".join(self.blocks)
        op.content_ids = b"".join(self.contents) if any(content != NO_ID for content in self.contents) else b""
        op.extra_keys = self.keys if any(self.keys) else []
        return op


@dataclass
class _State:
    """One rank in one run."""

    rank: Rank
    life_id: str
    numbered: bool
    boundary_us: int = -1
    expected: int | None = None
    ops: list[_Building] = field(default_factory=list)
    batch_key: tuple[str, float] | None = None
    seq: int = 0
    position: int = 0
    at_us: int = 0
    newest_us: int = 0
    lossy: bool = False
    broken: str | None = None
    last_number: int | None = None
    declared: Declaration | None = None
    contents: dict[bytes, bytes] = field(default_factory=dict)
    stored: int = 0
    removed: int = 0
    unresolved: int = 0
    unresolved_now: int = 0


class ForeignRun:
    """One incarnation of a producer (or one segment without an owner), its segments in order, as facts.

    ``name`` is its incarnation. ``survey`` has seen every record that will be fed. With ``sequenced`` False its records belong to no
    sequence: nothing says that between two of them nothing was lost.
    """

    def __init__(self, name: str, survey: Survey, *, sequenced: bool = True) -> None:
        self.name = name
        self._survey = survey
        self._sequenced = sequenced
        self._states: dict[Rank, _State] = {}
        self._lives: set[tuple[Rank, str]] = set()
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._segment_seq: int | None = None
        self._position = 0
        self._beats = 0
        self._observed_ms = 0
        self._opened: Row | None = None
        self._canary = survey.canary
        self._reuse = survey.reuse_reporting
        self._version = ""

    def segment(self, rows: Iterable[Row], segment_seq: int | None) -> Iterator[Fact]:
        """The facts of the next segment; what is still open at its end comes with the next one, or with :meth:`end`."""
        if segment_seq is not None:
            if self._segment_seq is not None and segment_seq > self._segment_seq + 1:
                yield from self.end()
                self._break(None, f"{MISSING_SEGMENTS}: {self._segment_seq + 1} to {segment_seq - 1}")
            self._segment_seq = segment_seq
        for position, row in enumerate(rows, 1):
            self._position = position
            yield from self.row(row)

    def row(self, row: Row) -> Iterator[Fact]:
        """The facts that one record completes."""
        if row.kind in CACHE_KINDS:
            yield from self._cache(row)
        elif row.kind == "segment_open":
            before, after = self._declaration(), self._declaration(row)
            if before != after:
                yield from self.end()  # what is open was recorded under the declaration before
            self._opened = row
            self._observed_ms = int(row.at_ms)
        elif row.kind == "holder_reset":
            yield from self._reset(row)
        elif row.kind == "identity_refused":
            yield from self._identity_refused(row)
        elif row.kind in _KINDS:
            self._observed_ms = int(row.at_ms)
            yield from self._lifecycle(row)
        elif row.kind == "segments_dropped":
            yield from self._segments_dropped(row)
        elif row.kind == "segment_recovered":
            self._observed_ms = int(row.at_ms)
            if row.dropped_bytes:
                yield from self.end()
                self._break(None, f"{CUT}: {row.dropped_bytes} bytes")

    def end(self) -> Iterator[Fact]:
        """What was still open."""
        for state in self._states.values():
            yield from self._flush(state)

    # -- cache records

    def _cache(self, row: Row) -> Iterator[Fact]:
        instance = cast(str, row.instance_id)
        if row.seq is not None:
            seen = self._seen[instance]
            seen.add(row.seq)
            if len(seen) > 2 * REMEMBERED:
                self._seen[instance] = set(sorted(seen)[REMEMBERED:])
        # A clear that names no rank is one of all ranks of the instance.
        everyone = row.kind == "clear" and row.dp_rank is None
        ranks = sorted(self._survey.ranks[instance]) if everyone else [row.dp_rank or 0]
        for dp_rank in ranks:
            state = self._state((instance, dp_rank))
            key = ("seq", float(row.seq)) if row.seq is not None else ("at", row.at_ms)
            if state.ops and key != state.batch_key:
                yield from self._flush(state)
            if not state.ops:
                state.batch_key = key
                state.seq = -1 if row.seq is None else row.seq
                state.position = self._position
                if self._segment_seq is not None:
                    state.position += self._segment_seq << _SEGMENT_SHIFT
                state.at_us = round(row.at_ms * 1_000)
                state.lossy = not state.numbered and (not self._sequenced or self._is_lossy(instance))
            self._op(state, row)

    def _op(self, state: _State, row: Row) -> None:
        tier = row.tier.upper() if row.tier else None
        locality = row.locality.upper() if row.locality else None
        last = state.ops[-1] if state.ops else None
        if row.kind == "clear":
            state.ops.append(_Building(Op("CLEAR", row.group_idx, tier, locality)))
            return
        block_id = foreign_id(cast(str, row.block_id))
        content = NO_ID if row.content_id is None else foreign_id(row.content_id)
        if row.kind == "evict":
            state.removed += 1
            place = (row.group_idx or 0, tier, locality)
            if last is None or last.op.kind != "REMOVE" or (last.op.group_idx, last.op.tier, last.op.locality) != place:
                last = _Building(Op("REMOVE", *place))
                state.ops.append(last)
            last.add(block_id, content)
            return
        state.stored += 1
        if row.content_id is None:
            if locality != "REMOTE":
                state.unresolved += 1
                state.unresolved_now += 1
        else:
            if len(state.contents) >= _KNOWN_BLOCKS:
                state.contents.clear()
            state.contents[block_id] = content
        parent = None if row.parent_id is None else foreign_id(row.parent_id)
        op = Op(
            "STORE",
            row.group_idx or 0,
            tier,
            locality,
            row.n_tokens or 0,
            spec_kind=row.spec_kind,
            lora_name=row.lora_name,
            reused=bool(row.reused),
            lora_id=row.lora_id,
            spec_sliding_window=row.spec_sliding_window,
        )
        keys = b"".join([foreign_id(key) for key in row.extra_keys or ()])
        if last is not None and _goes_on(last, op, parent):
            last.add(block_id, content, keys)
            return
        op.parent_block_id = parent
        if parent is None:
            op.parent_state = "UNKNOWN" if row.parent_unknown else "ROOT"
        elif not row.parent_unknown and parent in state.contents:
            op.parent_state, op.parent_content_id = "CONTENT", state.contents[parent]
        state.ops.append(_Building(op))
        state.ops[-1].add(block_id, content, keys)

    def _flush(self, state: _State) -> Iterator[RankMessage]:
        """The batch that is open for a rank, if any, behind whatever has to be said before it."""
        if not state.ops:
            return
        if state.numbered and state.expected is not None and state.seq < state.expected and state.at_us > state.newest_us:
            # Numbers fell while time went on, and no reset was told: what becomes of the blocks is not known, but it is another life.
            self._begin_life(state, f"fell-{state.at_us}")
        yield from self._declare(state)
        missing: list[tuple[int, int]] = []
        if state.seq >= 0:
            if state.last_number is not None and state.seq > state.last_number + 1:
                missing = self._missing(state, state.last_number + 1, state.seq - 1)
            state.last_number = max(state.seq, state.last_number or 0)
        reason = self._unobserved(state, missing=bool(missing))
        if reason is not None:
            yield self._message(state, refusal=Refusal(reason, 0), seq=NO_SEQ)
        seq, skipped = state.seq, 0
        if state.numbered:
            expected = state.expected
            for first, last in missing:
                yield self._message(state, loss=Loss(first, last, "missing in the segments"), seq=last + 1)
                expected = last + 1
            if expected is not None:
                skipped = max(seq - expected, 0)
        else:
            seq = state.position
            if state.expected is not None:
                skipped = max(seq - state.expected, 0)
        state.newest_us = max(state.newest_us, state.at_us)
        batch = Batch([building.end() for building in state.ops], unresolved_blocks=state.unresolved_now)
        message = self._message(state, batch=batch, seq=seq, skipped=skipped)
        message.at_us = state.at_us
        yield message
        state.expected = max(state.expected or 0, seq + 1)
        state.ops, state.broken, state.unresolved_now = [], None, 0
        if state.lossy:
            state.broken = DROPPED if self._sequenced else None

    def _unobserved(self, state: _State, *, missing: bool) -> str | None:
        """Why the stretch before the batch that is open does not count as observed, where nothing else says so.

        Numbers say themselves what is missing, and where; but not before the first of them.
        """
        if state.numbered:
            before = state.expected is None and state.seq > 0 and (state.broken or "").startswith(SEGMENTS_DROPPED)
            return state.broken if before else None
        if state.broken is not None or state.expected is None or not (state.lossy or missing):
            return state.broken
        return DROPPED if self._sequenced else UNSEQUENCED

    def _missing(self, state: _State, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of ``first`` to ``last`` that no rank had, where the ranks number together; else all of it."""
        if not self._survey.shared(state.rank[0]):
            return [(first, last)]
        others = sorted(number for number in self._seen[state.rank[0]] if first <= number <= last)
        ranges = []
        for number in [*others, last + 1]:
            if number > first:
                ranges.append((first, number - 1))
            first = number + 1
        return ranges

    # -- other records

    def _reset(self, row: Row) -> Iterator[Fact]:
        instance, boundary = cast(str, row.instance_id), round(cast(float, row.boundary_ms) * 1_000)
        ranks = [row.dp_rank] if row.dp_rank is not None else sorted(self._survey.ranks[instance])
        for dp_rank in ranks:
            known = (instance, dp_rank) in self._states
            state = self._state((instance, dp_rank))
            yield from self._flush(state)
            if known and state.boundary_us == boundary:
                continue  # the same restart, told for another group
            state.boundary_us = boundary
            self._begin_life(state, str(boundary))
            reset = HolderReset(boundary, row.reason or "the producer saw the engine restart")
            yield self._message(state, holder_reset=reset, seq=row.seq or 0)
            state.newest_us = 0

    def _begin_life(self, state: _State, since: str) -> None:
        life_id = self._life_id(state.rank, since)
        while (state.rank, life_id) in self._lives:
            life_id += "+"
        self._lives.add((state.rank, life_id))
        state.life_id = life_id
        state.expected = state.last_number = None
        state.contents.clear()
        state.broken = None

    def _identity_refused(self, row: Row) -> Iterator[Fact]:
        state = self._state((cast(str, row.instance_id), row.dp_rank or 0))
        yield from self._flush(state)
        refused = IdentityRefused(
            row.group_idx or 0,
            row.refused or 0,
            round((row.window_start_ms or 0) * 1_000),
            round((row.window_end_ms or 0) * 1_000),
        )
        yield from self._declare(state)
        yield self._message(state, identity_refused=refused)

    def _lifecycle(self, row: Row) -> Iterator[Fact]:
        yield from self.end()
        self._canary = row.canary or self._canary
        self._reuse = row.reuse_reporting or self._reuse
        self._version = row.agent_version or self._version
        if row.kind != "agent_start":
            for instance in self._survey.lossy.get(self._beats, ()):
                self._break(instance or None, DROPPED)
            self._beats += 1
        for instance in sorted(self._survey.ranks):
            ranks = sorted(self._survey.ranks[instance])
            endpoints = [endpoint for endpoint in row.endpoints or () if endpoint.source == instance]
            for index, dp_rank in enumerate(ranks):
                state = self._state((instance, dp_rank))
                yield from self._declare(state)
                # Rank r publishes on its own socket, in the order of the ranks; else nobody knows whose counters are whose.
                own = [endpoints[index]] if len(endpoints) == len(ranks) else endpoints if index == 0 else []
                if row.kind == "agent_stop":
                    yield self._message(state, departure=Departure(row.reason or "stopped"))
                yield self._heard_of(state, row, own, len(self._survey.ranks) == 1 and len(ranks) == 1)

    def _segments_dropped(self, row: Row) -> Iterator[Fact]:
        """What was in them is not known, nor of which ranks: of any that the run tells of."""
        yield from self.end()
        self._observed_ms = int(row.at_ms)
        for instance in sorted(self._survey.ranks):
            for dp_rank in sorted(self._survey.ranks[instance]):
                self._state((instance, dp_rank))
        self._break(None, f"{SEGMENTS_DROPPED}: {row.first_seq} to {row.last_seq} of {row.incarnation}")

    def _heard_of(self, state: _State, row: Row, endpoints: list[Endpoint], alone: bool) -> Lifecycle:
        seen = sum(endpoint.msgs_seen for endpoint in endpoints)
        last = [endpoint.last_msg_at_ms for endpoint in endpoints if endpoint.last_msg_at_ms is not None]
        heartbeat_ms, staleness_ms = _bounds(self._opened)
        return Lifecycle(
            kind=_KINDS[row.kind],
            instance_id=state.rank[0],
            dp_rank=state.rank[1],
            life_id=state.life_id,
            incarnation=self.name,
            at_ms=int(row.at_ms),
            batches=seen,
            blocks_stored=state.stored,
            blocks_removed=state.removed,
            unresolved_blocks=(row.content_unresolved or 0) if alone else state.unresolved,
            unknown_events=(row.unknown_types or 0) if alone else 0,
            refused=(row.oversized or 0) if alone else 0,
            lost=sum(endpoint.dropped for endpoint in endpoints) if row.endpoints or not alone else row.dropped or 0,
            duplicates=0,
            replayed=0,
            publisher_restarts=sum(endpoint.publisher_restarts or 0 for endpoint in endpoints),
            canary=self._canary,
            key_epoch=_key_epoch(self._opened),
            reason=row.reason,
            forwarder_version=self._version,
            endpoint=endpoints[0].endpoint if endpoints else "",
            msgs_seen=seen if endpoints else None,
            oversized=row.oversized if alone else None,
            events_ingested=row.events_ingested if alone else None,
            content_bridge_entries=row.content_bridge_entries if alone else None,
            content_bridge_evicted=row.content_bridge_evicted if alone else None,
            rss_bytes=row.rss_bytes,
            last_message_at_ms=int(max(last)) if last else None,
            heartbeat_ms=heartbeat_ms,
            staleness_ms=staleness_ms,
        )

    # -- what holds

    def _declare(self, state: _State) -> Iterator[RankMessage]:
        declaration = self._declaration()
        if declaration != state.declared:
            state.declared = declaration
            yield self._message(state, declaration=declaration)

    def _declaration(self, header: Row | None = None) -> Declaration:
        opened = header or self._opened
        heartbeat_ms, staleness_ms = _bounds(opened)
        return Declaration(
            # Silence is no declaration: the reading that can only undercount.
            reuse_reporting=cast(ReuseReporting, self._reuse) if self._reuse in get_args(ReuseReporting) else "unlabelled",
            removals="per_copy",
            workload=opened.workload_class if opened is not None else None,
            key_epoch=_key_epoch(opened),
            canary=self._canary,
            forwarder_version=self._version,
            labels={name: opened.extra[name] for name in _LABELS if name in opened.extra} if opened is not None else {},
            heartbeat_ms=heartbeat_ms,
            staleness_ms=staleness_ms,
        )

    def _is_lossy(self, instance: str) -> bool:
        return bool(self._survey.lossy.get(self._beats, set()) & {instance, ""})

    def _break(self, instance: str | None, reason: str) -> None:
        for state in self._states.values():
            if instance in (None, state.rank[0]):
                state.broken = state.broken or reason

    def _state(self, rank: Rank) -> _State:
        state = self._states.get(rank)
        if state is None:
            state = _State(rank, self._life_id(rank, "start"), self._survey.numbered(rank[0]))
            self._states[rank] = state
        return state

    def _life_id(self, rank: Rank, since: str) -> str:
        numbered = self._sequenced and self._survey.numbered(rank[0])
        return f"{self.name}/{rank[1]}/{since}" + ("" if numbered else "/unnumbered")

    def _message(
        self,
        state: _State,
        *,
        seq: int | None = None,
        skipped: int = 0,
        batch: Batch | None = None,
        holder_reset: HolderReset | None = None,
        loss: Loss | None = None,
        refusal: Refusal | None = None,
        declaration: Declaration | None = None,
        identity_refused: IdentityRefused | None = None,
        departure: Departure | None = None,
    ) -> RankMessage:
        return RankMessage(
            instance_id=state.rank[0],
            dp_rank=state.rank[1],
            life_id=state.life_id,
            seq=(state.expected or 0) if seq is None else seq,
            at_us=state.newest_us,
            observed_at_ms=self._observed_ms,
            incarnation=self.name,
            batch=batch,
            holder_reset=holder_reset,
            loss=loss,
            refusal=refusal,
            declaration=declaration,
            identity_refused=identity_refused,
            skipped=skipped,
            departure=departure,
        )


def _bounds(opened: Row | None) -> tuple[int, int]:
    """Milliseconds between heartbeats, and of silence after which a producer is not counted on: the larger bound it declared."""
    heartbeat, segment = ((opened.heartbeat_secs or 0), (opened.max_segment_secs or 0)) if opened is not None else (0, 0)
    return max(heartbeat, 0) * 1_000, max(heartbeat, segment, 0) * 1_000


def _key_epoch(opened: Row | None) -> int:
    return (opened.key_epoch or 0) if opened is not None else 0


def _goes_on(building: _Building, op: Op, parent: bytes | None) -> bool:
    """Whether ``op``, one block with this parent, continues a run."""
    last = building.op
    return (
        parent is not None
        and last.kind == "STORE"
        and building.blocks[-1] == parent
        and (last.parent_state != "UNKNOWN" or last.parent_block_id is not None)
        and (last.group_idx, last.tier, last.locality, last.block_size) == (op.group_idx, op.tier, op.locality, op.block_size)
        and (last.spec_kind, last.spec_sliding_window, last.lora_id, last.lora_name, last.reused)
        == (op.spec_kind, op.spec_sliding_window, op.lora_id, op.lora_name, op.reused)
    )
