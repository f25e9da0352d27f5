"""What a worker knows survives it: killed at chosen moments, it comes to the figures of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from schemas import topics
from schemas.records import RankMessage, rank_key
from schemas.topics import DEAD_LETTER_BYTES
from streams.state import Manifest, manifest_key
from streams.tables import STATE
from tests.faults.kills import OPTIONS, kills
from tests.kafka import Kafka
from tests.workers import Expected, Feed, View, small_stream, until, working


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    return small_stream()


def durable_no_further_than_written(kafka: Kafka) -> int:
    """Positions committed of the input, none beyond what the manifests on the state topic say; how many there are."""
    read = (topics.BATCHES, topics.RESIDENCY, topics.DUPLICATE_STEPS)
    places = [TopicPartition(topic.name, number) for topic in read for number in range(1 if topic.single_partition else kafka.partitions)]
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "kvcensus-worker-state"})
    try:
        committed = {(place.topic, place.partition): place.offset for place in consumer.committed(places, timeout=20) if place.offset > 0}
        consumer.assign([TopicPartition(STATE.name, number, 0) for number in range(kafka.partitions)])
        resume: dict[tuple[str, int], int] = {}
        agents = {manifest_key(name): topic.name for name, topic in zip(("holder", "fleet", "merger"), read, strict=True)}
        while messages := consumer.consume(500, timeout=1.0):
            for message in messages:
                if message.key() in agents:
                    place = agents[_bytes(message.key())], message.partition() or 0
                    resume[place] = msgspec.msgpack.decode(_bytes(message.value()), type=Manifest).resume
    finally:
        consumer.close()
    assert all(offset <= resume[place] for place, offset in committed.items()), (committed, resume)
    return len(committed)


def _bytes(value: str | bytes | None) -> bytes:
    assert isinstance(value, bytes)
    return value


def test_killed_ten_times_it_comes_to_the_undisturbed_figures(kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path) -> None:
    expected = Expected(stream, kafka)
    for number, kill in enumerate(kills(kafka, stream, tmp_path, number=10, seed=4)):
        assert kill.exit_code == -signal.SIGKILL, kill.output
        if number % 4 == 3:
            durable_no_further_than_written(kafka)
    with working(kafka, tmp_path, *OPTIONS) as worker:
        expected.on_topics(view)
        assert worker.end() == 0
        assert "goes on from a snapshot" in worker.output
    assert durable_no_further_than_written(kafka) >= 3, "of each agent something is durable"


@pytest.mark.partitions(1)
def test_a_worker_that_is_to_remember_more_leaves_no_row_of_the_one_before(
    kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    Feed(kafka).send(stream)
    with working(kafka, tmp_path, *OPTIONS, "--history-blocks", "3") as worker:
        until(lambda: sum(row.batches for row in view.update().ranks.values()) == _batches(stream), "every batch")
        assert worker.end() == 0
    assert any("history_forgotten" in row.reasons for row in view.ranks.values())
    with working(kafka, tmp_path, *OPTIONS) as worker:
        Expected(stream, kafka).on_topics(view)
        assert "made under other rules: history_blocks 3, now 1000000" in worker.output


@pytest.mark.partitions(2)
def test_a_message_that_cannot_be_read_is_set_aside_and_its_rank_shows_it(
    kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    feed = Feed(kafka)
    half = len(stream) // 2
    rank = rank_key(stream[0].instance_id, stream[0].dp_rank)
    payload = b"not Avro " * 40_000
    for begin, end in ((0, half), (half, len(stream))):
        feed.send(stream[begin:end])
        with working(kafka, tmp_path, *OPTIONS) as worker:
            until(lambda: view.update().duplicates, "results")
            if not begin:
                feed.raw(topics.BATCHES, payload, rank)
                for topic in (topics.RESIDENCY, topics.DUPLICATE_STEPS):
                    feed.raw(topic, b"not Avro", partition=0)
                feed.flush()
                until(lambda: len(view.update().letters) == 3, "three dead letters")
            else:
                until(lambda: sum(row.batches for row in view.update().ranks.values()) == _batches(stream), "every batch")
            assert worker.end() == 0
    letters = {letter.reader: letter for letter in view.letters.values()}
    assert {reader: letter.topic for reader, letter in letters.items()} == {
        "holder": topics.BATCHES.name,
        "fleet": topics.RESIDENCY.name,
        "merger": topics.DUPLICATE_STEPS.name,
    }
    assert (letters["holder"].payload_bytes, len(letters["holder"].payload)) == (len(payload), DEAD_LETTER_BYTES)
    assert letters["holder"].key == rank.encode()
    shown = {rank_key(row.instance_id, row.dp_rank) for row in view.ranks.values() if "unreadable" in row.reasons}
    assert shown == {rank}, "of all ranks the one that it belonged to"


def _batches(stream: list[RankMessage]) -> int:
    return len({(message.life_id, message.seq) for message in stream if message.batch is not None})
