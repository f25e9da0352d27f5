"""The whole way: engine sockets, forwarder, Kafka, Faust worker, ClickHouse, `kvcensus show`: exactly the oracle's figures."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from producers.simulate import fleet, presets
from producers.simulate.source import RankSource
from schemas.records import Declaration
from tests.counting import capture_sources, differences, expected
from tests.kafka import Kafka
from tests.pipeline import pipeline
from tests.shared_data import CAPTURE_NAMES, capture_path

FLEETS = presets.test_fleets()


def test_every_capture_through_the_pipeline(kafka: Kafka, tmp_path: Path) -> None:
    """One capture after the other into a running pipeline, each an instance of its own: the figures of all so far, each time.

    They were recorded days apart and not in this order, so most of it is late data to a fleet that has seen later times.
    """
    declaration = Declaration("unlabelled", "per_copy")
    fed: list[RankSource] = []
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        for number, name in enumerate(CAPTURE_NAMES):
            sources = capture_sources((f"{number}-{name.split('.')[0]}", capture_path(name)), declaration=declaration)
            fed += sources
            running.feed(sources)
            assert differences(running.figures(), expected(fed)) == [], f"from {name} on"


def test_every_fleet_through_the_pipeline(kafka: Kafka, tmp_path: Path) -> None:
    """Seven fleets of 4 to 16 ranks, one after the other, as parts of one growing fleet."""
    fed: list[RankSource] = []
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        for name, spec in FLEETS.items():
            sources = fleet.sources(spec)
            fed += sources
            running.feed(sources)
            document = running.figures()
            assert differences(document, expected(fed)) == [], f"from {name} on"
        by_rank = running.show("duplicates", "--by", "rank")["duplicate_footprint"]
        assert sum(rank["extra_tokens"]["end"] for rank in by_rank) == document["duplicate_footprint"]["extra_tokens"]["end"]


@pytest.mark.parametrize("speed", [6.0, 12.0])
def test_pace_changes_nothing(speed: float, kafka: Kafka, tmp_path: Path) -> None:
    sources = fleet.sources(FLEETS["flush-and-restart"])
    with pipeline(kafka.bootstrap_servers, tmp_path / "data", "--window", "2") as running:
        running.feed(sources, speed=speed)
        assert differences(running.figures(), expected(sources)) == []


def test_one_rank_after_the_other_changes_nothing(kafka: Kafka, tmp_path: Path) -> None:
    sources = fleet.sources(FLEETS["shared-ticks"])
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        for source in reversed(sources):
            running.feed([source])
        assert differences(running.figures(), expected(sources)) == []


def test_a_worker_killed_on_the_way_counts_the_same(kafka: Kafka, tmp_path: Path) -> None:
    sources = fleet.sources(FLEETS["thrash"])
    with pipeline(kafka.bootstrap_servers, tmp_path / "data", "--window", "2") as running:
        running.feed(sources[:2])
        time.sleep(3.0)
        running.stop_worker(signal.SIGKILL)
        running.feed(sources[2:])
        running.start_worker()
        time.sleep(2.0)
        running.stop_worker(signal.SIGKILL)
        running.start_worker()
        assert differences(running.figures(), expected(sources)) == []


def test_everything_delivered_twice_counts_once(kafka: Kafka, tmp_path: Path) -> None:
    """Two forwarders of one rank, one after the other: the second finds all of it in the engine's replay buffer again."""
    sources = capture_sources(("engine", capture_path("a_shared_prefix.frames.jsonl.gz")), declaration=Declaration("none", "per_copy"))
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        running.feed(sources)
        running.feed(sources)
        document: dict[str, Any] = running.figures()
        found = [each for each in differences(document, expected(sources)) if not each.startswith(("coverage", "duplicate coverage"))]
        assert found == []


def test_an_undeclared_workload_is_a_bucket_of_its_own(kafka: Kafka, tmp_path: Path) -> None:
    spec = FLEETS["salts-and-adapters"]
    sources = fleet.sources(spec)
    sources = [
        replace(
            source,
            declaration=Declaration("none", "per_copy", workload=None if source.instance_id == "s3" else source.declaration.workload),
        )
        for source in sources
    ]
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        running.feed(sources)
        document = running.figures()
        by_workload = running.show("repeat-compute", "--by", "workload")["repeat_compute"]
        assert [each["key"] for each in by_workload] == ["tenants", "tools", None]
        for cause in ("evicted", "cleared", "restarted"):
            assert sum(each[cause]["tokens"] for each in by_workload) == document["repeat_compute"][cause]["tokens"]
