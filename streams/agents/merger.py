"""The merger agent: the steps of all shards in, duplicate windows of the fleet and its cuts and its shared prefixes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from schemas import codec
from schemas.records import DuplicateSteps, DuplicateWindow, SharedPrefix
from schemas.topics import DUPLICATE_STEPS
from streams.agents.common import Agent, Marks
from streams.emit import Channel
from streams.merger import Merger
from streams.settings import WorkerSettings
from streams.tables import WindowLedger

_OWNER = "fleet"

REST = 3
"""So many times as long as giving out took, nothing more is given out but by the timer."""


class MergerAgent(Agent[DuplicateSteps]):
    """One :class:`Merger`, on the worker that holds the only partition of the topic."""

    name = "merger"

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        shards: Callable[[], int],
        duplicate_windows: Channel,
        shared_prefixes: Channel,
        dead_letters: Channel,
        ledger: WindowLedger[DuplicateWindow],
        skipped: asyncio.Event,
    ) -> None:
        super().__init__(DUPLICATE_STEPS, DuplicateSteps, skipped, dead_letters)
        self._settings = settings
        self._shards = shards
        self._duplicate_windows = duplicate_windows
        self._shared_prefixes = shared_prefixes
        self._ledger = ledger
        self._merger: Merger | None = None
        self._first = self._last = -1
        self._windows: list[DuplicateWindow] = []
        self._prefixes: list[SharedPrefix] = []
        self._rests_until = 0.0

    def count(self, record: DuplicateSteps, partition: int, offset: int) -> None:
        """Take one answer of one shard."""
        if self._merger is None:
            self._merger = Merger(**self._options())
            self._first = offset
        self._last = offset
        self._merger.apply(record, offset)

    def _options(self) -> dict[str, int]:
        return {"window_us": self._settings.window_us, "shards": self._shards(), "grace_us": self._settings.grace_us}

    def _drain(self) -> None:
        merger = self._merger
        if merger is not None and merger.dirty:
            self._windows += merger.drain()
            self._prefixes += merger.drain_prefixes()

    def flush_due(self) -> bool:
        """Each time every scope of the open windows has a new row, however few messages came: of a thousand ranks a thousand rows.

        A merger that is behind would do little else, and fall further behind; so it gives out in a share of its time.
        """
        return time.monotonic() >= self._rests_until

    async def give_out(self) -> None:
        """Send every window that changed, and the prefixes of the instants that were reached."""
        began = time.monotonic()
        await self._give_out()
        took = time.monotonic() - began
        self._rests_until = began + took + REST * took

    async def _give_out(self) -> None:
        self._drain()
        windows, self._windows = self._windows, []
        prefixes, self._prefixes = self._prefixes, []
        for row in windows:
            if self._ledger.is_news(row):
                message = codec.encode(row)
                key = f"{row.scope}/{row.scope_key}"
                await self.outbox.send(self._duplicate_windows, message, key=key, then=partial(self._given_out, row, message))
        for prefix in prefixes:
            await self.outbox.send(self._shared_prefixes, codec.encode(prefix), key=str(prefix.place))

    def _given_out(self, row: DuplicateWindow, message: bytes) -> None:
        if self._merger is not None:
            self._ledger.given_out(row, message)

    def drop(self, partition: int) -> None:
        """The partition moved away."""
        self._merger = None
        self._windows = []
        self._prefixes = []

    # -- state --------------------------------------------------------------------------------------------------

    def marks(self, partition: int) -> Marks:
        """One owner: the merger."""
        return {} if self._merger is None else {_OWNER: (self._first, self._last)}

    def dump(self, partition: int, owner: str) -> bytes:
        """The levels of every scope, and the windows that can still change."""
        assert self._merger is not None
        self._drain()
        return self._merger.dump()

    def load(self, partition: int, resume: int, owners: Mapping[str, tuple[int, bytes]]) -> None:
        """The merger as it was."""
        for position, data in owners.values():
            self._merger = Merger.restored(data, **self._options())
            self._first, self._last = resume, position - 1
