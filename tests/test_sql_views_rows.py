"""The views over records made by hand or at random: what each row says, against a plain reading of the records in Python."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from schemas.histogram import bounds
from schemas.records import DuplicateWindow, GroupCounters, HolderReset, Loss, RankMessage, RankWindow
from sql import rollups
from sql.database import Database
from sql.figure_parts import primary_group
from sql.rows import Row
from tests.sql_records import WINDOW_US, duplicate_window, group, insert, random_rank_windows, rank_window

FIVE_US = 300_000_000
HOUR_US = 3_600_000_000
HOUR = 1_700_002_800_000_000
"""A whole hour."""

CAUSES = ("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")

Key = tuple[Any, ...]


@pytest.fixture
def store(module_store: Database) -> Database:
    tables = module_store.query(
        "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree' AND name != 'schema_migrations'"
    ).rows
    for (table,) in tables:
        module_store.command(f"TRUNCATE TABLE {table}")
    return module_store


def settle(database: Database, records: Iterable[Row]) -> None:
    """Insert and roll up."""
    insert(database, records)
    while not rollups.run(database).idle:
        pass


def read(database: Database, query: str) -> list[dict[str, Any]]:
    found = database.query(query)
    return [dict(zip(found.column_names, row, strict=True)) for row in found.rows]


def at(window: dict[str, Any]) -> int:
    """Its start, microseconds."""
    return int(window["window_start"].timestamp()) * 1_000_000


def standing(records: list[RankWindow]) -> list[RankWindow]:
    """Of each key the record of the highest version."""
    newest: dict[Key, RankWindow] = {}
    for record in records:
        key = (record.instance_id, record.dp_rank, record.life_id, record.window_start_us, record.semantics_version)
        if key not in newest or record.version > newest[key].version:
            newest[key] = record
    return list(newest.values())


def primaries(records: list[RankWindow]) -> dict[Key, int]:
    """The primary group of each life, of everything that was ever told of it."""
    told: dict[Key, dict[int, list[GroupCounters]]] = {}
    for record in records:
        life = told.setdefault((record.instance_id, record.dp_rank, record.life_id, record.semantics_version), {})
        for each in record.groups:
            life.setdefault(each.group_idx, []).append(each)
    found = {}
    for life_key, groups in told.items():
        merged = [
            GroupCounters(
                group_idx=index,
                gpu=any(each.gpu for each in each_of),
                spec_kind=max((each.spec_kind for each in each_of if each.spec_kind is not None), default=None),
            )
            for index, each_of in groups.items()
        ]
        first = primary_group(merged)
        found[life_key] = first.group_idx if first else 0
    return found


def said(record: RankWindow, primary: int) -> dict[str, Any]:
    """What the row of ``record`` says."""
    mine = next((each for each in record.groups if each.group_idx == primary), GroupCounters(group_idx=primary))
    measurable = record.kv_connector is None
    tells = record.reuse_reporting != "unlabelled"
    row: dict[str, Any] = {"measurable": measurable, "register": record.register}
    for cause in CAUSES:
        counter = f"recompute_{cause.removesuffix('_reload')}"
        known = measurable and (tells or cause != "concurrent")
        tokens, gpu_us = getattr(mine, f"{counter}_tokens"), getattr(mine, f"{counter}_gpu_us")
        row[f"{cause}_tokens"] = tokens if known else None
        row[f"{cause}_blocks"] = getattr(mine, f"{counter}_blocks") if known else None
        row[f"{cause}_gpu_seconds"] = gpu_us / 1e6 if known and (gpu_us or not tokens) else None
    return row | {
        "unrated_tokens": mine.unrated_tokens if measurable else None,
        "stored_tokens": mine.stored_tokens if tells else None,
        "resolved_tokens": mine.resolved_tokens,
        "removed_tokens": mine.evicted_tokens,
        "unreused_tokens": mine.unreused_tokens,
        "resident_tokens": mine.resident_tokens,
    }


SUMMED = [f"{cause}_{unit}" for cause in CAUSES for unit in ("tokens", "blocks")]
SUMMED += ["unrated_tokens", "stored_tokens", "resolved_tokens", "removed_tokens", "unreused_tokens"]


def added(rows: Iterable[tuple[Key, dict[str, Any]]], names: list[str]) -> dict[Key, dict[str, Any]]:
    """Rows of one key as one; what none of them knows is not known."""
    out: dict[Key, dict[str, Any]] = {}
    for key, row in rows:
        held = out.setdefault(key, dict.fromkeys(names))
        for name in names:
            if row[name] is not None:
                held[name] = (held[name] or 0) + row[name]
    return out


@pytest.mark.parametrize("seed", range(2))
def test_repeat_compute_is_that_of_the_primary_group_and_null_where_it_cannot_be_told(store: Database, seed: int) -> None:
    records = random_rank_windows(random.Random(seed), 5, 60)
    settle(store, records)
    first = primaries(records)
    kept = [
        (record, said(record, first.get((record.instance_id, record.dp_rank, record.life_id, record.semantics_version), 0)))
        for record in standing(records)
    ]
    windows = read(store, "SELECT * FROM repeat_compute")
    assert len(windows) == len(kept)
    by_key = {(row["instance_id"], row["dp_rank"], row["life_id"], at(row), row["semantics_version"]): row for row in windows}
    for record, expected in kept:
        row = by_key[record.instance_id, record.dp_rank, record.life_id, record.window_start_us, record.semantics_version]
        assert {name: row[name] for name in expected} == expected
        assert row["coverage"] == record.observed_us / record.window_us
    assert any(row["evicted_tokens"] is None for row in windows)
    assert any(row["concurrent_tokens"] is None and row["evicted_tokens"] for row in windows)

    def bucket(record: RankWindow) -> int:
        return record.window_start_us // FIVE_US * FIVE_US

    def declared(record: RankWindow) -> Key:
        return record.workload, record.model, record.semantics_version, record.key_epoch

    names = ("workload", "model", "semantics_version", "key_epoch")
    expected_5m = added(
        (((bucket(r), r.instance_id, r.dp_rank, r.life_id, *declared(r), row["measurable"]), row) for r, row in kept), SUMMED
    )
    found_5m = added(
        (
            (
                (at(r), r["instance_id"], r["dp_rank"], r["life_id"], *(r[name] for name in names), bool(r["measurable"])),
                r,
            )
            for r in read(store, "SELECT * FROM repeat_compute_5m")
            if any(r[name] for name in SUMMED)
        ),
        SUMMED,
    )
    assert found_5m == {key: row for key, row in expected_5m.items() if any(row[name] for name in SUMMED)}
    told = [name for name in SUMMED if name != "resolved_tokens"]
    for view, column, of in (
        ("repeat_compute_by_workload_5m", "workload", lambda r: r.workload),
        ("repeat_compute_by_model_5m", "model", lambda r: r.model),
        ("repeat_compute_fleet_5m", None, lambda r: None),
    ):
        expected_cut = added((((bucket(r), of(r), r.semantics_version, r.key_epoch), row) for r, row in kept), told)
        found_cut = {
            (at(r), r[column] if column else None, r["semantics_version"], r["key_epoch"]): r for r in read(store, f"SELECT * FROM {view}")
        }
        assert found_cut.keys() >= {key for key, row in expected_cut.items() if any(row[name] for name in told)}
        for key, row in found_cut.items():
            expected = expected_cut.get(key, dict.fromkeys(told))
            for name in told:
                # A rank that was silent, or whose long row reaches into the window, is there with nothing counted in it.
                assert row[name] == expected[name] or (row[name] == 0 and expected[name] is None), (view, key, name)
    assert len({key[2] for key in found_cut}) == 2, "two versions of the rules, never in one row"
    assert len({key[3] for key in found_cut}) == 2, "two keys, never in one row"


def test_gpu_time_is_not_known_where_no_rate_was(store: Database) -> None:
    rated = group(recompute_evicted_tokens=20_000, recompute_evicted_gpu_us=1_000_000)
    unrated = group(recompute_evicted_tokens=100, unrated_tokens=100, recompute_cleared_tokens=7)
    settle(
        store,
        [
            rank_window(instance_id="a", workload="x", window_start_us=HOUR, groups=[rated]),
            rank_window(instance_id="b", workload="y", window_start_us=HOUR, groups=[unrated]),
            rank_window(instance_id="c", workload="y", window_start_us=HOUR, groups=[group()]),
        ],
    )
    found = read(
        store, "SELECT workload, evicted_gpu_seconds, cleared_gpu_seconds, unrated_tokens FROM repeat_compute_by_workload_1h ORDER BY 1"
    )
    assert [tuple(row.values()) for row in found] == [("x", 1.0, 0.0, 0), ("y", None, None, 100)]
    assert read(store, "SELECT evicted_gpu_seconds AS s, cleared_gpu_seconds AS c, unrated_tokens AS u FROM repeat_compute_fleet_1d") == [
        {"s": 1.0, "c": None, "u": 100}
    ]


def windows_of(instance: str, numbers: Iterable[int], **fields: Any) -> list[RankWindow]:
    """Windows of a rank that begin in the hour, by number, each wholly observed, with a batch at its end."""
    return [
        rank_window(
            **(
                {
                    "instance_id": instance,
                    "window_start_us": HOUR + number * WINDOW_US,
                    "first_batch_us": HOUR + number * WINDOW_US,
                    "last_batch_us": HOUR + (number + 1) * WINDOW_US,
                    "register": "exact",
                    "semantics_version": 2,
                    "workload": instance,
                }
                | fields
            )
        )
        for number in numbers
    ]


def test_coverage_knows_of_silent_ranks_and_lets_departed_ones_go(store: Database) -> None:
    always = windows_of("always", range(90))
    silent = windows_of("silent", range(30))
    gone = windows_of("gone", range(29)) + windows_of("gone", [29], departed=True)
    settle(store, [*always, *silent, *gone])
    found = read(store, "SELECT * FROM coverage_5m ORDER BY window_start")
    assert [(row["ranks_heard"], row["ranks_expected"], row["ranks_absent"], row["coverage"]) for row in found] == [
        (3, 3, 0, 1.0),
        (1, 2, 1, 0.5),
        (1, 2, 1, 0.5),
    ]
    assert [(row["register"], row["reasons"], row["lowest"], row["ranks_with_gaps"]) for row in found] == [
        ("exact", [], 1.0, 0),
        ("lower_bound", ["absent"], 0.0, 1),
        ("lower_bound", ["absent"], 0.0, 1),
    ]
    fleet = read(store, "SELECT register, coverage, ranks, expected_ranks, is_final FROM repeat_compute_fleet_5m ORDER BY window_start")
    assert [tuple(row.values()) for row in fleet] == [
        ("exact", 1.0, 3, 3, True),
        ("lower_bound", 0.5, 1, 2, True),
        ("lower_bound", 0.5, 1, 2, True),
    ]
    cut = read(
        store,
        "SELECT workload, register, coverage FROM repeat_compute_by_workload_5m WHERE window_start >= toDateTime(1700003100) ORDER BY ALL",
    )
    assert {tuple(row.values()) for row in cut} == {("always", "exact", 1.0), ("silent", "indeterminate", 0.0)}
    gaps = read(store, "SELECT instance_id, missing_seconds, register, reasons FROM coverage_gaps")
    assert [tuple(row.values()) for row in gaps] == [("silent", 300.0, "indeterminate", ["absent"])] * 2
    (hour,) = read(store, "SELECT * FROM coverage_1h")
    assert (hour["coverage"], hour["observed_us"], hour["expected_us"]) == (1500 / 2100, 1500 * 10**6, 2100 * 10**6)
    # What was missing comes late: the silent rank was there all along.
    settle(store, windows_of("silent", range(30, 90)))
    assert {row["coverage"] for row in read(store, "SELECT coverage FROM coverage_5m")} == {1.0}
    assert read(store, "SELECT * FROM coverage_gaps") == []


def test_what_was_seen_in_part_is_a_lower_bound_and_one_unseen_window_spoils_no_hour(store: Database) -> None:
    part = windows_of("part", range(29)) + windows_of("part", [29], observed_us=WINDOW_US - 1, register="lower_bound")
    unseen = windows_of("unseen", range(28)) + windows_of("unseen", [28], register="lower_bound")
    unseen += windows_of("unseen", [29], observed_us=0, register="indeterminate")
    never = windows_of("never", range(30), observed_us=0, register="indeterminate", batches=0)
    loads = windows_of("loads", range(30), kv_connector="disk", register="indeterminate")
    doubtful = windows_of("doubtful", range(30), register="lower_bound", reasons=["ambiguous_reload"])
    ended = windows_of("ended", range(20))  # each of its windows is exact, and it fell silent before the five minutes were over
    full = windows_of("full", range(30))
    settle(store, [*part, *unseen, *never, *loads, *doubtful, *ended, *full])
    expected = {
        "part": "lower_bound",
        "unseen": "lower_bound",
        "never": "indeterminate",
        "loads": "indeterminate",
        "doubtful": "lower_bound",
        "ended": "lower_bound",
        "full": "exact",
    }
    for view in ("repeat_compute_5m", "rank_health_5m"):
        assert {row["instance_id"]: row["register"] for row in read(store, f"SELECT instance_id, register FROM {view}")} == expected
    by_workload = read(store, "SELECT workload, register FROM repeat_compute_by_workload_5m")
    assert {row["workload"]: row["register"] for row in by_workload} == expected
    assert read(store, "SELECT register FROM repeat_compute_fleet_5m") == [{"register": "lower_bound"}]
    kept = read(store, "SELECT DISTINCT register FROM rank_rollups FINAL WHERE instance_id = 'unseen'")
    assert kept == [{"register": "indeterminate"}], "the weakest of its windows"
    heard = read(store, "SELECT ranks_heard, ranks_expected, ranks_absent FROM coverage_5m")
    assert heard == [{"ranks_heard": 6, "ranks_expected": 7, "ranks_absent": 0}], "a rank of which no batch came is not heard"
    gaps = read(store, "SELECT instance_id, observed_us, expected_us FROM coverage_gaps ORDER BY ALL")
    assert [tuple(row.values()) for row in gaps] == [
        ("ended", 20 * WINDOW_US, FIVE_US),
        ("never", 0, FIVE_US),
        ("part", FIVE_US - 1, FIVE_US),
        ("unseen", FIVE_US - WINDOW_US, FIVE_US),
    ]


def test_what_is_loaded_is_not_taken_for_what_came_back_and_one_open_window_leaves_a_fleet_open(store: Database) -> None:
    histogram = {f"{name}_{side}": [9] for name in ("back_cleared", "lifetime") for side in ("buckets", "counts")}
    counted = group(recompute_cleared_tokens=5, **histogram)
    loads = windows_of("loads", range(30), kv_connector="disk", register="indeterminate", groups=[counted])
    settle(store, loads)
    fleets = [f"repeat_compute_{cut}_5m" for cut in ("fleet", "by_workload", "by_model")]
    for view in fleets:
        (row,) = read(store, f"SELECT register, ranks_measured, ranks, cleared_tokens, is_final FROM {view}")
        assert tuple(row.values()) == ("indeterminate", 0, 1, None, True), view
    assert read(store, "SELECT register, coverage, ranks_with_gaps FROM coverage_5m") == [
        {"register": "lower_bound", "coverage": 1.0, "ranks_with_gaps": 0}
    ]
    assert read(store, "SELECT DISTINCT what FROM return_times") == [{"what": "lifetime"}]
    assert read(store, "SELECT what, blocks, register FROM return_times_5m") == [
        {"what": "lifetime", "blocks": 270, "register": "indeterminate"}
    ]
    other = {"workload": "loads", "model": "other", "kv_connector": "disk", "register": "indeterminate"}
    settle(store, windows_of("more", range(30), groups=[counted], **other))
    assert read(store, "SELECT what, blocks FROM return_times_5m") == [{"what": "lifetime", "blocks": 540}], (
        "of a workload, whatever the model"
    )
    settle(store, windows_of("open", range(29)) + windows_of("open", [29], final=False, register="lower_bound"))
    for view in fleets[::2]:
        (row,) = read(store, f"SELECT sum(ranks_measured) AS measured, min(is_final) AS final, max(coverage) AS coverage FROM {view}")
        assert (row["measured"], bool(row["final"]), row["coverage"]) == (1, False, 1.0), view
    (row,) = read(store, "SELECT register FROM coverage_5m")
    assert row["register"] == "lower_bound"
    again = [windows_of(name, range(30), version=9, register=register) for name, register in (("loads", "exact"), ("open", "lower_bound"))]
    settle(store, [row for rows in (*again, windows_of("more", range(30), version=9)) for row in rows])
    (row,) = read(store, "SELECT register FROM coverage_5m")
    assert row["register"] == "lower_bound", "nothing is missing, and a window says less than exact"


def test_an_open_window_is_not_missing_what_lies_ahead(store: Database) -> None:
    settle(store, windows_of("a", range(12)))
    (row,) = read(store, "SELECT * FROM repeat_compute_5m")
    assert (row["observed_us"], row["expected_us"], row["coverage"], row["register"]) == (120 * 10**6, 120 * 10**6, 1.0, "exact")
    assert row["is_final"] is False, "the five minutes are not over"


def test_rank_health_counts_restarts_where_the_new_life_begins(store: Database) -> None:
    lives = windows_of("a", range(12), life_id="one", batches=3) + windows_of("a", range(48, 61), life_id="two", batches=2)
    lives[-1].last_batch_us -= 4_000_000
    lives += windows_of("other", range(90))
    boundary = HOUR + 48 * WINDOW_US + 5

    def message(seq: int, at_us: int, **what: Any) -> RankMessage:
        return RankMessage("a", 0, "two", seq, at_us, 7, "f", **what)

    settle(
        store,
        [
            *lives,
            message(0, HOUR + 12 * WINDOW_US, holder_reset=HolderReset(boundary, "fell")),
            message(1, HOUR + 60 * WINDOW_US, holder_reset=HolderReset(HOUR + 60 * WINDOW_US, "key", "rekeyed")),
            message(9, HOUR + 60 * WINDOW_US, loss=Loss(4, 8, "missing in the stream")),
        ],
    )
    found = read(store, "SELECT * FROM rank_health_5m WHERE instance_id = 'a' ORDER BY window_start")
    assert [(row["lives"], row["restarts"], row["batches"]) for row in found] == [(1, 0, 36), (1, 1, 24), (1, 0, 2)]
    assert [row["lag_seconds"] for row in found] == [180.0, 0.0, 294.0]
    (hour,) = read(store, "SELECT * FROM rank_health_1h WHERE instance_id = 'a'")
    assert (hour["lives"], hour["restarts"], hour["batches"], hour["lag_seconds"]) == (2, 1, 62, 294.0)
    told = read(store, "SELECT kind, at, reason, batches_lost FROM interruptions ORDER BY at, kind")
    assert [(row["kind"], row["reason"], row["batches_lost"]) for row in told] == [
        ("holder_reset", "restarted", None),
        ("holder_reset", "rekeyed", None),
        ("loss", "missing in the stream", 5),
    ]
    assert round(told[0]["at"].timestamp() * 1e6) == boundary


def test_states_at_the_end_are_those_of_the_last_part(store: Database) -> None:
    first = windows_of(
        "a", range(5), life_id="one", pool_blocks=50, groups=[group(resident_blocks=7), group(group_idx=1, resident_blocks=2)]
    )
    second = windows_of("a", range(5, 9), life_id="two", workload="moved", pool_blocks=None, groups=[group(resident_blocks=3)])
    settle(store, first + second)
    for grain in ("5m", "1h", "1d"):
        (row,) = read(store, f"SELECT * FROM rank_health_{grain}")
        assert (row["workload"], row["resident_blocks"], row["pool_blocks"], row["lives"]) == ("moved", 3, None, 2)
    # Declared otherwise for a while: what began last is not what came last.
    settle(store, windows_of("b", [0, 1, 8], workload="back") + windows_of("b", range(2, 8), workload="away"))
    assert read(store, "SELECT workload FROM rank_health_1h WHERE instance_id = 'b'") == [{"workload": "back"}]


def test_every_bucket_of_return_times_lies_where_it_was_counted(store: Database) -> None:
    buckets = list(range(0, 200))
    histogram = {"back_evicted_buckets": buckets, "back_evicted_counts": [n + 1 for n in buckets]}
    settle(
        store,
        [
            *windows_of("a", range(3), groups=[group(**histogram, lifetime_buckets=[9], lifetime_counts=[4])]),
            *windows_of(
                "b", range(3), workload="a", kv_connector="disk", groups=[group(**histogram, lifetime_buckets=[9], lifetime_counts=[1])]
            ),
        ],
    )
    for view, times in (("return_times", 1), ("return_times_5m", 3), ("return_times_1d", 3)):
        found = read(store, f"SELECT DISTINCT from_us, to_us, blocks FROM {view} WHERE what = 'evicted' ORDER BY from_us")
        assert [(row["from_us"], row["to_us"]) for row in found] == [bounds(number) for number in buckets]
        assert [row["blocks"] for row in found] == [(number + 1) * times for number in buckets], "content loaded by a connector is left out"
        lifetimes = read(store, f"SELECT sum(blocks) AS n FROM {view} WHERE what = 'lifetime'")
        assert lifetimes == [{"n": 15}]


def duplicates(numbers: Iterable[int], **fields: Any) -> list[DuplicateWindow]:
    return [
        duplicate_window(
            **(
                {
                    "window_start_us": HOUR + number * WINDOW_US,
                    "as_of_us": HOUR + (number + 1) * WINDOW_US,
                    "expected_ranks": 2,
                    "observed_us": 2 * WINDOW_US,
                    "semantics_version": 2,
                    "key_epoch": 0,
                    "register": "exact",
                    "inside_register": "exact",
                    "between_register": "exact",
                }
                | fields
            )
        )
        for number in numbers
    ]


UNSAID = {"register": "indeterminate", "inside_register": "indeterminate", "between_register": "indeterminate"}


@pytest.mark.parametrize(
    ("rows", "registers"),
    [
        (duplicates(range(30), inside_tokens_max=5, extra_tokens_max=5), ("exact", "exact", "exact")),
        # One rank had come first: what was found later was there, and a zero was not measured all along.
        (
            duplicates([0], **UNSAID, reasons=["single_holder"]) + duplicates(range(1, 30), inside_tokens_max=5, extra_tokens_max=5),
            ("lower_bound", "lower_bound", "indeterminate"),
        ),
        (duplicates([0], **UNSAID) + duplicates(range(1, 30)), ("indeterminate", "indeterminate", "indeterminate")),
        (
            duplicates([0], register="indeterminate", inside_register="indeterminate")
            + duplicates(range(1, 30), between_tokens_max=5, extra_tokens_max=5),
            ("lower_bound", "indeterminate", "exact"),
        ),
        # Ids or models that do not compare are another matter: the copies may be none.
        (
            duplicates(
                range(30),
                register="indeterminate",
                between_register="indeterminate",
                between_tokens_max=5,
                extra_tokens_max=5,
                reasons=["model_undeclared"],
            ),
            ("indeterminate", "exact", "indeterminate"),
        ),
    ],
)
def test_the_footprint_of_an_hour_is_read_by_what_was_found_in_it(
    store: Database, rows: list[DuplicateWindow], registers: tuple[str, str, str]
) -> None:
    settle(store, rows)
    for grain in ("5m", "1d"):
        (row,) = read(store, f"SELECT * FROM duplicate_footprint_{grain}")
        assert (row["register"], row["inside_register"], row["between_register"]) == registers
        assert row["coverage"] == 1.0


def test_footprints_replace_each_other_and_say_what_is_not_over_or_not_whole(store: Database) -> None:
    records: list[Any] = [*windows_of("a", range(40)), *duplicates(range(60), inside_token_us=WINDOW_US)]
    settle(store, records)
    settle(store, duplicates([1], inside_token_us=3 * WINDOW_US, version=9, shards=4, shards_reported=3))
    single = read(store, "SELECT inside_tokens_mean, complete FROM duplicate_footprint ORDER BY window_start LIMIT 3")
    assert [tuple(row.values()) for row in single] == [(1.0, True), (3.0, False), (1.0, True)]
    assert read(store, "SELECT count() AS n FROM duplicate_footprint") == [{"n": 60}]
    rolled = read(store, "SELECT inside_tokens_mean, complete, is_final FROM duplicate_footprint_5m ORDER BY window_start")
    assert [tuple(row.values()) for row in rolled] == [(pytest.approx(32 / 30), False, True), (1.0, True, False)]


def test_two_versions_of_the_rules_and_two_keys_stay_apart(store: Database) -> None:
    both = [{"semantics_version": 2, "key_epoch": 0}, {"semantics_version": 1, "key_epoch": 0}]
    records: list[Any] = []
    for number, declared in enumerate(both):
        counted = group(recompute_evicted_tokens=10**number, back_evicted_buckets=[3], back_evicted_counts=[10**number])
        records += windows_of("a", range(3), groups=[counted], **declared)
        records += duplicates(range(3), between_token_us=10**number * WINDOW_US, **declared)
    records += windows_of("a", range(3, 6), groups=[group(recompute_evicted_tokens=100)], key_epoch=1)
    records += duplicates(range(3, 6), between_token_us=100 * WINDOW_US, key_epoch=1)
    settle(store, records)
    for view in ("repeat_compute_1h", "repeat_compute_fleet_1h", "repeat_compute_by_workload_1h", "repeat_compute_by_model_1h"):
        found = read(store, f"SELECT semantics_version, key_epoch, evicted_tokens FROM {view} ORDER BY ALL")
        assert [tuple(row.values()) for row in found] == [(1, 0, 30), (2, 0, 3), (2, 1, 300)], view
    found = read(store, "SELECT semantics_version, key_epoch, tokens FROM gpu_time_1h WHERE cause = 'evicted' ORDER BY ALL")
    assert [tuple(row.values()) for row in found] == [(1, 0, 30), (2, 0, 3), (2, 1, 300)]
    found = read(store, "SELECT semantics_version, key_epoch, between_tokens_mean FROM duplicate_footprint_1h ORDER BY ALL")
    assert [tuple(row.values()) for row in found] == [(1, 0, 10.0), (2, 0, 1.0), (2, 1, 100.0)]
    found = read(store, "SELECT semantics_version, key_epoch, blocks FROM return_times_1h ORDER BY ALL")
    assert [tuple(row.values()) for row in found] == [(1, 0, 30), (2, 0, 3)]
    assert [row["semantics_version"] for row in read(store, "SELECT semantics_version FROM coverage_1h ORDER BY 1")] == [1, 2]
