"""``kvcensus deploy``: declare what happened to a fleet, to hold the time before it against the time after."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from console.broker import find_bootstrap_servers
from console.deploy_topic import DeployTopic
from console.deploys import Known, adding, checked_label, checked_time, described, newest, removing
from console.escape import escaped
from console.kafka_options import kafka_options
from console.option_types import Name
from console.store_options import engine_span, engine_time, store_options
from console.store_reading import why_no_schema, why_no_store
from console.table_parts import console_for_output, table
from schemas import environment
from schemas.errors import KvcensusError
from schemas.records import Deploy
from sql import store
from sql.database import StoreError
from sql.deploys import load_deploys
from sql.times import iso

_SAID = {
    "declared": "declared",
    "declared_already": "declared already",
    "declared_again": "declared again: it had been taken back",
    "removed": "taken back",
    "removed_already": "taken back already",
}


class _Label(click.ParamType):
    """One line of text."""

    name = "label"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The label, without spaces around it."""
        try:
            return checked_label(str(value))
        except KvcensusError as error:
            self.fail(str(error), param, ctx)


@click.group()
def deploy() -> None:
    """Declare what happened to the fleet and when, and see what has been declared.

    A deploy is a label and an instant of engine time. `kvcensus show deploy ID` holds the hour before one against the hour after.
    """


@deploy.command()
@click.argument("label", type=_Label())
@click.option("--at", metavar="TIME", help="When, engine time: ISO 8601, epoch seconds, an age (15m, 2h, 1d), or now (the default).")
@click.option("--workload", type=Name(), help="Concerns only ranks of this workload. Default: all.")
@click.option("--model", type=Name(), help="Concerns only ranks of this model. Default: all.")
@kafka_options
def add(
    label: str,
    at: str | None,
    workload: str | None,
    model: str | None,
    bootstrap_servers: str | None,
    kafka_option: tuple[str, ...],
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Declare a deploy: LABEL says what, in one line.

    Its id is made of what is declared, so the same command with a fixed --at declares once, however often it runs. One that was taken back
    is declared again.
    """
    now_us = _now_us()
    asked = engine_time("--at", at, now_us)
    try:
        at_us = checked_time(now_us if asked is None else asked)
    except KvcensusError as error:
        raise click.BadParameter(str(error), param_hint="--at") from error
    topic, known = _open(bootstrap_servers, kafka_option, data_dir)
    record, said = adding(known, label, at_us, workload, model, now_us)
    if said != "declared_already":
        topic.write(record)
    _print(record, said, as_json)


@deploy.command(short_help="Take back the deploy ID.")
@click.argument("given", metavar="ID", type=Name())
@kafka_options
def remove(given: str, bootstrap_servers: str | None, kafka_option: tuple[str, ...], data_dir: Path | None, as_json: bool) -> None:
    """Take back the deploy ID, or the one whose id begins so (4 digits at least)."""
    topic, known = _open(bootstrap_servers, kafka_option, data_dir)
    record, said = removing(known, given, _now_us())
    if said != "removed_already":
        topic.write(record)
    _print(record, said, as_json)


@deploy.command("list", short_help="The declared deploys, the oldest first.")
@click.option("--since", metavar="TIME", help="Only deploys from here on, engine time: ISO 8601, epoch seconds, or an age (15m, 2h, 1d).")
@click.option("--until", metavar="TIME", help="Only deploys before this, in the same forms, or now.")
@click.option("--all", "everything", is_flag=True, help="Also those that were taken back.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@store_options
def list_(since: str | None, until: str | None, everything: bool, as_json: bool, clickhouse_url: str | None, data_dir: Path) -> None:
    """The declared deploys, the oldest first, from ClickHouse: a new one is there once the worker's sink has written it."""
    now_us = _now_us()
    since_us, until_us = engine_span(since, until, now_us)
    found: list[Deploy] = []
    nothing = why_no_store(clickhouse_url, data_dir, "deploys")
    if nothing is None:
        with store.connect(clickhouse_url, data_dir) as database:
            try:
                found = load_deploys(database, since_us, until_us, removed=everything)
            except StoreError as error:
                nothing = why_no_schema(database, error, "deploys")
    if as_json:
        document = {"deploys": [described(each) for each in found], "warnings": [nothing.removesuffix(".")] if nothing else []}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif found:
        _print_table(found, everything)
    else:
        spanned = " in this span" if since_us is not None or until_us is not None else ""
        click.echo(nothing or f"No deploy is declared{spanned}. Declare one: kvcensus deploy add LABEL")


def _open(bootstrap_servers: str | None, kafka_option: tuple[str, ...], data_dir: Path | None) -> tuple[DeployTopic, Known]:
    servers = find_bootstrap_servers(bootstrap_servers, environment.data_dir(data_dir))
    topic = DeployTopic(servers, environment.kafka_options(kafka_option))
    return topic, newest(topic.read())


def _print(record: Deploy, said: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"status": said, **described(record)}, indent=2, ensure_ascii=False))
    else:
        click.echo(f"{record.deploy_id}  {iso(record.at_us)}  {escaped(record.label)}: {_SAID[said]}")


def _print_table(deploys: list[Deploy], everything: bool) -> None:
    shown = table(["id", "at (engine time)", "workload", "model", "label"], [])
    shown.columns[0].no_wrap = shown.columns[1].no_wrap = True
    if everything:
        shown.add_column("")
    for each in deploys:
        of = (escaped(each.workload or "all"), escaped(each.model or "all"))
        shown.add_row(each.deploy_id, iso(each.at_us), *of, escaped(each.label), *(["taken back" if each.removed else ""] * everything))
    console_for_output().print(shown)


def _now_us() -> int:
    return time.time_ns() // 1000
