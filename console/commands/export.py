"""``kvcensus export``: tables and views as Parquet, one file a day."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import click
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from console.store_options import engine_span, store_options
from console.store_reading import why_no_store
from console.table_parts import percent, size
from schemas.errors import KvcensusError
from sql import store
from sql.database import Database, StoreError
from sql.export import DAY_US, TABLES, Plan, Source, find, listed
from sql.export_files import ExportFolder
from sql.figures import assemble, load
from sql.readable import Ids
from sql.times import iso

_EPOCH_DAY = date(1970, 1, 1)


class _Folder(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The folder. Nothing, as of a variable that is not set, would be the one where the command runs."""
        if value == "":
            self.fail("a folder has a name", param, ctx)
        return super().convert(value, param, ctx)


@click.command(epilog=f"There are {listed()}.")
@click.argument("folder", metavar="DIR", type=_Folder(path_type=Path, file_okay=False))
@click.option("--table", "tables", multiple=True, metavar="NAME", help="This table or view; repeatable.")
@click.option("--all", "every", is_flag=True, help="Every table. Views, which are made of them, only if named.")
@click.option("--since", metavar="TIME", help="Start: ISO 8601, epoch seconds, or an age (15m, 2h, 1d). Default: the first row.")
@click.option("--until", metavar="TIME", help="End, in the same forms, or now. Default: the last row.")
@click.option("--whole-days", is_flag=True, help="Widen the span to whole days (UTC), so that each file holds all of its day.")
@click.option(
    "--ids",
    type=click.Choice(["hex", "binary"]),
    default="hex",
    show_default=True,
    help="Ids as text of hex digits, as every other output shows them, or as bytes of fixed length: half the size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@store_options
def export(
    folder: Path,
    tables: tuple[str, ...],
    every: bool,
    since: str | None,
    until: str | None,
    whole_days: bool,
    ids: str,
    as_json: bool,
    clickhouse_url: str | None,
    data_dir: Path,
) -> None:
    """Write tables and views to DIR as Parquet, one file a day: TABLE/day=YYYY-MM-DD/part-0.parquet.

    Replaced rows are left out, times are in UTC. A file appears when it is whole, and replaces the one of its day; a file that holds more
    of its day than was asked for now is not replaced. The span cuts each table by its own time: engine time for results and block
    events, the forwarder's clock for what forwarders say. What was written, and how far the span was observed, is said in
    DIR/manifests.
    """
    now_us = time.time_ns() // 1000
    since_us, until_us = engine_span(since, until, now_us)
    if whole_days:
        since_us = None if since_us is None else since_us - since_us % DAY_US
        until_us = None if until_us is None else until_us + -until_us % DAY_US
    names = _chosen(tables, every)
    if (missing := why_no_store(clickhouse_url, data_dir)) is not None:
        raise KvcensusError(missing.removesuffix("."))
    with store.connect(clickhouse_url, data_dir) as database, ExportFolder(folder) as target:
        run = _Run(database, target, since_us, until_us, cast("Ids", ids), now_us)
        run.export(names, quiet=as_json)
        document = run.document()
        path = target.write_manifest(f"{datetime.fromtimestamp(now_us / 1e6, UTC):%Y%m%dT%H%M%S.%fZ}.json", document)
    _report(document, path, as_json)


def _chosen(tables: Sequence[str], every: bool) -> list[str]:
    if every == bool(tables) and not every:
        raise click.UsageError("name a --table, or --all")
    for name in tables:
        try:
            find(name)
        except KvcensusError as error:
            raise click.BadParameter(str(error), param_hint="--table") from error
    return list(dict.fromkeys([*(TABLES if every else ()), *tables]))


@dataclass
class _Run:
    """One export: what it reads, where it writes, and what it has done."""

    database: Database
    target: ExportFolder
    since_us: int | None
    until_us: int | None
    ids: Ids
    now_us: int
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def export(self, names: Sequence[str], *, quiet: bool) -> None:
        """Write all files. Those of days that were done stay, whatever stops the rest."""
        sources = [self._source(name) for name in names]
        console = Console(stderr=True)
        with _progress(console, quiet=quiet) as progress:
            task = progress.add_task("counting rows", total=None)
            plans = [source.plan(self.since_us, self.until_us) for source in sources]
            for plan in plans:
                self._refuse_to_lose(plan)
            progress.update(task, total=sum(plan.rows for plan in plans))
            for source, plan in zip(sources, plans, strict=True):
                files = []
                self.target.sweep(plan.table)
                for day in plan.days:
                    progress.update(task, description=plan.table if day is None else f"{plan.table} {day}")
                    written = self._write(source, plan, day, lambda rows: progress.advance(task, rows))
                    if written is not None:
                        files.append(written)
                self.tables[plan.table] = {
                    "time_column": plan.timed.column,
                    "clock": plan.timed.clock,
                    "rows": sum(file["rows"] for file in files),
                    "bytes": sum(file["bytes"] for file in files),
                    "files": files,
                }

    def _source(self, name: str) -> Source:
        try:
            return Source(self.database, name, self.ids)
        except StoreError as error:
            if error.schema_missing:
                raise KvcensusError(f"{self.database.place} has no {name}: bring its schema up to date with `kvcensus migrate`") from error
            raise

    def _span(self, day: date | None) -> tuple[int | None, int | None]:
        """The part of ``day`` that was asked for."""
        if day is None:
            return None, None
        start_us = (day - _EPOCH_DAY) // timedelta(days=1) * DAY_US
        since_us = start_us if self.since_us is None else max(start_us, self.since_us)
        return since_us, start_us + DAY_US if self.until_us is None else min(start_us + DAY_US, self.until_us)

    def _refuse_to_lose(self, plan: Plan) -> None:
        for day in plan.days:
            standing = self.target.standing(plan.table, day)
            if standing is not None and not standing.within(*self._span(day)):
                path = self.target.place(plan.table, day)
                raise KvcensusError(
                    f"{path} holds more of its day than this span: it would be replaced by less; add --whole-days, or choose another folder"
                )

    def _write(self, source: Source, plan: Plan, day: date | None, advance: Any) -> dict[str, Any] | None:
        standing = self.target.standing(plan.table, day)
        since_us, until_us = self._span(day)
        told = {
            "table": plan.table,
            "since_us": since_us,
            "until_us": until_us,
            "time_column": plan.timed.column,
            "clock": plan.timed.clock,
            "ids": self.ids,
            "exported_at": iso(self.now_us),
            "kvcensus": version("kvcensus"),
        }
        rows, size_bytes = self.target.write(plan.table, day, _counting(source.read(plan, day), advance), told)
        if not rows:
            return None
        path = self.target.place(plan.table, day).relative_to(self.target.folder)
        if standing is not None and rows < standing.rows:
            self.warnings.append(f"{path} has {rows:,} rows, the file that it replaced had {standing.rows:,}")
        return {"path": str(path), "day": None if day is None else day.isoformat(), "rows": rows, "bytes": size_bytes}

    def document(self) -> dict[str, Any]:
        """The manifest."""
        since, until = (None if us is None else iso(us) for us in (self.since_us, self.until_us))
        return {
            "exported_at": iso(self.now_us),
            "kvcensus": version("kvcensus"),
            "since": since,
            "until": until,
            "ids": self.ids,
            "observed": self._observed(),
            "rows": sum(table["rows"] for table in self.tables.values()),
            "bytes": sum(table["bytes"] for table in self.tables.values()),
            "tables": self.tables,
            "warnings": self.warnings,
        }

    def _observed(self) -> dict[str, Any] | None:
        """How far the span was observed in engine time, and how its figures may be read: rows without that are half of what is known."""
        try:
            figures = assemble(load(self.database, self.since_us, self.until_us))
        except StoreError as error:
            self.warnings.append(f"how far the span was observed is not known: {error}")
            return None
        self.warnings += figures["warnings"]
        told = {name: figures[name] for name in ("span", "semantics_version", "provisional")}
        for part in ("repeat_compute", "duplicate_footprint"):
            told[part] = {name: figures[part][name] for name in ("coverage", "register", "reasons")}
        return told


def _counting(tables: Iterator[pa.Table], advance: Any) -> Iterator[pa.Table]:
    for table in tables:
        yield table
        advance(table.num_rows)


def _progress(console: Console, *, quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _report(document: dict[str, Any], manifest: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document | {"manifest": str(manifest)}, indent=2, ensure_ascii=False))
    for warning in document["warnings"]:
        click.echo(f"note: {warning}", err=True)
    if as_json:
        return
    for name, table in document["tables"].items():
        days = sum(file["day"] is not None for file in table["files"])
        of = f" of {days:,} day{'s' * (days > 1)}" if days else ""
        click.echo(f"{name}: {table['rows']:,} rows{of}, {size(table['bytes'])}" if table["rows"] else f"{name}: no rows in this span")
    if not document["rows"]:
        since, until = document["since"] or "the first row", document["until"] or "the last row"
        click.echo(f"nothing to export from {since} to {until}")
        return
    observed = document["observed"]
    if observed is not None and observed["semantics_version"] is None:
        click.echo("coverage of the span: nothing was counted in it")
    elif observed is not None:
        repeat, duplicates = (observed[part]["coverage"] for part in ("repeat_compute", "duplicate_footprint"))
        click.echo(f"coverage of the span: {percent(repeat)} (repeat compute), {percent(duplicates)} (duplicates)")
    click.echo(f"{document['rows']:,} rows, {size(document['bytes'])}; {manifest}")
