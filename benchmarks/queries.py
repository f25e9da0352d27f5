"""What the views and panels cost on a large fleet: `python -m benchmarks.queries [--quick]`.

An embedded store is filled with two weeks of 1,000 ranks (121 million windows and what goes with them), rolled up, and asked what people
and dashboards ask. The table says how long each took, how much was read for it, and whether that is within its target.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.queries_fill import Filled, fill, filled_with, measured, rest
from benchmarks.queries_list import of_views, rank_hour, recent, span
from benchmarks.queries_panels import of_panels
from benchmarks.queries_rollup import Rolled, roll_up
from benchmarks.queries_rows import BATCHES_PER_SECOND, Fleet
from benchmarks.queries_run import RUNS, Asker, Measured, Query, measure, measure_call
from schemas.errors import KvcensusError
from sql import migrate
from sql.database import Database
from sql.load import load
from sql.store import connect, store_folder

QUICK = Fleet(days=1, ranks=50, fact_ranks=2, fact_rate=20)
"""For a look at whether everything runs: a minute or so."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Folder of the store; kept, and used again if it holds the same fleet. Default: a temporary one.",
)
@click.option("--days", type=click.IntRange(1, 60), default=14, show_default=True, help="Days of windows.")
@click.option("--ranks", type=click.IntRange(1, 100_000), default=1_000, show_default=True, help="Ranks of the fleet.")
@click.option("--fact-ranks", type=click.IntRange(0, 1_000), default=20, show_default=True, help="Ranks with facts of the last day.")
@click.option(
    "--fact-rate",
    type=click.IntRange(10, 5_000),
    default=40,
    show_default=True,
    help="Block events per second and rank among the facts; a multiple of 10.",
)
@click.option("--quick", is_flag=True, help=f"{QUICK.days} day of {QUICK.ranks} ranks, whatever else is asked.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only queries with this in their name; repeatable.")
@click.option(
    "--runs", type=click.IntRange(1, 1_000), default=RUNS, show_default=True, help="Counted runs of each query, after one that is not."
)
@click.option("--fill-only", is_flag=True, help="Fill and roll up, ask nothing.")
@click.option(
    "--roll-up-all", is_flag=True, help="Roll up every day. Default: the last one, of which the days before get copies: all take an hour."
)
@click.option("--all-grains", is_flag=True, help="Ask views at every grain, also where so much is not asked at it: for information.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def main(
    data_dir: Path | None,
    days: int,
    ranks: int,
    fact_ranks: int,
    fact_rate: int,
    quick: bool,
    only: tuple[str, ...],
    runs: int,
    fill_only: bool,
    roll_up_all: bool,
    all_grains: bool,
    as_json: bool,
) -> None:
    """Fill a store, ask, print the table. The exit code is 1 if a query is over its target or fails."""
    if fact_rate % (2 * BATCHES_PER_SECOND):
        raise click.UsageError(f"--fact-rate: expected a multiple of {2 * BATCHES_PER_SECOND}")
    fleet = QUICK if quick else Fleet(days, ranks, fact_ranks, fact_rate)
    try:
        with _folder(data_dir) as folder:
            tables, rolled, results = run(folder, fleet, only, runs, fill_only=fill_only, roll_up_all=roll_up_all, all_grains=all_grains)
    except KvcensusError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(document(fleet, tables, rolled, results), indent=2))
    else:
        _print(tables, rolled, results)
    sys.exit(1 if any(result.verdict in ("over", "failed") for result in results) else 0)


