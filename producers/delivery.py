"""Messages to Kafka, in order and not one dropped: an idempotent producer with acks=all that never gives up.

While Kafka is away, messages wait in the producer's memory, up to ``queue.buffering.max.kbytes``; then :meth:`Delivery.offer`
says no and the caller keeps what it has. What left for good is told by :attr:`Delivery.acknowledged`. A message that Kafka
refuses after it was taken (the topic was deleted, the producer's state is lost to the broker) is sent again, together with
everything behind it, by a new producer: in order, and possibly twice, which readers tell by the message's own name. One that is
too large for Kafka is replaced, in its place, by a stand-in that says so.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.errors import KvcensusError
from schemas.topics import MAX_MESSAGE_BYTES

logger = logging.getLogger("kvcensus.delivery")

_CLIENT_LOGGER = logging.getLogger("kvcensus.librdkafka")
"""The client library's own log: silent unless somebody sets its level, since :mod:`logging` above it says what matters."""

_DEFAULTS: dict[str, str | int | bool] = {
    "compression.type": "lz4",  # ids are random bytes, so a stronger codec costs more and finds no more
    "linger.ms": 10,
    "queue.buffering.max.kbytes": 65_536,
    "queue.buffering.max.messages": 1_000_000,
    "partitioner": "murmur2_random",
    "client.id": "kvcensus-forwarder",
    "reconnect.backoff.max.ms": 2_000,
    "socket.keepalive.enable": True,
    "message.max.bytes": MAX_MESSAGE_BYTES,
}
_FIXED: dict[str, str | int | bool] = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 0,  # never give up on a message
    "statistics.interval.ms": 1_000,
}
_ALIASES = ("request.required.acks", "delivery.timeout.ms")
_ELSEWHERE = ("bootstrap.servers", "metadata.broker.list")
_REBUILD_PAUSE = 1.0
"""Seconds between a refusal and sending again."""
_VAIN_EPOCHS = 10
"""A producer that went through so many epochs without one acknowledgement is unknown to its broker, and stays so."""
_WORTH_TELLING = 2.0
"""Seconds after which a fault that has not passed is told."""
_HEADROOM = 512
"""What the protocol adds around a value, key and all, within ``message.max.bytes``."""
_BATCH_BYTES = 1_000_000
"""The client's ``batch.size``: a refused batch beyond this holds one message, so that it is clear which one was too large."""


class DeliveryError(KvcensusError):
    """Kafka cannot be used as it was asked for; one line says why and what to do."""


def check_options(bootstrap_servers: str, options: Mapping[str, str]) -> None:
    """Raise :class:`DeliveryError` for options that no :class:`Delivery` can be made with. Connects to nothing that it waits for."""
    Delivery(bootstrap_servers, options, bytes)


