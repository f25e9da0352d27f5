-- Windows rolled up to 5 minutes, 1 hour and 1 day, so that two weeks of a large fleet answer at once.
--
-- A materialized view of the windows would add up what it is given, and a window is given again whenever it changes. So an insert only notes
-- which windows of 5 minutes it touched (noting twice is harmless), and kvcensus counts those anew from the windows as they stand: the worker
-- beside its inserts, or `kvcensus rollup`. What it writes replaces what was counted before, under the time of the counting as version.

CREATE TABLE IF NOT EXISTS rank_rollups
(
    `grain` LowCardinality(String) COMMENT '5m, 1h or 1d; never sum two grains',
    `window_start` DateTime('UTC') CODEC(Delta, ZSTD(1)),
    `window_us` Int64 COMMENT 'length in microseconds' CODEC(ZSTD(1)),
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `part` UInt16 COMMENT 'what must not be added up is kept apart: number of the part within the rank''s window' CODEC(ZSTD(1)),
    `version` UInt64 COMMENT 'when it was counted, microseconds of this server''s clock; replaces lower ones' CODEC(Delta, ZSTD(1)),
    `is_deleted` UInt8 COMMENT 'such a part there was, and is no more' CODEC(ZSTD(1)),
    `life_id` LowCardinality(String) COMMENT 'one process life of the engine; empty: the rank was absent',
    `semantics_version` Int32 COMMENT 'version of the counting rules; never sum across two. Where the rank was absent, here and below: as in the row before' CODEC(ZSTD(1)),
    `workload` LowCardinality(Nullable(String)) COMMENT 'declared; NULL: undeclared',
    `model` LowCardinality(Nullable(String)) COMMENT 'declared; NULL: undeclared',
    `reuse_reporting` LowCardinality(String),
    `removals` LowCardinality(String),
    `kv_connector` LowCardinality(Nullable(String)) COMMENT 'not NULL: repeat compute of this rank is not measurable',
    `key_epoch` Int64 COMMENT 'never sum across two' CODEC(ZSTD(1)),
    `canary` LowCardinality(String),
    `windows` UInt64 COMMENT 'rows of rank_windows that reach into each of its 5 minutes, added up; 0: the rank was absent' CODEC(ZSTD(1)),
    `is_final` Bool COMMENT 'false: it holds a window that is open' CODEC(ZSTD(1)),
    `expected_us` Int64 COMMENT 'time in which the rank was expected to be heard of, up to expected_until; coverage = observed_us / expected_us' CODEC(ZSTD(1)),
    `expected_until` DateTime64(6, 'UTC') CODEC(ZSTD(1)),
    `observed_us` Int64 COMMENT 'part of it demonstrably observed, microseconds' CODEC(ZSTD(1)),
    `first_window` DateTime64(6, 'UTC') COMMENT 'start of its first row of rank_windows' CODEC(ZSTD(1)),
    `last_window` DateTime64(6, 'UTC') COMMENT 'start of its last row of rank_windows' CODEC(ZSTD(1)),
    `first_batch` Nullable(DateTime64(6, 'UTC')) CODEC(ZSTD(1)),
    `last_batch` Nullable(DateTime64(6, 'UTC')) CODEC(ZSTD(1)),
    `batches` Int64 CODEC(ZSTD(1)),
    `duplicate_batches` Int64 CODEC(ZSTD(1)),
    `lost_batches` Int64 CODEC(ZSTD(1)),
    `refused_batches` Int64 CODEC(ZSTD(1)),
    `unknown_events` Int64 CODEC(ZSTD(1)),
    `unresolved_blocks` Int64 CODEC(ZSTD(1)),
    `scrapes` Int64 CODEC(ZSTD(1)),
    `breaches_found` Int64 COMMENT 'contradictions with the engine''s metrics' CODEC(ZSTD(1)),
    `warmup` Bool CODEC(ZSTD(1)),
    `reasons` Array(LowCardinality(String)) COMMENT 'of any of its windows' CODEC(ZSTD(1)),
    `register` LowCardinality(String) COMMENT 'the weakest of its windows',
    `prefill_rate` Nullable(Float64) COMMENT 'the one in force last' CODEC(ZSTD(1)),
    `prefill_rate_source` LowCardinality(Nullable(String)),
    `gpus_per_rank` Nullable(Float64) CODEC(ZSTD(1)),
    `pool_blocks` Nullable(Int64) CODEC(ZSTD(1)),
    `departed` Bool COMMENT 'as of its last window' CODEC(ZSTD(1)),
    -- One element per cache group, as in rank_windows; states are those at the end. Buckets ascend, and numbers use few of their 64 bits.
    `groups.group_idx` Array(Int32) CODEC(ZSTD(1)),
    `groups.stored_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.stored_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.resolved_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.evicted_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.evicted_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.cleared_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.cleared_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.restarted_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.restarted_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.unjoined_evicts` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.reloaded_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.reloaded_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_evicted_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_evicted_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_cleared_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_cleared_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_restarted_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_restarted_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_concurrent_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_concurrent_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_ambiguous_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_ambiguous_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.unreused_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.unreused_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.forgotten_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.unrated_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_evicted_gpu_us` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_cleared_gpu_us` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_restarted_gpu_us` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_concurrent_gpu_us` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.recompute_ambiguous_gpu_us` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.resident_blocks` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.resident_tokens` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.resident_copies` Array(Int64) CODEC(T64, ZSTD(1)),
    `groups.kv_bytes_per_token` Array(Nullable(Int64)) CODEC(ZSTD(1)),
    `groups.lifetime_buckets` Array(Array(Int64)) CODEC(Delta(8), ZSTD(1)),
    `groups.lifetime_counts` Array(Array(Int64)) CODEC(T64, ZSTD(1)),
    `groups.back_evicted_buckets` Array(Array(Int64)) CODEC(Delta(8), ZSTD(1)),
    `groups.back_evicted_counts` Array(Array(Int64)) CODEC(T64, ZSTD(1)),
    `groups.back_cleared_buckets` Array(Array(Int64)) CODEC(Delta(8), ZSTD(1)),
    `groups.back_cleared_counts` Array(Array(Int64)) CODEC(T64, ZSTD(1)),
    `groups.back_restarted_buckets` Array(Array(Int64)) CODEC(Delta(8), ZSTD(1)),
    `groups.back_restarted_counts` Array(Array(Int64)) CODEC(T64, ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version, is_deleted)
PARTITION BY (grain, toYYYYMM(window_start))
ORDER BY (grain, window_start, instance_id, dp_rank, part)
COMMENT 'Windows of each rank rolled up to 5 minutes, 1 hour and 1 day. Read through the views of a grain, as repeat_compute_1h.';

CREATE TABLE IF NOT EXISTS duplicate_rollups
(
    `grain` LowCardinality(String) COMMENT '5m, 1h or 1d; never sum two grains',
    `window_start` DateTime('UTC') CODEC(Delta, ZSTD(1)),
    `window_us` Int64 COMMENT 'length in microseconds' CODEC(ZSTD(1)),
    `scope` LowCardinality(String) COMMENT 'fleet, rank, workload, model or workload_pair; never sum two scopes',
    `scope_key` LowCardinality(String) COMMENT 'as in duplicate_windows',
    `tier` LowCardinality(String) COMMENT 'GPU is the headline; never sum tiers',
    `part` UInt16 COMMENT 'what must not be added up is kept apart: number of the part within the scope''s window' CODEC(ZSTD(1)),
    `version` UInt64 COMMENT 'when it was counted, microseconds of this server''s clock; replaces lower ones' CODEC(Delta, ZSTD(1)),
    `is_deleted` UInt8 COMMENT 'such a part there was, and is no more' CODEC(ZSTD(1)),
    `semantics_version` Int32 COMMENT 'never sum across two' CODEC(ZSTD(1)),
    `key_epoch` Nullable(Int64) COMMENT 'never sum across two; NULL: several at once, or no rank' CODEC(ZSTD(1)),
    `windows` UInt64 COMMENT 'rows of duplicate_windows that reach into each of its 5 minutes, added up' CODEC(ZSTD(1)),
    `is_final` Bool CODEC(ZSTD(1)),
    `complete` Bool COMMENT 'all shards had reported in each of its windows' CODEC(ZSTD(1)),
    `as_of` DateTime64(6, 'UTC') COMMENT 'the newest window''s' CODEC(ZSTD(1)),
    `covered_us` Int64 COMMENT 'time that the sums run over, microseconds' CODEC(ZSTD(1)),
    `expected_ranks` Int32 COMMENT 'of the newest window' CODEC(ZSTD(1)),
    `expected_us` Int64 COMMENT 'expected ranks x time; coverage = observed_us / expected_us' CODEC(ZSTD(1)),
    `observed_us` Int64 COMMENT 'summed over the expected ranks, microseconds' CODEC(ZSTD(1)),
    `ranks` Int32 COMMENT 'of the newest window' CODEC(ZSTD(1)),
    `late_changes` Int64 COMMENT 'up to now; never sum' CODEC(ZSTD(1)),
    `inside_token_us` Int128 CODEC(ZSTD(1)),
    `between_token_us` Int128 CODEC(ZSTD(1)),
    `inside_block_us` Int128 CODEC(ZSTD(1)),
    `between_block_us` Int128 CODEC(ZSTD(1)),
    `inside_byte_ms` Nullable(Int128) CODEC(ZSTD(1)),
    `between_byte_ms` Nullable(Int128) CODEC(ZSTD(1)),
    `extra_tokens_max` Int64 COMMENT 'maximum of inside + between at one instant; never sum or average maxima' CODEC(ZSTD(1)),
    `inside_tokens_max` Int64 CODEC(ZSTD(1)),
    `between_tokens_max` Int64 CODEC(ZSTD(1)),
    `extra_blocks_max` Int64 CODEC(ZSTD(1)),
    `inside_blocks_max` Int64 CODEC(ZSTD(1)),
    `between_blocks_max` Int64 CODEC(ZSTD(1)),
    `extra_bytes_max` Nullable(Int64) CODEC(ZSTD(1)),
    `inside_tokens_end` Int64 COMMENT 'the state at as_of' CODEC(ZSTD(1)),
    `between_tokens_end` Int64 CODEC(ZSTD(1)),
    `inside_blocks_end` Int64 CODEC(ZSTD(1)),
    `between_blocks_end` Int64 CODEC(ZSTD(1)),
    `inside_bytes_end` Nullable(Int64) CODEC(ZSTD(1)),
    `between_bytes_end` Nullable(Int64) CODEC(ZSTD(1)),
    `register` LowCardinality(String) COMMENT 'here and below: the weakest of its windows',
    `inside_register` LowCardinality(String),
    `between_register` LowCardinality(String),
    `reasons` Array(LowCardinality(String)) COMMENT 'of any of its windows' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version, is_deleted)
PARTITION BY (grain, toYYYYMM(window_start))
ORDER BY (grain, scope, tier, window_start, scope_key, part)
COMMENT 'Windows of extra copies rolled up to 5 minutes, 1 hour and 1 day. Read through the views of a grain, as duplicate_footprint_1h.';

CREATE TABLE IF NOT EXISTS rollup_touched
(
    `source` LowCardinality(String) COMMENT 'rank_windows or duplicate_windows',
    `window_start` DateTime('UTC') COMMENT 'of the window of 5 minutes',
    `instance_id` LowCardinality(String) COMMENT 'whose rows; empty: all',
    `touched_at` DateTime64(6, 'UTC') COMMENT 'this server''s clock'
)
ENGINE = ReplacingMergeTree(touched_at)
PARTITION BY toDate(touched_at)
ORDER BY (toStartOfMinute(touched_at), source, window_start, instance_id)
TTL toDateTime(touched_at) + INTERVAL 7 DAY
COMMENT 'Which windows of 5 minutes got rows, and when: what has to be counted anew. Kept 7 days.';

CREATE TABLE IF NOT EXISTS rollup_marks
(
    `name` LowCardinality(String) COMMENT 'counted: everything touched until then was counted once; settled: and once more, when every insert begun before had ended',
    `mark` SimpleAggregateFunction(max, DateTime64(6, 'UTC')) COMMENT 'this server''s clock'
)
ENGINE = AggregatingMergeTree
ORDER BY name
COMMENT 'How far the rollups have come through rollup_touched.';

CREATE TABLE IF NOT EXISTS rollup_spans
(
    `source` LowCardinality(String) COMMENT 'rank_windows or duplicate_windows',
    `window_start` DateTime('UTC') COMMENT 'of the window of 5 minutes in which rows begin',
    `until` SimpleAggregateFunction(max, DateTime64(6, 'UTC')) COMMENT 'where the last of them ends'
)
ENGINE = AggregatingMergeTree
ORDER BY (source, window_start)
COMMENT 'When there was anything at all, and how far back a row may begin that reaches into a window. Filled by rollup_spans_fill and rollup_spans_fill_duplicates.';

CREATE TABLE IF NOT EXISTS fleet_clock
(
    `semantics_version` Int32,
    `newest` SimpleAggregateFunction(max, DateTime64(6, 'UTC')) COMMENT 'engine time of the newest batch of any rank'
)
ENGINE = AggregatingMergeTree
ORDER BY semantics_version
COMMENT 'How far engine time has come. Filled by fleet_clock_fill.';

-- What is touched before this moment is noted below; a second run of this file notes it again.
INSERT INTO rollup_marks SELECT 'settled', now64(6);

CREATE MATERIALIZED VIEW IF NOT EXISTS fleet_clock_fill TO fleet_clock AS
SELECT semantics_version, ifNull(max(last_batch), toDateTime64(0, 6, 'UTC')) AS newest
FROM rank_windows
GROUP BY semantics_version;

CREATE MATERIALIZED VIEW IF NOT EXISTS rollup_spans_fill TO rollup_spans AS
SELECT 'rank_windows' AS source, toDateTime(intDiv(toUnixTimestamp64Micro(rank_windows.window_start), 300000000) * 300, 'UTC') AS window_start, max(window_end) AS until
FROM rank_windows
GROUP BY source, window_start;

CREATE MATERIALIZED VIEW IF NOT EXISTS rollup_spans_fill_duplicates TO rollup_spans AS
SELECT 'duplicate_windows' AS source, toDateTime(intDiv(toUnixTimestamp64Micro(duplicate_windows.window_start), 300000000) * 300, 'UTC') AS window_start, max(window_end) AS until
FROM duplicate_windows
GROUP BY source, window_start;

CREATE MATERIALIZED VIEW IF NOT EXISTS rollup_touched_fill TO rollup_touched AS
SELECT DISTINCT
    'rank_windows' AS source,
    arrayJoin(arrayMap(n -> toDateTime(n * 300, 'UTC'), range(toUInt32(intDiv(toUnixTimestamp64Micro(rank_windows.window_start), 300000000)), toUInt32(intDiv(toUnixTimestamp64Micro(rank_windows.window_start) + window_us - 1, 300000000)) + 1))) AS window_start,
    instance_id,
    now64(6) AS touched_at
FROM rank_windows;

CREATE MATERIALIZED VIEW IF NOT EXISTS rollup_touched_fill_duplicates TO rollup_touched AS
SELECT DISTINCT
    'duplicate_windows' AS source,
    arrayJoin(arrayMap(n -> toDateTime(n * 300, 'UTC'), range(toUInt32(intDiv(toUnixTimestamp64Micro(duplicate_windows.window_start), 300000000)), toUInt32(intDiv(toUnixTimestamp64Micro(duplicate_windows.window_start) + window_us - 1, 300000000)) + 1))) AS window_start,
    '' AS instance_id,
    now64(6) AS touched_at
FROM duplicate_windows;

-- What was there before.
INSERT INTO fleet_clock SELECT semantics_version, ifNull(max(last_batch), toDateTime64(0, 6, 'UTC')) FROM rank_windows GROUP BY semantics_version;

INSERT INTO rollup_spans
SELECT 'rank_windows', toDateTime(intDiv(toUnixTimestamp64Micro(window_start), 300000000) * 300, 'UTC') AS at, max(window_end)
FROM rank_windows
GROUP BY at;

INSERT INTO rollup_spans
SELECT 'duplicate_windows', toDateTime(intDiv(toUnixTimestamp64Micro(window_start), 300000000) * 300, 'UTC') AS at, max(window_end)
FROM duplicate_windows
GROUP BY at;

INSERT INTO rollup_touched
SELECT DISTINCT 'rank_windows', arrayJoin(arrayMap(n -> toDateTime(n * 300, 'UTC'), range(toUInt32(intDiv(toUnixTimestamp64Micro(window_start), 300000000)), toUInt32(intDiv(toUnixTimestamp64Micro(window_start) + window_us - 1, 300000000)) + 1))), instance_id, now64(6)
FROM rank_windows;

INSERT INTO rollup_touched
SELECT DISTINCT 'duplicate_windows', arrayJoin(arrayMap(n -> toDateTime(n * 300, 'UTC'), range(toUInt32(intDiv(toUnixTimestamp64Micro(window_start), 300000000)), toUInt32(intDiv(toUnixTimestamp64Micro(window_start) + window_us - 1, 300000000)) + 1))), '', now64(6)
FROM duplicate_windows;
