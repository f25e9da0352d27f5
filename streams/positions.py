"""Where an agent stands in its topic. Pure bookkeeping.

Block-level state lives in memory and is built again by reading from the earliest offset, so these positions are never
committed. They tell redeliveries from news, tell where to go on in a partition that stays with this worker through a
rebalance, and show progress to the watchdog.
"""

from __future__ import annotations

from collections.abc import Iterable


class Positions:
    """Partitions of one topic held by this worker, and the next offset of each that has not been taken."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._next: dict[int, int] = {}

    def hold(self, partitions: Iterable[int]) -> set[int]:
        """From now on exactly ``partitions`` are held; gives those that were and no longer are. Positions of the rest are kept."""
        now = set(partitions)
        lost = set(self._next) - now
        for partition in lost:
            del self._next[partition]
        for partition in now:
            self._next.setdefault(partition, 0)
        return lost

    def take(self, partition: int, offset: int) -> bool:
        """Whether the message is ours and new; then the position moves past it."""
        if offset < self._next.get(partition, offset + 1):
            return False
        self._next[partition] = offset + 1
        return True

    def all(self) -> dict[tuple[str, int], int]:
        """(topic, partition) to next offset, for every held partition. May be called from any thread."""
        return {(self.topic, partition): offset for partition, offset in self._next.copy().items()}

    def started(self) -> dict[tuple[str, int], int]:
        """The same for partitions of which something was taken."""
        return {key: offset for key, offset in self.all().items() if offset}

    def __str__(self) -> str:
        """The held partitions, for people."""
        return ",".join(str(partition) for partition in sorted(self._next)) or "none"
