"""One rank's frames, in the order they arrive, into rank messages: continuity, restarts, duplicates, refusals. Pure.

Healing a gap (asking the engine's replay socket) is the caller's, before it feeds: :meth:`RankStream.verdict` tells it beforehand
what a frame will be taken for. What is fed with a gap before it is declared lost.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from producers import wire
from producers.resolver import RankResolver
from schemas.records import Batch, Declaration, HolderReset, Loss, RankMessage, Refusal

REMEMBERED_FRAMES = 16_384
"""Frames of a life whose digest is kept to know a duplicate: more than an engine's replay buffer holds (10,000 by default)."""

_MAX_SEQ = 2**63 - 1

Verdict: TypeAlias = Literal["next", "gap", "duplicate", "restart", "stray"]
"""What a frame is: the expected one, one after a gap, one seen before, the first of another process life, or unreadable out of turn."""


class StreamCounters(msgspec.Struct):
    """Cumulative since the stream was made; batches, blocks and events as they are sent on.

    ``lost`` counts batches declared lost, ``rank_mismatches`` batches that name another rank than the stream's.
    """

    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    duplicates: int = 0
    lost: int = 0
    refused: int = 0
    publisher_restarts: int = 0
    rank_mismatches: int = 0


class Position(msgspec.Struct, frozen=True):
    """Where a stream stands, to go on from in another process: life, expected number (None: anything), newest engine time."""

    life_id: str
    next_seq: int | None
    newest_us: int


class RankStream:
    """Frames of rank (``instance_id``, ``dp_rank``) to messages, in order.

    ``new_life_id`` names each engine process life, also the first, unless ``position`` resumes one. ``incarnation`` is
    this forwarder run's. All times ``observed_at_ms`` are the caller's clock.
    """

    def __init__(
        self,
        instance_id: str,
        dp_rank: int,
        resolver: RankResolver,
        declaration: Declaration,
        incarnation: str,
        new_life_id: Callable[[], str],
        *,
        position: Position | None = None,
        remembered: int = REMEMBERED_FRAMES,
    ) -> None:
        self.instance_id = instance_id
        self.dp_rank = dp_rank
        self.declaration = declaration
        self.counters = StreamCounters()
        self.next_seq: int | None = position.next_seq if position else None
        self.life_id = position.life_id if position else new_life_id()
        self._resolver = resolver
        self._incarnation = incarnation
        self._new_life_id = new_life_id
        self._newest_us = position.newest_us if position else 0
        self._restarted: str | None = None
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._remembered = remembered

    @property
    def position(self) -> Position:
        """Where the stream stands now."""
        return Position(self.life_id, self.next_seq, self._newest_us)

    def engine_restarted(self, reason: str) -> None:
        """Tell what the sequence may not show (a new process start time, say): the next readable frame begins another life."""
        self._restarted = reason

    def start(self, observed_at_ms: int) -> list[RankMessage]:
        """What opens the stream: the operator's declaration."""
        message = self._message(observed_at_ms)
        message.declaration = self.declaration
        return [message]

    def verdict(self, seq: int, payload: bytes) -> Verdict:
        """What :meth:`feed` would take this frame for; changes nothing."""
        return self._judge(seq, payload)[0]

    def feed(self, seq: int, payload: bytes, observed_at_ms: int) -> list[RankMessage]:
        """The messages that this frame gives rise to, in order; none for a duplicate."""
        verdict, batch, note = self._judge(seq, payload)
        if verdict == "duplicate":
            self.counters.duplicates += 1
            return []
        if verdict == "stray":
            return [self._refuse(seq if 0 <= seq < _MAX_SEQ else _MAX_SEQ, payload, note, observed_at_ms)]
        messages = []
        if verdict == "restart":
            assert batch is not None
            messages.append(self._restart(batch.at_us, note, observed_at_ms))
        if self.next_seq is not None and seq > self.next_seq:
            messages.append(self._lose(seq - 1, observed_at_ms))
        self._remember(seq, payload)
        if batch is None:
            messages.append(self._refuse(seq, payload, note, observed_at_ms))
        else:
            messages.append(self._batch(seq, batch, observed_at_ms))
        self.next_seq = seq + 1
        return messages

    def _judge(self, seq: int, payload: bytes) -> tuple[Verdict, wire.WireBatch | None, str]:
        expected = self.next_seq
        behind = expected is not None and seq < expected
        if behind and self._seen.get(seq) == _digest(payload):
            return "duplicate", None, ""
        try:
            if not 0 <= seq < _MAX_SEQ:
                raise wire.WireError(f"sequence number {seq} is out of range")
            batch = wire.decode(payload)
        except wire.WireError as error:
            if behind or not 0 <= seq < _MAX_SEQ:
                return "stray", None, str(error)
            return ("next" if expected in (None, seq) else "gap"), None, str(error)
        if self._restarted is not None:
            return "restart", batch, self._restarted
        if not behind:
            return ("next" if expected in (None, seq) else "gap"), batch, ""
        if seq not in self._seen and batch.at_us <= self._newest_us:
            return "duplicate", None, ""
        return "restart", batch, f"sequence fell from {expected} to {seq}: the engine restarted"

    def _restart(self, boundary_us: int, reason: str, observed_at_ms: int) -> RankMessage:
        self.life_id, self.next_seq, self._restarted = self._new_life_id(), 0, None
        self._resolver.new_life()
        self._seen.clear()
        self.counters.publisher_restarts += 1
        message = self._message(observed_at_ms)
        message.holder_reset = HolderReset(boundary_us, reason)
        self._newest_us = 0
        return message

    def _lose(self, last_seq: int, observed_at_ms: int) -> RankMessage:
        assert self.next_seq is not None
        first_seq, self.next_seq = self.next_seq, last_seq + 1
        self.counters.lost += last_seq - first_seq + 1
        message = self._message(observed_at_ms)
        message.loss = Loss(first_seq, last_seq, "missing in the stream")
        return message

    def _refuse(self, seq: int, payload: bytes, reason: str, observed_at_ms: int) -> RankMessage:
        self.counters.refused += 1
        message = self._message(observed_at_ms)
        message.seq = seq
        message.refusal = Refusal(reason, len(payload))
        return message

    def _batch(self, seq: int, batch: wire.WireBatch, observed_at_ms: int) -> RankMessage:
        counters = self.counters
        if batch.dp_rank is not None and batch.dp_rank != self.dp_rank:
            counters.rank_mismatches += 1
        before = self._resolver.counters
        stored, removed = before.blocks_stored, before.blocks_removed
        resolved: Batch = self._resolver.resolve(batch)
        counters.batches += 1
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

    def _remember(self, seq: int, payload: bytes) -> None:
        self._seen[seq] = _digest(payload)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
