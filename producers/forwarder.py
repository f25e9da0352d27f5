"""One rank's forwarder: engine batches in, Kafka messages out, with the heartbeat that says it is there.

One loop on one thread: take what the sockets put in order, turn it into messages (:class:`producers.stream.RankStream`), hand
them to Kafka. ZeroMQ's own thread receives meanwhile, so that none of this ever makes the engine wait. While Kafka takes
nothing, batches wait in memory in the order they came: nothing is dropped.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from producers.continuity import Arrival
from producers.delivery import Delivery
from producers.identity import Identity, IdentityKey
from producers.resolver import DEFAULT_MAX_BLOCKS, RankResolver
from producers.stream import RankStream
from producers.subscription import Subscription
from producers.wire import MAX_PAYLOAD_BYTES, WireError, decode
from schemas import codec, records, topics
from schemas.errors import KvcensusError

logger = logging.getLogger("kvcensus.forwarder")

_SLICE = 500
"""Most batches turned into messages before the sockets are looked at again."""
_IDLE_WAIT = 0.1
_BLOCKED_WAIT = 0.05
_PROBE_SECONDS = 0.5
_DRAIN_SECONDS = 1.0
_NEEDED_TOPICS = (topics.BATCHES.name, topics.LIFECYCLE.name)


@dataclass(frozen=True)
class ForwarderConfig:
    """What one forwarder is told. Times in seconds, sizes in bytes.

    ``endpoint`` and ``replay_endpoint`` are the rank's own event sockets; without the latter nothing missed can be asked for.
    ``dp_rank`` None: the rank is the one that the batches name themselves (0 where they name none).
    ``bootstrap_servers`` None: no Kafka, and then ``segments`` names a folder for sealed Parquet segments, which may also be written
    beside Kafka. ``spool`` is the folder that keeps what Kafka has not acknowledged, and where the stream stands, over any end of
    the process; None keeps both in memory alone. ``startup_timeout`` is how long to wait for Kafka at the start before saying that
    it is away, ``stop_timeout`` bounds the wait until everything is delivered at the end. With ``idle``, the forwarder stops by itself
    when no batch came for that long. ``max_blocks`` bounds the identities remembered for each rank. ``metrics_url`` is the
    engine's own ``/metrics``; ``metrics_listen`` is the (host, port) where the forwarder shows its own, None for nowhere.
    """

    instance_id: str
    endpoint: str
    bootstrap_servers: str | None
    key: IdentityKey
    dp_rank: int | None = 0
    replay_endpoint: str | None = None
    topic: str = ""
    kafka_options: Mapping[str, str] = field(default_factory=dict)
    reuse_reporting: records.ReuseReporting = "unlabelled"
    removals: records.Removals = "per_copy"
    workload: str | None = None
    model: str | None = None
    kv_connector: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    engine_profile: records.EngineProfile = "vllm"
    gpus_per_rank: float | None = None
    kv_bytes_per_token: int | None = None
    prefill_rate: float | None = None
    staleness: float = 60.0
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_blocks: int = DEFAULT_MAX_BLOCKS
    spool: Path | None = None
    spool_bytes: int = 1 << 30
    segments: Path | None = None
    segments_bytes: int = 10 << 30
    segment_seconds: float = 300.0
    metrics_url: str | None = None
    metrics_interval: float = 5.0
    metrics_listen: tuple[str, int] | None = None
    replay_timeout: float = 5.0
    startup_timeout: float = 30.0
    heartbeat: float = 5.0
    stop_timeout: float = 30.0
    idle: float | None = None

    def declaration(self) -> records.Declaration:
        """What the operator declared, as a record."""
        return records.Declaration(
            reuse_reporting=self.reuse_reporting,
            removals=self.removals,
            workload=self.workload,
            model=self.model,
            kv_connector=self.kv_connector,
            key_epoch=self.key.epoch,
            canary=self.key.canary,
            forwarder_version=_version(),
            labels=dict(self.labels),
        )


@dataclass
class Tally:
    """Cumulative counters of one incarnation, from the messages it made."""

    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    refused: int = 0
    lost: int = 0
    publisher_restarts: int = 0

    def count(self, message: records.RankMessage) -> None:
        """Add what ``message`` says."""
        if message.batch is not None:
            self.batches += 1
            self.unknown_events += message.batch.unknown_events
            self.unresolved_blocks += message.batch.unresolved_blocks
            for op in message.batch.ops:
                if op.kind == "STORE":
                    self.blocks_stored += len(op.block_ids) // records.ID_BYTES
                elif op.kind == "REMOVE":
                    self.blocks_removed += len(op.block_ids) // records.ID_BYTES
        elif message.loss is not None:
            self.lost += message.loss.last_seq - message.loss.first_seq + 1
        elif message.refusal is not None:
            self.refused += 1
        elif message.holder_reset is not None:
            self.publisher_restarts += 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``undelivered``: messages and batches that Kafka had not taken when the time to stop was over."""

    reason: Literal["stopped", "idle"]
    delivered: int
    undelivered: int


