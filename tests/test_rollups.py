"""The rollups hold what counting the windows the slow way gives, whatever order rows came in and however rounds went."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from schemas.records import DuplicateWindow, RankWindow
from sql import rollups
from sql.database import Database, QueryResult, StoreError
from sql.rows import Row
from tests import rollup_reference as reference
from tests.rollup_records import batches, empty, random_windows
from tests.sql_records import insert


def check(database: Database, records: list[Any]) -> None:
    """Both tables hold what ``records`` come to."""
    same(reference.stored_ranks(database), reference.rank_rollups([row for row in records if isinstance(row, RankWindow)]))
    same(reference.stored_duplicates(database), reference.duplicate_rollups([row for row in records if isinstance(row, DuplicateWindow)]))


def same(stored: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Named by the rows that differ: whole tables are unreadable."""
    assert sorted(stored.keys() - wanted.keys(), key=str)[:3] == []
    assert sorted(wanted.keys() - stored.keys(), key=str)[:3] == []
    for key, values in wanted.items():
        assert (key, stored[key]) == (key, values)


@pytest.mark.parametrize("seed", range(2))
def test_any_order_and_any_batches_come_to_the_same(module_store: Database, seed: int) -> None:
    rng = random.Random(seed)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    for batch in batches(rng, [*ranks, *duplicates]):
        insert(module_store, batch)
        if rng.random() < 0.5:
            rollups.run(module_store)
    rollups.run(module_store)
    check(module_store, [*ranks, *duplicates])


@pytest.mark.parametrize("seed", range(2))
def test_every_batch_given_twice_in_another_order_changes_nothing(module_store: Database, seed: int) -> None:
    rng = random.Random(100 + seed)
    empty(module_store)
    records = [record for kind in random_windows(rng) for record in kind]
    given = batches(rng, records)
    for batch in given:
        insert(module_store, batch)
    rollups.run(module_store)
    before = reference.stored_ranks(module_store), reference.stored_duplicates(module_store)
    rng.shuffle(given)
    for batch in given:
        insert(module_store, batch)
        assert not rollups.run(module_store).idle
    same(reference.stored_ranks(module_store), before[0])
    same(reference.stored_duplicates(module_store), before[1])
    check(module_store, records)


@pytest.mark.parametrize("seed", [4])
def test_windows_that_say_something_else_under_a_higher_version_leave_nothing_behind(module_store: Database, seed: int) -> None:
    rng = random.Random(200 + seed)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    insert(module_store, [*ranks, *duplicates])
    rollups.run(module_store)
    parts = len(reference.stored_ranks(module_store))
    # All of one workload and key now: fewer parts than before. And whoever had departed has not, and the other way round.
    again: list[Any] = [
        msgspec.structs.replace(
            row, version=row.version + 100, workload="w", model="m", kv_connector=None, key_epoch=7, departed=not row.departed
        )
        for row in reference.newest(ranks)
    ]
    again += [msgspec.structs.replace(row, version=row.version + 100, key_epoch=7) for row in reference.newest(duplicates)]
    for batch in batches(rng, again):
        insert(module_store, batch)
        rollups.run(module_store)
    assert len(reference.stored_ranks(module_store)) < parts
    check(module_store, [*ranks, *duplicates, *again])


class _CutShort(StoreError):
    """What the store says from the chosen statement on."""


