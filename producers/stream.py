"""One rank's frames, in the order they arrive, into rank messages: continuity, restarts, duplicates, refusals. Pure.

Healing a gap (asking the engine's replay socket) is the caller's, before it feeds: :meth:`RankStream.verdict` tells it beforehand
what a frame will be taken for. What is fed with a gap before it is declared lost.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from producers import wire
from producers.continuity import payload_digest
from producers.resolver import RankResolver
from schemas.records import (
    NO_SEQ,
    Batch,
    Declaration,
    Departure,
    EngineProfile,
    HolderReset,
    IdentityRefused,
    Loss,
    RankMessage,
    Refusal,
    Scrape,
)

REMEMBERED_FRAMES = 16_384
"""Frames of a life whose digest is kept to know a duplicate: more than an engine's replay buffer holds (10,000 by default)."""

_MISSING = "missing in the stream"
_UNPROVEN = "missing in the stream after the connection had broken, and nothing proves that the engine is still in the same life"

Verdict: TypeAlias = Literal["next", "gap", "duplicate", "restart", "stray"]
"""What a frame is: the expected one, one after a gap, one seen before, the first of another process life, or unreadable out of turn."""


NewLifeId: TypeAlias = Callable[[str | None, int], str]


def next_life_id(previous: str | None, boundary_us: int) -> str:
    """16 hex digits: random for a first life, else made from the life before and where it ended.

    So a forwarder that was killed after it told of a new life, and before it noted that, tells of the same life again.
    """
    if previous is None:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{previous}/{boundary_us}".encode(), digest_size=8).hexdigest()


class StreamCounters(msgspec.Struct):
    """Cumulative since the stream was made; batches, blocks and events as they are sent on.

    ``events`` counts those of the batches read, the unknown ones among them; ``lost`` batches declared lost; ``oversized`` those of
    the ``refused`` that were larger than is read; ``rank_mismatches`` batches that name another rank than the stream's.
    """

    batches: int = 0
    events: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    duplicates: int = 0
    lost: int = 0
    refused: int = 0
    oversized: int = 0
    publisher_restarts: int = 0
    rank_mismatches: int = 0


class Position(msgspec.Struct, frozen=True):
    """Where a stream stands, to go on from in another process: life, expected number (None: anything), newest engine time.

    ``anchor`` is the :func:`payload_digest` of the batch before ``next_seq`` (empty: none): the engine still has that batch if it is in
    the same life. ``wire_rank`` is the rank that the batches name (None: not known), ``shared`` says that their numbers are shared
    with the other ranks of the socket; then ``skipped`` of them right before ``next_seq`` are others'.
    """

    life_id: str
    next_seq: int | None
    newest_us: int
    anchor: bytes = b""
    wire_rank: int | None = None
    shared: bool = False
    skipped: int = 0


