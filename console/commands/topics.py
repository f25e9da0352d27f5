"""``kvcensus topics``: create or check the Kafka topics."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from console.broker import find_bootstrap_servers
from console.kafka_options import kafka_options
from console.topic_admin import TopicsReport, check_topics, create_topics
from schemas import environment
from schemas.errors import KvcensusError
from schemas.topics import DEFAULT_PARTITIONS


@click.group()
def topics() -> None:
    """Create or check the Kafka topics."""


@topics.command()
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    help=f"Partitions of each topic. Default: as the existing ones have, else {DEFAULT_PARTITIONS}.",
)
@click.option("--replication-factor", type=click.IntRange(1, 100), help="Default: the broker's own.")
@kafka_options
def create(
    partitions: int | None,
    replication_factor: int | None,
    bootstrap_servers: str | None,
    kafka_option: tuple[str, ...],
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Create the topics that are missing. Safe to run again; what exists is never changed.

    Exits with 1 when a topic that exists is not as it should be.
    """
    servers = find_bootstrap_servers(bootstrap_servers, environment.data_dir(data_dir))
    options = environment.kafka_options(kafka_option)
    _print(servers, create_topics(servers, partitions, options, replication_factor=replication_factor or -1), as_json)


@topics.command()
@click.option("--partitions", type=click.IntRange(1, 10_000), help="What to compare with. Default: as most of the topics have.")
@kafka_options
def check(
    partitions: int | None, bootstrap_servers: str | None, kafka_option: tuple[str, ...], data_dir: Path | None, as_json: bool
) -> None:
    """Compare partition counts and configurations with what kvcensus needs; exits with 1 when something differs."""
    servers = find_bootstrap_servers(bootstrap_servers, environment.data_dir(data_dir))
    _print(servers, check_topics(servers, partitions, environment.kafka_options(kafka_option)), as_json)


def _print(servers: str, report: TopicsReport, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"bootstrap_servers": servers, **asdict(report)}, indent=2))
    else:
        bad = {difference.topic for difference in report.differences}
        for name in report.created:
            click.echo(f"created  {name}")
        for name in report.existing:
            if name not in bad:
                click.echo(f"ok       {name}")
        for difference in report.differences:
            click.echo(f"differs  {difference}")
        for note in report.notes:
            click.echo(f"note     {note}")
    if report.differences:
        missing = any(difference.what == "topic" for difference in report.differences)
        raise KvcensusError(
            f"topics on {servers}: {len(report.differences)} settings are not as they should be"
            + ("; `kvcensus topics create` makes the missing ones" if missing else "")
        )
