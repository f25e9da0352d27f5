"""Rows that arrive twice, in another order and in other batches, are one row to everybody who reads them: in tables and in views."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from producers.simulate import fleet, presets
from schemas import codec, topics
from sql import migrate
from sql.database import Database
from sql.export import TABLES, VIEWS
from sql.rows import Row, TableRows
from sql.store import connect
from streams import sink
from streams.sink_gathered import KINDS
from tests.clickhouse_http import clickhouse_server
from tests.kafka import Kafka
from tests.pipeline import pipeline
from tests.sinking import committed, sinking, until

Place = tuple[Row, int, int]
"""A message, its partition and offset."""

READ = [topic for topic in topics.RECORD_TOPICS if topic.name in KINDS]

ROLLED = ("_rollups", "_5m", "_1h", "_1d", "coverage_gaps", "deploy_effect")
"""What is counted from the windows at a time of its own: tests/test_rollups.py compares it."""

ARRIVED = ("rank_windows", "duplicate_windows", "recomputes", "block_events", "batches", "rank_messages", "rank_events", "lifecycle")


def every_message(kafka: Kafka) -> list[Place]:
    """All that the topics hold for the sink, read until nothing more comes: what a broker tells of their ends may be too low."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "everything", "enable.auto.commit": False})
    consumer.assign([TopicPartition(t.name, number, 0) for t in READ for number in range(1 if t.single_partition else kafka.partitions)])
    found: list[Place] = []
    while got := consumer.consume(2_000, timeout=2.0):
        for message in got:
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None
            assert partition is not None
            assert offset is not None
            found.append((codec.decode(message.value() or b"", KINDS[topic]), partition, offset))
    consumer.close()
    return found


def written(kafka: Kafka, group: str) -> int:
    """How many messages the group has committed."""
    return sum(committed(kafka, topic, group) for topic in READ)


def insert_all(store: Database, messages: list[Place], rng: random.Random) -> int:
    """Insert the rows of all messages, in another order and between other borders; how many rows."""
    rng.shuffle(messages)
    rows, written, border = TableRows(), 0, rng.randrange(50, 4_000)
    for number, (record, partition, offset) in enumerate(messages, 1):
        rows.add(record, partition, offset)
        if len(rows) >= border or number == len(messages):
            for batch in rows.batches():
                written += store.insert(batch.table, batch.column_names, batch.columns)
            rows.clear()
            border = rng.randrange(50, 4_000)
    return written


def contents(store: Database, relation: str) -> list[str]:
    """The rows as anybody sees them, but for when this server got them."""
    columns = {row[0] for row in store.query(f"DESCRIBE TABLE {relation}").rows}
    omit = "EXCEPT (inserted_at)" if "inserted_at" in columns else ""
    return sorted(map(repr, store.query(f"SELECT * {omit} FROM {relation}", final=True).rows))


def plain(store: Database, table: str, *, final: bool) -> int:
    return int(store.query(f"SELECT count() FROM {table}", final=final).rows[0][0])


def test_every_batch_twice_in_another_order_and_a_kill_between_insert_and_commit_change_nothing(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        running.feed(fleet.sources(presets.test_fleets()["flush-and-restart"]))
        running.figures()
        messages = every_message(kafka)
        until(lambda: written(kafka, "kvcensus-sink") == len(messages), "the sink to write everything")
        assert running.stop_worker() == 0
    with clickhouse_server(tmp_path / "second") as url, connect(url, tmp_path) as second:
        migrate.apply(second)
        for table in ARRIVED:
            second.command(f"SYSTEM STOP MERGES {table}")  # or rows that came twice could be one before they are counted
        killed_between_insert_and_commit(kafka, tmp_path, url)
        once = sum(plain(second, table, final=False) for table in ARRIVED)
        assert once > 0, "the rows of the killed sink are there"
        assert written(kafka, "second-sink") < len(messages)
        monkeypatch.setattr(sink, "MAX_ROWS", 1_777)
        with sinking(kafka, tmp_path, url, group="second"):
            until(lambda: written(kafka, "second-sink") == len(messages), "a second sink to write everything")
        rng = random.Random(5)
        for _ in range(2):
            assert insert_all(second, messages, rng) > once
        for table in ARRIVED:
            arrived, seen = plain(second, table, final=False), plain(second, table, final=True)
            assert arrived >= 3 * seen > 0, f"{table}: without replacing, every row would count three times"
        with connect(None, tmp_path / "data") as first:
            for relation in (*TABLES, *VIEWS):
                if not relation.endswith(ROLLED):
                    assert contents(second, relation) == contents(first, relation), relation


def killed_between_insert_and_commit(kafka: Kafka, data_dir: Path, url: str) -> None:
    """A sink that ends there at its third delivery, of other borders than the first one's."""
    command = [sys.executable, "-m", "tests.faults.mortal_sink", "3", "411", "worker", "--sink-only", "--clickhouse-url", url]
    options: dict[str, Any] = {"group.id": "second", "session.timeout.ms": 3000}
    command += [word for name, value in options.items() for word in ("--kafka-option", f"{name}={value}")]
    environ = {**os.environ, "KVCENSUS_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KVCENSUS_DATA_DIR": str(data_dir)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
