"""``kvcensus sql``: one query, as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet
from rich.table import Table

from console.figure_tables import console_for_output
from console.store_options import store_options
from schemas.errors import KvcensusError
from sql import store
from sql.database import QueryResult
from sql.statements import require_read_only, trailing_format

FORMATS = ("table", "csv", "json", "parquet")

TABLE_ROWS = 1000
"""A table for people ends here, and says so."""


@click.command()
@click.argument("query")
@click.option("--format", "fmt", type=click.Choice(FORMATS), help="Default: as --out ends, else table.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write CSV, JSON or Parquet to this file.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Value of {NAME:Type} in the query; repeatable.")
@store_options
def sql(query: str, fmt: str | None, out: Path | None, params: tuple[str, ...], clickhouse_url: str | None, data_dir: Path) -> None:
    """Run one query ("-" reads it from standard input) on the tables and views.

    Tables are read as if each said FINAL, so replaced rows do not count twice. Ids are shown in hex, times in UTC.
    """
    text = require_read_only(sys.stdin.read() if query == "-" else query)
    if trailing_format(text):
        raise click.UsageError("leave FORMAT out of the query and use --format")
    if fmt is None:
        fmt = "table" if out is None else out.suffix.removeprefix(".").lower()
        if fmt not in FORMATS:
            raise click.UsageError("--out: name a --format, or let the file end in .csv, .json or .parquet")
    if fmt == "table" and out is not None:
        raise click.UsageError("a table is for the terminal: --out takes --format csv, json or parquet")
    if fmt == "parquet" and out is None:
        raise click.UsageError("--format parquet needs --out FILE")
    parameters = _parameters(params)
    if not store.exists(clickhouse_url, data_dir):
        raise KvcensusError(f"there is no store in {data_dir}: start `kvcensus demo` or a worker, or name one with --data-dir")
    with store.connect(clickhouse_url, data_dir) as database:
        if fmt == "parquet":
            assert out is not None
            _write(out, lambda path: pyarrow.parquet.write_table(database.query_arrow(text, parameters, final=True), path))
        else:
            _print(database.query(text, parameters, final=True), fmt, out)


def _parameters(pairs: Sequence[str]) -> dict[str, str]:
    parameters = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: expected NAME=VALUE", param_hint="--param")
        parameters[name] = value
    return parameters


def _print(result: QueryResult, fmt: str, out: Path | None) -> None:
    if fmt == "table":
        _print_table(result)
        return
    text = as_csv(result) if fmt == "csv" else as_json(result)
    if out is None:
        click.echo(text, nl=False)
    else:
        _write(out, lambda path: path.write_text(text, encoding="utf-8"))


def _write(out: Path, write: Callable[[Path], Any]) -> None:
    """Write beside ``out`` and move into place, so that no half file is ever found there."""
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write(draft)
        draft.replace(out)
    except OSError as error:
        raise KvcensusError(f"--out {out}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _print_table(result: QueryResult) -> None:
    table = Table()
    for name, kind in zip(result.column_names, result.column_types, strict=True):
        table.add_column(name, justify="right" if _is_number(kind) else "left", overflow="fold")
    for row in result.rows[:TABLE_ROWS]:
        table.add_row(*("NULL" if value is None else cell(value) for value in row))
    console_for_output().print(table)
    if len(result.rows) > TABLE_ROWS:
        click.echo(f"{len(result.rows) - TABLE_ROWS:,} more rows are not shown: use LIMIT, or --format csv", err=True)


def _is_number(kind: str) -> bool:
    return any(word in kind for word in ("Int", "Float", "Decimal")) and "Array" not in kind


def as_csv(result: QueryResult) -> str:
    """The rows as CSV with a header; NULL is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(result.column_names)
    writer.writerows(["" if value is None else cell(value) for value in row] for row in result.rows)
    return out.getvalue()


def as_json(result: QueryResult) -> str:
    """The rows as a JSON array of objects, one per line. Integers are whole, however large; ids are hex strings."""
    lines = [
        json.dumps({name: plain(value) for name, value in zip(result.column_names, row, strict=True)}, ensure_ascii=False)
        for row in result.rows
    ]
    return "[" + ",\n ".join(lines) + "]\n"


def cell(value: Any) -> str:
    """A value as text."""
    shown = plain(value)
    if isinstance(shown, str):
        return shown
    return json.dumps(shown, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON knows it: bytes in hex, times in ISO 8601 UTC, numbers that are none as null."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
