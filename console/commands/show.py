"""``kvcensus show``: the figures, from ClickHouse."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import cast

import click

from console.commands.show_coverage import show_coverage
from console.figure_tables import Part, console_for_output, render
from console.store_options import store_options
from schemas.errors import KvcensusError
from sql import store
from sql.database import Database, StoreError
from sql.figures import By, Totals, assemble, load
from sql.times import iso, parse
from sql.totals import settle_span

PARTS = ("repeat-compute", "duplicates", "ranks", "coverage", "all")


@click.command()
@click.argument("what", type=click.Choice(PARTS), default="all")
@click.option(
    "--since", metavar="TIME", help="Start, engine time: ISO 8601, epoch seconds, or an age (15m, 2h, 1d). Default: the first batch."
)
@click.option("--until", metavar="TIME", help="End, in the same forms, or now. Default: the last batch.")
@click.option("--by", type=click.Choice(["rank", "workload", "model"]), help="One line per rank, workload or model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with all figures.")
@store_options
def show(
    what: str, since: str | None, until: str | None, by: str | None, as_json: bool, clickhouse_url: str | None, data_dir: Path
) -> None:
    """Repeat compute by cause and duplicate footprint, the ranks behind them, and how far all of it was observed.

    The span is in engine time and is widened to whole windows.
    """
    now_us = time.time_ns() // 1000
    since_us, until_us = _time("--since", since, now_us), _time("--until", until, now_us)
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise click.UsageError(f"--since ({iso(since_us)}) must lie before --until ({iso(until_us)})")
    totals, nothing = _read(clickhouse_url, data_dir, since_us, until_us, cast("By | None", by))
    document = assemble(totals)
    if nothing:
        document["warnings"].append(nothing)
    if what == "coverage":
        show_coverage(document, nothing, clickhouse_url, data_dir, since_us, until_us, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif nothing:
        click.echo(nothing)
    else:
        render(document, cast("Part", what), console_for_output())


def _time(option: str, text: str | None, now_us: int) -> int | None:
    if text is None:
        return None
    try:
        return parse(text, now_us)
    except KvcensusError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def _read(
    clickhouse_url: str | None, data_dir: Path, since_us: int | None, until_us: int | None, by: By | None
) -> tuple[Totals, str | None]:
    """The totals, and a sentence if there are none."""
    empty = Totals(settle_span(since_us, until_us, None, None), (since_us, until_us), None, [], [], [], by)
    if not store.exists(clickhouse_url, data_dir):
        left = data_dir / "demo"
        if store.exists(None, left):
            return empty, f"No figures here: nothing runs on {data_dir}. Those of the last demo: --data-dir {left}"
        return empty, f"No figures yet: there is no store in {data_dir}. Start `kvcensus demo` or a worker, or name one with --data-dir."
    with store.connect(clickhouse_url, data_dir) as database:
        try:
            totals = load(database, since_us, until_us, by)
        except StoreError as error:
            if not error.schema_missing:
                raise
            return empty, f"No figures yet: the schema has not been created in {database.place}. Run `kvcensus migrate`."
        return totals, None if any(life.life_id for life in totals.lives) or totals.duplicates else _why_nothing(database, totals)


def _why_nothing(database: Database, totals: Totals) -> str:
    if totals.asked == (None, None):
        return f"No figures yet: nothing has been counted into {database.place}."
    held = load(database)
    if held.semantics_version is None:
        return f"No figures yet: nothing has been counted into {database.place}."
    return f"Nothing was counted in this span; the store holds engine times from {iso(held.span.start_us)} to {iso(held.span.end_us)}."
