"""Options of every command that talks to Kafka and has no settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from console.option_types import Folder
from schemas import environment

C = TypeVar("C", bound=Callable[..., Any])


def kafka_options(command: C) -> C:
    """Add ``--bootstrap-servers``, ``--kafka-option``, ``--data-dir`` (where an embedded broker may run) and ``--json``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines."),
        click.option(
            "--data-dir",
            type=Folder(),
            envvar=environment.DATA_DIR,
            help="Where to look for a running embedded broker.",
        ),
        click.option("--kafka-option", "kafka_option", multiple=True, metavar="KEY=VALUE", help="A librdkafka property; repeatable."),
        click.option(
            "--bootstrap-servers",
            envvar=environment.BOOTSTRAP_SERVERS,
            metavar="HOST:PORT[,…]",
            help="Kafka. Default: the embedded broker of the data folder.",
        ),
    ):
        command = option(command)
    return command
