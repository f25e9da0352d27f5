"""Every query of the dashboards on a real store: each has rows to show, and none reads outside its time range."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from infra.grafana import build
from infra.grafana.dashboard import Dashboard
from infra.grafana.macros import Value, expand
from sql.database import Database
from tests.dashboard_data import Span, fill

EACH = pytest.mark.parametrize("dashboard", build.DASHBOARDS, ids=lambda each: each.file)
DAY_MS = 86_400_000

TIME_COLUMNS = {
    "rank_windows": "window_start",
    "duplicate_windows": "window_start",
    "rank_rollups": "window_start",
    "duplicate_rollups": "window_start",
    "recomputes": "back_at",
    "shared_prefixes": "as_of",
    "lifecycle": "at",
    "engine_metrics": "at",
    "rank_events": "observed_at",
}
"""Tables that grow with time, and the column in their sorting key that bounds what is read of them."""

WHOLE = {
    "life_groups": "a row per process life and cache group",
    "deploys": "a row per deploy",
    "fleet_clock": "a row per rules version",
    "dead_letters": "set aside messages have no time; kept 90 days",
}
"""Tables that may be read whole, and why that is little."""


@pytest.fixture(scope="module")
def span(module_store: Database) -> Span:
    """The store of this module, filled."""
    return fill(module_store)


def ask(database: Database, sql: str) -> list[tuple[Any, ...]]:
    """Rows of a query."""
    return database.query(sql).rows


def queries(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    """Name and SQL of everything a dashboard asks, but its variables."""
    for annotation in dashboard.annotations:
        yield f"annotation {annotation.name}", annotation.sql
    for panel in dashboard.panels:
        yield panel.title, panel.sql


def opened(database: Database, dashboard: Dashboard, span: Span, wanted: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """What is chosen when the dashboard is opened on ``span``; every variable offers something."""
    chosen = build.choose(dashboard.file, lambda sql: ask(database, sql), span.from_ms, span.to_ms, wanted)
    for variable in dashboard.variables:
        offered = build.choices(variable, lambda sql: ask(database, sql), span.from_ms, span.to_ms, chosen)
        assert offered, variable.name
        assert all(offered), f"{variable.name}: an empty text is nothing that can be chosen"
    return chosen


def without_rows(database: Database, dashboard: Dashboard, span: Span, chosen: Mapping[str, Value]) -> list[str]:
    """Names of the queries that gave nothing."""
    return [name for name, sql in queries(dashboard) if not ask(database, expand(sql, span.from_ms, span.to_ms, chosen))]


# -- rows -----------------------------------------------------------------------------------------------------------


@EACH
def test_every_query_has_rows(module_store: Database, span: Span, dashboard: Dashboard) -> None:
    chosen = opened(module_store, dashboard, span)
    assert {chosen[name] for name in ("grain", "step") if name in chosen} == {"_5m"}
    assert without_rows(module_store, dashboard, span, chosen) == []


@EACH
def test_every_query_has_rows_in_other_units_for_what_is_chosen(module_store: Database, span: Span, dashboard: Dashboard) -> None:
    wanted: dict[str, Value] = {
        "unit": "gpu_seconds",
        "size": "bytes",
        "cause": "restarted",
        "workload": ["agents", "no'body"],
        "rank": "agents-a/0",
    }
    two_hours = Span(span.to_ms - 7_200_000, span.to_ms)
    chosen = opened(module_store, dashboard, two_hours, wanted)
    if dashboard.file == "rank":
        assert chosen["repeat_compute"] == "repeat_compute", "the windows themselves"
    assert without_rows(module_store, dashboard, two_hours, chosen) == []


@pytest.mark.parametrize(("days", "grain", "step"), [(1, "_1h", "_1h"), (14, "_1d", "_1h"), (60, "_1d", "_1d")])
def test_longer_ranges_take_coarser_views(module_store: Database, span: Span, days: int, grain: str, step: str) -> None:
    longer = Span(span.to_ms - days * DAY_MS, span.to_ms)
    for dashboard in build.DASHBOARDS:
        chosen = opened(module_store, dashboard, longer)
        assert chosen.get("grain", grain) == grain
        assert chosen.get("step", step) == step
        for panel in list(dashboard.panels)[::2]:  # half of them: what differs is the name of the view
            if "${grain}" in panel.sql or "${step}" in panel.sql:
                assert ask(module_store, expand(panel.sql, longer.from_ms, longer.to_ms, chosen)), panel.title


def test_totals_are_those_of_the_views(module_store: Database, span: Span) -> None:
    """The first number of the fleet, against the windows themselves."""
    dashboard = build.DASHBOARDS[0]
    panel = next(dashboard.panels)
    found = module_store.query(expand(panel.sql, span.from_ms, span.to_ms, opened(module_store, dashboard, span)))
    shown = dict(zip(found.column_names, found.rows[0], strict=True))
    causes = ("evicted", "cleared", "restarted", "concurrent")
    columns = ", ".join(f"sum({cause}_tokens)" for cause in causes)
    assert tuple(shown[cause] for cause in causes) == ask(module_store, f"SELECT {columns} FROM repeat_compute")[0]
    assert shown["register"] == "lower bound"
    assert 0.5 < shown["coverage"] < 1


# -- what is read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """One read of a table: by which part of the sorting key, and how much of it."""

    table: str
    condition: str
    selected: int
    there: int


def reads(database: Database, sql: str) -> Iterator[Read]:
    """What the engine would read for ``sql``, without what it asked to plan it: see :func:`parts`."""
    text = "\n".join(row[0] for row in ask(database, f"EXPLAIN json = 1, indexes = 1, description = 1 {sql}"))
    for plan in json.loads(text):
        yield from _of(plan["Plan"])


def _of(plan: dict[str, Any]) -> Iterator[Read]:
    if plan["Node Type"].startswith("ReadFromMergeTree"):
        indexes = plan.get("Indexes", [])
        condition = next((each["Condition"] for each in indexes if each["Type"] == "PrimaryKey"), "true")
        table = plan["Description"].removeprefix("kvcensus.")
        yield Read(table, condition, indexes[-1]["Selected Granules"] if indexes else 1, indexes[0]["Initial Granules"] if indexes else 1)
    for each in plan.get("Plans", []):
        yield from _of(each)


def parts(sql: str) -> Iterator[str]:
    """``sql`` and every query in brackets within it: one that gives a single value is answered before the plan is made."""
    yield sql
    for found in re.finditer(r"\(\s*SELECT\b", sql):
        depth = 0
        for place in range(found.start(), len(sql)):
            depth += (sql[place] == "(") - (sql[place] == ")")
            if depth == 0:
                yield sql[found.start() + 1 : place]
                break


def bounded(read: Read) -> bool:
    """Whether the sorting key bounds the read's time on both sides, or names the times."""
    column = TIME_COLUMNS[read.table]
    ranges = re.findall(rf"\b{column}\)? in ([(\[][^)\]]*[)\]]|\d+-element set)", read.condition)
    below = any(not each.startswith("(-Inf") for each in ranges)
    return below and any("+Inf" not in each for each in ranges)


