"""``kvcensus reclassify``: the windows of a span again, from the stored facts, by the present rules."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from console.counting_options import counting_options
from console.number_options import FiniteRange
from console.option_types import RankName
from console.store_options import engine_span, store_options
from schemas.environment import DEFAULT_WINDOW_SECONDS
from schemas.errors import KvcensusError
from sql import store
from sql.database import Database
from sql.facts import Facts, facts
from sql.standing import Standing, Tally, base_window
from sql.times import iso
from streams import settings
from streams.offline import OfflineFleet
from streams.reclassify import Recount
from streams.residency import SEMANTICS_VERSION
from streams.row_spool import TABLES, RowSpool

SKEW_US = 3_000_000
"""Facts are read so far beyond the span and the grace, for its windows to close: above the clock skew that is allowed for."""

_HOUR_US = 3_600_000_000


@click.command()
@click.option(
    "--since", metavar="TIME", help="Start, engine time: ISO 8601, epoch seconds, or an age (15m, 2h, 1d). Default: the first fact."
)
@click.option("--until", metavar="TIME", help="End, in the same forms, or now. Default: the last fact.")
@click.option(
    "--rank",
    "ranks",
    type=RankName(),
    multiple=True,
    metavar="INSTANCE/R",
    help="Only this rank; repeatable. Duplicates are then left alone.",
)
@click.option(
    "--warm-up",
    type=FiniteRange(min=0, min_open=True, max=settings.MOST_HISTORY_HOURS),
    metavar="HOURS",
    help="Read facts from so long before --since.  [default: all that are stored]",
)
@click.option(
    "--window",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="Length of the windows.  [default: that of the rows in the store]",
)
@counting_options
@click.option("--dry-run", is_flag=True, help="Count and compare; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_options
def reclassify(
    since: str | None,
    until: str | None,
    ranks: tuple[str, ...],
    warm_up: float | None,
    window: int | None,
    grace: float,
    history_hours: float,
    history_blocks: int,
    dry_run: bool,
    as_json: bool,
    clickhouse_url: str | None,
    data_dir: Path,
) -> None:
    """Count the stored facts of a span again, by the present rules, and write the rows beside those of earlier rules.

    Rows of the present rules that stand are replaced only by rows that observed more. Rows are written at the end: cut short while
    it counts, it has changed nothing; cut short while it writes, run it again. Run twice, it writes the same. Grace and history should
    be those of the worker.
    """
    now_us = time.time_ns() // 1000
    since_us, until_us = engine_span(since, until, now_us)
    if warm_up is not None and since_us is None:
        raise click.UsageError("--warm-up needs --since")
    if not store.exists(clickhouse_url, data_dir):
        raise KvcensusError(f"there is no store in {data_dir}: name one with --data-dir or --clickhouse-url")
    with store.connect(clickhouse_url, data_dir) as database:
        if not database.can_write and not dry_run:
            raise KvcensusError(f"{database.place} can only be asked: stop that process (a worker?) and run this again, or add --dry-run")
        window_us, grace_us = _window(database, window), settings.grace_us(grace)
        since_us = None if since_us is None else since_us - since_us % window_us
        until_us = None if until_us is None else until_us + -until_us % window_us
        begin_us = None if since_us is None or warm_up is None else since_us - round(warm_up * _HOUR_US)
        found = facts(
            database,
            since_us=begin_us,
            until_us=None if until_us is None else until_us + grace_us + SKEW_US,
            ranks=ranks or None,
        )
        if not found.ranks:
            raise KvcensusError(f"no facts are stored in {database.place} for this span (they are kept 14 days)")
        fleet = OfflineFleet(
            window_us=window_us, grace_us=grace_us, history_us=settings.history_us(history_hours), history_blocks=history_blocks
        )
        recount = Recount(fleet, since_us=since_us, until_us=until_us, footprint=not ranks)
        standing = Standing(database, SEMANTICS_VERSION, window_us, dry_run)
        _run(found, recount, standing, quiet=as_json)
    _report(found, recount, standing, (since_us, until_us), footprint=not ranks, as_json=as_json)


def _window(database: Database, seconds: int | None) -> int:
    """Length of the windows, microseconds. Rows of one version of the rules must not have two: their sums would count twice."""
    stands = base_window(database, SEMANTICS_VERSION)
    if seconds is None:
        return stands or base_window(database) or DEFAULT_WINDOW_SECONDS * 1_000_000
    if stands is not None and stands != seconds * 1_000_000:
        raise KvcensusError(f"the rows of these rules have windows of {stands / 1_000_000:g} s: leave --window out")
    return seconds * 1_000_000


def _run(found: Facts, recount: Recount, standing: Standing, *, quiet: bool) -> None:
    console = Console(stderr=True)
    with RowSpool() as spool, Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        counting = progress.add_task("counting", total=found.batches)
        for fact in found:
            for row in recount.apply(fact.instance_id, fact.dp_rank, fact.offset, fact.message):
                spool.add(row)
            if fact.message is not None and fact.message.batch is not None:
                progress.advance(counting)
        for row in recount.finish():
            spool.add(row)
        for table in TABLES:
            standing.write(progress.track(spool.read(table), total=spool.rows[table], description=f"writing {table}"), table)


def _report(
    found: Facts, recount: Recount, standing: Standing, span: tuple[int | None, int | None], *, footprint: bool, as_json: bool
) -> None:
    document = _document(found, recount, standing, span, footprint)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    told = document["facts"]
    click.echo(f"counted {told['batches']:,} batches of {len(document['ranks'])} ranks again by rules {document['semantics_version']}")
    for table, tally in document["rows"].items():
        verb = "would be written" if standing.dry_run else "written"
        kept = f", {tally['kept']:,} stand that are as good" if tally["kept"] else ""
        click.echo(f"  {table}: {tally['written']:,} {verb}{kept}")
    for warning in document["warnings"]:
        click.echo(f"note: {warning}", err=True)


def _document(found: Facts, recount: Recount, standing: Standing, span: Sequence[int | None], footprint: bool) -> dict[str, Any]:
    missing = sum(found.missing.values())
    warnings = []
    if missing:
        warnings.append(f"{missing:,} batches are left out, as their blocks are no longer stored: the rows have a gap there")
    if recount.unreadable:
        warnings.append(f"{recount.unreadable:,} messages could not be read when they came, and were set aside")
    if not footprint:
        warnings.append("duplicates and shared prefixes need all ranks: they were left alone")
    return {
        "semantics_version": standing.semantics_version,
        "since": None if span[0] is None else iso(span[0]),
        "until": None if span[1] is None else iso(span[1]),
        "window_us": standing.window_us,
        "dry_run": standing.dry_run,
        "ranks": sorted(found.ranks),
        "facts": {"batches": found.batches - missing, "missing_batches": missing, "unreadable": recount.unreadable},
        "rows": {table: _tally(standing.tallies.get(table, Tally())) for table in TABLES},
        "warnings": warnings,
    }


def _tally(tally: Tally) -> dict[str, int]:
    return {"counted": tally.counted, "written": tally.written, "kept": tally.kept}
