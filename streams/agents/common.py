"""What the agents share: input that is decoded or set aside, and state that follows the partitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from typing import Any, Generic, Protocol, TypeVar

from schemas import codec
from schemas.records import DuplicateSteps, RankMessage, ResidencyChanges
from schemas.topics import Topic
from streams.emit import Outbox
from streams.positions import Positions

log = logging.getLogger("kvcensus.worker")

FLUSH_EVERY = 256
"""Messages after which an agent gives out what it has without waiting for the timer: while catching up, the next stage works along."""

R = TypeVar("R", RankMessage, ResidencyChanges, DuplicateSteps)


class Message(Protocol):
    """What is needed of a Kafka message."""

    partition: int
    offset: int
    value: bytes | None


class Event(Protocol):
    """What is needed of a Faust event."""

    message: Message


class Stream(Protocol):
    """What is needed of a Faust stream."""

    def events(self) -> AsyncIterable[Any]:
        """The events of the topic's partitions that this worker holds."""
        ...


class Agent(Generic[R]):
    """Reads ``topic`` as records of one kind; subclasses count them and give out the results.

    All state follows the partitions: what belongs to a partition that moved away is dropped, and built again by whoever reads it.
    ``skipped`` is set when messages are missing: nothing more of that partition is counted until they were read.
    """

    name = "agent"

    def __init__(self, topic: Topic, kind: type[R], skipped: asyncio.Event) -> None:
        self.topic = topic
        self.positions = Positions(topic.name)
        self.poisoned = 0
        self.failed = 0
        self.applied = 0
        self.outbox = Outbox()
        self.skipped = skipped
        self._kind: type[R] = kind
        self._since_flush = 0
        self._flushing = asyncio.Lock()

    async def run(self, stream: Stream) -> None:
        """Read until the worker stops."""
        async for event in stream.events():
            message = event.message
            if not self.positions.take(message.partition, message.offset):
                if self.positions.holes():
                    self.skipped.set()
                continue
            self._since_flush += 1
            self._read(message)
            await self.after_message()
            if self._since_flush >= FLUSH_EVERY:
                await self.flush()

    def _read(self, message: Message) -> None:
        try:
            record = codec.decode(message.value or b"", self._kind)
        except codec.CodecError as error:
            self.poisoned += 1
            log.warning("%s[%d] offset %d set aside: %s", self.topic.name, message.partition, message.offset, error)
            return
        try:
            self.count(record, message.partition, message.offset)
            self.applied += 1
        except Exception:  # a well-formed message that the rules choke on must not stop the others
            self.failed += 1
            log.exception("%s[%d] offset %d could not be counted", self.topic.name, message.partition, message.offset)

    async def flush(self) -> None:
        """Give out what the cores have to say, and return once the broker has it."""
        async with self._flushing:
            self._since_flush = 0
            await self.give_out()
            await self.outbox.settle()

    def hold(self, partitions: set[int]) -> None:
        """A rebalance is over and exactly ``partitions`` of the topic are ours."""
        for partition in self.positions.hold(partitions):
            self.drop(partition)

    # -- for subclasses ---------------------------------------------------------------------------------------

    def count(self, record: R, partition: int, offset: int) -> None:
        """Count one record."""
        raise NotImplementedError

    async def after_message(self) -> None:
        """Called after each message, taken or set aside."""

    async def give_out(self) -> None:
        """Send what changed."""
        raise NotImplementedError

    def drop(self, partition: int) -> None:
        """Forget the state of a partition."""
        raise NotImplementedError
