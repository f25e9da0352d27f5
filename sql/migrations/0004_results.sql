-- Results that say how they may be read: register and reasons, bytes, GPU time, histograms, pairs of workloads, shared prefixes.
--
-- Rows of earlier versions stay: what they did not tell reads as zero, NULL or empty, and their register as indeterminate.

ALTER TABLE rank_windows
    ADD COLUMN IF NOT EXISTS `register` LowCardinality(String) DEFAULT 'indeterminate'
        COMMENT 'how repeat compute of this row may be read: exact, lower_bound or indeterminate' AFTER `reasons`,
    ADD COLUMN IF NOT EXISTS `prefill_rate` Nullable(Float64)
        COMMENT 'prompt tokens per second by which GPU time was estimated, the one in force last; NULL: not known' CODEC(ZSTD(1)) AFTER `register`,
    ADD COLUMN IF NOT EXISTS `prefill_rate_source` LowCardinality(Nullable(String)) COMMENT 'declared or measured' AFTER `prefill_rate`,
    ADD COLUMN IF NOT EXISTS `gpus_per_rank` Nullable(Float64) CODEC(ZSTD(1)) AFTER `prefill_rate_source`,
    ADD COLUMN IF NOT EXISTS `pool_blocks` Nullable(Int64) COMMENT 'blocks of the engine''s own pool, as its metrics say; NULL: no metrics' CODEC(ZSTD(1)) AFTER `gpus_per_rank`,
    ADD COLUMN IF NOT EXISTS `scrapes` Int64 COMMENT 'pages of the engine''s metrics that the counting was held against' CODEC(ZSTD(1)) AFTER `pool_blocks`,
    ADD COLUMN IF NOT EXISTS `breaches_found` Int64 COMMENT 'contradictions with the engine''s metrics; the first ten are listed' CODEC(ZSTD(1)) AFTER `scrapes`,
    ADD COLUMN IF NOT EXISTS `departed` Bool COMMENT 'the forwarder stopped on purpose: nobody expects to hear of the rank' AFTER `breaches_found`,
    -- One element per contradiction.
    ADD COLUMN IF NOT EXISTS `breaches.kind` Array(LowCardinality(String)) COMMENT 'cached_over_pool or in_use_over_cached' CODEC(ZSTD(1)) AFTER `departed`,
    ADD COLUMN IF NOT EXISTS `breaches.at` Array(DateTime64(6, 'UTC')) CODEC(ZSTD(1)) AFTER `breaches.kind`,
    ADD COLUMN IF NOT EXISTS `breaches.scraped_at` Array(DateTime64(3, 'UTC')) COMMENT 'the forwarder''s clock' CODEC(ZSTD(1)) AFTER `breaches.at`,
    ADD COLUMN IF NOT EXISTS `breaches.found` Array(Int64) COMMENT 'blocks counted as cached (cached_over_pool), or in use by the metrics' CODEC(ZSTD(1)) AFTER `breaches.scraped_at`,
    ADD COLUMN IF NOT EXISTS `breaches.bound` Array(Int64) COMMENT 'the most that could be: the pool, or cached blocks, running requests and a slack' CODEC(ZSTD(1)) AFTER `breaches.found`,
    ADD COLUMN IF NOT EXISTS `groups.resident_copies` Array(Int64) COMMENT 'physical copies in GPU memory at the end of the row' CODEC(ZSTD(1)) AFTER `groups.resident_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.kv_bytes_per_token` Array(Nullable(Int64)) COMMENT 'over all tensor-parallel shards; NULL: not known' CODEC(ZSTD(1)) AFTER `groups.resident_copies`,
    ADD COLUMN IF NOT EXISTS `groups.unreused_blocks` Array(Int64) COMMENT 'evicted without a use that the stream showed; an upper bound, as plain cache hits leave no trace' CODEC(ZSTD(1)) AFTER `groups.kv_bytes_per_token`,
    ADD COLUMN IF NOT EXISTS `groups.unreused_tokens` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.unreused_blocks`,
    ADD COLUMN IF NOT EXISTS `groups.forgotten_blocks` Array(Int64) COMMENT 'lost blocks whose history was let go of: their return is not recognised' CODEC(ZSTD(1)) AFTER `groups.unreused_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.unrated_tokens` Array(Int64) COMMENT 'recomputed tokens for which no prefill rate was known: in no gpu_us' CODEC(ZSTD(1)) AFTER `groups.forgotten_blocks`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_evicted_gpu_us` Array(Int64) COMMENT 'GPU microseconds, an estimate' CODEC(ZSTD(1)) AFTER `groups.unrated_tokens`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_cleared_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_evicted_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_restarted_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_cleared_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_concurrent_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_restarted_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.recompute_ambiguous_gpu_us` Array(Int64) CODEC(ZSTD(1)) AFTER `groups.recompute_concurrent_gpu_us`,
    -- Histograms, mergeable by adding counts bucket by bucket (sumMap). View return_times says where a bucket lies.
    ADD COLUMN IF NOT EXISTS `groups.lifetime_buckets` Array(Array(Int64)) COMMENT 'how long evicted residencies had lasted: buckets that hold any' CODEC(ZSTD(1)) AFTER `groups.recompute_ambiguous_gpu_us`,
    ADD COLUMN IF NOT EXISTS `groups.lifetime_counts` Array(Array(Int64)) COMMENT 'residencies in each of those buckets' CODEC(ZSTD(1)) AFTER `groups.lifetime_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_evicted_buckets` Array(Array(Int64)) COMMENT 'how long evicted content was away before it was stored again' CODEC(ZSTD(1)) AFTER `groups.lifetime_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_evicted_counts` Array(Array(Int64)) COMMENT 'blocks in each of those buckets' CODEC(ZSTD(1)) AFTER `groups.back_evicted_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_cleared_buckets` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_evicted_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_cleared_counts` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_cleared_buckets`,
    ADD COLUMN IF NOT EXISTS `groups.back_restarted_buckets` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_cleared_counts`,
    ADD COLUMN IF NOT EXISTS `groups.back_restarted_counts` Array(Array(Int64)) CODEC(ZSTD(1)) AFTER `groups.back_restarted_buckets`,
    COMMENT COLUMN `kv_connector` 'declared, or "seen in metrics"; not NULL: repeat compute of this rank is not measurable',
    COMMENT COLUMN `reasons` 'why the row is less than exact, beside coverage';

