"""The rollups, kept beside the sink: a round every now and then, in small steps between its deliveries.

In the sink's own thread, so that no round has to be waited for by an insert for longer than one step of it takes, and nothing has to be
stopped when the sink stops. Of several sinks the one that has the first partition of the rank windows does it; should two think so for a
moment, no harm is done (:mod:`sql.rollups`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator

from sql import rollups
from sql.database import Database, StoreError
from sql.rollups import Round
from streams.settings import WorkerSettings
from streams.sink import Sink

log = logging.getLogger("kvcensus.rollups")

EVERY_SECONDS = 10.0
"""From the end of a round to the beginning of the next, at least."""

REST = 20
"""So many times what the last round took is rested after it: with that, rounds take 5 % of a core at most."""

LONGEST_REST_SECONDS = 300.0
"""A backlog takes long once; what comes after it does not."""

SLICE_SECONDS = 0.5
"""No new step of a round is begun later than this after a delivery; half a second of every second while there is a backlog."""

LAST_SECONDS = 3.0
"""At a stop a round is begun, or ended, if it can be done within this; else the next worker does it."""

_LONGEST_PAUSE = 300.0


class RollupJob:
    """What :class:`streams.sink.Sink` does beside: called after each delivery, about once a second in between, and once when it stops.

    ``rest_seconds``: so long before the first round.
    """

    def __init__(self, rest_seconds: float = 0.0) -> None:
        self.sink: Sink | None = None
        self._work: Generator[tuple[int, int], None, Round] | None = None
        self._took = 0.0
        self._due = time.monotonic() + rest_seconds
        self._pause = EVERY_SECONDS
        self._failed: str | None = None

    def __call__(self, store: Database) -> None:
        """Go on with the round, or begin one if it is time."""
        now = time.monotonic()
        stopping = self.sink is not None and self.sink.stopping
        if self.sink is not None and not self.sink.leads:
            self._work = None
            return
        if self._work is None:
            if now < self._due and not stopping:
                return
            self._work, self._took = rollups.steps(store), 0.0
        self._go_on(self._work, now, LAST_SECONDS if stopping else SLICE_SECONDS)

    def _go_on(self, work: Generator[tuple[int, int], None, Round], began: float, seconds: float) -> None:
        try:
            next(work)
            while time.monotonic() - began < seconds:
                next(work)
        except StopIteration as end:
            self._took += time.monotonic() - began
            self._ended(end.value)
        except StoreError as error:
            self._gave_up(error, error.detail)
        except Exception as error:  # whatever it is: rollups that stay behind are no reason to write no rows
            self._gave_up(error, repr(error))
        else:
            self._took += time.monotonic() - began

    def _ended(self, done: Round) -> None:
        self._work = None
        self._due = time.monotonic() + max(EVERY_SECONDS, min(LONGEST_REST_SECONDS, REST * self._took))
        if self._failed is not None:
            log.info("rolled up again")
        self._failed, self._pause = None, EVERY_SECONDS
        if not done.idle:
            log.debug("%s in %.2f s", done, self._took)

    def _gave_up(self, error: Exception, cause: str) -> None:
        """A round that failed is begun again later; nothing is lost by it but time. Said once per cause."""
        self._work = None
        self._due = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        if self._failed != cause:
            unexpected = None if isinstance(error, StoreError) else error
            log.warning("%s; the rollups stay behind and are tried again", error if unexpected is None else cause, exc_info=unexpected)
        self._failed = cause


def sink_with_rollups(settings: WorkerSettings) -> Sink:
    """A sink that keeps the rollups beside. What waits on the topics when it starts comes first."""
    job = RollupJob(EVERY_SECONDS)
    job.sink = Sink(settings, job)
    return job.sink
