"""The fleet agent: residency changes of all ranks in one content shard in, duplicate steps out, one answer per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from schemas import codec
from schemas.records import DuplicateSteps, ResidencyChanges
from schemas.topics import RESIDENCY
from streams.agents.common import Agent, Marks, Message
from streams.dead_letters import rank_named
from streams.duplication import SLICES, ShardCore
from streams.emit import Channel
from streams.settings import WorkerSettings


@dataclass(slots=True)
class _Shard:
    """``known``: up to where each slice was restored; answers below ``answered`` were given out by whoever made the snapshots."""

    core: ShardCore
    first: int
    last: int
    answered: int = 0
    known: dict[str, int] = field(default_factory=dict)


class FleetAgent(Agent[ResidencyChanges]):
    """One :class:`ShardCore` per partition of the residency topic."""

    name = "fleet"

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        shards: Callable[[], int],
        duplicate_steps: Channel,
        dead_letters: Channel,
        skipped: asyncio.Event,
    ) -> None:
        super().__init__(RESIDENCY, ResidencyChanges, skipped, dead_letters)
        self._settings = settings
        self._shards = shards
        self._duplicate_steps = duplicate_steps
        self._held: dict[int, _Shard] = {}
        self._answers: list[tuple[int, DuplicateSteps]] = []

    def count(self, record: ResidencyChanges, partition: int, offset: int) -> None:
        """Take one message of one rank into the shard."""
        shard = self._shard(partition, offset)
        shard.last = offset
        answer = shard.core.apply(record, offset)
        # Read again for the slices that are behind, this would tell only what they have to say.
        if offset >= shard.answered:
            self._answers.append((partition, answer))

    def _shard(self, partition: int, offset: int) -> _Shard:
        shard = self._held.get(partition)
        if shard is None:
            shard = self._held[partition] = _Shard(self._new(partition), offset, offset)
        return shard

    def spoiled(self, message: Message) -> None:
        """Something that a rank said is not known: from here on the shard's copies are not all there."""
        if rank_named(message.key) is not None:
            self.missed(message.partition, message.offset)

    def missed(self, partition: int, offset: int) -> None:
        """The messages up to the one at ``offset`` are gone, as far as they were not counted: the next answer shows it to the merger."""
        shard = self._shard(partition, offset)
        shard.last = max(shard.last, offset)
        shard.core.missed(offset)

    def _new(self, partition: int) -> ShardCore:
        return ShardCore(partition, self._shards(), window_us=self._settings.window_us, grace_us=self._settings.grace_us)

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
        self._held.pop(partition, None)
        self._answers = [(shard, answer) for shard, answer in self._answers if shard != partition]

    # -- state --------------------------------------------------------------------------------------------------

    def marks(self, partition: int) -> Marks:
        """One owner per slice of the shard's contents."""
        shard = self._held.get(partition)
        if shard is None:
            return {}
        names = map(str, range(SLICES))
        return {name: (shard.first, max(shard.last, shard.known.get(name, 0) - 1)) for name in names}

    def dump(self, partition: int, owner: str) -> bytes:
        """What one slice knows of who holds what."""
        return self._held[partition].core.dump_slice(int(owner))

    def load(self, partition: int, resume: int, owners: Mapping[str, tuple[int, bytes]]) -> None:
        """Slices as they were."""
        if not owners:
            return
        shard = _Shard(self._new(partition), resume, resume - 1)
        for name, (position, data) in owners.items():
            shard.core.load_slice(int(name), data)
            shard.known[name] = position
            shard.answered = max(shard.answered, position)
        self._held[partition] = shard