def outside(database: Database, sql: str) -> list[str]:
    """Reads of ``sql`` that no time range bounds, in words."""
    found = []
    for read in (read for part in parts(sql) for read in reads(database, part)):
        if read.table not in TIME_COLUMNS:
            assert read.table in WHOLE, read
        elif read.table == "rank_events" and "'holder_reset'" in read.condition:
            continue  # rank_health looks up restarts: a row per interruption or declaration, whenever it was
        elif not bounded(read):
            found.append(f"{read.table}: by {read.condition}")
        elif read.selected * 2 > read.there:
            found.append(f"{read.table}: {read.selected} of {read.there} granules")
    return found


@pytest.fixture(scope="module")
def long_store(module_store: Database, span: Span) -> Database:
    """The same store with the same rows at other hours, days and months as well, before and after the span."""
    first, last = (f"fromUnixTimestamp64Milli({ms}, 'UTC')" for ms in (span.from_ms, span.to_ms))
    for table, column in TIME_COLUMNS.items():
        module_store.command(f"SYSTEM STOP MERGES {table}")  # so that a part is an hour's, as a granule of a large store is
        for hours in (-1460, -740, -400, -100, -6, 6, 100, 740):
            module_store.command(
                f"INSERT INTO {table} SELECT * REPLACE ({column} + INTERVAL {hours} HOUR AS {column}) "
                f"FROM (SELECT * FROM {table} WHERE {column} >= {first} AND {column} <= {last})"
            )
    return module_store


@EACH
def test_no_query_reads_outside_its_range(long_store: Database, span: Span, dashboard: Dashboard) -> None:
    chosen = build.choose(dashboard.file, lambda sql: ask(long_store, sql), span.from_ms, span.to_ms)
    asked = [*queries(dashboard), *((f"variable {each.name}", each.sql) for each in dashboard.variables if each.sql)]
    found = {name: outside(long_store, expand(sql, span.from_ms, span.to_ms, chosen)) for name, sql in asked}
    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sum(evicted_tokens) FROM repeat_compute_5m",
        "SELECT sum(evicted_tokens) FROM repeat_compute",
        "SELECT sum(evicted_tokens) FROM repeat_compute_5m WHERE window_start >= $__fromTime",
        "SELECT sum(evicted_tokens) FROM repeat_compute_5m WHERE toHour(window_start) < 4",
        "SELECT sum(evicted_tokens) FROM repeat_compute_5m "
        "WHERE window_start > $__fromTime - transform('5m', ['5m'], [300], 0) AND window_start < $__toTime",
        "SELECT max(at) FROM lifecycle",
        "SELECT place FROM shared_prefixes FINAL WHERE as_of = (SELECT max(as_of) FROM shared_prefixes)",
        "SELECT count() FROM recomputed_blocks WHERE $__timeFilter(back_at)",
        "SELECT count() FROM lifecycle WHERE at >= $__fromTime - INTERVAL 90 DAY AND at <= $__toTime + INTERVAL 90 DAY",
    ],
)
def test_a_query_that_reads_outside_its_range_is_found(long_store: Database, span: Span, sql: str) -> None:
    assert outside(long_store, expand(sql, span.from_ms, span.to_ms, {}))
