"""What the sink has read and not yet delivered: rows, which message each came from, messages to be set aside. Pure, bounded by its user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import DeadLetter
from schemas.topics import (
    BATCHES,
    DEAD_LETTERS,
    DEPLOYS,
    DUPLICATE_WINDOWS,
    ENGINE_METRICS,
    LIFECYCLE,
    RANK_WINDOWS,
    RECOMPUTES,
    SHARED_PREFIXES,
)
from sql.rows import Row, TableRows
from streams.dead_letters import dead_letter
from streams.positions import Place
from streams.sink_rows import Origin, Origins

_READ = (
    RANK_WINDOWS,
    RECOMPUTES,
    DUPLICATE_WINDOWS,
    SHARED_PREFIXES,
    DEAD_LETTERS,
    DEPLOYS,
    LIFECYCLE,
    ENGINE_METRICS,
    BATCHES,
)

KINDS: Mapping[str, type[Row]] = {topic.name: cast("type[Row]", topic.record) for topic in _READ}
"""What is read: the results, the facts they were counted from, and what could not be counted."""


class Gathered:
    """Messages taken since the last :meth:`clear`."""

    def __init__(self) -> None:
        self.rows = TableRows()
        self.origins = Origins(self.rows)
        self.letters: list[DeadLetter] = []
        self.bytes = 0
        self.next: dict[Place, int] = {}
        """Where reading goes on behind what was taken: what is committed once it has been delivered."""

    def take(self, origin: Origin) -> str | None:
        """Take a message; what is wrong with it if it cannot be read, which sets it aside."""
        self.bytes += len(origin.value or b"")
        self.next[origin.topic, origin.partition] = origin.offset + 1
        try:
            self.rows.add(codec.decode(origin.value or b"", KINDS[origin.topic]), origin.partition, origin.offset)
        except KvcensusError as problem:
            if origin.topic != BATCHES.name:  # the counting half sets those aside itself
                self.set_aside(origin, str(problem))
            return str(problem)
        self.origins.note(origin)
        return None

    def set_aside(self, origin: Origin, reason: str) -> None:
        """Keep a message for the dead letters; what is one already is only counted, or it would come back again and again."""
        if origin.topic == DEAD_LETTERS.name:
            return
        self.letters.append(
            dead_letter(origin.topic, origin.partition, origin.offset, reader="sink", reason=reason, key=origin.key, payload=origin.value)
        )

    def clear(self) -> None:
        """Forget all."""
        self.rows.clear()
        self.origins.clear()
        self.letters.clear()
        self.bytes = 0
        self.next.clear()
