"""The store that docs/sql.md asks its questions of: a morning of a small fleet, always the same.

    python -m tests.tools.make_sample DIR        # then: kvcensus sql --data-dir DIR "SELECT ..."

Simulated engines under three workloads, and two recorded ones, go through what forwarders and a worker do with them: identity, counting,
rows, rollups. Only Kafka is left out, and the key is a fixed one, so every run gives the same rows. What happens, UTC:

* 08:00 all begin. 08:20 two recorded engines run for some seconds, then their forwarders stop on purpose.
* 08:31 agents-b loses a stretch of batches. 08:41 agents-a restarts. 08:52 chat-b is flushed. 09:40 a payload of code-a cannot be read.
* 09:02:30 a deploy: from here on requests go by their prefix, and no longer to each rank in turn.
* 10:10 the end.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from console.deploys import adding
from producers import engine_metrics
from producers.capture import restamp
from producers.identity import NONCE_BYTES, SECRET_BYTES, Identity, IdentityKey
from producers.resolver import RankResolver
from producers.simulate import fleet, metrics, recording
from producers.simulate.engine import EngineSpec
from producers.simulate.fleet import FleetSpec, InstanceSpec, RankPlan
from producers.simulate.source import RankSource, SourceBatch
from producers.simulate.workload import Request, WorkloadSpec, requests
from producers.stream import RankStream
from schemas.records import Declaration, EngineMetrics, RankMessage, rank_key
from sql import migrate, rollups
from sql.database import Database
from sql.rows import Row, TableRows
from sql.store import connect, exists
from streams.offline import OfflineFleet
from tests.shared_data import SHIPPED
from tests.sql_records import write

_SECOND = 1_000_000
_MINUTE = 60 * _SECOND
START_US = 1_796_025_600 * _SECOND
"""2026-11-30 08:00 UTC."""
DEPLOY_US = START_US + 62 * _MINUTE + 30 * _SECOND
END_US = START_US + 130 * _MINUTE
_SCRAPE_US = 2 * _MINUTE
_INSERT_ROWS = 20_000
_PARTITIONS = 4

_CHAT = EngineSpec(pool_blocks=320, block_size=16)
_AGENTS = EngineSpec(pool_blocks=224, block_size=16)
_CODE = EngineSpec(pool_blocks=192, block_size=32)


def _instance(name: str, workload: str, engine: EngineSpec, **fields: object) -> InstanceSpec:
    small = InstanceSpec(name, workload, engine, model="llama-8b", gpus_per_rank=1.0, kv_bytes_per_token=131_072, prefill_rate=20_000.0)
    return replace(small, **fields)  # type: ignore[arg-type]


FLEET = FleetSpec(
    instances=(
        _instance("chat-a", "chat", _CHAT, dp_size=2),
        _instance("chat-b", "chat", _CHAT, flush_at_s=(52 * 60.0,)),
        _instance("agents-a", "agents", _AGENTS, restart_at_s=(41 * 60.0,)),
        _instance("agents-b", "agents", _AGENTS),
        # Nobody has said how fast this one computes, and it serves no metrics: no GPU time is known of it.
        _instance("code-a", "code", _CODE, model="coder-32b", gpus_per_rank=4.0, kv_bytes_per_token=262_144, prefill_rate=None),
    ),
    workloads=(
        WorkloadSpec("chat", rate=0.05, system_prompts=5, system_tokens=(160, 480), think_s=(10.0, 90.0), fanout=0.05, turns=(2, 4)),
        WorkloadSpec(
            "agents",
            rate=0.06,
            mix=(("shared", 5.0), ("popular", 4.0), ("unique", 1.0)),
            system_prompts=5,
            system_tokens=(160, 480),
            popular_prompts=10,
            output_tokens=(4, 48),
            fanout=0.1,
        ),
        WorkloadSpec("code", rate=0.02, mix=(("popular", 2.0), ("unique", 1.0)), popular_tokens=(512, 2048), prompt_pool="code"),
    ),
    duration_s=(END_US - START_US) / _SECOND,
    seed=11,
    start_us=START_US,
)
_CAPTURES = ("g_dp2", "a_shared_prefix")
_CAPTURES_US = START_US + 20 * _MINUTE
_LOST = ("agents-b", START_US + 31 * _MINUTE, START_US + 33 * _MINUTE)
_UNREADABLE = ("code-a", START_US + 100 * _MINUTE)


def simulated(spec: FleetSpec = FLEET, deploy_us: int = DEPLOY_US) -> list[RankSource]:
    """The simulated ranks. Requests go round in turn before the deploy, and by their prefix after it."""
    received: dict[tuple[str, int], list[Request]] = {(each.name, rank): [] for each in spec.instances for rank in range(each.dp_size)}
    for workload in spec.workloads:
        targets = [(each.name, rank) for each in spec.instances if each.workload == workload.name for rank in range(each.dp_size)]
        turn = itertools.cycle(targets)
        for request in requests(workload, spec.seed, spec.duration_us):
            by_prefix = request.arrival_us >= deploy_us - spec.start_us
            target = targets[int.from_bytes(request.route_key, "big") % len(targets)] if by_prefix else next(turn)
            received[target].append(request)
    plans = [RankPlan(spec, each, rank, received[each.name, rank]) for each in spec.instances for rank in range(each.dp_size)]
    return [fleet.source(spec, plan) for plan in plans]


def recorded() -> list[RankSource]:
    """The ranks of the shipped captures, moved to the morning of the sample."""
    # Any request to a vLLM engine may ask it to announce reused blocks, so of a real one nobody can say "none".
    declared = Declaration("unlabelled", "per_copy", workload="recorded", model="tiny", kv_bytes_per_token=1_024)
    moved = []
    for name in _CAPTURES:
        for source in recording.from_capture(f"capture-{name}", SHIPPED / f"{name}{recording.SUFFIX}", declared):
            shift = _CAPTURES_US - source.origin_us
            batches = [SourceBatch(b.life, b.seq, b.at_us + shift, restamp(b.payload, shift)) for b in source.batches]
            moved.append(replace(source, batches=batches, origin_us=_CAPTURES_US))
    return moved


Said = RankMessage | EngineMetrics


def told(source: RankSource, key: IdentityKey) -> Iterator[tuple[int, Said]]:
    """What the rank's forwarder tells, each with the engine time at which it does."""
    name, dp_rank = source.instance_id, source.dp_rank
    declared = msgspec.structs.replace(source.declaration, key_epoch=key.epoch, canary=key.canary)
    lives = itertools.count(1)
    resolver = RankResolver(Identity(key, declared.model), key)
    stream = RankStream(name, dp_rank, resolver, declared, "sample", lambda *_: f"life-{next(lives)}")
    at_us = next_scrape = source.origin_us
    yield from ((at_us, message) for message in stream.start(_clock(at_us)))
    unreadable = name == _UNREADABLE[0]
    for batch in source.batches:
        at_us, payload = batch.at_us, batch.payload
        if name == _LOST[0] and _LOST[1] <= at_us < _LOST[2]:
            continue
        if unreadable and at_us >= _UNREADABLE[1]:
            unreadable, payload = False, payload[:-3]
        yield from ((at_us, message) for message in stream.feed(batch.seq, payload, _clock(at_us)))
        if batch.reading is not None and declared.prefill_rate and at_us >= next_scrape:
            next_scrape = at_us - at_us % _SCRAPE_US + _SCRAPE_US
            page = metrics.page(batch.reading, source.origin_us / 1e6, declared.model, dp_rank).decode()
            named = {"instance_id": name, "life_id": stream.life_id, "incarnation": "sample"}
            record = engine_metrics.parse(page, dp_rank, at_ms=_clock(at_us), **named)
            yield at_us, record
            yield at_us, stream.scraped(engine_metrics.brief(record), _clock(at_us))
    if at_us < END_US - 30 * _MINUTE:
        yield at_us, stream.depart("stopped", _clock(at_us))


