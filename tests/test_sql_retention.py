"""How long rows are kept: the defaults, what a user says, and that rows really go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import KvcensusError
from sql import migrate, retention
from sql.database import Database
from sql.embedded import EmbeddedDatabase
from sql.retention import FOREVER, InForce, Period

TWO_WEEKS, THREE_MONTHS, TWO_YEARS = Period(14), Period(90), Period(2, "YEAR")
AGES = {"facts": TWO_WEEKS, "windows": THREE_MONTHS, "rollups": TWO_YEARS}


@pytest.fixture
def database(module_store: Database, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database without a table, beside that of the module: a process has one engine."""
    with EmbeddedDatabase(Path(module_store.place), request.node.name) as opened:
        yield opened


def kept(database: Database) -> dict[str, str]:
    return {each.table: str(each.period) for each in retention.in_force(database)}


@pytest.mark.parametrize(
    ("text", "period", "said"),
    [
        ("14d", TWO_WEEKS, "14 days"),
        ("1h", Period(1, "HOUR"), "1 hour"),
        ("6W", Period(6, "WEEK"), "6 weeks"),
        ("50y", Period(50, "YEAR"), "50 years"),
        ("Forever", FOREVER, "forever"),
    ],
)
def test_what_a_user_may_write(text: str, period: Period, said: str) -> None:
    assert retention.period(text) == period
    assert str(period) == said


@pytest.mark.parametrize("text", ["", "14", "d", "0d", "-1d", "1.5d", "14 d", "3m", "51y", "20000d", "999999999h", "1d; DROP TABLE x"])
def test_what_is_no_such_time_is_refused(text: str) -> None:
    with pytest.raises(KvcensusError):
        retention.period(text)


def test_a_new_store_has_the_defaults_and_the_rest_stays_for_good(module_store: Database) -> None:
    found = retention.in_force(module_store)
    assert [each.table for each in found] == [table for tables in retention.TABLES.values() for table in tables]
    assert {each.table: each.period for each in found} == {each.table: AGES[each.group] for each in found}
    others = module_store.query(
        "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree' "
        "AND position(engine_full, ' TTL ') = 0 ORDER BY name"
    ).rows
    for_good = {"deploys", "known_ranks", "life_groups", "schema_migrations"}
    assert for_good <= {row[0] for row in others}
    assert not {row[0] for row in others} & {each.table for each in found}


OLD = {"facts": "15 DAY", "windows": "91 DAY", "rollups": "732 DAY"}
YOUNG = {"facts": "13 DAY", "windows": "89 DAY", "rollups": "729 DAY"}
TOLD = [(table, "") for tables in retention.TABLES.values() for table in tables if table not in ("rank_messages", "rank_events")]
TOLD += [("rank_messages", "loss"), ("rank_messages", "declaration"), ("rank_events", "loss"), ("rank_events", "declaration")]
TOLD += [("rank_events", "departure")]
STAY = {("rank_messages", "declaration"), ("rank_events", "declaration"), ("rank_events", "departure")}


@pytest.mark.parametrize(("table", "kind"), TOLD)
def test_rows_go_when_they_are_due_and_not_before(module_store: Database, table: str, kind: str) -> None:
    module_store.command(f"TRUNCATE TABLE {table}")
    module_store.command(f"SYSTEM STOP MERGES {table}")
    group = next(group for group, tables in retention.TABLES.items() if table in tables)
    columns = {
        row[0]
        for row in module_store.query(
            "SELECT name FROM system.columns WHERE database = currentDatabase() AND table = {table:String}", {"table": table}
        ).rows
    }
    # Days apart in engine time as well, so that no part holds both: of some tables only whole parts go.
    times = [name for name in ("at", "observed_at", "window_start", "back_at", "as_of") if name in columns]
    for number, age in enumerate((OLD[group], YOUNG[group])):
        values = dict.fromkeys(times, f"toDateTime('2020-01-0{number + 1} 00:00:00', 'UTC')")
        values |= {"seq": str(number)} if "seq" in columns else {"topic": f"'t{number}'"} if "topic" in columns else {}
        values |= {"inserted_at": f"now() - INTERVAL {age}"} | ({"kind": f"'{kind}'"} if kind else {})
        module_store.command(f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())}")
    assert module_store.query(f"SELECT count() FROM {table} FINAL").rows == [(2,)]
    module_store.command(f"SYSTEM START MERGES {table}")
    module_store.command(f"OPTIMIZE TABLE {table} FINAL")
    left = module_store.query(f"SELECT count(), countIf(inserted_at < now() - INTERVAL {OLD[group]} + INTERVAL 1 HOUR) FROM {table}").rows
    assert left == ([(2, 1)] if (table, kind) in STAY else [(1, 0)])


