"""The sink on a real broker and a real store: what cannot be written is set aside, and nothing else is lost, whatever is away."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from schemas import codec, topics
from schemas.records import DeadLetter, Op
from tests.clickhouse_http import clickhouse_server
from tests.kafka import Kafka
from tests.passage import Passage
from tests.sinking import Feed, batch, committed, heartbeat, rows, sinking, until
from tests.sql_records import START_US, rank_window


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
                assert len(sink._gathered.rows) + len(sink._held) <= 200
                time.sleep(0.1)
            assert committed(kafka, topics.LIFECYCLE) == 1, "nothing is committed that is not in the store"
            passage.open()
            until(lambda: rows("SELECT count() FROM lifecycle", tmp_path, url) == [(3_000,)], "all rows")
            until(lambda: rows("SELECT offset FROM dead_letters", tmp_path, url) == [(3_000,)], "what could not be read")
            until(lambda: "takes rows again" in caplog.text, "the sink to say so")
        passage.stop()
