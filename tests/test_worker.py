"""The worker on a real broker and a real store: its figures are those of the counting cores alone, whatever happens to it."""

from __future__ import annotations

import re
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from schemas import codec, topics
from schemas.errors import KvcensusError
from schemas.records import EngineMetrics, Lifecycle, RankMessage
from sql.loopback import live_owner
from sql.store import StoreError, connect
from streams import startup
from streams.run import run_worker
from streams.settings import WorkerSettings
from tests.clickhouse_http import clickhouse_server
from tests.kafka import Kafka
from tests.passage import Passage
from tests.sql_records import rank_window
from tests.workers import Expected, Feed, View, Worker, small_stream, until, working


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    return small_stream()


# -- what must come out ---------------------------------------------------------------------------------------------


def started(instance_id: str, dp_rank: int) -> Lifecycle:
    who = {"kind": "start", "instance_id": instance_id, "dp_rank": dp_rank, "life_id": "life", "incarnation": "run"}
    return msgspec.convert({**dict.fromkeys(Lifecycle.__struct_fields__[5:16], 0), **who, "at_ms": 1_700_000_000_000}, Lifecycle)


def test_results_on_topics_and_in_the_store_are_those_of_the_cores(
    kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    expected = Expected(stream, kafka)
    feed = Feed(kafka)
    read = (
        *((topics.BATCHES, 4), (topics.RESIDENCY, 1), (topics.DUPLICATE_STEPS, 1), (topics.RANK_WINDOWS, 1), (topics.LIFECYCLE, 1)),
        (topics.ENGINE_METRICS, 1),
    )
    for topic, _ in read:
        feed.raw(topic, b"not Avro", partition=0)
    feed.raw(topics.BATCHES, None, partition=0)
    feed.send(stream)
    feed.raw(topics.LIFECYCLE, codec.encode(started("a", 0)), "a/0")
    feed.raw(topics.ENGINE_METRICS, codec.encode(EngineMetrics("a", 0, "life", "run", 1_700_000_000_000, preemptions=3)), "a/0")
    feed.flush()
    with working(kafka, tmp_path) as worker:
        expected.on_topics(view)
        expected.in_store(None, tmp_path)
        with closing(connect(None, tmp_path)) as store:
            assert store.query("SELECT count() FROM lifecycle", final=True).rows == [(1,)]
            assert store.query("SELECT preemptions FROM engine_metrics", final=True).rows == [(3,)]
            events = store.query("SELECT kind, count() FROM rank_events GROUP BY kind ORDER BY kind", final=True).rows
        assert worker.end() == 0
    kinds = [kind for message in stream for kind in ("holder_reset", "loss", "refusal", "declaration") if getattr(message, kind)]
    assert events == sorted((kind, kinds.count(kind)) for kind in set(kinds))
    assert view.unreadable == 1
    for topic, times in read:  # the counting half and the sink both read the batches
        poison = [line for line in worker.lines if "not an Avro" in line and f"{topic.name}[0] offset" in line]
        assert len(poison) == times, worker.output
    with closing(connect(None, tmp_path)) as store:  # the worker has let go of it
        assert store.kind == "embedded"
    assert committed(kafka, "kvcensus-worker") == 0
    assert committed(kafka, "kvcensus-sink") == len(stream) + 2


def committed(kafka: Kafka, group: str) -> int:
    """How many messages of the batches a group has committed."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})
    try:
        places = [TopicPartition(topics.BATCHES.name, number) for number in range(kafka.partitions)]
        return sum(max(place.offset, 0) for place in consumer.committed(places, timeout=20))
    finally:
        consumer.close()


def test_killed_at_any_point_and_fed_twice_it_comes_to_the_same_figures(
    kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    twice = Expected(stream + stream, kafka)
    feed = Feed(kafka)
    third = len(stream) // 3
    with working(kafka, tmp_path) as worker:
        feed.send(stream[:third])
        until(lambda: view.update().ranks, "the first results")
        feed.send(stream[third : 2 * third])
        worker.end(signal.SIGKILL)
    with working(kafka, tmp_path) as worker:
        worker.ready()
        feed.send(stream[2 * third :] + stream[:third])
        worker.end(signal.SIGKILL)
    given_out = view.rank_rows
    with working(kafka, tmp_path) as worker:
        feed.send(stream[third:])
        twice.on_topics(view)
        assert view.rank_rows > given_out
        assert worker.end() == 0
    with working(kafka, tmp_path) as worker:
        worker.ready()
        twice.in_store(None, tmp_path)
        assert worker.end() == 0


def test_two_workers_share_the_partitions_and_hand_them_over(kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path) -> None:
    expected = Expected(stream, kafka)
    feed = Feed(kafka)
    quarter = len(stream) // 4
    often = ("--no-sink", "--snapshot-seconds", "0.5")  # what moves goes on from a snapshot
    with working(kafka, tmp_path / "a", *often) as first:
        feed.send(stream[:quarter])
        until(lambda: view.update().ranks, "the first results")
        with working(kafka, tmp_path / "b", *often) as second:
            second.ready()
            until(lambda: len(re.findall("holds kvcensus.batches", first.output)) > 1, "the first to give some away")
            held = [re.findall(r"holds kvcensus.batches (\S+), kvcensus.residency", worker.output)[-1] for worker in (first, second)]
            assert sorted(",".join(held).split(",")) == [str(number) for number in range(kafka.partitions)], held
            before = view.rank_rows
            feed.send(stream[quarter : 2 * quarter])
            until(lambda: view.update().rank_rows >= before + 4, "results of every rank")
            feed.send(stream[2 * quarter : 3 * quarter])
            assert first.end() == 0
        feed.send(stream[3 * quarter :])
        with working(kafka, tmp_path / "c", *often) as third:
            expected.on_topics(view)
            assert third.end() == 0


def test_plain_faust_runs_the_worker(kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path) -> None:
    expected = Expected(stream, kafka)
    Feed(kafka).send(stream)
    command = [sys.executable, "-m", "faust", "-A", "streams.app", "worker", "-l", "warn"]
    worker = Worker(kafka.bootstrap_servers, tmp_path, command=command, KVCENSUS_KAFKA_SESSION_TIMEOUT_MS="6000")
    try:
        expected.on_topics(view)
        assert worker.end() == 0
    finally:
        worker.end(signal.SIGKILL)


# -- the sink -------------------------------------------------------------------------------------------------------


def test_while_clickhouse_is_away_results_wait_and_then_all_are_there(
    kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path
) -> None:
    expected = Expected(stream, kafka)
    feed = Feed(kafka)
    half = len(stream) // 2
    with clickhouse_server(tmp_path / "server") as url:
        passage = Passage(int(url.rsplit(":", 1)[1]))
        through = url.rsplit(":", 1)[0] + f":{passage.port}"
        passage.close()
        with working(kafka, tmp_path, "--clickhouse-url", through) as worker:
            until(lambda: worker.said("waiting for it"), "the sink to find nobody")
            passage.open()
            feed.send(stream[:half])
            until(lambda: _rows(url, tmp_path, "block_events"), "the first rows")
            passage.close()
            feed.send(stream[half:])
            until(lambda: worker.said("results wait on their topics"), "the sink to find nobody again")
            expected.on_topics(view)  # counting goes on meanwhile
            passage.open()
            expected.in_store(url, tmp_path)
            until(lambda: worker.said("takes rows again"), "the sink to say so")
            assert worker.end() == 0
        passage.stop()


def _rows(url: str | None, data_dir: Path, table: str) -> int:
    """Rows of ``table``; 0 while nobody answers for the embedded store (opening it here would keep the worker from owning it)."""
    if url is None and live_owner(data_dir) is None:
        return 0
    try:
        with closing(connect(url, data_dir)) as store:
            return int(store.query(f"SELECT count() FROM {table}", final=True).rows[0][0])
    except StoreError:
        return 0


def test_a_row_that_the_store_refuses_is_counted_and_the_others_are_written(kafka: Kafka, tmp_path: Path) -> None:
    feed = Feed(kafka)
    for version in (1, 2, -1, 3, 4):  # versions are unsigned in the table
        feed.raw(topics.RANK_WINDOWS, codec.encode(rank_window(version=version, window_start_us=version * 10_000_000)), partition=0)
    feed.flush()
    with working(kafka, tmp_path, "--sink-only") as worker:
        until(lambda: _rows(None, tmp_path, "rank_windows") == 4, "the good rows")
        assert worker.end() == 0
    assert len(re.findall("not written: row of rank_windows", worker.output)) == 1
    assert "stopped after" in worker.output


# -- what a user can get wrong --------------------------------------------------------------------------------------


def refused(servers: str, data_dir: Path, *arguments: str) -> str:
    """The one line with which a worker declines to start."""
    worker = Worker(servers, data_dir, *arguments)
    assert worker.wait() == 1, worker.output
    assert worker.output.startswith("kvcensus: ")
    assert worker.output.count("\n") == 1, worker.output
    return worker.output


def test_without_a_broker_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "BROKER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(KvcensusError, match=f"no Kafka broker answers at 127.0.0.1:{port}"):
        run_worker(WorkerSettings(f"127.0.0.1:{port}", tmp_path))


def test_without_topics_it_says_how_to_make_them(kafka: Kafka, tmp_path: Path) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for deleted in admin.delete_topics([topics.RECOMPUTES.name]).values():
        deleted.result()
    line = refused(kafka.bootstrap_servers, tmp_path)
    assert f"{topics.RECOMPUTES.name}; run: kvcensus topics create" in line


def test_a_store_that_has_an_owner_is_left_alone(kafka: Kafka, tmp_path: Path) -> None:
    with closing(connect(None, tmp_path, own=True)):
        assert "has an owner already" in refused(kafka.bootstrap_servers, tmp_path)
        with pytest.raises(KvcensusError, match="owner"):
            connect(None, tmp_path, own=True)


def test_options_that_leave_nothing_to_do(tmp_path: Path) -> None:
    worker = Worker("127.0.0.1:1", tmp_path, "--no-sink", "--sink-only")
    assert worker.wait() == 2
    assert "nothing to do" in worker.output
