"""The rollups where something is missing: ranks, rows that retention took, whole hours; and what figures they add up to."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from schemas.records import DuplicateWindow, RankWindow
from sql import load, rollup_absent, rollups
from sql.database import Database
from sql.result_rows import GROUP_SUMS
from sql.rollup_absent import Piece
from sql.total_types import CAUSE_FIELDS
from tests import rollup_reference as reference
from tests.rollup_records import DAY_US, batches, empty, random_windows
from tests.sql_records import START_US, WINDOW_US, duplicate_window, group, insert, random_rank_windows, rank_window
from tests.test_rollups import check, same

HOUR = 3_600_000_000
CELL = 300_000_000
NOON = START_US // DAY_US * DAY_US + 12 * HOUR


def row(at_us: int, **fields: Any) -> RankWindow:
    """A window of 5 minutes of rank ``a/0``."""
    times = {"window_start_us": at_us, "window_us": CELL, "observed_us": CELL, "first_batch_us": at_us, "last_batch_us": at_us + 1}
    return rank_window(**(times | fields))


def absent(database: Database, grain: str = "5m") -> dict[tuple[str, int], list[float]]:
    """(instance, rank) to the windows of ``grain`` in which it is said to be missing, in windows of 5 minutes since noon."""
    rows = database.query(
        f"SELECT instance_id, dp_rank, toUnixTimestamp(window_start) FROM rank_rollups FINAL WHERE grain = '{grain}' AND windows = 0 "
        "ORDER BY ALL"
    ).rows
    found: dict[tuple[str, int], list[float]] = {}
    for instance, rank, start in rows:
        found.setdefault((instance, rank), []).append((start * 1_000_000 - NOON) / CELL)
    return found


# -- who is missing ---------------------------------------------------------------------------------------------------


def test_a_silent_rank_is_missing_until_it_is_heard_of_again(module_store: Database) -> None:
    empty(module_store)
    steady = [row(NOON + number * CELL) for number in range(8)]
    other = [row(NOON + number * CELL, instance_id="b", workload="chat") for number in (1, 2, 6)]
    insert(module_store, [*steady, *other])
    rollups.run(module_store)
    assert absent(module_store) == {("b", 0): [3, 4, 5, 7]}
    told = module_store.query(
        "SELECT workload, expected_us, observed_us, reasons, register, life_id FROM rank_rollups FINAL "
        "WHERE grain = '5m' AND windows = 0 LIMIT 1"
    ).rows
    assert told == [("chat", CELL, 0, ["absent"], "indeterminate", "")]
    late = row(NOON + 4 * CELL, instance_id="b", workload="chat")
    insert(module_store, [late])
    rollups.run(module_store)
    assert absent(module_store) == {("b", 0): [3, 5, 7]}
    check(module_store, [*steady, *other, late])


def test_a_departure_told_late_takes_the_absence_back(module_store: Database) -> None:
    empty(module_store)
    steady = [row(NOON + number * CELL) for number in range(30)]
    last = row(NOON + CELL, instance_id="b")
    insert(module_store, [*steady, row(NOON, instance_id="b"), last])
    rollups.run(module_store)
    assert absent(module_store)["b", 0] == list(range(2, 30))
    departed = msgspec.structs.replace(last, version=2, departed=True)
    insert(module_store, [departed])
    assert rollups.run(module_store).absences == 28
    assert absent(module_store) == absent(module_store, "1h") == absent(module_store, "1d") == {}
    check(module_store, [*steady, row(NOON, instance_id="b"), departed])


def test_an_earlier_first_window_told_late_makes_the_rank_expected_from_there(module_store: Database) -> None:
    empty(module_store)
    steady = [row(NOON + number * CELL) for number in range(30)]
    begins = row(NOON + 20 * CELL + WINDOW_US, window_us=WINDOW_US, instance_id="b")
    insert(module_store, [*steady, begins])
    rollups.run(module_store)
    expected = "SELECT expected_us FROM rank_rollups FINAL WHERE grain = '5m' AND instance_id = 'b' AND windows > 0 ORDER BY window_start"
    assert module_store.query(expected).rows == [(CELL - WINDOW_US,)]
    earlier = row(NOON + 10 * CELL, instance_id="b")
    insert(module_store, [earlier])
    rollups.run(module_store)
    assert module_store.query(expected).rows == [(CELL,), (CELL,)]
    assert absent(module_store)["b", 0] == [*range(11, 20), *range(21, 30)]
    check(module_store, [*steady, begins, earlier])


def test_an_hour_in_which_nobody_was_heard_of_counts_once_somebody_is_again(module_store: Database) -> None:
    empty(module_store)
    before, after = row(NOON), row(NOON + 15 * CELL, life_id="life-2")
    insert(module_store, [before])
    rollups.run(module_store)
    assert absent(module_store) == {}
    insert(module_store, [after])
    rollups.run(module_store)
    assert absent(module_store) == {("a", 0): list(range(1, 15))}
    hours = module_store.query(
        "SELECT sum(observed_us), sum(expected_us) FROM rank_rollups FINAL WHERE grain = '1h' GROUP BY window_start ORDER BY window_start"
    ).rows
    assert hours == [(CELL, HOUR), (CELL, 4 * CELL)]
    check(module_store, [before, after])


def test_a_clock_far_ahead_makes_no_years_of_absence(module_store: Database) -> None:
    empty(module_store)
    rows = [row(NOON), row(NOON + CELL), row(NOON + 400 * DAY_US, instance_id="b"), row(NOON + CELL, instance_id="c")]
    insert(module_store, rows)
    rollups.run(module_store)
    assert absent(module_store) == {("a", 0): [400 * 288], ("c", 0): [400 * 288]}
    rows.append(row(NOON + 2 * CELL))
    insert(module_store, rows[-1:])
    rollups.run(module_store)
    assert absent(module_store)["c", 0] == [2, 400 * 288]
    check(module_store, rows)


@pytest.mark.parametrize(
    ("since", "last_before", "spans", "wanted"),
    [
        (600, None, [], []),
        (600, None, [(600, 601)], [Piece(600, 900, None)]),
        (600, None, [(300, 700), (900, 1200)], [Piece(600, 1200, 300)]),
        # Heard of last in the window from 0: what lies between is looked at only now.
        (900, 200, [(900, 1000)], [Piece(300, 1200, 0)]),
        (86_400, 85_800, [(86_400, 86_500)], [Piece(85_800, 86_400, 85_500), Piece(86_400, 86_700, 86_100)]),
        # Too long ago.
        (864_000, 300, [(864_000, 864_100)], [Piece(864_000, 864_300, 0)]),
        (600, None, [(600, 700), (864_000, 864_100)], [Piece(600, 900, None), Piece(864_000, 864_300, 600)]),
    ],
)
def test_where_somebody_may_be_missing(since: int, last_before: int | None, spans: list[tuple[int, int]], wanted: list[Piece]) -> None:
    assert rollup_absent.pieces(since, last_before, spans) == wanted


# -- what retention took ----------------------------------------------------------------------------------------------


def delete(database: Database, table: str, condition: str) -> None:
    """As retention does: rows are gone, and nothing says so."""
    database.command(f"ALTER TABLE {table} DELETE WHERE {condition} SETTINGS mutations_sync = 2")


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_retention_took_stay_in_the_rollups(module_store: Database, seed: int) -> None:
    rng = random.Random(500 + seed)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    insert(module_store, [*ranks, *duplicates])
    rollups.run(module_store)
    middle, instance = sorted((row.window_start_us, row.instance_id) for row in ranks)[len(ranks) // 2]
    for table in ("rank_windows", "duplicate_windows"):
        delete(module_store, table, f"window_start < fromUnixTimestamp64Micro({middle})")
    rollups.touch(module_store, None, None)
    assert not rollups.run(module_store).idle
    check(module_store, [*ranks, *duplicates])
    for table in ("rank_windows", "duplicate_windows"):
        delete(module_store, table, "1")
    late = row(middle, instance_id=instance, dp_rank=9, window_us=WINDOW_US)
    insert(module_store, [late, duplicate_window(scope="model", window_start_us=middle)])
    assert rollups.run(module_store).expired
    stored = reference.stored_ranks(module_store)
    wanted = reference.rank_rollups(ranks)
    same(_heard({key: values for key, values in stored.items() if key[3] != 9}), _heard(wanted))
    copies = reference.stored_duplicates(module_store)
    same({key: values for key, values in copies.items() if key[2] != "model"}, reference.duplicate_rollups(duplicates))


def _heard(rows: dict[reference.Key, reference.Values]) -> dict[reference.Key, reference.Values]:
    return {key: values for key, values in rows.items() if values["windows"]}


def test_late_rows_join_what_was_counted_of_rows_that_are_gone(module_store: Database) -> None:
    """Another life in the same window counts beside; more of the life that lost rows does not, as what it would replace is unknown."""
    empty(module_store)
    counted = [row(NOON + number * WINDOW_US, window_us=WINDOW_US, groups=[group(stored_tokens=10)]) for number in range(20)]
    insert(module_store, counted)
    rollups.run(module_store)
    delete(module_store, "rank_windows", f"window_start < fromUnixTimestamp64Micro({NOON + 5 * WINDOW_US})")
    more = [row(NOON + number * WINDOW_US, window_us=WINDOW_US, groups=[group(stored_tokens=1)]) for number in range(20, 30)]
    beside = [msgspec.structs.replace(each, life_id="life-2") for each in more]
    insert(module_store, [*more, *beside])
    assert rollups.run(module_store).expired == 1
    for grain in ("5m", "1h", "1d"):
        tokens = module_store.query(
            "SELECT life_id, windows, arraySum(`groups.stored_tokens`), expected_us FROM rank_rollups FINAL "
            f"WHERE grain = '{grain}' ORDER BY 1"
        ).rows
        assert tokens == [("life-1", 20, 200, 20 * WINDOW_US), ("life-2", 10, 10, CELL - 20 * WINDOW_US)]


# -- what they add up to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1])
def test_every_counter_and_cause_adds_up_to_that_of_the_windows_at_every_grain(module_store: Database, seed: int) -> None:
    rng = random.Random(600 + seed)
    empty(module_store)
    ranks, duplicates = random_windows(rng)
    for batch in batches(rng, [*ranks, *duplicates], most=3):
        insert(module_store, batch)
        rollups.run(module_store)
    names = [f"arraySum(`groups.{name}`)" for name in GROUP_SUMS] + ["batches", "lost_batches", "breaches_found", "observed_us"]
    sums = ", ".join(f"sum({name})" for name in names)
    apart = "life_id, semantics_version, key_epoch"
    wanted = module_store.query(f"SELECT {apart}, {sums} FROM rank_windows FINAL GROUP BY {apart} ORDER BY ALL").rows
    assert len({row[1:3] for row in wanted}) > 2
    copies = ", ".join(f"sum({name})" for name in reference.SUMS)
    of_copies = "scope, scope_key, tier, semantics_version, key_epoch"
    footprint = module_store.query(f"SELECT {of_copies}, {copies} FROM duplicate_windows FINAL GROUP BY {of_copies} ORDER BY ALL").rows
    for grain in reference.GRAINS:
        where = f"grain = '{grain}'"
        found = module_store.query(
            f"SELECT {apart}, {sums} FROM rank_rollups FINAL WHERE {where} AND windows > 0 GROUP BY {apart} ORDER BY ALL"
        ).rows
        assert found == wanted
        found = module_store.query(
            f"SELECT {of_copies}, {copies} FROM duplicate_rollups FINAL WHERE {where} GROUP BY {of_copies} ORDER BY ALL"
        ).rows
        assert found == footprint


@pytest.mark.parametrize("seed", range(1))
def test_spans_of_whole_windows_come_to_the_figures_of_the_windows(module_store: Database, seed: int) -> None:
    rng = random.Random(700 + seed)
    empty(module_store)
    begin = START_US // HOUR * HOUR
    ranks = [
        msgspec.structs.replace(
            each, window_start_us=at, window_us=WINDOW_US, observed_us=min(each.observed_us, WINDOW_US), semantics_version=2
        )
        for each in random_rank_windows(rng, windows=150)
        for at in [begin + (each.window_start_us - START_US) // WINDOW_US * WINDOW_US]
        if at < begin + 2 * HOUR
    ]
    insert(module_store, ranks)
    rollups.run(module_store)
    for grain, since, until in (("5m", 3 * CELL, 9 * CELL), ("5m", 0, 4 * CELL), ("1h", 0, HOUR), ("1h", 0, 2 * HOUR)):
        totals = load.load(module_store, begin + since, begin + until)
        wanted: dict[Any, list[int]] = {}
        for life in totals.lives:
            key = (life.instance_id, life.dp_rank, life.life_id, life.workload, life.key_epoch, life.canary)
            sums = wanted.setdefault(key, [0] * (len(CAUSE_FIELDS) * 3 + 2))
            values = [life.observed_us, life.batches]
            for cause in CAUSE_FIELDS:
                for unit in ("tokens", "blocks", "gpu_us"):
                    values.append(sum(getattr(each, f"recompute_{cause}_{unit}") for each in life.groups))
            wanted[key] = [one + other for one, other in zip(sums, values, strict=True)]
        counters = [
            f"sum(arraySum(`groups.recompute_{cause}_{unit}`))" for cause in CAUSE_FIELDS for unit in ("tokens", "blocks", "gpu_us")
        ]
        found = module_store.query(
            f"SELECT instance_id, dp_rank, life_id, workload, key_epoch, canary, sum(observed_us), sum(batches), {', '.join(counters)} "
            f"FROM rank_rollups FINAL WHERE grain = '{grain}' AND windows > 0 "
            f"AND window_start >= toDateTime({(begin + since) // 10**6}, 'UTC') "
            f"AND window_start < toDateTime({(begin + until) // 10**6}, 'UTC') GROUP BY ALL"
        ).rows
        assert {row[:6]: list(row[6:]) for row in found} == {key: values for key, values in wanted.items() if key[2]}


def test_a_long_row_is_shared_out_to_the_last_microsecond(module_store: Database) -> None:
    empty(module_store)
    long = row(
        NOON + WINDOW_US, window_us=7 * HOUR + 13, observed_us=4 * HOUR + 7, first_batch_us=0, last_batch_us=0, batches=0, lost_batches=3
    )
    wide = duplicate_window(
        window_start_us=NOON + WINDOW_US, window_us=7 * HOUR + 13, as_of_us=NOON + 5 * HOUR + 1, inside_token_us=10**15 + 1
    )
    insert(module_store, [long, wide])
    rollups.run(module_store)
    for grain, windows in (("5m", 85), ("1h", 8), ("1d", 1)):
        found = module_store.query(
            f"SELECT count(), sum(observed_us), sum(lost_batches), max(observed_us) FROM rank_rollups FINAL WHERE grain = '{grain}'"
        ).rows
        assert found[0][:3] == (windows, 4 * HOUR + 7, 3)
    check(module_store, [long, wide])


def test_open_windows_and_those_that_end_on_a_border(module_store: Database) -> None:
    empty(module_store)
    rows: list[RankWindow | DuplicateWindow] = [
        row(NOON - WINDOW_US, window_us=WINDOW_US),
        row(NOON, window_us=WINDOW_US),
        row(NOON + CELL - 1, window_us=1),
        row(NOON + CELL, window_us=1, final=False),
        duplicate_window(window_start_us=NOON - WINDOW_US, as_of_us=NOON),
        duplicate_window(window_start_us=NOON, as_of_us=NOON, final=False),
        duplicate_window(window_start_us=NOON, window_us=2 * CELL, as_of_us=NOON + CELL, scope="rank", scope_key="a/0", inside_token_us=5),
    ]
    insert(module_store, rows)
    rollups.run(module_store)
    check(module_store, rows)
    assert module_store.query("SELECT sum(windows) FROM rank_rollups FINAL WHERE grain = '1h' AND NOT is_final").rows == [(3,)]


# -- what was touched is not forgotten --------------------------------------------------------------------------------


def test_a_store_that_was_not_rolled_up_for_longer_than_notes_are_kept_loses_nothing(module_store: Database) -> None:
    empty(module_store)
    rows = [row(NOON + number * CELL) for number in range(3)]
    insert(module_store, rows)
    module_store.command("TRUNCATE TABLE rollup_touched")
    module_store.command("TRUNCATE TABLE rollup_marks")
    for name in ("counted", "settled"):
        module_store.command(f"INSERT INTO rollup_marks SELECT '{name}', now64(6) - INTERVAL 8 DAY")
    assert rollups.run(module_store).windows["rank_windows"] == 3
    check(module_store, rows)
    assert rollups.run(module_store).idle


def test_what_settles_is_counted_once_more_and_then_no_more(module_store: Database) -> None:
    empty(module_store)
    insert(module_store, [row(NOON)])
    assert not rollups.run(module_store).idle
    assert not rollups.run(module_store, settled_s=0).idle
    assert rollups.run(module_store, settled_s=0).idle


def test_a_name_stays_a_value(module_store: Database) -> None:
    empty(module_store)
    rows = [row(NOON, instance_id="it's\\' OR 1 --"), row(NOON, instance_id="é/\n")]
    insert(module_store, rows[:1])
    rollups.run(module_store)
    insert(module_store, rows[1:])
    rollups.run(module_store)
    check(module_store, rows)
