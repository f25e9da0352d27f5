"""The counting cores driven over messages that are already at hand: what `report` and the tests use. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.records import DuplicateWindow, RankMessage, RankWindow, Recompute, ResidencyChanges, SharedPrefix
from streams.believable import unbelievable
from streams.duplication import ShardCore
from streams.history import HISTORY_BLOCKS, HISTORY_US
from streams.merger import Merger
from streams.residency import RankCore
from streams.shard_ranks import GRACE_US

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
    """All three cores in one place: messages of any number of ranks in, rows out. The options are those of the cores."""

    def __init__(
        self,
        *,
        window_us: int = 10_000_000,
        shards: int = 1,
        skew_us: int = 1_000_000,
        grace_us: int = GRACE_US,
        history_us: int = HISTORY_US,
        history_blocks: int = HISTORY_BLOCKS,
    ) -> None:
        self._window_us = window_us
        self._history = history_us, history_blocks
        self._ranks: dict[tuple[str, int], RankCore] = {}
        self._shards = [
            # An answer that nothing sends may be of any size, and none comes after the last.
            ShardCore(shard, shards, skew_us=skew_us, window_us=window_us, grace_us=grace_us, shared_bytes=ANY_SIZE)
            for shard in range(shards)
        ]
        self._merger = Merger(window_us=window_us, shards=shards, grace_us=grace_us)
        self._offset = 0
        self._since_drain = 0
        self.counted = Counted()

    def apply(self, message: RankMessage, offset: int | None = None) -> None:
        """Count one message; the messages of one rank must come in their order.

        ``offset`` is its place on the topic, growing within the rank: versions of rank windows and recomputes are then those of a worker.
        One that cannot be true counts as one that could not be read, as in a worker.
        """
        core, place = self._core(message.instance_id, message.dp_rank), self._offset if offset is None else offset
        if unbelievable(message) is None:
            core.apply(message, place)
        else:
            core.unreadable(place)
        self._moved_on()

    def unreadable(self, instance_id: str, dp_rank: int, offset: int | None = None) -> None:
        """Note a message of the rank that could not be read."""
        self._core(instance_id, dp_rank).unreadable(self._offset if offset is None else offset)
        self._moved_on()

    def _core(self, instance_id: str, dp_rank: int) -> RankCore:
        core = self._ranks.get((instance_id, dp_rank))
        if core is None:
            history_us, history_blocks = self._history
            core = RankCore(
                instance_id,
                dp_rank,
                window_us=self._window_us,
                shards=len(self._shards),
                history_us=history_us,
                history_blocks=history_blocks,
            )
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
        said: list[tuple[int, int, ResidencyChanges]] = []
        for core in self._ranks.values():
            drained = core.drain()
            self.counted.rank_windows.extend(drained.windows)
            self.counted.recomputes.extend(drained.recomputes)
            for shard, messages in enumerate(drained.changes):
                said += [(changes.watermark_us, shard, changes) for changes in messages]
        # In the order of time: a shard that heard one rank to its end first would not wait for the others.
        said.sort(key=_time_of)
        for _, shard, changes in said:
            self._merger.apply(self._shards[shard].apply(changes, self._offset), self._offset)
            self._offset += 1
        self.counted.duplicate_windows.extend(self._merger.drain())
        self.counted.shared_prefixes.extend(self._merger.drain_prefixes())
        return self.counted


def _time_of(said: tuple[int, int, ResidencyChanges]) -> int:
    return said[0]


def count(messages: Iterable[RankMessage], *, window_us: int = 10_000_000, shards: int = 1, skew_us: int = 1_000_000) -> Counted:
    """Rows of a whole set of messages. ``window_us`` and ``skew_us`` in microseconds of engine time."""
    fleet = OfflineFleet(window_us=window_us, shards=shards, skew_us=skew_us)
    for message in messages:
        fleet.apply(message)
    return fleet.drain()
