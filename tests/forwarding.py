"""What the tests of the forwarder share: one that runs here or in a process of its own, and everything that it left in Kafka."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from console.broker import start_broker
from console.topic_admin import create_topics
from producers import checkpoint, spool_files
from producers.forwarder import Forwarder, ForwarderConfig, Outcome
from producers.identity import ephemeral_key
from schemas import codec, records, topics
from tests.wire_engine import WireEngine

PATIENCE = 60.0
"""Longest wait of a test for anything, in seconds: only a test that fails waits so long."""

_TOPICS = (topics.BATCHES.name, topics.LIFECYCLE.name, topics.ENGINE_METRICS.name)
_MARK = b"mark"


@dataclass
class Raw:
    """One message as it lies in Kafka."""

    topic: str
    partition: int
    key: bytes
    value: bytes


@dataclass
class Topics:
    """Everything on the forwarder's topics, partition by partition, in order."""

    raw: list[Raw] = field(default_factory=list)
    _read: int = 0
    _rank_messages: list[records.RankMessage] = field(default_factory=list)

    @property
    def rank_messages(self) -> list[records.RankMessage]:
        for raw in self.raw[self._read :]:
            if raw.topic == topics.BATCHES.name:
                self._rank_messages.append(codec.decode(raw.value, records.RankMessage))
        self._read = len(self.raw)
        return list(self._rank_messages)

    @property
    def lifecycle(self) -> list[records.Lifecycle]:
        return [codec.decode(raw.value, records.Lifecycle) for raw in self.raw if raw.topic == topics.LIFECYCLE.name]

    @property
    def engine_metrics(self) -> list[records.EngineMetrics]:
        return [codec.decode(raw.value, records.EngineMetrics) for raw in self.raw if raw.topic == topics.ENGINE_METRICS.name]

    @property
    def batches(self) -> list[records.RankMessage]:
        return [message for message in self.rank_messages if message.batch is not None]

    def of(self, dp_rank: int) -> Topics:
        """What is of one rank of ``chat``, told by the key."""
        return Topics([raw for raw in self.raw if raw.key == f"chat/{dp_rank}".encode()])

    def lives(self) -> dict[str, list[int]]:
        """Numbers of the batches of each life, in order."""
        found: dict[str, list[int]] = {}
        for message in self.batches:
            found.setdefault(message.life_id, []).append(message.seq)
        return found

    def losses(self) -> list[tuple[int, int]]:
        """Ranges that were declared lost, in order."""
        return [(message.loss.first_seq, message.loss.last_seq) for message in self.rank_messages if message.loss]

    def resets(self) -> list[records.HolderReset]:
        """In order."""
        return [message.holder_reset for message in self.rank_messages if message.holder_reset]

    def seqs(self) -> list[int]:
        return [message.seq for message in self.batches]


def read_topics(servers: str, enough: Callable[[Topics], bool]) -> Topics:
    """All of a forwarder's topics from their beginning, until it is ``enough``."""
    found = Topics()
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "forwarder-test", "enable.auto.commit": False})
    try:
        known = consumer.list_topics(timeout=20).topics
        consumer.assign([TopicPartition(name, partition, OFFSET_BEGINNING) for name in _TOPICS for partition in known[name].partitions])
        deadline = time.monotonic() + PATIENCE
        while not enough(found):
            assert time.monotonic() < deadline, f"{len(found.raw)} messages, and they are not enough"
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found.raw.append(Raw(message.topic() or "", message.partition() or 0, message.key() or b"", message.value() or b""))
    finally:
        consumer.close()
    return found


def read_whole(servers: str) -> Topics:
    """All that is on a forwarder's topics now, known by a mark behind it: brokers do not agree on where a partition ends."""
    producer = Producer({"bootstrap.servers": servers})
    known = producer.list_topics(timeout=20).topics
    places = [(name, partition) for name in _TOPICS for partition in known[name].partitions]
    for name, partition in places:
        producer.produce(name, b"", _MARK, partition)
    assert producer.flush(PATIENCE) == 0
    found = read_topics(servers, lambda found: sum(raw.key == _MARK for raw in found.raw) == len(places))
    return Topics([raw for raw in found.raw if raw.key != _MARK])


def config(engine: WireEngine, servers: str | None, **changes: Any) -> ForwarderConfig:
    """A forwarder of ``engine`` as rank chat/0, in memory and with a key of its own, but for ``changes``."""
    given: dict[str, Any] = {
        "instance_id": "chat",
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "bootstrap_servers": servers,
        "key": ephemeral_key(),
        "replay_timeout": PATIENCE,
        "startup_timeout": PATIENCE,
        "stop_timeout": PATIENCE,
    }
    return ForwarderConfig(**{**given, **changes})


@dataclass
class Running:
    """A forwarder in a thread."""

    forwarder: Forwarder
    stop: threading.Event
    done: Future[Outcome]

    def finish(self) -> Outcome:
        self.stop.set()
        return self.done.result(PATIENCE)


