"""Reading partitions of a compacted topic from where one says to their end. Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

SILENCE_SECONDS = 0.4
"""So long nothing more comes before a partition counts as read: embedded brokers tell its end too low."""

ANSWER_SECONDS = 10.0


def read_to_end(consumer: Consumer, topic: str, starts: Mapping[int, int], take: Callable[[int, Message[bytes, bytes]], None]) -> None:
    """Give ``take`` every message of ``starts`` (partition to first offset) with its partition, in the order of each.

    ``consumer`` has ``enable.partition.eof`` set; it is assigned nothing in the end. Raises :class:`KafkaException` where the broker
    refuses, or does not answer for :data:`ANSWER_SECONDS`.
    """
    ends = {number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=ANSWER_SECONDS)[1] for number in starts}
    unread = {number for number, end in ends.items() if end > max(starts[number], 0)}
    consumer.assign([TopicPartition(topic, number, offset) for number, offset in starts.items()])
    try:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            messages = consumer.consume(500, timeout=SILENCE_SECONDS)
            if not messages and (not unread or time.monotonic() > deadline):
                break
            for message in messages:
                number = message.partition()
                assert number is not None
                if (error := message.error()) is None:
                    take(number, message)
                    deadline = time.monotonic() + ANSWER_SECONDS
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                # What stood last may have been compacted away: then only the broker's word tells that the end is reached.
                if (message.offset() or 0) + (error is None) >= ends[number]:
                    unread.discard(number)
    finally:
        consumer.unassign()
    if unread:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
