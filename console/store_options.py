"""Options of every command that reads figures, and opening the store they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from console.option_types import Folder
from schemas import environment

C = TypeVar("C", bound=Callable[..., Any])


def store_options(command: C) -> C:
    """Add ``--clickhouse-url`` and ``--data-dir`` (a :class:`Path`, settled to its default by :func:`environment.data_dir`)."""
    command = click.option(
        "--data-dir",
        type=Folder(),
        envvar=environment.DATA_DIR,
        callback=lambda _context, _parameter, value: environment.data_dir(value),
        help=f"Folder of the embedded store, where no ClickHouse is named. [env: {environment.DATA_DIR}]",
    )(command)
    return click.option(
        "--clickhouse-url",
        envvar=environment.CLICKHOUSE_URL,
        metavar="URL",
        help=f"http(s)://USER:PASSWORD@HOST:PORT/DATABASE. Default: the embedded store. [env: {environment.CLICKHOUSE_URL}]",
    )(command)
