"""Simulated engines' metrics against their own events, over the whole way: socket, page, forwarder, segments, ingest, counting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from producers.forwarder import Forwarder, ForwarderConfig
from producers.identity import ephemeral_key
from producers.segments.ingest import Ingest
from producers.simulate import fleet
from producers.simulate.engine import EngineSpec
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.metrics import Fault
from producers.simulate.server import EngineServer
from producers.simulate.workload import WorkloadSpec
from schemas.records import Departure, RankMessage, RankWindow
from streams.offline import count
from tests.forwarding import PATIENCE, wait_for

SPEC = FleetSpec((InstanceSpec("i", "w", EngineSpec(pool_blocks=64, block_size=16)),), (WorkloadSpec("w", rate=8.0),), 6.0, 5)


def relayed(folder: Path, fault: Fault | None) -> list[RankMessage]:
    """What a forwarder writes about the one rank of :data:`SPEC` while it is scraped."""
    (source,) = fleet.sources(SPEC)
    batches = sum(source.batches_per_life() or ())
    stop = threading.Event()
    with (
        EngineServer([source], speed=10.0, wait_subscribers=1, metrics_port=0, metrics_fault=fault) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        (rank,) = server.endpoints()
        config = ForwarderConfig(
            "i",
            rank.endpoint,
            None,
            ephemeral_key(),
            replay_endpoint=rank.replay_endpoint,
            segments=folder,
            metrics_url=rank.metrics_url,
            metrics_interval=0.05,
            heartbeat=0.1,
        )
        forwarder = Forwarder(config)
        run = pool.submit(forwarder.run, stop)
        try:
            assert server.wait_finished(PATIENCE)
            wait_for(lambda: forwarder.tally.batches == batches, "batches")
        finally:
            stop.set()
        run.result(PATIENCE)
    return [fact for fact in Ingest([folder]).facts() if isinstance(fact, RankMessage)]


def kinds(rows: list[RankWindow]) -> set[str]:
    return {breach.kind for row in rows for breach in row.breaches}


def test_an_honest_engine_is_believed(tmp_path: Path) -> None:
    messages = relayed(tmp_path, None)
    scrapes = [message.scrape for message in messages if message.scrape is not None]
    assert {scrape.num_gpu_blocks for scrape in scrapes} <= {None, 65}
    assert len(scrapes) >= 5
    assert scrapes[-1].prompt_tokens
    assert messages[-1].departure == Departure("stopped")
    rows = count(messages).rank_windows
    assert sum(row.scrapes for row in rows) > 0
    assert kinds(rows) <= {"in_use_over_cached"}  # events and pages travel apart: under load one may be seen without the other
    assert rows[-1].pool_blocks == 65


@pytest.mark.parametrize(("fault", "kind"), [("small-pool", "cached_over_pool"), ("busy", "in_use_over_cached")])
def test_a_contradiction_is_recorded_with_both_numbers(fault: Fault, kind: str, tmp_path: Path) -> None:
    rows = count(relayed(tmp_path, fault)).rank_windows
    assert kind in kinds(rows)
    assert any(kind in row.reasons for row in rows)
    assert all(breach.found > breach.bound for row in rows for breach in row.breaches)
