"""The forwarder's own page: what it says, that a library's parser reads it, and that it does nothing else."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from producers.exporter import Exporter, Snapshot
from producers.forwarder import Forwarder, ForwarderConfig
from producers.identity import ephemeral_key
from schemas.errors import KvcensusError

COUNTERS = (
    *("batches", "blocks_stored", "blocks_removed", "events", "unresolved_blocks", "unknown_events", "refused", "oversized", "malformed"),
    *("too_large", "rank_mismatches", "identity_conflicts", "identities_forgotten"),
    *("lost_batches", "duplicates", "replayed_batches", "publisher_restarts", "delivered_messages", "spool_dropped_batches"),
    *("spool_faults", "spool_unreadable_bytes", "spool_vanished_messages", "identities_not_written"),
    *("segment_records", "segments_sealed", "segments_dropped", "segment_batches_refused", "scrapes", "scrapes_failed"),
)


def ask(exporter: Exporter, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode()
    finally:
        connection.close()


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value by name (without our prefix) and rank."""
    return {
        (sample.name.removeprefix("kvcensus_forwarder_"), f"{sample.labels['instance_id']}/{sample.labels['dp_rank']}"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_number_is_there_for_every_rank() -> None:
    numbers = {name: index + 1 for index, name in enumerate(COUNTERS)}
    second = Snapshot(
        'b "\\\n',
        1,
        "1.0",
        "run",
        **numbers,
        spool_bytes=100,
        spool_messages=101,
        undelivered=102,
        last_message_at_ms=1_500,
        engine_time_us=time.time_ns() // 1_000 - 60_000_000,
        bridge_blocks=103,
        connected=True,
        kafka_up=False,
    )
    assert {field.name for field in fields(Snapshot) if field.type == "int"} - {"dp_rank"} == set(COUNTERS)
    with Exporter(lambda: [Snapshot("a", 0), second]) as exporter:
        status, text = ask(exporter)
    assert status == 200
    found = samples(text)
    rank = f"{second.instance_id}/1"
    assert {name: found[f"{name}_total", rank] for name in COUNTERS} == numbers
    assert {found[f"{name}_total", "a/0"] for name in COUNTERS} == {0}
    gauges = ("spool_bytes", "spool_messages", "undelivered_messages", "bridge_blocks", "connected", "kafka_up")
    assert [found[name, rank] for name in gauges] == [100, 101, 102, 103, 1, 0]
    assert found["last_message_timestamp_seconds", rank] == 1.5
    assert found["engine_lag_seconds", rank] >= 60
    assert not any((name, "a/0") in found for name in (*gauges, "engine_lag_seconds", "last_message_timestamp_seconds"))
    info = next(line for line in text.splitlines() if line.startswith("kvcensus_forwarder_info{") and "run" in line)
    assert 'version="1.0"' in info
    assert "python_info" not in text
    assert not any("kvcensus" in family.name for family in REGISTRY.collect())


def test_each_page_is_taken_anew_and_a_failure_of_ours_is_said() -> None:
    count = 0

    def read() -> list[Snapshot]:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("broken")
        return [Snapshot("a", 0, batches=count)]

    with Exporter(read) as exporter:
        assert samples(ask(exporter)[1])["batches_total", "a/0"] == 1
        assert ask(exporter) == (500, "the page could not be made\n")
        assert samples(ask(exporter)[1])["batches_total", "a/0"] == 3


def test_it_can_only_be_read() -> None:
    with Exporter(lambda: [Snapshot("a", 0)]) as exporter:
        assert exporter.url == f"http://127.0.0.1:{exporter.port}/metrics"
        assert ask(exporter, path="/metrics?x=1")[0] == 200
        assert ask(exporter, path="/")[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(exporter, method)[0] == 501
        # Many that say nothing hold up nobody for good, and the answer comes all the same.
        silent = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(4)]
        assert ask(exporter)[0] == 200
        for each in silent:
            each.close()


def test_a_port_in_use_is_one_clear_error() -> None:
    with Exporter(lambda: []) as exporter:
        with pytest.raises(KvcensusError, match=rf"127\.0\.0\.1:{exporter.port}: Address already in use; see"):
            Exporter(lambda: [], port=exporter.port)
        port = exporter.port
    with Exporter(lambda: [], port=port) as again:  # the port is free as soon as it has ended
        assert ask(again)[0] == 200
    for host, wrong in (("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(KvcensusError, match="own metrics at"):
            Exporter(lambda: [], host, wrong)


def test_it_listens_on_loopback_only_and_ends_without_a_start() -> None:
    exporter = Exporter(lambda: [])
    exporter.stop()
    exporter.stop()
    six = Exporter(lambda: [], "::1") if socket.has_ipv6 else None
    if six is not None:
        assert six.url.startswith("http://[::1]:")
        six.stop()


def test_a_default_port_that_is_taken_becomes_a_free_one_a_given_one_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = taken.getsockname()
        config = ForwarderConfig("x", "tcp://127.0.0.1:1", None, ephemeral_key(), segments=tmp_path, metrics_listen=listen, idle=0.1)
        forwarder = Forwarder(replace(config, metrics_port_given=False))
        forwarder.run(threading.Event())
        assert forwarder.metrics_url is not None
        assert not forwarder.metrics_url.endswith(f":{listen[1]}/metrics")
        for host, port in (listen, ("no.such.host.invalid", 1)):
            with pytest.raises(KvcensusError, match=f"own metrics at {host}:{port}.*--metrics-listen"):
                Forwarder(replace(config, metrics_listen=(host, port))).run(threading.Event())
