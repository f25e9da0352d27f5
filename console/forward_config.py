"""From the options of ``kvcensus forward`` to what each rank's forwarder is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import click

from console.option_types import HIGHEST_PORT, sizes_by_group
from producers.folders import folder_name
from producers.forwarder import ForwarderConfig
from producers.identity import IdentityKey
from schemas.records import EngineProfile, Removals, ReuseReporting

LIVE_PORT = 5557
"""vLLM's default: data-parallel rank r publishes on this port + r."""

METRICS_PORT = 9557
"""Where rank r's forwarder shows its own metrics, + r, unless told otherwise."""

LOOPBACK = "127.0.0.1"
ANY_RANK = "any"
"""Name of the spool folder of a forwarder that takes the rank from the batches."""

_PLAIN = " @+=,"
"""Stand as they are in the name of an instance's spool folder."""


@dataclass(frozen=True)
class ForwardOptions:
    """The options as they were given; a field's name is the option's."""

    instance: str
    dp_rank: int | None
    dp_size: int | None
    endpoint: str | None
    replay_endpoint: str | None
    topic: str
    max_payload_bytes: int
    model: str | None
    workload: str | None
    reuse_reporting: str
    removals: str
    kv_connector: str | None
    engine_profile: str
    gpus_per_rank: float | None
    kv_bytes_per_token: tuple[tuple[int | None, int], ...]
    prefill_rate: float | None
    staleness_seconds: float
    key_file: Path | None
    key_epoch: int
    max_blocks: int
    bootstrap_servers: str | None
    data_dir: Path | None
    spool_dir: Path | None
    spool_bytes: int
    no_spool: bool
    segments: Path | None
    segments_bytes: int
    segment_seconds: float
    metrics_url: str | None
    metrics_interval: float
    metrics_listen: tuple[str, int] | None
    no_metrics: bool
    heartbeat_seconds: float
    replay_timeout: float
    startup_timeout: float
    stop_timeout: float
    once_idle: float | None


@dataclass(frozen=True)
class Listen:
    """Where to show own metrics; ``given``: the operator named it, so that nothing else will do."""

    host: str
    port: int
    given: bool


@dataclass(frozen=True)
class RankPlace:
    """What differs from rank to rank of one command. ``spool`` None: in memory; ``metrics`` None: not shown."""

    dp_rank: int | None
    endpoint: str
    replay_endpoint: str | None
    spool: Path | None
    metrics: Listen | None


def first_rank(options: ForwardOptions) -> int:
    """The rank that ports are counted from when nothing else is said."""
    return options.dp_rank or 0


def ranks(options: ForwardOptions) -> list[int | None]:
    """The ranks that the command stands for; [None]: the one that the batches name."""
    if options.dp_size is None:
        return [options.dp_rank]
    first = first_rank(options)
    return list(range(first, first + options.dp_size))


def place(options: ForwardOptions, dp_rank: int | None, folder: Path) -> RankPlace:
    """Sockets and folders of one rank; ``folder`` is the data folder.

    With ``--dp-size``, addresses are rank 0's and rank r is found on their ports + r, as the engine itself has it; the spool folder
    has a subfolder for each rank. Raises :class:`click.UsageError` for a port that does not exist.
    """
    rank, many = dp_rank or 0, options.dp_size is not None
    # An address that was left out is the default of the rank; one that was given is moved only for a rank of many.
    endpoint = options.endpoint or f"tcp://{LOOPBACK}:{LIVE_PORT}"
    listen = options.metrics_listen
    metrics = None
    if not options.no_metrics:
        host, port = listen or (LOOPBACK, METRICS_PORT)
        moved = port + rank if port and (many or listen is None) else port
        if listen is None and moved > HIGHEST_PORT:
            moved = 0
        metrics = Listen(host, _port(moved, "--metrics-listen", port, rank), given=listen is not None)
    return RankPlace(
        dp_rank,
        _moved(endpoint, "--endpoint", rank) if many or options.endpoint is None else endpoint,
        _moved(options.replay_endpoint, "--replay-endpoint", rank) if many and options.replay_endpoint else options.replay_endpoint,
        None if options.no_spool else _spool(options, dp_rank, folder),
        metrics,
    )


