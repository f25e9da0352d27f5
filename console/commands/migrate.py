"""``kvcensus migrate``: create or update the ClickHouse schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from console.store_options import store_options
from schemas.errors import KvcensusError
from sql import store
from sql.migrate import Migration, Status, apply, pending, shipped, status


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would run; change nothing.")
@click.option("--status", "show_status", is_flag=True, help="Print what was applied when, and what is pending; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines.")
@store_options
def migrate(dry_run: bool, show_status: bool, as_json: bool, clickhouse_url: str | None, data_dir: Path) -> None:
    """Bring the tables and views up to date. May run twice, and from several places at once."""
    if dry_run and show_status:
        raise click.UsageError("--dry-run and --status cannot be combined")
    if (dry_run or show_status) and not store.exists(clickhouse_url, data_dir):
        # Looking must not create a store.
        todo = shipped()
        lines = [Status(each.number, each.name, "pending", None) for each in todo]
    else:
        with store.connect(clickhouse_url, data_dir) as database:
            if show_status:
                lines = status(database)
            elif dry_run:
                todo = pending(database)
            else:
                todo = apply(database)
    if show_status:
        _print_status(lines, as_json)
    elif as_json:
        click.echo(json.dumps({"pending" if dry_run else "applied": [_described(each, dry_run) for each in todo]}, indent=2))
    elif dry_run:
        for each in todo:
            click.echo(f"-- {each.number:04d}_{each.name}")
            for statement in each.statements:
                click.echo(f"{statement};\n")
        click.echo(f"-- {len(todo)} to apply" if todo else "-- up to date: nothing to apply")
    else:
        for each in todo:
            click.echo(f"applied {each.number:04d}_{each.name}")
        if not todo:
            click.echo("up to date")


def _described(migration: Migration, with_statements: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"number": migration.number, "name": migration.name, "checksum": migration.checksum}
    return described | ({"statements": migration.statements} if with_statements else {})


def _print_status(lines: list[Status], as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "number": line.number,
                "name": line.name,
                "state": line.state,
                "applied_at": line.applied_at and line.applied_at.isoformat().replace("+00:00", "Z"),
            }
            for line in lines
        ]
        click.echo(json.dumps({"migrations": rows}, indent=2))
    else:
        for line in lines:
            when = f"  {line.applied_at:%Y-%m-%d %H:%M:%S} UTC" if line.applied_at else ""
            click.echo(f"{line.number:04d}  {line.state:<8} {line.name}{when}")
    if any(line.state == "changed" for line in lines):
        raise KvcensusError("a migration was changed after it had been applied: restore its file, or use another database")
