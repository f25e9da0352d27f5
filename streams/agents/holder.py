"""The holder agent: batches of each rank in, rank windows, recomputes and residency changes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from schemas import codec
from schemas.records import RankMessage, RankWindow, rank_key
from schemas.topics import BATCHES
from streams.agents.common import Agent, log
from streams.emit import Channel, send_changes
from streams.residency import RankCore
from streams.tables import WindowLedger


class HolderAgent(Agent[RankMessage]):
    """One :class:`RankCore` per rank. ``place`` is told in which partition a rank lives, before anything of it is given out."""

    name = "holder"

    def __init__(
        self,
        *,
        window_us: int,
        shards: Callable[[], int],
        rank_windows: Channel,
        recomputes: Channel,
        residency: Channel,
        ledger: WindowLedger[RankWindow],
        places: dict[str, int],
        skipped: asyncio.Event,
    ) -> None:
        super().__init__(BATCHES, RankMessage, skipped)
        self._window_us = window_us
        self._shards = shards
        self._rank_windows = rank_windows
        self._recomputes = recomputes
        self._residency = residency
        self._ledger = ledger
        self._places = places
        self._cores: dict[str, RankCore] = {}
        self._strays: set[tuple[str, int]] = set()

    @property
    def ranks(self) -> int:
        """Ranks counted here."""
        return len(self._cores)

    def count(self, record: RankMessage, partition: int, offset: int) -> None:
        """Count one message of one rank."""
        rank = rank_key(record.instance_id, record.dp_rank)
        core = self._cores.get(rank)
        if core is None:
            core = RankCore(record.instance_id, record.dp_rank, window_us=self._window_us, shards=self._shards())
            self._cores[rank] = core
            self._places[rank] = partition
        elif self._places[rank] != partition:
            self._misplaced(rank, partition)
            return
        core.apply(record, offset)

    def _misplaced(self, rank: str, partition: int) -> None:
        """A rank that arrives on two partitions: their offsets have no common order, so only the first stream is counted."""
        self.failed += 1
        if (rank, partition) not in self._strays:
            self._strays.add((rank, partition))
            log.warning(
                "rank %s arrives on partition %d and on %d, where it is not counted: are its producers keyed by rank, with murmur2?",
                rank,
                self._places[rank],
                partition,
            )

    async def give_out(self) -> None:
        """Send every rank's news: changes to every shard first, since other workers wait for them."""
        for rank, core in list(self._cores.items()):
            if not core.dirty or self._cores.get(rank) is not core:
                continue
            drained = core.drain()
            for shard, messages in enumerate(drained.changes):
                for changes in messages:
                    await send_changes(self.outbox, self._residency, shard, changes, rank)
            for row in drained.windows:
                if self._ledger.is_news(row):
                    message = codec.encode(row)
                    await self.outbox.send(self._rank_windows, message, key=rank, then=partial(self._given_out, rank, row, message))
            for recompute in drained.recomputes:
                await self.outbox.send(self._recomputes, codec.encode(recompute), key=rank)

    def _given_out(self, rank: str, row: RankWindow, message: bytes) -> None:
        if rank in self._cores:  # else its partition moved away meanwhile, and with it its part of the table
            self._ledger.given_out(row, message)

    def drop(self, partition: int) -> None:
        """Forget the ranks of a partition that moved away."""
        for rank in [rank for rank in self._cores if self._places[rank] == partition]:
            del self._cores[rank]
            del self._places[rank]
