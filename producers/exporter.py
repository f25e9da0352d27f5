"""The forwarder's own ``/metrics``: its counters, spool and lag in Prometheus's text format, on loopback unless told otherwise.

The registry is this exporter's own: nothing process-wide is registered, and nothing of the Python runtime is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from producers.page_server import PageServer

_PREFIX = "kvcensus_forwarder_"


@dataclass(frozen=True)
class Snapshot:
    """Where one rank's forwarder stands. Counters are cumulative since it started; None where there is nothing to say.

    ``engine_time_us`` is the newest engine time seen, microseconds since the epoch; ``last_message_at_ms`` the host's clock when the
    last message came. ``undelivered`` were handed to Kafka and not acknowledged yet. ``bridge_blocks`` are blocks whose identity is
    remembered. ``kafka_up`` None: no Kafka is used.
    """

    instance_id: str
    dp_rank: int
    version: str = ""
    incarnation: str = ""
    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    events: int = 0
    unresolved_blocks: int = 0
    unknown_events: int = 0
    refused: int = 0
    oversized: int = 0
    malformed: int = 0
    too_large: int = 0
    lost_batches: int = 0
    duplicates: int = 0
    replayed_batches: int = 0
    publisher_restarts: int = 0
    rank_mismatches: int = 0
    identity_conflicts: int = 0
    identities_forgotten: int = 0
    delivered_messages: int = 0
    spool_dropped_batches: int = 0
    spool_faults: int = 0
    spool_unreadable_bytes: int = 0
    spool_vanished_messages: int = 0
    identities_not_written: int = 0
    segment_records: int = 0
    segments_sealed: int = 0
    segments_dropped: int = 0
    segment_batches_refused: int = 0
    scrapes: int = 0
    scrapes_failed: int = 0
    spool_bytes: int | None = None
    spool_messages: int | None = None
    undelivered: int | None = None
    last_message_at_ms: int | None = None
    engine_time_us: int | None = None
    bridge_blocks: int | None = None
    connected: bool | None = None
    kafka_up: bool | None = None


_COUNTERS: dict[str, str] = {
    "batches": "Engine batches turned into messages.",
    "blocks_stored": "Blocks in stores.",
    "blocks_removed": "Blocks in removals.",
    "events": "Events of the batches read.",
    "unresolved_blocks": "Blocks without a content id.",
    "unknown_events": "Events of an unknown type, skipped.",
    "refused": "Messages that could not be read or sent, oversized, malformed and too large ones included.",
    "oversized": "Messages refused unread for their size.",
    "malformed": "Messages that were no batch.",
    "too_large": "Batches that Kafka would not take for their size.",
    "lost_batches": "Batches declared lost.",
    "duplicates": "Batches that came again, dropped.",
    "replayed_batches": "Batches that the engine's replay returned.",
    "publisher_restarts": "Engine restarts seen.",
    "rank_mismatches": "Batches that name another rank than the configured one.",
    "identity_conflicts": "Engine hashes whose content came out differently from before.",
    "identities_forgotten": "Blocks whose identity was forgotten to stay within --max-blocks.",
    "delivered_messages": "Messages that Kafka acknowledged.",
    "spool_dropped_batches": "Batches that the spool's bound forced out, declared lost.",
    "spool_faults": "Times that the spool's disk began to refuse.",
    "spool_unreadable_bytes": "Bytes of the spool that could not be read at the start: cut short or damaged.",
    "spool_vanished_messages": "Messages that were written to the spool and could not be read again.",
    "identities_not_written": "Identities that the disk did not take: a successor does not know them.",
    "segment_records": "Records written to segments.",
    "segments_sealed": "Segments sealed.",
    "segments_dropped": "Segments that gave way to the bound on their disk.",
    "segment_batches_refused": "Batches that the segments' disk did not take, declared lost in the segments.",
    "scrapes": "Pages read of the engine's metrics.",
    "scrapes_failed": "Pages of the engine's metrics that could not be read.",
}
_GAUGES: dict[str, tuple[str, Callable[[Snapshot, float], float | None]]] = {
    "spool_bytes": ("Bytes that wait on disk.", lambda now, _: now.spool_bytes),
    "spool_messages": ("Messages that wait on disk.", lambda now, _: now.spool_messages),
    "undelivered_messages": ("Messages handed to Kafka and not acknowledged yet.", lambda now, _: now.undelivered),
    "last_message_timestamp_seconds": (
        "When the engine last sent something, by this host's clock.",
        lambda now, _: None if now.last_message_at_ms is None else now.last_message_at_ms / 1_000,
    ),
    "engine_lag_seconds": (
        "This host's clock minus the newest engine time. An idle engine sends nothing, so it grows then, too.",
        lambda now, clock: None if now.engine_time_us is None else clock - now.engine_time_us / 1_000_000,
    ),
    "bridge_blocks": ("Blocks whose identity is remembered.", lambda now, _: now.bridge_blocks),
    "connected": ("1 while the engine's event socket is connected.", lambda now, _: now.connected),
    "kafka_up": ("1 while Kafka answers.", lambda now, _: now.kafka_up),
}
_LABELS = ("instance_id", "dp_rank")


class _Snapshots(Collector):
    """Snapshots as metric families, taken anew for every page."""

    def __init__(self, read: Callable[[], Sequence[Snapshot]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Every family, with a sample for each rank that has something to say."""
        ranks = [(snapshot, [snapshot.instance_id, str(snapshot.dp_rank)]) for snapshot in self._read()]
        clock = time.time()
        info = GaugeMetricFamily(f"{_PREFIX}info", "Always 1; which forwarder this is.", labels=[*_LABELS, "version", "incarnation"])
        for snapshot, labels in ranks:
            info.add_metric([*labels, snapshot.version, snapshot.incarnation], 1)
        yield info
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for snapshot, labels in ranks:
                counter.add_metric(labels, getattr(snapshot, name))
            yield counter
        for name, (text, value_of) in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for snapshot, labels in ranks:
                value = value_of(snapshot, clock)
                if value is not None:
                    gauge.add_metric(labels, value)
            yield gauge


class Exporter(PageServer):
    """Serves ``GET /metrics`` and nothing else at ``host``:``port`` (0: any free port) from threads of its own.

    ``read`` is called for every page, from those threads, and gives a snapshot for each rank. Raises :class:`KvcensusError` when the
    address cannot be had.
    """

    def __init__(self, read: Callable[[], Sequence[Snapshot]], host: str = "127.0.0.1", port: int = 0) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshots(read))

        def page_at(path: str) -> bytes | None:
            return generate_latest(registry) if path == "/metrics" else None

        super().__init__(page_at, host, port, "own metrics", "see --metrics-listen, or --no-metrics")

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"{self.root}/metrics"
