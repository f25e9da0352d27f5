"""The views as such: what their comments say, that they run, that their columns agree at every grain, that a condition on time is cheap.

What their figures are: ``test_sql_views_figures.py`` (against counted engines), ``test_sql_views_rows.py`` (rows made by hand).
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from console.deploys import adding
from sql import migrate, rollup_parts, rollups
from sql.database import Database
from sql.export import OF_A_GRAIN, TAKE_VALUES
from sql.rows import Row
from tests.sql_records import START_US, WINDOW_US, insert, random_duplicate_windows, random_rank_windows, random_shared_prefixes

GRAINS = tuple(grain.name for grain in rollup_parts.GRAINS)
BASES = ("repeat_compute", "duplicate_footprint", "workload_pairs", "return_times")
"""Families that have a view of the windows themselves as well."""

ONE_HOUR_US = 3_600_000_000


def views(database: Database) -> dict[str, str]:
    """Every view that takes no values, and its comment."""
    found = comments(database)
    assert set(TAKE_VALUES) < set(found)
    return {view: comment for view, comment in found.items() if view not in TAKE_VALUES}


def comments(database: Database) -> dict[str, str]:
    """The comment of every view."""
    return dict(database.query("SELECT name, comment FROM system.tables WHERE database = currentDatabase() AND engine = 'View'").rows)


def columns(database: Database, view: str) -> dict[str, str]:
    """Names and types of a view's columns, in order."""
    return {name: kind for name, kind, *_ in database.query(f"DESCRIBE TABLE {view}").rows}


@pytest.fixture(scope="module")
def filled(module_store: Database) -> Database:
    """A store with random rows of some minutes, rolled up."""
    rng = random.Random(5)
    records: list[Row] = [*random_rank_windows(rng, 6, 60), *random_duplicate_windows(rng, 60), *random_shared_prefixes(rng)]
    records.append(adding({}, "new image", START_US + 30 * WINDOW_US, None, None, 1)[0])
    insert(module_store, records)
    while not rollups.run(module_store).idle:
        pass
    return module_store


def test_each_view_runs_on_an_empty_store(module_store: Database) -> None:
    # Before `filled` is asked for: the store holds nothing yet.
    assert module_store.query("SELECT count() FROM rank_windows").rows == [(0,)]
    asked = ["deploy_effect_of(deploy = 'd')", "recomputed_blocks_between(since = toDateTime(0), until = now())"]
    for view in [*views(module_store), *asked]:
        assert module_store.query(f"SELECT * FROM {view}").rows == [], view


def test_each_comment_says_the_question_the_unit_and_how_to_read_it(module_store: Database) -> None:
    found = comments(module_store)
    assert {f"{family}_{grain}" for family in OF_A_GRAIN for grain in GRAINS} | set(BASES) <= set(found)
    inner = {"life_primary_groups", "rank_window_groups"}  # which group is which: no figures to be read in more than one way
    for view, comment in found.items():
        assert re.match(r"[A-Z][^.]*\?", comment), f"{view} asks nothing: {comment}"
        if view not in inner:
            assert re.search(r"\b[Uu]nit\b", comment), f"{view} names no unit: {comment}"
            assert re.search(r"\b[Rr]egister\b", comment), f"{view} does not say how to read it: {comment}"


def test_every_view_reads_rows_as_replaced(module_store: Database) -> None:
    """By its own text: the embedded store reads everything so, a server does only where it is told."""
    replacing = {
        table
        for (table,) in module_store.query(
            "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%ReplacingMergeTree'"
        ).rows
    }
    assert {"rank_windows", "duplicate_windows", "rank_rollups", "duplicate_rollups", "deploys"} < replacing
    plainly = []
    for view, text in module_store.query(
        "SELECT name, as_select FROM system.tables WHERE database = currentDatabase() AND engine = 'View'"
    ).rows:
        for found in re.finditer(r"\b(?:FROM|JOIN) (?:\w+\.)?(\w+)((?: AS \w+)? FINAL)?", text):
            if found[1] in replacing and not found[2]:
                plainly.append((view, text[: found.end()].rpartition("SELECT ")[2].partition(" FROM")[0].strip()))
    assert plainly == [("top_shared_prefixes", "max(as_of)")], "of a column of the key, which is the same in every version"


