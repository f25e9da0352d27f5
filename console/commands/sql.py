"""``kvcensus sql``: one query, as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TextIO

import click
import pyarrow as pa
import pyarrow.parquet as pq
from rich.cells import cell_len
from rich.table import Table

from console.escape import escaped
from console.figure_tables import console_for_output
from console.store_options import store_options
from console.store_reading import why_no_store
from schemas.errors import KvcensusError
from sql import store
from sql.database import Database, QueryResult, StoreError
from sql.embedded import READ_SETTINGS
from sql.readable import select_list
from sql.statements import first_word, require_read_only, trailing_format

FORMATS = ("table", "csv", "json", "parquet")

TABLE_ROWS = 1000
"""A table for people ends here, and says so."""

_TOO_LARGE = 396
_LIMITS = ", ".join(f"{name} = {READ_SETTINGS[name]}" for name in ("max_result_rows", "max_result_bytes"))


@click.command()
@click.argument("query")
@click.option("--format", "fmt", type=click.Choice(FORMATS), help="Default: as --out ends, else table.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write CSV, JSON or Parquet to this file.")
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of {NAME:Type} in the query; repeatable. Of an array: ['a', 'b'], of a time: 2026-01-31 12:00:00.",
)
@store_options
def sql(query: str, fmt: str | None, out: Path | None, params: tuple[str, ...], clickhouse_url: str | None, data_dir: Path) -> None:
    """Run one query ("-" reads it from standard input) on the tables and views.

    Tables are read as if each said FINAL, so replaced rows do not count twice. Ids are shown in hex (Parquet has them as bytes), times in
    UTC. Rows too wide for the terminal stand one below the other. A result may have 5 million rows and 256 MiB; `kvcensus export` writes
    more.
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
    parameters = _parameters(params, text)
    if (missing := why_no_store(clickhouse_url, data_dir)) is not None:
        raise KvcensusError(missing.removesuffix("."))
    with store.connect(clickhouse_url, data_dir) as database:
        try:
            if fmt == "parquet":
                assert out is not None
                table = _arrow(database, text, parameters)
                _write(out, lambda path: pq.write_table(table, path))
            else:
                _print(database.query(_bounded(database, text), parameters, final=True), fmt, out)
        except StoreError as error:
            if error.code != _TOO_LARGE:
                raise
            raise StoreError(f"{error} Add a LIMIT, or sum up; whole tables: `kvcensus export`.", error.code) from error


def _parameters(pairs: Sequence[str], query: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: expected NAME=VALUE", param_hint="--param")
        if name in parameters:
            raise click.BadParameter(f"{name} is given twice", param_hint="--param")
        parameters[name] = _parameter(name, value, query)
    return parameters


def _parameter(name: str, value: str, query: str) -> Any:
    """What is given for an array, a tuple or a map, as such; everything else is the text that it is."""
    kind = re.search(rf"\{{\s*{re.escape(name)}\s*:\s*(Array|Tuple|Map)\s*\(", query)
    if kind is None:
        return value
    try:
        given = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        given = None
    expected, example = {"Array": (list, "['a', 'b']"), "Tuple": (tuple, "('a', 1)"), "Map": (dict, "{'a': 1}")}[kind[1]]
    if not isinstance(given, expected):
        raise click.BadParameter(f"{name}={value}: expected {kind[1]}, as {example}", param_hint="--param")
    return given


def _is_select(query: str) -> bool:
    return first_word(query) in ("SELECT", "WITH")


def _bounded(database: Database, query: str, columns: str = "*") -> str:
    """``query`` with the limits that the embedded store has by itself: a result is in memory whole."""
    if not _is_select(query) or (database.kind != "server" and columns == "*"):
        return query
    limits = f" SETTINGS {_LIMITS}" if database.kind == "server" else ""
    return f"SELECT {columns} FROM (\n{query}\n){limits}"  # noqa: S608 - the query is the user's own


def _arrow(database: Database, query: str, parameters: dict[str, Any]) -> pa.Table:
    """The rows with types that other programs read: times as times, ids as bytes of fixed length, text that is no UTF-8 as bytes."""
    columns = "*"
    if _is_select(query):
        described = [(row[0], row[1]) for row in database.query(f"DESCRIBE TABLE (\n{query}\n)", parameters).rows]
        _refuse_twins([name for name, _ in described])
        selected, changed = select_list(described, "binary")
        columns = selected if changed else columns
    table = database.query_arrow(_bounded(database, query, columns), parameters, final=True)
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) and not _is_text(table.column(place)):
            table = table.set_column(place, pa.field(field.name, pa.binary(), field.nullable), table.column(place).cast(pa.binary()))
    return table


