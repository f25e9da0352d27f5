"""The duplicate footprint of the made-up fleet: windows of every scope, and the prefixes that lie on many ranks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations

from benchmarks.queries_rows import MODELS, RANKS_PER_INSTANCE, WINDOW_S, WINDOWS_PER_HOUR, WORKLOADS, Fleet, Insert, rank_columns

PLACES = 100
"""Shared prefixes told at each instant."""

_TELL_S = 60

_COLUMNS = """
    scope, scope_key, tier, window_start, window_us, as_of, semantics_version, version, is_final, shards_reported, shards, ranks,
    rank_lag_us, inside_token_us, between_token_us, inside_block_us, between_block_us, extra_tokens_max, inside_tokens_max,
    between_tokens_max, extra_blocks_max, inside_blocks_max, between_blocks_max, inside_tokens_end, between_tokens_end, inside_blocks_end,
    between_blocks_end, expected_ranks, observed_us, register, inside_register, between_register, reasons, late_changes, inside_byte_ms,
    between_byte_ms, extra_bytes_max, inside_bytes_end, between_bytes_end, key_epoch"""


def duplicate_windows(fleet: Fleet, day: int) -> Iterator[Insert]:
    """One day of every scope. Offload tiers are counted for the fleet and its cuts, not for each rank."""
    named = sorted((*WORKLOADS, ""))
    cuts = {
        "fleet": [""],
        "model": sorted(MODELS),
        "workload": named,
        "workload_pair": [json.dumps(pair) for pair in combinations(named, 2)],
    }
    for scope, keys in cuts.items():
        listed = "[" + ", ".join(f"'{key}'" for key in keys) + "]"
        scale = fleet.ranks * 300 // len(keys)
        for tier, part in (("CPU", 4), ("GPU", 1)):
            yield _insert(fleet, day, scope, f"{listed}[k + 1]", len(keys), tier, scale // part + 40, late=False)
    yield _insert(fleet, day, "rank", "concat(instance_name, '/', toString(rank_number))", fleet.ranks, "GPU", 600, late=False)
    yield _insert(fleet, day, "rank", "concat(instance_name, '/', toString(rank_number))", fleet.ranks, "GPU", 600, late=True)


def _insert(fleet: Fleet, day: int, scope: str, key: str, keys: int, tier: str, scale: int, *, late: bool) -> Insert:
    per_hour = keys * WINDOWS_PER_HOUR
    rows = fleet.day_hours * per_hour // (200 if late else 1)
    number = "number * 200 + number % 7" if late else "number"
    return Insert(
        "duplicate_windows",
        rows,
        f"""
    INSERT INTO duplicate_windows ({_COLUMNS})
    WITH
        {rank_columns("k")},
        toInt64({fleet.day_s(day)} + intDiv(n, {per_hour}) * 3600 + (n % {WINDOWS_PER_HOUR}) * {WINDOW_S}) AS t,
        cityHash64('{scope}', t) AS h_time,
        -- On half of the keys something changes in every window, on the others once a minute.
        cityHash64('{scope}{tier}', k, intDiv(t, if(k % 2 = 0, 60, {WINDOW_S}))) AS h,
        h_time % 150 = 0 AS partial,
        {scale} * (1.2 + sin((t % 86400) / 86400 * 2 * pi() - k % 7)) * (0.5 + (cityHash64(k, 'copies') % 1000) / 1000) AS level,
        if('{scope}' = 'workload_pair', 0, toInt64(level * (0.9 + (h % 256) / 1280))) AS inside,
        toInt64(level * 2 * (0.9 + (bitShiftRight(h, 8) % 256) / 1280)) AS between,
        toInt64(k % 2 * (bitShiftRight(h, 16) % 900000)) AS moved,
        toInt64(k % 2 * (bitShiftRight(h, 40) % 24)) AS above,
        if('{scope}' = 'workload_pair' OR ('{scope}' = 'rank' AND inst % 9 = 8), NULL, kv_bytes) AS size
    SELECT
        '{scope}', {key}, '{tier}', fromUnixTimestamp64Micro(t * 1000000, 'UTC'), {WINDOW_S * 1_000_000},
        fromUnixTimestamp64Micro((t + {WINDOW_S}) * 1000000, 'UTC'), 1, {1 << 62} + intDiv(t, {WINDOW_S}) * 5000 + {int(late)}, true,
        12, 12, {fleet.ranks}, toInt64(h_time % 2000000),
        inside * 160000000 + moved * 16, between * 160000000 + moved * 32, inside * 10000000 + moved, between * 10000000 + moved * 2,
        (inside + between + above) * 16, (inside + above) * 16, (between + above) * 16,
        inside + between + above, inside + above, between + above, inside * 16, between * 16, inside, between,
        {fleet.ranks}, {fleet.ranks * WINDOW_S * 1_000_000} - if(partial, toInt64(h_time % 90000000), 0),
        if(partial, 'lower_bound', 'exact'), if(partial, 'lower_bound', 'exact'), if(partial, 'lower_bound', 'exact'),
        if(partial, ['coverage'], []), intDiv(t, 40000) % 1000,
        inside * 160000 * size, between * 160000 * size, (inside + between + above) * 16 * size, inside * 16 * size, between * 16 * size, 1
    FROM (SELECT {number} AS n, intDiv(n % {per_hour}, {WINDOWS_PER_HOUR}) AS k FROM numbers_mt({rows}))
    """,
    )


def shared_prefixes(fleet: Fleet, day: int) -> Iterator[Insert]:
    """The trunks of one day, told once a minute."""
    instants = fleet.day_hours * 3_600 // _TELL_S
    names = f"[{', '.join(repr(name) for name in (*WORKLOADS, 'misc'))}]"
    rank_name = (
        f"concat({names}[intDiv(x, {RANKS_PER_INSTANCE}) % 7 + 1], '-', leftPad(toString(intDiv(x, {RANKS_PER_INSTANCE})), 4, '0'), '/',"
        f" toString(x % {RANKS_PER_INSTANCE}))"
    )
    undeclared = f"[{', '.join(repr(name) for name in (*WORKLOADS, ''))}]"
    yield Insert(
        "shared_prefixes",
        instants * PLACES,
        f"""
    INSERT INTO shared_prefixes (
        as_of, semantics_version, version, place, content_id, head_content_id, parent_content_id, blocks, tokens, depth_tokens, copies,
        instances, extra_blocks, extra_tokens, extra_bytes, ranks, workloads, models, first_seen, coverage, register, reasons
    )
    WITH
        toInt64({fleet.day_s(day)} + intDiv(n, {PLACES}) * {_TELL_S} + {_TELL_S}) AS t,
        toInt32(n % {PLACES} + 1) AS place_number,
        -- A trunk keeps its place for a quarter of an hour or so.
        cityHash64(place_number, intDiv(t + place_number * 37, 900)) AS h,
        toInt64(4000 / place_number) + toInt64(h % 64) AS length,
        toInt64(2 + least({max(0, fleet.ranks - 2)}, h % (8 + intDiv(100 - place_number, 2)))) AS holders,
        arraySort(arrayDistinct(arrayMap(j -> toInt64((h + j * 17) % {fleet.ranks}), range(holders)))) AS holding
    SELECT
        fromUnixTimestamp64Micro(t * 1000000, 'UTC'), 1, {1 << 62} + t, place_number, sipHash128(h, 'last'), sipHash128(h, 'first'),
        if(h % 3 = 0, NULL, sipHash128(h, 'before')), length, length * 16, length * 16 + if(h % 3 = 0, 0, 4096), length(holding),
        length(arrayDistinct(arrayMap(x -> intDiv(x, {RANKS_PER_INSTANCE}), holding))),
        length * (length(holding) - 1), length * 16 * (length(holding) - 1), length * 16 * (length(holding) - 1) * 131072,
        arrayMap(x -> {rank_name}, holding),
        arraySort(arrayDistinct(arrayMap(x -> {undeclared}[intDiv(x, {RANKS_PER_INSTANCE}) % 7 + 1], holding))),
        ['{MODELS[0]}'], fromUnixTimestamp64Micro((intDiv(t, 900) * 900 - toInt64(h % 3600)) * 1000000, 'UTC'),
        1 - (cityHash64(t) % 100) / 10000, 'lower_bound', ['coverage']
    FROM (SELECT number AS n FROM numbers({instants * PLACES}))
    """,
    )
