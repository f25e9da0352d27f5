"""The migrations on a cluster: every statement rewritten, rows that replace each other on one shard, the same answers as one server.

No test here has a keeper: what ``ON CLUSTER`` and replication themselves do is ClickHouse's. Distributed tables are the engine's own, with
one shard; with two shards, tables over both stand in for them, and each row goes where the sharding expression says.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from console.commands.migrate import migrate as command
from schemas.errors import KvcensusError
from sql import cluster, migrate, rollups
from sql.cluster import SHARDING, Cluster
from sql.database import Database, StoreError
from sql.embedded import EmbeddedDatabase
from sql.export import TAKE_VALUES
from sql.load import load
from sql.rows import TableRows
from sql.store import connect
from tests.clickhouse_http import clickhouse_server, without_keeper
from tests.sql_records import insert, random_duplicate_windows, random_rank_windows, random_shared_prefixes

TWO = Cluster("two", "whole")
SHARDS = ("shard_1", "shard_2")
INSERTED = ("rank_windows", "duplicate_windows", "shared_prefixes")
CHOSEN = ("coverage_1h", "duplicate_footprint_1h", "rank_health_1h", "repeat_compute", "repeat_compute_fleet_1h", "workload_pairs")
"""Views for where every question costs a tenth of a second."""
FILLED = (*INSERTED, "known_ranks", "life_groups")


def rewritten(statement: str) -> list[str]:
    return cluster.rewrite([statement], TWO)


def plain(text: str) -> str:
    return " ".join(text.split())


# -- the statements -------------------------------------------------------------------------------------------------


def test_a_table_becomes_two() -> None:
    local, over_all = rewritten(
        "-- why\nCREATE TABLE IF NOT EXISTS deploys (`a` String COMMENT 'ENGINE = x, (', -- so\n b UInt64) "
        "ENGINE = ReplacingMergeTree(b) ORDER BY a COMMENT 'It''s deploys.'"
    )
    assert plain(local) == (
        "-- why CREATE TABLE IF NOT EXISTS deploys_local ON CLUSTER 'two' (`a` String COMMENT 'ENGINE = x, (', -- so b UInt64) "
        "ENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/{shard}/whole/deploys', '{replica}', b) ORDER BY a "
        "COMMENT 'It''s deploys.'"
    )
    assert plain(over_all) == (
        "CREATE TABLE IF NOT EXISTS deploys ON CLUSTER 'two' AS `whole`.deploys_local "
        "ENGINE = Distributed('two', 'whole', 'deploys_local', cityHash64(deploy_id)) COMMENT 'It''s deploys.'"
    )
    for engine in ("AggregatingMergeTree", "AggregatingMergeTree()"):
        local, _ = rewritten(f"CREATE TABLE known_ranks (a String) ENGINE = {engine} ORDER BY a")
        assert "ENGINE = ReplicatedAggregatingMergeTree('/clickhouse/tables/{shard}/whole/known_ranks', '{replica}') ORDER" in local


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("CREATE OR REPLACE VIEW v AS SELECT 1 FROM batches", ["CREATE OR REPLACE VIEW v ON CLUSTER 'two' AS SELECT 1 FROM batches"]),
        ("CREATE VIEW IF NOT EXISTS v AS SELECT 1", ["CREATE VIEW IF NOT EXISTS v ON CLUSTER 'two' AS SELECT 1"]),
        (
            "CREATE MATERIALIZED VIEW IF NOT EXISTS f TO known_ranks AS SELECT a FROM (SELECT a FROM batches) JOIN lifecycle USING a",
            [
                "CREATE MATERIALIZED VIEW IF NOT EXISTS f ON CLUSTER 'two' TO known_ranks_local AS "
                "SELECT a FROM (SELECT a FROM batches_local) JOIN lifecycle USING a"
            ],
        ),
        (
            "CREATE MATERIALIZED VIEW f TO known_ranks AS SELECT batches.a FROM batches",
            ["CREATE MATERIALIZED VIEW f ON CLUSTER 'two' TO known_ranks_local AS SELECT batches.a FROM batches_local AS batches"],
        ),
        (
            "ALTER TABLE batches UPDATE a = f(1, 2), b = 2 WHERE c IN (1, 2)",
            ["ALTER TABLE batches_local ON CLUSTER 'two' UPDATE a = f(1, 2), b = 2 WHERE c IN (1, 2)"],
        ),
        (
            "ALTER TABLE batches ADD COLUMN IF NOT EXISTS a Array(String) DEFAULT [1, 2] -- why, so\n, "
            "MODIFY ORDER BY (b, c), COMMENT COLUMN a 'x, y'",
            [
                "ALTER TABLE batches_local ON CLUSTER 'two' ADD COLUMN IF NOT EXISTS a Array(String) DEFAULT [1, 2] -- why, so , "
                "MODIFY ORDER BY (b, c), COMMENT COLUMN a 'x, y'",
                "ALTER TABLE batches ON CLUSTER 'two' ADD COLUMN IF NOT EXISTS a Array(String) DEFAULT [1, 2], COMMENT COLUMN a 'x, y'",
            ],
        ),
        (
            "ALTER TABLE batches MODIFY COLUMN a Array(Int64) CODEC(T64, ZSTD(1))",
            [
                f"ALTER TABLE {name} ON CLUSTER 'two' MODIFY COLUMN a Array(Int64) CODEC(T64, ZSTD(1))"
                for name in ("batches_local", "batches")
            ],
        ),
        (
            "ALTER TABLE batches MODIFY TTL a + INTERVAL 1 DAY, b + INTERVAL 2 DAY DELETE WHERE c",
            ["ALTER TABLE batches_local ON CLUSTER 'two' MODIFY TTL a + INTERVAL 1 DAY, b + INTERVAL 2 DAY DELETE WHERE c"],
        ),
        (
            "ALTER TABLE known_ranks_fill MODIFY QUERY SELECT a FROM rank_windows",
            ["ALTER TABLE known_ranks_fill ON CLUSTER 'two' MODIFY QUERY SELECT a FROM rank_windows_local"],
        ),
        (
            "INSERT INTO known_ranks (a, b) SELECT a, b FROM rank_windows",
            [
                "INSERT INTO known_ranks (a, b) SETTINGS insert_distributed_sync = 1, parallel_distributed_insert_select = 0 "
                "SELECT a, b FROM rank_windows"
            ],
        ),
        (
            "DROP TABLE IF EXISTS batches",
            ["DROP TABLE IF EXISTS batches ON CLUSTER 'two' SYNC", "DROP TABLE IF EXISTS batches_local ON CLUSTER 'two' SYNC"],
        ),
        ("DROP VIEW IF EXISTS v", ["DROP VIEW IF EXISTS v ON CLUSTER 'two' SYNC"]),
    ],
)
def test_each_kind_of_statement(statement: str, wanted: list[str]) -> None:
    assert [plain(each) for each in rewritten(statement)] == wanted


@pytest.mark.parametrize(
    "statement",
    [
        "RENAME TABLE batches TO other",
        "OPTIMIZE TABLE batches",
        "TRUNCATE TABLE batches",
        "CREATE TABLE IF NOT EXISTS somewhere (a String) ENGINE = MergeTree ORDER BY a",
        "CREATE TABLE deploys (a String) ENGINE = Memory",
        "CREATE TABLE deploys AS batches",
        "CREATE MATERIALIZED VIEW f REFRESH EVERY 1 HOUR TO known_ranks AS SELECT a FROM batches",
        "CREATE MATERIALIZED VIEW f ENGINE = MergeTree AS SELECT a FROM batches",
        "CREATE MATERIALIZED VIEW f TO known_ranks AS SELECT 1",
        "ALTER TABLE batches ATTACH PARTITION 1",
        "ALTER TABLE batches ADD PROJECTION p (SELECT a ORDER BY b)",
        "ALTER TABLE somewhere ADD COLUMN a String",
        "INSERT INTO batches VALUES (1)",
        "INSERT INTO somewhere SELECT 1",
    ],
)
def test_what_is_not_known_is_refused(statement: str) -> None:
    with pytest.raises(KvcensusError, match=r"on a cluster|over a cluster"):
        rewritten(statement)


@pytest.mark.parametrize("name", ["", "two'", "a b", "a;b"])
def test_what_is_no_name_of_a_cluster_is_refused(name: str) -> None:
    with pytest.raises(KvcensusError, match="expected letters"):
        Cluster(name, "kvcensus")


def test_the_history_is_one_table_with_a_replica_for_each_node() -> None:
    made = plain(cluster.history("CREATE TABLE IF NOT EXISTS schema_migrations (a String) ENGINE = ReplacingMergeTree ORDER BY a", TWO))
    assert made == (
        "CREATE TABLE IF NOT EXISTS schema_migrations ON CLUSTER 'two' (a String) "
        "ENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/all/whole/schema_migrations', '{shard}-{replica}') ORDER BY a"
    )


def test_every_shipped_statement_reaches_all_nodes() -> None:
    for each in migrate.shipped():
        for statement in cluster.rewrite(each.statements, TWO):
            text = re.sub(r"^(--[^\n]*\n|\s)*", "", statement)
            assert " ON CLUSTER 'two'" in text or text.startswith("INSERT INTO ")
            engine = re.search(r"\bENGINE\s*=\s*(\w+)", re.sub(r"'[^']*'", "''", text))
            assert engine is None or engine.group(1).startswith(("Replicated", "Distributed"))


def test_rows_that_replace_each_other_share_a_shard(module_store: Database) -> None:
    """What a table is spread by are columns of its sorting key: rows equal in the key are equal in those."""
    keys = dict(
        module_store.query(
            "SELECT name, sorting_key FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree'"
        ).rows
    )
    del keys[cluster.HISTORY]
    assert set(keys) == set(SHARDING)
    for table, key in keys.items():
        columns = re.findall(r"\w+", SHARDING[table].removeprefix("cityHash64"))
        assert columns
        assert set(columns) <= set(re.findall(r"\w+", key)), table


# -- two shards -----------------------------------------------------------------------------------------------------


class Two:
    """Two shards in one engine, with ``whole`` over them, beside ``single``: the same rows, the same questions."""

    def __init__(self, folder: Path) -> None:
        self.single = EmbeddedDatabase(folder, "single")
        self.whole = EmbeddedDatabase(folder, "whole")
        self.shards = [EmbeddedDatabase(folder, name) for name in SHARDS]
        migrate.apply(self.single)
        views: list[str] = []
        for migration in migrate.shipped():
            for statement in cluster.rewrite(migration.statements, TWO):
                text = re.sub(r"^(--[^\n]*\n|\s)*", "", statement)
                if re.match(r"CREATE (OR REPLACE )?VIEW", text):
                    views.append(without_keeper(text))
                elif re.search(r"_local ON CLUSTER|^CREATE MATERIALIZED", text):
                    for shard in self.shards:
                        shard.command(without_keeper(statement))
        for table in SHARDING:
            over_both = f"Merge(REGEXP('^shard_[12]$'), '^{table}_local$')"
            self.whole.command(f"CREATE TABLE {table} AS shard_1.{table}_local ENGINE = {over_both}")
        for view in views:
            self.whole.command(view)

    def insert(self, rows: TableRows) -> None:
        """The rows of each table where its sharding expression says, as a Distributed table of two shards sends them."""
        for batch in rows.batches():
            self.single.insert(batch.table, batch.column_names, batch.columns)
            names = ", ".join(f"`{name}`" for name in batch.column_names)
            self.whole.command(f"CREATE TABLE arriving ENGINE = Memory AS SELECT {names} FROM {batch.table} WHERE 0")
            self.whole.insert("arriving", batch.column_names, batch.columns)
            for number, shard in enumerate(self.shards):
                place = f"{SHARDING[batch.table]} % 2 = {number}"
                shard.command(f"INSERT INTO {batch.table}_local ({names}) SELECT {names} FROM whole.arriving WHERE {place}")
            self.whole.command("DROP TABLE arriving SYNC")
        rows.clear()

    def close(self) -> None:
        for database in (*self.shards, self.whole, self.single):
            database.close()


def some_records() -> list[Any]:
    rng = random.Random(11)
    return [*random_rank_windows(rng, ranks=6), *random_duplicate_windows(rng), *random_shared_prefixes(rng)]


@pytest.fixture(scope="module")
def two(module_store: Database) -> Iterator[Two]:
    both = Two(Path(module_store.place))
    rows = TableRows()
    records = some_records()
    for order in (records, records[::-1]):  # every row twice, lower versions after higher ones as well
        for record in order:
            rows.add(record)
        both.insert(rows)
    rollups.run(both.single)
    for number, shard in enumerate(both.shards):
        for table in ("rank_rollups", "duplicate_rollups"):
            shard.command(f"INSERT INTO {table}_local SELECT * FROM single.{table} WHERE {SHARDING[table]} % 2 = {number}")
    yield both
    both.close()


def answers(database: Database, names: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of each. Sums of floats differ in their last digits with the order in which shards are added up."""
    found = {}
    for name in names:
        but = " EXCEPT (inserted_at)" if name in INSERTED else ""
        rows = database.query(f"SELECT *{but} FROM {name}", final=True).rows
        found[name] = sorted([tuple(float(f"{each:.9g}") if isinstance(each, float) else each for each in row) for row in rows], key=str)
    return found


