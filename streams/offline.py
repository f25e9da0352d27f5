"""The counting cores driven over messages that are already at hand: what `report` and the tests use. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.records import DuplicateWindow, RankMessage, RankWindow, Recompute, SharedPrefix
from streams.duplication import ShardCore
from streams.merger import Merger
from streams.residency import RankCore

DRAIN_EVERY = 1_000
"""Messages between two drains: bounds memory on long captures, changes no figure."""

ANY_SIZE = 1 << 62


@dataclass(slots=True)
class Counted:
    """Every row the cores gave; of rows with one key the one with the highest version holds."""

    rank_windows: list[RankWindow] = field(default_factory=list)
    recomputes: list[Recompute] = field(default_factory=list)
    duplicate_windows: list[DuplicateWindow] = field(default_factory=list)
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)


class OfflineFleet:
    """All three cores in one place: messages of any number of ranks in, rows out."""

    def __init__(self, *, window_us: int = 10_000_000, shards: int = 1, skew_us: int = 1_000_000) -> None:
        self._window_us = window_us
        self._ranks: dict[tuple[str, int], RankCore] = {}
        self._shards = [
            # An answer that nothing sends may be of any size, and none comes after the last.
            ShardCore(shard, shards, skew_us=skew_us, window_us=window_us, shared_bytes=ANY_SIZE)
            for shard in range(shards)
        ]
        self._merger = Merger(window_us=window_us, shards=shards)
        self._offset = 0
        self._since_drain = 0
        self.counted = Counted()

    def apply(self, message: RankMessage, offset: int | None = None) -> None:
        """Count one message; the messages of one rank must come in their order.

        ``offset`` is its place on the topic, growing within the rank: versions of rank windows and recomputes are then those of a worker.
        """
        self._core(message.instance_id, message.dp_rank).apply(message, self._offset if offset is None else offset)
        self._moved_on()

    def unreadable(self, instance_id: str, dp_rank: int, offset: int | None = None) -> None:
        """Note a message of the rank that could not be read."""
        self._core(instance_id, dp_rank).unreadable(self._offset if offset is None else offset)
        self._moved_on()

    def _core(self, instance_id: str, dp_rank: int) -> RankCore:
        core = self._ranks.get((instance_id, dp_rank))
        if core is None:
            core = RankCore(instance_id, dp_rank, window_us=self._window_us, shards=len(self._shards))
            self._ranks[instance_id, dp_rank] = core
        return core

    def _moved_on(self) -> None:
        self._offset += 1
        self._since_drain += 1
        if self._since_drain >= DRAIN_EVERY:
            self.drain()

    def take(self) -> Counted:
        """:meth:`drain`, and forget the rows."""
        counted, self.counted = self.drain(), Counted()
        return counted

    def drain(self) -> Counted:
        """Pass everything on to the fleet; all rows so far."""
        self._since_drain = 0
        for core in self._ranks.values():
            drained = core.drain()
            self.counted.rank_windows.extend(drained.windows)
            self.counted.recomputes.extend(drained.recomputes)
            for shard, messages in zip(self._shards, drained.changes, strict=True):
                for changes in messages:
                    self._merger.apply(shard.apply(changes, self._offset), self._offset)
                    self._offset += 1
        self.counted.duplicate_windows.extend(self._merger.drain())
        self.counted.shared_prefixes.extend(self._merger.drain_prefixes())
        return self.counted


def count(messages: Iterable[RankMessage], *, window_us: int = 10_000_000, shards: int = 1, skew_us: int = 1_000_000) -> Counted:
    """Rows of a whole set of messages. ``window_us`` and ``skew_us`` in microseconds of engine time."""
    fleet = OfflineFleet(window_us=window_us, shards=shards, skew_us=skew_us)
    for message in messages:
        fleet.apply(message)
    return fleet.drain()
