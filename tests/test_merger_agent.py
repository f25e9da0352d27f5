"""How often the merger gives out what it has while it is behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas import codec
from schemas.records import DuplicateSteps, DuplicateWindow
from streams.agents import merger as merger_agent
from streams.agents.common import FLUSH_EVERY
from streams.agents.merger import MergerAgent
from streams.settings import WorkerSettings
from streams.tables import WindowLedger

T0 = 1_700_000_000_000_000


class Kept:
    """A channel that keeps what it is sent."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    async def send(self, *, key: bytes | None, value: bytes, partition: int | None = None) -> Awaitable[None]:
        self.values.append(value)
        return asyncio.sleep(0)


class Backlog:
    """Answers of one shard, all there at once: the queue is never empty."""

    def __init__(self, start: int, count: int) -> None:
        self._offsets = range(start, start + count)

    async def events(self) -> AsyncIterator[Any]:
        for offset in self._offsets:
            answer = DuplicateSteps(0, 1, offset, "a", offset % 5, None, None, T0 + offset * 1_000, [], previous_offset=offset - 1)
            yield SimpleNamespace(message=SimpleNamespace(partition=0, offset=offset, key=None, value=codec.encode(answer)))


@pytest.fixture
def windows() -> Kept:
    return Kept()


@pytest.fixture
def agent(windows: Kept, tmp_path: Path) -> MergerAgent:
    made = MergerAgent(
        settings=WorkerSettings("nowhere", tmp_path),
        shards=lambda: 1,
        duplicate_windows=windows,
        shared_prefixes=Kept(),
        dead_letters=Kept(),
        ledger=WindowLedger({}, DuplicateWindow, base_us=10_000_000),
        skipped=asyncio.Event(),
    )
    made.hold({0})
    made.begin(0, 0, {})
    return made


def test_a_merger_that_is_behind_leaves_rows_to_the_timer_while_it_rests(
    agent: MergerAgent, windows: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        await agent.run(Backlog(0, FLUSH_EVERY))
        assert windows.values, "nothing held it back before the first time"

        monkeypatch.setattr(merger_agent, "REST", math.inf)
        await agent.flush()
        windows.values.clear()
        others = 0

        async def count_turns() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(count_turns())
        await agent.run(Backlog(FLUSH_EVERY, 4 * FLUSH_EVERY))
        other.cancel()
        assert not windows.values
        assert others >= 4, "whoever else works in this worker has had a turn every so many messages"

        await agent.flush()
        rows = [codec.decode(value, DuplicateWindow) for value in windows.values]
        assert max(row.as_of_us for row in rows) == T0 + (5 * FLUSH_EVERY - 1) * 1_000

    asyncio.run(scene())
