"""Sending results: a bounded number of messages in flight, and nothing counts as given out before the broker has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from msgspec import structs

from schemas import codec
from schemas.records import ResidencyChanges, ResidencyStep

IN_FLIGHT = 512
"""Messages sent and not yet acknowledged, per agent."""

IN_FLIGHT_BYTES = 16 * 1024 * 1024
PART_BYTES = 768 * 1024
"""Size to which one flush of residency changes is cut, below the usual limit of a broker (1 MiB)."""

_STEP_BYTES = 96


class Channel(Protocol):
    """What is needed of a Faust topic."""

    async def send(self, *, key: bytes | None, value: bytes, partition: int | None = None) -> Awaitable[Any]:
        """Hand over one message; the result is awaited for the acknowledgement."""
        ...


class Outbox:
    """Messages on their way. :meth:`settle` waits for all of them and raises the first failure."""

    def __init__(self) -> None:
        self._pending: list[tuple[Awaitable[Any], Callable[[], None] | None]] = []
        self._bytes = 0
        self.sent = 0

    async def send(
        self,
        channel: Channel,
        value: bytes,
        *,
        key: str | None = None,
        partition: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Send one message; ``then`` is called once it was acknowledged. Waits while too much is in flight."""
        if len(self._pending) >= IN_FLIGHT or self._bytes > IN_FLIGHT_BYTES:
            await self.settle()
        acknowledgement = await channel.send(key=None if key is None else key.encode(), value=value, partition=partition)
        self._pending.append((acknowledgement, then))
        self._bytes += len(value)
        self.sent += 1

    async def settle(self) -> None:
        """Wait until everything sent was acknowledged."""
        pending, self._pending, self._bytes = self._pending, [], 0
        try:
            for acknowledgement, then in pending:
                await acknowledgement
                if then is not None:
                    then()
        except BaseException:
            # The rest is abandoned with it: say so to asyncio, or it reports each of them as never retrieved.
            for acknowledgement, _ in pending:
                if isinstance(acknowledgement, asyncio.Future):
                    acknowledgement.add_done_callback(_retrieve)
            raise


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def parts(changes: ResidencyChanges, limit: int = PART_BYTES) -> Iterator[ResidencyChanges]:
    """``changes`` as messages of about ``limit`` bytes each at most, in order.

    Steps of one source offset stay together, because a shard takes all of an offset or none; if they alone are larger,
    so is the message. A part vouches only for what it carries: its offset and watermark are those of its last step, and what was
    observed and noted, and that the rank departed, is said by the last.
    """
    part: list[ResidencyStep] = []
    size = 0
    for step in changes.steps:
        grown = size + _STEP_BYTES + len(step.opened) + len(step.closed) + len(step.parents)
        if part and grown > limit and step.source_offset != part[-1].source_offset:
            last = part[-1]
            yield structs.replace(
                changes, source_offset=last.source_offset, watermark_us=last.at_us, steps=part, observed=[], notes=[], departed=False
            )
            part, grown = [], grown - size
        part.append(step)
        size = grown
    yield structs.replace(changes, steps=part)


async def send_changes(outbox: Outbox, channel: Channel, shard: int, changes: ResidencyChanges, key: str) -> None:
    """Send a rank's changes to their shard. Where they need several messages, each waits for the one before: a hole must not follow."""
    messages = [codec.encode(part) for part in parts(changes)]
    for message in messages[:-1]:
        await outbox.send(channel, message, key=key, partition=shard)
        await outbox.settle()
    await outbox.send(channel, messages[-1], key=key, partition=shard)
