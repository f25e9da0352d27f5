"""One rank of a forwarder: its stream, the identities that outlive the process, its segments, and what was counted of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from producers.bridge_journal import BridgeJournal
from producers.config import ForwarderConfig
from producers.identity import Identity
from producers.resolver import RankResolver
from producers.restate import Entry, Kind
from producers.segments.writer import SegmentWriter, rank_folder
from producers.stream import Position, RankStream
from producers.tally import DeclaredLog, Tally
from schemas import codec, records, topics
from schemas.records import NO_SEQ, EngineMetrics, Lifecycle, RankMessage, rank_key

logger = logging.getLogger("kvcensus.forwarder")

_MOST_TOLD = 10
_TELL_SECONDS = 60.0
"""So many refused batches are told one by one in that many seconds; of the others, how many: an engine may send nothing else."""


class Lane:
    """Rank ``dp_rank`` of a forwarder whose run is ``incarnation``, begun at ``started_ms``; ``position`` resumes its stream.

    ``scope`` says under which key, model and profile ids are made. Raises :class:`KvcensusError` where a folder cannot be used.
    """

    def __init__(
        self, config: ForwarderConfig, incarnation: str, started_ms: int, scope: bytes, dp_rank: int, position: Position | None
    ) -> None:
        declaration = config.declaration()
        self.key = rank_key(config.instance_id, dp_rank)
        self.tally = Tally()
        self.declared = DeclaredLog()
        self.resolver = RankResolver(
            Identity(config.key, config.model),
            config.key,
            config.max_blocks,
            profile=config.engine_profile,
            collect_learned=config.spool is not None,
        )
        self.stream = RankStream(
            config.instance_id,
            dp_rank,
            self.resolver,
            declaration,
            incarnation,
            position=position,
            max_payload_bytes=config.max_payload_bytes,
            profile=config.engine_profile,
        )
        self._scope = scope
        self._tell_anew, self._told, self._untold = 0.0, 0, 0
        self._journal = self._open_journal(config.spool, dp_rank) if config.spool is not None else None
        self.segments = (
            SegmentWriter(
                rank_folder(config.segments, config.instance_id, dp_rank),
                instance_id=config.instance_id,
                dp_rank=dp_rank,
                started_ms=started_ms,
                declaration=declaration,
                max_segment_seconds=config.segment_seconds,
                max_bytes=config.segments_bytes,
            )
            if config.segments is not None
            else None
        )

    def take(self, messages: Iterable[RankMessage]) -> list[Entry]:
        """Count ``messages`` of this rank, write what is written beside the spool, and give what goes into it.

        The order matters for a kill in between: identities first, so that they are never behind the checkpoint in the spool.
        """
        taken = list(messages)
        entries = []
        for message in taken:
            self.tally.count(message)
            self.declared.note(message)
            self._tell(message)
            kind: Kind = "batch" if message.batch is not None or message.refusal is not None else "keep"
            entries.append(Entry(topics.BATCHES.name, self.key.encode(), codec.encode(message), kind))
        if self._journal is not None:
            self._write_down(self._journal)
        if self.segments is not None:
            self.segments.write(taken)
        return entries

    def take_beside(self, topic: topics.Topic, record: Lifecycle | EngineMetrics) -> Entry:
        """The same for a record that stands beside the stream, on a ``topic`` of its own."""
        if self.segments is not None:
            self.segments.write([record])
        return Entry(topic.name, self.key.encode(), codec.encode(record), "droppable")

    def tick(self) -> None:
        """Do what is due by the clock."""
        if self.segments is not None:
            self.segments.tick()

    def close(self) -> None:
        """Let go of files."""
        if self._journal is not None:
            self._journal.close()
        if self.segments is not None:
            self.segments.close()

    @property
    def identities_not_written(self) -> int:
        """Identities that the disk did not take: a successor will not know them."""
        return self._journal.skipped if self._journal is not None else 0

    def _open_journal(self, folder: Path, dp_rank: int) -> BridgeJournal:
        journal = BridgeJournal(folder / f"bridge-{dp_rank}.journal", self._journal_scope())
        self.resolver.restore(journal.recovered())
        self._journaled = self.stream.life_id
        return journal

    def _write_down(self, journal: BridgeJournal) -> None:
        learned = self.resolver.take_learned()
        if self.stream.life_id != self._journaled:
            journal.begin(self._journal_scope())
            self._journaled = self.stream.life_id
        journal.append(learned)
        if journal.due(len(self.resolver)):
            journal.compact(self.resolver.entries())

    def _journal_scope(self) -> bytes:
        return msgspec.msgpack.encode([self.stream.life_id, self._scope])

    def _tell(self, message: records.RankMessage) -> None:
        if message.loss is not None:
            logger.warning("%s: lost %d to %d (%s)", self.key, message.loss.first_seq, message.loss.last_seq, message.loss.reason)
        elif message.refusal is not None:
            self._tell_refusal(message.seq, message.refusal.reason)
        elif message.holder_reset is not None:
            logger.warning("%s: another life begins (%s)", self.key, message.holder_reset.reason)
        elif message.identity_refused is not None:
            forgot = message.identity_refused
            logger.warning("%s: forgot %d blocks of group %d to stay within --max-blocks", self.key, forgot.refused, forgot.group_idx)

    def _tell_refusal(self, seq: int, reason: str) -> None:
        now = time.monotonic()
        if now >= self._tell_anew:
            if self._untold:
                logger.warning("%s: refused %d more meanwhile", self.key, self._untold)
            self._tell_anew, self._told, self._untold = now + _TELL_SECONDS, 0, 0
        self._told += 1
        if self._told > _MOST_TOLD:
            self._untold += 1
            return
        what = "a batch" if seq >= NO_SEQ else str(seq)
        more = f"; more within {_TELL_SECONDS:g} s are counted only" if self._told == _MOST_TOLD else ""
        logger.warning("%s: refused %s (%s)%s", self.key, what, reason, more)
