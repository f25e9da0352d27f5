"""What a content shard knows of each rank, and up to which instant it has heard of all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.records import ResidencyChanges
from streams.holding import Rank

STALE_MS = 60_000
"""A rank that declared no bound is no longer waited for when it is this far behind the newest, in milliseconds of engine time."""

GRACE_US = 2_000_000
"""By default, what a rank sends later than this behind its own newest engine time is not waited for."""


class Known:
    """One rank: ``taken`` is the position of the newest batch taken, ``said`` the header of the message that told it."""

    __slots__ = ("first_held_us", "said", "taken", "watermark_us")

    def __init__(self) -> None:
        self.taken = -1
        self.watermark_us = 0
        self.first_held_us = 0
        self.said: tuple[str | None, str | None, int, int, str, int | None, int, bool] = (None, None, 0, 0, "", None, 0, False)

    @property
    def departed(self) -> bool:
        """Whether its forwarder stopped, and nothing came since."""
        return self.said[-1]

    @property
    def stale_us(self) -> int:
        """How far it may be behind before it is not waited for."""
        return (self.said[-2] or STALE_MS) * 1_000


class Ranks:
    """The ranks that a shard has heard of up to one position (``position``: of the message taken last; -1: none)."""

    def __init__(self, step_us: int, grace_us: int) -> None:
        self.known: dict[Rank, Known] = {}
        self.newest_us = 0
        self.closed_us = 0
        self.position = -1
        self._step_us = step_us
        self._grace_us = grace_us
        self._waits_for: Rank | None = None

    def hear(self, rank: Rank, changes: ResidencyChanges) -> tuple[Known, int]:
        """Take a message's header, unless it was sent before what is known; the rank, and the position that was taken before."""
        known = self.known.get(rank)
        if known is None:
            known = self.known[rank] = Known()
        taken = known.taken
        if changes.source_offset >= taken:
            known.taken = changes.source_offset
            known.said = (
                changes.workload,
                changes.model,
                changes.declared_at_us,
                changes.key_epoch,
                changes.canary,
                changes.kv_bytes_per_token,
                changes.staleness_ms,
                changes.departed,
            )
        known.watermark_us = max(known.watermark_us, changes.watermark_us)
        self.newest_us = max(self.newest_us, changes.watermark_us)
        return known, taken

    def close(self) -> int:
        """The newest instant, of those of which shared content is told, that all live ranks have passed by the grace."""
        needed = self.closed_us + self._step_us + self._grace_us
        if self.newest_us < needed or (self._waits_for is not None and self._holds_up(self.known[self._waits_for], needed)):
            return self.closed_us
        low = self.newest_us
        for rank, known in self.known.items():
            if self._holds_up(known, needed):
                self._waits_for = rank
                return self.closed_us
            if self._live(known):
                low = min(low, known.watermark_us)
        self._waits_for = None
        self.closed_us = (low - self._grace_us) // self._step_us * self._step_us
        return self.closed_us

    def _live(self, known: Known) -> bool:
        return not known.departed and known.watermark_us > 0 and known.watermark_us >= self.newest_us - known.stale_us

    def _holds_up(self, known: Known, needed: int) -> bool:
        return known.watermark_us < needed and self._live(known)

    def dump(self) -> list[Any]:
        """As plain values for :meth:`load`."""
        ranks = [[*rank, each.taken, each.watermark_us, each.first_held_us, each.said] for rank, each in self.known.items()]
        return [self.position, self.newest_us, self.closed_us, ranks]

    def load(self, data: Sequence[Any]) -> None:
        """Take on what was dumped."""
        self.position, self.newest_us, self.closed_us, ranks = data
        self.known = {}
        for instance_id, dp_rank, taken, watermark_us, first_held_us, said in ranks:
            known = self.known[instance_id, dp_rank] = Known()
            known.taken, known.watermark_us, known.first_held_us = taken, watermark_us, first_held_us
            known.said = tuple(said)
