"""A store in which every panel of the dashboards has something to show: three hours of a small fleet, through the real counting cores."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from producers.simulate import fleet, presets
from schemas.records import DeadLetter, Deploy, EngineMetrics, Histogram, Lifecycle, Loss, RankMessage, Refusal, Scrape
from sql import rollups
from sql.database import Database
from sql.rows import Row
from streams.offline import OfflineFleet
from tests.counting import messages
from tests.sql_records import insert

HOUR_US = 3_600_000_000
_RUN_S = 24
_STRETCH = 450
"""Times the fleet's run: what takes it 24 seconds is spread over three hours, so that there are many windows of few batches."""


@dataclass(frozen=True)
class Span:
    """Engine time, milliseconds: [``from_ms``, ``to_ms``] is what a dashboard is asked for."""

    from_ms: int
    to_ms: int


def fill(database: Database) -> Span:
    """Count the fleet, insert everything, roll it up; the span that holds all of it, from a whole hour on."""
    ranks = [_stretched(said) for said in messages(fleet.sources(presets.demo_fleet(float(_RUN_S))))]
    ranks = [list(_disturbed(said, number)) for number, said in enumerate(ranks)]
    offline = OfflineFleet()
    for message in heapq.merge(*ranks, key=lambda each: each.at_us):
        offline.apply(message)
    counted = offline.drain()
    said = [message for rank in ranks for message in rank]
    start_us, end_us = min(each.at_us for each in said if each.at_us), max(each.at_us for each in said)
    insert(database, [*counted.rank_windows, *counted.recomputes, *counted.duplicate_windows, *counted.shared_prefixes])
    insert(database, [each for each in said if each.batch is None and each.scrape is None])
    insert(database, [*_life_signs(ranks, start_us, end_us), *_deploys(start_us)])
    insert(database, [DeadLetter("kvcensus.batches", 0, number, "holder", "no Avro", b"chat-a/0", b"\x00", 1) for number in range(3)])
    rollups.run(database)
    return Span(start_us // HOUR_US * HOUR_US // 1_000, end_us // 1_000 + 1)


def _stretched(said: list[RankMessage]) -> list[RankMessage]:
    start = fleet.DEFAULT_START_US
    for each in said:
        each.at_us = start + (each.at_us - start) * _STRETCH if each.at_us else 0
        each.observed_at_ms = (each.at_us or start) // 1_000 + 50
        if each.holder_reset is not None and each.holder_reset.boundary_us:
            each.holder_reset.boundary_us = start + (each.holder_reset.boundary_us - start) * _STRETCH
    return said


def _disturbed(said: list[RankMessage], number: int) -> Iterator[RankMessage]:
    """One rank's messages with a loss, a refusal and scrapes, some of which its events contradict."""
    for place, each in enumerate(said):
        if number == 1 and place == len(said) // 3 and each.batch is not None:
            yield msgspec.structs.replace(each, batch=None, loss=Loss(each.seq, each.seq, "replay"))
        elif number == 2 and place == len(said) // 2 and each.batch is not None:
            yield msgspec.structs.replace(each, batch=None, refusal=Refusal("malformed", 100))
        else:
            yield each
        if each.batch is not None and place % 50 == 49:
            pool = 10 if place % 100 == 99 else 448
            scrape = Scrape(each.observed_at_ms, 0.1, pool, 16, 1, place * 100, place * 10)
            yield msgspec.structs.replace(each, batch=None, seq=each.seq + 1, scrape=scrape)


def _life_signs(ranks: list[list[RankMessage]], start_us: int, end_us: int) -> Iterator[Row]:
    for said in ranks:
        one = said[0]
        for number, at_ms in enumerate(range(start_us // 1_000, end_us // 1_000 + 1, 60_000)):
            yield Lifecycle(
                kind="heartbeat" if number else "start",
                instance_id=one.instance_id,
                dp_rank=one.dp_rank,
                life_id=one.life_id,
                incarnation="test",
                at_ms=at_ms,
                batches=number * 10,
                blocks_stored=number * 100,
                blocks_removed=number * 90,
                unresolved_blocks=0,
                unknown_events=0,
                refused=0,
                lost=0,
                duplicates=0,
                replayed=0,
                publisher_restarts=0,
                heartbeat_ms=10_000,
                staleness_ms=60_000,
                spool_bytes=0,
                spool_messages=0,
                last_message_at_ms=at_ms,
            )
            yield EngineMetrics(
                instance_id=one.instance_id,
                dp_rank=one.dp_rank,
                life_id=one.life_id,
                incarnation="test",
                at_ms=at_ms,
                process_started_us=start_us - HOUR_US,
                model_name="demo-8b",
                kv_cache_usage=0.5,
                num_gpu_blocks=448,
                block_size=16,
                requests_running=3,
                requests_waiting=1,
                preemptions=number,
                prefix_cache_queries=number * 1_000,
                prefix_cache_hits=number * 600,
                prompt_tokens=number * 900,
                prompt_tokens_cached=number * 500,
                generation_tokens=number * 300,
                histograms={"time_to_first_token": Histogram([0.1, 1.0], [number, number * 2], number * 0.5)},
            )


def _deploys(start_us: int) -> Iterator[Row]:
    middle = start_us + 3 * HOUR_US // 2
    yield Deploy("d0000001", 1, "larger pool", middle)
    yield Deploy("d0000002", 1, "new router", middle + HOUR_US // 4, workload="chat")
    yield Deploy("d0000003", 1, "demo-8b rev 2", middle - HOUR_US // 4, model="demo-8b")