def check(options: ForwardOptions) -> None:
    """Raise :class:`click.UsageError` for options that make no sense together."""
    if options.staleness_seconds <= options.heartbeat_seconds:
        raise click.UsageError(
            f"--staleness-seconds {options.staleness_seconds:g} is not above --heartbeat-seconds {options.heartbeat_seconds:g}: "
            "every rank would be given up between two heartbeats"
        )
    try:
        sizes_by_group(options.kv_bytes_per_token)
    except ValueError as error:
        raise click.UsageError(f"--kv-bytes-per-token: {error}") from None


def forwarder_config(
    options: ForwardOptions,
    where: RankPlace,
    key: IdentityKey,
    bootstrap_servers: str | None,
    kafka_options: Mapping[str, str],
    labels: Mapping[str, str],
) -> ForwarderConfig:
    """What one rank's forwarder is told."""
    kv_bytes_per_token, kv_bytes_by_group = sizes_by_group(options.kv_bytes_per_token)
    return ForwarderConfig(
        instance_id=options.instance,
        dp_rank=where.dp_rank,
        endpoint=where.endpoint,
        replay_endpoint=where.replay_endpoint,
        topic=options.topic,
        bootstrap_servers=bootstrap_servers,
        kafka_options=kafka_options,
        key=key,
        reuse_reporting=cast("ReuseReporting", options.reuse_reporting),
        removals=cast("Removals", options.removals),
        workload=options.workload or None,
        model=options.model or None,
        kv_connector=options.kv_connector or None,
        labels=labels,
        engine_profile=cast("EngineProfile", options.engine_profile),
        gpus_per_rank=options.gpus_per_rank,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_bytes_by_group=kv_bytes_by_group,
        prefill_rate=options.prefill_rate,
        staleness=options.staleness_seconds,
        max_payload_bytes=options.max_payload_bytes,
        max_blocks=options.max_blocks,
        spool=where.spool,
        spool_bytes=options.spool_bytes,
        segments=options.segments.expanduser() if options.segments else None,
        segments_bytes=options.segments_bytes,
        segment_seconds=options.segment_seconds,
        metrics_url=options.metrics_url,
        metrics_interval=options.metrics_interval,
        metrics_listen=(where.metrics.host, where.metrics.port) if where.metrics is not None else None,
        metrics_port_given=where.metrics is not None and where.metrics.given,
        heartbeat=options.heartbeat_seconds,
        replay_timeout=options.replay_timeout,
        startup_timeout=options.startup_timeout,
        stop_timeout=options.stop_timeout,
        idle=options.once_idle,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def _spool(options: ForwardOptions, dp_rank: int | None, folder: Path) -> Path:
    rank = ANY_RANK if dp_rank is None else str(dp_rank)
    if options.spool_dir is not None:
        given = options.spool_dir.expanduser()
        return given / rank if options.dp_size is not None else given
    return folder / "spool" / folder_name(options.instance, _PLAIN) / rank


def _moved(endpoint: str, option: str, rank: int) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.port is None:
        raise click.UsageError(f"--dp-size finds rank r on the port of {option} + r, and {endpoint!r} has none: run a forwarder per rank")
    return f"{endpoint.rpartition(':')[0]}:{_port(parts.port + rank, option, parts.port, rank)}"


def _port(port: int, option: str, base: int, rank: int) -> int:
    if port > HIGHEST_PORT:
        raise click.UsageError(f"rank {rank} would be on port {base} + {rank}, above {HIGHEST_PORT}: give {option}, or a lower --dp-rank")
    return port
