"""What the agents share: input that is decoded or set aside, and state that follows the partitions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import DeadLetter, DuplicateSteps, RankMessage, ResidencyChanges
from schemas.topics import Topic
from streams.dead_letters import dead_letter, letter_key
from streams.emit import Channel, Outbox
from streams.positions import Positions

log = logging.getLogger("kvcensus.worker")

FLUSH_EVERY = 256
"""Messages after which an agent gives out what it has without waiting for the timer: while catching up, the next stage works along."""

DUMP_SECONDS = 0.05
"""So long an agent may dump owner after owner before its input goes on; a single large owner takes what it takes."""

R = TypeVar("R", RankMessage, ResidencyChanges, DuplicateSteps)


class Message(Protocol):
    """What is needed of a Kafka message."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Event(Protocol):
    """What is needed of a Faust event."""

    message: Message


class Stream(Protocol):
    """What is needed of a Faust stream."""

    def events(self) -> AsyncIterable[Any]:
        """The events of the topic's partitions that this worker holds."""
        ...


Marks = dict[str, tuple[int, int]]
"""Of each owner in a partition: offsets of the first and the last message counted for it."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What one owner knows. ``position``: the first input offset that is not in it. ``seconds`` it took to make."""

    owner: str
    position: int
    data: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Dumps of one partition, made at one moment: ``position`` is where its reading stood, ``marks`` what was there by then.

    All that was counted before ``position`` has been given out. ``tenure`` tells whether the partition stayed here meanwhile.
    """

    partition: int
    tenure: int
    position: int
    marks: Marks
    dumps: list[Dump]


class Agent(Generic[R]):
    """Reads ``topic`` as records of one kind; subclasses count them and give out the results.

    All state follows the partitions: what belongs to a partition that moved away is dropped, and restored by whoever reads it.
    ``skipped`` is set when messages are missing: nothing more of that partition is counted until they were read.
    """

    name = "agent"

    def __init__(self, topic: Topic, kind: type[R], skipped: asyncio.Event, dead_letters: Channel) -> None:
        self.topic = topic
        self.positions = Positions(topic.name)
        self.poisoned = 0
        self.failed = 0
        self.applied = 0
        self.outbox = Outbox()
        self.skipped = skipped
        self.unready: set[int] = set()
        self._kind: type[R] = kind
        self._dead_letters = dead_letters
        self._letters: list[DeadLetter] = []
        self._since_flush = 0
        self._flushing = asyncio.Lock()
        self._tenures: dict[int, int] = {}

    async def run(self, stream: Stream) -> None:
        """Read until the worker stops."""
        async for event in stream.events():
            message = event.message
            # Of a partition whose state is being read nothing is counted; it is positioned when that is done.
            if message.partition in self.unready:
                continue
            if not self.positions.take(message.partition, message.offset):
                if self.positions.holes():
                    self.skipped.set()
                continue
            self._since_flush += 1
            self._read(message)
            await self.after_message()
            if self._since_flush >= FLUSH_EVERY:
                if self.flush_due():
                    await self.flush()
                else:
                    self._since_flush = 0
                    await asyncio.sleep(0)  # a queue that is never empty would let nothing else run

    def _read(self, message: Message) -> None:
        try:
            self.count(codec.decode(message.value or b"", self._kind), message.partition, message.offset)
            self.applied += 1
        except KvcensusError as error:  # no record of this kind, or one that cannot be true
            self.poisoned += 1
            log.warning("%s[%d] offset %d set aside: %s", self.topic.name, message.partition, message.offset, error)
            self._set_aside(message, str(error))
        except Exception as error:  # a well-formed message that the rules choke on must not stop the others
            self.failed += 1
            log.exception("%s[%d] offset %d could not be counted", self.topic.name, message.partition, message.offset)
            self._set_aside(message, f"could not be counted: {error!r}")

    def _set_aside(self, message: Message, reason: str) -> None:
        """Nothing is lost silently: the message goes to the dead letters, and the rank it belongs to is told."""
        where = self.topic.name, message.partition, message.offset
        self._letters.append(dead_letter(*where, reader=self.name, reason=reason, key=message.key, payload=message.value))
        self.spoiled(message)

    async def flush(self) -> None:
        """Give out what the cores have to say, and return once the broker has it."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        self._since_flush = 0
        letters, self._letters = self._letters, []
        for letter in letters:
            await self.outbox.send(self._dead_letters, codec.encode(letter), key=letter_key(letter))
        await self.give_out()
        await self.outbox.settle()

    # -- partitions and their state ---------------------------------------------------------------------------

    def hold(self, partitions: set[int]) -> None:
        """A rebalance is over and exactly ``partitions`` of the topic are ours; those that came are unready until :meth:`begin`."""
        before = {place[1] for place in self.positions.all()}
        for partition in self.positions.hold(partitions):
            self.drop(partition)
        self.unready = (self.unready & partitions) | (partitions - before)
        for partition in partitions - before:
            self._tenures[partition] = self._tenures.get(partition, 0) + 1

    def begin(self, partition: int, resume: int, owners: Mapping[str, tuple[int, bytes]]) -> None:
        """Take what ``owners`` (position and dump of each) knew, and read on from ``resume``. Raises what a dump that is broken raises."""
        self.drop(partition)
        self.load(partition, resume, owners)
        self.positions.begin(partition, resume)
        self.unready.discard(partition)

    def held(self) -> list[int]:
        """Partitions that are being counted here."""
        return [place[1] for place in self.positions.all() if place[1] not in self.unready]

    def holds(self, cut: Cut) -> bool:
        """Whether the partition of ``cut`` has been here ever since."""
        return self._tenures.get(cut.partition) == cut.tenure and cut.partition in self.held()

    async def cut(self, partition: int, owners: Collection[str]) -> Cut | None:
        """Dumps of ``owners`` (the first of them, if all would take long), once all that they say was acknowledged.

        ``None`` if the partition is no longer here.
        """
        async with self._flushing:
            if partition not in self.held():
                return None
            position = self.positions.next(partition)
            marks = self.marks(partition)
            dumps: list[Dump] = []
            now = time.monotonic()
            until = now + DUMP_SECONDS
            for owner in owners:
                if owner in marks:
                    began, data = now, self.dump(partition, owner)
                    now = time.monotonic()
                    dumps.append(Dump(owner, max(position, marks[owner][1] + 1), data, now - began))
                if now > until:
                    break
            made = Cut(partition, self._tenures[partition], position, marks, dumps)
            await self._flush()
        return made

    # -- for subclasses ---------------------------------------------------------------------------------------

    def count(self, record: R, partition: int, offset: int) -> None:
        """Count one record. Raises :class:`KvcensusError` for one that cannot be true, of which nothing was counted."""
        raise NotImplementedError

    def spoiled(self, message: Message) -> None:
        """A message could not be used; whom it concerns must show it."""

    async def after_message(self) -> None:
        """Called after each message, taken or set aside."""

    def flush_due(self) -> bool:
        """Whether to give out, after :data:`FLUSH_EVERY` messages, what the timer would give out later."""
        return True

    async def give_out(self) -> None:
        """Send what changed."""
        raise NotImplementedError

    def drop(self, partition: int) -> None:
        """Forget the state of a partition."""
        raise NotImplementedError

    def marks(self, partition: int) -> Marks:
        """The owners of state in a partition, and which messages were counted for each; what it was restored from counts as one."""
        raise NotImplementedError

    def dump(self, partition: int, owner: str) -> bytes:
        """What ``owner`` knows; what it has to say is put aside for the next :meth:`give_out`."""
        raise NotImplementedError

    def load(self, partition: int, resume: int, owners: Mapping[str, tuple[int, bytes]]) -> None:
        """Know what ``owners`` knew, which read up to their positions; reading begins at ``resume``."""
        raise NotImplementedError
