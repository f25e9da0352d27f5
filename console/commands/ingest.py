"""``kvcensus ingest``: sealed segments from disk into Kafka, as a forwarder would have sent them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from console.broker import find_bootstrap_servers
from console.escape import escaped
from console.number_options import FiniteRange
from console.option_types import Folder
from producers.delivery import Delivery
from producers.segments.ingest import Ingest, Tally
from producers.segments.shape import Fact
from producers.stand_in import stand_in
from schemas import codec, environment
from schemas.errors import KvcensusError
from schemas.records import EngineMetrics, Lifecycle, rank_key
from schemas.topics import BATCHES, ENGINE_METRICS, LIFECYCLE

_SECONDS = FiniteRange(min=0)
_BLOCKED_WAIT = 0.05
_PROBE_SECONDS = 0.5


@click.command(
    epilog="Kafka client properties come from --kafka-option or from variables such as KVCENSUS_KAFKA_SECURITY_PROTOCOL=SASL_SSL."
)
@click.argument("paths", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option(
    "--bootstrap-servers",
    metavar="HOST:PORT[,…]",
    envvar=environment.BOOTSTRAP_SERVERS,
    show_envvar=True,
    help="Kafka.  [default: the embedded broker that runs for the data folder]",
)
@click.option("--kafka-option", multiple=True, metavar="KEY=VALUE", help="A librdkafka property; repeatable.")
@click.option(
    "--data-dir",
    type=Folder(),
    envvar=environment.DATA_DIR,
    show_envvar=True,
    help="Data folder of this host.",
)
@click.option("--startup-timeout", type=_SECONDS, default=30.0, show_default=True, help="Seconds to wait for Kafka and its topics.")
@click.option("--stop-timeout", type=_SECONDS, default=60.0, show_default=True, help="Seconds to wait for the last acknowledgements.")
@click.option("--dry-run", is_flag=True, help="Read everything and say what would be sent; no Kafka needed.")
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON document.")
def ingest(
    paths: tuple[Path, ...],
    bootstrap_servers: str | None,
    kafka_option: tuple[str, ...],
    data_dir: Path | None,
    startup_timeout: float,
    stop_timeout: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Send sealed segments to Kafka, into the topics that forwarders write.

    Each DIR is a folder of segments, with whatever lies below it, or one segment: Parquet or JSON lines, written by `kvcensus forward
    --segments` or by another producer of the same record contract. A segment that is still being written is left alone. A file that
    cannot be read whole is refused, all of it; the others are sent all the same, and the exit code is 1. Sending a segment again, or
    one whose batches came through Kafka already, changes no figure.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger("kvcensus")
    root.handlers[:], root.propagate = [handler], False
    console = Console(stderr=True, highlight=False)
    with _progress(console) as progress:
        task = progress.add_task("reading", total=None)
        source = Ingest(paths, lambda path: progress.advance(task))
        progress.update(task, total=len(source.files), description="ingesting")
        if not source.files:
            raise KvcensusError(f"no sealed segment in {', '.join(str(path) for path in paths)}")
        delivered = None
        if dry_run:
            for _ in source.facts():
                pass
        else:
            delivery = _connect(bootstrap_servers, kafka_option, data_dir, startup_timeout)
            _send(delivery, source.facts())
            undelivered = delivery.close(stop_timeout)
            delivered = delivery.delivered
            if undelivered:
                raise KvcensusError(
                    f"{undelivered:,} messages were not acknowledged within {stop_timeout:g} s; ingest again: it changes nothing else"
                )
    _report(source.tally, delivered, as_json)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("segments"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _connect(bootstrap_servers: str | None, kafka_option: tuple[str, ...], data_dir: Path | None, patience: float) -> Delivery:
    """A producer whose cluster answers and has the topics."""
    servers = find_bootstrap_servers(bootstrap_servers, environment.data_dir(data_dir))
    delivery = Delivery(servers, {"client.id": "kvcensus-ingest", **environment.kafka_options(kafka_option)}, stand_in)
    deadline = time.monotonic() + patience
    while (fault := delivery.probe([BATCHES.name, LIFECYCLE.name, ENGINE_METRICS.name], _PROBE_SECONDS)) is not None:
        if time.monotonic() >= deadline:
            raise KvcensusError(f"{fault}; gave up after {patience:g} s")
        time.sleep(0.1)
    return delivery


def _send(delivery: Delivery, facts: Iterator[Fact]) -> None:
    for fact in facts:
        topic = LIFECYCLE if isinstance(fact, Lifecycle) else ENGINE_METRICS if isinstance(fact, EngineMetrics) else BATCHES
        key = rank_key(fact.instance_id, fact.dp_rank).encode()
        value = codec.encode(fact)
        while not delivery.offer(topic.name, key, value):
            delivery.poll(_BLOCKED_WAIT)
        delivery.poll(0)


def _report(tally: Tally, delivered: int | None, as_json: bool) -> None:
    if as_json:
        # What is not printable ASCII is escaped: names of files hold anything.
        click.echo(json.dumps({**asdict(tally), "delivered": delivered}, indent=2))
    for line in tally.refused_files:
        click.echo(f"refused: {escaped(line)}", err=True)
    if not as_json:
        sent = "would be sent" if delivered is None else f"{delivered:,} messages delivered"
        click.echo(
            f"{tally.files:,} segments of {tally.incarnations:,} runs ({tally.orphans:,} without an owner), {tally.records:,} records: "
            f"{tally.batches:,} batches, {tally.losses:,} losses, {tally.refusals:,} refusals, {tally.lifecycle:,} lifecycle records, "
            f"{tally.metrics:,} scrapes; {sent}"
        )
        aside = {
            "segments missing between others": tally.segments_missing,
            "segments dropped by their producer": tally.segments_dropped,
            "files that came twice": tally.repeated_files,
            "files that vanished meanwhile": tally.vanished_files,
            "files that are no sealed segment": tally.skipped_files,
            "records of kinds unknown here": tally.unknown_kinds,
        }
        for what, count in aside.items():
            if count:
                click.echo(f"{what}: {count:,}")
    if tally.refused_files:
        seen = len(tally.refused_files) + tally.files + tally.repeated_files
        raise KvcensusError(f"{len(tally.refused_files):,} of {seen:,} segments were refused")
