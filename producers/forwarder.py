"""A forwarder: one engine socket's batches in, Kafka messages or segments out, and the heartbeat that says it is there.

One loop on one thread: take what the sockets put in order, turn it into messages (:class:`producers.ranks.Ranks`), put them into
the spool together with where the streams then stand, and let the spool out into Kafka. ZeroMQ's own thread receives meanwhile,
so that none of this ever makes the engine wait. What was taken is in the spool before anything is sent, so that a successor goes on
wherever this process ends, and asks the engine for what came since.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from producers import checkpoint
from producers.account import Account
from producers.checkpoint import Checkpoint
from producers.config import ForwarderConfig
from producers.continuity import Arrival
from producers.delivery import Delivery
from producers.engine_metrics import MetricsError
from producers.exporter import Exporter
from producers.lane import Lane
from producers.outlet import Outlet
from producers.ranks import Ranks
from producers.scraper import Scrape, Scraper
from producers.spool import Entry, Spool
from producers.stand_in import stand_in
from producers.stream import Position, RankStream
from producers.subscription import Subscription
from producers.tally import Tally
from schemas import records, topics
from schemas.errors import KvcensusError

__all__ = ["Forwarder", "ForwarderConfig", "Outcome", "Tally"]

logger = logging.getLogger("kvcensus.forwarder")

_SLICE = 500
"""Most batches turned into messages before the sockets are looked at again."""
_SLICE_SHARE = 64
"""Nor more payload at once than this part of the spool's bound: what goes in at once is forced out at once, and it is the newest."""
_IDLE_WAIT = 0.1
_QUIET_SECONDS = 60.0
_APART_SECONDS = 5.0
"""An engine that is not connected for so long is worth a line: the address may be wrong."""
_DRAIN_SECONDS = 1.0
_SYNC_SECONDS = 1.0
_SCRAPE_PATIENCE = 2.0
"""Longest wait for the engine's metrics when a broken connection is to be judged."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``undelivered``: messages that Kafka had not taken when the time to stop was over; with a spool on disk they wait in the folder
    ``waits_in`` for the next run, else they are gone. ``fault`` is what was wrong with Kafka then, if anything.
    """

    reason: Literal["stopped", "idle"]
    delivered: int
    undelivered: int
    waits_in: str | None = None
    fault: str | None = None


class Forwarder:
    """One socket's forwarder; each object is one incarnation and runs once. No signal handling: that is the caller's.

    Raises :class:`KvcensusError` for a configuration that cannot be.
    """

    def __init__(self, config: ForwarderConfig) -> None:
        if config.bootstrap_servers is None and config.segments is None:
            raise KvcensusError("neither Kafka nor a folder for segments is given: nothing would leave this host")
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.attached = threading.Event()
        """Set once Kafka answers, the engine is connected, and what it still buffered has been taken in."""
        self.metrics_url: str | None = None
        """Where the own metrics are, once they are."""
        self._lanes: dict[int, Lane] = {}

    @property
    def tally(self) -> Tally:
        """Counters so far, of all ranks; any thread may read it."""
        return Tally.sum(lane.tally for lane in list(self._lanes.values()))

    def run(self, stop: threading.Event) -> Outcome:
        """Forward until ``stop`` is set or the rank was idle for as long as was asked; then deliver what was taken.

        Raises :class:`KvcensusError` for an endpoint, folder, port or Kafka option that cannot be used.
        """
        with ExitStack() as stack:
            return _Run(self, self._lanes, stack).run(stop)