def test_each_view_of_data_runs_and_most_have_rows(filled: Database) -> None:
    # The longer grains are read below, and what each is made of with them.
    some = [view for view in views(filled) if not view.endswith(("_1h", "_1d")) and not view.startswith("rollup_")]
    assert len(some) > 15
    empty = {view for view in some if not filled.query(f"SELECT * FROM {view} LIMIT 1").rows}
    assert empty <= {"interruptions", "recomputed_blocks"}, "random rows hold no events and no recomputed blocks"


@pytest.mark.parametrize("family", OF_A_GRAIN)
def test_a_view_has_the_same_columns_at_every_grain(module_store: Database, family: str) -> None:
    first, *others = (columns(module_store, f"{family}_{grain}") for grain in GRAINS)
    assert list(first)
    assert "grain" not in first
    for other in others:
        assert list(other.items()) == list(first.items())
    assert list(columns(module_store, f"rollup_{family}")) == ["grain", *first]
    if family in BASES:
        base = columns(module_store, family)
        shared = {name: kind for name, kind in base.items() if name in first}
        assert list(shared) == list(first), "the windows themselves have these columns too, in this order"
        assert {name: plain_type(kind) for name, kind in shared.items()} == {name: plain_type(kind) for name, kind in first.items()}
        assert set(base) - set(first) == ({"instance_id", "dp_rank", "life_id", "model"} if family == "return_times" else set())


def plain_type(kind: str) -> str:
    """A type without what programs that read it do not see: how it is stored, its width, whether it may be NULL."""
    kind = re.sub(r"LowCardinality\((.*)\)", r"\1", kind)
    kind = re.sub(r"Nullable\((.*)\)", r"\1", kind)
    kind = re.sub(r"DateTime\b.*|DateTime64\(.*\)", "time", kind)
    return re.sub(r"U?Int\d+|Bool", "whole", kind)


_KEYS = {
    "repeat_compute": "instance_id, dp_rank, life_id, workload, model, semantics_version, key_epoch, measurable",
    "repeat_compute_fleet": "semantics_version, key_epoch",
    "repeat_compute_by_workload": "workload, semantics_version, key_epoch",
    "repeat_compute_by_model": "model, semantics_version, key_epoch",
    "gpu_time": "workload, semantics_version, key_epoch, cause",
    "duplicate_footprint": "scope, scope_key, tier, semantics_version, key_epoch",
    "workload_pairs": "workload_a, workload_b, tier, semantics_version, key_epoch",
    "return_times": "workload, semantics_version, key_epoch, what, from_us, to_us",
    "rank_health": "instance_id, dp_rank, semantics_version",
    "coverage": "semantics_version",
}
_ADDITIVE = re.compile(
    r"(evicted|cleared|restarted|concurrent|ambiguous_reload)_(tokens|blocks)"
    r"|(unrated|stored|resolved|removed|unreused)_tokens|tokens|blocks|observed_us|covered_us"
    r"|(lost_|refused_|duplicate_)?batches|unknown_events|scrapes|breaches_found|restarts"
)
_MAXIMA = re.compile(r"(extra|inside|between|shared)_(tokens|blocks)_max|late_changes|as_of|last_batch")