@contextmanager
def running(settings: ForwarderConfig) -> Iterator[Running]:
    """A forwarder that runs meanwhile, and is told to stop in the end."""
    stop = threading.Event()
    forwarder = Forwarder(settings)
    with ThreadPoolExecutor(1) as pool:
        try:
            yield Running(forwarder, stop, pool.submit(forwarder.run, stop))
        finally:
            stop.set()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it is so; ``what`` was waited for."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def own_metrics(url: str) -> dict[str, float]:
    """A forwarder's own page: one rank's figures by name, without the prefix."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name.removeprefix("kvcensus_forwarder_"): sample.value for family in families for sample in family.samples}


def forward_all(settings: ForwarderConfig, engine: WireEngine, play: Callable[[Running], None]) -> Outcome:
    """Run a forwarder, ``play`` once the engine knows of it, and stop it."""
    with running(settings) as run:
        engine.wait_subscribed()
        play(run)
        return run.finish()


def everything(servers: str, *outcomes: Outcome) -> Topics:
    """What the runs left in Kafka: as many messages as were acknowledged."""
    return read_topics(servers, lambda found: len(found.raw) >= sum(outcome.delivered for outcome in outcomes))


def forward_until(settings: ForwarderConfig, batches: int, *meanwhile: Callable[[], object]) -> Outcome:
    """Run a forwarder, do something ``meanwhile``, and stop it once it has taken so many batches in."""
    with running(settings) as run:
        for step in meanwhile:
            step()
        wait_for(lambda: run.forwarder.tally.batches >= batches, f"{batches} batches")
        return run.finish()


def command(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """``kvcensus forward ARGUMENTS`` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "console.cli", "forward", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
        cwd=Path(__file__).parents[1],
    )


def command_for(settings: ForwarderConfig, key_file: Path, *options: str) -> subprocess.Popen[str]:
    """A forwarder told much the same as ``settings`` (rank, sockets, Kafka, spool, segments), with the key in ``key_file``."""
    given = {
        "--replay-endpoint": settings.replay_endpoint,
        "--bootstrap-servers": settings.bootstrap_servers,
        "--spool-dir": settings.spool,
        "--segments": settings.segments,
        "--dp-rank": settings.dp_rank,
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return command(
        *("--instance", settings.instance_id, "--endpoint", settings.endpoint, *words),
        *("--key-file", str(key_file), "--data-dir", str(key_file.parent), *options),
        KVCENSUS_BOOTSTRAP_SERVERS="",
    )


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed in the end, at once and without a word."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def taken_in(folder: Path, dp_rank: int = 0) -> int:
    """The number that the forwarder on this spool expects next, as its newest file says; 0 if it says nothing."""
    paths = spool_files.paths(folder) if folder.exists() else []
    for path in reversed(paths):
        with suppress(FileNotFoundError):  # it may be gone already
            written = spool_files.parse(path.read_bytes()).checkpoint
            found = checkpoint.decode(written) if written else None
            position = found.positions.get(dp_rank) if found else None
            return (position.next_seq or 0) if position else 0
    return 0


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, once it has ended."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@contextmanager
def frozen_kafka_and_stopping_command(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A forwarder that was told to stop while batches of it are on their way to a broker that does not move."""
    with start_broker(None, tmp_path / "broker") as broker, WireEngine() as engine:
        create_topics(broker.bootstrap_servers)
        process = command(
            *("--instance", "x", "--endpoint", engine.endpoint, "--bootstrap-servers", broker.bootstrap_servers),
            *("--data-dir", str(tmp_path), *options),
        )
        try:
            engine.wait_subscribed()
            engine.publish(1)
            read_topics(broker.bootstrap_servers, lambda found: len(found.batches) == 1)
            os.kill(broker.pid, signal.SIGSTOP)
            engine.publish(5)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while "stopping" not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()
            os.kill(broker.pid, signal.SIGCONT)


def chained(count: int, name: Callable[[int], int | bytes], generator: random.Random, at: int = 1_700_000_000) -> list[bytes]:
    """Batches from second ``at`` on, whose runs go on from blocks stored earlier or begin at the root; some blocks come again."""
    stored: list[tuple[int | bytes, int | bytes | None, list[int]]] = []
    payloads = []
    for seq in range(count):
        parent = generator.choice(stored)[0] if stored and generator.random() < 0.8 else None
        events: list[dict[str, Any]] = []
        names = [name(4 * seq + place) for place in range(generator.randint(1, 3))]
        tokens = [generator.randrange(150_000) for _ in range(16 * len(names))]
        runs = [(names, parent, tokens)]
        if stored and generator.random() < 0.3:
            again = generator.choice(stored)
            events.append({"type": "BlockRemoved", "block_hashes": [again[0]], "medium": "GPU"})
            runs.append(([again[0]], again[1], again[2]))
        for hashes, before, ids in runs:
            run = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": before, "token_ids": ids, "block_size": 16}
            events.append(run)
        for place, one in enumerate(names):
            stored.append((one, names[place - 1] if place else parent, tokens[16 * place : 16 * (place + 1)]))
        payloads.append(msgspec.msgpack.encode([at + seq / 100, events, 0]))
    return payloads