class _Run:
    """The one run of a :class:`Forwarder`, on its own thread. ``stack`` closes what it opens."""

    def __init__(self, forwarder: Forwarder, lanes: dict[int, Lane], stack: ExitStack) -> None:
        config = self._config = forwarder.config
        self._forwarder = forwarder
        self._lanes = lanes
        self._started_ms = _now_ms()
        self._overdue, self._overdue_quiet_until = 0, 0.0
        self._connected_at, self._apart_told = time.monotonic(), False
        self._entries: list[Entry] = []
        self._committed: bytes | None = None
        """What the spool was told last of where the streams stand; None while it is being told."""
        self._started: set[int] = set()
        self._answered_for = -1
        self._scraped: deque[Scrape] = deque()
        """Pages that wait for the batches before them; meanwhile the scraper keeps the others, within its bound."""
        self._engine_started_us: int | None = None
        self._scope = checkpoint.identity_scope(config.key.canary, config.model, config.engine_profile)
        self._spool = stack.enter_context(Spool(config.spool, config.spool_bytes))
        stack.callback(self._close_lanes)
        self._ranks = Ranks(
            self._make_stream, dp_rank=config.dp_rank, positions=self._left_behind(), max_payload_bytes=config.max_payload_bytes
        )
        self._subscription = stack.enter_context(
            Subscription(
                config.endpoint,
                config.replay_endpoint,
                topic=config.topic,
                replay_timeout=config.replay_timeout,
                positions=self._ranks.positions.values(),
                max_payload_bytes=config.max_payload_bytes,
                profile=config.engine_profile,
            )
        )
        self._outlet = self._open_outlet(config)
        self._scraper = (
            stack.enter_context(Scraper(config.metrics_url, config.dp_rank, config.metrics_interval)) if config.metrics_url else None
        )
        self._account = Account(
            config, forwarder.incarnation, lanes, self._subscription, spool=self._spool, outlet=self._outlet, scraper=self._scraper
        )
        if config.metrics_listen is not None:
            forwarder.metrics_url = stack.enter_context(self._open_page(*config.metrics_listen)).url
            logger.info("own metrics: %s", forwarder.metrics_url)

    def run(self, stop: threading.Event) -> Outcome:
        self._put([*self._rekey(), *self._ranks.start(_now_ms())])
        self._commit()
        try:
            reason = self._forward(stop)
            return self._finish(reason)
        except BaseException as error:
            self._say_failed(f"failed: {type(error).__name__}")
            if self._outlet is not None:
                self._outlet.close(time.monotonic() + 1.0)
            raise

    def _open_page(self, host: str, port: int) -> Exporter:
        try:
            return Exporter(self._account.snapshots, host, port)
        except KvcensusError:
            if self._config.metrics_port_given:
                raise
        logger.warning("port %d is taken: own metrics are on another one; name one with --metrics-listen", port)
        return Exporter(self._account.snapshots, host)

    # -- what another process left

    def _left_behind(self) -> dict[int, Position]:
        """Where the streams stood when the spool was written last."""
        self._same_scope = True
        if self._spool.checkpoint is None:
            return {}
        left = checkpoint.decode(self._spool.checkpoint)
        if left is None:
            logger.warning("the spool in %s does not say where its stream stood: attaching anew", self._spool.place)
            return {}
        if left.endpoint not in ("", self._config.endpoint):
            logger.warning("the spool in %s was of %s: attaching anew to %s", self._spool.place, left.endpoint, self._config.endpoint)
            return {}
        self._same_scope = left.scope == self._scope
        # A life without a batch on disk may have had some all the same, while the disk was full, and of an engine that is gone by now.
        return {name: position for name, position in left.positions.items() if position.next_seq is not None}

    def _rekey(self) -> list[records.RankMessage]:
        """Ids of another key or model do not compare with those from here on: another life, although the engine goes on."""
        if self._same_scope:
            return []
        reason = "the identity key, the model or the engine profile changed"
        return [stream.rekey(reason, _now_ms()) for stream in self._ranks.streams.values() if stream.next_seq is not None]

    def _make_stream(self, dp_rank: int, position: Position | None) -> RankStream:
        lane = Lane(self._config, self._forwarder.incarnation, self._started_ms, self._scope, dp_rank, position)
        self._lanes[dp_rank] = lane
        return lane.stream

    def _open_outlet(self, config: ForwarderConfig) -> Outlet | None:
        if config.bootstrap_servers is None:
            return None
        delivery = Delivery(config.bootstrap_servers, config.kafka_options, stand_in)
        needed = [topics.BATCHES.name, topics.LIFECYCLE.name] + ([topics.ENGINE_METRICS.name] if config.metrics_url else [])
        return Outlet(self._spool, delivery, needed, config.startup_timeout)

    # -- phases

    def _forward(self, stop: threading.Event) -> Literal["stopped", "idle"]:
        config = self._config
        ready = self._subscription.poll(0)
        now = idle_since = time.monotonic()
        beat_at, sync_at = now + config.heartbeat, now + _SYNC_SECONDS
        while not stop.is_set():
            if ready:
                idle_since = time.monotonic()
            self._feed(ready)
            self._scrape(ready)
            self._commit()
            busy = self._pump()
            self._subscription.poll(0 if ready else 0.005 if busy else _IDLE_WAIT)
            now = time.monotonic()
            self._watch_connection(now)
            if now >= beat_at:
                beat_at = now + config.heartbeat
                self._declare_forgotten()
                self._put_lifecycle("heartbeat")
                self._commit()
            if now >= sync_at:
                sync_at = now + _SYNC_SECONDS
                self._spool.sync()
                for lane in self._lanes.values():
                    lane.tick()
            taken_in = self._subscription.connected and not self._subscription.waiting and not ready
            if taken_in and (self._outlet is None or self._outlet.open):
                self._forwarder.attached.set()
            if config.idle is not None and not ready and not self._subscription.waiting and now - idle_since >= config.idle:
                return "idle"
        return "stopped"

    def _finish(self, reason: Literal["stopped", "idle"]) -> Outcome:
        """Take in what was received, say goodbye, and wait until Kafka has it, all within the stop timeout."""
        now = time.monotonic()
        deadline = now + self._config.stop_timeout
        ready = self._take_received(min(now + _DRAIN_SECONDS, deadline))
        while True:
            # Without a look at the sockets: an engine that goes on publishing would keep us here.
            while ready and time.monotonic() < deadline:
                self._feed(ready)
                self._commit()
                self._pump()
            if not self._subscription.waiting or time.monotonic() >= deadline:
                break
            self._pump()
            self._subscription.poll(_IDLE_WAIT)
        left = self._subscription.held + len(ready)
        self._scrape(ready)
        self._declare_forgotten()
        self._put(lane.stream.depart(reason, _now_ms()) for dp_rank, lane in self._lanes.items() if dp_rank in self._started)
        self._put_lifecycle("stop", reason)
        self._commit()
        if self._outlet is None:
            return Outcome(reason, 0, left)
        self._outlet.close(deadline)
        undelivered = self._spool.messages + left
        waits_in = self._spool.place if undelivered and self._config.spool is not None else None
        return Outcome(reason, self._outlet.delivered, undelivered, waits_in, self._outlet.fault if undelivered else None)

    def _take_received(self, deadline: float) -> deque[Arrival]:
        """Empty the sockets of what ZeroMQ has received already."""
        ready = self._subscription.poll(0)
        known = -1
        while len(ready) != known and time.monotonic() < deadline:
            known = len(ready)
            self._subscription.poll(0)
        return ready

    # -- steps

    def _feed(self, ready: deque[Arrival]) -> None:
        """Turn some batches into messages."""
        messages: list[records.RankMessage] = []
        room = self._config.spool_bytes // _SLICE_SHARE
        for _ in range(min(_SLICE, len(ready))):
            if room < 0:
                break
            arrival = ready.popleft()
            room -= len(arrival.payload)
            if arrival.reconnected:
                started_us = self._process_started()
                if started_us is not None:
                    self._ranks.process_started(started_us)
            messages += self._ranks.feed(arrival)
        self._put(messages)

    def _process_started(self) -> int | None:
        """When the engine's process started, microseconds since the epoch. One answer serves all ranks of a connection."""
        connection = self._subscription.connections
        if self._scraper is not None and self._answered_for != connection:
            self._engine_started_us = self._scraper.process_started_us(time.monotonic(), _SCRAPE_PATIENCE)
            if self._engine_started_us is not None:
                self._answered_for = connection
        return self._engine_started_us

    def _watch_connection(self, now: float) -> None:
        """Say when the engine cannot be reached, and when it can again; and that its replay socket is silent, now and then."""
        overdue = self._subscription.continuity.counters.replays_overdue
        if overdue > self._overdue and now >= self._overdue_quiet_until:
            self._overdue_quiet_until = now + _QUIET_SECONDS
            endpoint, patience = self._config.replay_endpoint, self._config.replay_timeout
            logger.warning("no answer from the replay socket at %s for %g s: what was missed is declared lost", endpoint, patience)
        self._overdue = overdue
        if not self._subscription.connected:
            if now - self._connected_at >= _APART_SECONDS and not self._apart_told:
                self._apart_told = True
                logger.warning("no connection to the engine at %s; trying on", self._config.endpoint)
            return
        if self._apart_told:
            logger.warning("connected to the engine at %s", self._config.endpoint)
        self._connected_at, self._apart_told = now, False

    def _declare_forgotten(self) -> None:
        self._put(
            lane.stream.forget_identities(refused, _now_ms()) for lane in self._lanes.values() for refused in lane.resolver.take_forgotten()
        )

    def _scrape(self, ready: deque[Arrival]) -> None:
        """Take up the engine's pages, each behind the batches that had come in when it was read: the sockets are looked at in between."""
        if self._scraper is None:
            return
        # While batches that came in wait for a replay, so do pages: it may tell of another life.
        while self._scraped and not self._subscription.waiting and (not ready or ready[0].at_ms > self._scraped[0].at_ms):
            scrape = self._scraped.popleft()
            for dp_rank, lane in self._lanes.items():
                try:
                    record = scrape.record(self._config.instance_id, dp_rank, lane.stream.life_id, self._forwarder.incarnation)
                except MetricsError:  # counted by the scraper where it is the one rank asked for
                    continue
                self._entries += lane.take_scrape(scrape, record)
        if not self._scraped:
            self._scraped.extend(self._scraper.take())

    def _put(self, messages: Iterable[records.RankMessage]) -> None:
        """Take up ``messages``; a rank's first is followed by the lifecycle record that says that this run began with it."""
        by_rank: dict[int, list[records.RankMessage]] = {}
        for message in messages:
            by_rank.setdefault(message.dp_rank, []).append(message)
        for dp_rank, own in by_rank.items():
            lane = self._lanes[dp_rank]
            opening = 0
            if dp_rank not in self._started:
                self._started.add(dp_rank)
                opening = 1
                self._entries += lane.take(own[:opening])
                self._entries.append(lane.take_beside(topics.LIFECYCLE, self._account.lifecycle("start", dp_rank)))
            self._entries += lane.take(own[opening:])

    def _commit(self) -> None:
        """Into the spool with what was made, together with where the streams stand after it."""
        if self._entries:
            entries, self._entries = self._entries, []
            self._append(entries, checkpoint.encode(Checkpoint(self._scope, self._ranks.positions, self._config.endpoint)))

    def _append(self, entries: list[Entry], written: bytes) -> None:
        self._committed = None
        # Without Kafka the spool keeps only where the streams stand: the records are in the segments.
        self._spool.append(entries if self._outlet is not None else (), written)
        self._committed = written

    def _say_failed(self, reason: str) -> None:
        """The last record of a run that an error ends, or a second signal: anywhere, also between a batch and its messages.

        So what is not in the spool is left to a successor, to ask the engine for once more, and the streams stand where they stood.
        """
        if self._committed is not None:  # else it ended within the spool itself
            self._entries = []
            self._put_lifecycle("stop", reason)
            self._append(self._entries, self._committed)

    def _pump(self) -> bool:
        return self._outlet is not None and self._outlet.pump()

    def _close_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    # -- what is told

    def _put_lifecycle(self, kind: Literal["start", "heartbeat", "stop"], reason: str | None = None) -> None:
        """A lifecycle record of each rank."""
        for dp_rank, lane in self._lanes.items():
            self._entries.append(lane.take_beside(topics.LIFECYCLE, self._account.lifecycle(kind, dp_rank, reason)))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
