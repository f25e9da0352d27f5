"""Random windows for the tests of the rollups: of any length, some of them missing, around the borders of hours and days."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.records import DuplicateWindow, RankWindow
from sql.database import Database
from tests.sql_records import START_US, random_duplicate_windows, random_rank_windows

TABLES = (
    *("rank_windows", "duplicate_windows", "rank_rollups", "duplicate_rollups", "rollup_touched", "rollup_marks", "rollup_spans"),
    *("known_ranks", "life_groups", "fleet_clock"),
)
DAY_US = 86_400_000_000


def empty(database: Database) -> None:
    """As after the migrations: nothing in the tables, and notes taken from now on."""
    for table in TABLES:
        database.command(f"TRUNCATE TABLE {table}")
    database.command("INSERT INTO rollup_marks SELECT 'settled', now64(6)")


def random_windows(rng: random.Random) -> tuple[list[RankWindow], list[DuplicateWindow]]:
    """Windows of 10 s to 10 minutes and some much longer, near the end of a day, with ranks that fall silent."""
    stretch = rng.choice([3, 7, 12, 30, 61])
    border = (START_US // DAY_US + 1) * DAY_US
    begin = border - rng.randrange(0, 8) * 900_000_000 - rng.choice([0, 130_000_000])
    rank_rows = [_moved(row, begin, stretch) for row in random_rank_windows(rng, ranks=3, windows=20)]
    for _ in range(rng.randrange(3)):  # silent for a while
        rank = rng.choice(rank_rows)
        since = rank.window_start_us
        until = since + rng.randrange(300, 8_000) * 1_000_000
        rank_rows = [
            row for row in rank_rows if row.instance_id != rank.instance_id or row is rank or not since <= row.window_start_us < until
        ]
    duplicates = [
        msgspec.structs.replace(
            _moved(row, begin, stretch),
            key_epoch=rng.choice([None, 0, 0, 0, 1]),
            expected_ranks=rng.randrange(5),
            observed_us=rng.randrange(10**9),
        )
        for row in random_duplicate_windows(rng, windows=8)
        if row.scope in ("fleet", "rank", "workload_pair")
    ]
    return rank_rows, duplicates


def _moved(row: Any, begin: int, stretch: int) -> Any:
    times = {
        name: begin + (getattr(row, name) - START_US) * stretch
        for name in ("window_start_us", "as_of_us", "first_batch_us", "last_batch_us")
        if getattr(row, name, 0)
    }
    spans = {name: getattr(row, name) * stretch for name in ("window_us", "observed_us")}
    return msgspec.structs.replace(row, **times, **spans)


def batches(rng: random.Random, records: Sequence[Any], most: int = 6) -> list[list[Any]]:
    """``records`` in any order, cut anywhere."""
    mixed = list(records)
    rng.shuffle(mixed)
    cuts = sorted(rng.randrange(len(mixed) + 1) for _ in range(rng.randrange(most)))
    return [part for start, end in zip([0, *cuts], [*cuts, len(mixed)], strict=True) if (part := mixed[start:end])]
