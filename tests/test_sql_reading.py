"""How much of a table is read: a time filter uses the sorting key, also through the views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sql import migrate, store
from sql.database import Database
from tests.sql_records import START_US, WINDOW_US

HOURS, RANKS = 48, 40
HOUR_US = 3600 * 1_000_000
FIRST_US = START_US // HOUR_US * HOUR_US


@pytest.fixture(scope="module")
def two_days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Windows of 40 ranks over two days, in one part."""
    with store.connect(None, tmp_path_factory.mktemp("hours")) as database:
        migrate.apply(database)
        start = f"fromUnixTimestamp64Micro(toInt64({FIRST_US} + intDiv(number, {RANKS}) * {WINDOW_US}), 'UTC')"
        rank = f"'i' || toString(number % {RANKS})"
        for table, names, values in (
            ("rank_windows", "instance_id, dp_rank, life_id", f"{rank}, 0, 'life'"),
            ("duplicate_windows", "scope, scope_key, tier", f"'rank', {rank} || '/0', 'GPU'"),
        ):
            database.command(
                f"INSERT INTO {table} ({names}, version, semantics_version, window_us, window_start) "
                f"SELECT {values}, 1, 1, {WINDOW_US}, {start} FROM numbers({HOURS * 360 * RANKS})"
            )
            database.command(f"OPTIMIZE TABLE {table} FINAL")
        yield database


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("rank_windows", ""),
        ("rank_windows", "AND instance_id = 'i7' AND dp_rank = 0"),
        ("repeat_compute", ""),
        ("rank_window_groups", ""),
        ("duplicate_windows", "AND scope = 'rank' AND tier = 'GPU'"),
        ("duplicate_footprint", "AND scope = 'rank' AND tier = 'GPU'"),
    ],
)
def test_an_hour_is_read_by_the_sorting_key(two_days: Database, table: str, where: str) -> None:
    explained = two_days.query(
        f"EXPLAIN indexes = 1 SELECT * FROM {table} WHERE window_start >= fromUnixTimestamp64Micro({{since:Int64}}, 'UTC') "
        f"AND window_start < fromUnixTimestamp64Micro({{until:Int64}}, 'UTC') {where}",
        {"since": FIRST_US + 5 * HOUR_US, "until": FIRST_US + 6 * HOUR_US},
    ).rows
    lines = [row[0].strip(" │├└─") for row in explained]
    of_key = lines[lines.index("PrimaryKey") :]
    granules = next(line for line in of_key if line.startswith("Granules: "))
    read, of = (int(number) for number in granules.removeprefix("Granules: ").split("/"))
    assert of > HOURS, "too little data to tell"
    assert read <= of / 10, granules
