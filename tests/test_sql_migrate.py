"""Migrations: applied once, recorded, safe to repeat and to start twice; a changed file is refused."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from console.commands.migrate import migrate as command
from schemas.errors import KvcensusError
from sql import migrate, rollups
from sql.database import Database, StoreError
from sql.migrate import Migration
from sql.store import connect

REPEATABLE = re.compile(
    r"CREATE (TABLE|MATERIALIZED VIEW|DICTIONARY) IF NOT EXISTS|CREATE OR REPLACE VIEW|DROP (TABLE|VIEW) IF EXISTS"
    r"|ALTER TABLE \S+ ((ADD|DROP|RENAME) (COLUMN|INDEX) IF (NOT )?EXISTS|MODIFY|COMMENT|UPDATE)"
    # Minima, maxima and notes of what changed: the same rows once more change nothing.
    r"|INSERT INTO (known_ranks|fleet_clock|rollup_\w+) SELECT",
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with connect(None, tmp_path) as opened:
        yield opened


def schema(database: Database) -> list[tuple[object, ...]]:
    return database.query("SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase() ORDER BY name").rows


def test_every_shipped_statement_may_run_twice() -> None:
    migrations = migrate.shipped()
    assert [each.number for each in migrations] == list(range(1, len(migrations) + 1))
    for each in migrations:
        for statement in each.statements:
            text = " ".join(re.sub(r"--[^\n]*\n", "", statement).split())
            assert REPEATABLE.match(text), f"{each.number:04d}_{each.name}: {text[:60]}"
            assert "Kafka" not in re.findall(r"ENGINE\s*=\s*(\w+)", text)


def test_twice_is_once(database: Database) -> None:
    shipped = migrate.shipped()
    assert [each.state for each in migrate.status(database)] == ["pending"] * len(shipped)
    assert migrate.apply(database) == shipped
    before = schema(database)
    assert migrate.apply(database) == []
    assert schema(database) == before
    lines = migrate.status(database)
    assert [(each.number, each.name, each.state) for each in lines] == [(each.number, each.name, "applied") for each in shipped]
    assert all(each.applied_at is not None for each in lines)


def test_every_statement_really_may_run_twice(database: Database) -> None:
    migrate.apply(database)
    before = schema(database)
    for each in migrate.shipped():
        if each.number > 1:  # what 0001 made goes on being changed by those after it
            for statement in each.statements:
                database.command(statement)
    assert schema(database) == before


def test_a_store_of_the_first_version_takes_up_the_new_names(database: Database) -> None:
    migrate.apply(database, migrate.shipped()[:2])
    facts = "instance_id, dp_rank, life_id, seq, event_index, block_index, at, observed_at, kind, tier, block_size, block_id, parent_state"
    rows = [
        ("a", 0, "l", n, 0, 0, 5, 5, kind, "GPU", 16, "b", state)
        for n, (kind, state) in enumerate((("STORE", "ROOT"), ("STORE", "UNKNOWN"), ("REMOVE", "UNKNOWN"), ("CLEAR", "UNKNOWN")))
    ]
    database.command(f"INSERT INTO block_events ({facts}) VALUES {', '.join(map(str, rows))}")
    database.command("INSERT INTO rank_events (instance_id, dp_rank, kind) VALUES ('a', 0, 'loss')")
    database.command("INSERT INTO lifecycle (instance_id, dp_rank, kind) VALUES ('a', 0, 'stop')")
    assert [each.number for each in migrate.apply(database)] == [each.number for each in migrate.shipped()[2:]]
    question = "SELECT kind, n_tokens, parent_unknown, parent_id, extra_keys FROM block_events FINAL ORDER BY seq"
    deadline = time.monotonic() + 60
    while database.query(question).rows[0][0] != "store":  # a server rewrites rows in its own time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert database.query(question).rows == [
        ("store", 16, False, None, []),
        ("store", 16, True, None, []),
        ("evict", 16, False, None, []),
        ("clear", 16, False, None, []),
    ]
    assert database.query("SELECT kind, cause, group_idx FROM rank_events FINAL").rows == [("loss", None, 0)]
    assert database.query("SELECT kind, msgs_seen, declared.kind, declared_more FROM lifecycle FINAL").rows == [("stop", None, [], 0)]


def test_every_view_of_figures_says_how_they_may_be_read(database: Database) -> None:
    migrate.apply(database)
    columns: dict[str, set[str]] = {}
    for name, column in database.query(
        "SELECT t.name, c.name FROM system.tables AS t INNER JOIN system.columns AS c ON c.database = t.database AND c.table = t.name "
        "WHERE t.database = currentDatabase() AND (t.engine = 'View' OR t.name IN ('rank_windows', 'duplicate_windows', 'shared_prefixes'))"
    ).rows:
        columns.setdefault(name, set()).add(column)
    assert {f"{side}_{word}" for side in ("before", "after") for word in ("coverage", "register")} | {"why"} <= columns.pop("deploy_effect")
    # No figures: which group counts, what was declared, and for which time.
    for name in ("life_primary_groups", "interruptions", "deploys_declared", "deploy_windows"):
        del columns[name]
    for name in ("rank_windows", "duplicate_windows"):
        assert {"observed_us", "window_us"} <= columns[name]
        columns[name].add("coverage")
    assert len(columns) > 10
    assert {name for name, found in columns.items() if not {"coverage", "register", "reasons"} <= found} == set()


def test_several_started_at_once_all_succeed(database: Database) -> None:
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def run() -> None:
        start.wait()
        try:
            migrate.apply(database)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert migrate.pending(database) == []
    assert {each.state for each in migrate.status(database)} == {"applied"}
    assert len(migrate.status(database)) == len(migrate.shipped())


def test_a_run_cut_short_is_taken_up_again(database: Database) -> None:
    good, bad = "CREATE TABLE IF NOT EXISTS a (x Int8) ENGINE = Memory", "CREATE TABLE IF NOT EXISTS b (x Nonsense) ENGINE = Memory"
    with pytest.raises(StoreError, match=r"migration 0001_two, statement 2: .*Nonsense"):
        migrate.apply(database, [Migration(1, "two", f"{good};\n{bad};\n")])
    assert migrate.applied(database) == []
    mended = [Migration(1, "two", f"{good};\n{bad.replace('Nonsense', 'Int8')};\n")]
    assert migrate.apply(database, mended) == mended
    assert database.query("SELECT count() FROM a, b").rows == [(0,)]


def test_a_file_changed_after_it_was_applied_is_refused(database: Database) -> None:
    text = "CREATE TABLE IF NOT EXISTS a (x Int8) ENGINE = Memory"
    migrate.apply(database, [Migration(1, "one", text)])
    migrate.apply(database, [Migration(1, "one", text), Migration(2, "two", text)])
    edited = [Migration(1, "one", text + " -- just a word"), Migration(2, "two", text), Migration(3, "three", text)]
    with pytest.raises(KvcensusError, match=r"changed after it was applied: 0001_one \(applied .* UTC\)"):
        migrate.apply(database, edited)
    assert [(each.number, each.state) for each in migrate.status(database, edited)] == [(1, "changed"), (2, "applied"), (3, "pending")]


def test_what_a_newer_version_applied_is_left_alone(database: Database) -> None:
    text = "CREATE TABLE IF NOT EXISTS a (x Int8) ENGINE = Memory"
    newer = [Migration(1, "one", text), Migration(2, "of_tomorrow", text)]
    migrate.apply(database, newer)
    assert migrate.apply(database, newer[:1]) == []
    assert [(each.name, each.state) for each in migrate.status(database, newer[:1])] == [("one", "applied"), ("of_tomorrow", "unknown")]


def test_line_ends_of_a_checkout_do_not_count() -> None:
    assert all("\r" not in each.text for each in migrate.shipped())


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--data-dir", str(tmp_path / "data")]

    def run(*arguments: str) -> str:
        result = runner.invoke(command, [*arguments, *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    count = len(migrate.shipped())
    assert [line.split()[1] for line in run("--status").splitlines()] == ["pending"] * count
    dry = run("--dry-run")
    assert "CREATE TABLE IF NOT EXISTS rank_windows" in dry
    assert f"{count} to apply" in dry
    assert not (tmp_path / "data").exists(), "looking must not create a store"
    assert len(json.loads(run("--dry-run", "--json"))["pending"]) == count
    assert run().count("applied ") == count
    assert run() == "up to date\n"
    assert "nothing to apply" in run("--dry-run")
    assert json.loads(run("--json")) == {"applied": [], "retention": []}
    shown = json.loads(run("--status", "--json"))
    assert (shown["mode"], shown["cluster"]) == ("single", None)
    assert "set up for one server" in run("--status")
    states = shown["migrations"]
    assert [each["state"] for each in states] == ["applied"] * count
    assert all(each["applied_at"].endswith("Z") for each in states)
    assert runner.invoke(command, ["--dry-run", "--status", *options]).exit_code == 2
    refused = runner.invoke(command, ["--cluster", "two", *options])
    assert refused.exit_code == 2
    assert "--clickhouse-url" in refused.output


def test_windows_from_before_the_rollups_are_named_and_rolled_up(tmp_path: Path) -> None:
    with connect(None, tmp_path) as database:
        migrate.apply(database, migrate.shipped()[:7])
        database.command("INSERT INTO rank_windows (instance_id, window_start, window_us) VALUES ('a', '2026-11-30 10:00:00', 10000000)")
    result = CliRunner().invoke(command, ["--data-dir", str(tmp_path)], catch_exceptions=False)
    assert "applied 0008_rollups" in result.output
    assert result.output.endswith("at once by `kvcensus rollup`\n")
    with connect(None, tmp_path) as database:
        rollups.run(database)
        assert database.query("SELECT grain, windows FROM rank_rollups ORDER BY grain").rows == [("1d", 1), ("1h", 1), ("5m", 1)]


def test_beside_an_owner_the_command_reports_and_does_not_change(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--data-dir", str(tmp_path)]
    with connect(None, tmp_path, own=True) as owner:
        result = runner.invoke(command, options)
        assert isinstance(result.exception, KvcensusError)
        assert "its owner applies them when it starts" in str(result.exception)
        migrate.apply(owner)
        assert runner.invoke(command, options).output == "up to date\n"
        assert "applied" in runner.invoke(command, ["--status", *options]).output


def test_the_command_says_how_long_rows_are_kept_and_changes_it(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--data-dir", str(tmp_path)]

    def run(*arguments: str) -> str:
        result = runner.invoke(command, [*arguments, *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    planned = run("--dry-run", "--keep-facts", "30d", "--keep-windows", "forever")
    assert "ALTER TABLE recomputes MODIFY TTL inserted_at + INTERVAL 30 DAY;" in planned
    assert "ALTER TABLE rank_rollups MODIFY TTL inserted_at + INTERVAL 2 YEAR;" in planned
    assert not any(
        f"{table} MODIFY TTL inserted_at + INTERVAL {days} DAY" in planned for table, days in (("recomputes", 14), ("rank_windows", 90))
    )
    assert planned.endswith(" to apply, then how long rows are kept is changed\n")
    first = run("--keep-facts", "30d", "--keep-windows", "forever")
    assert "kept 30 days: recomputes (was: forever)" in first
    assert "rank_windows" not in first
    assert run() == "up to date\n"
    status = run("--status")
    assert "kept  30 days  block_events" in status
    assert "kept  forever  rank_windows" in status
    dry = run("--dry-run", "--keep-rollups", "1y")
    assert dry.endswith("-- no migration to apply; how long rows are kept is changed\n")
    assert "ALTER TABLE rank_rollups MODIFY TTL inserted_at + INTERVAL 1 YEAR;" in dry
    assert json.loads(run("--dry-run", "--keep-rollups", "2y", "--json"))["retention"] == []
    document = json.loads(run("--keep-rollups", "1y", "--json"))
    assert document["retention"][0] == {"table": "rank_rollups", "option": "--keep-rollups", "kept": "1 year", "was": "2 years"}
    shown = json.loads(run("--status", "--json"))["retention"]
    assert {"table": "duplicate_rollups", "option": "--keep-rollups", "kept": "1 year"} in shown
    for wrong in (["--keep-facts", "soon"], ["--status", "--keep-facts", "1d"]):
        assert runner.invoke(command, [*wrong, *options]).exit_code == 2
    with connect(None, tmp_path, own=True):
        result = runner.invoke(command, ["--keep-facts", "1d", *options])
        assert isinstance(result.exception, KvcensusError)
        assert "can only be asked" in str(result.exception)
        assert runner.invoke(command, ["--keep-facts", "30d", *options]).output == "up to date\n"
