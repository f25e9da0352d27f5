"""A look at a partition past the consumer group: what is the first message at or behind an offset?"""

from __future__ import annotations

import logging

from confluent_kafka import Consumer, KafkaException, TopicPartition

from streams.positions import Place
from streams.settings import WorkerSettings

ANSWER_SECONDS = 5.0

_quiet = logging.getLogger("kvcensus.librdkafka")


class Probe:
    """A client of its own, in no group. Blocking; for one thread at a time. A broker that is away gives no answer, no error."""

    def __init__(self, settings: WorkerSettings) -> None:
        config = {
            "auto.offset.reset": "earliest",
            **settings.client_config(),
            "group.id": f"{settings.group}-probe",  # the client wants a name; it never joins
            "enable.auto.commit": False,
        }
        self._client = Consumer(config, logger=_quiet)

    def first(self, place: Place, offset: int) -> int | None:
        """Offset of the first message there at or behind ``offset``; ``None`` if there is none, or no answer."""
        try:
            self._client.assign([TopicPartition(*place, offset)])
            message = self._client.poll(ANSWER_SECONDS)
            return None if message is None or message.error() is not None else message.offset()
        except KafkaException:
            return None
        finally:
            self._client.unassign()

    def end(self, place: Place) -> int | None:
        """The offset behind the last message, or less: embedded brokers count by batches. ``None`` if there is no answer."""
        try:
            return self._client.get_watermark_offsets(TopicPartition(*place), timeout=ANSWER_SECONDS)[1]
        except KafkaException:
            return None

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()