class _Failing(Database):
    """A store that fails at the ``left``-th statement that writes, and at all that follow."""

    def __init__(self, inner: Database, left: int) -> None:
        self._inner, self.left = inner, left
        self.kind, self.place = inner.kind, inner.place

    def _write(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _CutShort("cut short")

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> QueryResult:
        return self._inner.query(sql, parameters, final=final)

    def query_arrow(self, sql: str, parameters: Mapping[str, Any] | None = None, *, final: bool = False) -> Any:
        return self._inner.query_arrow(sql, parameters, final=final)

    def insert(self, table: str, column_names: Sequence[str], columns: Sequence[Sequence[Any]]) -> int:
        self._write()
        return self._inner.insert(table, column_names, columns)

    def command(self, sql: str) -> None:
        self._write()
        self._inner.command(sql)

    def create_database(self) -> None:
        self._inner.create_database()

    def close(self) -> None:
        """Not ours to close."""


@pytest.mark.parametrize("seed", range(2))
def test_a_round_cut_short_anywhere_is_made_good_by_the_next(module_store: Database, seed: int) -> None:
    rng = random.Random(300 + seed)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    cuts = 0
    for batch in batches(rng, [*ranks, *duplicates], most=4):
        insert(module_store, batch)
        left = rng.randrange(16)
        while True:  # again and again, each time a little further
            try:
                rollups.run(_Failing(module_store, left))
            except _CutShort:
                cuts, left = cuts + 1, left + rng.randrange(1, 12)
            else:
                break
            if rng.random() < 0.3:
                break  # the next batch comes first
    assert cuts
    while not rollups.run(module_store).idle:
        pass
    check(module_store, [*ranks, *duplicates])


class _Overtaken(_Failing):
    """A store that holds back what the ``left``-th statement counted until ``meanwhile`` has run: it reads early and writes late."""

    def __init__(self, inner: Database, left: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner, left)
        self._meanwhile = meanwhile

    def _write(self) -> None:
        """Nothing fails here."""

    def command(self, sql: str) -> None:
        table = next((name for name in ("rank_rollups", "duplicate_rollups") if f"INSERT INTO {name} " in sql), None)
        self.left -= table is not None
        if table is None or self.left:
            self._inner.command(sql)
            return
        self._inner.command(f"CREATE OR REPLACE TABLE held AS {table}")
        self._inner.command(sql.replace(f"INSERT INTO {table} ", "INSERT INTO held ", 1))
        self._meanwhile()
        self._inner.command(f"INSERT INTO {table} SELECT * FROM held")
        self._inner.command("DROP TABLE held")


@pytest.mark.parametrize("held", [1, 7])
def test_a_round_overtaken_by_another_is_put_right_once_inserts_have_settled(module_store: Database, held: int) -> None:
    rng = random.Random(400 + held)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    earlier: list[Row] = [*ranks[::2], *duplicates[::2]]
    later: list[Row] = [*ranks[1::2], *duplicates[1::2]]
    fewer = [msgspec.structs.replace(row, version=row.version + 100, workload=None) for row in reference.newest(ranks)[::3]]

    overtook = []

    def meanwhile() -> None:
        insert(module_store, [*later, *fewer])
        overtook.append(rollups.run(module_store))

    insert(module_store, earlier)
    rollups.run(_Overtaken(module_store, held, meanwhile))
    assert overtook
    rollups.run(module_store, settled_s=0)
    check(module_store, [*ranks, *duplicates, *fewer])


def test_an_insert_that_ran_while_the_schema_was_brought_up_to_date_is_not_missed(module_store: Database) -> None:
    rng = random.Random(600)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    insert(module_store, [*ranks, *duplicates])
    noted = ("rollup_touched", "rollup_spans", "fleet_clock")
    clock = module_store.query("SELECT * FROM fleet_clock ORDER BY ALL", final=True).rows
    for table in noted:  # as of an insert that began before there was anybody to note it, and ended after what was there had been noted
        module_store.command(f"TRUNCATE TABLE {table}")
    rollups.run(module_store)
    check(module_store, [*ranks, *duplicates])
    assert module_store.query("SELECT * FROM fleet_clock ORDER BY ALL", final=True).rows == clock


def _set_ahead(database: Database, seconds: int) -> None:
    """As if all that the store did until now had been done by a clock that was ``seconds`` ahead."""
    us = seconds * 1_000_000
    later = f"addSeconds({{}}, {seconds})"
    database.command(f"INSERT INTO rollup_marks SELECT name, max({later.format('mark')}) FROM rollup_marks GROUP BY name")
    for table in ("rank_rollups", "duplicate_rollups"):
        database.command(f"INSERT INTO {table} SELECT * REPLACE (version + {us} AS version) FROM {table} FINAL")
    database.command("CREATE OR REPLACE TABLE held ENGINE = Memory AS SELECT * FROM rollup_touched")
    database.command("TRUNCATE TABLE rollup_touched")
    database.command(f"INSERT INTO rollup_touched SELECT * REPLACE ({later.format('touched_at')} AS touched_at) FROM held")
    database.command("DROP TABLE held")


@pytest.mark.parametrize("ahead", [60, 200_000])
def test_a_store_whose_clock_goes_back_counts_on_and_once_more_when_it_has_caught_up(
    module_store: Database, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    rng = random.Random(500 + ahead)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    insert(module_store, [*ranks[::3], *duplicates[::3]])
    rollups.run(module_store)
    insert(module_store, [ranks[1]])  # just before the step, and no round saw it
    _set_ahead(module_store, ahead)
    insert(module_store, [*ranks[1::3], *duplicates[1::3]])
    fewer = [msgspec.structs.replace(row, version=row.version + 100, workload=None) for row in reference.newest(ranks[::3])]
    insert(module_store, fewer)
    with pytest.raises(_CutShort):
        rollups.run(_Failing(module_store, 3))
    while not rollups.run(module_store).idle:
        pass
    check(module_store, [*ranks[::3], *ranks[1::3], *duplicates[::3], *duplicates[1::3], *fewer])
    _set_ahead(module_store, 3_600)  # and once more, before it has caught up
    insert(module_store, [*ranks[2::3], *duplicates[2::3]])
    fewer += [msgspec.structs.replace(row, version=row.version + 100, workload=None) for row in reference.newest(ranks[1::3])]
    insert(module_store, fewer)
    while not rollups.run(module_store).idle:
        pass
    check(module_store, [*ranks, *duplicates, *fewer])
    plain = rollups._now_us
    monkeypatch.setattr(rollups, "_now_us", lambda database: plain(database) + (ahead + 20_000) * 1_000_000)
    fewer += [msgspec.structs.replace(row, version=row.version + 200, model="z") for row in reference.newest(ranks)[::2]]
    insert(module_store, fewer)
    later = f"addSeconds(touched_at, {ahead + 20_000})"
    module_store.command(f"INSERT INTO rollup_touched SELECT * REPLACE ({later} AS touched_at) FROM rollup_touched")
    rollups.run(module_store)
    check(module_store, [*ranks, *duplicates, *fewer])
