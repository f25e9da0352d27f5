"""Options of every command that reads figures, and opening the store they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from console.option_types import Folder
from schemas import environment
from schemas.errors import KvcensusError
from sql.times import iso, parse

C = TypeVar("C", bound=Callable[..., Any])


def engine_time(option: str, text: str | None, now_us: int) -> int | None:
    """What a user gave as a time, in microseconds; None where nothing was given. What is no time is a usage error."""
    if text is None:
        return None
    try:
        return parse(text, now_us)
    except KvcensusError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def engine_span(since: str | None, until: str | None, now_us: int) -> tuple[int | None, int | None]:
    """What a user gave as ``--since`` and ``--until``, as :func:`engine_time`. An end that is not behind the beginning is a usage error."""
    since_us, until_us = engine_time("--since", since, now_us), engine_time("--until", until, now_us)
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise click.UsageError(f"--since ({iso(since_us)}) must lie before --until ({iso(until_us)})")
    return since_us, until_us


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
