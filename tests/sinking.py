"""A sink at work in a thread of the test, on a real broker and a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from schemas import codec, topics
from schemas.records import Batch, Lifecycle, Op, RankMessage, Record
from sql.loopback import live_owner
from sql.store import StoreError, connect
from streams.settings import WorkerSettings
from streams.sink import Beside, Sink
from tests.kafka import Kafka
from tests.sql_records import START_US

PATIENCE = 120.0


def until(reached: Callable[[], Any], what: str) -> Any:
    """The first true value of ``reached``."""
    deadline = time.monotonic() + PATIENCE
    while not (value := reached()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


class Feed:
    """Messages into the topics, all on partition 0."""

    def __init__(self, kafka: Kafka) -> None:
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 5})

    def send(self, topic: topics.Topic, *records: Record | bytes) -> None:
        for record in records:
            value = record if isinstance(record, bytes) else codec.encode(record)
            self._producer.produce(topic.name, value, key=b"a/0", partition=0)
            self._producer.poll(0)
        assert self._producer.flush(PATIENCE) == 0


@contextmanager
def sinking(
    kafka: Kafka, data_dir: Path, url: str | None = None, beside: Beside | None = None, session_ms: int = 6000, group: str | None = None
) -> Iterator[Sink]:
    """A sink at work in a thread of this process; it must end by itself when told to."""
    # Embedded brokers wait half of a session before a group starts.
    options = {"session.timeout.ms": str(session_ms), "heartbeat.interval.ms": str(session_ms // 6)}
    if group is not None:
        options["group.id"] = group
    sink = Sink(WorkerSettings(kafka.bootstrap_servers, data_dir, options=options, clickhouse_url=url), beside)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            sink.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield sink
    finally:
        sink.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not failed, failed


def rows(question: str, data_dir: Path, url: str | None = None) -> list[tuple[Any, ...]]:
    """Rows of ``question``; none while nobody answers for the store, or it has no tables yet."""
    if url is None and live_owner(data_dir) is None:
        return []
    try:
        with connect(url, data_dir) as store:
            return store.query(question, final=True).rows
    except StoreError:
        return []


def committed(kafka: Kafka, topic: topics.Topic, group: str = "kvcensus-sink") -> int:
    """How many messages lie before the offsets that the sink's group has committed, over all partitions."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})
    try:
        count = 1 if topic.single_partition else kafka.partitions
        places = [TopicPartition(topic.name, number) for number in range(count)]
        return sum(max(int(place.offset), 0) for place in consumer.committed(places, timeout=20))
    finally:
        consumer.close()


def heartbeat(at_ms: int) -> Lifecycle:
    return Lifecycle("heartbeat", "a", 0, "l", "f", at_ms, 0, 0, 0, 0, 0, 0, 0, duplicates=0, replayed=0, publisher_restarts=0)


def batch(seq: int, *ops: Op) -> RankMessage:
    return RankMessage("a", 0, "l", seq, START_US + seq, 5, "f", batch=Batch(list(ops)))
