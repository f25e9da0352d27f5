"""The rows of a made-up fleet, as INSERT … SELECT statements that the engine runs by itself. Pure.

Nothing here is random: every value is a hash of the rank and the window it is of, so a store is the same each time it is filled. What
matters for speed and size is as in a live store: names repeat, counters follow the time of day, most windows are whole, a few are not;
histograms hold a handful of buckets; ids do not compress; one row in 200 is replaced by a later version that came in another part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

WINDOW_S = 10
WINDOWS_PER_HOUR = 3600 // WINDOW_S
RANKS_PER_INSTANCE = 8
END = datetime(2026, 11, 8, tzinfo=UTC)
"""Where the data ends, engine time. Two weeks before it lie in two months, so in two partitions."""

WORKLOADS = ("chat", "agents", "rag", "code", "batch", "search")
"""Declared workloads; every seventh instance declares none."""

MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.3-70b", "mistral-small-3.2")
BATCHES_PER_SECOND = 5
"""Engine batches per second and rank among the facts."""

BLOCK_LAG = 20_000
"""A block is evicted when so many have been stored after it on its rank."""

_SEMANTICS = 1
_FINAL = 1 << 62


@dataclass(frozen=True)
class Fleet:
    """How much to make: windows of ``ranks`` ranks over ``days`` days, facts of the last day for ``fact_ranks`` of them.

    Of each day only the first ``day_hours`` are filled; fewer than 24 are for tests.
    ``fact_rate`` is block events per second and rank (a multiple of :data:`BATCHES_PER_SECOND` x 2). A busy engine has 2,400; twenty of
    them make four billion rows a day, which is a disk's size and not a query's: the facts are asked by rank and hour.
    """

    days: int = 14
    ranks: int = 1_000
    fact_ranks: int = 20
    fact_rate: int = 40
    day_hours: int = 24

    @property
    def end_s(self) -> int:
        """End of the data, epoch seconds."""
        return self.day_s(self.days - 1) + self.day_hours * 3_600

    @property
    def start_s(self) -> int:
        """Start of the data, epoch seconds."""
        return int(END.timestamp()) - self.days * 86_400

    @property
    def windows(self) -> int:
        """Rows of ``rank_windows``, replaced ones apart."""
        return self.days * self.day_windows * self.ranks

    @property
    def day_windows(self) -> int:
        """Windows of one rank in a day."""
        return self.day_hours * WINDOWS_PER_HOUR

    @property
    def fact_stride(self) -> int:
        """Every how manieth rank has facts."""
        return max(1, self.ranks // max(1, self.fact_ranks))

    def day_s(self, day: int) -> int:
        """Start of ``day`` (0 is the first), epoch seconds."""
        return self.start_s + day * 86_400


@dataclass(frozen=True)
class Insert:
    """One statement that fills a part of ``table`` with ``rows`` rows."""

    table: str
    rows: int
    sql: str


def _list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def rank_columns(rank: str) -> str:
    """What hangs on the rank alone, as ``WITH`` expressions over the rank's number."""
    return f"""
        toInt64({rank}) AS r,
        intDiv(r, {RANKS_PER_INSTANCE}) AS inst,
        concat({_list((*WORKLOADS, "misc"))}[inst % 7 + 1], '-', leftPad(toString(inst), 4, '0')) AS instance_name,
        toInt32(r % {RANKS_PER_INSTANCE}) AS rank_number,
        if(inst % 7 = 6, NULL, {_list(WORKLOADS)}[inst % 7 + 1]) AS workload_name,
        {_list(MODELS)}[inst % 4 + 1] AS model_name,
        [1, 2, 4, 1][inst % 4 + 1] AS gpus,
        [18000, 9000, 11000, 14000][inst % 4 + 1] AS rate,
        [131072, 262144, 327680, 163840][inst % 4 + 1] AS kv_bytes,
        if(inst % 5 = 4, 'unlabelled', 'none') AS reuse,
        if(inst % 25 = 24, 'LMCacheConnectorV1', NULL) AS connector,
        inst % 12 = 11 AS hybrid,
        (cityHash64(r, 'busy') % 1000) / 1000 AS busy"""


def life_id(fleet: Fleet, time: str) -> str:
    """The life of rank ``r`` at ``time`` (epoch seconds): every tenth rank was restarted once."""
    restart = f"({fleet.start_s + fleet.days * 51_840} + (r % 1000) * 37)"
    return f"lower(hex(cityHash64(r, if(r % 10 = 0 AND {time} >= {restart}, 'second', 'first'))))"


_HISTOGRAMS = ("lifetime", "back_evicted", "back_cleared", "back_restarted")
_ZERO_HISTOGRAM = "CAST([], 'Array(Int64)')"

