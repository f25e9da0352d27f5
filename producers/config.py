"""What one forwarder is told, and what of it is declared with its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from producers.identity import IdentityKey
from producers.resolver import DEFAULT_MAX_BLOCKS
from producers.wire import MAX_PAYLOAD_BYTES
from schemas import records


@dataclass(frozen=True)
class ForwarderConfig:
    """What one forwarder is told. Times in seconds, sizes in bytes.

    ``endpoint`` and ``replay_endpoint`` are the rank's own event sockets; without the latter nothing missed can be asked for.
    ``dp_rank`` None: the rank is the one that the batches name themselves (0 where they name none).
    ``bootstrap_servers`` None: no Kafka, and then ``segments`` names a folder for sealed Parquet segments, which may also be written
    beside Kafka. ``spool`` is the folder that keeps what Kafka has not acknowledged, and where the stream stands, over any end of
    the process; None keeps both in memory alone. ``startup_timeout`` is how long to wait for Kafka at the start before saying that
    it is away, ``stop_timeout`` bounds the wait until everything is delivered at the end. With ``idle``, the forwarder stops by itself
    when no batch came for that long. ``max_blocks`` bounds the identities remembered for each rank. ``metrics_url`` is the
    engine's own ``/metrics``; ``metrics_listen`` is the (host, port) where the forwarder shows its own, None for nowhere; a
    port that is taken is an error if it was ``metrics_port_given``, else any free one does.
    """

    instance_id: str
    endpoint: str
    bootstrap_servers: str | None
    key: IdentityKey
    dp_rank: int | None = 0
    replay_endpoint: str | None = None
    topic: str = ""
    kafka_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    reuse_reporting: records.ReuseReporting = "unlabelled"
    removals: records.Removals = "per_copy"
    workload: str | None = None
    model: str | None = None
    kv_connector: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    engine_profile: records.EngineProfile = "vllm"
    gpus_per_rank: float | None = None
    kv_bytes_per_token: int | None = None
    kv_bytes_by_group: Mapping[int, int] = field(default_factory=dict)
    prefill_rate: float | None = None
    staleness: float = 60.0
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_blocks: int = DEFAULT_MAX_BLOCKS
    spool: Path | None = None
    spool_bytes: int = 1 << 30
    segments: Path | None = None
    segments_bytes: int = 10 << 30
    segment_seconds: float = 300.0
    metrics_url: str | None = None
    metrics_interval: float = 5.0
    metrics_listen: tuple[str, int] | None = None
    metrics_port_given: bool = True
    replay_timeout: float = 5.0
    startup_timeout: float = 30.0
    heartbeat: float = 5.0
    stop_timeout: float = 30.0
    idle: float | None = None

    def declaration(self) -> records.Declaration:
        """What the operator declared, as a record."""
        return records.Declaration(
            reuse_reporting=self.reuse_reporting,
            removals=self.removals,
            workload=self.workload,
            model=self.model,
            kv_connector=self.kv_connector,
            key_epoch=self.key.epoch,
            canary=self.key.canary,
            forwarder_version=forwarder_version(),
            labels=dict(self.labels),
            engine_profile=self.engine_profile,
            gpus_per_rank=self.gpus_per_rank,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_bytes_by_group={str(group): size for group, size in sorted(self.kv_bytes_by_group.items())},
            prefill_rate=self.prefill_rate,
            heartbeat_ms=round(self.heartbeat * 1_000),
            staleness_ms=round(self.staleness * 1_000),
            max_payload_bytes=self.max_payload_bytes,
        )


def forwarder_version() -> str:
    """Version of this package; empty where it is not installed."""
    try:
        return version("kvcensus")
    except PackageNotFoundError:
        return ""
