"""``kvcensus worker``: the counting half and the ClickHouse sink, in the foreground."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import click

from console.broker import find_bootstrap_servers
from console.counting_options import counting_options
from console.number_options import FiniteRange
from console.option_types import Folder
from schemas import environment
from streams import settings as worker_settings

_REPEAT_SECONDS = 60.0
_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option(
    "--bootstrap-servers",
    envvar=environment.BOOTSTRAP_SERVERS,
    metavar="HOST:PORT[,…]",
    help="Kafka. Default: the embedded broker of the data folder.",
)
@click.option("--kafka-option", "kafka_option", multiple=True, metavar="KEY=VALUE", help="A librdkafka property; repeatable.")
@click.option(
    "--clickhouse-url",
    envvar=environment.CLICKHOUSE_URL,
    metavar="URL",
    help="http(s)://USER:PASSWORD@HOST:PORT/DATABASE. Default: the embedded store in the data folder, which the worker then owns.",
)
@click.option(
    "--data-dir",
    type=Folder(),
    envvar=environment.DATA_DIR,
    help="Where the embedded store lies, and a running embedded broker is found.",
)
@click.option(
    "--window",
    type=FiniteRange(min=0, min_open=True),
    envvar=environment.WINDOW_SECONDS,
    default=float(environment.DEFAULT_WINDOW_SECONDS),
    show_default=True,
    metavar="SECONDS",
    help="Length of a window of engine time.",
)
@click.option(
    "--flush-seconds",
    type=FiniteRange(min=0, min_open=True),
    envvar=worker_settings.FLUSH_SECONDS,
    default=worker_settings.DEFAULT_FLUSH_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How often results are given out.",
)
@counting_options
@click.option(
    "--snapshot-seconds",
    type=FiniteRange(min=0, min_open=True),
    envvar=worker_settings.SNAPSHOT_SECONDS,
    default=worker_settings.DEFAULT_SNAPSHOT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How often what is known of single blocks is written down, so that a start need not read everything again.",
)
@click.option("--no-sink", is_flag=True, help="Count only: results stay on their topics.")
@click.option("--sink-only", is_flag=True, help="Do not count: only write to ClickHouse what other workers count.")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), default="info", show_default=True)
def worker(
    bootstrap_servers: str | None,
    kafka_option: tuple[str, ...],
    clickhouse_url: str | None,
    data_dir: Path | None,
    window: float,
    flush_seconds: float,
    grace: float,
    history_hours: float,
    history_blocks: int,
    snapshot_seconds: float,
    no_sink: bool,
    sink_only: bool,
    log_level: str,
) -> None:
    """Count: Kafka in, figures to topics and ClickHouse.

    Runs until Ctrl-C or SIGTERM. What it knows of single blocks is in memory; snapshots of it on the topic kvcensus.state, and what
    came since, bring it back, so it may be killed at any point. Start several with the same Kafka to share the partitions; only one
    of them can own an embedded store, the others need --no-sink.
    """
    if no_sink and sink_only:
        raise click.UsageError("--no-sink and --sink-only leave nothing to do")
    _set_up_logging(log_level)
    base = worker_settings.from_environment(option_pairs=kafka_option)
    folder = environment.data_dir(data_dir)
    chosen = replace(
        base,
        bootstrap_servers=find_bootstrap_servers(bootstrap_servers, folder),
        data_dir=folder,
        clickhouse_url=clickhouse_url or None,
        window_us=worker_settings.window_us(window),
        flush_seconds=flush_seconds,
        sink=base.sink and not no_sink,
        grace_us=worker_settings.grace_us(grace),
        history_us=worker_settings.history_us(history_hours),
        history_blocks=history_blocks,
        snapshot_seconds=snapshot_seconds,
    )
    # Only now: Faust takes a second to import, and a mistake in the options should not.
    from streams import run  # noqa: PLC0415

    if sink_only:
        run.run_sink(chosen)
    else:
        run.run_worker(chosen)


def _set_up_logging(level: str) -> None:
    """Our lines at ``level``; of the libraries only warnings, and each of those only now and then. At debug: everything."""
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    number = logging.getLevelName(level.upper())
    logging.getLogger("kvcensus").setLevel(number)
    if level == "debug":
        logging.getLogger().setLevel(logging.INFO)
        return
    logging.getLogger().setLevel(max(number, logging.WARNING))
    for name in ("clickhouse_connect", "urllib3.connectionpool"):  # they tell of every attempt what we tell once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Sparse())


class _Sparse(logging.Filter):
    """Lets a library repeat itself only after a while: a Kafka client whose broker is away writes a hundred lines a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if record.name.startswith("kvcensus"):
            return True
        text = str(record.msg)
        if "Crashed reason" in text:  # Faust's words for what we say ourselves, in one line
            return False
        now = time.monotonic()
        said = self._said.get((record.name, text))
        if said is not None and now - said < _REPEAT_SECONDS:
            return False
        self._said[record.name, text] = now
        return True
