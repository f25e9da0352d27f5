"""Speed of the pure cores on one core, each step of the way on the same batches: `python -m benchmarks.cores`.

The input is a seeded synthetic rank, and for three steps a large fleet; the floor is a generic msgpack decode of the rank's payloads.
Figures are block events a second, the median of several runs that take turns; machines are noisy, so read the ratios.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from producers import wire
from producers.identity import Identity, ephemeral_key
from producers.resolver import RankResolver
from producers.simulate import fleet, presets
from schemas import codec
from schemas.records import ID_BYTES, NO_ID, DuplicateSteps, RankMessage, ResidencyChanges, ResidencyStep
from streams.duplication import ShardCore
from streams.merger import Merger
from streams.prefixes import Shared, trunks
from streams.residency import RankCore

RUNS = 5
SECONDS_OF_ENGINE_TIME = 60.0
START_US = 1_700_000_000_000_000
RANKS, FLEET_SECONDS = 100, 60
SHARED = 100_000


def a_large_fleet() -> list[ResidencyChanges]:
    """What ``RANKS`` ranks say in ``FLEET_SECONDS``, once a second each: three contents opened, of those that all of them hold."""
    draw = random.Random(1)
    pool = [draw.randbytes(ID_BYTES) for _ in range(5_000)]
    said: list[ResidencyChanges] = []
    for second in range(FLEET_SECONDS):
        for rank in range(RANKS):
            at = START_US + second * 1_000_000 + rank * 100
            opened = b"".join(draw.sample(pool, 3))
            step = ResidencyStep(second, at, "GPU", 16, opened, b"", NO_ID * 3)
            stretch = [at - 1_000_000, at] if second else []
            said.append(
                ResidencyChanges(f"i{rank // 8}", rank % 8, f"workload-{rank % 5}", "m", second, at, [step], observed=stretch, notes=[])
            )
    return said


def _answers(said: list[ResidencyChanges]) -> list[DuplicateSteps]:
    shard = ShardCore(0, 1)
    return [shard.apply(changes, offset) for offset, changes in enumerate(said)]


def shared_contents() -> dict[bytes, Shared]:
    """``SHARED`` contents in chains of 20, each on two ranks."""
    draw = random.Random(1)
    ids = [draw.randbytes(ID_BYTES) for _ in range(SHARED)]
    ranks = (("a", 0), ("b", 0))
    return {key: Shared(ids[number - 1] if number % 20 else NO_ID, 16, START_US, ranks) for number, key in enumerate(ids)}


def main() -> None:
    """Run every step ``RUNS`` times and print the table."""
    source = fleet.sources(presets.demo_fleet(SECONDS_OF_ENGINE_TIME))[0]
    payloads = [batch.payload for batch in source.batches]
    key = ephemeral_key()

    def resolve() -> list[RankMessage]:
        resolver = RankResolver(Identity(key, "m"), key)
        out = []
        for seq, payload in enumerate(payloads):
            batch = wire.decode(payload)
            out.append(RankMessage("bench", 0, "life", seq, batch.at_us, 0, "bench", batch=resolver.resolve(batch)))
        return out

    messages = resolve()
    events = sum(len(op.block_ids) // ID_BYTES for message in messages if message.batch for op in message.batch.ops)
    encoded = [codec.encode(message) for message in messages]

    def count() -> list[ResidencyChanges]:
        core = RankCore("bench", 0, shards=1)
        changes: list[ResidencyChanges] = []
        for offset, message in enumerate(messages):
            core.apply(message, offset)
            if offset % 50 == 49:
                changes += core.drain().changes[0]
        return changes + core.drain().changes[0]

    changes = count()
    moves = sum(len(step.opened) + len(step.closed) for each in changes for step in each.steps) // ID_BYTES

    def duplicate() -> None:
        shard, merger = ShardCore(0, 1), Merger(shards=1)
        for offset, each in enumerate(changes):
            merger.apply(shard.apply(each, offset), offset)
            merger.drain()

    shared = shared_contents()
    many = a_large_fleet()
    answers = _answers(many)

    def flush() -> None:
        merger = Merger(shards=1)
        for offset, answer in enumerate(answers):
            merger.apply(answer, offset)
            if offset % RANKS == RANKS - 1:
                merger.drain()
                merger.drain_prefixes()

    steps: list[tuple[str, int, Callable[[], object]]] = [
        ("floor: msgpack decode", events, lambda: [msgspec.msgpack.decode(payload) for payload in payloads]),
        ("wire: typed decode", events, lambda: [wire.decode(payload) for payload in payloads]),
        ("wire + identity", events, resolve),
        ("Avro encode", events, lambda: [codec.encode(message) for message in messages]),
        ("Avro decode", events, lambda: [codec.decode(message, RankMessage) for message in encoded]),
        ("holder core", events, count),
        ("shard core + merger", moves, duplicate),
        (f"shard core: {RANKS} ranks, a message", len(many), lambda: _answers(many)),
        (f"merger: {RANKS} ranks, a message", len(many), flush),
        (f"trunks of {SHARED:,} contents", SHARED, lambda: trunks(shared)),
    ]
    took: list[list[float]] = [[] for _ in steps]
    for _ in range(RUNS):
        for times, (_, _, step) in zip(took, steps, strict=True):
            before = time.perf_counter()
            step()
            times.append(time.perf_counter() - before)
    table = Table(title=f"{len(payloads):,} batches, {events:,} block events, {moves:,} changes; median of {RUNS} runs")
    for header in ("step", "per second", "us per event", "x floor"):
        table.add_column(header, justify="left" if header == "step" else "right")
    floor = statistics.median(took[0]) / events
    for times, (name, items, _) in zip(took, steps, strict=True):
        each = statistics.median(times) / items
        table.add_row(name, f"{1 / each:,.0f}", f"{each * 1e6:.2f}", f"{each / floor:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