@contextlib.contextmanager
def _folder(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield data_dir
        return
    with tempfile.TemporaryDirectory(prefix="kvcensus-bench-") as temporary:
        yield Path(temporary)


def run(
    folder: Path,
    fleet: Fleet,
    only: Sequence[str] = (),
    runs: int = RUNS,
    *,
    fill_only: bool = False,
    roll_up_all: bool = False,
    all_grains: bool = False,
) -> tuple[list[Filled], Rolled, list[Measured]]:
    """Fill the store in ``folder``, unless it holds ``fleet`` already, roll up, and ask.

    Raises :class:`KvcensusError`, also where the folder holds another fleet.
    """
    with connect(None, folder, prepare=migrate.apply) as database:
        told = {row.table: row for row in _filled(database, fleet, folder)}
        rolled = roll_up(database, fleet, folder, _say, every_day=roll_up_all)
        rest(database, _say, 3.0 if fleet.windows > 1_000_000 else 0.0)
        measured(database, told)
        results = [] if fill_only else _ask(database, folder, fleet, only, runs, all_grains)
        return list(told.values()), rolled, results


def _filled(database: Database, fleet: Fleet, folder: Path) -> list[Filled]:
    before = filled_with(folder)
    if before is None:
        if database.query("SELECT count() FROM rank_windows").rows[0][0]:
            raise KvcensusError(f"{folder} holds windows, but no benchmark filled it to its end: name another folder")
        return fill(database, fleet, folder, _say)
    if before[0] != fleet:
        raise KvcensusError(f"{folder} was filled with {before[0]}, not with {fleet}: name another folder")
    return before[1]


def _ask(database: Database, folder: Path, fleet: Fleet, only: Sequence[str], runs: int, all_grains: bool) -> list[Measured]:
    rows = database.query("SELECT name FROM system.tables WHERE database = currentDatabase() AND engine = 'View'").rows
    views = [str(row[0]) for row in rows]
    asker = Asker(store_folder(folder), database.name)
    found: list[Measured] = []
    try:
        for query in _queries(database, views, fleet, all_grains):
            if not only or any(text in query.name for text in only):
                found.append(measure(asker, query, runs))
                _say(f"{found[-1].median_ms:8.1f} ms  {query.name}, {query.span}")
        for name, seconds, times in (("1 h", 3_600, min(runs, 3)), ("1 d", 86_400, 0)):
            label = "kvcensus show: sql.load.load"
            if not only or any(text in label for text in only):
                of = span(fleet, name, seconds)
                call = lambda store, of=of: load(store, of.since_us, of.until_us)  # noqa: E731
                found.append(measure_call(asker, database, label, name, call, times))
    finally:
        asker.close()
    return found


def _queries(database: Database, views: Iterable[str], fleet: Fleet, all_grains: bool) -> Iterator[Query]:
    yield from of_views(views, fleet, all_grains=all_grains)
    yield from of_panels(lambda sql: database.query(sql).rows, fleet)
    yield from rank_hour(views, fleet)
    yield from recent(fleet)


def document(fleet: Fleet, tables: Sequence[Filled], rolled: Rolled, results: Sequence[Measured]) -> dict[str, object]:
    """As JSON."""
    return {
        "fleet": {"days": fleet.days, "ranks": fleet.ranks, "fact_ranks": fleet.fact_ranks, "fact_rate": fleet.fact_rate},
        "tables": [table.document() for table in tables],
        "rollup": rolled.document(),
        "queries": [result.document() for result in results],
    }


_began = time.monotonic()


def _say(text: str) -> None:
    print(f"{time.monotonic() - _began:7.0f} s  {text}", file=sys.stderr, flush=True)


def _print(tables: Sequence[Filled], rolled: Rolled, results: Sequence[Measured]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    filled = _table("Filled", "table", "rows", "rows a second", "MB", "bytes a row", "parts")
    for row in sorted(tables, key=lambda table: -table.bytes):
        rate = f"{row.rows / row.seconds:,.0f}" if row.seconds and row.rows else ""
        size = f"{row.bytes / row.stored:,.1f}" if row.stored else ""
        filled.add_row(row.table, f"{row.stored:,}", rate, f"{row.bytes / 1e6:,.1f}", size, str(row.parts))
    console.print(filled)
    console.print(rolled.sentence())
    if not results:
        return
    asked = _table("Asked", "query", "grain", "span", "median ms", "worst ms", "CPU ms", "rows read", "MB read", "rows out", "target", "")
    for result in results:
        figures = (
            f"{result.median_ms:,.1f}", f"{result.worst_ms:,.1f}", f"{result.cpu_ms:,.1f}", f"{result.rows_read:,}",
            f"{result.bytes_read / 1e6:,.2f}", f"{result.rows_out:,}",
        )  # fmt: skip
        target = "" if result.target_ms is None else f"{result.target_ms:.0f}"
        asked.add_row(result.name, result.grain, result.span, *figures, target, result.verdict)
    console.print(asked)
    for result in results:
        if result.error is not None:
            console.print(f"{result.name}: {result.error}", markup=False)
    over = sum(result.verdict == "over" for result in results)
    aimed = sum(result.target_ms is not None for result in results)
    console.print(f"{aimed} queries with a target, {over} over it, {sum(result.verdict == 'failed' for result in results)} failed")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        words = column in ("table", "query", "grain", "span", "")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "query", overflow="fold")
    return table


if __name__ == "__main__":
    main()
