"""The merger agent: the steps of all shards in, duplicate windows of the fleet and its cuts out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from schemas import codec
from schemas.records import DuplicateSteps, DuplicateWindow
from schemas.topics import DUPLICATE_STEPS
from streams.agents.common import Agent
from streams.emit import Channel
from streams.merger import Merger
from streams.tables import WindowLedger


class MergerAgent(Agent[DuplicateSteps]):
    """One :class:`Merger`, on the worker that holds the only partition of the topic."""

    name = "merger"

    def __init__(
        self,
        *,
        window_us: int,
        shards: Callable[[], int],
        duplicate_windows: Channel,
        ledger: WindowLedger[DuplicateWindow],
        skipped: asyncio.Event,
    ) -> None:
        super().__init__(DUPLICATE_STEPS, DuplicateSteps, skipped)
        self._window_us = window_us
        self._shards = shards
        self._duplicate_windows = duplicate_windows
        self._ledger = ledger
        self._merger: Merger | None = None

    def count(self, record: DuplicateSteps, partition: int, offset: int) -> None:
        """Take one answer of one shard."""
        if self._merger is None:
            self._merger = Merger(window_us=self._window_us, shards=self._shards())
        self._merger.apply(record, offset)

    async def give_out(self) -> None:
        """Send every window that changed."""
        merger = self._merger
        if merger is None or not merger.dirty:
            return
        for row in merger.drain():
            if self._ledger.is_news(row):
                message = codec.encode(row)
                key = f"{row.scope}/{row.scope_key}"
                await self.outbox.send(self._duplicate_windows, message, key=key, then=partial(self._given_out, row, message))

    def _given_out(self, row: DuplicateWindow, message: bytes) -> None:
        if self._merger is not None:
            self._ledger.given_out(row, message)

    def drop(self, partition: int) -> None:
        """The partition moved away."""
        self._merger = None