_GROUP = {
    "stored_blocks": "stored",
    "stored_tokens": "stored * 16",
    "resolved_tokens": "stored * 16 - if(h % 97 = 0, 32, 0)",
    "evicted_blocks": "evicted",
    "evicted_tokens": "evicted * 16",
    "cleared_blocks": "cleared",
    "cleared_tokens": "cleared * 16",
    "restarted_blocks": "0",
    "restarted_tokens": "0",
    "unjoined_evicts": "if(h % 4001 = 0, 3, 0)",
    "reloaded_blocks": "0",
    "reloaded_tokens": "0",
    "recompute_evicted_blocks": "again",
    "recompute_evicted_tokens": "again * 16",
    "recompute_cleared_blocks": "again_cleared",
    "recompute_cleared_tokens": "again_cleared * 16",
    "recompute_restarted_blocks": "again_restarted",
    "recompute_restarted_tokens": "again_restarted * 16",
    "recompute_concurrent_blocks": "concurrent",
    "recompute_concurrent_tokens": "concurrent * 16",
    "recompute_ambiguous_blocks": "0",
    "recompute_ambiguous_tokens": "0",
    "resident_blocks": "resident",
    "resident_tokens": "resident * 16",
    "resident_copies": "resident + concurrent",
    "unreused_blocks": "intDiv(evicted * 2, 3)",
    "unreused_tokens": "intDiv(evicted * 2, 3) * 16",
    "forgotten_blocks": "0",
    "unrated_tokens": "0",
    "recompute_evicted_gpu_us": "toInt64(again * 16 / rate * gpus * 1e6)",
    "recompute_cleared_gpu_us": "toInt64(again_cleared * 16 / rate * gpus * 1e6)",
    "recompute_restarted_gpu_us": "toInt64(again_restarted * 16 / rate * gpus * 1e6)",
    "recompute_concurrent_gpu_us": "toInt64(concurrent * 16 / rate * gpus * 1e6)",
    "recompute_ambiguous_gpu_us": "0",
}
"""Counters of the primary group. A second group, where there is one, has a quarter of each."""


def _histogram(name: str, count: str, first: str, most: int) -> str:
    """Two columns: buckets from ``first`` on, as many as ``count`` blocks fill, and how many fell into each."""
    size = f"toUInt8(if({count} <= 0, 0, least({most}, toInt64(log2(1 + {count})))))"
    return f"""
        {size} AS {name}_size,
        arrayMap(b -> toInt64({first} + b), range({name}_size)) AS {name}_b,
        arrayMap(b -> toInt64(greatest(1, intDiv({count} * (16 + bitAnd(bitShiftRight(h2, b * 5), 31)), 32 * {name}_size))),
            range({name}_size)) AS {name}_c"""


def rank_windows(fleet: Fleet, day: int) -> Iterator[Insert]:
    """The windows of one day, in the order of the key, then a few of them again under a higher version."""
    per_hour = fleet.ranks * WINDOWS_PER_HOUR
    rows = fleet.day_hours * per_hour
    whole = f"numbers_mt({rows})"
    yield Insert("rank_windows", rows, _rank_window_sql(fleet, day, f"SELECT number AS n, 0 AS late FROM {whole}"))
    again = rows // 200
    yield Insert(
        "rank_windows", again, _rank_window_sql(fleet, day, f"SELECT number * 200 + number % 7 AS n, 1 AS late FROM numbers_mt({again})")
    )


