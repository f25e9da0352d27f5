"""What it costs to make block-level state durable, in three ways: `python -m benchmarks.state [BLOCKS]` (default 200,000).

One rank holds half of the blocks and remembers the loss of the other half, and one content shard knows who holds them. Written down are: a
changelog message per block that changed (what a Faust table would do), a snapshot of the whole on the state topic, and the same into a
local file. The broker is an embedded one of its own; machines are noisy, so read the ratios.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from console.broker import start_broker
from console.topic_admin import create_topics
from schemas.records import ID_BYTES, Batch, Declaration, Op, RankMessage, ResidencyChanges
from streams.duplication import SLICES, ShardCore
from streams.residency import RankCore
from streams.settings import WorkerSettings
from streams.state import Rules, chunks, manifest_key
from streams.state_topic import StateTopic
from streams.tables import RANK_WINDOW_TABLE

RUN_BLOCKS = 256
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that ``work`` took, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def computed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of this process that ``work`` took, and its result: as long as the agents stand still."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def a_rank(blocks: int) -> tuple[RankCore, list[ResidencyChanges]]:
    """A core that holds half of ``blocks`` and lost the others, and what it told of it."""
    core = RankCore("bench", 0)
    changes: list[ResidencyChanges] = []
    offset = 0

    def send(**what: object) -> None:
        nonlocal offset
        seq = 0 if offset == 0 else offset - 1
        core.apply(RankMessage("bench", 0, "life", seq, 1_700_000_000_000_000 + offset * 1_000, 0, "run", **what), offset)  # type: ignore[arg-type]
        offset += 1

    send(declaration=Declaration("none", "per_copy"))
    for start in range(0, blocks, RUN_BLOCKS):
        count = min(RUN_BLOCKS, blocks - start)
        ids, contents = os.urandom(ID_BYTES * count), os.urandom(ID_BYTES * count)
        send(batch=Batch([Op("STORE", block_size=16, block_ids=ids, content_ids=contents, parent_state="ROOT")]))
        if (start // RUN_BLOCKS) % 2:
            send(batch=Batch([Op("REMOVE", block_ids=ids)]))
        changes += core.drain().changes[0]
    return core, changes


def main() -> None:
    """Measure, and print the table."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    core, changes = a_rank(blocks)
    shard = ShardCore(0, 1)
    for offset, change in enumerate(changes):
        shard.apply(change, offset)
    table = Table(title=f"{blocks:,} blocks of one rank, half of them lost")
    for column in ("what", "bytes", "bytes a block", "ms", "µs a block"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(what: str, seconds: float, size: int) -> None:
        table.add_row(what, f"{size:,}", f"{size / blocks:.1f}", f"{seconds * 1e3:,.0f}", f"{seconds * 1e6 / blocks:.2f}")

    seconds, data = computed(core.dump)
    row("a rank dumped", seconds, len(data))
    row("… and restored", computed(lambda: RankCore.restored(data))[0], len(data))
    seconds, slices = computed(lambda: [shard.dump_slice(number) for number in range(SLICES)])
    row(f"a shard dumped, {SLICES} slices", seconds, sum(map(len, slices)))
    row("… and restored", computed(lambda: _load(slices))[0], sum(map(len, slices)))
    with tempfile.TemporaryDirectory(prefix="kvcensus-bench-") as folder, start_broker(None, Path(folder)) as broker:
        create_topics(broker.bootstrap_servers, 1)
        topic = StateTopic(WorkerSettings(broker.bootstrap_servers, Path(folder)))
        row("snapshot: to the topic", timed(lambda: topic.write(0, chunks("holder", "bench/0", "1", data)))[0], len(data))
        rules = Rules(1, 1, 1, 0, 0, 0)
        topic.write(0, [(manifest_key("holder"), b"")])
        row("snapshot: from the topic", timed(lambda: topic.restore({0: {"holder": rules}}))[0], len(data))
        topic.close()
        row("changelog: a message per block", *_changelog(broker.bootstrap_servers, blocks))
        path = Path(folder) / "snapshot"
        row("snapshot: to a local file, synced", timed(lambda: _to_file(path, data))[0], len(data))
    Console(width=110).print(table)


def _load(slices: list[bytes]) -> ShardCore:
    shard = ShardCore(0, 1)
    for number, data in enumerate(slices):
        shard.load_slice(number, data)
    return shard


def _changelog(servers: str, blocks: int) -> tuple[float, int]:
    """One message per block: key as a table's, value what is known of the block. The quickest client there is, not Faust's."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5})
    key, value = os.urandom(len("bench/0|0|") + ID_BYTES), os.urandom(48)

    def send() -> int:
        for _ in range(blocks):
            while True:
                try:
                    producer.produce(RANK_WINDOW_TABLE, value, key=key, partition=0)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.flush()
        return blocks * (len(key) + len(value))

    return timed(send)


def _to_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
