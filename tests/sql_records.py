"""Random result records for the tests of ``sql``: superseded versions, long rows, several lives, declarations and rule versions."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from schemas.records import DuplicateWindow, GroupCounters, RankWindow
from sql.result_rows import GROUP_STATES, GROUP_SUMS, HISTOGRAMS

WINDOW_US = 10_000_000
START_US = 1_700_000_000_000_000 // WINDOW_US * WINDOW_US

REQUIRED = [field.name for field in msgspec.structs.fields(DuplicateWindow) if field.required]
"""What every version of a duplicate window has told."""


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
                        **declared,
                    )
                )
            start += length
    return _distinct(rows)


def random_duplicate_windows(rng: random.Random, windows: int = 12) -> list[DuplicateWindow]:
    """Rows of every scope and two tiers, some in several versions, some long, the last one open."""
    rows: list[DuplicateWindow] = []
    keys = [("fleet", ""), ("rank", "i0/0"), ("rank", "i1/1"), ("workload", ""), ("workload", "chat"), ("model", "m1")]
    for scope, key in keys:
        for tier in ("GPU", "CPU"):
            start = START_US
            for number in range(windows):
                long = rng.random() < 0.2
                length = WINDOW_US * (rng.randrange(2, 9) if long else 1)
                reached = rng.randrange(WINDOW_US) if number == windows - 1 else length
                for version in range(rng.choice([1, 1, 2])):
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
                            **{name: rng.randrange(10**6) for name in DuplicateWindow.__struct_fields__ if name.endswith("_max")},
                        )
                    )
                start += length
    return _distinct(rows)


def _distinct(rows: list[Any]) -> list[Any]:
    """One row per key and version: two that differ under one version do not occur."""
    found = {}
    for row in rows:
        if isinstance(row, RankWindow):
            key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version, row.version)
        else:
            key = (row.scope, row.scope_key, row.tier, row.window_start_us, row.semantics_version, row.version)
        found[key] = row
    return list(found.values())
