"""``kvcensus rollup``: the windows rolled up to 5 minutes, 1 hour and 1 day, as far as there is something to do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, TaskID

from console.store_options import engine_span, store_options
from console.store_reading import why_no_store
from schemas.errors import KvcensusError
from sql import rollups, store
from sql.database import Database
from sql.rollups import Round


@click.command()
@click.option(
    "--since",
    metavar="TIME",
    help="Count the windows from here on again, engine time: ISO 8601, epoch seconds, or an age (15m, 2h, 1d). Default: the first.",
)
@click.option("--until", metavar="TIME", help="And up to here, in the same forms, or now. Default: the last.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_options
def rollup(since: str | None, until: str | None, as_json: bool, clickhouse_url: str | None, data_dir: Path) -> None:
    """Roll up what has changed since it was last done.

    A worker with a sink does so by itself, every ten seconds; this is for a store without one, and after an update of the schema.
    With --since or --until the windows of that span are counted again, whether they have changed or not. Windows that retention
    has taken meanwhile stay as they were counted. Cut short, it has done no harm: run it again.
    """
    now_us = time.time_ns() // 1000
    since_us, until_us = engine_span(since, until, now_us)
    if (missing := why_no_store(clickhouse_url, data_dir)) is not None:
        raise KvcensusError(missing.removesuffix("."))
    with store.connect(clickhouse_url, data_dir) as database:
        if not database.can_write:
            raise KvcensusError(f"{database.place} can only be asked, and rolls up by itself: stop that process to do it from here")
        if since_us is not None or until_us is not None:
            rollups.touch(database, since_us, until_us)
        done = _run(database, quiet=as_json)
    _report(done, as_json)


def _run(database: Database, *, quiet: bool) -> Round:
    """Rounds until one finds nothing to do; what they did together."""
    console = Console(stderr=True)
    total = Round()
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        while True:
            task = progress.add_task("rolling up", total=None)

            def show(finished: int, of: int, task: TaskID = task) -> None:
                progress.update(task, completed=finished, total=of)

            done = rollups.run(database, show)
            progress.remove_task(task)
            if done.idle:
                return total
            for source, windows in done.windows.items():
                total.windows[source] += windows
            total.expired = max(total.expired, done.expired)
            total.absences += done.absences


def _report(done: Round, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"windows": done.windows, "expired": done.expired, "absences": done.absences}, indent=2))
        return
    if done.idle:
        click.echo("nothing has changed: the rollups are up to date")
        return
    for source, windows in done.windows.items():
        click.echo(f"{source}: {windows:,} windows of 5 minutes rolled up")
    if done.absences:
        click.echo(f"ranks found missing, or no longer, in {done.absences:,} windows of 5 minutes")
    if done.expired:
        click.echo(f"{done.expired:,} parts of windows stay as they were counted: rows of theirs have gone with their retention")
