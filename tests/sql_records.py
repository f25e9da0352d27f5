"""Random result records for the tests of ``sql``: superseded versions, long rows, several lives, declarations and rule versions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from schemas.records import Breach, DuplicateWindow, GroupCounters, RankWindow, SharedPrefix
from sql.database import Database
from sql.result_rows import GROUP_STATES, GROUP_SUMS, HISTOGRAMS
from sql.rows import Row, TableRows

WINDOW_US = 10_000_000
START_US = 1_700_000_000_000_000 // WINDOW_US * WINDOW_US

REQUIRED = [field.name for field in msgspec.structs.fields(DuplicateWindow) if field.required]
"""What every version of a duplicate window has told."""

BYTE_FIELDS = ("inside_byte_ms", "between_byte_ms", "extra_bytes_max", "inside_bytes_end", "between_bytes_end")


def write(database: Database, rows: TableRows) -> None:
    """Insert ``rows``, one insert per table."""
    for batch in rows.batches():
        assert database.insert(batch.table, batch.column_names, batch.columns) == len(batch)


def insert(database: Database, records: Iterable[Row]) -> None:
    """Insert ``records`` into their tables, in this order, one insert per table."""
    rows = TableRows()
    for record in records:
        rows.add(record)
    write(database, rows)


def rank_window(**fields: Any) -> RankWindow:
    """A rank window of rank ``a/0`` with nothing in it, but for what is given."""
    values: dict[str, Any] = {
        "instance_id": "a",
        "dp_rank": 0,
        "life_id": "life-1",
        "window_start_us": START_US,
        "window_us": WINDOW_US,
        "semantics_version": 1,
        "version": 1,
        "final": True,
        "workload": None,
        "model": "m",
        "reuse_reporting": "none",
        "removals": "per_copy",
        "kv_connector": None,
        "key_epoch": 0,
        "canary": "c0",
        "observed_us": WINDOW_US,
        "first_batch_us": START_US,
        "last_batch_us": START_US + WINDOW_US,
        "batches": 2,
        "duplicate_batches": 0,
        "lost_batches": 0,
        "refused_batches": 0,
        "unknown_events": 0,
        "unresolved_blocks": 0,
        "warmup": False,
        "reasons": [],
        "groups": [],
    }
    return RankWindow(**(values | fields))


def duplicate_window(**fields: Any) -> DuplicateWindow:
    """A fleet window without extra copies, but for what is given."""
    values: dict[str, Any] = {
        "scope": "fleet",
        "scope_key": "",
        "tier": "GPU",
        "window_start_us": START_US,
        "window_us": WINDOW_US,
        "as_of_us": START_US + WINDOW_US,
        "semantics_version": 1,
        "version": 1,
        "final": True,
        "shards_reported": 4,
        "shards": 4,
        "ranks": 99,
    }
    zeros = dict.fromkeys((name for name in REQUIRED if name not in values), 0)
    return DuplicateWindow(**(zeros | values | fields))


def group(**fields: Any) -> GroupCounters:
    """Group 0 on a GPU, of no kind, but for what is given."""
    return GroupCounters(**({"group_idx": 0, "gpu": True} | fields))


def counters(rng: random.Random, idle: bool) -> dict[str, Any]:
    """Values of every counter; an idle row counts nothing, but still holds what it holds."""
    values: dict[str, Any] = {name: 0 if idle else rng.randrange(1000) for name in GROUP_SUMS}
    values |= {name: rng.randrange(1000) for name in GROUP_STATES}
    values["kv_bytes_per_token"] = rng.choice([None, 4096, 8192])
    for name in HISTOGRAMS:
        buckets = [] if idle else sorted(rng.sample(range(200), rng.randrange(5)))
        values |= {f"{name}_buckets": buckets, f"{name}_counts": [rng.randrange(1, 1000) for _ in buckets]}
    return values


def random_rank_windows(rng: random.Random, ranks: int = 4, windows: int = 12) -> list[RankWindow]:
    """Rows of ``ranks`` ranks: each window in one or two versions, lives that end, groups that appear later, long idle rows."""
    rows: list[RankWindow] = []
    for number in range(ranks):
        instance, rank = f"i{number // 2}", number % 2
        life, start = 0, START_US + rng.randrange(3) * WINDOW_US
        declared: dict[str, Any] = {}
        for _ in range(windows):
            if not declared or rng.random() < 0.2:
                declared = {
                    "workload": rng.choice([None, "chat", "code"]),
                    "model": rng.choice([None, "m1", "m2"]),
                    "reuse_reporting": rng.choice(["none", "labelled", "unlabelled"]),
                    "kv_connector": rng.choice([None, None, None, "offload"]),
                    "key_epoch": rng.choice([0, 0, 1]),
                    "canary": rng.choice(["c0", "c0", "c1"]),
                }
            life += rng.random() < 0.15
            idle = rng.random() < 0.2
            length = WINDOW_US * (rng.randrange(2, 9) if idle else 1)
            semantics = 2 if rng.random() < 0.9 else 1
            for version in range(rng.choice([1, 1, 2, 3])):
                groups = [
                    GroupCounters(
                        group_idx=index,
                        spec_kind=rng.choice([None, "full_attention", "sliding_window"]),
                        gpu=rng.random() < 0.7,
                        **counters(rng, idle),
                    )
                    for index in range(4)
                    if rng.random() < 0.6
                ]
                first = start + rng.randrange(WINDOW_US // 2)
                rows.append(
                    rank_window(
                        instance_id=instance,
                        dp_rank=rank,
                        life_id=f"{instance}-{rank}-{life}",
                        window_start_us=start,
                        window_us=length,
                        semantics_version=semantics,
                        version=rng.randrange(1, 5) * 10 + version,
                        final=rng.random() < 0.8,
                        observed_us=(length if rng.random() < 0.5 else 0) if idle else rng.randrange(length + 1),
                        first_batch_us=0 if idle else first,
                        last_batch_us=0 if idle else first + rng.randrange(WINDOW_US // 2),
                        batches=0 if idle else rng.randrange(1, 50),
                        duplicate_batches=rng.randrange(3),
                        lost_batches=rng.randrange(3),
                        refused_batches=rng.randrange(3),
                        unknown_events=rng.randrange(3),
                        unresolved_blocks=rng.randrange(9),
                        warmup=rng.random() < 0.2,
                        reasons=rng.sample(["lost", "refused", "late_attach", "restarted"], rng.randrange(3)),
                        groups=groups,
                        **estimate(rng),
                        scrapes=rng.randrange(4),
                        pool_blocks=rng.choice([None, 1000]),
                        breaches=breaches(rng, first),
                        breaches_found=rng.randrange(20),
                        departed=rng.random() < 0.3,
                        **declared,
                    )
                )
            start += length
    return _distinct(rows)


def estimate(rng: random.Random) -> dict[str, Any]:
    """By what GPU time was estimated."""
    source = rng.choice([None, "declared", "measured"])
    return {
        "prefill_rate": source and rng.randrange(1, 9000) / 4,
        "prefill_rate_source": source,
        "gpus_per_rank": rng.choice([None, 1.0, 0.5]),
    }


def breaches(rng: random.Random, at_us: int) -> list[Breach]:
    """Contradictions with the engine's metrics."""
    kinds: list[Any] = ["cached_over_pool", "in_use_over_cached"]
    return [
        Breach(rng.choice(kinds), at_us + rng.randrange(9), at_us // 1000, rng.randrange(100, 200), rng.randrange(100))
        for _ in range(rng.choice([0, 0, 0, 1, 5]))
    ]


def shared_prefix(**fields: Any) -> SharedPrefix:
    """The trunk of the first place at the end of the first window, but for what is given."""
    values: dict[str, Any] = {
        "as_of_us": START_US + WINDOW_US,
        "semantics_version": 1,
        "version": 1,
        "place": 1,
        "content_id": b"\x02" * 16,
        "head_content_id": b"\x01" * 16,
        "parent_content_id": None,
        "blocks": 4,
        "tokens": 64,
        "depth_tokens": 64,
        "copies": 2,
        "instances": 2,
        "extra_blocks": 4,
        "extra_tokens": 64,
        "extra_bytes": None,
        "ranks": ["a/0", "b/0"],
        "workloads": ["", "chat"],
        "models": ["m"],
        "first_seen_us": START_US + 1,
        "coverage": 1.0,
        "register": "exact",
        "reasons": [],
    }
    return SharedPrefix(**(values | fields))


def random_shared_prefixes(rng: random.Random, instants: int = 6) -> list[SharedPrefix]:
    """A few trunks at each of some instants, several versions among them."""
    rows = []
    for number in range(instants):
        for place in range(1, rng.randrange(2, 6)):
            for version in range(rng.choice([1, 1, 2])):
                rows.append(
                    shared_prefix(
                        as_of_us=START_US + (number * 6 + 6) * WINDOW_US,
                        place=place,
                        semantics_version=2 if rng.random() < 0.9 else 1,
                        version=rng.randrange(1, 5) * 10 + version,
                        extra_tokens=rng.randrange(10**6),
                        depth_tokens=rng.choice([None, 128]),
                        extra_bytes=rng.choice([None, 2**40]),
                        content_id=rng.randbytes(16),
                        reasons=rng.choice([[], ["lost"]]),
                    )
                )
    return _distinct(rows)


def random_duplicate_windows(rng: random.Random, windows: int = 12) -> list[DuplicateWindow]:
    """Rows of every scope and two tiers, some in several versions, some long, the last one open."""
    rows: list[DuplicateWindow] = []
    keys = [("fleet", ""), ("rank", "i0/0"), ("rank", "i1/1"), ("workload", ""), ("workload", "chat"), ("model", "m1")]
    keys += [("workload_pair", json.dumps(pair)) for pair in (["", "chat"], ["chat", "code"])]
    for scope, key in keys:
        for tier in ("GPU", "CPU"):
            start = START_US
            for number in range(windows):
                long = rng.random() < 0.2
                length = WINDOW_US * (rng.randrange(2, 9) if long else 1)
                reached = rng.randrange(WINDOW_US) if number == windows - 1 else length
                for version in range(rng.choice([1, 1, 2])):
                    sized = rng.random() < 0.95
                    levels = {name: rng.randrange(10**6) for name in ("inside_token", "between_token", "inside_block", "between_block")}
                    rows.append(
                        duplicate_window(
                            scope=scope,
                            scope_key=key,
                            tier=tier,
                            window_start_us=start,
                            window_us=length,
                            as_of_us=start + reached,
                            semantics_version=2 if rng.random() < 0.9 else 1,
                            version=rng.randrange(1, 5) * 10 + version,
                            final=rng.random() < 0.8,
                            shards_reported=rng.choice([3, 4, 4, 4]),
                            **{f"{name}_us": level * reached for name, level in levels.items()},
                            **{f"{name}s_end": level for name, level in levels.items()},
                            **{name: rng.randrange(10**6) for name in REQUIRED if name.endswith("_max")},
                            **{name: rng.randrange(10**9) if sized else None for name in BYTE_FIELDS},
                            late_changes=rng.randrange(9),
                            reasons=rng.choice([[], ["late_data"], ["lost", "unlabelled"]]),
                        )
                    )
                start += length
    return _distinct(rows)


def _distinct(rows: list[Any]) -> list[Any]:
    """One row per key and version: two that differ under one version do not occur."""
    found: dict[tuple[object, ...], Any] = {}
    key: tuple[object, ...]
    for row in rows:
        if isinstance(row, RankWindow):
            key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version, row.version)
        elif isinstance(row, SharedPrefix):
            key = (row.as_of_us, row.place, row.semantics_version, row.version)
        else:
            key = (row.scope, row.scope_key, row.tier, row.window_start_us, row.semantics_version, row.version)
        found[key] = row
    return list(found.values())