def test_what_is_given_once_stays_in_force(database: Database) -> None:
    keep = {"facts": Period(12, "HOUR"), "rollups": FOREVER}
    migrate.apply(database, keep=keep)
    # Nothing went by a default in between, and nothing is recorded as wanted: the tables themselves say it.
    assert kept(database)["recomputes"] == "forever"
    changed = retention.apply(database, keep, None)
    assert {each.table for each in changed} == set(retention.TABLES["facts"])
    after = kept(database)
    assert after == {
        **dict.fromkeys(retention.TABLES["facts"], "12 hours"),
        **dict.fromkeys(retention.TABLES["windows"], "90 days"),
        **dict.fromkeys(retention.TABLES["rollups"], "forever"),
    }
    assert retention.changes(retention.in_force(database), keep) == []
    assert migrate.apply(database) == []
    assert retention.apply(database, {}, None) == []
    assert kept(database) == after
    assert {each.table for each in retention.apply(database, {"facts": FOREVER, "rollups": TWO_YEARS}, None)} == {
        *retention.TABLES["facts"],
        *retention.TABLES["rollups"],
    }
    assert kept(database) == {
        **dict.fromkeys(retention.TABLES["facts"], "forever"),
        **dict.fromkeys(retention.TABLES["windows"], "90 days"),
        **dict.fromkeys(retention.TABLES["rollups"], "2 years"),
    }


def test_a_ttl_of_ones_own_is_left_by_the_defaults_and_shown(database: Database) -> None:
    shipped = migrate.shipped()
    migrate.apply(database, [each for each in shipped if each.number < 10])
    database.command("ALTER TABLE rank_windows MODIFY TTL inserted_at + INTERVAL 1 MONTH")
    database.command("ALTER TABLE lifecycle MODIFY TTL inserted_at + INTERVAL 7 DAY")
    database.command("ALTER TABLE rank_messages MODIFY TTL inserted_at + INTERVAL 14 DAY")
    migrate.apply(database)
    found = {each.table: each for each in retention.in_force(database)}
    assert found["rank_windows"].period is None
    assert "toIntervalMonth(1)" in found["rank_windows"].rule
    assert found["lifecycle"].period == Period(7)
    assert found["duplicate_windows"].period == THREE_MONTHS
    # That would take declarations, which hold until the next one.
    assert found["rank_messages"].period is None
    assert retention.changes(found.values(), {"facts": TWO_WEEKS}) == [
        "ALTER TABLE rank_messages MODIFY TTL inserted_at + INTERVAL 14 DAY DELETE WHERE kind != 'declaration'"
    ]


def test_changes_are_for_what_differs() -> None:
    now = [InForce("lifecycle", "windows", FOREVER, ""), InForce("rank_windows", "windows", THREE_MONTHS, "x")]
    assert retention.changes(now, {"windows": THREE_MONTHS}) == ["ALTER TABLE lifecycle MODIFY TTL inserted_at + INTERVAL 90 DAY"]
    assert retention.changes(now, {"windows": FOREVER}) == ["ALTER TABLE rank_windows REMOVE TTL"]
    assert retention.changes(now, {"facts": FOREVER}) == []
