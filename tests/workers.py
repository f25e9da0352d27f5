"""A worker process, the messages fed to it and what it gives out, for tests of the worker on a real broker."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from producers.simulate import fleet, presets
from schemas import codec, topics
from schemas.records import DeadLetter, DuplicateWindow, RankMessage, RankWindow, Recompute, SharedPrefix, rank_key
from schemas.topics import Topic
from sql.figures import assemble
from sql.load import load
from sql.store import StoreError, connect
from sql.totals import totals_from_records
from streams.offline import count
from tests.counting import interleaved, messages
from tests.kafka import Kafka

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0
"""Seconds after which something that should have come will not come; nothing here depends on how soon it does."""


def small_stream() -> list[RankMessage]:
    """A small fleet's messages: pressure, a flush, a restart."""
    turn = iter(range(10**9))
    sources = fleet.sources(presets.test_fleets()[next(iter(presets.test_fleets()))])
    return interleaved(messages(sources), lambda live: next(turn) % live)


def until(reached: Callable[[], Any], what: str) -> Any:
    """The first true value of ``reached``."""
    deadline = time.monotonic() + PATIENCE
    while not (value := reached()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
    return value


class Worker:
    """A worker process; its output is kept."""

    def __init__(self, servers: str, data_dir: Path, *arguments: str, command: list[str] | None = None, **environ: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [*(command or [sys.executable, "-m", "console.cli", "worker", "--kafka-option", "session.timeout.ms=6000"]), *arguments],
            cwd=ROOT,
            env={**os.environ, "KVCENSUS_BOOTSTRAP_SERVERS": servers, "KVCENSUS_DATA_DIR": str(data_dir), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def said(self, pattern: str) -> bool:
        assert self._process.poll() is None or re.search(pattern, self.output), self.output
        return re.search(pattern, self.output) is not None

    def ready(self) -> None:
        until(lambda: self.said("holds kvcensus.batches"), "the worker to be ready")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = PATIENCE, *, then: signal.Signals | None = None) -> int:
        """The exit code; after ``seconds`` without one the process is sent ``then``, or the test fails."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            if then is None:
                raise
            self._process.send_signal(then)
            code = self._process.wait(PATIENCE)
        self._reader.join(10)
        return code


@contextmanager
def working(kafka: Kafka, data_dir: Path, *arguments: str) -> Iterator[Worker]:
    worker = Worker(kafka.bootstrap_servers, data_dir, *arguments)
    try:
        yield worker
    finally:
        worker.end(signal.SIGKILL)


class Feed:
    """Messages into the topics, as forwarders would send them."""

    def __init__(self, kafka: Kafka) -> None:
        config = {"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random", "linger.ms": 5}
        self._producer = Producer(config, logger=logging.getLogger("kvcensus.librdkafka"))

    def send(self, stream: Iterable[RankMessage]) -> None:
        for message in stream:
            self.raw(topics.BATCHES, codec.encode(message), rank_key(message.instance_id, message.dp_rank))
        self.flush()

    def raw(self, topic: Topic, value: bytes | None, key: str = "", partition: int = -1) -> None:
        self._producer.produce(topic.name, value, key=key.encode(), partition=partition)
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(PATIENCE) == 0


Rows = dict[tuple[Any, ...], Any]


class View:
    """The result topics as a subscriber sees them: of each key the row of the highest version."""

    def __init__(self, kafka: Kafka) -> None:
        self.ranks: Rows = {}
        self.recomputes: Rows = {}
        self.duplicates: Rows = {}
        self.prefixes: Rows = {}
        self.letters: Rows = {}
        self.rank_rows = 0
        self.unreadable = 0
        self._consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "view", "enable.auto.commit": False})
        read = (topics.RANK_WINDOWS, topics.RECOMPUTES, topics.DUPLICATE_WINDOWS, topics.SHARED_PREFIXES, topics.DEAD_LETTERS)
        self._consumer.assign([TopicPartition(topic.name, number, 0) for topic in read for number in range(kafka.partitions)])

    def close(self) -> None:
        self._consumer.close()

    def update(self) -> View:
        for message in self._consumer.consume(2_000, timeout=0.2):
            assert message.error() is None, message.error()
            try:
                self._take(message.topic(), message.value() or b"")
            except codec.CodecError:
                self.unreadable += 1
        return self

    def _take(self, topic: str | None, value: bytes) -> None:
        if topic == topics.RANK_WINDOWS.name:
            row = codec.decode(value, RankWindow)
            self.rank_rows += 1
            newer(self.ranks, rank_window_key(row), row)
        elif topic == topics.RECOMPUTES.name:
            again = codec.decode(value, Recompute)
            newer(self.recomputes, recompute_key(again), again)
        elif topic == topics.SHARED_PREFIXES.name:
            prefix = codec.decode(value, SharedPrefix)
            newer(self.prefixes, (prefix.as_of_us, prefix.place), prefix)
        elif topic == topics.DEAD_LETTERS.name:
            letter = codec.decode(value, DeadLetter)
            self.letters[letter.reader, letter.topic, letter.partition, letter.offset] = letter
        else:
            window = codec.decode(value, DuplicateWindow)
            newer(self.duplicates, (window.scope, window.scope_key, window.tier, window.window_start_us), window)

    def document(self) -> dict[str, Any]:
        return figures(self.ranks.values(), self.duplicates.values())


def newer(rows: Rows, key: tuple[Any, ...], row: Any) -> None:
    if key not in rows or row.version >= rows[key].version:
        rows[key] = row


def rank_window_key(row: RankWindow) -> tuple[Any, ...]:
    return row.instance_id, row.dp_rank, row.life_id, row.window_start_us


def unversioned(row: RankWindow) -> RankWindow:
    """``row`` but for what depends on where its messages lie in Kafka."""
    return msgspec.structs.replace(row, version=0)


def recompute_key(row: Recompute) -> tuple[Any, ...]:
    return row.instance_id, row.dp_rank, row.group_idx, row.life_id, row.seq, row.index


def figures(ranks: Iterable[RankWindow], duplicates: Iterable[DuplicateWindow]) -> dict[str, Any]:
    document: dict[str, Any] = assemble(totals_from_records(ranks, duplicates))
    return document


def unequal(found: Any, wanted: Any, where: str = "") -> list[str]:
    """Where two documents differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = sorted(found.keys() | wanted.keys())
        return [line for key in keys for line in unequal(found.get(key), wanted.get(key), f"{where}/{key}")]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [line for number, pair in enumerate(zip(found, wanted, strict=True)) for line in unequal(*pair, f"{where}/{number}")]
    return [] if found == wanted else [f"{where}: {found!r}, expected {wanted!r}"]


class Expected:
    """What the counting cores make of a stream, undisturbed."""

    def __init__(self, stream: list[RankMessage], kafka: Kafka) -> None:
        counted = count(stream, shards=kafka.partitions)
        rows: Rows = {}
        for row in counted.rank_windows:
            newer(rows, rank_window_key(row), row)
        self.ranks = {key: unversioned(row) for key, row in rows.items()}
        self.document = figures(counted.rank_windows, counted.duplicate_windows)
        self.recomputes = {recompute_key(row): (row.cause, row.elapsed_us, row.content_id) for row in counted.recomputes}
        batches = {(message.life_id, message.seq): message.batch for message in stream if message.batch is not None}
        self.facts = sum(1 if op.kind == "CLEAR" else len(op.block_ids) // 16 for batch in batches.values() for op in batch.ops)

    def on_topics(self, view: View) -> None:
        """Wait until the topics say the same."""

        def same() -> bool:
            view.update()
            return view.document() == self.document and len(view.recomputes) == len(self.recomputes)

        try:
            until(same, "the figures on the topics")
        except AssertionError:
            assert unequal(view.document(), self.document) == []
            raise
        assert {key: (row.cause, row.elapsed_us, row.content_id) for key, row in view.recomputes.items()} == self.recomputes
        assert {key: unversioned(row) for key, row in view.ranks.items()} == self.ranks

    def in_store(self, url: str | None, data_dir: Path) -> None:
        """Wait until the store says the same."""
        seen: list[Any] = [None]

        def same() -> bool:
            try:
                with closing(connect(url, data_dir)) as store:
                    seen[0] = assemble(load(store))
                    facts = store.query("SELECT count() FROM block_events", final=True).rows[0][0]
                    recomputes = store.query("SELECT count() FROM recomputes", final=True).rows[0][0]
            except StoreError:  # not there yet
                return False
            return bool(seen[0] == self.document and facts == self.facts and recomputes == len(self.recomputes))

        try:
            until(same, "the figures in the store")
        except AssertionError:
            assert unequal(seen[0], self.document) == []
            raise