def views(database: Database) -> list[str]:
    """All but those that take values."""
    return [
        row[0]
        for row in database.query(
            "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine = 'View' ORDER BY name"
        ).rows
        if row[0] not in TAKE_VALUES
    ]


def test_both_shards_hold_a_part_and_no_key_lies_on_two(two: Two) -> None:
    for table in FILLED:
        counts = [shard.query(f"SELECT count() FROM {table}_local").rows[0][0] for shard in two.shards]
        assert all(counts), table
        assert sum(counts) == two.single.query(f"SELECT count() FROM {table}").rows[0][0], table


def test_two_shards_answer_as_one_server(two: Two) -> None:
    names = views(two.whole)
    assert names == views(two.single)
    expected = answers(two.single, [*names, *FILLED])
    assert expected["repeat_compute"]
    assert expected["repeat_compute_1h"]
    assert answers(two.whole, [*names, *FILLED]) == expected
    assert load(two.whole) == load(two.single)


# -- Distributed tables ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with clickhouse_server(tmp_path_factory.mktemp("node") / "data", cluster="only") as url:
        yield url


def test_a_cluster_is_migrated_filled_and_read_as_one_server_is(node: str, tmp_path: Path) -> None:
    runner = CliRunner()

    def run(database: str, *arguments: str) -> str:
        result = runner.invoke(
            command, ["--clickhouse-url", f"{node}/{database}", "--data-dir", str(tmp_path), *arguments], catch_exceptions=False
        )
        assert result.exit_code == 0
        return result.output

    def refused(database: str, *arguments: str) -> str:
        result = runner.invoke(command, ["--clickhouse-url", f"{node}/{database}", "--data-dir", str(tmp_path), *arguments])
        assert isinstance(result.exception, KvcensusError)
        return str(result.exception)

    dry = run("fleet", "--dry-run", "--cluster", "only")
    assert "CREATE TABLE IF NOT EXISTS rank_windows_local ON CLUSTER 'only'" in dry
    assert json.loads(run("fleet", "--status", "--json"))["mode"] is None
    assert run("fleet", "--cluster", "only", "--keep-facts", "30d").count("applied ") == len(migrate.shipped())
    shown = json.loads(run("fleet", "--status", "--json"))
    assert (shown["mode"], shown["cluster"]) == ("cluster", "only")
    kept = {each["table"]: each["kept"] for each in shown["retention"]}
    assert (kept["recomputes"], kept["rank_windows"], kept["rank_rollups"]) == ("30 days", "90 days", "2 years")
    # From now on the database says what it is.
    assert run("fleet") == "up to date\n"
    assert "_local ON CLUSTER 'only' MODIFY TTL" in run("fleet", "--dry-run", "--keep-windows", "1y")
    assert "set up for the cluster only, not for other" in refused("fleet", "--cluster", "other")
    run("alone")
    assert "set up for one server" in refused("alone", "--cluster", "only")

    with connect(f"{node}/fleet", tmp_path) as fleet, connect(f"{node}/alone", tmp_path) as alone:
        assert [each.number for each in migrate.pending(fleet)] == []
        for database in (fleet, alone):
            insert(database, some_records() * 2)
            assert not rollups.run(database).idle
        assert views(fleet) == views(alone)
        names = [name for name in views(fleet) if name in CHOSEN]
        assert len(names) == len(CHOSEN)
        assert answers(fleet, names) == answers(alone, names)
        assert load(fleet) == load(alone)


