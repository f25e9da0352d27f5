"""Ends a worker that has stopped reading without saying so.

Kafka consumers can go silent: connected, in their group, and fetching nothing. So a thread of its own, with a client of its own, compares
where the agents stand with where the partitions end.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mode import Service

from streams.positions import Place
from streams.probe import Probe
from streams.settings import WorkerSettings

log = logging.getLogger("kvcensus.worker")

STALL_SECONDS = 60.0
"""Without progress for this long, though there is something to read, a worker is considered stuck."""

BUSY_FACTOR = 10.0
"""So many times as long, while others move that have more to read as well: which comes next is up to client and broker, and a worker
that is behind is late for some of them without being stuck."""

CHECK_SECONDS = 10.0
_GRACE_SECONDS = 15.0

Source = Callable[[], Mapping[Place, int]]
"""Where a reader stands: (topic, partition) to next offset. Called from the watchdog's thread."""


class Stalls:
    """Since when each partition has been behind without moving. Pure but for the clock, which is handed in."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._seen: dict[Place, tuple[int, float]] = {}
        self._busy_at = -math.inf

    def note(self, positions: Mapping[Place, int], ends: Mapping[Place, int], now: float) -> list[Place]:
        """Partitions that have not moved for too long and have something to read. ``ends`` lacks what is not known."""
        standing = []
        for place, position in positions.items():
            before = self._seen.get(place)
            more = ends.get(place, 0) > position
            if before is not None and before[0] == position and more:
                standing.append(place)
                continue
            if before is not None and before[0] != position and more:
                self._busy_at = now
            self._seen[place] = (position, now)
        busy = now - self._busy_at < self._stall_seconds
        patience = self._stall_seconds * (BUSY_FACTOR if busy else 1)
        stuck = [place for place in standing if now - self._seen[place][1] >= patience]
        for place in self._seen.keys() - positions.keys():
            del self._seen[place]
        return stuck


class Watchdog(Service):
    """Calls ``stalled`` with what is wrong, once, from its own thread; if that does not end the process, it ends it."""

    def __init__(
        self,
        settings: WorkerSettings,
        sources: Sequence[Source],
        stalled: Callable[[str], None],
        *,
        stall_seconds: float = STALL_SECONDS,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._stall_seconds = stall_seconds
        self._check_seconds = check_seconds
        self._sources = [(source, Stalls(stall_seconds)) for source in sources]
        self._stalled = stalled
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    async def on_start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="kvcensus-watchdog", daemon=True)
        self._thread.start()

    async def on_stop(self) -> None:
        """Let the thread end; it is not waited for, since it may be asking a broker that is away."""
        self._end.set()

    def _watch(self) -> None:
        probe = Probe(self._settings)
        try:
            while not self._end.wait(self._check_seconds):
                for source, stalls in self._sources:
                    stuck = self._stuck(probe, source(), stalls)
                    if stuck is not None:
                        self._report(*stuck)
                        return
        finally:
            probe.close()

    def _stuck(self, probe: Probe, positions: Mapping[Place, int], stalls: Stalls) -> tuple[Place, int] | None:
        """A place that does not move though there is something to read there, and its position."""
        for place in stalls.note(positions, self._ends(probe, positions), time.monotonic()):
            # Offsets are also taken by markers of transactions, which nobody gets to see: look whether there really is a message.
            if probe.first(place, positions[place]) is not None:
                return place, positions[place]
        return None

    def _ends(self, probe: Probe, places: Mapping[Place, int]) -> dict[Place, int]:
        ends: dict[Place, int] = {}
        for place in places:
            end = None if self._end.is_set() else probe.end(place)
            if end is None:  # the broker is away: nothing is known, and the clients wait for it themselves
                break
            ends[place] = end
        return ends

    def _report(self, place: Place, position: int) -> None:
        where = f"{place[0]}[{place[1]}] at offset {position}"
        self._stalled(f"no progress for {self._stall_seconds:g} s on {where}, though there is more to read")
        if not self._end.wait(_GRACE_SECONDS):
            log.critical("the stalled worker does not stop: ending it")
            os._exit(1)
