"""One rank of a forwarder: its stream, the identities that outlive the process, its segments, and what was counted of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from producers.bridge_journal import BridgeJournal
from producers.config import ForwarderConfig
from producers.engine_metrics import brief
from producers.identity import Identity
from producers.resolver import RankResolver
from producers.restate import Entry, Kind
from producers.scraper import Scrape
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
        self._life_since = -math.inf
        """When (monotonic clock) the life at hand was told of by a reset; before the first, it has been there for all we know."""
        self._process_us: int | None = None
        """When the process started whose pages are taken for those of this life; None: none yet."""
        self._doubted: tuple[int, int] | None = None
        """Another process's start, and how many batches had been taken when its first page came."""
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
            if message.holder_reset is not None:
                self._life_since, self._process_us = time.monotonic(), None
            self.tally.count(message)
            self.declared.note(message)
            self._tell(message)
            entries.append(Entry(topics.BATCHES.name, self.key.encode(), codec.encode(message), _kind(message)))
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

    def take_scrape(self, scrape: Scrape, record: EngineMetrics) -> list[Entry]:
        """What goes into the spool of a page that was read: the record on its own topic and, where it is of this life, one in the stream.

        Where that cannot be told, the stream does without.
        """
        entries = [self.take_beside(topics.ENGINE_METRICS, record)]
        if self._is_of_this_life(scrape, record.process_started_us):
            entries += self.take([self.stream.scraped(brief(record), scrape.at_ms)])
        return entries

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

    def _is_of_this_life(self, scrape: Scrape, started_us: int | None) -> bool:
        """Whether the engine process whose page this is (it started then; None: not known) is that of the stream's life.

        A page asked for before this life was known may be of the process before. One of another process than those before may be of the
        next life; it is not if the next batch goes on with this one (an API server alone started anew).
        """
        if scrape.began < self._life_since:
            return False
        if started_us is None or started_us == self._process_us:
            return True
        taken = self.tally.batches + self.tally.refused
        if self._process_us is not None:
            if self._doubted is None or self._doubted[0] != started_us:
                self._doubted = started_us, taken
            if self._doubted[1] == taken:
                return False
        self._process_us, self._doubted = started_us, None
        return True

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


def _kind(message: RankMessage) -> Kind:
    """How the spool's bound may take it: a scrape is no fact of the stream, and another one follows."""
    if message.batch is not None or message.refusal is not None:
        return "batch"
    return "droppable" if message.scrape is not None else "keep"
