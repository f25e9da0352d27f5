"""``kvcensus show``: the figures, from ClickHouse."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click

from console.commands import show_change
from console.commands.show_coverage import show_coverage
from console.detail_tables import render_recomputes
from console.figure_tables import Part, console_for_output, render
from console.option_types import RankName
from console.store_options import engine_span, store_options
from console.store_reading import why_no_schema, why_no_store
from schemas.records import rank_key
from sql import drilldown, store
from sql.database import Database, StoreError
from sql.figures import By, Totals, assemble, load
from sql.times import iso
from sql.total_types import PREFIXES, settle_span

PARTS = ("repeat-compute", "duplicates", "prefixes", "recomputes", "ranks", "coverage", "all")

CHANGES = ("deploy", "change")
"""What is shown of two spans, each by a command of its own with arguments of its own."""

_RECOMPUTES = 50


class _Show(click.Command):
    """``show``, which hands over to the commands of :data:`CHANGES` where one of them is named first."""

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        """The context of the command that was named."""
        if args and args[0] in CHANGES:
            command: click.Command = getattr(show_change, args[0])
            return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run what ``ctx`` is of."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(
    cls=_Show,
    epilog="`show deploy ID` holds the time before a deploy against the time after, `show change` any two spans; each has its own -h.",
)
@click.argument("what", type=click.Choice([*PARTS, *CHANGES]), default="all")
@click.option(
    "--since", metavar="TIME", help="Start, engine time: ISO 8601, epoch seconds, or an age (15m, 2h, 1d). Default: the first batch."
)
@click.option("--until", metavar="TIME", help="End, in the same forms, or now. Default: the last batch.")
@click.option("--by", type=click.Choice(["rank", "workload", "model"]), help="One line per rank, workload or model.")
@click.option(
    "--rank", "ranks", type=RankName(), multiple=True, metavar="INSTANCE/R", help="With recomputes: only this rank's; repeatable."
)
@click.option("--cause", "causes", multiple=True, type=click.Choice(drilldown.CAUSES), help="With recomputes: only this cause; repeatable.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    help=f"With prefixes (default {PREFIXES}) or recomputes (default {_RECOMPUTES}, the newest): at most so many.",
)
@click.option(
    "--semantics-version",
    type=click.IntRange(0, 2**31 - 1),
    metavar="N",
    help="Figures by this version of the counting rules. Default: the newest in the span.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document with all figures.")
@store_options
def show(
    what: str,
    since: str | None,
    until: str | None,
    by: str | None,
    ranks: tuple[str, ...],
    causes: tuple[str, ...],
    limit: int | None,
    semantics_version: int | None,
    as_json: bool,
    clickhouse_url: str | None,
    data_dir: Path,
) -> None:
    """Repeat compute by cause and duplicate footprint, the ranks behind them, and how far all of it was observed.

    `prefixes` are the shared prefixes with the most extra copies, `recomputes` the single blocks that were computed again. The span is in
    engine time and is widened to whole windows.
    """
    if what in CHANGES:
        raise click.UsageError(f"`{what}` comes before any option: kvcensus show {what} -h")
    now_us = time.time_ns() // 1000
    since_us, until_us = engine_span(since, until, now_us)
    _refuse_misplaced(what, by, ranks, causes, limit)
    reader = _Reader(clickhouse_url, data_dir, since_us, until_us, semantics_version)
    totals, nothing = reader.totals(cast("By | None", by), limit if what == "prefixes" and limit else PREFIXES)
    document = assemble(totals)
    unknown = [rank for rank in ranks if rank not in {rank_key(each["instance_id"], each["dp_rank"]) for each in document["ranks"]}]
    if unknown and not nothing:
        said = f"Nothing is known of rank {', '.join(unknown)} in this span."
        document["warnings"].append(said.removesuffix("."))
        nothing = said if len(unknown) == len(ranks) else None
    elif nothing:
        document["warnings"].append(nothing.removesuffix("."))
    if what == "recomputes":
        document = reader.recomputes(document, None if nothing else totals, ranks, causes, limit or _RECOMPUTES)
    if what == "coverage" and not (nothing and totals.left_out_versions):
        show_coverage(document, nothing, clickhouse_url, data_dir, since_us, until_us, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif nothing:
        click.echo(nothing)
    elif what == "recomputes":
        render_recomputes(document, console_for_output())
    else:
        render(document, cast("Part", what), console_for_output())


def _refuse_misplaced(what: str, by: str | None, ranks: Sequence[str], causes: Sequence[str], limit: int | None) -> None:
    """Options that would silently do nothing are a usage error."""
    for option, given, parts in (
        ("--rank", ranks, ("recomputes",)),
        ("--cause", causes, ("recomputes",)),
        ("--limit", limit, ("recomputes", "prefixes")),
    ):
        if given and what not in parts:
            raise click.UsageError(f"{option} goes with {' or '.join(f'`show {part}`' for part in parts)}")
    if by and what in ("recomputes", "prefixes", "coverage"):
        raise click.UsageError(f"--by does not go with `show {what}`")


class _Reader:
    """What one invocation reads: a span of a store, under one version of the rules."""

    def __init__(
        self, clickhouse_url: str | None, data_dir: Path, since_us: int | None, until_us: int | None, semantics_version: int | None
    ) -> None:
        self._store = (clickhouse_url, data_dir)
        self._asked = (since_us, until_us)
        self._version = semantics_version

    def totals(self, by: By | None, prefixes: int) -> tuple[Totals, str | None]:
        """The totals, and a sentence if there are none."""
        empty = Totals(settle_span(*self._asked, None, None), self._asked, self._version, [], [], [], by)
        if (nothing := why_no_store(*self._store)) is not None:
            return empty, nothing
        with store.connect(*self._store) as database:
            try:
                totals = load(database, *self._asked, by, semantics_version=self._version, prefixes=prefixes)
            except StoreError as error:
                return empty, why_no_schema(database, error)
            counted = any(life.life_id for life in totals.lives) or totals.duplicates
            return totals, None if counted else self._why_nothing(database, totals)

    def _why_nothing(self, database: Database, totals: Totals) -> str:
        if totals.left_out_versions:
            others = ", ".join(str(version) for version in totals.left_out_versions)
            return f"Nothing was counted by semantics_version {totals.semantics_version} in this span; there are rows of {others}."
        held = totals if totals.asked == (None, None) else load(database)
        if held.semantics_version is None or not held.lives:
            return f"No figures yet: nothing has been counted into {database.place}."
        return f"Nothing was counted in this span; the store holds engine times from {iso(held.span.start_us)} to {iso(held.span.end_us)}."

    def recomputes(
        self, figures: dict[str, Any], totals: Totals | None, ranks: Sequence[str], causes: Sequence[str], limit: int
    ) -> dict[str, Any]:
        """The document of single recomputes, to be read as ``figures``, of the same span, say of repeat compute.

        Without ``totals`` there are none.
        """
        document = {name: figures[name] for name in ("span", "semantics_version", "provisional", "warnings")}
        of_rank = [rank for rank in figures["ranks"] if [f"{rank['instance_id']}/{rank['dp_rank']}"] == list(ranks)]
        core = of_rank[0] if of_rank else figures["repeat_compute"]
        document |= {name: core[name] for name in ("coverage", "identity_coverage", "register", "reasons")}
        found: int = 0
        listed: list[dict[str, Any]] = []
        if totals is not None and totals.semantics_version is not None:
            since_us = None if self._asked[0] is None else totals.span.start_us
            until_us = None if self._asked[1] is None else totals.span.end_us
            wanted = drilldown.Wanted(totals.semantics_version, since_us, until_us, ranks, causes, limit)
            with store.connect(*self._store) as database:
                found, listed = drilldown.recomputes(database, wanted)
        return document | {"found": found, "recomputes": listed}
