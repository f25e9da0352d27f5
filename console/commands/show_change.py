"""``kvcensus show deploy`` and ``kvcensus show change``: the figures of two spans, held against each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from console.change_tables import render_change
from console.deploys import NoSuchDeploy, described, named, newest
from console.number_options import FiniteRange
from console.option_types import Name
from console.store_options import engine_time, store_options
from console.store_reading import why_no_schema, why_no_store
from console.table_parts import console_for_output
from schemas.errors import KvcensusError
from schemas.records import Deploy
from sql import store
from sql.change import MIN_COVERAGE, Cut, compare
from sql.change_load import load_sides, sides_around, sides_of
from sql.change_spans import Sides
from sql.database import Database, StoreError
from sql.deploys import load_deploys
from sql.times import iso
from sql.total_types import Span, Totals

C = TypeVar("C", bound=Callable[..., Any])

_MOST_HOURS = 24 * 366
_HOUR_US = 3_600_000_000


def _change_options(command: C) -> C:
    """Options that both commands have."""
    for option in (
        store_options,
        click.option("--json", "as_json", is_flag=True, help="One JSON document with all figures."),
        click.option(
            "--semantics-version",
            type=click.IntRange(0, 2**31 - 1),
            metavar="N",
            help="Figures by this version of the counting rules. Default: the newest of each side.",
        ),
        click.option(
            "--min-coverage",
            type=FiniteRange(0, 1),
            default=MIN_COVERAGE,
            show_default=True,
            help="Nothing is compared where a side was observed for a smaller share of its span.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("given", metavar="ID", type=Name())
@click.option(
    "--hours",
    type=FiniteRange(0, _MOST_HOURS, min_open=True),
    default=1.0,
    show_default=True,
    help="Length of each side, rounded up to whole windows.",
)
@_change_options
def deploy(
    given: str, hours: float, min_coverage: float, semantics_version: int | None, as_json: bool, clickhouse_url: str | None, data_dir: Path
) -> None:
    """The time before the deploy ID (or the one whose id begins so) against the time after, for the workload and model it was declared for.

    Every figure before and after, and the difference, with coverage and register of both sides. Where sides cannot be compared it says why.
    """
    if (nothing := why_no_store(clickhouse_url, data_dir)) is not None:
        raise KvcensusError(nothing.removesuffix("."))
    with store.connect(clickhouse_url, data_dir) as database:
        try:
            known = load_deploys(database, removed=True)
            chosen = named(newest(known), given)
            if chosen.removed:
                raise NoSuchDeploy(f"the deploy {chosen.deploy_id} ({chosen.label}) was taken back")
            cut = Cut(chosen.workload, chosen.model)
            sides = sides_around(database, chosen.at_us, round(hours * _HOUR_US))
            document = _document(database, sides, cut, semantics_version, min_coverage, known, chosen)
        except StoreError as error:
            raise KvcensusError(why_no_schema(database, error).removesuffix(".")) from error
    _print(document, as_json)


@click.command()
@click.option("--before", nargs=2, required=True, metavar="FROM TO", help="One span, engine time: ISO 8601, epoch seconds, ages, or now.")
@click.option("--after", nargs=2, required=True, metavar="FROM TO", help="The span that is held against it, in the same forms.")
@click.option("--workload", type=Name(), help="Only ranks of this workload.")
@click.option("--model", type=Name(), help="Only ranks of this model.")
@_change_options
def change(
    before: tuple[str, str],
    after: tuple[str, str],
    workload: str | None,
    model: str | None,
    min_coverage: float,
    semantics_version: int | None,
    as_json: bool,
    clickhouse_url: str | None,
    data_dir: Path,
) -> None:
    """Any two spans against each other: every figure before and after, and the difference, with coverage and register of both sides.

    \b
    kvcensus show change --before 26h 24h --after 2h now          # the same hours of yesterday
    """
    now_us = time.time_ns() // 1000
    asked = [_span(option, given, now_us) for option, given in (("--before", before), ("--after", after))]
    cut = Cut(workload, model)
    nothing = why_no_store(clickhouse_url, data_dir)
    empty = [Totals(span, (span.start_us, span.end_us), semantics_version, [], [], [], cut.by) for span in asked]
    document: dict[str, Any] = {"deploy": None} | compare(empty[0], empty[1], cut, min_coverage)
    if nothing is None:
        with store.connect(clickhouse_url, data_dir) as database:
            try:
                sides = sides_of(database, asked[0], asked[1])
                document = _document(database, sides, cut, semantics_version, min_coverage, load_deploys(database), None)
            except StoreError as error:
                nothing = why_no_schema(database, error)
    if nothing is not None:
        document["warnings"].append(nothing.removesuffix("."))
    if nothing is None or as_json:
        _print(document, as_json)
    else:
        click.echo(nothing)


def _span(option: str, given: tuple[str, str], now_us: int) -> Span:
    since_us, until_us = (engine_time(option, text, now_us) for text in given)
    assert since_us is not None
    assert until_us is not None
    if since_us >= until_us:
        raise click.BadParameter(f"{iso(since_us)} must lie before {iso(until_us)}", param_hint=option)
    return Span(since_us, until_us)


def _document(
    database: Database,
    sides: Sides,
    cut: Cut,
    semantics_version: int | None,
    min_coverage: float,
    known: Sequence[Deploy],
    chosen: Deploy | None,
) -> dict[str, Any]:
    document = compare(*load_sides(database, sides, cut, semantics_version), cut, min_coverage)
    others = [each for each in known if not each.removed and (chosen is None or each.deploy_id != chosen.deploy_id)]
    document["warnings"] = [*sides.notes, *document["warnings"], *_other_deploys(sides, others, cut)]
    return {"deploy": None if chosen is None else described(chosen)} | document


def _other_deploys(sides: Sides, deploys: Sequence[Deploy], cut: Cut) -> list[str]:
    """A sentence on each deploy that lies in a side and may have moved the same figures."""
    said = []
    for name, span in (("before", sides.before), ("after", sides.after)):
        for each in deploys:
            apart = any(mine and theirs and mine != theirs for mine, theirs in ((cut.workload, each.workload), (cut.model, each.model)))
            if span.start_us <= each.at_us < span.end_us and not apart:
                said.append(f"another deploy lies in the span {name}: {each.deploy_id} at {iso(each.at_us)} ({each.label})")
    return said


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        render_change(document, console_for_output())
