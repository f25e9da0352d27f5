"""What a worker knows survives it: killed at chosen moments, it comes to the figures of an undisturbed one."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.records import RankMessage
from tests.kafka import Kafka
from tests.workers import Expected, Feed, View, Worker, small_stream

MOMENTS = ("read", "sent", "given", "chunks", "written", "committed", "restored")
QUICK = ("--kafka-option", "session.timeout.ms=2000", "--snapshot-seconds", "0.3", "--flush-seconds", "0.2", "--no-sink")


@pytest.fixture(scope="module")
def stream() -> list[RankMessage]:
    return small_stream()


@pytest.fixture
def view(kafka: Kafka) -> Iterator[View]:
    shown = View(kafka)
    yield shown
    shown.close()


def test_killed_ten_times_it_comes_to_the_undisturbed_figures(kafka: Kafka, view: View, stream: list[RankMessage], tmp_path: Path) -> None:
    expected = Expected(stream, kafka)
    feed = Feed(kafka)
    chance = random.Random(4)
    portion = -(-len(stream) // 11)
    for number in range(10):
        began = time.time()
        feed.send(stream[number * portion : (number + 1) * portion])
        moment = MOMENTS[number % len(MOMENTS)]
        times = 1 if moment == "restored" else chance.randint(1, 60 if moment == "read" else 12)
        command = [sys.executable, "-m", "tests.faults.mortal", f"{moment}:{times}", "worker"]
        worker = Worker(kafka.bootstrap_servers, tmp_path, *QUICK, command=command)
        try:
            code = worker.wait()
        finally:
            worker.end(signal.SIGKILL)
        print(moment, times, code, time.time() - began, worker.output)
        assert code == -signal.SIGKILL, worker.output
    feed.send(stream[10 * portion :])
    worker = Worker(kafka.bootstrap_servers, tmp_path, *QUICK, command=[sys.executable, "-m", "console.cli", "worker"])
    try:
        expected.on_topics(view)
        assert worker.end() == 0
        assert "goes on from a snapshot" in worker.output
    finally:
        worker.end(signal.SIGKILL)