@pytest.mark.parametrize("family", OF_A_GRAIN)
def test_a_longer_window_is_the_sum_of_the_shorter_ones_in_it(filled: Database, family: str) -> None:
    names = columns(filled, f"{family}_5m")
    sums = [name for name in names if _ADDITIVE.fullmatch(name)]
    parts = [f"sum({name}) AS s_{name}" for name in sums]
    parts += [f"max({name}) AS m_{name}" for name in names if _MAXIMA.fullmatch(name)]
    # A mean of which a part is not known is not known.
    parts += [
        f"if(countIf({mean} IS NULL) > 0, NULL, sum(toFloat64({mean}) * covered_us) / greatest(1, sum(covered_us))) AS w_{mean}"
        for mean in names
        if mean.endswith("_mean")
    ]
    assert sums
    for finer, coarser, seconds in (("5m", "1h", 3_600), ("1h", "1d", 86_400)):
        at = f"toDateTime(intDiv(toUnixTimestamp(window_start), {seconds}) * {seconds}, 'UTC')"
        question = f"SELECT {{}} AS at, {_KEYS[family]}, {', '.join(parts)} FROM {family}_{{}} GROUP BY at, {_KEYS[family]} ORDER BY ALL"
        expected = filled.query(question.format(at, finer)).rows
        found = filled.query(question.format("window_start", coarser)).rows
        assert len(found) == len(expected) > 0
        assert [exact(row) for row in found] == [exact(row) for row in expected]
        assert [floats(row) for row in found] == [pytest.approx(floats(row)) for row in expected]


def exact(row: tuple[Any, ...]) -> list[Any]:
    return [value for value in row if not isinstance(value, float)]


def floats(row: tuple[Any, ...]) -> list[float]:
    return [value for value in row if isinstance(value, float)]


def reads(database: Database, query: str) -> dict[str, list[dict[str, Any]]]:
    """Of each table that ``query`` reads, the indexes by which parts and granules are left out."""
    plan = json.loads("\n".join(row[0] for row in database.query(f"EXPLAIN indexes = 1, json = 1 {query}").rows))
    found: dict[str, list[dict[str, Any]]] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("Node Type") == "ReadFromMergeTree":
                found[node["Description"].rpartition(".")[2]] = node["Indexes"]
            for inner in node.values():
                walk(inner)
        elif isinstance(node, list):
            for inner in node:
                walk(inner)

    walk(plan)
    return found


WINDOWS = ("rank_windows", "duplicate_windows", "rank_rollups", "duplicate_rollups")


def test_a_condition_on_time_reads_no_window_outside_of_it(filled: Database) -> None:
    timed = [view for view in views(filled) if "window_start" in columns(filled, view) and view != "deploy_windows"]
    assert len(timed) > 40
    # Days before the data, in the same month: it is the sorting key that leaves them out, not the partition.
    before = f"toDateTime({(START_US - 72 * ONE_HOUR_US) // 1_000_000}, 'UTC')"
    condition = f"window_start >= {before} AND window_start < {before} + INTERVAL 1 HOUR"
    day = f"toDateTime({START_US // 1_000_000 // 86_400 * 86_400}, 'UTC')"
    for view in timed:
        narrowed = condition
        if view.startswith("rollup_"):
            narrowed += " AND grain = '1h'"
        if view in ("duplicate_footprint", "workload_pairs"):  # their key begins with scope and tier
            narrowed += " AND tier = 'GPU'" + (" AND scope = 'fleet'" if view == "duplicate_footprint" else "")
        read = {table: found for table, found in reads(filled, f"SELECT * FROM {view} WHERE {narrowed}").items() if table in WINDOWS}
        assert read, view
        for table, indexes in read.items():
            keys = next(index["Keys"] for index in indexes if index["Type"] == "PrimaryKey")
            assert any("window_start" in key for key in keys), f"{view} does not use the time in the key of {table}"
            # So few rows are one granule, which holds all scopes.
            if table != "duplicate_windows":
                assert indexes[-1]["Selected Granules"] == 0 < indexes[0]["Initial Granules"], f"{view} reads {table}"
        inside = f"window_start >= {day} AND window_start < {day} + INTERVAL 1 DAY"
        read = reads(filled, f"SELECT * FROM {view} WHERE {inside}")
        assert any(indexes[-1]["Selected Granules"] for table, indexes in read.items() if table in WINDOWS), view


def test_views_are_made_anew_by_running_their_file_again(filled: Database) -> None:
    before = views(filled)
    (file,) = (each for each in migrate.shipped() if each.number == 9)
    for statement in file.statements:
        filled.command(statement)
    assert views(filled) == before