class Delivery:
    """A producer for a few topics. Used by one thread. ``options`` are librdkafka properties.

    ``stand_in`` makes a short value in place of one that is too large for Kafka. Raises :class:`DeliveryError` for options
    that the client refuses, and for those that could break the order or lose messages (``acks``, say).
    """

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str], stand_in: Callable[[bytes], bytes]) -> None:
        for name in options:
            if name in _FIXED or name in _ALIASES:
                raise DeliveryError(f"the Kafka option {name} is kvcensus's own: otherwise messages could be lost or reordered")
            if name in _ELSEWHERE:
                raise DeliveryError(f"the Kafka option {name} is given by --bootstrap-servers")
        self._config = {**_DEFAULTS, **options, **_FIXED, "bootstrap.servers": bootstrap_servers}
        self._servers = bootstrap_servers
        self._stand_in = stand_in
        self._taken = 0
        self._refused: dict[int, tuple[KafkaError, Message]] = {}
        self._waiting: deque[tuple[int, str, bytes, bytes]] = deque()
        self._rebuild_at = 0.0
        self._away: str | None = None
        self._away_since = 0.0
        self._away_told = False
        self._fatal: KafkaError | None = None
        self._epoch_at_success = 0
        self._stuck = False
        self._delivered_before = 0
        self.too_large = 0
        """Messages that went out as a stand-in."""
        self.delivered = 0
        """Messages that Kafka has acknowledged."""
        self.acknowledged = 0
        """How many of the messages taken, from the first one on, are acknowledged without a gap."""
        self._acknowledged_beyond: set[int] = set()
        self._producer = self._new_producer()

    @property
    def away(self) -> str | None:
        """What the client last said is wrong, until a message gets through again; None if nothing is."""
        return self._away

    @property
    def undelivered(self) -> int:
        """Messages taken and not acknowledged yet."""
        return self._taken - self.delivered

    def probe(self, topics: Iterable[str], timeout: float) -> str | None:
        """Ask the cluster for its topics, for at most ``timeout`` seconds: None if all of ``topics`` are there, else what is wrong.

        Raises :class:`DeliveryError` where waiting is no use: the credentials are refused.
        """
        try:
            known = self._producer.list_topics(timeout=timeout).topics
        except KafkaException as error:
            self._producer.poll(0)
            if self._fatal is not None:
                raise DeliveryError(f"Kafka at {self._servers} refuses us: {self._fatal.str()}; see --kafka-option") from error
            return f"Kafka at {self._servers} cannot be reached ({self._away or error.args[0].str()})"
        for topic in topics:
            if topic not in known:
                return f"topic {topic} does not exist on {self._servers}, or may not be seen: create it with `kvcensus topics create`"
            fault = known[topic].error
            if fault is not None:
                return f"topic {topic} on {self._servers}: {fault.str()}"
        return None

    def offer(self, topic: str, key: bytes, value: bytes) -> bool:
        """Take a message, or say no: the memory is full, or earlier messages have to be sent again first."""
        if self._refused or self._waiting:
            self.poll()
            if self._refused or self._waiting:
                return False
        too_large = len(value) + len(key) + _HEADROOM > int(self._config["message.max.bytes"])
        if not self._produce(self._taken, topic, key, self._stand_in(value) if too_large else value):
            return False
        self._taken += 1
        if too_large:
            self._count_too_large(topic, value)
        return True

    def poll(self, timeout: float = 0.0) -> None:
        """Serve what the client has to report, for at most ``timeout`` seconds; send refused messages again when it is time."""
        self._producer.poll(timeout)
        if self._away is not None and not self._away_told and time.monotonic() - self._away_since > _WORTH_TELLING:
            self._away_told = True
            logger.warning("Kafka at %s: %s; messages wait until it takes them again", self._servers, self._away)
        if self._refused or self._stuck:
            self._collect()
        if self._waiting and time.monotonic() >= self._rebuild_at:
            self._send_again()

    def close(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds until everything is acknowledged; how many messages were not."""
        deadline = time.monotonic() + timeout
        while self.undelivered and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, 0.1))
            self._producer.flush(min(left, 0.1))
        return self.undelivered

    def _produce(self, number: int, topic: str, key: bytes, value: bytes) -> bool:
        try:
            self._producer.produce(topic, value, key, on_delivery=functools.partial(self._reported, number))
        except BufferError:
            self._producer.poll(0)
            return False
        except KafkaException as error:
            fault: KafkaError = error.args[0]
            if fault.fatal() or fault.code() == KafkaError._FATAL:
                # The producer is spent. Whatever it still holds comes back through its reports.
                self._collect()
                return False
            raise DeliveryError(f"Kafka takes no such message for {topic} ({len(value)} bytes): {fault.str()}") from error
        return True

    def _reported(self, number: int, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.delivered += 1
            self._acknowledged_beyond.add(number)
            while self.acknowledged in self._acknowledged_beyond:
                self._acknowledged_beyond.remove(self.acknowledged)
                self.acknowledged += 1
            if self._away_told:
                logger.warning("Kafka at %s takes messages again", self._servers)
            self._away, self._away_told = None, False
            return
        self._refused[number] = error, message
        if error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            self._note(error)

    def _collect(self) -> None:
        """Take everything back from a producer that lost a message: what comes behind must not overtake it."""
        self._producer.purge()
        # Reports of what was purged are served by flush; nothing is left that it could wait for.
        while len(self._producer):
            self._producer.flush(0.1)
        again = [(number, *self._returned(error, message)) for number, (error, message) in self._refused.items()]
        self._waiting = deque(sorted([*again, *self._waiting]))
        self._refused.clear()
        self._rebuild_at = time.monotonic() + _REBUILD_PAUSE
        self._producer = self._new_producer()

    def _returned(self, error: KafkaError, message: Message) -> tuple[str, bytes, bytes]:
        value = _bytes(message.value())
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and len(value) > _BATCH_BYTES - _HEADROOM:
            self._count_too_large(message.topic() or "", value)
            value = self._stand_in(value)
        return message.topic() or "", _bytes(message.key()), value

    def _count_too_large(self, topic: str, value: bytes) -> None:
        self.too_large += 1
        logger.warning("a message of %d bytes is too large for %s: a stand-in goes out instead", len(value), topic)

    def _send_again(self) -> None:
        while self._waiting:
            if self._refused or not self._produce(*self._waiting[0]):
                return
            self._waiting.popleft()

    def _new_producer(self) -> Producer:
        self._fatal = None
        self._stuck = False
        self._epoch_at_success = 0
        if _CLIENT_LOGGER.level == logging.NOTSET:
            _CLIENT_LOGGER.setLevel(logging.CRITICAL + 1)
        try:
            return Producer({**self._config, "error_cb": self._note, "stats_cb": self._watch}, logger=_CLIENT_LOGGER)
        except KafkaException as error:
            raise DeliveryError(f"Kafka option refused: {error.args[0].str()}") from error

    def _watch(self, statistics: str) -> None:
        """Notice a broker that lost what it knew of this producer: the client then raises its epoch again and again, in vain."""
        epoch = json.loads(statistics).get("eos", {}).get("producer_epoch", 0)
        if self.delivered != self._delivered_before:
            self._delivered_before, self._epoch_at_success = self.delivered, epoch
        elif epoch - self._epoch_at_success > _VAIN_EPOCHS:
            self._stuck = True

    def _note(self, error: KafkaError) -> None:
        """The client says that something is wrong. It goes on trying by itself; people are told once, if it lasts."""
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED):
            self._fatal = error
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._away is not None:
            return  # says less than what was noted before
        if self._away is None:
            self._away_since = time.monotonic()
        self._away = error.str()


def _bytes(value: bytes | str | None) -> bytes:
    return value if isinstance(value, bytes) else (value or "").encode()
