"""The holder agent: batches of each rank in, rank windows, recomputes and residency changes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import RankMessage, RankWindow, rank_key
from schemas.topics import BATCHES
from streams.agents.common import Agent, Marks, Message, log
from streams.believable import unbelievable
from streams.dead_letters import rank_named
from streams.emit import Channel, send_changes
from streams.residency import Drained, RankCore
from streams.settings import WorkerSettings
from streams.tables import WindowLedger


class HolderAgent(Agent[RankMessage]):
    """One :class:`RankCore` per rank. ``place`` is told in which partition a rank lives, before anything of it is given out."""

    name = "holder"

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        shards: Callable[[], int],
        rank_windows: Channel,
        recomputes: Channel,
        residency: Channel,
        dead_letters: Channel,
        ledger: WindowLedger[RankWindow],
        places: dict[str, int],
        skipped: asyncio.Event,
    ) -> None:
        super().__init__(BATCHES, RankMessage, skipped, dead_letters)
        self._settings = settings
        self._shards = shards
        self._rank_windows = rank_windows
        self._recomputes = recomputes
        self._residency = residency
        self._ledger = ledger
        self._places = places
        self._cores: dict[str, RankCore] = {}
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._drained: list[tuple[str, RankCore, Drained]] = []
        self._strays: set[tuple[str, int]] = set()

    @property
    def ranks(self) -> int:
        """Ranks counted here."""
        return len(self._cores)

    def count(self, record: RankMessage, partition: int, offset: int) -> None:
        """Count one message of one rank."""
        if (fault := unbelievable(record)) is not None:
            raise KvcensusError(fault)
        rank = rank_key(record.instance_id, record.dp_rank)
        core = self._cores.get(rank)
        if core is None:
            core = self._new(rank, record.instance_id, record.dp_rank, partition, offset)
        elif self._places[rank] != partition:
            self._misplaced(rank, partition)
            return
        if offset > self._last[rank]:  # else its snapshot holds it already
            core.apply(record, offset)
            self._last[rank] = offset

    def _new(self, rank: str, instance_id: str, dp_rank: int, partition: int, offset: int) -> RankCore:
        core = self._cores[rank] = RankCore(instance_id, dp_rank, **self._options())
        self._places[rank] = partition
        self._first[rank] = offset
        self._last[rank] = offset - 1
        return core

    def _options(self) -> dict[str, int]:
        chosen = self._settings
        return {
            "window_us": chosen.window_us,
            "shards": self._shards(),
            "history_us": chosen.history_us,
            "history_blocks": chosen.history_blocks,
        }

    def spoiled(self, message: Message) -> None:
        """The rank that the key names does not know what was in the message: its stream is not contiguous there."""
        named = rank_named(message.key)
        if named is None:
            return
        rank = rank_key(*named)
        core = self._cores.get(rank)
        if core is None:
            core = self._new(rank, *named, message.partition, message.offset)
        if self._places[rank] == message.partition and message.offset > self._last[rank]:
            self._last[rank] = message.offset
            core.unreadable(message.offset)

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
        drained, self._drained = self._drained, []
        for rank, core, news in drained:
            await self._send(rank, core, news)
        for rank, core in list(self._cores.items()):
            if core.dirty and self._cores.get(rank) is core:
                await self._send(rank, core, core.drain())

    async def _send(self, rank: str, core: RankCore, news: Drained) -> None:
        if self._cores.get(rank) is not core:  # its partition moved away: whoever holds it gives this out
            return
        for shard, messages in enumerate(news.changes):
            for number, changes in enumerate(messages):
                if number:  # a hole must not follow
                    await self.outbox.settle()
                await send_changes(self.outbox, self._residency, shard, changes, rank)
        for row in news.windows:
            if self._ledger.is_news(row):
                message = codec.encode(row)
                await self.outbox.send(self._rank_windows, message, key=rank, then=partial(self._given_out, rank, row, message))
        for recompute in news.recomputes:
            await self.outbox.send(self._recomputes, codec.encode(recompute), key=rank)

    def _given_out(self, rank: str, row: RankWindow, message: bytes) -> None:
        if rank in self._cores:  # else its partition moved away meanwhile, and with it its part of the table
            self._ledger.given_out(row, message)

    def drop(self, partition: int) -> None:
        """Forget the ranks of a partition that moved away."""
        for rank in [rank for rank in self._cores if self._places[rank] == partition]:
            del self._cores[rank], self._places[rank], self._first[rank], self._last[rank]

    # -- state --------------------------------------------------------------------------------------------------

    def marks(self, partition: int) -> Marks:
        """One owner per rank."""
        return {rank: (self._first[rank], self._last[rank]) for rank in self._cores if self._places[rank] == partition}

    def dump(self, partition: int, owner: str) -> bytes:
        """What one rank holds and has lost."""
        core = self._cores[owner]
        if core.dirty:
            self._drained.append((owner, core, core.drain()))
        return core.dump()

    def load(self, partition: int, resume: int, owners: Mapping[str, tuple[int, bytes]]) -> None:
        """Ranks as they were."""
        options = self._options()
        for rank, (position, data) in owners.items():
            self._cores[rank] = RankCore.restored(data, **options)
            self._places[rank] = partition
            self._first[rank] = resume
            self._last[rank] = position - 1