class RankStream:
    """Frames of rank (``instance_id``, ``dp_rank``) to messages, in order.

    ``new_life_id`` names each engine process life (from the one before and the boundary between them, in microseconds), also the
    first (None, 0), unless ``position`` resumes one. ``incarnation`` is
    this forwarder run's. All times ``observed_at_ms`` are the caller's clock. Payloads beyond ``max_payload_bytes`` are refused unread;
    ``profile`` says which engine's events they hold.

    Where a socket numbers several ranks together (see :class:`producers.ranks.Ranks`), each stream is told of every number
    that is another's, by :meth:`pass_over`; then a jump is missing in all of them, and a restart one of all.
    """

    def __init__(
        self,
        instance_id: str,
        dp_rank: int,
        resolver: RankResolver,
        declaration: Declaration,
        incarnation: str,
        new_life_id: NewLifeId = next_life_id,
        *,
        position: Position | None = None,
        remembered: int = REMEMBERED_FRAMES,
        max_payload_bytes: int = wire.MAX_PAYLOAD_BYTES,
        profile: EngineProfile = "vllm",
    ) -> None:
        self.instance_id = instance_id
        self.dp_rank = dp_rank
        self.declaration = declaration
        self.counters = StreamCounters()
        self.next_seq: int | None = position.next_seq if position else None
        self.life_id = position.life_id if position else new_life_id(None, 0)
        self.resolver = resolver
        self.wire_rank = position.wire_rank if position else None
        self.shared = position.shared if position else False
        self._skipped = position.skipped if position else 0
        self._unbroken_from: int | None = self.next_seq
        """The first number of the unbroken stretch that ends before ``next_seq``."""
        self._max_payload_bytes = max_payload_bytes
        self._profile = profile
        self._incarnation = incarnation
        self._new_life_id = new_life_id
        self._newest_us = position.newest_us if position else 0
        self._anchor = position.anchor if position else b""
        self._restarted: str | None = None
        self._process_started_us: int | None = None
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        if self.next_seq and self._anchor:
            self._seen[self.next_seq - 1] = self._anchor
        self._remembered = remembered

    @property
    def position(self) -> Position:
        """Where the stream stands now."""
        return Position(self.life_id, self.next_seq, self._newest_us, self._anchor, self.wire_rank, self.shared, self._skipped)

    def engine_restarted(self, reason: str) -> None:
        """Tell what the sequence may not show: the next readable frame begins another life."""
        self._restarted = reason

    def process_started(self, started_us: int) -> None:
        """Tell when the engine's process started, before a frame that comes after a broken connection and proves nothing itself.

        If that is after everything seen of this life and not after the next readable frame, that frame begins another life. Say
        it of such frames alone: an API server may start anew while the engine's publisher goes on.
        """
        self._process_started_us = started_us

    def start(self, observed_at_ms: int) -> list[RankMessage]:
        """What opens the stream: the operator's declaration."""
        message = self._message(observed_at_ms)
        message.declaration = self.declaration
        return [message]

    def verdict(self, seq: int, payload: bytes) -> Verdict:
        """What :meth:`feed` would take this frame for; changes nothing."""
        return self._judge(seq, payload, payload_digest(payload))[0]

    def feed(
        self, seq: int, payload: bytes, observed_at_ms: int, *, digest: bytes | None = None, reconnected: bool = False
    ) -> list[RankMessage]:
        """The messages that this frame gives rise to, in order; none for a duplicate.

        ``digest`` is the :func:`payload_digest` where the caller has it. ``reconnected``: the connection broke before this frame, and
        nothing proves that the engine is in the same life, which a loss declared here then says.
        """
        digest = digest or payload_digest(payload)
        verdict, batch, note = self._judge(seq, payload, digest)
        if batch is not None:
            self._process_started_us = None
        if verdict == "duplicate":
            self.counters.duplicates += 1
            return []
        if verdict == "stray":
            return [self._refuse(seq if 0 <= seq < NO_SEQ else NO_SEQ, payload, note, observed_at_ms)]
        messages = []
        if verdict == "restart":
            assert batch is not None
            messages.append(self.restart(batch.at_us, note, observed_at_ms))
        messages += self._catch_up(seq, observed_at_ms, reconnected and verdict != "restart")
        self._remember(seq, digest)
        if batch is None:
            messages.append(self._refuse(seq, payload, note, observed_at_ms))
        else:
            messages.append(self._batch(seq, batch, observed_at_ms))
        messages[-1].skipped, self._skipped = self._skipped, 0
        self.next_seq = seq + 1
        return messages

    # -- several ranks on one socket that are numbered together

    def join(self, other: RankStream) -> None:
        """From here on this stream's numbers are shared with ``other``, which was there before; what it saw was seen of both."""
        self.shared = other.shared = True
        other._seen.update(self._seen)
        self._seen = other._seen
        if self.next_seq is None and other.next_seq is not None:
            self.next_seq, self._newest_us, self._anchor = other.next_seq, other._newest_us, other._anchor
            self._unbroken_from = other._unbroken_from
            self._skipped = other.next_seq - (other._unbroken_from or 0)

    def part(self) -> None:
        """From here on this stream's numbers are its own."""
        self.shared = False
        self._seen = OrderedDict(self._seen)
        self._skipped = 0

    def pass_over(self, seq: int, at_us: int, digest: bytes, observed_at_ms: int, *, reconnected: bool = False) -> list[RankMessage]:
        """Number ``seq`` is another rank's batch, of engine time ``at_us``: the loss that shows in it, if any."""
        if not (self.next_seq or 0) <= seq < NO_SEQ:
            return []
        messages = self._catch_up(seq, observed_at_ms, reconnected)
        self._anchor = digest
        self._newest_us = max(self._newest_us, at_us)
        self._skipped += 1
        self.next_seq = seq + 1
        return messages

    def restart(self, boundary_us: int, reason: str, observed_at_ms: int) -> RankMessage:
        """Another engine life begins at ``boundary_us``: the reset that says so."""
        self.life_id, self.next_seq, self._restarted = self._new_life_id(self.life_id, boundary_us), 0, None
        self._unbroken_from, self._skipped = 0, 0
        self.resolver.new_life()
        self._seen.clear()
        self.counters.publisher_restarts += 1
        message = self._message(observed_at_ms)
        message.holder_reset = HolderReset(boundary_us, reason)
        self._newest_us = 0
        return message

    def rekey(self, reason: str, observed_at_ms: int) -> RankMessage:
        """Ids are made in another way from here on, though the engine goes on: another life in which no id from before means anything."""
        boundary_us = self._newest_us
        self.life_id = self._new_life_id(self.life_id, boundary_us)
        self._unbroken_from, self._skipped = self.next_seq, 0
        self.resolver.new_life()
        message = self._message(observed_at_ms)
        message.holder_reset = HolderReset(boundary_us, reason, "rekeyed")
        return message

    def forget_identities(self, refused: IdentityRefused, observed_at_ms: int) -> RankMessage:
        """Declare identities that were forgotten."""
        message = self._message(observed_at_ms)
        message.identity_refused = refused
        return message

    def scraped(self, scrape: Scrape, observed_at_ms: int) -> RankMessage:
        """What the engine's own metrics say, in its place behind everything fed so far."""
        message = self._message(observed_at_ms)
        message.scrape = scrape
        return message

    def depart(self, reason: str, observed_at_ms: int) -> RankMessage:
        """The forwarder stops on purpose: nothing of this run comes behind it."""
        message = self._message(observed_at_ms)
        message.departure = Departure(reason)
        return message

    def refuse(self, payload: bytes, reason: str, observed_at_ms: int) -> RankMessage:
        """Refuse a frame of the socket that is no part of this stream's order."""
        return self._refuse(NO_SEQ, payload, reason, observed_at_ms)

    def _judge(self, seq: int, payload: bytes, digest: bytes) -> tuple[Verdict, wire.WireBatch | None, str]:
        expected = self.next_seq
        behind = expected is not None and seq < expected
        if behind and self._restarted is None and self._seen.get(seq) == digest:
            return "duplicate", None, ""
        try:
            if not 0 <= seq < NO_SEQ:
                raise wire.WireError(f"sequence number {seq} is out of range")
            batch = wire.decode(payload, self._max_payload_bytes, self._profile)
        except wire.WireError as error:
            if behind or not 0 <= seq < NO_SEQ:
                return "stray", None, str(error)
            return ("next" if expected in (None, seq) else "gap"), None, str(error)
        fell = f"sequence fell from {expected} to {seq}: the engine restarted"
        if self._restarted is not None:
            return "restart", batch, fell if behind else self._restarted
        if behind:
            if seq not in self._seen and batch.at_us <= self._newest_us:
                return "duplicate", None, ""
            return "restart", batch, fell
        if self._process_started_us is not None and begins_life(self._newest_us, self._process_started_us, batch.at_us):
            return "restart", batch, f"the engine's process started at {_clock(self._process_started_us)}, after what was seen of it before"
        return ("next" if expected in (None, seq) else "gap"), batch, ""

    def _catch_up(self, seq: int, observed_at_ms: int, reconnected: bool) -> list[RankMessage]:
        """Declare what is missing before ``seq``."""
        if self.next_seq is None:
            self._unbroken_from = seq
        elif seq > self.next_seq:
            return [self._lose(seq - 1, observed_at_ms, _UNPROVEN if reconnected else _MISSING)]
        return []

    def _lose(self, last_seq: int, observed_at_ms: int, reason: str) -> RankMessage:
        assert self.next_seq is not None
        first_seq, self.next_seq = self.next_seq, last_seq + 1
        self._unbroken_from, self._skipped = self.next_seq, 0
        self.counters.lost += last_seq - first_seq + 1
        message = self._message(observed_at_ms)
        message.loss = Loss(first_seq, last_seq, reason)
        return message

    def _refuse(self, seq: int, payload: bytes, reason: str, observed_at_ms: int) -> RankMessage:
        self.counters.refused += 1
        self.counters.oversized += len(payload) > self._max_payload_bytes
        message = self._message(observed_at_ms)
        message.seq = seq
        message.refusal = Refusal(reason, len(payload))
        return message

    def _batch(self, seq: int, batch: wire.WireBatch, observed_at_ms: int) -> RankMessage:
        counters = self.counters
        if batch.dp_rank is not None and batch.dp_rank != self.dp_rank:
            counters.rank_mismatches += 1
        before = self.resolver.counters
        stored, removed = before.blocks_stored, before.blocks_removed
        resolved: Batch = self.resolver.resolve(batch)
        counters.batches += 1
        counters.events += len(batch.events) + batch.unknown_events
        counters.blocks_stored += before.blocks_stored - stored
        counters.blocks_removed += before.blocks_removed - removed
        counters.unresolved_blocks += resolved.unresolved_blocks
        counters.unknown_events += resolved.unknown_events
        self._newest_us = max(self._newest_us, batch.at_us)
        message = self._message(observed_at_ms)
        message.seq = seq
        message.at_us = batch.at_us
        message.batch = resolved
        return message

    def _message(self, observed_at_ms: int) -> RankMessage:
        return RankMessage(
            self.instance_id, self.dp_rank, self.life_id, self.next_seq or 0, self._newest_us, observed_at_ms, self._incarnation
        )

    def _remember(self, seq: int, digest: bytes) -> None:
        self._anchor = self._seen[seq] = digest
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)


def begins_life(newest_us: int, started_us: int, at_us: int) -> bool:
    """Whether a batch of engine time ``at_us`` is of a process that started after the life whose newest time is ``newest_us``."""
    return 0 < newest_us < started_us <= at_us


def _clock(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
