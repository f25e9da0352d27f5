"""Residency changes that never reach their shard, by retention or because they cannot be read: the fleet's figures show it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from schemas import codec
from schemas.records import DuplicateSteps, ResidencyChanges, ResidencyStep
from streams.agents.fleet import FleetAgent
from streams.merger import Merger
from streams.settings import WorkerSettings

FIRST_US = 1_796_000_000_000_000
CONTENT = bytes(16)


def changes(instance: str, number: int, *, opened: bytes = b"", closed: bytes = b"") -> ResidencyChanges:
    at = FIRST_US + number * 1_000_000
    return ResidencyChanges(instance, 0, None, "m", number, at, [ResidencyStep(number, at, "GPU", 16, opened, closed)])


MESSAGES = [
    changes("a", 0, opened=CONTENT),
    changes("b", 1, opened=CONTENT),
    changes("a", 2, closed=CONTENT),
    changes("b", 30),
    changes("a", 31),
]


class Sent:
    """A channel that acknowledges at once."""

    def __init__(self) -> None:
        self.answers: list[DuplicateSteps] = []

    async def send(self, *, key: bytes | None, value: bytes, partition: int | None = None) -> Awaitable[Any]:
        self.answers.append(codec.decode(value, DuplicateSteps))
        return asyncio.sleep(0)


class Message:
    def __init__(self, offset: int, value: bytes, key: bytes | None) -> None:
        self.partition = 0
        self.offset = offset
        self.key = key
        self.value = value


class Events:
    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    async def events(self) -> Any:
        for message in self._messages:
            yield type("Event", (), {"message": message})


def agent(sent: Sent) -> FleetAgent:
    made = FleetAgent(
        settings=WorkerSettings("", Path()), shards=lambda: 1, duplicate_steps=sent, dead_letters=sent, skipped=asyncio.Event()
    )
    made.hold({0})
    return made


async def figures(key: bytes | None, *, deleted: bool, restarted: bool) -> set[str]:
    """Reasons of the fleet where the third message is deleted, or cannot be read; its worker may be replaced by another then."""
    sent, letters = Sent(), Sent()
    fleet = agent(sent)
    fleet._dead_letters = letters
    letters.send = sent_nowhere  # type: ignore[method-assign]
    fleet.begin(0, 0, {})
    queue = [Message(number, codec.encode(each), f"{each.instance_id}/0".encode()) for number, each in enumerate(MESSAGES)]
    queue[2] = Message(2, b"not Avro", key)
    await fleet.run(Events(queue[:2] if deleted else queue[:3]))
    await fleet.flush()
    if deleted:
        fleet.missed(0, 2)
        fleet.positions.starts_at(0, 3)
    if restarted:
        owners = {owner: (fleet.positions.next(0), fleet.dump(0, owner)) for owner in fleet.marks(0)}
        fleet = agent(sent)
        fleet.begin(0, 3, owners)
    await fleet.run(Events(queue[3:]))
    await fleet.flush()
    merger = Merger(shards=1)
    for offset, answer in enumerate(sent.answers):
        merger.apply(answer, offset)
    return {reason for row in merger.drain() for reason in row.reasons}


async def sent_nowhere(*, key: bytes | None, value: bytes, partition: int | None = None) -> Awaitable[Any]:
    return asyncio.sleep(0)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_deleted_or_cannot_be_read_is_missing_from_the_fleets_figures(restarted: bool) -> None:
    assert "shards_missing" in asyncio.run(figures(b"a/0", deleted=True, restarted=restarted))
    assert "shards_missing" in asyncio.run(figures(b"a/0", deleted=False, restarted=restarted))
    assert "shards_missing" not in asyncio.run(figures(b"of nobody", deleted=False, restarted=restarted))
    assert "shards_missing" not in asyncio.run(figures(None, deleted=False, restarted=restarted))
