"""Where an agent stands in its topic. Pure bookkeeping.

Block-level state lives in memory; where reading begins again is said by its snapshots, so these positions are never
committed. They tell redeliveries from news, tell where to go on in a partition that stays with this worker through a
rebalance, show progress to the watchdog, and refuse to go on behind a hole: around a rebalance Faust clears buffers that
may hold messages it will not fetch again (with acknowledged offsets it would; here there are none to return to).
"""

from __future__ import annotations

from collections.abc import Iterable

Place = tuple[str, int]
"""Topic and partition."""


class Positions:
    """Partitions of one topic held by this worker, and the next offset expected of each."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._next: dict[int, int] = {}
        self._holes: dict[int, int] = {}

    def hold(self, partitions: Iterable[int]) -> set[int]:
        """From now on exactly ``partitions`` are held; gives those that were and no longer are. Positions of the rest are kept."""
        now = set(partitions)
        lost = set(self._next) - now
        for partition in lost:
            del self._next[partition]
        for partition in now:
            self._next.setdefault(partition, 0)
        self._holes.clear()
        return lost

    def take(self, partition: int, offset: int) -> bool:
        """Whether the message is ours and the next one; then the position moves past it. One too far on is a hole: see :meth:`holes`."""
        expected = self._next.get(partition)
        if expected is None or offset < expected:
            return False
        if offset > expected:
            self._holes[partition] = offset
            return False
        self._next[partition] = offset + 1
        self._holes.pop(partition, None)
        return True

    def begin(self, partition: int, offset: int) -> None:
        """Reading of a held partition begins at ``offset``: what lies before is known already."""
        if partition in self._next:
            self._next[partition] = offset

    def next(self, partition: int) -> int:
        """The next offset expected in a held partition."""
        return self._next[partition]

    def holes(self) -> dict[Place, int]:
        """Places where a message came too early, and the offset expected there. Reading has to begin there again."""
        return {(self.topic, partition): self._next[partition] for partition in self._holes}

    def starts_at(self, partition: int, offset: int) -> None:
        """Nothing lies between the offset expected and ``offset``, says the broker (retention, a transaction's marker): expect that one."""
        if partition in self._next:
            self._next[partition] = max(self._next[partition], offset)

    def all(self) -> dict[Place, int]:
        """Every held place and the next offset there. May be called from any thread."""
        return {(self.topic, partition): offset for partition, offset in self._next.copy().items()}

    def __str__(self) -> str:
        """The held partitions, for people."""
        return ",".join(str(partition) for partition in sorted(self._next)) or "none"
