"""Every topic of kvcensus: name, record, how it is keyed and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas import records


@dataclass(frozen=True)
class Topic:
    """One topic. ``single_partition`` topics are read by one merger and have one partition whatever the count asked for.

    ``config`` is the topic configuration asked of the broker. Retention must outlive the longest outage of a
    worker, since a worker rebuilds its state by reading again.
    """

    name: str
    record: type[records.Record] | None
    key: str
    single_partition: bool = False
    config: dict[str, str] = field(default_factory=dict)


MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message a topic must take: a step of a busy engine is one message. Kafka's own default is 1 MiB."""

WEEK_MS = str(7 * 24 * 3600 * 1000)
_KEPT = {"cleanup.policy": "delete", "retention.ms": WEEK_MS, "max.message.bytes": str(MAX_MESSAGE_BYTES)}

BATCHES = Topic("kvcensus.batches", records.RankMessage, "rank", config=_KEPT)
LIFECYCLE = Topic("kvcensus.lifecycle", records.Lifecycle, "rank", config=_KEPT)
ENGINE_METRICS = Topic("kvcensus.engine-metrics", records.EngineMetrics, "rank", config=_KEPT)
RESIDENCY = Topic("kvcensus.residency", records.ResidencyChanges, "rank (partition = content shard)", config=_KEPT)
DUPLICATE_STEPS = Topic("kvcensus.duplicate-steps", records.DuplicateSteps, "shard", single_partition=True, config=_KEPT)
RANK_WINDOWS = Topic("kvcensus.rank-windows", records.RankWindow, "rank", config=_KEPT)
RECOMPUTES = Topic("kvcensus.recomputes", records.Recompute, "rank", config=_KEPT)
DUPLICATE_WINDOWS = Topic("kvcensus.duplicate-windows", records.DuplicateWindow, "scope", config=_KEPT)

SHARED_PREFIXES = Topic("kvcensus.shared-prefixes", records.SharedPrefix, "place", config=_KEPT)
DEAD_LETTERS = Topic("kvcensus.dead-letters", records.DeadLetter, "topic, partition and offset", config=_KEPT)

DEPLOYS = Topic(
    "kvcensus.deploys",
    records.Deploy,
    "deploy id",
    single_partition=True,
    config={"cleanup.policy": "compact", "max.message.bytes": str(MAX_MESSAGE_BYTES)},
)

DEAD_LETTER_BYTES = 256 * 1024
"""So much of a payload that could not be used is kept."""

RECORD_TOPICS = (
    BATCHES,
    LIFECYCLE,
    ENGINE_METRICS,
    RESIDENCY,
    DUPLICATE_STEPS,
    RANK_WINDOWS,
    RECOMPUTES,
    DUPLICATE_WINDOWS,
    SHARED_PREFIXES,
    DEAD_LETTERS,
    DEPLOYS,
)

DEFAULT_PARTITIONS = 4
