"""One stream through many workers, each killed at a chosen moment."""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.records import RankMessage
from tests.kafka import Kafka
from tests.workers import Feed, Worker

MOMENTS = ("read", "sent", "given", "chunks", "written", "committed", "restored")
OPTIONS = ("--kafka-option", "session.timeout.ms=2000", "--snapshot-seconds", "0.3", "--flush-seconds", "0.2", "--no-sink")
_PATIENCE = 20.0
"""A moment that does not come (there was too little to count) is replaced by a kill from outside."""

_MOST = {"read": 60, "sent": 40, "restored": 1}


@dataclass(frozen=True, slots=True)
class Kill:
    """One worker's end. ``restored``: partitions of any topic that went on from a snapshot; ``seconds`` it lived, start included."""

    moment: str
    count: int
    seconds: float
    restored: int
    exit_code: int
    output: str


def kills(kafka: Kafka, stream: Sequence[RankMessage], folder: Path, *, number: int, seed: int) -> Iterator[Kill]:
    """Feed ``stream`` in ``number`` + 1 portions; after each but the last, a worker starts and is killed at a moment of chance."""
    chance = random.Random(seed)
    feed = Feed(kafka)
    portion = -(-len(stream) // (number + 1))
    for each in range(number):
        feed.send(stream[each * portion : (each + 1) * portion])
        moment = MOMENTS[each % len(MOMENTS)]
        count = chance.randint(1, _MOST.get(moment, 12))
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.faults.mortal", f"{moment}:{count}", "worker"]
        worker = Worker(kafka.bootstrap_servers, folder, *OPTIONS, command=command)
        try:
            code = worker.wait(_PATIENCE, then=signal.SIGKILL)
        finally:
            worker.end(signal.SIGKILL)
        yield Kill(moment, count, time.monotonic() - began, len(re.findall("goes on from a snapshot", worker.output)), code, worker.output)
    feed.send(stream[number * portion :])