def _is_text(column: pa.ChunkedArray) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _refuse_twins(names: Sequence[str]) -> None:
    """Where columns go by their names, one of two would be lost."""
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise KvcensusError(f"several columns are named {', '.join(twice)}: give each a name of its own with AS")


def _print(result: QueryResult, fmt: str, out: Path | None) -> None:
    if fmt == "table":
        _print_table(result)
        return
    if fmt == "json":
        _refuse_twins(result.column_names)
    write = write_csv if fmt == "csv" else write_json
    if out is None:
        write(result, click.get_text_stream("stdout"))
        return

    def to_file(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            write(result, file)

    _write(out, to_file)


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
    console = console_for_output()
    names = [escaped(name) for name in result.column_names]
    rows = [[_shown(value) for value in row] for row in result.rows[:TABLE_ROWS]]
    if sum(cell_len(name) + 3 for name in names) + 1 > console.width:
        if not rows:
            click.echo(f"no rows of {', '.join(names)}")
        for place, row in enumerate(rows, 1):
            console.print(_upright(f"row {place:,}", names, row))
    else:
        table = Table()
        for name, kind in zip(names, result.column_types, strict=True):
            table.add_column(name, justify="right" if _is_number(kind) else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if len(result.rows) > TABLE_ROWS:
        click.echo(f"{len(result.rows) - TABLE_ROWS:,} more rows are not shown: use LIMIT, or --format csv", err=True)


def _upright(title: str, names: Sequence[str], row: Sequence[str]) -> Table:
    """One row, a column to a line: where not even the names of the columns fit side by side."""
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in zip(names, row, strict=True):
        table.add_row(name, value)
    return table


def _shown(value: Any) -> str:
    """A value as text that moves no cursor: labels and names are other people's."""
    return "NULL" if value is None else "\n".join(map(escaped, cell(value).split("\n")))


def _is_number(kind: str) -> bool:
    return any(word in kind for word in ("Int", "Float", "Decimal")) and "Array" not in kind


def write_csv(result: QueryResult, file: TextIO) -> None:
    """The rows as CSV with a header; NULL is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(result.column_names)
    writer.writerows([_cell_or_empty(value) for value in row] for row in result.rows)


def _cell_or_empty(value: Any) -> Any:
    if value is None:
        return ""
    return value if type(value) in (int, str) else cell(value)  # most are, and are their own text


def write_json(result: QueryResult, file: TextIO) -> None:
    """The rows as a JSON array of objects, one per line. Integers are whole, however large; ids are hex strings."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    before = "["
    for row in result.rows:
        file.write(before)
        file.write(encode({name: plain(value) for name, value in zip(result.column_names, row, strict=True)}))
        before = ",\n "
    file.write("]\n" if result.rows else "[]\n")


def cell(value: Any) -> str:
    """A value as text."""
    shown = plain(value)
    if isinstance(shown, str):
        return shown
    return json.dumps(shown, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON knows it: bytes in hex, times in ISO 8601 UTC, numbers that are none as null."""
    if value is None or isinstance(value, bool | int | str):
        return value
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
    return str(value)
