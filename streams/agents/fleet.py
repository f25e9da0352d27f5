"""The fleet agent: residency changes of all ranks in one content shard in, duplicate steps out, one answer per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas import codec
from schemas.records import DuplicateSteps, ResidencyChanges
from schemas.topics import RESIDENCY
from streams.agents.common import Agent
from streams.duplication import ShardCore
from streams.emit import Channel


class FleetAgent(Agent[ResidencyChanges]):
    """One :class:`ShardCore` per partition of the residency topic."""

    name = "fleet"

    def __init__(self, *, shards: Callable[[], int], duplicate_steps: Channel, skipped: asyncio.Event) -> None:
        super().__init__(RESIDENCY, ResidencyChanges, skipped)
        self._shards = shards
        self._duplicate_steps = duplicate_steps
        self._cores: dict[int, ShardCore] = {}
        self._answers: list[tuple[int, DuplicateSteps]] = []

    def count(self, record: ResidencyChanges, partition: int, offset: int) -> None:
        """Take one message of one rank into the shard."""
        core = self._cores.get(partition)
        if core is None:
            core = self._cores[partition] = ShardCore(partition, self._shards())
        self._answers.append((partition, core.apply(record, offset)))

    async def after_message(self) -> None:
        """Answer at once: the sends are bounded, and the timer waits for what is still on its way."""
        async with self._flushing:
            await self.give_out()

    async def give_out(self) -> None:
        """Send the answers, in order."""
        answers, self._answers = self._answers, []
        for _, answer in answers:
            await self.outbox.send(self._duplicate_steps, codec.encode(answer), key="fleet", partition=0)

    def drop(self, partition: int) -> None:
        """Forget a shard that moved away."""
        self._cores.pop(partition, None)
        self._answers = [(shard, answer) for shard, answer in self._answers if shard != partition]
