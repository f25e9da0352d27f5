"""Messages that could not be used, set aside on ``kvcensus.dead-letters`` with their place and bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import DeadLetter, rank_key
from schemas.topics import DEAD_LETTER_BYTES, DEAD_LETTERS

_client_log = logging.getLogger("kvcensus.librdkafka")

_HOPELESS = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_RECORD,
    }
)

# A client of the other kind warns of these.
_OF_CONSUMERS = frozenset(
    {
        "auto.offset.reset",
        "enable.auto.commit",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.poll.interval.ms",
        "partition.assignment.strategy",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "session.timeout.ms",
    }
)


def dead_letter(
    topic: str, partition: int, offset: int, *, reader: str, reason: str, key: bytes | None, payload: bytes | None
) -> DeadLetter:
    """The record of a message that ``reader`` could not use; the payload is cut at :data:`DEAD_LETTER_BYTES`."""
    whole = payload or b""
    return DeadLetter(topic, partition, offset, reader, reason, key, whole[:DEAD_LETTER_BYTES], len(whole))


def letter_key(letter: DeadLetter) -> str:
    """Kafka key of ``letter``: the place of the message, so that one set aside twice is found together."""
    return f"{letter.topic}/{letter.partition}/{letter.offset}"


def rank_named(key: bytes | None) -> tuple[str, int] | None:
    """The rank that a message's key names, if it is a key as forwarders and workers write it."""
    word = (key or b"").decode("utf-8", "replace")
    instance_id, _, number = word.rpartition("/")
    if not instance_id or not number.isascii() or not number.isdecimal() or len(number) > 9 or rank_key(instance_id, int(number)) != word:
        return None
    return instance_id, int(number)


class Letterbox:
    """A producer that sends dead letters, for readers that are not Faust's. Made at the first letter: most workers never need one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {name: value for name, value in config.items() if name not in _OF_CONSUMERS and not name.startswith("fetch.")}
        self._producer: Producer | None = None

    def send(self, letters: Sequence[DeadLetter], seconds: float) -> list[DeadLetter]:
        """Send ``letters``; those that the broker has not acknowledged after ``seconds`` come back, to be sent again.

        One that was under way may then arrive twice, which is one row. Raises :class:`KvcensusError` if the broker refuses them for good.
        """
        producer = self._producer
        if producer is None:
            producer = self._producer = self._open()
        left = dict(enumerate(letters))
        hopeless: list[str] = []

        def told(number: int, error: KafkaError | None) -> None:
            if error is None:
                left.pop(number, None)
            elif error.code() in _HOPELESS:
                hopeless.append(error.str())

        for number, letter in enumerate(letters):

            def delivered(error: KafkaError | None, _: Message[bytes, bytes], number: int = number) -> None:
                told(number, error)

            try:
                producer.produce(DEAD_LETTERS.name, codec.encode(letter), letter_key(letter).encode(), on_delivery=delivered)
            except BufferError:  # its queue is full: what is in it goes first
                break
            except KafkaException as error:
                told(number, error.args[0])
            producer.poll(0)
        producer.flush(seconds)
        if left:
            producer.purge()
            producer.flush(0)
        if hopeless:
            raise KvcensusError(f"{DEAD_LETTERS.name} takes no messages: {hopeless[0]}")
        return list(left.values())

    def _open(self) -> Producer:
        config = {"acks": "all", **self._config}
        try:
            return Producer(config, logger=_client_log)
        except KafkaException as error:
            raise KvcensusError(f"Kafka client options: {error.args[0].str()}") from error
