"""``kvcensus migrate``: create or update the ClickHouse schema, and say how long rows are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from console.store_options import store_options
from schemas import environment
from schemas.errors import KvcensusError
from sql import cluster as clusters
from sql import retention, store
from sql.cluster import Cluster
from sql.database import DATABASE, Database
from sql.migrate import Migration, SetUp, Status, apply, cluster_for, pending, set_up, shipped, status
from sql.retention import InForce, Period, Wanted


class _Kept(click.ParamType):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Period:
        """What was given, as a :class:`Period`; what is none is a usage error."""
        if isinstance(value, Period):
            return value
        try:
            return retention.period(value)
        except KvcensusError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would run; change nothing.")
@click.option(
    "--status",
    "show_status",
    is_flag=True,
    help="Print what was applied when, what is pending, and how long rows are kept; change nothing.",
)
@click.option(
    "--cluster",
    envvar=environment.CLICKHOUSE_CLUSTER,
    metavar="NAME",
    help="Set up for all nodes of this cluster (its name in remote_servers): replicated tables on each shard, Distributed ones over them. "
    f"For the first time: from then on the database knows. [env: {environment.CLICKHOUSE_CLUSTER}]",
)
@click.option("--keep-facts", type=_Kept(), help="How long block events, batches, messages and recomputes are kept from insertion. [14d]")
@click.option(
    "--keep-windows", type=_Kept(), help="How long windows, rank events, lifecycle, engine metrics and dead letters are kept. [90d]"
)
@click.option("--keep-rollups", type=_Kept(), help="How long rollups are kept. [2y]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines.")
@store_options
def migrate(
    dry_run: bool,
    show_status: bool,
    cluster: str | None,
    keep_facts: Period | None,
    keep_windows: Period | None,
    keep_rollups: Period | None,
    as_json: bool,
    clickhouse_url: str | None,
    data_dir: Path,
) -> None:
    """Bring the tables and views up to date. May run twice, and from several places at once.

    How long rows are kept (12h, 14d, 6w, 2y or forever) stays in force until it is given again. In brackets is what holds for a new store.
    """
    if dry_run and show_status:
        raise click.UsageError("--dry-run and --status cannot be combined")
    given = {"facts": keep_facts, "windows": keep_windows, "rollups": keep_rollups}
    wanted = {group: kept for group, kept in given.items() if kept is not None}
    if show_status and wanted:
        raise click.UsageError("--status changes nothing: leave out --keep-...")
    if cluster is not None and not clickhouse_url and not dry_run:
        raise click.UsageError("--cluster is of ClickHouse servers: name one of them with --clickhouse-url")
    if not (dry_run or show_status):
        with store.connect(clickhouse_url, data_dir) as database:
            _migrate(database, cluster, wanted, as_json)
    elif not store.exists(clickhouse_url, data_dir):
        # Looking must not create a store.
        if show_status:
            _print_status([Status(each.number, each.name, "pending", None) for each in shipped()], None, [], as_json)
        else:
            _print_dry(_Planned(shipped(), None if cluster is None else Cluster(cluster, DATABASE), [], wanted), as_json)
    else:
        with store.connect(clickhouse_url, data_dir) as database:
            if show_status:
                _print_status(status(database), set_up(database), retention.in_force(database), as_json)
            else:
                on = cluster_for(database, cluster)
                _print_dry(_Planned(pending(database), on, retention.in_force(database), wanted), as_json)


@dataclass(frozen=True)
class _Planned:
    """What a run would do: ``todo``, then ``wanted``, where ``kept`` is in force."""

    todo: Sequence[Migration]
    cluster: Cluster | None
    kept: Sequence[InForce]
    wanted: Wanted

    def statements(self, migration: Migration) -> list[str]:
        """Those of one that is pending, less the defaults that would not be set."""
        return self._on_cluster(retention.defaults(migration.statements, self.kept, self.wanted))

    def changes(self) -> list[str]:
        """Those that follow: how long rows are kept, also of tables that are made first."""
        return self._on_cluster(retention.changes(retention.with_missing(self.kept), self.wanted))

    def _on_cluster(self, statements: list[str]) -> list[str]:
        return statements if self.cluster is None else clusters.rewrite(statements, self.cluster)


def _migrate(database: Database, cluster: str | None, wanted: Wanted, as_json: bool) -> None:
    done = apply(database, cluster=cluster, keep=wanted)
    before = retention.apply(database, wanted, cluster_for(database, cluster))
    if as_json:
        changed = [_kept(each) | {"kept": str(wanted[each.group]), "was": _period(each)} for each in before]
        click.echo(json.dumps({"applied": [_described(each, None) for each in done], "retention": changed}, indent=2))
        return
    for migration in done:
        click.echo(f"applied {migration.number:04d}_{migration.name}")
    for each in before:
        click.echo(f"kept {wanted[each.group]}: {each.table} (was: {_period(each)})")
    if not done and not before:
        click.echo("up to date")
    if any(migration.name == "rollups" for migration in done) and database.query("SELECT 1 FROM rank_windows LIMIT 1").rows:
        click.echo("the windows that are there are rolled up by the worker's next rounds, or at once by `kvcensus rollup`")


def _print_dry(planned: _Planned, as_json: bool) -> None:
    todo, changes = planned.todo, planned.changes()
    if as_json:
        document = {"pending": [_described(each, planned.statements(each)) for each in todo], "retention": changes}
        click.echo(json.dumps(document, indent=2))
        return
    for each in todo:
        click.echo(f"-- {each.number:04d}_{each.name}")
        for statement in planned.statements(each):
            click.echo(f"{statement};\n")
    for statement in changes:
        click.echo(f"{statement};")
    also = "how long rows are kept is changed" if changes else ""
    if todo:
        click.echo(f"-- {len(todo)} to apply" + (f", then {also}" if also else ""))
    else:
        click.echo(f"-- no migration to apply; {also}" if also else "-- up to date: nothing to apply")


def _described(migration: Migration, statements: list[str] | None) -> dict[str, Any]:
    described: dict[str, Any] = {"number": migration.number, "name": migration.name, "checksum": migration.checksum}
    return described | ({} if statements is None else {"statements": statements})


def _kept(each: InForce) -> dict[str, Any]:
    return {"table": each.table, "option": f"--keep-{each.group}", "kept": _period(each)}


def _period(each: InForce) -> str:
    return str(each.period) if each.period is not None else f"TTL {each.rule}"


def _print_status(lines: list[Status], found: SetUp | None, kept: list[InForce], as_json: bool) -> None:
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
        mode = {"mode": found and found.mode, "cluster": found and found.cluster}
        click.echo(json.dumps({**mode, "migrations": rows, "retention": [_kept(each) for each in kept]}, indent=2))
    else:
        for line in lines:
            when = f"  {line.applied_at:%Y-%m-%d %H:%M:%S} UTC" if line.applied_at else ""
            click.echo(f"{line.number:04d}  {line.state:<8} {line.name}{when}")
        if found is not None:
            where = f"the cluster {found.cluster}" if found.cluster else "a cluster" if found.clustered else "one server"
            click.echo(f"set up for {where}")
        for each in kept:
            click.echo(f"kept  {_period(each):<8} {each.table}")
    if any(line.state == "changed" for line in lines):
        raise KvcensusError("a migration was changed after it had been applied: restore its file, or use another database")
