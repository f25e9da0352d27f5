"""ClickHouse and Python add up the same: every total of random records, to the last integer, after repeats in another order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Declaration, Departure, DuplicateWindow, RankMessage, RankWindow, SharedPrefix
from sql.database import Database
from sql.figures import assemble
from sql.known import KnownRank
from sql.load import load
from sql.totals import By, Span, totals_from_records
from tests.sql_records import (
    START_US,
    WINDOW_US,
    duplicate_window,
    group,
    insert,
    random_duplicate_windows,
    random_rank_windows,
    random_shared_prefixes,
    rank_window,
)

Records = list[RankWindow | DuplicateWindow | SharedPrefix | RankMessage]


@pytest.fixture
def database(module_store: Database) -> Database:
    for table in ("rank_windows", "life_groups", "known_ranks", "duplicate_windows", "shared_prefixes", "rank_events"):
        module_store.command(f"TRUNCATE TABLE {table}")
    return module_store


def spans(rng: random.Random) -> list[tuple[int | None, int | None]]:
    """The open span, half-open ones, and some that begin or end inside windows, before all or after all."""
    inside = [START_US + rng.randrange(30 * WINDOW_US) for _ in range(6)]
    return [
        (None, None),
        (inside[0], None),
        (None, inside[1]),
        (min(inside[2:4]), max(inside[2:4])),
        (inside[4], inside[4] + 1),
        (START_US + 5 * WINDOW_US, START_US + 9 * WINDOW_US),
        (START_US - 100 * WINDOW_US, START_US - WINDOW_US),
        (START_US + 10_000 * WINDOW_US, None),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_load_gives_what_the_records_give(database: Database, seed: int) -> None:
    rng = random.Random(seed)
    ranks, duplicates, trunks = random_rank_windows(rng), random_duplicate_windows(rng), random_shared_prefixes(rng)
    records: Records = [*ranks, *duplicates, *trunks]
    asked = spans(rng)
    bys: tuple[By | None, ...] = (None, "rank", "workload", "model")
    for _ in range(2):  # the second time every record is in the tables twice, in another order and other inserts
        rng.shuffle(records)
        half = rng.randrange(len(records))
        insert(database, records[:half])
        insert(database, records[half:])
        for number, (since, until) in enumerate(asked):
            by = bys[number % len(bys)]
            version = (None, None, 1, 2, 3)[number % 5]
            asks: dict[str, Any] = {"by": by, "semantics_version": version, "prefixes": number}
            expected = totals_from_records(ranks, duplicates, since_us=since, until_us=until, shared_prefixes=trunks, **asks)
            found = load(database, since, until, **asks)
            assert found == expected
            assert assemble(found) == assemble(expected)
    everything = totals_from_records(ranks, duplicates, shared_prefixes=trunks)
    assert any(life.observed_us for life in everything.lives)
    assert everything.prefixes
    assert any(life.breaches for life in everything.lives)
    assert any(window.inside_byte_ms is None for window in everything.duplicates)


def test_an_empty_store_has_no_totals(database: Database) -> None:
    totals = load(database)
    assert totals == totals_from_records([], [])
    assert totals.semantics_version is None
    assert totals.span.length_us == 0


def test_a_span_is_widened_to_windows_and_says_so(database: Database) -> None:
    rows = [rank_window(window_start_us=START_US + n * WINDOW_US, batches=n, groups=[group(stored_tokens=10**n)]) for n in range(5)]
    insert(database, [*rows])
    totals = load(database, START_US + WINDOW_US + 1, START_US + 2 * WINDOW_US + 1)
    assert totals.span == Span(START_US + WINDOW_US, START_US + 3 * WINDOW_US)
    assert totals.lives[0].groups[0].stored_tokens == 110
    assert assemble(totals)["span"]["widened_to_windows"] is True


def test_a_long_row_counts_in_proportion_and_exactly(database: Database) -> None:
    busy = rank_window()
    idle = rank_window(
        window_start_us=START_US + WINDOW_US,
        window_us=1000 * WINDOW_US,
        observed_us=1000 * WINDOW_US,
        batches=0,
        first_batch_us=0,
        last_batch_us=0,
    )
    level = 9 * 10**8  # the row holds 9 x 10^18, which times the overlap is far beyond 64 bits
    extra = duplicate_window(
        window_start_us=START_US + WINDOW_US,
        window_us=1000 * WINDOW_US,
        as_of_us=START_US + 1001 * WINDOW_US,
        inside_token_us=level * 1000 * WINDOW_US,
    )
    insert(database, [busy, idle, extra])
    totals = load(database, START_US + 11 * WINDOW_US, START_US + 18 * WINDOW_US)
    assert totals.lives[0].observed_us == 7 * WINDOW_US
    assert totals.duplicates[0].inside_token_us == level * 7 * WINDOW_US
    assert assemble(totals)["duplicate_footprint"]["inside_instances"]["extra_tokens"]["mean"] == float(level)


def test_a_rank_that_is_silent_in_the_span_is_expected_unless_it_had_departed(database: Database) -> None:
    later = START_US + 100 * WINDOW_US
    rows = [
        rank_window(instance_id="busy", window_start_us=later, first_batch_us=later, last_batch_us=later + 9),
        rank_window(instance_id="silent", dp_rank=3, workload="chat"),
        rank_window(instance_id="gone", departed=True),
        rank_window(instance_id="back", departed=True),
        rank_window(instance_id="back", window_start_us=START_US + WINDOW_US, version=9),
        # One that comes only after the span, and one whose row of an older version of the rules lies in it.
        rank_window(instance_id="later", window_start_us=later + 50 * WINDOW_US, first_batch_us=later + 50 * WINDOW_US),
        rank_window(instance_id="old", window_start_us=later, semantics_version=0),
    ]
    insert(database, [*rows])
    for since, until in ((later, later + WINDOW_US), (START_US - WINDOW_US, START_US), (later + 90 * WINDOW_US, None)):
        found = load(database, since, until)
        assert found == totals_from_records(rows, [], since_us=since, until_us=until)
    found = load(database, later, later + WINDOW_US)
    assert [(life.instance_id, life.dp_rank, life.life_id, life.workload, life.reasons) for life in found.lives] == [
        ("back", 0, "", None, ["absent"]),
        ("busy", 0, "life-1", None, []),
        ("silent", 3, "", "chat", ["absent"]),
    ]
    assert load(database, START_US - WINDOW_US, START_US).lives == []


def test_a_rank_that_has_only_declared_itself_is_expected_too(database: Database) -> None:
    def message(instance: str, observed: int, at_us: int = 0, **what: Any) -> RankMessage:
        return RankMessage(instance, 0, "l", 0, at_us, observed, "f", **what)

    said = Declaration("none", "last_copy", "chat", "m", None, 3, "c")
    rows = [rank_window(instance_id="counted"), rank_window(instance_id="counted", window_start_us=START_US + WINDOW_US)]
    insert(
        database,
        [
            *rows,
            message("mute", 5, declaration=said),
            message("stopped", 5, declaration=said),
            message("stopped", 6, departure=Departure("asked to")),
            message("timed", 5, START_US + WINDOW_US, declaration=said),
            message("counted", 9, declaration=said),
            message("counted", 10, departure=Departure("asked to")),
        ],
    )
    declared: dict[str, Any] = {"workload": "chat", "model": "m", "reuse_reporting": "none", "removals": "last_copy"}
    declared |= {"key_epoch": 3, "canary": "c"}
    known = [
        KnownRank("mute", 0, **declared),
        KnownRank("stopped", 0, **declared, departed_us=0),
        KnownRank("timed", 0, **declared, first_us=START_US + WINDOW_US),
        KnownRank("counted", 0, **declared, departed_us=0),
    ]
    named = []
    for since, until in ((None, None), (START_US, START_US + WINDOW_US), (START_US + WINDOW_US, START_US + 2 * WINDOW_US)):
        found = load(database, since, until)
        assert found == totals_from_records(rows, [], since_us=since, until_us=until, known=known)
        named.append([life.instance_id for life in found.lives])
    # One that never told an engine time belongs to no span with an end; the counted one's rows say that it has not gone.
    assert named == [["counted", "mute", "timed"], ["counted"], ["counted", "timed"]]


def test_a_groups_place_in_the_life_is_known_from_outside_the_span(database: Database) -> None:
    """Group 0 shows that it is on a GPU only later; the primary group is that of the whole life, also for the first window."""
    early = rank_window(groups=[group(gpu=False, stored_tokens=1), group(group_idx=1, stored_tokens=7)])
    late = rank_window(window_start_us=START_US + WINDOW_US, groups=[group(spec_kind="full_attention", stored_tokens=5)])
    insert(database, [early, late])
    totals = load(database, START_US, START_US + WINDOW_US)
    assert [(g.group_idx, g.gpu, g.spec_kind, g.stored_tokens) for g in totals.lives[0].groups] == [
        (0, True, "full_attention", 1),
        (1, True, None, 7),
    ]
    assert assemble(totals)["ranks"][0]["stored_tokens"] == 1


def test_figures_survive_a_closed_store(tmp_path: Path, module_store: Database) -> None:
    """What was inserted is there when the folder is opened again: in a process of its own, as one process has one store."""
    import subprocess
    import sys

    script = """
import sys
from pathlib import Path
from typing import Any
from sql import migrate
from sql.load import load
from sql.rows import TableRows
from sql.store import connect
from tests.sql_records import rank_window
with connect(None, Path(sys.argv[1])) as database:
    migrate.apply(database)
    rows = TableRows()
    rows.add(rank_window(batches=3))
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)
with connect(None, Path(sys.argv[1])) as database:
    print(load(database).lives[0].batches)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
    )
    assert run.stdout == "3\n", run.stderr