ALTER TABLE recomputes
    ADD COLUMN IF NOT EXISTS `parent_content_id` Nullable(FixedString(16)) COMMENT 'content of the block before; NULL: a root, or not known' AFTER `content_id`,
    ADD COLUMN IF NOT EXISTS `parent_block_id` Nullable(FixedString(16)) COMMENT 'block_id of the block before; NULL: a root, or not known' AFTER `parent_content_id`,
    ADD COLUMN IF NOT EXISTS `gpu_us` Nullable(Int64) COMMENT 'GPU microseconds, an estimate; NULL: no prefill rate was known' CODEC(ZSTD(1)) AFTER `elapsed_us`;

ALTER TABLE duplicate_windows
    ADD COLUMN IF NOT EXISTS `expected_ranks` Int32 COMMENT 'ranks heard of that had not departed: coverage = observed_us / (expected_ranks x (as_of - window_start))' CODEC(ZSTD(1)) AFTER `between_blocks_end`,
    ADD COLUMN IF NOT EXISTS `observed_us` Int64 COMMENT 'demonstrably observed, summed over the expected ranks, microseconds' CODEC(ZSTD(1)) AFTER `expected_ranks`,
    ADD COLUMN IF NOT EXISTS `register` LowCardinality(String) DEFAULT 'indeterminate'
        COMMENT 'how the row may be read: exact, lower_bound or indeterminate; the weaker of the next two' AFTER `observed_us`,
    ADD COLUMN IF NOT EXISTS `inside_register` LowCardinality(String) DEFAULT 'indeterminate' AFTER `register`,
    ADD COLUMN IF NOT EXISTS `between_register` LowCardinality(String) DEFAULT 'indeterminate' AFTER `inside_register`,
    ADD COLUMN IF NOT EXISTS `reasons` Array(LowCardinality(String)) COMMENT 'why the row is less than exact' AFTER `between_register`,
    ADD COLUMN IF NOT EXISTS `late_changes` Int64 COMMENT 'changes so late that they count at a later time than their own, up to now; never sum' CODEC(ZSTD(1)) AFTER `reasons`,
    ADD COLUMN IF NOT EXISTS `inside_byte_ms` Nullable(Int64) COMMENT 'extra copies inside instances, bytes x milliseconds; NULL, here and below: not known of every rank' CODEC(ZSTD(1)) AFTER `late_changes`,
    ADD COLUMN IF NOT EXISTS `between_byte_ms` Nullable(Int64) CODEC(ZSTD(1)) AFTER `inside_byte_ms`,
    ADD COLUMN IF NOT EXISTS `extra_bytes_max` Nullable(Int64) CODEC(ZSTD(1)) AFTER `between_byte_ms`,
    ADD COLUMN IF NOT EXISTS `inside_bytes_end` Nullable(Int64) CODEC(ZSTD(1)) AFTER `extra_bytes_max`,
    ADD COLUMN IF NOT EXISTS `between_bytes_end` Nullable(Int64) CODEC(ZSTD(1)) AFTER `inside_bytes_end`,
    COMMENT COLUMN `scope` 'fleet, rank, workload, model or workload_pair; never sum two scopes',
    COMMENT COLUMN `scope_key` 'which rank (INSTANCE/R), workload or model; empty for the fleet and for undeclared; of a workload_pair, a JSON list of two workloads, whose between_* is content that ranks of both hold, once';

