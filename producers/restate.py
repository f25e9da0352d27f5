"""What stands for messages that the spool's bound forced out: a declared loss in place of batches. Pure.

Per key, batches and refusals of one life whose numbers adjoin become one loss, as do losses declared before that adjoin them.
What must not be dropped stays, and what may be dropped vanishes; both are counted. Restating what was restated merges what
adjoins and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from schemas import codec
from schemas.records import NO_SEQ, Loss, RankMessage

SPOOL_FULL = "the spool was full"
"""The ``reason`` of a loss that stands for batches which were forced out."""

Kind = Literal["batch", "keep", "droppable"]
"""How an entry may be dropped: for a loss that names it, never, or with nothing in its place but a count."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message for Kafka. ``batch``: a RankMessage with a batch or refusal; ``keep``: any other RankMessage."""

    topic: str
    key: bytes
    value: bytes
    kind: Kind = "keep"


class Restated(msgspec.Struct):
    """``entries`` stand for those given, at most as many, none before the place of the last one it stands for.

    ``batches`` (batches and refusals) and ``droppable`` are how many of each kind are gone.
    """

    entries: list[Entry]
    batches: int = 0
    droppable: int = 0


class _Run:
    """Messages of one key and life, one after another, whose numbers adjoin; ``place`` is that of the last of them."""

    __slots__ = ("entry", "first_seq", "last", "last_seq", "members", "place", "reasons", "skipped")

    def __init__(self, place: int, entry: Entry, message: RankMessage) -> None:
        self.first_seq, self.last_seq = _numbers(message)
        self.skipped = message.skipped
        self.members = 0
        self.reasons: set[str] = set()
        self.add(place, entry, message)

    def add(self, place: int, entry: Entry, message: RankMessage) -> None:
        self.place, self.entry, self.last = place, entry, message
        self.members += 1
        self.last_seq = max(self.last_seq, _numbers(message)[1])
        self.reasons.add(message.loss.reason if message.loss is not None else SPOOL_FULL)

    def takes(self, message: RankMessage) -> bool:
        """Whether ``message`` goes on where this run ends, or repeats a number of it."""
        if message.life_id != self.last.life_id:
            return False
        first, last = _numbers(message)
        return first == self.last_seq + 1 or (self.first_seq <= first and last <= self.last_seq)

    def extend(self, place: int, entry: Entry, message: RankMessage) -> None:
        """Add a message that :meth:`takes` says belongs here."""
        if _numbers(message)[0] > self.last_seq:
            self.skipped += message.skipped
        self.add(place, entry, message)

    def restated(self) -> Entry:
        if self.members == 1 and self.last.loss is not None:
            return self.entry
        last = self.last
        reason = self.reasons.pop() if len(self.reasons) == 1 else SPOOL_FULL
        message = RankMessage(
            last.instance_id,
            last.dp_rank,
            last.life_id,
            self.last_seq + 1,
            last.at_us,
            last.observed_at_ms,
            last.incarnation,
            loss=Loss(self.first_seq, self.last_seq, reason),
            skipped=self.skipped,
        )
        return Entry(self.entry.topic, self.entry.key, codec.encode(message), "keep")


def restate(entries: Sequence[Entry]) -> Restated:
    """What stands for ``entries``, in their order.

    A loss carries life, times and incarnation of the last message it stands for; its ``seq`` is the next one expected, and its
    ``skipped`` how many numbers of the range belong to other ranks: they are not lost. The range begins with those, so that it
    adjoins what was sent before. A refusal out of turn (the number
    that its sender gave adjoins nothing) is dropped without a loss and counted with the droppable ones: it took the place of no batch.
    """
    outcome = Restated([])
    placed: list[tuple[int, Entry]] = []
    runs: dict[tuple[str, bytes], _Run] = {}
    turns = _Turns(entries)
    for place, entry in enumerate(entries):
        if entry.kind == "droppable":
            outcome.droppable += 1
            continue
        message = turns.message(place)
        name = entry.topic, entry.key
        run = runs.get(name)
        if message is None or (entry.kind == "keep" and message.loss is None):
            if run is not None:  # the run's loss comes before what follows it
                placed.append((run.place, runs.pop(name).restated()))
            placed.append((place, entry))
            continue
        if message.refusal is not None and turns.stray(place, run):
            outcome.droppable += 1
            continue
        if entry.kind == "batch":
            outcome.batches += 1
        if run is not None and run.takes(message):
            run.extend(place, entry, message)
        else:
            if run is not None:
                placed.append((run.place, run.restated()))
            runs[name] = _Run(place, entry, message)
    placed.extend((run.place, run.restated()) for run in runs.values())
    outcome.entries = [entry for _, entry in sorted(placed, key=_place)]
    return outcome


class _Turns:
    """The entries' messages, decoded once, and which refusals are out of turn."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._ahead: dict[int, RankMessage | None] = {}

    def message(self, place: int) -> RankMessage | None:
        """The message at ``place``; None if it cannot be read (then it stays as it is) or is none of a rank."""
        if place in self._ahead:
            return self._ahead.pop(place)
        return _decode(self._entries[place])

    def stray(self, place: int, run: _Run | None) -> bool:
        """Whether the refusal at ``place`` adjoins neither ``run`` nor the next message of its key."""
        entry = self._entries[place]
        message = _decode(entry)
        assert message is not None
        if message.seq >= NO_SEQ:
            return True
        if run is not None and run.last.life_id == message.life_id:
            return not run.takes(message) or message.seq <= run.last_seq
        following = self._next_of(entry, place + 1)
        if following is None or following.life_id != message.life_id:
            return False
        return _numbers(following)[0] != message.seq + 1

    def _next_of(self, entry: Entry, start: int) -> RankMessage | None:
        for place in range(start, len(self._entries)):
            other = self._entries[place]
            if other.kind != "droppable" and (other.topic, other.key) == (entry.topic, entry.key):
                if place not in self._ahead:
                    self._ahead[place] = _decode(other)
                return self._ahead[place]
        return None


def _decode(entry: Entry) -> RankMessage | None:
    try:
        return codec.decode(entry.value, RankMessage)
    except codec.CodecError:
        return None


def _numbers(message: RankMessage) -> tuple[int, int]:
    """First and last number that a batch, refusal or loss accounts for, with those of other ranks before it."""
    if message.loss is not None:
        return message.loss.first_seq, message.loss.last_seq
    return message.seq - message.skipped, message.seq


def _place(placed: tuple[int, Entry]) -> int:
    return placed[0]
