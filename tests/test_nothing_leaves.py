"""No token id and no salt in any byte of any topic or table of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from producers import capture
from schemas.records import Declaration
from sql import store
from tests.counting import capture_sources
from tests.kafka import Kafka
from tests.pipeline import pipeline
from tests.secret_forms import secret_forms, standing_in
from tests.shared_data import capture_path

SALTED = ("c_reset_salt.frames.jsonl.gz", "f_lora_salt_session.frames.jsonl.gz", "vllm-0.26.0-a10-cache-salt.jsonl.gz")
LEAST_BYTES = 6
"""Shorter forms stand in random ids by chance."""


def topic_bytes(servers: str) -> Iterator[tuple[str, bytes]]:
    """Key, value and headers of every message of every topic there is, changelogs among them."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "scan", "enable.auto.commit": False})
    try:
        known = consumer.list_topics(timeout=20).topics
        consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for name in known for number in known[name].partitions])
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 3.0:
            message = consumer.poll(0.2)
            if message is None or message.error() is not None:
                continue
            quiet_since = time.monotonic()
            yield (
                message.topic() or "",
                (message.key() or b"") + b"\n" + (message.value() or b"") + b"\n" + repr(message.headers()).encode(),
            )
    finally:
        consumer.close()


def table_bytes(data_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Every buffer of every column of every table. Views hold nothing that tables do not."""
    with store.connect(None, data_dir) as database:
        tables = [
            row[0]
            for row in database.query("SELECT name FROM system.tables WHERE database = currentDatabase() AND engine NOT LIKE '%View'").rows
        ]
        for name in tables:
            table: pa.Table = database.query_arrow(f"SELECT * FROM `{name}`")
            for column in table.columns:
                for chunk in column.chunks:
                    for buffer in chunk.buffers():
                        if buffer is not None:
                            yield name, buffer.to_pybytes()


def test_no_token_id_and_no_salt_in_any_topic_or_table(kafka: Kafka, tmp_path: Path) -> None:
    secrets: set[bytes] = set()
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        for name in SALTED:
            path = capture_path(name)
            secrets.update(form for form in secret_forms(list(capture.read(path))) if len(form) >= LEAST_BYTES)
            running.feed(capture_sources((name.split(".")[0], path), declaration=Declaration("unlabelled", "per_copy")))
        running.figures()
        topics: dict[str, list[bytes]] = {}
        for topic, value in topic_bytes(kafka.bootstrap_servers):
            topics.setdefault(topic, []).append(value)
        tables: dict[str, list[bytes]] = {}
        for table, value in table_bytes(tmp_path / "data"):
            tables.setdefault(table, []).append(value)
    assert {"kvcensus.batches", "kvcensus.residency", "kvcensus.rank-windows", "kvcensus.lifecycle"} <= topics.keys()
    assert {"block_events", "rank_windows", "duplicate_windows", "lifecycle"} <= tables.keys()
    assert len(secrets) > 1_000
    for width in (6, 7, 8, 9):  # the search itself, in the midst of other bytes and across its pieces
        some = [secret for secret in secrets if len(secret) == width or (width == 9 and len(secret) > 8)][:50]
        assert standing_in(secrets, b"\0" * (2**20 - 3) + b"-".join(some)) >= set(some)
    for place, values in (topics | tables).items():
        everything = b"\n".join(values)
        assert standing_in(secrets, everything) == set(), place