ALTER TABLE rank_events
    ADD COLUMN IF NOT EXISTS `kv_bytes_by_group` Map(LowCardinality(String), Int64) COMMENT 'bytes per token of each cache group, where they differ' AFTER `max_payload_bytes`,
    COMMENT COLUMN `kind` 'holder_reset, loss, refusal, declaration, identity_refused or departure';

CREATE TABLE IF NOT EXISTS shared_prefixes
(
    `as_of` DateTime64(6, 'UTC') COMMENT 'the instant whose holders these are' CODEC(DoubleDelta, ZSTD(1)),
    `semantics_version` Int32 COMMENT 'version of the counting rules',
    `version` UInt64 COMMENT 'a row replaces those of the same key with a lower version' CODEC(ZSTD(1)),
    `place` Int32 COMMENT '1 has the most extra tokens',
    `content_id` FixedString(16) COMMENT 'its last block',
    `head_content_id` FixedString(16) COMMENT 'its first block',
    `parent_content_id` Nullable(FixedString(16)) COMMENT 'what lies before it; NULL: it begins at a root',
    `blocks` Int64 CODEC(ZSTD(1)),
    `tokens` Int64 COMMENT 'length of the trunk' CODEC(ZSTD(1)),
    `depth_tokens` Nullable(Int64) COMMENT 'from the root to its end; NULL: not known all the way' CODEC(ZSTD(1)),
    `copies` Int64 COMMENT 'ranks that hold it' CODEC(ZSTD(1)),
    `instances` Int64 CODEC(ZSTD(1)),
    `extra_blocks` Int64 COMMENT 'blocks x (copies - 1)' CODEC(ZSTD(1)),
    `extra_tokens` Int64 COMMENT 'tokens x (copies - 1)' CODEC(ZSTD(1)),
    `extra_bytes` Nullable(Int64) COMMENT 'NULL: not known of every rank' CODEC(ZSTD(1)),
    `ranks` Array(LowCardinality(String)) COMMENT 'those that hold it, as INSTANCE/R',
    `workloads` Array(LowCardinality(String)) COMMENT 'of those ranks; empty text: undeclared',
    `models` Array(LowCardinality(String)) COMMENT 'of those ranks; empty text: undeclared',
    `first_seen` DateTime64(6, 'UTC') COMMENT 'when any rank was first seen to hold its last block' CODEC(ZSTD(1)),
    `coverage` Float64 COMMENT 'of the fleet, in the window that ends at as_of' CODEC(ZSTD(1)),
    `register` LowCardinality(String) COMMENT 'exact, lower_bound or indeterminate',
    `reasons` Array(LowCardinality(String)) COMMENT 'why it is less than exact',
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(as_of)
ORDER BY (toStartOfHour(as_of), toUnixTimestamp64Micro(as_of), place, semantics_version)
COMMENT 'Which prefixes lie on several ranks at once? The longest chains of content with the same holders, by extra tokens, per instant. Never sum over instants.';

CREATE TABLE IF NOT EXISTS dead_letters
(
    `topic` LowCardinality(String) COMMENT 'where the message stood: topic, partition and offset',
    `partition` Int32,
    `offset` Int64 CODEC(ZSTD(1)),
    `reader` LowCardinality(String) COMMENT 'what could not use it: an agent, or sink',
    `reason` String CODEC(ZSTD(1)),
    `key` Nullable(String) CODEC(ZSTD(1)),
    `payload` String COMMENT 'its bytes, cut to 256 KiB' CODEC(ZSTD(1)),
    `payload_bytes` Int64 COMMENT 'its whole length' CODEC(ZSTD(1)),
    `inserted_at` DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(inserted_at)
ORDER BY (topic, partition, offset)
TTL inserted_at + INTERVAL 90 DAY
COMMENT 'Messages that could not be read or counted and were set aside, with their place and bytes. Kept 90 days from insertion.';

CREATE TABLE IF NOT EXISTS known_ranks
(
    `instance_id` LowCardinality(String),
    `dp_rank` Int32,
    `first_window` SimpleAggregateFunction(min, DateTime64(6, 'UTC')) COMMENT 'start of the first window of the rank'
)
ENGINE = AggregatingMergeTree
ORDER BY (instance_id, dp_rank)
COMMENT 'Which ranks have ever been counted, and since when? Who is silent in a span is looked up here. Filled by known_ranks_fill.';

CREATE MATERIALIZED VIEW IF NOT EXISTS known_ranks_fill TO known_ranks AS
SELECT instance_id, dp_rank, min(window_start) AS first_window
FROM rank_windows
GROUP BY instance_id, dp_rank;

INSERT INTO known_ranks SELECT instance_id, dp_rank, min(window_start) FROM rank_windows GROUP BY instance_id, dp_rank;

-- Views for people. Each comment says the question, the unit and how the figure may be read.

CREATE OR REPLACE VIEW rank_window_groups AS
SELECT
    instance_id, dp_rank, life_id, window_start, window_us, window_end, semantics_version, version, is_final, workload, model,
    observed_us / window_us AS coverage, register, reasons,
    group_idx, spec_kind, gpu, stored_blocks, stored_tokens, resolved_tokens, evicted_blocks, evicted_tokens, cleared_blocks,
    cleared_tokens, restarted_blocks, restarted_tokens, unjoined_evicts, reloaded_blocks, reloaded_tokens,
    recompute_evicted_blocks, recompute_evicted_tokens, recompute_cleared_blocks, recompute_cleared_tokens,
    recompute_restarted_blocks, recompute_restarted_tokens, recompute_concurrent_blocks, recompute_concurrent_tokens,
    recompute_ambiguous_blocks, recompute_ambiguous_tokens, recompute_evicted_gpu_us, recompute_cleared_gpu_us,
    recompute_restarted_gpu_us, recompute_concurrent_gpu_us, recompute_ambiguous_gpu_us, unrated_tokens, unreused_blocks,
    unreused_tokens, forgotten_blocks, resident_blocks, resident_tokens, resident_copies, kv_bytes_per_token,
    resident_tokens * kv_bytes_per_token AS resident_bytes
FROM rank_windows FINAL
ARRAY JOIN
    `groups.group_idx` AS group_idx,
    `groups.spec_kind` AS spec_kind,
    `groups.gpu` AS gpu,
    `groups.stored_blocks` AS stored_blocks,
    `groups.stored_tokens` AS stored_tokens,
    `groups.resolved_tokens` AS resolved_tokens,
    `groups.evicted_blocks` AS evicted_blocks,
    `groups.evicted_tokens` AS evicted_tokens,
    `groups.cleared_blocks` AS cleared_blocks,
    `groups.cleared_tokens` AS cleared_tokens,
    `groups.restarted_blocks` AS restarted_blocks,
    `groups.restarted_tokens` AS restarted_tokens,
    `groups.unjoined_evicts` AS unjoined_evicts,
    `groups.reloaded_blocks` AS reloaded_blocks,
    `groups.reloaded_tokens` AS reloaded_tokens,
    `groups.recompute_evicted_blocks` AS recompute_evicted_blocks,
    `groups.recompute_evicted_tokens` AS recompute_evicted_tokens,
    `groups.recompute_cleared_blocks` AS recompute_cleared_blocks,
    `groups.recompute_cleared_tokens` AS recompute_cleared_tokens,
    `groups.recompute_restarted_blocks` AS recompute_restarted_blocks,
    `groups.recompute_restarted_tokens` AS recompute_restarted_tokens,
    `groups.recompute_concurrent_blocks` AS recompute_concurrent_blocks,
    `groups.recompute_concurrent_tokens` AS recompute_concurrent_tokens,
    `groups.recompute_ambiguous_blocks` AS recompute_ambiguous_blocks,
    `groups.recompute_ambiguous_tokens` AS recompute_ambiguous_tokens,
    `groups.recompute_evicted_gpu_us` AS recompute_evicted_gpu_us,
    `groups.recompute_cleared_gpu_us` AS recompute_cleared_gpu_us,
    `groups.recompute_restarted_gpu_us` AS recompute_restarted_gpu_us,
    `groups.recompute_concurrent_gpu_us` AS recompute_concurrent_gpu_us,
    `groups.recompute_ambiguous_gpu_us` AS recompute_ambiguous_gpu_us,
    `groups.unrated_tokens` AS unrated_tokens,
    `groups.unreused_blocks` AS unreused_blocks,
    `groups.unreused_tokens` AS unreused_tokens,
    `groups.forgotten_blocks` AS forgotten_blocks,
    `groups.resident_blocks` AS resident_blocks,
    `groups.resident_tokens` AS resident_tokens,
    `groups.resident_copies` AS resident_copies,
    `groups.kv_bytes_per_token` AS kv_bytes_per_token
COMMENT 'Which cache group did what in which window? One row per rank, life, window and group; unit: blocks, tokens, bytes, GPU microseconds. Tokens count once per position: use the primary group only (view repeat_compute).';

CREATE OR REPLACE VIEW repeat_compute AS
WITH
    indexOf(w.`groups.group_idx`, p.primary_group) AS i,
    w.kv_connector IS NULL AS can_measure,
    can_measure AND w.reuse_reporting != 'unlabelled' AS can_tell
SELECT
    w.instance_id AS instance_id,
    w.dp_rank AS dp_rank,
    w.life_id AS life_id,
    w.window_start AS window_start,
    w.window_us AS window_us,
    w.workload AS workload,
    w.model AS model,
    w.semantics_version AS semantics_version,
    w.key_epoch AS key_epoch,
    w.is_final AS is_final,
    w.observed_us / w.window_us AS coverage,
    w.register AS register,
    w.reasons AS reasons,
    can_measure AS measurable,
    if(can_measure, w.`groups.recompute_evicted_tokens`[i], NULL) AS evicted_tokens,
    if(can_measure, w.`groups.recompute_evicted_blocks`[i], NULL) AS evicted_blocks,
    if(can_measure, w.`groups.recompute_cleared_tokens`[i], NULL) AS cleared_tokens,
    if(can_measure, w.`groups.recompute_cleared_blocks`[i], NULL) AS cleared_blocks,
    if(can_measure, w.`groups.recompute_restarted_tokens`[i], NULL) AS restarted_tokens,
    if(can_measure, w.`groups.recompute_restarted_blocks`[i], NULL) AS restarted_blocks,
    if(can_tell, w.`groups.recompute_concurrent_tokens`[i], NULL) AS concurrent_tokens,
    if(can_tell, w.`groups.recompute_concurrent_blocks`[i], NULL) AS concurrent_blocks,
    if(can_measure, w.`groups.recompute_ambiguous_tokens`[i], NULL) AS ambiguous_reload_tokens,
    if(can_measure, w.`groups.recompute_ambiguous_blocks`[i], NULL) AS ambiguous_reload_blocks,
    -- GPU time is known where a rate was: zero where nothing was computed again, NULL where it was and there was none.
    if(can_measure AND (w.`groups.recompute_evicted_gpu_us`[i] > 0 OR w.`groups.recompute_evicted_tokens`[i] = 0), w.`groups.recompute_evicted_gpu_us`[i] / 1e6, NULL) AS evicted_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_cleared_gpu_us`[i] > 0 OR w.`groups.recompute_cleared_tokens`[i] = 0), w.`groups.recompute_cleared_gpu_us`[i] / 1e6, NULL) AS cleared_gpu_seconds,
    if(can_measure AND (w.`groups.recompute_restarted_gpu_us`[i] > 0 OR w.`groups.recompute_restarted_tokens`[i] = 0), w.`groups.recompute_restarted_gpu_us`[i] / 1e6, NULL) AS restarted_gpu_seconds,
    if(can_tell AND (w.`groups.recompute_concurrent_gpu_us`[i] > 0 OR w.`groups.recompute_concurrent_tokens`[i] = 0), w.`groups.recompute_concurrent_gpu_us`[i] / 1e6, NULL) AS concurrent_gpu_seconds,
    if(can_measure, w.`groups.unrated_tokens`[i], NULL) AS unrated_tokens,
    w.prefill_rate AS prefill_rate,
    w.prefill_rate_source AS prefill_rate_source,
    w.gpus_per_rank AS gpus_per_rank,
    if(w.reuse_reporting != 'unlabelled', w.`groups.stored_tokens`[i], NULL) AS stored_tokens,
    w.`groups.evicted_tokens`[i] AS removed_tokens,
    w.`groups.unreused_tokens`[i] AS unreused_tokens,
    w.`groups.resident_tokens`[i] AS resident_tokens
FROM (SELECT * FROM rank_windows FINAL) AS w
LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
COMMENT 'What was computed again, by cause? One row per rank, life and window, from the primary group; unit: tokens, blocks and seconds of GPU time (an estimate), as coverage and register say. The causes are never added together. NULL: cannot be told for this rank.';

CREATE OR REPLACE VIEW duplicate_footprint AS
SELECT
    scope,
    nullIf(scope_key, '') AS scope_key,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    is_final,
    shards_reported >= shards AS complete,
    toUnixTimestamp64Micro(as_of) - toUnixTimestamp64Micro(window_start) AS covered_us,
    if(covered_us > 0 AND expected_ranks > 0, observed_us / (expected_ranks * covered_us), 0) AS coverage,
    register,
    inside_register,
    between_register,
    reasons,
    if(covered_us > 0, (toInt128(inside_token_us) + between_token_us) / covered_us, 0) AS extra_tokens_mean,
    if(covered_us > 0, inside_token_us / covered_us, 0) AS inside_tokens_mean,
    if(covered_us > 0, between_token_us / covered_us, 0) AS between_tokens_mean,
    extra_tokens_max,
    inside_tokens_end + between_tokens_end AS extra_tokens_end,
    if(covered_us > 0, (toInt128(inside_block_us) + between_block_us) / covered_us, 0) AS extra_blocks_mean,
    extra_blocks_max,
    inside_blocks_end + between_blocks_end AS extra_blocks_end,
    if(covered_us > 0, (toInt128(inside_byte_ms) + between_byte_ms) * 1000 / covered_us, 0) AS extra_bytes_mean,
    extra_bytes_max,
    inside_bytes_end + between_bytes_end AS extra_bytes_end,
    late_changes
FROM duplicate_windows FINAL
WHERE scope != 'workload_pair'
COMMENT 'How much KV cache holds content that another rank holds too? One row per scope, tier and window; unit: extra copies in tokens, blocks and bytes (NULL: size not known of every rank), means weighted by time, as coverage and register say. Filter on one scope and one tier.';

CREATE OR REPLACE VIEW workload_pairs AS
SELECT
    nullIf(JSONExtractString(scope_key, 1), '') AS workload_a,
    nullIf(JSONExtractString(scope_key, 2), '') AS workload_b,
    tier,
    window_start,
    window_us,
    as_of,
    semantics_version,
    is_final,
    toUnixTimestamp64Micro(as_of) - toUnixTimestamp64Micro(window_start) AS covered_us,
    if(covered_us > 0 AND expected_ranks > 0, observed_us / (expected_ranks * covered_us), 0) AS coverage,
    register,
    reasons,
    if(covered_us > 0, between_token_us / covered_us, 0) AS shared_tokens_mean,
    between_tokens_max AS shared_tokens_max,
    between_tokens_end AS shared_tokens_end,
    if(covered_us > 0, between_block_us / covered_us, 0) AS shared_blocks_mean,
    between_blocks_max AS shared_blocks_max,
    between_blocks_end AS shared_blocks_end
FROM duplicate_windows FINAL
WHERE scope = 'workload_pair'
COMMENT 'Which workloads hold the same content? One row per pair of workloads, tier and window (NULL: undeclared); unit: tokens and blocks that ranks of both hold, counted once, as coverage and register say. Never sum pairs: content of three workloads is in three of them.';

CREATE OR REPLACE VIEW return_times AS
SELECT
    instance_id, dp_rank, life_id, window_start, window_us, workload, model, semantics_version, is_final, coverage, register, reasons,
    what,
    -- Buckets cut each power of two into four.
    if(bucket < 8, bucket, bitShiftLeft(bitAnd(bucket, 3) + 4, greatest(0, bitShiftRight(bucket, 2) - 1))) AS from_us,
    if(bucket < 8, bucket + 1, bitShiftLeft(bitAnd(bucket, 3) + 5, greatest(0, bitShiftRight(bucket, 2) - 1))) AS to_us,
    blocks
FROM
(
    SELECT
        w.instance_id AS instance_id, w.dp_rank AS dp_rank, w.life_id AS life_id, w.window_start AS window_start,
        w.window_us AS window_us, w.workload AS workload, w.model AS model, w.semantics_version AS semantics_version,
        w.is_final AS is_final, w.observed_us / w.window_us AS coverage, w.register AS register, w.reasons AS reasons,
        indexOf(w.`groups.group_idx`, p.primary_group) AS i,
        [
            (CAST('evicted', 'String'), w.`groups.back_evicted_buckets`[i], w.`groups.back_evicted_counts`[i]),
            ('cleared', w.`groups.back_cleared_buckets`[i], w.`groups.back_cleared_counts`[i]),
            ('restarted', w.`groups.back_restarted_buckets`[i], w.`groups.back_restarted_counts`[i]),
            ('lifetime', w.`groups.lifetime_buckets`[i], w.`groups.lifetime_counts`[i])
        ] AS histograms
    FROM (SELECT * FROM rank_windows FINAL) AS w
    LEFT JOIN life_primary_groups AS p USING (instance_id, dp_rank, life_id, semantics_version)
)
ARRAY JOIN
    arrayFlatten(arrayMap(h -> arrayMap(b -> h.1, h.2), histograms)) AS what,
    arrayFlatten(arrayMap(h -> h.2, histograms)) AS bucket,
    arrayFlatten(arrayMap(h -> h.3, histograms)) AS blocks
COMMENT 'How soon does lost content come back, and how long does content last? One row per rank, life, window, what (evicted, cleared, restarted: away for so long before it was stored again; lifetime: resident for so long before it was evicted) and bucket [from_us, to_us); unit: blocks of the primary group. Add blocks over any rows of one what.';

CREATE OR REPLACE VIEW metric_breaches AS
SELECT instance_id, dp_rank, life_id, window_start, semantics_version, kind, at, scraped_at, found, bound, breaches_found, pool_blocks
FROM rank_windows FINAL
ARRAY JOIN
    `breaches.kind` AS kind,
    `breaches.at` AS at,
    `breaches.scraped_at` AS scraped_at,
    `breaches.found` AS found,
    `breaches.bound` AS bound
COMMENT 'Where does what a rank''s events say contradict the engine''s own metrics? One row per contradiction, the first ten of each window (breaches_found: all); unit: blocks. cached_over_pool: found are counted as cached, the pool has bound. in_use_over_cached: found are in use, at most bound are cached or being filled.';
