"""What a simulated engine says of itself: the recorded pages, or the pool's own state, each process life by itself."""

from __future__ import annotations

import gzip
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import pytest
import zmq

from producers import engine_metrics, wire, wire_types
from producers.scraper import Scraper
from producers.simulate import fleet, presets, recording
from producers.simulate.engine import EngineSpec
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.metrics import Fault, Reading, page, read_pages
from producers.simulate.server import EngineServer, RankEndpoint, ServerOptions
from producers.simulate.source import RankSource
from producers.simulate.workload import WorkloadSpec
from schemas.errors import KvcensusError
from schemas.records import Declaration, EngineMetrics
from tests.shared_data import shared_path

SPEC = FleetSpec(
    (InstanceSpec("a b/c", "w", EngineSpec(pool_blocks=64, block_size=16), dp_size=2, restart_at_s=(4.0,)),),
    (WorkloadSpec("w", rate=8.0, salts=2),),
    8.0,
    3,
)
PATIENCE_S = 60
UNDECLARED = Declaration(reuse_reporting="unlabelled", removals="per_copy")


def fetch(url: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    connection.request("GET", parts.path)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode()
    finally:
        connection.close()


def url_of(rank: RankEndpoint) -> str:
    assert rank.metrics_url is not None
    return rank.metrics_url


def metrics(rank: RankEndpoint) -> EngineMetrics:
    status, text = fetch(url_of(rank))
    assert status == 200
    return engine_metrics.parse(text, rank.dp_rank)


def take_all(server: EngineServer) -> None:
    """Subscribe to every rank, and wait until all has been published."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kept = []
    try:
        for rank in server.endpoints():
            socket = context.socket(zmq.SUB)
            kept.append(socket)  # one that nobody refers to is closed
            socket.set_hwm(0)
            socket.subscribe(b"")
            socket.connect(rank.endpoint)
        assert server.wait_finished(PATIENCE_S)
    finally:
        context.destroy(linger=0)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def last_readings(source: RankSource) -> dict[int, Reading]:
    """Of each life, at its end."""
    found: dict[int, Reading] = {}
    for batch in source.batches:
        assert batch.reading is not None
        found[batch.life] = batch.reading
    return found


def test_the_pools_state_and_each_process_start_are_on_the_page() -> None:
    sources = fleet.sources(SPEC)
    before = time.time()
    with EngineServer(sources, speed=None, wait_subscribers=1, metrics_port=0) as server:
        ranks = server.endpoints()
        assert len({rank.metrics_url for rank in ranks}) == 2
        unstarted = metrics(ranks[0])
        assert (unstarted.num_gpu_blocks, unstarted.prompt_tokens) == (None, None)
        take_all(server)
        for rank, source in zip(ranks, sources, strict=True):
            lives = last_readings(source)
            assert list(lives) == [0, 1]
            reading, found = lives[1], metrics(rank)
            assert (found.num_gpu_blocks, found.block_size, found.model_name) == (65, 16, "simulated")
            assert found.kv_cache_usage == reading.used_blocks / 64
            assert (found.requests_running, found.requests_waiting) == (reading.running, reading.waiting)
            assert (found.prefix_cache_queries, found.prefix_cache_hits) == (reading.prefix_queries, reading.prefix_hits)
            assert (found.prompt_tokens, found.generation_tokens) == (reading.prompt_tokens, reading.generation_tokens)
            assert found.preemptions == reading.preemptions
            assert found.process_started_us is not None
            assert unstarted.process_started_us is not None
            assert found.process_started_us > unstarted.process_started_us >= (before - 0.001) * 1e6
        assert fetch(url_of(ranks[0]).replace("/0/metrics", "/7/metrics"))[0] == 404
        assert fetch(url_of(ranks[0]).partition("/a%20b")[0] + "/metrics")[0] == 404, "whose?"
    with pytest.raises(OSError, match="refused"):
        fetch(url_of(ranks[0]))


def test_readings_add_up_over_the_lives() -> None:
    (plan, *_) = fleet.plan(SPEC, None)
    batches = list(plan)
    readings = last_readings(RankSource("i", 0, batches, UNDECLARED, 0))
    # What a life did after its last batch is in no reading, so the sums are bounds.
    assert 0 < sum(reading.prefix_hits for reading in readings.values()) <= plan.stats.hit_tokens
    assert sum(reading.prefix_queries for reading in readings.values()) <= plan.stats.prompt_tokens
    for earlier, later in pairwise(batches):
        assert earlier.reading is not None
        assert later.reading is not None
        assert later.reading.used_blocks <= 64
        assert later.reading.prompt_tokens_cached <= later.reading.prompt_tokens <= later.reading.prefix_queries
        if later.life == earlier.life:
            assert later.reading.generation_tokens >= earlier.reading.generation_tokens
        else:
            assert later.reading.generation_tokens < earlier.reading.generation_tokens


@pytest.mark.parametrize("name", sorted(presets.test_fleets()))
def test_an_honest_engine_s_pages_contradict_none_of_its_events(name: str) -> None:
    """At each batch: no more is cached than the pool has, and no more in use than is cached or being filled."""
    for plan in fleet.plan(presets.test_fleets()[name]):
        copies, life, rated = 0, 0, 0
        for batch in plan:
            copies = 0 if batch.life != life else copies
            life = batch.life
            for event in wire.decode(batch.payload).events:
                if isinstance(event, wire_types.Stored):
                    copies += len(event.block_hashes)
                elif isinstance(event, wire_types.Removed):
                    copies -= len(event.block_hashes)
                else:
                    copies = 0
            now = batch.reading
            assert now is not None
            pool, usage = now.pool_blocks + 1, now.used_blocks / now.pool_blocks  # as the page has them
            assert copies <= pool
            assert round(usage * pool) <= copies + now.running + 1  # the null block
            rated = max(rated, now.prompt_tokens - now.prompt_tokens_cached)
        assert rated > 0


@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_faulty_engine_s_pages_contradict_its_events(fault: Fault) -> None:
    (plan, *_) = fleet.plan(SPEC)
    last = last_readings(RankSource("i", 0, list(plan), UNDECLARED, 0))[1]
    with EngineServer(fleet.sources(SPEC), speed=None, wait_subscribers=1, metrics_port=0, metrics_fault=fault) as server:
        take_all(server)
        found = metrics(server.endpoints()[0])
    assert found.num_gpu_blocks is not None
    assert found.kv_cache_usage is not None
    if fault == "small-pool":
        assert found.num_gpu_blocks == last.pool_blocks // 4 + 1
        assert 0 <= found.kv_cache_usage <= 1
    else:
        assert found.kv_cache_usage * found.num_gpu_blocks >= 4 * last.pool_blocks
    assert found.prompt_tokens == last.prompt_tokens


def test_a_scraper_tells_a_restart_by_the_process_start() -> None:
    sources = [replace(source, instance_id="i") for source in fleet.sources(SPEC)[:1]]
    with EngineServer(sources, speed=None, wait_subscribers=1, restart_pause_s=0.0, metrics_port=0) as server:
        (rank,) = server.endpoints()
        with Scraper(url_of(rank), rank.dp_rank, interval_s=1_000) as scraper:
            first = scraper.process_started_us(time.monotonic(), PATIENCE_S)
            take_all(server)
            second = scraper.process_started_us(time.monotonic(), PATIENCE_S)
        assert first is not None
        assert second is not None
        assert second > first
        assert fetch(url_of(rank).partition("/i/")[0] + "/metrics")[0] == 200, "a single rank's is where an engine has it, too"


PAGE = 'vllm:num_requests_running{{engine="0"}} {}\n'


def recorded(tmp_path: Path, sources: list[RankSource], times_us: list[int]) -> list[RankSource]:
    """``sources`` as a capture with a page at each of ``times_us``."""
    recording.write(sources, tmp_path / "x.frames.jsonl.gz")
    with gzip.open(tmp_path / "x.metrics.jsonl.gz", "wt") as file:
        for number, at_us in enumerate(times_us):
            file.write(json.dumps({"t": at_us / 1e6, "text": PAGE.format(number)}) + "\n")
    return recording.from_capture("x", tmp_path / "x.frames.jsonl.gz", UNDECLARED)


def test_recorded_pages_come_at_their_time(tmp_path: Path) -> None:
    made = fleet.sources(SPEC)
    last = max(batch.at_us for source in made for batch in source.batches)
    sources = recorded(tmp_path, made, [made[0].origin_us + 1_000_000, last, last + 60_000_000])
    with EngineServer(sources, speed=None, wait_subscribers=1, restart_pause_s=0.0, metrics_port=0) as server:
        first, second = server.endpoints()
        assert metrics(first).requests_running == 0, "before its time the first"
        take_all(server)
        # Without a pace the newest batch says when it is: one of the two ranks has the last.
        assert {metrics(rank).requests_running for rank in (first, second)} <= {0, 1}
        assert 1 in {engine_metrics.parse(fetch(url_of(rank))[1], 0).requests_running for rank in (first, second)}
    with EngineServer(sources, speed=1_000.0, restart_pause_s=0.0, metrics_port=0) as server:
        until(lambda: metrics(server.endpoints()[0]).requests_running == 2)


def test_a_recorded_page_is_served_as_it_is() -> None:
    path = shared_path("captures/g_dp2.frames.jsonl.gz")
    sources = recording.from_capture("g", path, UNDECLARED)
    with EngineServer(sources, ServerOptions(speed=None, metrics_port=0)) as server:
        assert server.wait_finished(PATIENCE_S)
        with gzip.open(shared_path("captures/g_dp2.metrics.jsonl.gz"), "rt") as file:
            texts = {json.loads(line)["text"] for line in file}
        assert {fetch(url_of(rank))[1] for rank in server.endpoints()} <= texts
        assert metrics(server.endpoints()[1]).dp_rank == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b""), gzip.compress(b'{"t": 1}\n'), gzip.compress(b"x" * 99)[:-9]],
    ids=["nothing", "no gzip", "empty", "no page", "cut short"],
)
def test_what_holds_no_pages_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.metrics.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(KvcensusError, match=r"x\.metrics\.jsonl\.gz.*recorded metrics"):
        read_pages(path)


def test_a_port_in_use_is_said_and_leaves_nothing_open() -> None:
    sources = fleet.sources(SPEC)
    with EngineServer(sources, speed=None, metrics_port=0) as server:
        taken = urlsplit(url_of(server.endpoints()[0])).port
        with pytest.raises(KvcensusError, match=rf"metrics at 127\.0\.0\.1:{taken}: Address already in use; choose another --metrics-port"):
            EngineServer(sources, speed=None, metrics_port=taken).start()
    assert EngineServer(sources, speed=None).options.metrics_port is None


def test_without_a_reading_only_the_process_start_is_said() -> None:
    found = engine_metrics.parse(page(None, 12.5, None, 3).decode(), 3)
    assert found.process_started_us == 12_500_000
    assert (found.num_gpu_blocks, found.block_size, found.requests_running) == (None, None, None)


def test_the_command_serves_them_and_says_where() -> None:
    arguments = ["--synthetic", "--instances", "1", "--duration", "1", "--metrics-port", "0", "--json", "--speed", "max"]
    with subprocess.Popen(
        [sys.executable, "-m", "console.cli", "simulate", *arguments], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as child:
        assert child.stdout is not None
        (rank,) = json.loads(child.stdout.readline())["ranks"]
        assert rank["forward"][-2:] != ["--metrics-url", rank["metrics_url"]]
        assert rank["metrics_url"] in rank["forward"]
        assert fetch(rank["metrics_url"])[0] == 200
        child.send_signal(signal.SIGTERM)
        child.stdout.read()
