"""What only a broker that keeps and deletes its log can show; such a broker is Apache Kafka, where it has been fetched before."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from console.topic_admin import create_topics
from schemas import topics
from schemas.records import RankMessage
from tests.kafka import Kafka, wipe
from tests.tools.apache_kafka import ApacheKafka, cache_folder, running
from tests.workers import Expected, Feed, View, small_stream, until, working

OPTIONS = ("--no-sink", "--snapshot-seconds", "1", "--flush-seconds", "0.2")
PARTITIONS = 2
INPUTS = (topics.BATCHES.name, topics.RESIDENCY.name, topics.DUPLICATE_STEPS.name)


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A broker that keeps its log."""
    if not (cache_folder() / "complete").exists() or shutil.which("java") is None:
        pytest.skip("the embedded broker keeps no log: run `python -m tests.tools.apache_kafka -- true` once (needs mvn and Java 17)")
    with running(tmp_path_factory.mktemp("apache")) as broker:
        yield broker


@pytest.fixture
def kept(apache: ApacheKafka) -> Kafka:
    """Its topics, empty."""
    wipe(apache.bootstrap_servers)
    create_topics(apache.bootstrap_servers, PARTITIONS)
    return Kafka(apache.bootstrap_servers, PARTITIONS, None)


@pytest.fixture
def view(kept: Kafka) -> Iterator[View]:
    shown = View(kept)
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    return small_stream()


def durable(kafka: Kafka) -> list[TopicPartition]:
    """Up to where the worker has committed its input topics, those that have anything committed."""
    places = [TopicPartition(name, number) for name in INPUTS for number in range(1 if name == topics.DUPLICATE_STEPS.name else PARTITIONS)]
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "kvcensus-worker-state"})
    try:
        return [place for place in consumer.committed(places, timeout=20) if place.offset > 0]
    finally:
        consumer.close()


def test_it_goes_on_from_its_snapshot_after_the_input_before_it_was_deleted(
    kept: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    expected = Expected(stream, kept)
    feed = Feed(kept)
    part = 2 * len(stream) // 3
    feed.send(stream[:part])
    with working(kept, tmp_path, *OPTIONS) as worker:
        until(lambda: {place.topic for place in durable(kept)} == {*INPUTS}, "snapshots of all agents")
        assert worker.end() == 0
    admin = AdminClient({"bootstrap.servers": kept.bootstrap_servers})
    for deleted in admin.delete_records(durable(kept)).values():
        assert deleted.result(20).low_watermark > 0
    with working(kept, tmp_path, *OPTIONS) as worker:
        feed.send(stream[part:])
        expected.on_topics(view)
        assert worker.end() == 0
        assert "were deleted before" not in worker.output


def test_the_broker_may_be_restarted(apache: ApacheKafka, kept: Kafka, view: View, stream: list[RankMessage], tmp_path: Path) -> None:
    expected = Expected(stream, kept)
    feed = Feed(kept)
    half = len(stream) // 2
    with working(kept, tmp_path, *OPTIONS) as worker:
        feed.send(stream[:half])
        until(lambda: view.update().ranks, "the first results")
        apache.kill()
        apache.start()
        feed.send(stream[half:])
        try:
            expected.on_topics(view)
        except AssertionError:
            assert worker.ended, "it neither went on nor ended"
        else:
            assert worker.end(signal.SIGTERM) in (0, 1)
            return
    with working(kept, tmp_path, *OPTIONS) as worker:  # it ended by itself, as it does when a result is refused: it is started again
        expected.on_topics(view)
        assert worker.end() == 0
