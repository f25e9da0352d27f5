"""The fleet of the demo: simulated engines, and beside them what real engines were recorded to publish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from producers.capture import restamp
from producers.simulate import fleet, presets, recording
from producers.simulate.engine import Control, EngineRank
from producers.simulate.fleet import DEFAULT_START_US, FleetSpec, InstanceSpec
from producers.simulate.source import RankSource, SourceBatch
from producers.simulate.workload import SECOND_US, Request, requests
from schemas.records import Declaration, rank_key

DATA = Path(__file__).parents[1] / "data"
"""The captures that the project ships."""

CAPTURES = {"g_dp2": "vLLM 0.32.0", "a_shared_prefix": "vLLM 0.32.0"}
"""Captures that run in the demo, and the engine that each was recorded from."""

PREFIX = "capture-"
"""Instances of captures are named so."""

LOAD_SECONDS = 3_600
"""Engine time after which the load of a demo that goes on ends, at half a million batches: its broker keeps them all in memory."""

_CHUNK_SECONDS = 300
_TINY_KV_BYTES = 1_024
"""Of the order of what such a model takes: two layers, two KV heads of 64, keys and values in 16 bits."""


def finite(seconds: float, seed: int) -> list[RankSource]:
    """Every rank of a demo of ``seconds`` of engine time. The same seed gives the same batches."""
    return fleet.sources(presets.demo_fleet(seconds, seed)) + captures()


def lasting(seed: int) -> list[RankSource]:
    """The same ranks, the simulated ones under a load of :data:`LOAD_SECONDS`: made while it is served, in little memory."""
    return _Lasting(presets.demo_fleet(LOAD_SECONDS, seed)).sources() + captures()


def captures() -> list[RankSource]:
    """The ranks of the captures, moved in time so that each begins with the simulated fleet."""
    # Any request to a vLLM engine may ask it to announce reused blocks, so of a real one nobody can say "none".
    declared = Declaration("unlabelled", "per_copy", workload="recorded", model="tiny", kv_bytes_per_token=_TINY_KV_BYTES)
    return [
        _moved(source)
        for name in CAPTURES
        for source in recording.from_capture(PREFIX + name, DATA / f"{name}{recording.SUFFIX}", declared)
    ]


def is_recorded(instance_id: str) -> bool:
    """Whether the batches of an instance were recorded from a real engine."""
    return instance_id.startswith(PREFIX)


def origin(instance_id: str) -> str:
    """Where the batches of an instance come from, in words."""
    return f"recorded from {CAPTURES[instance_id.removeprefix(PREFIX)]}" if is_recorded(instance_id) else "simulated"


def _moved(source: RankSource) -> RankSource:
    shift = DEFAULT_START_US - source.origin_us
    batches = [SourceBatch(b.life, b.seq, b.at_us + shift, restamp(b.payload, shift)) for b in source.batches]
    return replace(source, batches=batches, origin_us=DEFAULT_START_US)


class _Lasting:
    """A fleet whose requests are drawn five minutes at a time: the same prompts all along, sessions that are always new."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._targets = {
            workload.name: [(i.name, rank) for i in spec.instances if i.workload == workload.name for rank in range(i.dp_size)]
            for workload in spec.workloads
        }
        # The ranks are served side by side, so they ask for one chunk at about the same time.
        self._chunk = lru_cache(maxsize=2)(self._draw)

    def sources(self) -> list[RankSource]:
        """One source per rank."""
        spec = self._spec
        return [
            RankSource(instance.name, rank, self._batches(instance, rank), fleet.declaration(instance), spec.start_us)
            for instance in spec.instances
            for rank in range(instance.dp_size)
        ]

    def _batches(self, instance: InstanceSpec, dp_rank: int) -> Iterator[SourceBatch]:
        spec = self._spec
        key = rank_key(instance.name, dp_rank)
        engine = EngineRank(instance.engine, dp_rank, lambda life: f"{spec.seed}/{key}/{life}".encode())
        controls = [Control(round(at * SECOND_US), "flush") for at in instance.flush_at_s]
        controls += [Control(round(at * SECOND_US), "restart") for at in instance.restart_at_s]
        return engine.run(self._requests(instance.name, dp_rank), controls, spec.start_us, spec.duration_us)

    def _requests(self, instance: str, dp_rank: int) -> Iterator[Request]:
        for number in range(LOAD_SECONDS // _CHUNK_SECONDS):
            yield from self._chunk(number)[instance, dp_rank]

    def _draw(self, number: int) -> dict[tuple[str, int], list[Request]]:
        """All requests of one chunk, dealt out in turn."""
        length_us = _CHUNK_SECONDS * SECOND_US
        dealt: dict[tuple[str, int], list[Request]] = {target: [] for targets in self._targets.values() for target in targets}
        for workload in self._spec.workloads:
            targets = self._targets[workload.name]
            # The name seeds the sessions, not the prompts that they share.
            drawn = requests(replace(workload, name=f"{workload.name}/{number}"), self._spec.seed, length_us)
            for request in {id(request): request for request in drawn}.values():  # one that was sent twice is one object
                request.arrival_us += number * length_us
            for turn, request in enumerate(drawn):
                dealt[targets[turn % len(targets)]].append(request)
        return dealt
