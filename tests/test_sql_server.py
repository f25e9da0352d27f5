"""The way to a ClickHouse server over HTTP: migrations, inserts and figures, on the same engine behind the same interface."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from console.commands.migrate import migrate as migrate_command
from console.commands.show import show
from sql import migrate
from sql.database import StoreError, StoreUnavailable
from sql.load import load
from sql.store import connect
from sql.totals import totals_from_records
from tests.clickhouse_http import clickhouse_server
from tests.sql_records import insert, random_duplicate_windows, random_rank_windows


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with clickhouse_server(tmp_path_factory.mktemp("server") / "data") as url:
        yield url


def test_a_server_is_migrated_filled_and_read_as_the_embedded_store_is(server: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    ranks, duplicates = random_rank_windows(rng), random_duplicate_windows(rng)
    with connect(f"{server}/figures", tmp_path) as database:
        assert database.kind == "server"
        assert [each.number for each in migrate.apply(database)] == [each.number for each in migrate.shipped()]
        assert migrate.apply(database) == []
        insert(database, [*ranks, *ranks, *duplicates])
        assert load(database) == totals_from_records(ranks, duplicates)
        expected = len({(row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version) for row in ranks})
        assert database.query("SELECT count() FROM rank_windows", final=True).rows == [(expected,)]
        assert database.query_arrow("SELECT 18446744073709551615 AS n").column("n").to_pylist() == [2**64 - 1]
        assert database.query("SELECT 1 AS a, 'x' AS b WHERE 0").column_names == ("a", "b")
    assert not list(tmp_path.iterdir())


def test_an_insert_of_many_blocks_arrives_whole(server: str, tmp_path: Path) -> None:
    rows = 20_000
    with connect(f"{server}/large", tmp_path) as database:
        database.create_database()
        database.command("CREATE TABLE numbers (n Int64, text String) ENGINE = MergeTree ORDER BY n")
        database.insert("numbers", ["n", "text"], [list(range(rows)), ["x" * 300] * rows])
        assert database.query("SELECT count(), sum(n) FROM numbers").rows == [(rows, rows * (rows - 1) // 2)]


def test_a_server_without_the_schema_is_told_from_one_that_fails(server: str, tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--clickhouse-url", f"{server}/nothing", "--data-dir", str(tmp_path)]
    result = runner.invoke(show, options)
    assert result.exit_code == 0
    assert "kvcensus migrate" in result.output
    result = runner.invoke(migrate_command, ["--status", *options])
    assert result.output.split()[:2] == ["0001", "pending"]
    with connect(f"{server}/nothing", tmp_path) as database, pytest.raises(StoreError, match="kvcensus migrate") as caught:
        load(database)
    assert caught.value.schema_missing


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "http://someone:topsecret@127.0.0.1:9"])
def test_a_server_that_is_away_is_one_line_without_the_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        connect(url, tmp_path)
    message = str(caught.value)
    assert "127.0.0.1:9" in message
    assert "refused" in message
    assert "topsecret" not in message
    assert "\n" not in message


def test_a_wrong_password_is_the_servers_own_words(server: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Authentication failed") as caught:
        connect(server.replace("secret", "guess"), tmp_path)
    assert "guess" not in str(caught.value)
    assert caught.value.code == 516


@pytest.mark.parametrize("url", ["clickhouse://host", "localhost:8123", "http://", "http://host:port/"])
def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    from schemas.errors import KvcensusError

    with pytest.raises(KvcensusError, match="--clickhouse-url"):
        connect(url, tmp_path)