def _rank_window_sql(fleet: Fleet, day: int, source: str) -> str:
    per_hour = fleet.ranks * WINDOWS_PER_HOUR
    groups = ",\n".join(
        f"        if(hybrid, [toInt64({value}), intDiv(toInt64({value}), 4)], [toInt64({value})]) AS `groups.{name}`"
        for name, value in _GROUP.items()
    )

    def histograms(name: str) -> str:
        return ", ".join(
            f"if(hybrid, [{name}_{short}, {_ZERO_HISTOGRAM}], [{name}_{short}]) AS `groups.{name}_{long}`"
            for short, long in (("b", "buckets"), ("c", "counts"))
        )

    return f"""
    INSERT INTO rank_windows (
        instance_id, dp_rank, life_id, window_start, window_us, semantics_version, version, is_final, workload, model, reuse_reporting,
        removals, kv_connector, key_epoch, canary, observed_us, first_batch, last_batch, batches, duplicate_batches, lost_batches,
        refused_batches, unknown_events, unresolved_blocks, warmup, reasons, register, prefill_rate, prefill_rate_source, gpus_per_rank,
        pool_blocks, scrapes, breaches_found, departed, `breaches.kind`, `breaches.at`, `breaches.scraped_at`, `breaches.found`,
        `breaches.bound`, `groups.group_idx`, `groups.spec_kind`, `groups.gpu`, `groups.kv_bytes_per_token`,
        {", ".join(f"`groups.{name}`" for name in _GROUP)},
        {", ".join(f"`groups.{name}_{part}`" for name in _HISTOGRAMS for part in ("buckets", "counts"))}
    )
    WITH
        {rank_columns(f"intDiv(n % {per_hour}, {WINDOWS_PER_HOUR})")},
        toInt64({fleet.day_s(day)} + intDiv(n, {per_hour}) * 3600 + (n % {WINDOWS_PER_HOUR}) * {WINDOW_S}) AS t,
        cityHash64(r, t) AS h,
        cityHash64(h) AS h2,
        -- Busy by day, quiet by night, and ranks differ.
        busy * (0.35 + 0.3 * (1 + sin((t % 86400) / 86400 * 2 * pi() - inst % 7))) * (0.6 + (h % 1024) / 1280) AS load,
        h % 100 = 99 AND busy < 0.5 AS quiet,
        if(quiet, 0, toInt64(load * 8000)) AS stored,
        if(quiet, 0, greatest(0, stored - toInt64(bitAnd(h2, 63)) + 31)) AS evicted,
        t % 86400 = (inst * 613) % 86400 - (inst * 613) % 10 AS flushed,
        r % 10 = 0 AND t - ({fleet.start_s + fleet.days * 51_840} + (r % 1000) * 37) BETWEEN 0 AND 600 AS reborn,
        if(flushed, 20000 + toInt64(h % 5000), 0) AS cleared,
        intDiv(stored * toInt64(5 + bitAnd(bitShiftRight(h2, 8), 31)), 100) AS again,
        if((t - (inst * 613) % 86400) % 86400 BETWEEN 0 AND 300, intDiv(stored, 5), 0) AS again_cleared,
        if(reborn, intDiv(stored, 3), 0) AS again_restarted,
        if(reuse = 'none', intDiv(stored * toInt64(bitAnd(bitShiftRight(h2, 16), 3)), 100), 0) AS concurrent,
        toInt64(30000 + (r % 7) * 2500) AS pool,
        pool - 40 - toInt64(bitAnd(bitShiftRight(h2, 24), 255)) AS resident,
        h2 % 5000 = 0 AS lossy,
        h2 % 120 = 1 OR quiet OR lossy AS partial,
        h % 20011 = 0 AND r % 25 = 0 AS breached,
        {_histogram("lifetime", "evicted", "74 + (inst % 9)", 12)},
        {_histogram("back_evicted", "again", "80 + (inst % 11)", 10)},
        {_histogram("back_cleared", "again_cleared", "78", 6)},
        {_histogram("back_restarted", "again_restarted", "100", 6)},
        arrayFilter(x -> x != '', [if(partial, 'coverage', ''), if(lossy, 'lost', ''), if(reuse = 'unlabelled', 'unlabelled', ''),
            if(connector IS NOT NULL, 'kv_connector', ''), if(reborn, 'restarted', ''), if(breached, 'cached_over_pool', '')]) AS said
    SELECT
        instance_name, rank_number, {life_id(fleet, "t")}, fromUnixTimestamp64Micro(t * 1000000, 'UTC'), {WINDOW_S * 1_000_000},
        {_SEMANTICS}, {_FINAL} + intDiv(t, {WINDOW_S}) * 400 + h % 50 + late, true, workload_name, model_name, reuse,
        'per_copy', connector, 1, '5f1d0c77a1b2c3d4', if(partial, toInt64(h2 % 9000000), {WINDOW_S * 1_000_000}) + late * 1000,
        if(quiet, NULL, fromUnixTimestamp64Micro(t * 1000000 + toInt64(h % 90000), 'UTC')),
        if(quiet, NULL, fromUnixTimestamp64Micro(t * 1000000 + 9900000 + toInt64(h2 % 99000), 'UTC')),
        if(quiet, 0, 80 + toInt64(load * 250)), if(h % 3001 = 0, 2, 0), if(lossy, toInt64(1 + h2 % 40), 0), 0, 0,
        if(h % 97 = 0, 2, 0), false, said, if(empty(arrayFilter(x -> x != 'restarted', said)), 'exact', 'lower_bound'),
        toFloat64(rate), 'declared', toFloat64(gpus), if(r % 25 = 0, pool, NULL), if(r % 25 = 0, 1, 0), if(breached, 1, 0), false,
        if(breached, ['cached_over_pool'], []), if(breached, [fromUnixTimestamp64Micro(t * 1000000 + 5000000, 'UTC')], []),
        if(breached, [fromUnixTimestamp64Milli(t * 1000 + 5150, 'UTC')], []), if(breached, [pool + 17], []), if(breached, [pool], []),
        if(hybrid, [0, 1], [0]),
        if(hybrid, ['full_attention', 'sliding_window'], [if(inst % 3 = 0, NULL, 'full_attention')]),
        if(hybrid, [true, true], [true]),
        if(hybrid, [kv_bytes, intDiv(kv_bytes, 4)], [if(inst % 9 = 8, NULL, kv_bytes)]),
{groups},
        {histograms("lifetime")},
        {histograms("back_evicted")},
        {histograms("back_cleared")},
        {histograms("back_restarted")}
    FROM ({source})
    """
