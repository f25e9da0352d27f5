"""Counting stored facts again: messages in, result rows of a span out. Pure, no clocks, no I/O.

The rows are those a worker gives, but for what hangs on positions between its stages: duplicate windows and shared prefixes have the
lowest versions, so that a worker's own rows of the same rules replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schemas.records import DuplicateWindow, RankMessage, RankWindow, Recompute, SharedPrefix
from streams.offline import Counted, OfflineFleet

TAKE_EVERY = 5_000
"""Most messages between two looks at what the cores have given."""

STEP_US = 10_000_000
"""Most engine time between two. All that a rank did is passed on to the fleet at once, rank after rank; were that long, the ranks that
come last would seem silent meanwhile, and windows close without them."""

HOLD_US = 3_600 * 1_000_000
"""Windows of the fleet are given out when they lie so far back: what comes late may still change them."""

Row = RankWindow | Recompute | DuplicateWindow | SharedPrefix


class Recount:
    """Counts with ``fleet`` and gives the rows that lie in [``since_us``, ``until_us``) (engine microseconds; null: without an end).

    Without ``footprint`` nothing is told of the fleet: where not all of its ranks are counted, that would be wrong.
    """

    def __init__(self, fleet: OfflineFleet, *, since_us: int | None = None, until_us: int | None = None, footprint: bool = True) -> None:
        self.messages = 0
        self.unreadable = 0
        self._fleet = fleet
        self._since_us = -(1 << 62) if since_us is None else since_us
        self._until_us = 1 << 62 if until_us is None else until_us
        self._footprint = footprint
        self._newest = 0
        self._since_take = 0
        self._taken_us = 0
        self._heard: set[tuple[str, int]] = set()
        self._open: dict[tuple[Any, ...], RankWindow] = {}
        self._held: dict[tuple[Any, ...], DuplicateWindow | SharedPrefix] = {}

    def apply(self, instance_id: str, dp_rank: int, offset: int, message: RankMessage | None) -> Iterator[Row]:
        """Count one message (null: one that could not be read) of one rank at its place; rows that will not change any more."""
        self.messages += 1
        self._since_take += 1
        at_us = 0 if message is None or message.batch is None else message.at_us
        if self._since_take >= TAKE_EVERY or at_us >= self._taken_us + STEP_US:
            self._taken_us = max(self._taken_us, at_us)
            yield from self._take()
        if message is None:
            self.unreadable += 1
            self._fleet.unreadable(instance_id, dp_rank, offset)
            return
        self._fleet.apply(message, offset)
        if at_us and (instance_id, dp_rank) not in self._heard:
            self._heard.add((instance_id, dp_rank))
            yield from self._take()  # from here on the fleet waits for it

    def finish(self) -> Iterator[Row]:
        """The rows that are left."""
        yield from self._take()
        yield from self._open.values()
        yield from self._held.values()
        self._open, self._held = {}, {}

    def _take(self) -> Iterator[Row]:
        self._since_take = 0
        counted = self._fleet.take()
        for row in counted.rank_windows:
            self._newest = max(self._newest, row.window_start_us)
            if not self._overlaps(row):
                continue
            key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us)
            if row.final:
                self._open.pop(key, None)
                yield row
            else:
                self._open[key] = row
        for recompute in counted.recomputes:
            if self._since_us <= recompute.back_at_us < self._until_us:
                yield recompute
        if self._footprint:
            yield from self._take_fleet(counted)

    def _take_fleet(self, counted: Counted) -> Iterator[Row]:
        for window in counted.duplicate_windows:
            if self._overlaps(window):
                window.version = int(window.final)
                self._held[window.scope, window.scope_key, window.tier, window.window_start_us] = window
        for prefix in counted.shared_prefixes:
            if self._since_us < prefix.as_of_us <= self._until_us:
                prefix.version = 1
                self._held[prefix.as_of_us, prefix.place] = prefix
        settled = [key for key, row in self._held.items() if _end(row) <= self._newest - HOLD_US]
        for key in settled:
            yield self._held.pop(key)

    def _overlaps(self, row: RankWindow | DuplicateWindow) -> bool:
        return row.window_start_us < self._until_us and row.window_start_us + row.window_us > self._since_us


def _end(row: DuplicateWindow | SharedPrefix) -> int:
    return row.as_of_us if isinstance(row, SharedPrefix) else row.window_start_us + row.window_us