def test_several_shards_can_answer_every_view_under_any_users_settings(node: str, tmp_path: Path) -> None:
    """Looking something up in one Distributed table from another is refused by default; our own connection says what to do."""
    deny = "SETTINGS distributed_product_mode = 'deny'"
    with connect(f"{node}/several", tmp_path) as database:
        migrate.apply(database, cluster="only_twice")
        asked = ", ".join(f"(SELECT count() FROM (SELECT * FROM {name}))" for name in views(database))
        assert database.query(f"SELECT {asked} {deny}").rows
        looked_up = "SELECT count() FROM batches WHERE seq IN (SELECT seq FROM rank_messages)"
        assert database.query(looked_up).rows == [(0,)]
        with pytest.raises(StoreError, match="distributed_product_mode"):
            database.query(f"{looked_up} {deny}")


def test_inserts_wait_for_the_shards_and_repeat_what_is_equal(node: str, tmp_path: Path) -> None:
    names = ("insert_distributed_sync", "insert_deduplicate", "parallel_distributed_insert_select")
    said = ", ".join(f"{name} Int64 DEFAULT toInt64(getSetting('{name}'))" for name in names)
    with connect(f"{node}/settings", tmp_path) as database:
        database.create_database()
        database.command(f"CREATE TABLE said (n Int8, {said}) ENGINE = Memory")
        database.insert("said", ["n"], [[1]])
        database.command("INSERT INTO said (n) SELECT 2")
        assert database.query("SELECT * FROM said ORDER BY n").rows == [(1, 1, 0, 0), (2, 1, 0, 0)]
        assert database.query("SELECT getSetting('distributed_product_mode')").rows == [("global",)]