def _clock(at_us: int) -> int:
    """The forwarder's clock, milliseconds: a little later than the engine."""
    return at_us // 1_000 + 5


def records() -> Iterator[tuple[Row, int, int]]:
    """Every record of the sample, with the partition and offset of those that would lie on ``kvcensus.batches`` (else -1)."""
    sources = simulated() + recorded()
    key = IdentityKey(hashlib.sha256(b"kvcensus sample").digest()[:SECRET_BYTES], bytes(NONCE_BYTES))
    worker = OfflineFleet()
    offsets = [0] * _PARTITIONS
    place = {source.key: number % _PARTITIONS for number, source in enumerate(sources)}
    for _, message in heapq.merge(*(told(source, key) for source in sources), key=lambda each: each[0]):
        if isinstance(message, EngineMetrics):
            yield message, -1, -1
            continue
        partition = place[rank_key(message.instance_id, message.dp_rank)]
        yield message, partition, offsets[partition]
        worker.apply(message, offsets[partition])
        offsets[partition] += 1
    counted = worker.drain()
    rows: list[Row] = [*counted.rank_windows, *counted.recomputes, *counted.duplicate_windows, *counted.shared_prefixes]
    rows.append(adding({}, "route by prefix", DEPLOY_US, None, None, DEPLOY_US)[0])
    yield from ((row, -1, -1) for row in rows)


def fill(database: Database) -> None:
    """Migrate ``database``, insert the sample, and roll it up. Raises :class:`sql.database.StoreError`."""
    migrate.apply(database)
    rows = TableRows()
    for number, (record, partition, offset) in enumerate(records(), 1):
        rows.add(record, partition, offset)
        if number % _INSERT_ROWS == 0:
            _insert(database, rows)
    _insert(database, rows)
    while not rollups.run(database).idle:
        pass


def _insert(database: Database, rows: TableRows) -> None:
    write(database, rows)
    rows.clear()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 1 where the folder holds a store already."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.make_sample", description="Make the store that docs/sql.md asks.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="data folder for the store, as --data-dir of kvcensus sql")
    folder: Path = parser.parse_args(arguments).folder
    if exists(None, folder):
        print(f"{folder} holds a store already", file=sys.stderr)
        return 1
    with connect(None, folder) as database:
        fill(database)
    return 0


if __name__ == "__main__":
    sys.exit(main())
