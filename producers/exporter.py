"""The forwarder's own ``/metrics``: its counters, spool and lag in Prometheus's text format, on loopback unless told otherwise.

The registry is this exporter's own: nothing process-wide is registered, and nothing of the Python runtime is shown.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.errors import KvcensusError

logger = logging.getLogger("kvcensus.exporter")

_PREFIX = "kvcensus_forwarder_"
_MOST_AT_ONCE = 8
"""Requests answered at the same time; what comes beyond is closed unanswered."""
_REQUEST_SECONDS = 5.0


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
    lost_batches: int = 0
    duplicates: int = 0
    replayed_batches: int = 0
    publisher_restarts: int = 0
    delivered_messages: int = 0
    spool_dropped_batches: int = 0
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
    "refused": "Messages that could not be read, oversized and malformed ones included.",
    "oversized": "Messages refused unread for their size.",
    "malformed": "Messages that were no batch.",
    "lost_batches": "Batches declared lost.",
    "duplicates": "Batches that came again, dropped.",
    "replayed_batches": "Batches that the engine's replay returned.",
    "publisher_restarts": "Engine restarts seen.",
    "delivered_messages": "Messages that Kafka acknowledged.",
    "spool_dropped_batches": "Batches that the spool's bound forced out, declared lost.",
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


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    server_version = "kvcensus"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"only /metrics is here\n")
            return
        try:
            page = generate_latest(self.server.registry)
        except Exception:
            logger.exception("the forwarder's own metrics could not be gathered")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics could not be gathered\n")
            return
        self._answer(HTTPStatus.OK, page, CONTENT_TYPE_PLAIN_0_0_4)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client went away", exc_info=True)


class Exporter:
    """Serves ``GET /metrics`` and nothing else at ``host``:``port`` (0: any free port) from threads of its own.

    ``read`` is called for every page, from those threads, and gives a snapshot for each rank. Raises :class:`KvcensusError` when the
    address cannot be had.
    """

    def __init__(self, read: Callable[[], Sequence[Snapshot]], host: str = "127.0.0.1", port: int = 0) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshots(read))
        try:
            self._server = _Server((host, port), registry)
        except (OSError, OverflowError) as error:
            raise KvcensusError(f"own metrics at {_place(host, port)}: {_why(error)}; see --metrics-listen, or --no-metrics") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="kvcensus-exporter", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_place(str(self._server.server_address[0]), self.port)}/metrics"

    def start(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Answer no more; may be called twice, and without a start."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        with suppress(OSError):
            self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
