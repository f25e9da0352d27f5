"""The sink on a real broker and a real store: what cannot be written is set aside, and nothing else is lost, whatever is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from schemas import codec, topics
from schemas.records import Batch, DeadLetter, Lifecycle, Op, RankMessage, Record
from sql.loopback import live_owner
from sql.store import StoreError, connect
from streams.settings import WorkerSettings
from streams.sink import Sink
from tests.clickhouse_http import clickhouse_server
from tests.kafka import Kafka
from tests.passage import Passage
from tests.sql_records import START_US, rank_window

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
def sinking(kafka: Kafka, data_dir: Path, url: str | None = None) -> Iterator[Sink]:
    """A sink at work in a thread of this process; it must end by itself when told to."""
    options = {"session.timeout.ms": "6000"}  # embedded brokers wait half of it before a group starts
    sink = Sink(WorkerSettings(kafka.bootstrap_servers, data_dir, options=options, clickhouse_url=url))
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


def committed(kafka: Kafka, topic: topics.Topic) -> int:
    """How many messages lie before the offsets that the sink's group has committed, over all partitions."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "kvcensus-sink"})
    try:
        places = [TopicPartition(topic.name, number) for number in range(kafka.partitions)]
        return sum(max(int(place.offset), 0) for place in consumer.committed(places, timeout=20))
    finally:
        consumer.close()


def heartbeat(at_ms: int) -> Lifecycle:
    return Lifecycle("heartbeat", "a", 0, "l", "f", at_ms, 0, 0, 0, 0, 0, 0, 0, duplicates=0, replayed=0, publisher_restarts=0)


def batch(seq: int, *ops: Op) -> RankMessage:
    return RankMessage("a", 0, "l", seq, START_US + seq, 5, "f", batch=Batch(list(ops)))


def test_what_cannot_be_written_is_set_aside_with_its_place_and_the_others_are_written(kafka: Kafka, tmp_path: Path) -> None:
    feed = Feed(kafka)
    long = b"\xc3\x01" + b"x" * (topics.DEAD_LETTER_BYTES + 10)
    # Versions are unsigned in the table.
    feed.send(topics.RANK_WINDOWS, *(rank_window(version=version, window_start_us=START_US + version) for version in (1, 2, -1, 3, 4)))
    feed.send(topics.LIFECYCLE, b"nonsense", heartbeat(1), long)
    feed.send(
        topics.BATCHES, b"nonsense", batch(0), batch(1, Op("STORE", block_ids=b"x" * 15)), batch(2, Op("REMOVE", block_ids=b"y" * 16))
    )
    with sinking(kafka, tmp_path) as sink:
        until(lambda: len(rows("SELECT 1 FROM dead_letters", tmp_path)) == 3, "what was set aside")
        question = (
            "SELECT topic, partition, offset, reader, key, lower(hex(payload)), payload_bytes FROM dead_letters ORDER BY topic, offset"
        )
        letters = rows(question, tmp_path)
        reasons = dict(rows("SELECT offset, reason FROM dead_letters WHERE topic = 'kvcensus.rank-windows'", tmp_path))
        until(lambda: len(rows("SELECT 1 FROM batches", tmp_path)) == 2, "the batches")
        assert len(rows("SELECT 1 FROM rank_windows", tmp_path)) == 4
        assert len(rows("SELECT 1 FROM lifecycle", tmp_path)) == 1
        assert rows("SELECT seq, partition, offset, events, blocks FROM batches ORDER BY seq", tmp_path) == [
            (0, 0, 1, 0, 0),
            (2, 0, 3, 1, 1),
        ]
        until(lambda: committed(kafka, topics.DEAD_LETTERS) == 3, "the letters to be committed")
        assert (sink.poisoned, sink.bad_rows) == (4, 1)
    refused = rank_window(version=-1, window_start_us=START_US - 1)
    assert letters == [
        ("kvcensus.lifecycle", 0, 0, "sink", "a/0", b"nonsense".hex(), 8),
        ("kvcensus.lifecycle", 0, 2, "sink", "a/0", long[: topics.DEAD_LETTER_BYTES].hex(), len(long)),
        ("kvcensus.rank-windows", 0, 2, "sink", "a/0", codec.encode(refused).hex(), len(codec.encode(refused))),
    ]
    assert "rank_windows" in reasons[2]
    # What was set aside has been committed: nobody reads it a second time.
    with sinking(kafka, tmp_path) as sink:
        feed.send(topics.LIFECYCLE, heartbeat(2))
        until(lambda: len(rows("SELECT 1 FROM lifecycle", tmp_path)) == 2, "what came later")
        assert (sink.poisoned, sink.bad_rows) == (0, 0)


def test_a_dead_letter_that_cannot_be_read_is_counted_and_goes_no_further(kafka: Kafka, tmp_path: Path) -> None:
    feed = Feed(kafka)
    good = DeadLetter("kvcensus.batches", 0, 7, "holder", "why", b"a/0", b"\xff\x00", 2)
    feed.send(topics.DEAD_LETTERS, b"nonsense", good)
    with sinking(kafka, tmp_path) as sink:
        until(lambda: rows("SELECT 1 FROM dead_letters", tmp_path), "the letter")
        until(lambda: committed(kafka, topics.DEAD_LETTERS) == 2, "the commit")
        assert sink.poisoned == 1
        assert rows("SELECT topic, partition, offset, reader, reason, payload_bytes FROM dead_letters", tmp_path) == [
            ("kvcensus.batches", 0, 7, "holder", "why", 2)
        ]


def test_while_the_store_is_away_no_more_is_gathered_than_one_insert_takes(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streams.sink.MAX_ROWS", 200)
    feed = Feed(kafka)
    with clickhouse_server(tmp_path / "server") as url, caplog.at_level(logging.INFO, "kvcensus.sink"):
        passage = Passage(int(url.rsplit(":", 1)[1]))
        through = url.rsplit(":", 1)[0] + f":{passage.port}"
        with sinking(kafka, tmp_path, through) as sink:
            feed.send(topics.LIFECYCLE, heartbeat(0))
            until(lambda: rows("SELECT 1 FROM lifecycle", tmp_path, url), "the first row")
            until(lambda: committed(kafka, topics.LIFECYCLE) == 1, "the first commit")
            passage.close()
            feed.send(topics.LIFECYCLE, *(heartbeat(at) for at in range(1, 3_000)), b"nonsense")
            until(lambda: "results wait on their topics" in caplog.text, "the sink to find nobody")
            for _ in range(20):
                assert len(sink._rows) + len(sink._held) <= 200 + 500  # one gathering more than the bound
                time.sleep(0.1)
            assert committed(kafka, topics.LIFECYCLE) == 1, "nothing is committed that is not in the store"
            passage.open()
            until(lambda: rows("SELECT count() FROM lifecycle", tmp_path, url) == [(3_000,)], "all rows")
            until(lambda: rows("SELECT offset FROM dead_letters", tmp_path, url) == [(3_000,)], "what could not be read")
            until(lambda: "takes rows again" in caplog.text, "the sink to say so")
        passage.stop()