class Forwarder:
    """One rank's forwarder; each object is one incarnation and runs once. No signal handling: that is the caller's."""

    def __init__(self, config: ForwarderConfig) -> None:
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.attached = threading.Event()
        """Set once Kafka answers, the engine is connected, and what it still buffered has been taken in."""
        self.tally = Tally()
        """Counters so far; other threads may read it."""

    def run(self, stop: threading.Event) -> Outcome:
        """Forward until ``stop`` is set or the rank was idle for as long as was asked; then deliver what was taken.

        Raises :class:`KvcensusError` for an endpoint or Kafka option that cannot be used, and when Kafka or its topics are not
        there within the start-up timeout.
        """
        with Subscription(
            self.config.endpoint,
            self.config.replay_endpoint,
            engine_time=engine_time,
            topic=self.config.topic,
            replay_timeout=self.config.replay_timeout,
        ) as subscription:
            return _Run(self, subscription).run(stop)


class _Run:
    """The one run of a :class:`Forwarder`, on its own thread."""

    def __init__(self, forwarder: Forwarder, subscription: Subscription) -> None:
        config = forwarder.config
        self._config = config
        self._dp_rank = config.dp_rank or 0
        self._key = records.rank_key(config.instance_id, self._dp_rank).encode()
        self._incarnation = forwarder.incarnation
        self._attached = forwarder.attached
        self._tally = forwarder.tally
        resolver = RankResolver(Identity(config.key, config.model), config.key)
        self._stream = RankStream(config.instance_id, self._dp_rank, resolver, config.declaration(), forwarder.incarnation, _new_life_id)
        self._life_id = ""
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._subscription = subscription
        if config.bootstrap_servers is None:
            raise KvcensusError("segments without Kafka are not written yet: give --bootstrap-servers")
        self._delivery = Delivery(config.bootstrap_servers, config.kafka_options, too_large)

    def run(self, stop: threading.Event) -> Outcome:
        if not self._wait_for_kafka(stop):
            return Outcome("stopped", 0, len(self._take_received(time.monotonic())) + self._subscription.held)
        self._put(self._stream.start(_now_ms()))
        self._put_lifecycle("start")
        try:
            reason = self._forward(stop)
        except BaseException as error:
            self._put_lifecycle("stop", f"failed: {type(error).__name__}")
            self._flush_outbox()
            self._delivery.close(timeout=1.0)
            raise
        return self._finish(reason)

    # -- phases

    def _wait_for_kafka(self, stop: threading.Event) -> bool:
        """Until Kafka answers and has the topics; the engine's batches are taken in meanwhile. False: told to stop."""
        deadline = time.monotonic() + self._config.startup_timeout
        while not stop.is_set():
            fault = self._delivery.probe(_NEEDED_TOPICS, _PROBE_SECONDS)
            if fault is None:
                return True
            if time.monotonic() >= deadline:
                raise KvcensusError(f"{fault}; gave up after {self._config.startup_timeout:g} s")
            self._subscription.poll(0)
            stop.wait(0.1)
        return False

    def _forward(self, stop: threading.Event) -> Literal["stopped", "idle"]:
        config = self._config
        ready = self._subscription.poll(0)
        beat_at = time.monotonic() + config.heartbeat
        idle_since = time.monotonic()
        while not stop.is_set():
            if ready:
                idle_since = time.monotonic()
            blocked = self._pump(ready)
            self._delivery.poll(_BLOCKED_WAIT if blocked else 0)
            self._subscription.poll(0 if ready or blocked else _IDLE_WAIT)
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + config.heartbeat
                if not self._outbox:  # else Kafka takes nothing now, and the next one says more
                    self._put_lifecycle("heartbeat")
            if self._subscription.connected and not self._subscription.waiting and not ready:
                self._attached.set()
            if config.idle is not None and not ready and not self._subscription.waiting and now - idle_since >= config.idle:
                return "idle"
        return "stopped"

    def _finish(self, reason: Literal["stopped", "idle"]) -> Outcome:
        """Deliver what was received, say goodbye, and wait until Kafka has it, all within the stop timeout."""
        now = time.monotonic()
        deadline = now + self._config.stop_timeout
        ready = self._take_received(min(now + _DRAIN_SECONDS, deadline))
        while time.monotonic() < deadline and (ready or self._outbox or self._subscription.waiting):
            blocked = self._pump(ready)
            self._delivery.poll(_BLOCKED_WAIT if blocked else 0)
            if self._subscription.waiting:
                self._subscription.poll(_IDLE_WAIT)
        self._put_lifecycle("stop", reason)
        self._flush_outbox()
        undelivered = self._delivery.close(max(deadline - time.monotonic(), 0.0))
        return Outcome(reason, self._delivery.delivered, undelivered + len(self._outbox) + len(ready) + self._subscription.held)

    def _take_received(self, deadline: float) -> deque[Arrival]:
        """Empty the sockets of what ZeroMQ has received already."""
        ready = self._subscription.poll(0)
        known = -1
        while len(ready) != known and time.monotonic() < deadline:
            known = len(ready)
            self._subscription.poll(0)
        return ready

    # -- steps

    def _pump(self, ready: deque[Arrival]) -> bool:
        """Turn some batches into messages and hand them over; whether Kafka takes no more for now."""
        for _ in range(_SLICE):
            if not self._flush_outbox():
                return True
            if not ready:
                return False
            arrival = ready.popleft()
            if arrival.begins_life:
                self._stream.engine_restarted("another engine answers under the same address: the engine restarted")
            self._put(self._stream.feed(arrival.seq, arrival.payload, arrival.at_ms))
        return not self._flush_outbox()

    def _flush_outbox(self) -> bool:
        while self._outbox:
            topic, value = self._outbox[0]
            if not self._delivery.offer(topic, self._key, value):
                return False
            self._outbox.popleft()
        return True

    def _put(self, messages: list[records.RankMessage]) -> None:
        for message in messages:
            self._life_id = message.life_id
            self._tally.count(message)
            self._outbox.append((topics.BATCHES.name, codec.encode(message)))
            if message.loss is not None:
                logger.warning(
                    "%s: lost %d to %d (%s)", self._key.decode(), message.loss.first_seq, message.loss.last_seq, message.loss.reason
                )
            elif message.refusal is not None:
                logger.warning("%s: refused %d (%s)", self._key.decode(), message.seq, message.refusal.reason)
            elif message.holder_reset is not None:
                logger.warning("%s: the engine started anew (%s)", self._key.decode(), message.holder_reset.reason)

    def _put_lifecycle(self, kind: Literal["start", "heartbeat", "stop"], reason: str | None = None) -> None:
        """A lifecycle record; a message that was no batch counts as refused, as does one that Kafka would not take for its size."""
        tally, config = self._tally, self._config
        record = records.Lifecycle(
            kind=kind,
            instance_id=config.instance_id,
            dp_rank=self._dp_rank,
            life_id=self._life_id,
            incarnation=self._incarnation,
            at_ms=_now_ms(),
            batches=tally.batches,
            blocks_stored=tally.blocks_stored,
            blocks_removed=tally.blocks_removed,
            unresolved_blocks=tally.unresolved_blocks,
            unknown_events=tally.unknown_events,
            refused=tally.refused + self._subscription.malformed + self._delivery.too_large,
            lost=tally.lost,
            duplicates=self._stream.counters.duplicates,
            replayed=self._subscription.continuity.counters.replayed,
            publisher_restarts=tally.publisher_restarts,
            canary=config.key.canary,
            key_epoch=config.key.epoch,
            reason=reason,
        )
        self._outbox.append((topics.LIFECYCLE.name, codec.encode(record)))


def too_large(value: bytes) -> bytes:
    """What goes to Kafka in place of a batch that is too large for it: a refusal of the same batch."""
    message = codec.decode(value, records.RankMessage)
    message.batch = None
    message.refusal = records.Refusal(reason="message too large for Kafka", payload_bytes=len(value))
    return codec.encode(message)


def engine_time(payload: bytes) -> int | None:
    """Engine time of a batch in microseconds; None if it cannot be read."""
    try:
        return decode(payload).at_us
    except WireError:
        return None


def _new_life_id() -> str:
    return secrets.token_hex(8)


def _version() -> str:
    try:
        return version("kvcensus")
    except PackageNotFoundError:
        return ""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
